"""Launching a Triton kernel again without looking at its arguments a second time.

`kernel[grid](...)` binds some thirty arguments and builds a cache key of their specialisations in
each call: on a CPU beside a GPU that costs as much as a small kernel runs. `launch` keeps what the
first such call returned, by what Triton specialises on (taken more finely than Triton does).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg

_MAX_ENCODINGS = 4096
_parameters: dict[int, list[tuple[str, bool]]] = {}
_compiled: dict[tuple[Any, ...], Callable[..., None]] = {}
_encodings: dict[tuple[Any, ...], list[Any]] = {}


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
    if not isinstance(kernel, triton.JITFunction):  # the interpreter's
        kernel[grid](*(arguments[name] for name in kernel.arg_names), **options)
        return
    number = id(kernel)  # a kernel lives as long as its module, and Triton hashes its source
    parameters = _parameters.get(number)
    if parameters is None:
        parameters = [(one.name, one.is_constexpr) for one in kernel.params]
        _parameters[number] = parameters
    device = torch.cuda.current_device()
    # All that Triton compiles differently for; one loop, since it is run for every launch.
    key, values = [number, device, *options.values()], []
    for name, is_compile_time in parameters:
        value = arguments[name]
        kind = type(value)
        if is_compile_time:
            key.append(value)
        elif kind is int:
            key += value == 1, value % 16 == 0, -(2**31) <= value < 2**31
        elif kind is float or value is None:
            key.append(kind)
        elif isinstance(value, Tensor):
            key += value.dtype, value.is_cuda
            # As a number: the launcher asks the driver about the pointer of every tensor.
            value = value.data_ptr()
            key.append(value % 16 == 0)
        else:  # a tensor descriptor
            key.append(value.base.dtype)
            key += value.block_shape
        values.append(value)
    again = _compiled.get(tuple(key))
    if again is None:
        compiled = kernel[grid](*(arguments[name] for name, _ in parameters), **options)
        _compiled[tuple(key)] = _launch_again(compiled)
        return
    again((*grid, 1, 1)[:3], triton.runtime.driver.active.get_current_stream(device), values)


def _launch_again(compiled: Any) -> Callable[[tuple[int, ...], int, list[Any]], None]:
    """What Triton's launcher does with these arguments, less its hooks for profilers.

    Triton encodes a descriptor for TMA in every launch; here one that was seen stays encoded.
    """
    run = compiled.run
    metadata = (compiled.packed_metadata, None, None, None)
    inner = inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
    has_scratch = run.global_scratch_size or run.profile_scratch_size
    if not inner or has_scratch or None in inner["tensordesc_meta"]:
        return lambda grid, stream, values: run(
            *grid, stream, compiled.function, *metadata, *values
        )
    encodings = {
        index: (encoding, repr(encoding))
        for index, encoding in zip(
            sorted(inner["tensordesc_indices"]), inner["tensordesc_meta"], strict=True
        )
    }
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *metadata)

    def again(grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        arguments = []
        for index, value in enumerate(values):
            if index in encodings:
                arguments += _encoded(value, *encodings[index])
            else:
                arguments.append(value)
        inner["launcher"](*grid, stream, *fixed, *arguments)

    return again


def _encoded(descriptor: Any, encoding: Any, name: str) -> list[Any]:
    """The arguments that stand for a tensor descriptor; they depend on nothing but the key."""
    key = (descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides, name)
    arguments = _encodings.get(key)
    if arguments is None:
        if len(_encodings) >= _MAX_ENCODINGS:
            _encodings.clear()
        arguments = _encodings[key] = make_tensordesc_arg(descriptor, encoding)
    return arguments


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; triton.cdiv costs the host as much as an allocation."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not below n, n at least 1."""
    return 1 << (n - 1).bit_length()
