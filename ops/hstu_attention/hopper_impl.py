"""Launches of the Gluon kernels for Hopper: which calls they take, tiles, descriptors."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ops.hstu_attention import hopper_keys, hopper_keys_wide, hopper_rows, hopper_rows_wide
from ops.hstu_attention.hopper_forward import forward_kernel
from ops.hstu_attention.triton_kernels import Rule
from ops.triton_launch import launch

_GROUP_ROWS = 64  # rows or keys that a warpgroup owns
_BLOCK_ROWS = 2 * _GROUP_ROWS
_WIDE = 256
# head dim: keys of a tile, stages of k and v, places of q
_FORWARD_TILES = {64: (128, 3, 2), 128: (128, 2, 2), _WIDE: (64, 2, 1)}
_BACKWARD_STAGES = 4  # of the tiles that go by

Structure = Callable[[int], dict[str, Any]]
"""The arguments that describe the batch, with a schedule of blocks of so many rows."""


def can_run(q: Tensor, k: Tensor, *, v: Tensor, rule: Rule) -> bool:
    """Whether the kernels take such a call.

    BF16, one head dim of 64, 128 or 256, no bias, strides that TMA can walk, on Hopper.
    """
    has_bias = rule.has_position_bias or rule.has_time_bias
    fits = v.shape == q.shape and q.shape[2] in _FORWARD_TILES
    if has_bias or q.dtype != torch.bfloat16 or not fits or not _is_hopper(q.device):
        return False
    return all(_can_be_walked(x) for x in (q, k, v))


def launch_forward(
    q: Tensor, k: Tensor, *, v: Tensor, out: Tensor, structure: Structure, rule: Rule
) -> None:
    """Fill out (T, H, V), any strides with contiguous rows."""
    width = q.shape[2]
    keys, stages, places = _FORWARD_TILES[width]
    arguments = {
        **_shared_arguments((q, k, v), structure(_BLOCK_ROWS), rule),
        "k_desc": _descriptor(k, keys),
        "v_desc": _descriptor(v, keys),
        "out_ptr": out,
        "out_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "V": width,
        "KEYS": keys,
        "STAGES": stages,
        "PLACES": places,
    }
    launch(forward_kernel, _grid(q), arguments, num_warps=4)


def launch_backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    *,
    structure: Structure,
    rule: Rule,
) -> None:
    """Fill dQ, dK and dV.

    Args:
        inputs: q, k, v, dO; dO is copied where TMA cannot walk it.
        outputs: dQ, dK, dV, contiguous (T, H, A).
    """
    *qkv, grad_out = inputs
    if not _can_be_walked(grad_out):
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)
    inputs = (*qkv, grad_out)
    is_wide = qkv[0].shape[2] == _WIDE
    arguments = _shared_arguments(inputs, structure(_BLOCK_ROWS), rule)
    arguments |= dict(zip(("dq_ptr", "dk_ptr", "dv_ptr"), outputs, strict=True))
    grid = _grid(qkv[0])
    if is_wide:
        half_blocks = {**arguments, **structure(_GROUP_ROWS), "STAGES": 2}
        launch(hopper_keys_wide.keys_kernel, grid, half_blocks, num_warps=4)
        launch(hopper_rows_wide.rows_kernel, grid, arguments, num_warps=4)
    else:
        arguments["STAGES"] = _BACKWARD_STAGES
        launch(hopper_keys.keys_kernel, grid, arguments, num_warps=4)
        launch(hopper_rows.rows_kernel, grid, arguments, num_warps=4)


def _shared_arguments(
    inputs: tuple[Tensor, ...], batch: dict[str, Any], rule: Rule
) -> dict[str, Any]:
    """Arguments from q, k, v and, in backward, dO, and from the structure of the batch."""
    arguments = {
        **batch,
        "num_heads": inputs[0].shape[1],
        "A": inputs[0].shape[2],
        "SCALE_IS_POINTER": isinstance(batch["scaling_seqlen"], Tensor),
        "RULE": rule,
    }
    for name, x in zip(("q", "k", "v", "do"), inputs, strict=False):
        arguments[f"{name}_desc"] = _descriptor(x, _GROUP_ROWS)
        arguments[f"{name}_head_stride"] = _head_stride(x)
    return arguments


def _can_be_walked(x_THA: Tensor) -> bool:
    """Whether TMA can walk the tensor as (T, columns of all heads)."""
    num_heads, width = x_THA.shape[1:]
    row_stride, head_stride = x_THA.stride(0), _head_stride(x_THA)
    columns = (num_heads - 1) * head_stride + width
    aligned = x_THA.data_ptr() % 16 == 0 and row_stride % 8 == 0 and head_stride % 8 == 0
    return aligned and row_stride >= columns


def _head_stride(x_THA: Tensor) -> int:
    """The distance of two heads; a single head has none, whatever the tensor says."""
    return x_THA.stride(1) if x_THA.shape[1] > 1 else 0


def _descriptor(x_THA: Tensor, block_rows: int) -> TensorDescriptor:
    num_rows, num_heads, width = x_THA.shape
    row_stride = x_THA.stride(0)
    columns = (num_heads - 1) * _head_stride(x_THA) + width
    descriptor = object.__new__(TensorDescriptor)
    checked = _checked_descriptor(row_stride, columns, block_rows, width)
    descriptor.__dict__.update(checked.__dict__, base=x_THA, shape=[num_rows, columns])
    return descriptor


@lru_cache(maxsize=64)
def _checked_descriptor(
    row_stride: int, columns: int, block_rows: int, width: int
) -> TensorDescriptor:
    """A descriptor of no rows: Triton would check it each time, at a launch's cost for a few."""
    layout = gl.NVMMASharedLayout.get_default_for([block_rows, width], gl.bfloat16)
    nothing = torch.empty(0, columns, dtype=torch.bfloat16)
    return TensorDescriptor(nothing, [1, columns], [row_stride, 1], [block_rows, width], layout)


def _grid(x: Tensor) -> tuple[int]:
    return (_num_multiprocessors(x.device),)


@lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's warpgroup instructions; Blackwell has others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=64)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
