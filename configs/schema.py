"""Every setting of a run. `ExperimentArgs` is what the rest of the program receives.

Adding a field is one line and its docstring: the annotation is checked by `configs.rules`. Checks
across classes live in `configs.checks`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from configs import checks
from configs.data_schema import (
    BenchmarkDatasetArgs,
    DatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    FeatureArgs,
    RandomDistribution,
)
from configs.datasets import DATASETS, DatasetFacts
from configs.precision_schema import MixedPrecisionArgs
from configs.rules import (
    BelowOne,
    CheckedArgs,
    ConfigError,
    OptionalPath,
    OptionalSize,
    PositiveFloat,
    PositiveInt,
    Range,
    Spellings,
)
from configs.task_schema import RankingArgs, RetrievalArgs
from configs.training_schema import OptimizerArgs, TrainerArgs

__all__ = [
    "BenchmarkDatasetArgs",
    "ConfigError",
    "DatasetArgs",
    "DynamicEmbeddingArgs",
    "EmbeddingArgs",
    "ExperimentArgs",
    "FeatureArgs",
    "MixedPrecisionArgs",
    "NetworkArgs",
    "OptimizerArgs",
    "RandomDistribution",
    "RankingArgs",
    "RetrievalArgs",
    "TensorModelParallelArgs",
    "TrainerArgs",
]


@dataclass(frozen=True, kw_only=True)
class NetworkArgs(CheckedArgs):
    """The HSTU stack and its embeddings."""

    num_layers: PositiveInt
    """HSTU layers."""

    hidden_size: PositiveInt
    """Width of a token between layers; independent of heads and channels."""

    num_attention_heads: PositiveInt
    """Attention heads."""

    kv_channels: PositiveInt
    """Width of q and k per head (attention_dim)."""

    linear_channels: PositiveInt | None = None
    """Width of u and v per head (linear_dim); None = kv_channels."""

    hidden_dropout: BelowOne = 0.2
    """Dropout on each layer's gated output."""

    input_dropout: BelowOne = 0.0
    """Dropout on the token embeddings before the first layer."""

    norm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in every layer norm."""

    is_causal: bool = True
    """A history token sees only itself and earlier ones."""

    dtype_str: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Compute type of the dense part; weights are FP32."""

    kernel_backend: Literal["auto", "cutlass", "triton", "pytorch"] = "auto"
    """Attention kernel. auto = triton (ours) on a GPU, pytorch on a CPU and where triton cannot
    run the model; the pick is logged with each refusal. On a GPU it never emulates FP8 attention
    (MixedPrecisionArgs.auto_filter_attention). A backend that is named (cutlass = FBGEMM's) runs
    or is refused when the model is built."""

    target_group_size: PositiveInt = 1
    """Consecutive candidates that may see each other."""

    attention_window: PositiveInt | None = None
    """Newest tokens a token sees, beside contextual ones and its own group; None = all."""

    use_position_embedding: bool = True
    """Add a learned row by position to every token."""

    num_position_buckets: PositiveInt = 8192
    """Rows of the position table."""

    use_relative_position_bias: bool = False
    """Add a learned bias by distance in tokens to the attention scores."""

    use_time_bias: bool = False
    """Add a learned bias by distance in time to the attention scores."""

    num_time_buckets: Annotated[int, Range(low=1, high=1024)] = 128
    """Rows of the time bias table; 146 tell all 64-bit times apart."""

    recompute_input_layernorm: bool = False
    """Compute the input norm again in backward instead of keeping it."""

    recompute_input_silu: bool = False
    """Compute SiLU of uvqk again in backward instead of keeping it."""

    item_embedding_dim: OptionalSize = None
    """Width of item and action tables, projected to hidden_size; None (also written -1) =
    hidden_size."""

    contextual_embedding_dim: OptionalSize = None
    """The same for contextual tables."""

    scaling_seqlen: Annotated[
        PositiveInt | Literal["batch"] | None, Spellings(((-1, "batch"),))
    ] = None
    """Divisor of the attention weights; None = max_seq_len of the config. "batch" (also written
    -1) = the batch's longest user, so a score then depends on who else is in the batch."""

    embedding_init_std: PositiveFloat = 0.02
    """Standard deviation of the rows of every table at the start."""

    embedding_backend: OptionalPath = None
    """Read by servers of such models; training does not use it."""

    disable_contextual_mask: bool | None = None
    """Contextual tokens are causal instead of seeing the whole history; None = decided by the
    leak rule, see ExperimentArgs.resolved_disable_contextual_mask."""

    @property
    def attention_dim(self) -> int:
        """Width of q and k per head."""
        return self.kv_channels

    @property
    def linear_dim(self) -> int:
        """Width of u and v per head."""
        return self.linear_channels or self.kv_channels


@dataclass(frozen=True, kw_only=True)
class TensorModelParallelArgs(CheckedArgs):
    """Splitting one model over devices."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that share one model."""

    sequence_parallel: bool = False
    """Split tokens over those devices outside the linears, too."""


@dataclass(frozen=True, kw_only=True)
class ExperimentArgs:
    """One run, checked as a whole: it holds exactly one of ranking and retrieval.

    Raises ConfigError (a ValueError) for combinations that cannot work.
    """

    trainer: TrainerArgs
    dataset: DatasetArgs | BenchmarkDatasetArgs
    network: NetworkArgs
    optimizer: OptimizerArgs
    parallel: TensorModelParallelArgs = field(default_factory=TensorModelParallelArgs)
    precision: MixedPrecisionArgs = field(default_factory=MixedPrecisionArgs)
    ranking: RankingArgs | None = None
    retrieval: RetrievalArgs | None = None

    name: str = field(default="experiment", compare=False)
    """Stem of the gin file."""

    def __post_init__(self) -> None:
        checks.check_experiment(self)

    @property
    def task(self) -> Literal["ranking", "retrieval"]:
        """What is trained."""
        return "ranking" if self.ranking is not None else "retrieval"

    @property
    def output_dir(self) -> str:
        """Folder asked for; the trainer appends -2, -3, ... to a used one."""
        return self.trainer.output_dir or f"runs/{self.name}"

    @property
    def facts(self) -> DatasetFacts | None:
        """Fixed facts of a real data set; None for a synthetic one."""
        if isinstance(self.dataset, BenchmarkDatasetArgs):
            return None
        return DATASETS[self.dataset.dataset_name]

    @property
    def item_feature_name(self) -> str:
        """Feature with the item ids."""
        source = self.facts or self.dataset
        assert not isinstance(source, DatasetArgs)
        return source.item_feature_name

    @property
    def action_feature_name(self) -> str | None:
        """Feature with the actions of history events; None = items only."""
        if isinstance(self.dataset, BenchmarkDatasetArgs):
            return self.dataset.action_feature_name
        facts = DATASETS[self.dataset.dataset_name]
        return facts.action_feature_name if self.dataset.use_actions else None

    @property
    def contextual_feature_names(self) -> tuple[str, ...]:
        """Features with one id per user, in the order of their tokens."""
        asked = self.dataset.contextual_feature_names
        if isinstance(self.dataset, BenchmarkDatasetArgs) or asked is not None:
            return asked or ()
        return DATASETS[self.dataset.dataset_name].contextual_feature_names

    @property
    def num_contextuals(self) -> int:
        """Contextual tokens per user."""
        return len(self.contextual_feature_names)

    @property
    def max_num_candidates(self) -> int:
        """Most candidate tokens per user."""
        return self.dataset.max_num_candidates

    @property
    def max_history_events(self) -> int:
        """Most history events per user, candidates not counted.

        Synthetic data counts candidates in FeatureArgs.max_sequence_length, so they come off.
        """
        if isinstance(self.dataset, DatasetArgs):
            return self.dataset.max_history_seqlen
        group = checks.group_of(self.dataset, self.dataset.item_feature_name)
        return group.max_sequence_length - self.dataset.max_num_candidates

    @property
    def max_seq_len(self) -> int:
        """Most tokens per user: contextual + 2 * history (1 * without actions) + candidates.

        leave_one_out and retrieval hold out an event that is a candidate in evaluation, also when
        training has none.
        """
        tokens_per_event = 1 if self.action_feature_name is None else 2
        history = tokens_per_event * self.max_history_events
        held_out = 1 if self.split == "leave_one_out" or self.retrieval is not None else 0
        candidates = max(self.max_num_candidates, held_out)
        if self.split == "leave_one_out" and self.retrieval is not None:
            candidates = 1
        return self.num_contextuals + history + candidates

    @property
    def resolved_scaling_seqlen(self) -> int | None:
        """Divisor of the attention weights; None = the longest user of each batch."""
        if self.network.scaling_seqlen == "batch":
            return None
        return self.network.scaling_seqlen or self.max_seq_len

    @property
    def history_loss(self) -> bool:
        """History positions are supervised."""
        asked = self.dataset.history_loss if isinstance(self.dataset, DatasetArgs) else None
        if self.retrieval is not None:
            return True
        return self.max_num_candidates == 0 if asked is None else asked

    @property
    def split(self) -> Literal["temporal", "leave_one_out", "by_user"]:
        """How events are held out (synthetic data draws its folds apart and ignores this)."""
        asked = self.dataset.split if isinstance(self.dataset, DatasetArgs) else None
        if asked is not None:
            return asked
        if self.max_num_candidates > 0:
            return "temporal"
        return "by_user" if self.ranking is not None else "leave_one_out"

    @property
    def resolved_disable_contextual_mask(self) -> bool:
        """Contextual tokens are causal; see disable_contextual_mask_reason."""
        return checks.resolve_contextual_mask(self)[0]

    @property
    def disable_contextual_mask_reason(self) -> str:
        """Why, for the log."""
        return checks.resolve_contextual_mask(self)[1]

    @property
    def loss_kind(self) -> Literal["cross_entropy", "bce"] | None:
        """Loss over the logits of the ranking head; None for retrieval."""
        if self.ranking is None:
            return None
        one_label = self.ranking.num_tasks == 1
        return "cross_entropy" if one_label and self.ranking.prediction_head_arch[-1] > 1 else "bce"
