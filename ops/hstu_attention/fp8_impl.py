"""FP8 HSTU attention on Hopper: quantisers, launches, autograd. Numerics: `emulated_impl`.

Limits beyond the contract of `ops.hstu_attention`: `dispatch.refuse_fp8`. Nothing is read on the
host; what it cannot check there stops the device with an assertion (`triton_schedule`). The same
bits every run. First derivatives only.

Kept for the backward pass: codes of q, k and v, and transposed codes of q and k, 5 bytes for 6 of
BF16. From the projection, `recompute` keeps only that, which SiLU's backward pass needs anyway, and
quantises again.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.hstu_attention.emulated_impl import static_exponent
from ops.hstu_attention.fp8_operands import (
    Fp8Operand,
    quantize_grad,
    quantize_qkv,
    quantize_uvqk,
)
from ops.hstu_attention.spec import FP8_BLOCK_ROWS, FP8_FACTOR, AttentionSpec, Fp8Spec
from ops.hstu_attention.triton_kernels import Rule
from ops.hstu_attention.triton_schedule import build_schedule
from ops.silu_split import triton_impl as silu

if TYPE_CHECKING:
    from ops.silu_split.triton_fp8 import GradientTarget

_MAX_ROW_STRIDE = 2**27  # the quantiser steps nine rows in 32 bits
_Operands = tuple[Fp8Operand, Fp8Operand, Fp8Operand]


def hstu_attention(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return O_THV; see `ops.hstu_attention.hstu_attention`. spec.fp8 is not None."""
    batch = _Batch(q_THA, q_THA.shape[1], seq_offsets, spec)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THA, k_THA, v_THV))
    return _Attention.apply(q_THA, k_THA, v_THV, batch, wants_grad)


def hstu_attention_from_uvqk(
    uvqk_TX: Tensor,
    *,
    bias_X: Tensor | None,
    seq_offsets: Tensor,
    spec: AttentionSpec,
    num_heads: int,
    gradient_target: "GradientTarget | None",
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Return O_THA and u_THA; see `ops.hstu_attention.hstu_attention_from_uvqk`."""
    batch = _Batch(uvqk_TX, num_heads, seq_offsets, spec)
    inputs = (uvqk_TX,) if bias_X is None else (uvqk_TX, bias_X)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return _FromProjection.apply(uvqk_TX, bias_X, batch, gradient_target, wants_grad, recompute)


class _Batch:
    """What forward and backward of one call share: the batch's structure, rule, schedules."""

    def __init__(
        self, rows: Tensor, num_heads: int, seq_offsets: Tensor, spec: AttentionSpec
    ) -> None:
        assert spec.fp8 is not None
        self.spec = spec
        self.fp8: Fp8Spec = spec.fp8
        self.num_rows, self.num_heads = rows.shape[0], num_heads
        # (T, H, A), or the projection (T, H * 4 A)
        self.width = rows.shape[2] if rows.dim() == 3 else rows.shape[1] // (4 * num_heads)
        self.device = rows.device
        self.seq_offsets = seq_offsets.to(self.device, non_blocking=True).contiguous()
        self.contextuals = self._on_device(spec.num_contextuals)
        self.candidates = self._on_device(spec.num_candidates)
        self.scaling_seqlen = self._scaling_seqlen(spec.scaling_seqlen)
        has_contextuals = self.contextuals is not None
        self.rule = Rule(
            causal=spec.is_causal,
            has_contextuals=has_contextuals,
            contextual_rows_see_all=has_contextuals and not spec.disable_contextual_mask,
            has_candidates=self.candidates is not None,
            has_window=spec.attention_window is not None,
            has_position_bias=False,
            has_time_bias=False,
        )
        self._structures: dict[int, dict[str, Any]] = {}

    def _on_device(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.device, non_blocking=True).contiguous()

    def _scaling_seqlen(self, value: float | Tensor) -> float | Tensor:
        """A number, or a tensor on the device that the kernels read themselves."""
        if isinstance(value, Tensor) and value.device == self.device:
            return value.detach()
        return float(value)

    def check(self) -> None:
        """Stop the device where offsets do not fit the rows, before a quantiser walks them."""
        self.structure(FP8_BLOCK_ROWS)

    @property
    def is_scaled(self) -> bool:
        """Return whether q, k and v have scales."""
        return self.fp8.mode != "cast"

    def structure(self, block: int) -> dict[str, Any]:
        """Return the kernels' arguments from the batch, with a schedule of blocks of rows."""
        if block not in self._structures:
            self._structures[block] = self._structure(block)
        return self._structures[block]

    def _structure(self, block: int) -> dict[str, Any]:
        spec = self.spec
        schedule = build_schedule(
            self.seq_offsets,
            num_rows=self.num_rows,
            max_seq_len=spec.max_seq_len,
            block=block,
            bytes_per_row=4 * self.num_heads * self.width,  # q, k, v and dO, a byte each
            contextuals=self.contextuals,
            candidates=self.candidates,
            level_0_first=self.rule.contextual_rows_see_all,
        )
        # beyond any sequence they mean no more, and the kernels add 32-bit numbers to them
        longest = max(1, min(spec.max_seq_len, self.num_rows))
        return {
            "offsets_ptr": self.seq_offsets,
            "contextuals_ptr": self.contextuals,
            "candidates_ptr": self.candidates,
            "table_ptr": schedule.table,
            "scaling_seqlen": self.scaling_seqlen,
            "alpha": self.width**-0.5 / FP8_FACTOR**2,  # codes of q and k are that much larger
            "num_rows": self.num_rows,
            "num_users": self.seq_offsets.numel() - 1,
            "group_size": min(spec.target_group_size, longest),
            "window": min(spec.attention_window or 0, longest),
            "weight_factor": 2.0**self.fp8.weight_exponent,
            "slope_factor": _slope_factor(self.fp8, self.width),
        }

    def forward(self, operands: _Operands, like: Tensor) -> Tensor:
        """Return O (T, H, A) in the dtype of `like`."""
        from ops.hstu_attention import hopper_fp8_impl  # not at the top: Gluon, for Hopper alone

        def structure(block: int) -> dict[str, Any]:
            # codes of v are larger, too; in the backward pass alpha sees to it
            found = self.structure(block)
            return {**found, "scaling_seqlen": found["scaling_seqlen"] * FP8_FACTOR}

        out = like.new_empty((self.num_rows, self.num_heads, self.width))
        hopper_fp8_impl.launch_forward(
            *operands, out=out, structure=structure, rule=self.rule, scaled=self.is_scaled
        )
        return out

    def backward(self, operands: _Operands, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV in the dtype of dO."""
        from ops.hstu_attention import hopper_fp8_impl

        do = quantize_grad(
            _walkable(grad_out),
            seq_offsets=self.seq_offsets,
            mode=self.fp8.mode,
            dtype=self.fp8.grad_dtype,
        )
        dq, dk, dv = (grad_out.new_empty(grad_out.shape) for _ in range(3))
        hopper_fp8_impl.launch_backward(
            *operands,
            do,
            grads=(dq, dk, dv),
            structure=self.structure,
            rule=self.rule,
            scaled=self.is_scaled,
            longest=min(self.spec.max_seq_len, self.num_rows),
        )
        return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: _Batch, wants_grad: bool
    ) -> Tensor:
        ctx.batch = batch
        if not v.numel():
            return torch.empty_like(v)
        batch.check()
        operands = quantize_qkv(
            *map(_walkable, (q, k, v)),
            seq_offsets=batch.seq_offsets,
            mode=batch.fp8.mode,
            wants_q_k_transposed=wants_grad,
        )
        out = batch.forward(operands, v)
        if wants_grad:
            ctx.save_for_backward(*_kept(operands))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if not grad_out.numel():
            return *(torch.empty_like(grad_out) for _ in range(3)), None, None
        return *ctx.batch.backward(_operands(*ctx.saved_tensors), grad_out), None, None


class _FromProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        uvqk: Tensor,
        bias: Tensor | None,
        batch: _Batch,
        gradient_target: "GradientTarget | None",
        wants_grad: bool,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        uvqk = uvqk.contiguous()
        ctx.batch, ctx.gradient_target = batch, gradient_target
        ctx.set_materialize_grads(False)
        u = uvqk.detach().view(-1, batch.num_heads, 4 * batch.width)[..., : batch.width]
        kept: list[Tensor] = []
        if batch.num_rows:
            batch.check()
            keeps = wants_grad and not recompute
            operands = _quantize(uvqk, bias, batch, wants_q_k_transposed=keeps)
            out = batch.forward(operands, uvqk)
            kept = _kept(operands) if keeps else kept
        else:
            out = torch.empty_like(u)
        ctx.save_for_backward(uvqk, bias, *kept)
        return out, u

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_u: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        uvqk, bias, *kept = ctx.saved_tensors
        batch: _Batch = ctx.batch
        dims = (batch.num_heads, batch.width, batch.width)
        dq = dk = dv = None
        if grad_out is not None and batch.num_rows:
            if kept:
                operands = _operands(*kept)
            else:
                operands = _quantize(uvqk, bias, batch, wants_v_transposed=False)
            dq, dk, dv = batch.backward(operands, grad_out)
        parts = [
            silu._walkable(x, uvqk, batch.num_heads, batch.width) for x in (grad_u, dv, dq, dk)
        ]
        target = ctx.gradient_target
        if target is not None and batch.num_rows:
            from ops.silu_split.triton_fp8 import silu_backward_cast

            duvqk, dbias = silu_backward_cast(
                uvqk, bias, parts, dims, activates_u=False, target=target
            )
        else:
            duvqk, dbias = silu._launch_backward(uvqk, bias, parts, dims, False)
        return duvqk, dbias, None, None, None, None


def _quantize(uvqk: Tensor, bias: Tensor | None, batch: _Batch, **wanted: bool) -> _Operands:
    return quantize_uvqk(
        uvqk,
        bias_X=bias,
        num_heads=batch.num_heads,
        seq_offsets=batch.seq_offsets,
        mode=batch.fp8.mode,
        **wanted,
    )


def _kept(operands: _Operands) -> list[Tensor]:
    """Return what the backward pass reads of q, k and v: not the transposed codes of v."""
    q, k, v = operands
    assert q.codes_t is not None and k.codes_t is not None
    scales = [x.scale_inv for x in operands]
    return [q.codes, k.codes, v.codes, *scales, q.codes_t, k.codes_t]


def _operands(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    q_t: Tensor, k_t: Tensor,
) -> _Operands:  # fmt: skip
    """`_kept`, put together again."""
    return Fp8Operand(q, q_t, q_scale), Fp8Operand(k, k_t, k_scale), Fp8Operand(v, None, v_scale)


def _walkable(x_THA: Tensor) -> Tensor:
    """The tensor itself where its head dim is contiguous, else a copy."""
    is_walkable = x_THA.stride(2) == 1 and x_THA.stride(0) < _MAX_ROW_STRIDE
    return x_THA if is_walkable else x_THA.contiguous()


@cache
def _slope_factor(fp8: Fp8Spec, width: int) -> float:
    return 2.0 ** -static_exponent(fp8, width)
