"""HSTU attention through our Triton kernels: tables of tile sizes, launches, autograd.

Limits beyond the contract of `ops.hstu_attention`:
    dtypes FP32, BF16, FP16; attention_dim and linear_dim 1 to 256, run padded to a power of two (96
    costs what 128 costs); the head dim must be contiguous, else the tensor is copied; T rows below
    2**31 and a row stride below 2**23 elements (every product of the two is 64 bit).
    Nothing is read on the host. What the host cannot check there (a sequence longer than
    max_seq_len, offsets that fall) stops the device with an assertion.
    deterministic=True: dQ by a kernel of its own, so two more matrix products; bias gradients
    summed in 64-bit fixed point. Bit-equal from run to run on one kind of GPU.
    First derivatives only.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.hstu_attention import hopper_impl
from ops.hstu_attention.dispatch import CallShape, refuse_unsupported
from ops.hstu_attention.spec import AttentionSpec
from ops.hstu_attention.time_buckets import time_bucket_boundaries
from ops.hstu_attention.triton_backward import cast_kernel, keys_kernel, rows_kernel
from ops.hstu_attention.triton_forward import forward_kernel
from ops.hstu_attention.triton_kernels import Numerics, Rule
from ops.hstu_attention.triton_schedule import Schedule, build_schedule
from ops.triton_launch import cdiv, next_power_of_2

INTERPRETED = triton.knobs.runtime.interpret
_MAX_ROW_STRIDE = 2**23  # times 256 rows of a tile it still fits 31 bits
_FIXED_POINT_BITS = 30  # of one score gradient; leaves 2**32 of them room in 63 bits


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes of one kernel; `rows` x `keys` scores at a time."""

    rows: int
    keys: int
    warps: int
    stages: int
    descriptors: bool = False
    """Load whole tiles through TMA descriptors, where strides and alignment allow."""


# key: (kernel, padded head dim, bytes of an element)
TILES = {
    ("forward", 32, 2): Tiles(rows=128, keys=64, warps=4, stages=3),
    ("forward", 64, 2): Tiles(rows=128, keys=128, warps=8, stages=2, descriptors=True),
    ("forward", 128, 2): Tiles(rows=128, keys=64, warps=8, stages=3, descriptors=True),
    ("forward", 256, 2): Tiles(rows=128, keys=32, warps=8, stages=2),
    ("keys", 32, 2): Tiles(rows=64, keys=128, warps=8, stages=2),
    ("keys", 64, 2): Tiles(rows=64, keys=128, warps=8, stages=2),
    ("keys", 128, 2): Tiles(rows=32, keys=128, warps=8, stages=2),
    ("keys", 256, 2): Tiles(rows=64, keys=32, warps=8, stages=2),
    ("rows", 32, 2): Tiles(rows=128, keys=64, warps=8, stages=2),
    ("rows", 64, 2): Tiles(rows=128, keys=64, warps=8, stages=2),
    ("rows", 128, 2): Tiles(rows=128, keys=64, warps=8, stages=2),
    ("rows", 256, 2): Tiles(rows=64, keys=32, warps=8, stages=2),
    **{
        (kernel, width, 4): tiles
        for kernel in ("forward", "keys", "rows")
        for width, tiles in (
            (32, Tiles(rows=32, keys=32, warps=4, stages=2)),
            (64, Tiles(rows=32, keys=32, warps=8, stages=2)),
            (128, Tiles(rows=32, keys=32, warps=8, stages=1)),
            (256, Tiles(rows=16, keys=16, warps=8, stages=1)),
        )
    },
}
_INTERPRETER_TILES = {
    "forward": Tiles(rows=32, keys=64, warps=4, stages=1),
    "keys": Tiles(rows=64, keys=32, warps=4, stages=1),
    "rows": Tiles(rows=64, keys=32, warps=4, stages=1),
}


def hstu_attention(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return O_THV; see `ops.hstu_attention.hstu_attention`."""
    reason = _refuse(q_THA.shape[2], v_THV.shape[2], q_THA.dtype)
    if reason is None and q_THA.shape[0] >= 2**31:
        reason = f"at most 2**31 - 1 rows, got {q_THA.shape[0]}"
    if reason is not None:
        raise NotImplementedError(
            f'hstu_attention(backend = "triton"): {reason}; choose another value or '
            'backend = "pytorch"'
        )
    return _Attention.apply(
        q_THA, k_THA, v_THV, spec.position_bias, spec.time_bias, seq_offsets, spec
    )


@cache
def _refuse(attention_dim: int, linear_dim: int, dtype: torch.dtype) -> str | None:
    shape = CallShape(attention_dim=attention_dim, linear_dim=linear_dim, dtype=dtype)
    return refuse_unsupported(shape)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        seq_offsets: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        q, k, v = (_rows_contiguous(x) for x in (q, k, v))
        call = _Call(q, k, v, position_bias, time_bias, seq_offsets, spec)
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.call = call
        out = v.new_empty(v.shape)
        if v.numel():
            _launch_forward(call, q, k, v, out, position_bias, time_bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = ctx.saved_tensors
        grads = _launch_backward(
            ctx.call, q, k, v, _rows_contiguous(grad_out), position_bias, time_bias
        )
        return *grads, None, None


class _Call:
    """What forward and backward of one call share: switches, device tensors, schedules."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        seq_offsets: Tensor,
        spec: AttentionSpec,
    ) -> None:
        self.spec = spec
        self.num_rows, self.num_heads, self.attention_dim = q.shape
        self.linear_dim = v.shape[2]
        self.element_bytes = q.element_size()
        self.device = q.device
        self.seq_offsets = self._on_device(seq_offsets)
        self.contextuals = self._on_device(spec.num_contextuals)
        self.candidates = self._on_device(spec.num_candidates)
        self.timestamps = self._on_device(spec.timestamps) if time_bias is not None else None
        self.scaling_seqlen: float | Tensor = self._scaling_seqlen(spec.scaling_seqlen)
        has_contextuals = self.contextuals is not None
        self.rule = Rule(
            causal=spec.is_causal,
            has_contextuals=has_contextuals,
            contextual_rows_see_all=has_contextuals and not spec.disable_contextual_mask,
            has_candidates=self.candidates is not None,
            has_window=spec.attention_window is not None,
            has_position_bias=position_bias is not None,
            has_time_bias=time_bias is not None,
        )
        self.on_hopper = not INTERPRETED and hopper_impl.can_run(q, k, v=v, rule=self.rule)
        self.numerics = Numerics(
            tanh_approx=q.dtype != torch.float32 and not INTERPRETED,
            upcast=INTERPRETED,
            precision="ieee",
        )
        self.num_positions = 0 if position_bias is None else position_bias.shape[1]
        self.num_times = 0 if time_bias is None else time_bias.shape[1]
        self.boundaries = None
        if time_bias is not None:
            self.boundaries = time_bucket_boundaries(self.num_times, self.device)
        self._schedules: dict[int, Schedule] = {}

    def _on_device(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.device, non_blocking=True).contiguous()

    def _scaling_seqlen(self, value: float | Tensor) -> float | Tensor:
        """A number, or a tensor on the device that the kernels read themselves."""
        if isinstance(value, Tensor) and value.device == self.device and not INTERPRETED:
            return value.detach()
        return float(value)

    def schedule(self, block: int) -> Schedule:
        """The order of the blocks of `block` rows."""
        if block not in self._schedules:
            heads_together = self.num_heads if self.on_hopper else 1
            widths = self.attention_dim + self.linear_dim
            bytes_per_row = heads_together * widths * self.element_bytes
            self._schedules[block] = build_schedule(
                self.seq_offsets,
                num_rows=self.num_rows,
                max_seq_len=self.spec.max_seq_len,
                block=block,
                bytes_per_row=bytes_per_row,
                contextuals=self.contextuals,
                candidates=self.candidates,
                level_0_first=self.rule.contextual_rows_see_all,
            )
        return self._schedules[block]

    def grid(self, block: int) -> tuple[int, int]:
        """One program a block and head, one more for each block past the last offset."""
        return (self.schedule(block).max_blocks + 1, self.num_heads)

    def tiles(self, kernel: str) -> Tiles:
        """Tile sizes of a kernel."""
        if INTERPRETED:
            return _INTERPRETER_TILES[kernel]
        width = max(32, *self.padded_dims())
        tiles = TILES[kernel, width, self.element_bytes]
        if self.rule.has_position_bias or self.rule.has_time_bias:
            # a pipeline would keep whole tiles of gathered bias in shared memory: past its size
            return dataclasses.replace(tiles, stages=1)
        return tiles

    def padded_dims(self) -> tuple[int, int]:
        """attention_dim and linear_dim as powers of two that tl.dot takes."""
        return tuple(max(16, next_power_of_2(d)) for d in (self.attention_dim, self.linear_dim))

    def structure(self, block: int) -> dict[str, Any]:
        """Arguments that all kernels share: the batch's structure and the mask's numbers."""
        # beyond any sequence they mean no more, and the kernels add 32-bit numbers to them
        longest = max(1, min(self.spec.max_seq_len, self.num_rows))
        return {
            "offsets_ptr": self.seq_offsets,
            "contextuals_ptr": self.contextuals,
            "candidates_ptr": self.candidates,
            "table_ptr": self.schedule(block).table,
            "scaling_seqlen": self.scaling_seqlen,
            "alpha": self.attention_dim**-0.5,
            "num_rows": self.num_rows,
            "num_users": self.seq_offsets.numel() - 1,
            "group_size": min(self.spec.target_group_size, longest),
            "window": min(self.spec.attention_window or 0, longest),
        }

    def batch_arguments(self, block: int) -> dict[str, Any]:
        """`structure`, and what a bias reads."""
        return {
            **self.structure(block),
            "timestamps_ptr": self.timestamps,
            "boundaries_ptr": self.boundaries,
        }

    def switches(self, tiles: Tiles) -> dict[str, Any]:
        """Compile-time arguments that all attention kernels share."""
        block_a, block_v = self.padded_dims()
        return {
            "A": self.attention_dim,
            "V": self.linear_dim,
            "BLOCK_A": block_a,
            "BLOCK_V": block_v,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "NUM_POSITIONS": self.num_positions,
            "NUM_TIMES": self.num_times,
            "SCALE_IS_POINTER": isinstance(self.scaling_seqlen, Tensor),
            "RULE": self.rule,
            "NUMERICS": self.numerics,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }


def _launch_forward(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
) -> None:
    if call.on_hopper:
        hopper_impl.launch_forward(q, k, v=v, out=out, structure=call.structure, rule=call.rule)
        return
    tiles = call.tiles("forward")
    descriptors: tuple[Any, Any] = (None, None)
    if tiles.descriptors and call.padded_dims() == (call.attention_dim, call.linear_dim):
        descriptors = _descriptor(k, tiles.keys), _descriptor(v, tiles.keys)
    forward_kernel[call.grid(tiles.rows)](
        q,
        k,
        v,
        *descriptors,
        out,
        position_bias_ptr=_contiguous(position_bias),
        time_bias_ptr=_contiguous(time_bias),
        **_strides(q=q, k=k, v=v, out=out),
        **call.batch_arguments(tiles.rows),
        **call.switches(tiles),
    )


def _launch_backward(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    tables = [_contiguous(position_bias), _contiguous(time_bias)]
    factor, table_grads = _bias_grad_buffers(call, tables, v, grad_out)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not v.numel():
        return dq, dk, dv, *_finish_bias_grads(tables, factor, table_grads)
    inputs = (q, k, v, grad_out)
    if call.on_hopper:
        hopper_impl.launch_backward(inputs, (dq, dk, dv), structure=call.structure, rule=call.rule)
        return dq, dk, dv, None, None
    if call.spec.deterministic:
        _launch_keys(call, inputs, (None, dk, dv), tables, table_grads, factor)
        _launch_rows(call, inputs, dq, tables)
    else:
        dq_acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        _launch_keys(call, inputs, (dq_acc, dk, dv), tables, table_grads, factor)
        _cast(call, dq_acc, dq)
    return dq, dk, dv, *_finish_bias_grads(tables, factor, table_grads)


def _launch_keys(
    call: _Call,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor | None, Tensor, Tensor],
    tables: list[Tensor | None],
    table_grads: list[Tensor | None],
    factor: Tensor | None,
) -> None:
    """dK, dV, bias gradients and, where outputs[0] is a buffer, the sums of dQ."""
    q, k, v, grad_out = inputs
    dq_acc = outputs[0]
    tiles = call.tiles("keys")
    descriptors: list[Any] = [None, None, None]
    if tiles.descriptors and call.padded_dims() == (call.attention_dim, call.linear_dim):
        sources = [q, grad_out, dq_acc]
        descriptors = [None if x is None else _descriptor(x, tiles.rows) for x in sources]
    keys_kernel[call.grid(tiles.keys)](
        *inputs,
        *descriptors,
        *outputs,
        position_bias_ptr=tables[0],
        time_bias_ptr=tables[1],
        position_grad_ptr=table_grads[0],
        time_grad_ptr=table_grads[1],
        bias_grad_factor_ptr=factor,
        num_heads=call.num_heads,
        ADD_DQ=dq_acc is not None,
        **_strides(q=q, k=k, v=v, do=grad_out),
        **call.batch_arguments(tiles.keys),
        **call.switches(tiles),
    )


def _launch_rows(
    call: _Call, inputs: tuple[Tensor, ...], dq: Tensor, tables: list[Tensor | None]
) -> None:
    q, k, v, grad_out = inputs
    tiles = call.tiles("rows")
    rows_kernel[call.grid(tiles.rows)](
        *inputs,
        dq,
        position_bias_ptr=tables[0],
        time_bias_ptr=tables[1],
        num_heads=call.num_heads,
        **_strides(q=q, k=k, v=v, do=grad_out),
        **call.batch_arguments(tiles.rows),
        **call.switches(tiles),
    )


def _cast(call: _Call, dq_acc: Tensor, dq: Tensor) -> None:
    block = 4096
    cast_kernel[(cdiv(dq.numel(), block),)](
        dq_acc,
        dq,
        call.scaling_seqlen,
        call.attention_dim**-0.5,
        dq.numel(),
        SCALE_IS_POINTER=isinstance(call.scaling_seqlen, Tensor),
        BLOCK=block,
    )


def _bias_grad_buffers(
    call: _Call, tables: list[Tensor | None], v: Tensor, grad_out: Tensor
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the factor of score gradients on their way into the buffers, and the buffers.

    FP32 sums, or when deterministic int64 sums: integers add up to the same bits in any order.
    Their unit is 2**-30 of a bound of the score gradients: 1.1 max |dO_i| max |v_j| / scaling.
    """
    if tables == [None, None]:
        return None, [None, None]
    if not call.spec.deterministic:
        factor = torch.ones((), dtype=torch.float32, device=call.device)
        return factor, [_zeros(table, torch.float32) for table in tables]
    rows = torch.arange(call.num_rows, device=call.device)
    is_real = (rows < call.seq_offsets[-1])[:, None]
    norms = []
    for x in (v, grad_out):
        norm_TH = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        norm_TH = torch.where(is_real, norm_TH, 0.0)
        norms.append(norm_TH.max() if norm_TH.numel() else norm_TH.sum())
    scaling = call.scaling_seqlen
    bound = 1.1 * norms[0] * norms[1] / scaling
    factor = 2.0**_FIXED_POINT_BITS / bound.clamp(min=1e-30)
    return factor.float(), [_zeros(table, torch.int64) for table in tables]


def _finish_bias_grads(
    tables: list[Tensor | None], factor: Tensor | None, sums: list[Tensor | None]
) -> list[Tensor | None]:
    grads: list[Tensor | None] = []
    for table, total in zip(tables, sums, strict=True):
        if table is None or total is None or factor is None:
            grads.append(None)
        elif total.dtype == torch.int64:
            grads.append((total.double() / factor).to(table.dtype))
        else:
            grads.append(total.to(table.dtype))
    return grads


def _zeros(table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if table is None else torch.zeros(table.shape, dtype=dtype, device=table.device)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _rows_contiguous(x_THA: Tensor) -> Tensor:
    """The tensor itself when a kernel can walk it, else a copy."""
    is_contiguous = x_THA.shape[2] == 1 or x_THA.stride(2) == 1
    if is_contiguous and x_THA.stride(0) < _MAX_ROW_STRIDE:
        return x_THA
    return x_THA.contiguous()


def _strides(**tensors: Tensor) -> dict[str, int]:
    strides = {}
    for name, x in tensors.items():
        strides[f"{name}_stride"], strides[f"{name}_head_stride"] = x.stride(0), x.stride(1)
    return strides


def _descriptor(x_THA: Tensor, block_rows: int) -> Any:
    """A TMA descriptor of (T, columns of all heads), None where TMA cannot walk the tensor."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_rows, num_heads, width = x_THA.shape
    columns = (num_heads - 1) * x_THA.stride(1) + width
    row_bytes = x_THA.stride(0) * x_THA.element_size()
    is_walkable = x_THA.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and x_THA.stride(0) >= columns
    if not is_walkable:
        return None
    return TensorDescriptor(x_THA, [num_rows, columns], [x_THA.stride(0), 1], [block_rows, width])
