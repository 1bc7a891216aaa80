"""The FP8 region of a step, and which machines can run FP8 linears.

This is the only place that enters Transformer Engine's context. The region is entered once a step,
around the forward pass; the backward pass runs outside of it. Native and emulated linears need no
region, so theirs does nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import torch
from torch.distributed import ProcessGroup

from configs.precision_schema import RECIPES_OF_BACKEND
from configs.schema import ExperimentArgs, MixedPrecisionArgs
from modules.linear.recipe import LinearRecipe
from modules.linear.te import load_te, te_recipe

Capability = tuple[int, int]

# Scaling -> first compute capability whose tensor cores multiply with it.
_FIRST_CAPABILITY: dict[str, Capability] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
# (backend, scaling) -> first compute capability that has it no longer. cuBLAS multiplies 1x128 by
# 128x128 blocks on Hopper only; Transformer Engine refuses MXFP8 from 12.0 on.
_CAPABILITY_END: dict[tuple[str, str], Capability] = {
    ("native", "blockwise"): (10, 0),
    ("te", "mxfp8"): (12, 0),
}
_BLOCKWISE_CUDA: Capability = (12, 9)
"""First CUDA whose cuBLAS has blockwise scaling."""

_WAY_OUT = (
    'MixedPrecisionArgs.linear_backend = "emulated" (the same rounding, slowly) or '
    "MixedPrecisionArgs.mixed_precision_dtype = None"
)


def fp8_autocast(
    recipe: LinearRecipe | None, group: ProcessGroup | None = None
) -> AbstractContextManager[object]:
    """The region that the forward pass of a step (or an evaluation) runs in.

    Args:
        recipe: of the model's FP8 linears; None: it has none.
        group: ranks that agree on delayed scales: all that hold a copy or a part of the same
            weights; None: all ranks.

    Every rank of the group enters and leaves it equally often, without tokens, too.
    """
    if recipe is None or recipe.backend != "te":
        return nullcontext()
    te = load_te()
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=te_recipe(recipe), amax_reduction_group=group)
    # its name before Transformer Engine 2.9
    return te.fp8_autocast(enabled=True, fp8_recipe=te_recipe(recipe), fp8_group=group)


def check_precision(experiment: ExperimentArgs, *, device_type: str) -> None:
    """Refuses FP8 linears that this device or its packages cannot run; within seconds.

    Raises:
        RuntimeError: naming what was asked, found and needed, and the bindings that would run.
    """
    precision = experiment.precision
    backend, scaling = precision.linear_backend, precision.linear_recipe
    if not precision.has_fp8_linears or scaling is None or backend == "emulated":
        return
    asked = f'MixedPrecisionArgs.linear_backend = "{backend}" with linear_recipe = "{scaling}"'
    first = _FIRST_CAPABILITY[scaling]
    end = _CAPABILITY_END.get((backend, scaling))
    needed = f"a CUDA device of compute capability {_dotted(first)} or later"
    if end is not None:
        needed += f" and below {_dotted(end)}"
    if device_type != "cuda":
        raise RuntimeError(
            f"{asked} needs {needed}, found device {device_type!r}; what runs: {_WAY_OUT}"
        )
    found = torch.cuda.get_device_capability()
    if found < first or (end is not None and found >= end):
        name = torch.cuda.get_device_name()
        raise RuntimeError(
            f"{asked} needs {needed}, found {_dotted(found)} ({name}); "
            f"what runs: {_other_recipes(found)}{_WAY_OUT}"
        )
    cuda = torch.version.cuda or "0.0"
    if scaling == "blockwise" and _version(cuda) < _BLOCKWISE_CUDA:
        raise RuntimeError(
            f"{asked} needs a torch built for CUDA {_dotted(_BLOCKWISE_CUDA)} or later, found "
            f"{cuda}; what runs: {_other_recipes(found)}{_WAY_OUT}"
        )
    if backend == "te":
        _check_te(precision)
    else:
        _check_triton(asked)


def _check_te(precision: MixedPrecisionArgs) -> None:
    """Refuses a Transformer Engine that is missing, does not load or lacks the recipe."""
    try:
        te_recipe(LinearRecipe.from_args(precision))
    except (RuntimeError, NotImplementedError) as error:
        has_native = precision.linear_recipe in RECIPES_OF_BACKEND["native"]
        native = 'MixedPrecisionArgs.linear_backend = "native", ' if has_native else ""
        # raised again with what the user may do about it
        raise type(error)(f"{error}; what runs: {native}{_WAY_OUT}") from None


def _check_triton(asked: str) -> None:
    """Refuses a Triton that is missing or does not load, whose kernels quantise."""
    try:
        import_module("triton")
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"{asked} needs the package triton, which cannot be imported "
            f"({type(error).__name__}: {error}); what runs: {_WAY_OUT}"
        ) from None


def _other_recipes(found: Capability) -> str:
    """The plainest recipe where the hardware has it, as the beginning of a way out."""
    has_fp8 = found >= _FIRST_CAPABILITY["tensorwise"]
    return 'MixedPrecisionArgs.linear_recipe = "tensorwise", ' if has_fp8 else ""


def _dotted(version: Capability) -> str:
    return f"{version[0]}.{version[1]}"


def _version(text: str) -> Capability:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


__all__ = ["check_precision", "fp8_autocast"]
