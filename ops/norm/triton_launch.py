"""Launching a Triton kernel again without binding and hashing all its arguments again.

`kernel[grid](...)` costs the host 20 to 30 us, as much as a small kernel runs. The compiled kernel
that it returns is kept here by all that Triton specialises on, and is launched directly next time.
"""

from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int], arguments: dict[str, Any], **options: int | None) -> None:
    """Run kernel[grid](**arguments, **options) on the current device.

    Args:
        kernel: of triton.jit, at the top of a module, without defaults, heuristics or autotuning.
        grid: one size.
        arguments: all its parameters by name, compile-time ones included.
        options: num_warps, maxnreg.
    """
    values = [arguments[name] for name in kernel.arg_names]
    if not isinstance(kernel, triton.JITFunction):  # the interpreter's
        kernel[grid](*values, **options)
        return
    kinds = [
        value if parameter.is_constexpr else _kind(value)
        for parameter, value in zip(kernel.params, values, strict=True)
    ]
    key = (id(kernel), torch.cuda.current_device(), *options.values(), *kinds)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*values, **options)
    else:
        compiled[(*grid, 1, 1)](*values)


def _kind(value: Any) -> Any:
    """What Triton compiles differently for, or finer: alignment, 1, and the type of an integer."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return type(value)  # float or None
