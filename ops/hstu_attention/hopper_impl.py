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

_GROUP_ROWS = 64  # rows or keys that a warpgroup owns
_BLOCK_ROWS = 2 * _GROUP_ROWS
_WIDE = 256
# head dim: keys of a tile, stages of k and v, places of q
_FORWARD_TILES = {64: (128, 3, 2), 128: (128, 2, 2), _WIDE: (64, 2, 1)}
# head dim: stages of the tiles that go by
_BACKWARD_STAGES = {64: 4, 128: 3}

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
    batch = structure(_BLOCK_ROWS)
    forward_kernel[_grid(q)](
        _descriptor(q, _GROUP_ROWS),
        _descriptor(k, keys),
        _descriptor(v, keys),
        out,
        num_heads=q.shape[1],
        q_head_stride=_head_stride(q),
        k_head_stride=_head_stride(k),
        v_head_stride=_head_stride(v),
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        A=width,
        V=width,
        KEYS=keys,
        STAGES=stages,
        PLACES=places,
        SCALE_IS_POINTER=isinstance(batch["scaling_seqlen"], Tensor),
        RULE=rule,
        num_warps=4,
        **batch,
    )


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
    width = qkv[0].shape[2]
    batch = structure(_BLOCK_ROWS)
    names = ("q_head_stride", "k_head_stride", "v_head_stride", "do_head_stride")
    arguments = {
        "num_heads": qkv[0].shape[1],
        **{name: _head_stride(x) for name, x in zip(names, inputs, strict=True)},
        "A": width,
        "SCALE_IS_POINTER": isinstance(batch["scaling_seqlen"], Tensor),
        "RULE": rule,
        "num_warps": 4,
        **batch,
    }
    descriptors = [_descriptor(x, _GROUP_ROWS) for x in inputs]
    dq, dk, dv = outputs
    grid = _grid(dq)
    if width == _WIDE:
        half_blocks = {**arguments, **structure(_GROUP_ROWS)}
        hopper_keys_wide.keys_kernel[grid](*descriptors, dk, dv, STAGES=2, **half_blocks)
        hopper_rows_wide.rows_kernel[grid](*descriptors, dq, **arguments)
        return
    stages = _BACKWARD_STAGES[width]
    hopper_keys.keys_kernel[grid](*descriptors, dk, dv, STAGES=stages, **arguments)
    hopper_rows.rows_kernel[grid](*descriptors, dq, STAGES=stages, **arguments)


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
    layout = _shared_layout(block_rows, width, x_THA.dtype)
    return TensorDescriptor(
        x_THA, [num_rows, columns], [row_stride, 1], [block_rows, width], layout
    )


def _grid(x: Tensor) -> tuple[int]:
    return (_num_multiprocessors(x.device),)


@lru_cache(maxsize=64)
def _shared_layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, width], element)


@lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's warpgroup instructions; Blackwell has others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=64)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
