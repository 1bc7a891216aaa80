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
    Name,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    OptionalSize,
    PositiveFloat,
    PositiveInt,
    Range,
    Spellings,
)

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
class TrainerArgs(CheckedArgs):
    """How long to train, what to report and where results go."""

    train_batch_size: PositiveInt
    """Users per device and step."""

    eval_batch_size: PositiveInt
    """Users per device and evaluation step; never changes a metric."""

    eval_interval: PositiveInt = 100
    """Steps between evaluations on the validation fold."""

    log_interval: PositiveInt = 100
    """Steps between records in metrics.jsonl."""

    max_train_iters: PositiveInt | None = None
    """Steps after which training ends; None = num_epochs decides."""

    max_eval_iters: PositiveInt | None = None
    """Batches of an evaluation during training; None = the whole fold. The figures at the end
    always cover the whole fold."""

    num_epochs: PositiveInt | None = None
    """Passes over the training fold after which training ends; becomes 1 when max_train_iters is
    None too. With both set the earlier end counts."""

    seed: Annotated[int, Range(low=0, high=2**31 - 1)] = 1234
    """Seed of initial weights, sample order, dropout and synthetic data."""

    early_stopping_metric: Name | None = None
    """Validation metric that must keep improving (auc, gauc, ne, logloss, loss; hr@k, ndcg@k, mrr
    for retrieval); None = no early stop."""

    nonfinite_policy: Literal["stop"] = "stop"
    """On a loss or gradient that is not finite: stop before anything is updated."""

    profile: bool = False
    """Write a profiler trace of the steps below."""

    profile_step_start: Annotated[PositiveInt, Spellings(((0, 1),))] = 100
    """First profiled step; steps count from 1 (0 is taken as 1)."""

    profile_step_end: PositiveInt = 200
    """One past the last profiled step."""

    process_group_timeout_seconds: PositiveFloat = 600.0
    """Longest wait for another rank before the job ends."""

    output_dir: OptionalPath = None
    """Folder of the run; None = runs/<name of the gin file>. A used one gets -2, -3, ... appended
    unless resume is set."""

    ckpt_save_interval: Annotated[int | None, Spellings(((-1, None),)), Range(low=0)] = None
    """Steps between checkpoints. None (also written -1) = only one at the end; 0 = none at all."""

    ckpt_save_dir: OptionalPath = None
    """Folder of the checkpoints; None = checkpoints in the run's folder."""

    ckpt_keep_last: PositiveInt = 2
    """Newest checkpoints kept; older ones are deleted."""

    ckpt_load_dir: OptionalPath = None
    """Checkpoint whose weights training starts from; step, order and optimizer start anew."""

    resume: OptionalPath = None
    """Checkpoint to continue exactly (weights, optimizer, step, data position): a path, or
    "latest" of the run's folder."""

    pipeline_type: Literal["none", "native", "prefetch"] = "native"
    """none: one batch at a time. native: the next batch is moved and its ids are exchanged while
    this one computes. prefetch: its embedding rows are fetched, too (GPU)."""

    enable_balanced_shuffler: bool = False
    """Spread users over ranks by length, so that ranks finish a step together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume is not None and self.ckpt_load_dir is not None:
            raise ConfigError(
                f"TrainerArgs.resume must be None when ckpt_load_dir = {self.ckpt_load_dir!r} is "
                f"set, got {self.resume!r}; resume continues a run, ckpt_load_dir starts a new one "
                "from weights: keep one of them",
                "TrainerArgs.resume",
                "TrainerArgs.ckpt_load_dir",
            )
        if self.profile and self.profile_step_end <= self.profile_step_start:
            raise ConfigError(
                f"TrainerArgs.profile_step_end must be > profile_step_start = "
                f"{self.profile_step_start}, got {self.profile_step_end}; raise it",
                "TrainerArgs.profile_step_end",
                "TrainerArgs.profile_step_start",
            )
        if self.max_train_iters is None and self.num_epochs is None:
            object.__setattr__(self, "num_epochs", 1)


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
    """Attention kernel; auto = the fastest that is built for the device, which is logged. cutlass =
    FBGEMM's."""

    target_group_size: PositiveInt = 1
    """Consecutive candidates that may see each other."""

    attention_window: PositiveInt | None = None
    """Newest tokens a token sees, beside contextual ones and its own group; None = all."""

    num_position_buckets: PositiveInt = 8192
    """Rows of the position table."""

    use_relative_position_bias: bool = False
    """Add a learned bias by distance in tokens to the attention scores."""

    use_time_bias: bool = False
    """Add a learned bias by distance in time to the attention scores."""

    num_time_buckets: PositiveInt = 128
    """Rows of the time bias table."""

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
class OptimizerArgs(CheckedArgs):
    """Optimizers of the dense weights and of the tables."""

    optimizer_str: Literal["adam", "adamw", "sgd"]
    """Optimizer of the dense weights."""

    learning_rate: PositiveFloat
    """Its peak step size."""

    adam_beta1: BelowOne = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: BelowOne = 0.999
    """Decay of Adam's second moment."""

    adam_eps: PositiveFloat = 1e-8
    """Added to Adam's denominator."""

    weight_decay: NonNegativeFloat = 0.0
    """Dense weights: in the gradient for adam and sgd, decoupled for adamw."""

    clip_grad: PositiveFloat | None = None
    """Largest global norm over dense gradients and those of the looked-up embeddings; None = no
    limit."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0."""

    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up; cosine and linear fall towards 0."""

    sparse_optimizer_str: Literal["auto", "adam", "rowwise_adagrad", "adagrad", "sgd"] = "auto"
    """Optimizer of the tables; auto = adam where the table kernel has it, else rowwise_adagrad."""

    sparse_learning_rate: PositiveFloat | None = None
    """Peak step size of the tables; None = learning_rate."""

    sparse_weight_decay: NonNegativeFloat = 0.0
    """Decay of sharded tables on the rows that a batch looks up: L2 for rowwise_adagrad, decoupled
    for adam."""

    replicated_weight_decay: NonNegativeFloat | None = None
    """Weight decay of replicated tables; None = weight_decay."""


@dataclass(frozen=True, kw_only=True)
class TensorModelParallelArgs(CheckedArgs):
    """Splitting one model over devices."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that share one model."""

    sequence_parallel: bool = False
    """Split tokens over those devices outside the linears, too."""


@dataclass(frozen=True, kw_only=True)
class RankingArgs(CheckedArgs):
    """The ranking head and its metrics."""

    prediction_head_arch: Annotated[tuple[PositiveInt, ...], NonEmpty()]
    """Widths of the head's layers; the last one is the number of logits."""

    prediction_head_act_type: Literal["relu", "gelu"] = "relu"
    """Activation between them."""

    prediction_head_bias: bool = True
    """The head's linears have a bias."""

    prediction_head_dropout: BelowOne = 0.0
    """Dropout after each of the head's activations."""

    num_tasks: PositiveInt = 1
    """1: one label per event (a class, or yes/no). More: that many yes/no labels per event."""

    eval_metrics: Annotated[
        tuple[Literal["AUC", "GAUC", "NE", "LOGLOSS", "AUC_MULTICLASS"], ...], NonEmpty()
    ] = ("AUC",)
    """Metrics named in the printed summary; metrics.jsonl always has all of them."""


@dataclass(frozen=True, kw_only=True)
class RetrievalArgs(CheckedArgs):
    """The retrieval loss and its metrics."""

    num_negatives: OptionalSize = None
    """Negatives per positive; None (also written -1) = all others of the global batch."""

    temperature: PositiveFloat = 0.05
    """Divisor of the similarity scores."""

    l2_norm_eps: PositiveFloat = 1e-6
    """Smallest norm an embedding is divided by."""

    eval_metrics: Annotated[tuple[Name, ...], NonEmpty()] = ("HR@10", "NDCG@10")
    """Metrics named in the printed summary: HR@k, NDCG@k, MRR."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(name.upper() for name in self.eval_metrics)
        for name in names:
            if not checks.is_retrieval_metric(name):
                raise ConfigError(
                    f"RetrievalArgs.eval_metrics must hold HR@k, NDCG@k (k >= 1) or MRR, got "
                    f"{name!r}; write for example 'NDCG@10'",
                    "RetrievalArgs.eval_metrics",
                )
        object.__setattr__(self, "eval_metrics", names)


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
        source = self.facts or self.dataset
        assert not isinstance(source, DatasetArgs)
        return source.action_feature_name

    @property
    def contextual_feature_names(self) -> tuple[str, ...]:
        """Features with one id per user."""
        source = self.facts or self.dataset
        assert not isinstance(source, DatasetArgs)
        return source.contextual_feature_names

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

        leave_one_out holds out one event that is a candidate in evaluation, also when training has
        none.
        """
        tokens_per_event = 1 if self.action_feature_name is None else 2
        history = tokens_per_event * self.max_history_events
        held_out = 1 if self.split == "leave_one_out" else 0
        return self.num_contextuals + history + max(self.max_num_candidates, held_out)

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
