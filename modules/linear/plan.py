"""Which linears of a model run in FP8, and why the others do not: decided once, from the settings.

Nothing is built for it, so that what cannot work is refused before data is read.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from modules.linear.engine import LinearEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.speed_table import expected_speedup
from modules.linear.state import Fp8State
from modules.mlp import MLP

if TYPE_CHECKING:
    from configs.schema import ExperimentArgs

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

    Raises:
        ValueError: FP8 linears are asked for and none is left; not where some of them are merely
            too small for auto_filter_small, which is what that field is for (`warnings_of`).
    """
    recipe = LinearRecipe.from_args(experiment.precision)
    plan = tuple(
        _decided(linear, experiment, recipe, layer=layer) for linear, layer in _linears(experiment)
    )
    if recipe is None or any(linear.is_fp8 or linear.is_too_small for linear in plan):
        return plan
    names: dict[str, list[str]] = {}
    for linear in plan:
        names.setdefault(linear.reason, []).append(linear.name)
    reasons = "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())
    raise ValueError(
        "MixedPrecisionArgs.mixed_precision_dtype = 'fp8' must leave a linear to run in FP8, got "
        f"none ({reasons}); change these or set MixedPrecisionArgs.linear_recipe = None"
    )


def warnings_of(plan: Sequence[PlannedLinear], experiment: "ExperimentArgs") -> list[str]:
    """Return what a user of FP8 linears may not have meant."""
    precision, texts = experiment.precision, []
    if not any(linear.is_fp8 for linear in plan):
        texts.append(
            "MixedPrecisionArgs.mixed_precision_dtype = 'fp8', but no linear is large enough for "
            "FP8 to be faster, so all run without it; MixedPrecisionArgs.auto_filter_small = False "
            "runs them in FP8 all the same"
        )
    for part in precision.filter_modules:
        if not any(part in linear.name for linear in plan):
            texts.append(
                f"MixedPrecisionArgs.filter_modules has {part!r}, which is in the name of no "
                f"linear; names are {plan[0].name}, {plan[1].name}, ..."
            )
    return texts


def _linears(experiment: "ExperimentArgs") -> Iterator[tuple[PlannedLinear, int | None]]:
    """All linears without a decision, each with its layer; None for the head."""
    network, trainer = experiment.network, experiment.trainer
    users = trainer.train_batch_size // trainer.gradient_accumulation_steps
    heads = network.num_attention_heads
    uvqk = 2 * heads * (network.linear_dim + network.attention_dim)
    shapes = {
        "input.uvqk": (network.hidden_size, uvqk),
        "output.proj": (heads * network.linear_dim, network.hidden_size),
    }
    precision = _SHORT_NAMES[network.dtype_str]
    for layer in range(network.num_layers):
        for name, (width, out) in shapes.items():
            yield (
                PlannedLinear(
                    name=f"stack.layers.{layer}.{name}",
                    in_features=width,
                    out_features=out,
                    rows=users * experiment.max_seq_len,
                    precision=precision,
                    reason="",
                ),
                layer,
            )
    if experiment.ranking is None:
        return
    events = experiment.max_num_candidates
    if experiment.history_loss or not events:
        events += experiment.max_history_events
    width, index = network.hidden_size, 0
    for out in experiment.ranking.prediction_head_arch:
        yield (
            PlannedLinear(
                name=f"head.layers.{index}",
                in_features=width,
                out_features=out,
                rows=users * events,
                precision="FP32",
                reason="",
            ),
            None,
        )
        width, index = out, index + 3  # an activation and dropout in between


def _decided(
    linear: PlannedLinear,
    experiment: "ExperimentArgs",
    recipe: LinearRecipe | None,
    *,
    layer: int | None,
) -> PlannedLinear:
    reason = _reason_against(linear, experiment, recipe, layer=layer)
    if reason is not None:
        return dataclasses.replace(linear, reason=reason)
    return dataclasses.replace(linear, precision="FP8", reason="asked for")


def _reason_against(
    linear: PlannedLinear,
    experiment: "ExperimentArgs",
    recipe: LinearRecipe | None,
    *,
    layer: int | None,
) -> str | None:
    """Why a linear does not run in FP8, None where it does."""
    args, num_layers = experiment.precision, experiment.network.num_layers
    if recipe is None:
        return "FP8 is off"
    if layer is None and not args.enable_fp8_for_prediction_head:
        return "enable_fp8_for_prediction_head is off"
    if layer is not None and layer < args.num_bf16_layers_at_start:
        return f"one of the first {args.num_bf16_layers_at_start} layers"
    if layer is not None and layer >= num_layers - args.num_bf16_layers_at_end:
        return f"one of the last {args.num_bf16_layers_at_end} layers"
    for part in args.filter_modules:
        if part in linear.name:
            return f"filter_modules has {part!r}"
    for width in (linear.in_features, linear.out_features):
        if width % recipe.width_multiple:
            return f"width {width} is not divisible by {recipe.width_multiple}, as FP8 needs"
    if args.auto_filter_small and recipe.backend != "emulated":
        speedup = expected_speedup(
            recipe.backend,
            recipe.scaling,
            tokens=linear.rows,
            width=linear.in_features,
            out=linear.out_features,
        )
        if speedup is not None and speedup < 1.0:
            known = f"{speedup:.2f}x is known" if speedup else "smaller than all that was measured"
            return f"{_TOO_SMALL}: FP8 may be slower at {linear.rows} rows ({known})"
    return None


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
