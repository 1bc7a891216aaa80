"""Launching a Triton kernel again without looking at its arguments a second time.

`kernel[grid](...)` binds some thirty arguments and builds a cache key of their specialisations in
each call: on a CPU beside a GPU that costs as much as a small kernel runs. `launch` keeps what the
first such call returned, by what Triton specialises on (taken more finely than Triton does).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int | None
) -> None:
    """Run kernel[grid](**arguments, **options).

    Args:
        kernel: a triton.jit or gluon.jit function without heuristics or autotuning.
        grid: one to three sizes.
        arguments: its parameters by name, compile-time ones included; others are left out.
        options: num_warps, num_stages, maxnreg.
    """
    values = [arguments[name] for name in kernel.arg_names]
    if not isinstance(kernel, triton.JITFunction):  # the interpreter's
        kernel[grid](*values, **options)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, *options.values(), *map(_kind, values, _compile_time(kernel)))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*values, **options)
        return
    # as Triton's own launch ends, less its hooks for profilers that nobody has set
    stream = triton.runtime.driver.active.get_current_stream(device)
    metadata = (compiled.packed_metadata, None, None, None)
    compiled.run(*(*grid, 1, 1)[:3], stream, compiled.function, *metadata, *values)


@cache
def _compile_time(kernel: Any) -> tuple[bool, ...]:
    return tuple(parameter.is_constexpr for parameter in kernel.params)


def _kind(value: Any, is_compile_time: bool) -> Any:
    """All that Triton compiles differently for."""
    if is_compile_time:
        return value
    kind = type(value)
    if kind is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if kind is float or value is None:
        return kind
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    # a tensor descriptor
    return value.base.dtype, *value.block_shape
