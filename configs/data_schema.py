"""Settings of the data: real data sets, synthetic ones, and the embedding tables."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from configs.rules import (
    CheckedArgs,
    ConfigError,
    Fraction,
    ModuleName,
    Name,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveInt,
    Range,
)

DatasetName = Literal["ml-100k", "ml-1m", "ml-20m", "kuairand-pure", "kuairand-1k", "kuairand-27k"]
MAX_REPLICATED_ROWS = 65_536
"""A larger table is spread over ranks unless told otherwise, and so is the items' one."""

FeatureNames = Annotated[tuple[ModuleName, ...], NonEmpty()]


@dataclass(frozen=True, kw_only=True)
class RandomDistribution(CheckedArgs):
    """Distribution of whole numbers for synthetic data; samples are clipped to [low, high)."""

    dist_type: Literal["uniform", "normal", "zipf", "lognormal"]
    """Family; normal and lognormal samples are rounded."""

    low: NonNegativeInt = 0
    """Lowest value that occurs."""

    high: PositiveInt | None = None
    """One past the highest value; None = the limit of what is drawn (a feature's length + 1, a
    table's size)."""

    mean: float | None = None
    """Mean of normal and lognormal samples themselves (not of their logarithm)."""

    std: Annotated[float, Range(above=0)] | None = None
    """Standard deviation of the samples; None = half the mean for lognormal."""

    alpha: Annotated[float, Range(above=1)] | None = None
    """Exponent of zipf, P(k) ~ k ** -alpha from low upwards; None = 1.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high is not None and self.high <= self.low:
            raise ConfigError(
                f"RandomDistribution.high must be > low = {self.low}, got {self.high}; values lie "
                "in [low, high)",
                "RandomDistribution.high",
                "RandomDistribution.low",
            )
        if self.dist_type == "normal" and (self.mean is None or self.std is None):
            missing = "mean" if self.mean is None else "std"
            raise ConfigError(
                f"RandomDistribution.{missing} must be set for dist_type = 'normal', got None; "
                f"give mean and std",
                "RandomDistribution.dist_type",
            )
        if self.dist_type == "lognormal" and (self.mean is None or self.mean <= 0):
            raise ConfigError(
                f"RandomDistribution.mean must be a number > 0 for dist_type = 'lognormal', got "
                f"{self.mean}; it is the mean of the samples themselves",
                "RandomDistribution.mean",
                "RandomDistribution.dist_type",
            )


@dataclass(frozen=True, kw_only=True)
class FeatureArgs(CheckedArgs):
    """A group of synthetic features that share their lengths."""

    feature_names: FeatureNames
    """Features of the group."""

    max_sequence_length: PositiveInt
    """Most ids per user. For the item feature: events, candidates included. 1 for contextuals."""

    is_jagged: bool = False
    """Lengths differ between users; False = every user has max_sequence_length."""

    seqlen_dist: RandomDistribution | None = None
    """Lengths when jagged; None = uniform."""

    value_dists: dict[str, RandomDistribution] | None = None
    """Ids by feature name; a feature left out is uniform over its table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = self.seqlen_dist
        limit = self.max_sequence_length
        if lengths is not None and max(lengths.low, (lengths.high or 1) - 1) > limit:
            raise ConfigError(
                f"FeatureArgs.seqlen_dist must stay within max_sequence_length = {limit}, got "
                f"low = {lengths.low}, high = {lengths.high}; lower them or raise the length",
                "FeatureArgs.seqlen_dist",
                "FeatureArgs.max_sequence_length",
            )
        for name in self.value_dists or {}:
            if name not in self.feature_names:
                raise ConfigError(
                    f"FeatureArgs.value_dists must be keyed by feature_names "
                    f"{list(self.feature_names)}, got {name!r}; correct the key",
                    "FeatureArgs.value_dists",
                    "FeatureArgs.feature_names",
                )


@dataclass(frozen=True, kw_only=True)
class EmbeddingArgs(CheckedArgs):
    """One embedding table, looked up by one or more features."""

    feature_names: FeatureNames
    """Features that read this table."""

    table_name: ModuleName
    """Its name in checkpoints."""

    item_vocab_size_or_capacity: PositiveInt
    """Rows; ids lie in [0, rows)."""

    sharding_type: Literal["data_parallel", "model_parallel"] | None = None
    """Replicated or spread over ranks; None = items and tables of more than 65,536 rows are
    spread."""

    shard_by: Literal["row_wise", "table_wise", "column_wise", "planner"] = "row_wise"
    """How a table is spread: a range of rows on each rank, all of it on one rank, a range of
    columns on each rank, or what TorchRec's planner expects to be fastest."""

    placement: Literal["device", "host", "host_cached"] = "device"
    """Where the rows of a spread table are: in the memory of the devices, in that of their hosts
    (unified memory, read over the bus), or there with a cache on the devices (GPU)."""

    cache_ratio: Annotated[float, Range(above=0, high=1)] = 0.2
    """Share of its rows that the cache of a host_cached table holds."""


@dataclass(frozen=True, kw_only=True)
class DynamicEmbeddingArgs(EmbeddingArgs):
    """A table that takes any id >= 0 and evicts rows when full; always spread by rows.

    It holds item_vocab_size_or_capacity - 1 ids at a time (with several processes: one less for
    each of them); that last row serves ids without a row. Of the three sizes the first one set
    counts: global_hbm_for_values, item_vocab_gpu_capacity, item_vocab_gpu_capacity_ratio. None of
    them set = all rows in GPU memory; one that is too small for all rows puts them into the memory
    of the host.
    """

    global_hbm_for_values: NonNegativeInt | None = None
    """GPU memory for rows, bytes over all GPUs."""

    item_vocab_gpu_capacity: NonNegativeFloat | None = None
    """Rows kept in GPU memory."""

    item_vocab_gpu_capacity_ratio: Fraction | None = None
    """Share of the rows kept in GPU memory."""

    evict_strategy: Literal["lru", "lfu"] = "lru"
    """Which row leaves a full table: least recently or least frequently used."""

    caching: bool = False
    """Rows in host memory have a cache on the GPU."""

    dist_type: Literal["continuous", "roundrobin", "hash_roundrobin"] = "roundrobin"
    """How ids are spread over ranks; has no effect: by a hash, whatever is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharding_type == "data_parallel":
            raise ConfigError(
                "DynamicEmbeddingArgs.sharding_type must be 'model_parallel' or left out, got "
                "'data_parallel'; use EmbeddingArgs for a replicated table",
                "DynamicEmbeddingArgs.sharding_type",
            )
        object.__setattr__(self, "sharding_type", "model_parallel")
        if (self.shard_by, self.placement) != ("row_wise", "device"):
            field, rule = ("shard_by", "row_wise")
            if self.shard_by == "row_wise":
                field, rule = ("placement", "device")
            raise ConfigError(
                f"DynamicEmbeddingArgs.{field} must be {rule!r} or left out, got "
                f"{getattr(self, field)!r}; ids move between rows of one rank only, and the three "
                "sizes decide where rows are: remove it",
                f"DynamicEmbeddingArgs.{field}",
            )

    def fits_devices(self, width: int) -> bool:
        """Whether the sizes leave room on the devices for all rows, of `width` numbers each."""
        rows = self.item_vocab_size_or_capacity
        if self.global_hbm_for_values is not None:
            return self.global_hbm_for_values >= 4 * width * rows
        if self.item_vocab_gpu_capacity is not None:
            return self.item_vocab_gpu_capacity >= rows
        return self.item_vocab_gpu_capacity_ratio in (None, 1.0)


@dataclass(frozen=True, kw_only=True)
class DatasetArgs(CheckedArgs):
    """A preprocessed data set and how it becomes samples."""

    field_aliases: ClassVar[dict[str, str]] = {"max_sequence_length": "max_history_seqlen"}

    dataset_name: DatasetName
    """Which data set."""

    max_history_seqlen: PositiveInt
    """Newest history events kept per sample; candidates are not counted."""

    dataset_path: OptionalPath = None
    """Folder with the preprocessed files; None = datasets/<dataset_name>."""

    max_num_candidates: NonNegativeInt = 0
    """Latest events of a sample that are predicted instead of read; 0 = none."""

    shuffle: bool = False
    """Another sample order each epoch of training; evaluation is never shuffled."""

    split: Literal["temporal", "leave_one_out", "by_user"] | None = None
    """Which events are held out. None = temporal with candidates; without, by_user for ranking
    and leave_one_out for retrieval."""

    like_threshold: float | None = None
    """Lowest rating that is positive: labels become binary. None = one class per rating."""

    history_loss: bool | None = None
    """The history is supervised too; None = only where there are no candidates."""

    train_on_validation: bool = False
    """The training fold also holds the validation events (for the final, reported fit)."""

    train_windows: Literal["all", "random", "last"] = "all"
    """Training samples per user. last: one, of the latest events. all: with candidates every block
    of max_num_candidates events, newest first, with all events before it as its history; without
    (and for retrieval) every block of max_history_seqlen events. random: the same with other
    block borders each epoch."""

    shuffle_ties: bool = False
    """Training: events of a user at the same second, whose true order is unknown, come in another
    order each epoch, within their window; one at a window's border may then be a target twice or
    not at all. Evaluation keeps the order of the source."""

    use_actions: bool = True
    """The history holds an action token (the label) after each item; False = items alone."""

    contextual_feature_names: tuple[Name, ...] | None = None
    """Contextual features that are used, in the order of their tokens; None = all of the data set,
    [] = none."""

    num_workers: NonNegativeInt = 0
    """Loader processes per rank; 0 = load in the training process."""

    embedding_args: tuple[EmbeddingArgs, ...] | None = None
    """Tables that replace the default of their features (one table per feature, rows from the
    manifest)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split == "temporal" and self.max_num_candidates == 0:
            raise ConfigError(
                "DatasetArgs.split must not be 'temporal' when max_num_candidates is 0, got "
                "'temporal'; set max_num_candidates (the events held out per user) or choose "
                "'by_user' or 'leave_one_out'",
                "DatasetArgs.split",
                "DatasetArgs.max_num_candidates",
            )


@dataclass(frozen=True, kw_only=True)
class BenchmarkDatasetArgs(CheckedArgs):
    """Synthetic data with a planted signal, generated in memory."""

    feature_args: Annotated[tuple[FeatureArgs, ...], NonEmpty()]
    """All features; items and actions belong to one group."""

    embedding_args: Annotated[tuple[EmbeddingArgs, ...], NonEmpty()]
    """Tables; every feature that is used reads exactly one."""

    item_feature_name: Name
    """Feature that holds the items."""

    contextual_feature_names: tuple[Name, ...]
    """Features with one id per user, in the order of their tokens; [] = none."""

    action_feature_name: Annotated[str | None, NonEmpty()] = None
    """Feature with the action of each event; None = items only."""

    max_num_candidates: NonNegativeInt = 0
    """Latest events of a sample that are predicted; 0 = the history is supervised."""

    num_generated_batches: PositiveInt = 100
    """Distinct training batches; later steps repeat them. Validation and test have 32 users each
    for every ten of these (at least 32), the same ones for any batch size and number of ranks."""
