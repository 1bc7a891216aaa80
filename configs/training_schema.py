"""Settings of the training loop and of the optimizers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from configs.rules import (
    BelowOne,
    CheckedArgs,
    ConfigError,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Range,
    Spellings,
)


@dataclass(frozen=True, kw_only=True)
class TrainerArgs(CheckedArgs):
    """How long to train, what to report and where results go."""

    train_batch_size: PositiveInt
    """Users per device and step."""

    eval_batch_size: PositiveInt
    """Users per device and evaluation step; changes no metric (but with NetworkArgs.scaling_seqlen
    = "batch", where a score depends on the batch)."""

    gradient_accumulation_steps: PositiveInt = 1
    """Parts in which the users of a step are computed, one after the other: less memory for the
    same result, up to the draws of dropout. Divides train_batch_size."""

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
    """Seed of initial weights, sample order, window borders, ties, negatives, dropout and synthetic
    data."""

    deterministic: bool = False
    """Same settings, same bits, on a GPU too: kernels with a fixed order of sums, which are slower.
    A CPU repeats itself anyway. An operation without such a form ends the run with its name."""

    early_stopping_metric: Name | None = None
    """Validation metric that must keep improving (auc, gauc, ne, logloss, loss; hr@k, ndcg@k, mrr
    for retrieval); None = no early stop. With it the weights of the best evaluation are kept, and
    the final figures are theirs."""

    early_stopping_patience: PositiveInt = 5
    """Evaluations in a row without improvement after which training ends."""

    nonfinite_policy: Literal["stop", "skip"] = "stop"
    """On a loss, gradient or FP8 amax that is not finite, before anything is updated. stop: end
    the run. skip: go on with the next step, nonfinite_budget times in a run; a skipped step counts
    as a step."""

    nonfinite_budget: PositiveInt = 10
    """Steps that a run may skip; the next one that is not finite ends it."""

    profile: bool = False
    """Write a profiler trace of the steps below."""

    profile_step_start: Annotated[PositiveInt, Spellings(((0, 1),))] = 100
    """First profiled step; steps count from 1 (0 is taken as 1)."""

    profile_step_end: PositiveInt = 200
    """One past the last profiled step."""

    process_group_timeout_seconds: PositiveFloat = 600.0
    """Longest wait for another rank, and longest step, before the job ends."""

    slow_step_seconds: PositiveFloat = 120.0
    """A step that takes longer makes each rank write where its threads stand to stacks/ in the
    run's folder, once a step; the step goes on."""

    output_dir: OptionalPath = None
    """Folder of the run; None = runs/<name of the gin file>. A used one gets -2, -3, ... appended
    unless resume is set."""

    ckpt_save_interval: Annotated[int | None, Spellings(((-1, None),)), Range(low=0)] = None
    """Steps between checkpoints. None (also written -1) = only one at the end; 0 = none at all."""

    ckpt_in_background: bool = True
    """Write checkpoints while training goes on, from one copy in the host's memory; False = wait
    for each, without a copy. The last one is always waited for."""

    ckpt_signal_seconds: PositiveFloat = 25.0
    """On SIGTERM: longest time to end the step, save and leave; after it the process ends without
    (torchrun kills after 30 seconds)."""

    ckpt_save_dir: OptionalPath = None
    """Folder of the checkpoints; None = checkpoints in the run's folder."""

    ckpt_keep_last: PositiveInt = 2
    """Newest checkpoints kept; older ones are deleted, but never the best one of early stopping."""

    ckpt_load_dir: OptionalPath = None
    """Checkpoint whose weights training starts from; step, order and optimizer start anew."""

    resume: OptionalPath = None
    """Checkpoint to continue exactly (weights, optimizer, step, data position): a path, or
    "latest" of the run's folder."""

    pipeline_type: Literal["none", "native", "prefetch"] = "native"
    """none: one batch at a time. native: the next batch is moved and its ids are exchanged while
    this one computes. prefetch: its embedding rows are fetched, too (GPU)."""

    table_comms_forward: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """What rows of spread tables are sent as between ranks; fp8 = E4M3 with a scale for each
    row."""

    table_comms_backward: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """The same for their gradients; fp8 = E5M2."""

    enable_balanced_shuffler: bool = False
    """Deal the users of a global batch out so that every rank has about the same attention work
    (tokens squared), so that ranks finish a step together; changes no loss and no metric."""

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
        if self.train_batch_size % self.gradient_accumulation_steps:
            raise ConfigError(
                f"TrainerArgs.gradient_accumulation_steps must divide train_batch_size = "
                f"{self.train_batch_size} (the users of a whole step), got "
                f"{self.gradient_accumulation_steps}; change one of them",
                "TrainerArgs.gradient_accumulation_steps",
                "TrainerArgs.train_batch_size",
            )
        if self.pipeline_type == "prefetch" and self.nonfinite_policy == "skip":
            raise ConfigError(
                "TrainerArgs.nonfinite_policy must be 'stop' with pipeline_type = 'prefetch', got "
                "'skip'; a skipped step would leave its rows locked in the caches: choose "
                "pipeline_type = 'native' to skip steps",
                "TrainerArgs.nonfinite_policy",
                "TrainerArgs.pipeline_type",
            )
        if self.early_stopping_metric is not None and self.ckpt_save_interval == 0:
            raise ConfigError(
                f"TrainerArgs.early_stopping_metric must be None when ckpt_save_interval is 0, got "
                f"{self.early_stopping_metric!r}; the best weights are kept in a checkpoint: leave "
                "ckpt_save_interval out, or remove the metric",
                "TrainerArgs.early_stopping_metric",
                "TrainerArgs.ckpt_save_interval",
            )
        if self.max_train_iters is None and self.num_epochs is None:
            object.__setattr__(self, "num_epochs", 1)


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
