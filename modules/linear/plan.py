"""Which linears of a model run in FP8, and why the others do not: decided once, from the settings.

`configs/linear_plan.py` says which linears there are and which of them FP8 may run.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from configs.linear_plan import ListedLinear, list_linears
from modules.linear.engine import LinearEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.speed_table import expected_speedup
from modules.linear.state import Fp8State
from modules.mlp import MLP

if TYPE_CHECKING:
    from configs.schema import ExperimentArgs, MixedPrecisionArgs

_TOO_SMALL = "auto_filter_small"
_SHORT_NAMES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


@dataclass(frozen=True, kw_only=True)
class PlannedLinear:
    """One linear of the model: how it runs, and why."""

    name: str
    """Of the module in the trunk."""
    in_features: int
    out_features: int
    rows: int
    """Rows of the largest training step: tokens, or supervised events for the head."""
    precision: str
    """"FP8", or what it runs in otherwise."""
    reason: str

    @property
    def is_fp8(self) -> bool:
        """Whether an engine runs it."""
        return self.precision == "FP8"

    @property
    def is_too_small(self) -> bool:
        """Whether auto_filter_small keeps it from running in FP8."""
        return self.reason.startswith(_TOO_SMALL)


def plan_linears(experiment: "ExperimentArgs") -> tuple[PlannedLinear, ...]:
    """Return all linears of the stack and of the ranking head, in the order they run.

    Where FP8 linears are asked for, at least one is FP8 or `is_too_small`: settings that leave none
    have been refused (`configs.linear_plan.check_linears`).
    """
    return tuple(_planned(linear, experiment) for linear in list_linears(experiment))


def warnings_of(plan: Sequence[PlannedLinear], experiment: "ExperimentArgs") -> list[str]:
    """Return what a user of FP8 linears may not have meant."""
    precision, texts = experiment.precision, []
    fp8 = [linear for linear in plan if linear.is_fp8]
    pair = (precision.linear_backend, precision.linear_recipe)
    parts = experiment.trainer.gradient_accumulation_steps
    if not fp8:
        texts.append(
            "MixedPrecisionArgs.mixed_precision_dtype = 'fp8', but no linear is large enough for "
            "FP8 to be faster, so all run without it; MixedPrecisionArgs.auto_filter_small = False "
            "runs them in FP8 all the same"
        )
    elif _is_filtered(precision) and _speedup(fp8[0], precision) is None:
        texts.append(
            "MixedPrecisionArgs.auto_filter_small = True keeps no linear out of FP8: linear_backend"
            f" = {pair[0]!r} with linear_recipe = {pair[1]!r} was not measured, so not filtered; "
            "small linears may be slower than without FP8"
        )
    if fp8 and pair == ("te", "delayed") and parts > 1:
        texts.append(
            "MixedPrecisionArgs.linear_backend = 'te' with linear_recipe = 'delayed' moves its "
            f"history once a part of a step, {parts} times a step with "
            f"TrainerArgs.gradient_accumulation_steps = {parts}: amax_history_len = "
            f"{precision.amax_history_len} counts parts"
        )
    for part in precision.filter_modules:
        if not any(part in linear.name for linear in plan):
            texts.append(
                f"MixedPrecisionArgs.filter_modules has {part!r}, which is in the name of no "
                f"linear; names are {plan[0].name}, {plan[1].name}, ..."
            )
    return texts


def _planned(listed: ListedLinear, experiment: "ExperimentArgs") -> PlannedLinear:
    """The linear with its rows, and with what measurements say."""
    precision = experiment.precision
    plain = _SHORT_NAMES[experiment.network.dtype_str]
    linear = PlannedLinear(
        name=listed.name,
        in_features=listed.in_features,
        out_features=listed.out_features,
        rows=_rows(listed, experiment),
        precision="FP32" if listed.layer is None else plain,
        reason=listed.reason or "",
    )
    if listed.reason is not None:
        return linear
    speedup = _speedup(linear, precision) if _is_filtered(precision) else None
    if speedup is not None and speedup < 1.0:
        known = f"{speedup:.2f}x is known" if speedup else "smaller than all that was measured"
        reason = f"{_TOO_SMALL}: FP8 may be slower at {linear.rows} rows ({known})"
        return dataclasses.replace(linear, reason=reason)
    return dataclasses.replace(linear, precision="FP8", reason="asked for")


def _rows(linear: ListedLinear, experiment: "ExperimentArgs") -> int:
    """Rows of the largest training step, or part of one."""
    trainer = experiment.trainer
    users = trainer.train_batch_size // trainer.gradient_accumulation_steps
    if linear.layer is not None:
        return users * experiment.max_seq_len
    events = experiment.max_num_candidates
    if experiment.history_loss or not events:
        events += experiment.max_history_events
    return users * events


def _is_filtered(precision: "MixedPrecisionArgs") -> bool:
    """Whether linears that are too small are kept out of FP8."""
    return precision.auto_filter_small and precision.linear_backend != "emulated"


def _speedup(linear: PlannedLinear, precision: "MixedPrecisionArgs") -> float | None:
    assert precision.linear_recipe is not None
    return expected_speedup(
        precision.linear_backend,
        precision.linear_recipe,
        tokens=linear.rows,
        width=linear.in_features,
        out=linear.out_features,
    )


def attach_engines(
    trunk: nn.Module, plan: Sequence[PlannedLinear], recipe: LinearRecipe | None
) -> None:
    """Give the planned linears of a trunk their engines, and the trunk what they share.

    Raises:
        RuntimeError: what the backend needs is not there.
    """
    names = [linear.name for linear in plan if linear.is_fp8]
    if recipe is None or not names:
        return
    state = None
    if recipe.scaling == "delayed" and recipe.backend != "te":
        state = Fp8State(names, recipe)
        trunk.fp8_state = state
    engine_class = _engine_class(recipe.backend)
    for linear in plan:
        if not linear.is_fp8:
            continue
        engine = engine_class(
            name=linear.name,
            in_features=linear.in_features,
            out_features=linear.out_features,
            recipe=recipe,
            state=state,
        )
        owner, _, attribute = linear.name.rpartition(".")
        if owner == "head.layers":
            head = trunk.get_submodule("head")
            assert isinstance(head, MLP)
            head.attach(int(attribute), engine)
        else:
            trunk.get_submodule(owner).engine = engine


def _engine_class(backend: str) -> type[LinearEngine]:
    if backend == "te":
        from modules.linear.te import TeEngine

        return TeEngine
    if backend == "native":
        from modules.linear.native import NativeEngine

        return NativeEngine
    from modules.linear.emulated import EmulatedEngine

    return EmulatedEngine


def format_plan(plan: Sequence[PlannedLinear], recipe: LinearRecipe | None) -> str:
    """Return a table for the log: module, shape, precision, recipe, backend, why."""
    header = ("module", "K x N", "runs in", "recipe", "backend", "why")
    rows = [header]
    for linear in plan:
        scaled = (recipe.scaling, recipe.backend) if linear.is_fp8 and recipe else ("-", "-")
        shape = f"{linear.in_features} x {linear.out_features}"
        rows.append((linear.name, shape, linear.precision, *scaled, linear.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


__all__ = ["PlannedLinear", "attach_engines", "format_plan", "plan_linears", "warnings_of"]
