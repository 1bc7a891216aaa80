"""Cells of scripts/compare_precision.py: what is trained in which precision, and their results."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from configs.loader import load_experiment
from configs.precision_schema import RECOMMENDED_ATTENTION_MODE as _RECOMMENDED
from configs.schema import ExperimentArgs

_BF16 = "NetworkArgs.dtype_str = 'bfloat16'"
_NO_LOOK = "TrainerArgs.eval_interval = 1000000000"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and its data."""

    task: Literal["ranking", "retrieval"]
    gin_file: str
    bindings: tuple[str, ...] = ()
    num_looks: int = 0
    """Evaluations of the validation fold on the way, for the plot."""


_SEED_USER = (
    "NetworkArgs.num_layers = 1",
    "NetworkArgs.hidden_size = 128",
    "NetworkArgs.num_attention_heads = 4",
    "NetworkArgs.kv_channels = 128",
)
# validation events are held out, so that they can be looked at on the way
_LOOKED_AT = "DatasetArgs.train_on_validation = False"
# "auto" is Adam on a GPU, under which the learning rate of these files overfits
_AS_TUNED = "OptimizerArgs.sparse_optimizer_str = 'rowwise_adagrad'"
# 16 users of 72 to 2078 events, most of them short: up to 4094 tokens each; every user once, or
# what a precision forgets of them counts for it
_LONG = (
    "TrainerArgs.train_batch_size = 16",
    "TrainerArgs.eval_batch_size = 32",
    "TrainerArgs.max_eval_iters = 16",
    "events/FeatureArgs.max_sequence_length = 2078",
    "lengths/RandomDistribution.dist_type = 'zipf'",
    "lengths/RandomDistribution.mean = None",
    "lengths/RandomDistribution.std = None",
    "lengths/RandomDistribution.alpha = 1.1",
    "lengths/RandomDistribution.low = 72",
    "BenchmarkDatasetArgs.max_num_candidates = 64",
    "BenchmarkDatasetArgs.num_generated_batches = 2000",
    "NetworkArgs.num_layers = 2",
    "NetworkArgs.hidden_size = 128",
    "NetworkArgs.num_attention_heads = 2",
    "NetworkArgs.kv_channels = 64",
    "RankingArgs.prediction_head_arch = [64, 2]",
    "OptimizerArgs.learning_rate = 1e-3",
)

SETTINGS: dict[str, Setting] = {
    "ml-100k": Setting(task="ranking", gin_file="movielens_ranking.gin", bindings=(_BF16,)),
    "planted": Setting(task="ranking", gin_file="planted_signal_ranking.gin"),
    "narrow": Setting(
        task="ranking",
        gin_file="movielens_ranking.gin",
        bindings=(
            _BF16,
            *_SEED_USER,
        ),
    ),
    "retrieval": Setting(
        task="retrieval",
        gin_file="movielens_retrieval.gin",
        bindings=(_BF16, _NO_LOOK),
    ),
    # of the attention, whose FP8 kernels have heads of 64 and more, and no bias
    "movielens": Setting(
        task="ranking",
        gin_file="movielens_ranking.gin",
        bindings=(_BF16, _LOOKED_AT, _AS_TUNED, "NetworkArgs.kv_channels = 64"),
        num_looks=10,
    ),
    "seed-user": Setting(
        task="ranking",
        gin_file="movielens_ranking.gin",
        bindings=(_BF16, _LOOKED_AT, _AS_TUNED, *_SEED_USER),
        num_looks=10,
    ),
    "long": Setting(
        task="ranking", gin_file="planted_signal_ranking.gin", bindings=_LONG, num_looks=10
    ),
    "next-item": Setting(
        task="retrieval",
        gin_file="movielens_retrieval.gin",
        bindings=(
            _BF16,
            _NO_LOOK,
            "NetworkArgs.kv_channels = 64",
            "NetworkArgs.use_relative_position_bias = False",
            "NetworkArgs.use_time_bias = False",
        ),
    ),
}

_EMULATED = "emulated-"
UNKNOWN_COMMIT = "unknown"
BASELINE = "bf16"
FIRST_PRECISIONS = ("te-tensorwise", "native-tensorwise", "native-delayed")
OTHER_PRECISIONS = (
    "te-delayed",
    "te-blockwise",
    "native-delayed-e4m3",
    "native-rowwise",
    "native-blockwise-e4m3",
)
_LINEARS = "native-delayed"
_ALONE_STEPS = 150
"""Of the runs that have the device for themselves, to be timed."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One run."""

    setting: str
    num_steps: int
    precision: str
    """Of the linears: "bf16", or backend-recipe, with "-e4m3" where gradients are E4M3, too. With
    FP8 attention "+" and its mode follow, "+emulated-" and its mode where it is emulated."""
    seed: int
    is_alone: bool = False
    """Nothing runs beside it: its steps are timed."""

    @property
    def name(self) -> str:
        """File name of its result."""
        suffix = ".alone" if self.is_alone else ""
        return f"{self.setting}.{self.num_steps}.{self.precision}.{self.seed}{suffix}"

    @property
    def linears(self) -> str:
        """Precision of the linears."""
        return self.precision.partition("+")[0]

    @property
    def attention(self) -> str:
        """Mode of the attention, "bf16" where nothing is quantised."""
        return self.precision.partition("+")[2].removeprefix(_EMULATED) or BASELINE

    @property
    def attention_backend(self) -> str | None:
        """What FP8 attention runs on; None: it is not quantised."""
        if self.attention == BASELINE:
            return None
        return "pytorch" if f"+{_EMULATED}" in self.precision else "triton"

    def experiment(self, folder: str) -> ExperimentArgs:
        """Its settings; nothing is evaluated or saved before the end."""
        setting = SETTINGS[self.setting]
        looks = []
        if setting.num_looks:
            interval = _NO_LOOK
            if not self.is_alone:
                every = max(1, self.num_steps // setting.num_looks)
                interval = f"TrainerArgs.eval_interval = {every}"
            looks = [interval]
        return load_experiment(
            setting.gin_file,
            bindings=[
                *setting.bindings,
                *looks,
                *self._precision_bindings(),
                f"TrainerArgs.seed = {self.seed}",
                f"TrainerArgs.max_train_iters = {self.num_steps}",
                f"TrainerArgs.output_dir = {folder!r}",
                "TrainerArgs.num_epochs = None",
                f"TrainerArgs.log_interval = {max(1, self.num_steps // 40)}",
                "TrainerArgs.ckpt_save_interval = 0",
            ],
            task=setting.task,
        )

    def _precision_bindings(self) -> list[str]:
        """Every linear of a layer, or all attention, in FP8, whatever the size."""
        if self.precision == BASELINE:
            return []
        bindings = ["MixedPrecisionArgs.mixed_precision_dtype = 'fp8'"]
        if self.linears == BASELINE:
            bindings.append("MixedPrecisionArgs.linear_recipe = None")
        else:
            backend, recipe, *rest = self.linears.split("-")
            bindings += [
                f"MixedPrecisionArgs.linear_backend = {backend!r}",
                f"MixedPrecisionArgs.linear_recipe = {recipe!r}",
                f"MixedPrecisionArgs.linear_scaling_precision = {rest[0] if rest else 'hybrid'!r}",
                "MixedPrecisionArgs.auto_filter_small = False",
            ]
        if self.attention_backend is not None:
            bindings += [
                f"MixedPrecisionArgs.hstu_attn_quantization_mode = {self.attention!r}",
                "MixedPrecisionArgs.auto_filter_attention = False",
                f"NetworkArgs.kernel_backend = {self.attention_backend!r}",
            ]
        return bindings


def all_cells(
    *,
    num_seeds: int = 5,
    num_steps: int = 1000,
    num_steps_once: int = 300,
    backend: str | None = None,
) -> list[Cell]:
    """All cells: what has to hold over seeds first, then one look at everything else.

    Args:
        num_steps, num_steps_once: of the cells with several seeds, and of those with one.
        backend: of all FP8 linears, instead of the one their cell names.
    """
    seeds = range(1, num_seeds + 1)
    several = [
        Cell(setting=setting, num_steps=num_steps, precision=precision, seed=seed)
        for setting in ("ml-100k", "planted")
        for seed in seeds
        for precision in (BASELINE, *FIRST_PRECISIONS)
    ]
    once = {
        "narrow": (*FIRST_PRECISIONS, "te-delayed"),
        "retrieval": FIRST_PRECISIONS,
        "ml-100k": OTHER_PRECISIONS,
        "planted": OTHER_PRECISIONS,
    }
    cells = several + [
        Cell(setting=setting, num_steps=num_steps_once, precision=precision, seed=1)
        for setting, precisions in once.items()
        for precision in (BASELINE, *precisions)
    ]
    return list(dict.fromkeys(_with_backend(cell, backend) for cell in cells))


def attention_cells(
    *,
    num_seeds: int = 5,
    num_steps: int = 2000,
    num_steps_long: int = 10_000,
    backend: str | None = None,
) -> list[Cell]:
    """Cells of {linears BF16, FP8} x {attention BF16, FP8}, in the order of their weight.

    First what takes longest, so that it ends with the others, then all that has one seed, then
    seed by seed.

    Args:
        num_steps, num_steps_long: of all cells, and of the one that runs longest.
        backend: as in `all_cells`; "emulated" is meant for the attention, too.
    """
    both, rankings = f"{_LINEARS}+{_RECOMMENDED}", ("long", "movielens", "seed-user")
    combinations = (BASELINE, both, f"{BASELINE}+{_RECOMMENDED}", _LINEARS)
    cells = [
        Cell(setting="seed-user", num_steps=num_steps_long, precision=precision, seed=1)
        for precision in (both, BASELINE)
    ]
    for seed in range(1, num_seeds + 1):
        cells += [
            Cell(setting=setting, num_steps=num_steps, precision=precision, seed=seed)
            for setting in rankings
            for precision in combinations
        ]
        if seed > 1:
            continue
        cells += [
            Cell(setting="next-item", num_steps=num_steps, precision=precision, seed=1)
            for precision in combinations
        ]
        cells += [
            Cell(
                setting=setting,
                num_steps=num_steps,
                precision=f"te-delayed+{_RECOMMENDED}",
                seed=1,
            )
            for setting in rankings
        ]
    cells += [
        Cell(
            setting=setting,
            num_steps=min(num_steps, _ALONE_STEPS),
            precision=precision,
            seed=1,
            is_alone=True,
        )
        for setting in rankings
        for precision in combinations
    ]
    return list(dict.fromkeys(_with_backend(cell, backend) for cell in cells))


def _with_backend(cell: Cell, backend: str | None) -> Cell:
    if backend is None or cell.precision == BASELINE:
        return cell
    linears, attention = cell.linears, cell.attention
    if linears != BASELINE:
        linears = f"{backend}-{linears.split('-', 1)[1]}"
    if attention != BASELINE:
        linears += f"+{_EMULATED if backend == 'emulated' else ''}{attention}"
    return dataclasses.replace(cell, precision=linears)


def settings_key(cell: Cell) -> str:
    """What a stored result belongs to: it counts only under the same settings."""
    from configs.loader import experiment_to_gin

    return experiment_to_gin(cell.experiment("anywhere"))


def read_results(folder: Path, cells: Iterable[Cell]) -> dict[Cell, dict[str, Any]]:
    """Results of earlier runs of these cells under the same settings."""
    found = {}
    for cell in cells:
        path = folder / f"{cell.name}.json"
        if path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["settings"] == settings_key(cell):
                found[cell] = result
    return found
