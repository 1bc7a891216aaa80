"""Cells of scripts/compare_precision.py: what is trained in which precision, and one such run."""

import dataclasses
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from configs.loader import load_experiment
from configs.schema import ExperimentArgs

_ROOT = Path(__file__).resolve().parents[1]
_BF16 = "NetworkArgs.dtype_str = 'bfloat16'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and its data."""

    task: Literal["ranking", "retrieval"]
    gin_file: str
    bindings: tuple[str, ...] = ()


SETTINGS: dict[str, Setting] = {
    "ml-100k": Setting(task="ranking", gin_file="movielens_ranking.gin", bindings=(_BF16,)),
    "planted": Setting(task="ranking", gin_file="planted_signal_ranking.gin"),
    "narrow": Setting(
        task="ranking",
        gin_file="movielens_ranking.gin",
        bindings=(
            _BF16,
            "NetworkArgs.num_layers = 1",
            "NetworkArgs.hidden_size = 128",
            "NetworkArgs.num_attention_heads = 4",
            "NetworkArgs.kv_channels = 128",
        ),
    ),
    "retrieval": Setting(
        task="retrieval",
        gin_file="movielens_retrieval.gin",
        bindings=(_BF16, "TrainerArgs.eval_interval = 1000000000"),
    ),
}

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


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One run."""

    setting: str
    num_steps: int
    precision: str
    """ "bf16", or backend-recipe of the FP8 linears, with "-e4m3" where gradients are E4M3, too."""
    seed: int

    @property
    def name(self) -> str:
        """File name of its result."""
        return f"{self.setting}.{self.num_steps}.{self.precision}.{self.seed}"

    def experiment(self, folder: str) -> ExperimentArgs:
        """Its settings; nothing is evaluated or saved before the end."""
        setting = SETTINGS[self.setting]
        return load_experiment(
            setting.gin_file,
            bindings=[
                *setting.bindings,
                *precision_bindings(self.precision),
                f"TrainerArgs.seed = {self.seed}",
                f"TrainerArgs.max_train_iters = {self.num_steps}",
                f"TrainerArgs.output_dir = {folder!r}",
                "TrainerArgs.num_epochs = None",
                f"TrainerArgs.log_interval = {max(1, self.num_steps // 40)}",
                "TrainerArgs.ckpt_save_interval = 0",
            ],
            task=setting.task,
        )


def precision_bindings(precision: str) -> list[str]:
    """Settings of a precision by name: every linear of a layer in FP8, whatever its size."""
    if precision == BASELINE:
        return []
    backend, recipe, *rest = precision.split("-")
    return [
        "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
        f"MixedPrecisionArgs.linear_backend = {backend!r}",
        f"MixedPrecisionArgs.linear_recipe = {recipe!r}",
        f"MixedPrecisionArgs.linear_scaling_precision = {rest[0] if rest else 'hybrid'!r}",
        "MixedPrecisionArgs.auto_filter_small = False",
    ]


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


def _with_backend(cell: Cell, backend: str | None) -> Cell:
    if backend is None or cell.precision == BASELINE:
        return cell
    recipe = cell.precision.split("-", 1)[1]
    return dataclasses.replace(cell, precision=f"{backend}-{recipe}")


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


def commit() -> str:
    """The commit that is checked out, with "-dirty" where files differ; "unknown" outside git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return UNKNOWN_COMMIT
    return done.stdout.strip() or UNKNOWN_COMMIT


def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Train the cell in this process and write its result to ``folder``.

    Raises:
        RuntimeError: a linear of a layer does not run in the precision of the cell.
    """
    from training.distributed import process_group
    from training.nonfinite import NonFiniteError
    from training.startup import check_machine
    from training.telemetry import set_up_logging
    from training.trainer import Trainer

    begin, failure, figures = time.perf_counter(), "", {}
    own_commit = commit()  # what is checked out at the end may be another one
    with tempfile.TemporaryDirectory() as run, process_group() as world:
        set_up_logging(is_main=True)
        experiment = cell.experiment(run)
        check_machine(experiment, device_type=world.device.type)
        trainer = Trainer(experiment, world=world)
        table = module_table(experiment, trainer.model.module.trunk)
        check_linears(cell, table, num_layers=experiment.network.num_layers)
        try:
            figures = trainer.fit()
        except NonFiniteError as error:
            failure = str(error)
        lines = (trainer.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        device = _device_name(world.device)
    records = [record for record in map(json.loads, lines) if record["split"] == "train"]
    losses = [record["loss"] for record in records]
    result = {
        "cell": dataclasses.asdict(cell),
        "settings": settings_key(cell),
        "failure": failure,
        "is_finite": bool(figures) and all(map(_is_number, [*losses, figures["loss"]])),
        "test": {name: value for name, value in figures.items() if _is_number(value)},
        "steps": [record["step"] for record in records],
        "losses": losses,
        "modules": table,
        "seconds": round(time.perf_counter() - begin, 1),
        "device": device,
        "commit": own_commit,
    }
    path = folder / f"{cell.name}.json"
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(result), encoding="utf-8")
    aside.replace(path)
    return result


def module_table(experiment: ExperimentArgs, trunk: Any) -> list[dict[str, str]]:
    """What runs how: the table of the start, beside what the model really has attached."""
    from modules.linear.engine import LinearEngine
    from modules.linear.plan import plan_linears

    attached = {
        module.name: f"{module.recipe.backend}-{module.recipe.scaling}"
        for module in trunk.modules()
        if isinstance(module, LinearEngine)
    }
    return [
        {
            "module": linear.name,
            "shape": f"{linear.in_features} x {linear.out_features}",
            "precision": linear.precision,
            "engine": attached.get(linear.name, "none"),
        }
        for linear in plan_linears(experiment)
    ]


def check_linears(cell: Cell, table: Sequence[Mapping[str, str]], *, num_layers: int) -> None:
    """Refuse a run whose uvqk and proj are not all in the precision of the cell.

    Raises:
        RuntimeError: naming the first that is not.
    """
    engine, precision = "none", "BF16"
    if cell.precision != BASELINE:
        engine, precision = "-".join(cell.precision.split("-")[:2]), "FP8"
    rows = {row["module"]: (row["precision"], row["engine"]) for row in table}
    for layer in range(num_layers):
        for linear in ("input.uvqk", "output.proj"):
            name = f"stack.layers.{layer}.{linear}"
            if rows.get(name) != (precision, engine):
                raise RuntimeError(
                    f"{cell.name}: {name} must run in {precision} by {engine}, got {rows.get(name)}"
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _device_name(device: Any) -> str:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"
