"""One run of a cell of scripts/compare_precision.py, and what it has to show of itself."""

import dataclasses
import gc
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.precision_cells import BASELINE, UNKNOWN_COMMIT, Cell, settings_key
from configs.schema import ExperimentArgs

if TYPE_CHECKING:
    from training.distributed import World

_ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The commit that is checked out, with "-dirty" where files differ; "unknown" outside git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return UNKNOWN_COMMIT
    return done.stdout.strip() or UNKNOWN_COMMIT


def run_cell(cell: Cell, folder: Path, *, world: "World") -> dict[str, Any]:
    """Train the cell in this process and write its result to ``folder``.

    Raises:
        RuntimeError: a linear or the attention of a layer does not run in the precision of the
            cell.
    """
    from training.nonfinite import NonFiniteError
    from training.startup import check_machine
    from training.telemetry import set_up_logging
    from training.trainer import Trainer

    begin, failure, figures = time.perf_counter(), "", {}
    own_commit = commit()  # what is checked out at the end may be another one
    with tempfile.TemporaryDirectory() as run, _timed_steps() as seconds:
        set_up_logging(is_main=True)
        experiment = cell.experiment(run)
        check_machine(experiment, device_type=world.device.type)
        trainer = Trainer(experiment, world=world)
        table = module_table(experiment, trainer.model.module.trunk)
        check_linears(cell, table, num_layers=experiment.network.num_layers)
        check_attention(cell, table, num_layers=experiment.network.num_layers)
        try:
            figures = trainer.fit()
        except NonFiniteError as error:
            failure = str(error)
        assert trainer.folder is not None
        lines = (trainer.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        device = _device_name(world.device)
        _free(trainer)
    records = list(map(json.loads, lines))
    trained = [record for record in records if record["split"] == "train"]
    losses = [record["loss"] for record in trained]
    result = {
        "cell": dataclasses.asdict(cell),
        "settings": settings_key(cell),
        "failure": failure,
        "is_finite": bool(figures) and all(map(_is_number, [*losses, figures["loss"]])),
        "test": {name: value for name, value in figures.items() if _is_number(value)},
        "steps": [record["step"] for record in trained],
        "losses": losses,
        "looks": [
            {name: value for name, value in record.items() if _is_number(value)}
            for record in records
            if record["split"] == "validation"
        ],
        "modules": table,
        "seconds": round(time.perf_counter() - begin, 1),
        # the first ones compile
        "step_seconds": statistics.median(seconds[len(seconds) // 3 :] or [math.nan]),
        "device": device,
        "commit": own_commit,
    }
    path = folder / f"{cell.name}.json"
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(result), encoding="utf-8")
    aside.replace(path)
    return result


@contextmanager
def _timed_steps() -> Iterator[list[float]]:
    """Wall time of every training step of the runs inside, each with its wait for the device."""
    from training.telemetry import Telemetry

    of_steps: list[float] = []
    plain = Telemetry.step

    def step(self: Telemetry, result: Any, *, seconds: float) -> None:
        of_steps.append(seconds)
        plain(self, result, seconds=seconds)

    with mock.patch.object(Telemetry, "step", step):
        yield of_steps


def _free(trainer: Any) -> None:
    """Give the device memory of a run back: others share the device."""
    import torch

    vars(trainer).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def module_table(experiment: ExperimentArgs, trunk: Any) -> list[dict[str, str]]:
    """What runs how: the table of the start, beside what the model really has attached."""
    from modules.linear.engine import LinearEngine
    from modules.linear.plan import plan_linears

    attached = {
        module.name: f"{module.recipe.backend}-{module.recipe.scaling}"
        for module in trunk.modules()
        if isinstance(module, LinearEngine)
    }
    linears = [
        {
            "module": linear.name,
            "shape": f"{linear.in_features} x {linear.out_features}",
            "precision": linear.precision,
            "engine": attached.get(linear.name, "none"),
        }
        for linear in plan_linears(experiment)
    ]
    configs = [layer.attention.config for layer in trunk.stack.layers]
    return linears + [
        {
            "module": f"stack.layers.{number}.attention",
            "shape": f"{config.num_heads} x {config.attention_dim}",
            "precision": "none" if config.attention_fp8 is None else config.attention_fp8.mode,
            "engine": config.attention_backend,
        }
        for number, config in enumerate(configs)
    ]


def check_linears(cell: Cell, table: Sequence[Mapping[str, str]], *, num_layers: int) -> None:
    """Refuse a run whose uvqk and proj are not all in the precision of the cell.

    Raises:
        RuntimeError: naming the first that is not.
    """
    engine, precision = "none", "BF16"
    if cell.linears != BASELINE:
        engine, precision = "-".join(cell.linears.split("-")[:2]), "FP8"
    rows = {row["module"]: (row["precision"], row["engine"]) for row in table}
    for layer in range(num_layers):
        for linear in ("input.uvqk", "output.proj"):
            name = f"stack.layers.{layer}.{linear}"
            if rows.get(name) != (precision, engine):
                raise RuntimeError(
                    f"{cell.name}: {name} must run in {precision} by {engine}, got {rows.get(name)}"
                )


def check_attention(cell: Cell, table: Sequence[Mapping[str, str]], *, num_layers: int) -> None:
    """Refuse a run whose attention is not all in the precision of the cell.

    Raises:
        RuntimeError: naming the first layer whose is not.
    """
    mode = "none" if cell.attention_backend is None else cell.attention
    rows = {row["module"]: (row["precision"], row["engine"]) for row in table}
    for layer in range(num_layers):
        name = f"stack.layers.{layer}.attention"
        found = rows.get(name, ("absent", "absent"))
        if found[0] != mode or cell.attention_backend not in (None, found[1]):
            raise RuntimeError(
                f"{cell.name}: {name} must run in FP8 mode {mode} by "
                f"{cell.attention_backend or 'any backend'}, got {found}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _device_name(device: Any) -> str:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"
