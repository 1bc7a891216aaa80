"""All linears of a model and which of them FP8 may run, as far as settings alone decide it.

`modules/linear/plan.py` adds what takes measurements: rows, and which linears are too small.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.rules import ConfigError

if TYPE_CHECKING:
    from configs.schema import ExperimentArgs

_WIDTH_MULTIPLES = {"mxfp8": 32}
"""linear_recipe -> what both widths of a linear must be divisible by, where that is not 16; no
width is padded."""

_HEAD_WIDTHS = (
    "NetworkArgs.num_attention_heads",
    "NetworkArgs.kv_channels",
    "NetworkArgs.linear_channels",
)


@dataclass(frozen=True, kw_only=True)
class ListedLinear:
    """One linear of the model."""

    name: str
    """Of the module in the trunk."""
    layer: int | None
    """None: of the prediction head."""
    in_features: int
    out_features: int
    reason: str | None = None
    """Why FP8 may not run it; None: it may."""
    fields: tuple[str, ...] = ()
    """Settings that the reason comes from."""


def list_linears(experiment: "ExperimentArgs") -> tuple[ListedLinear, ...]:
    """Return all linears of the stack and of the ranking head, in the order they run."""
    return tuple(_decided(linear, experiment) for linear in _linears(experiment))


def check_linears(experiment: "ExperimentArgs") -> None:
    """Refuses FP8 linears where no linear can be one.

    Raises:
        ConfigError: naming all linears, by reason.
    """
    linears = list_linears(experiment)
    if not experiment.precision.has_fp8_linears or any(one.reason is None for one in linears):
        return
    names: dict[str, list[str]] = {}
    for linear in linears:
        names.setdefault(linear.reason or "", []).append(linear.name)
    reasons = "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())
    raise ConfigError(
        "MixedPrecisionArgs.mixed_precision_dtype = 'fp8' must leave a linear to run in FP8, got "
        f"none ({reasons}); change these or set MixedPrecisionArgs.linear_recipe = None",
        *dict.fromkeys(field for linear in linears for field in linear.fields),
        "MixedPrecisionArgs.mixed_precision_dtype",
    )


def _linears(experiment: "ExperimentArgs") -> Iterator[ListedLinear]:
    """All linears without a decision, as a rank has them: with the widths of its own heads."""
    network = experiment.network
    heads = network.num_attention_heads // experiment.parallel.tensor_model_parallel_size
    hidden = network.hidden_size
    uvqk = 2 * heads * (network.linear_dim + network.attention_dim)
    shapes = {"input.uvqk": (hidden, uvqk), "output.proj": (heads * network.linear_dim, hidden)}
    for layer in range(network.num_layers):
        for name, (width, out) in shapes.items():
            name = f"stack.layers.{layer}.{name}"
            yield ListedLinear(name=name, layer=layer, in_features=width, out_features=out)
    if experiment.ranking is None:
        return
    width, index = hidden, 0
    for out in experiment.ranking.prediction_head_arch:
        name = f"head.layers.{index}"
        yield ListedLinear(name=name, layer=None, in_features=width, out_features=out)
        width, index = out, index + 3  # an activation and dropout in between


def _decided(linear: ListedLinear, experiment: "ExperimentArgs") -> ListedLinear:
    reason, fields = _reason_against(linear, experiment)
    return dataclasses.replace(linear, reason=reason, fields=fields)


def _reason_against(
    linear: ListedLinear, experiment: "ExperimentArgs"
) -> tuple[str | None, tuple[str, ...]]:
    """Why FP8 may not run a linear (None where it may), and the settings which that comes from."""
    args, layer = experiment.precision, linear.layer
    if not args.has_fp8_linears:
        return "FP8 is off", ()
    if layer is None and not args.enable_fp8_for_prediction_head:
        field = "enable_fp8_for_prediction_head"
        return f"{field} is off", (f"MixedPrecisionArgs.{field}",)
    if layer is not None and layer < args.num_bf16_layers_at_start:
        fields = ("MixedPrecisionArgs.num_layers_at_start_in_bf16",)
        return f"one of the first {args.num_bf16_layers_at_start} layers", fields
    if layer is not None and layer >= experiment.network.num_layers - args.num_bf16_layers_at_end:
        fields = ("MixedPrecisionArgs.num_layers_at_end_in_bf16",)
        return f"one of the last {args.num_bf16_layers_at_end} layers", fields
    for part in args.filter_modules:
        if part in linear.name:
            return f"filter_modules has {part!r}", ("MixedPrecisionArgs.filter_modules",)
    multiple = _WIDTH_MULTIPLES.get(args.linear_recipe or "", 16)
    for width in (linear.in_features, linear.out_features):
        if width % multiple:
            reason = f"width {width} is not divisible by {multiple}, as FP8 needs"
            return reason, _fields_of(width, linear, experiment)
    return None, ()


def _fields_of(width: int, linear: ListedLinear, experiment: "ExperimentArgs") -> tuple[str, ...]:
    """The settings that a width of a linear comes from."""
    if width == experiment.network.hidden_size:
        return ("NetworkArgs.hidden_size",)
    return ("RankingArgs.prediction_head_arch",) if linear.layer is None else _HEAD_WIDTHS
