"""FP8 HSTU attention in plain torch: the roundings of the FP8 kernels, products in FP32.

The numerics baseline of the kernels, and what trains with FP8 attention on a CPU. Operands are
rounded where a kernel rounds them; what a tensor core accumulates is accumulated in FP32 (float64
for float64 inputs). Layout, masks and biases are those of `pytorch_impl`.

    product        left                               right        applied to the sum
    S  = q k^T     q                                  k            A**-0.5
    O  = P v       P = silu(S), times w               v            1 / scaling_seqlen
    dP = dO v^T    dO                                 v            (none: dP stays normalised)
    dV = P^T dO    P                                  dO           1 / scaling_seqlen
    dK = dS^T q    dS = silu'(S) dP, times 2**-c      q            A**-0.5 / scaling_seqlen
    dQ = dS k      dS                                 k            A**-0.5 / scaling_seqlen

All codes are E4M3, but those of dO are what `Fp8Spec.grad_dtype` says; `INTERMEDIATE` says what P
and dS are in each product. Scales come off after a product: no 1 / scaling_seqlen and no small dO
reaches a cast. They are powers of two, as is P's and dS's factor, so that none of them changes a
rounding but at the ends of the format's range.

w keeps small weights from being flushed. In the mode cast it is 2**Fp8Spec.weight_exponent. With
scales s_q and s_k, |S| is at most A**0.5 448**2 s_q s_k, so w is the largest power of two under
which that bound fits E4M3, but not below 1 nor above 2**30. A bias is outside of that bound: with
one, w is as in the mode cast. dS is made of dO and v without their scales, both at most the largest
number of their format, so a static c keeps it from saturating (where v has no scale, for |v| up to
8). dS in BF16 would take 2% off dQ's error. Biases are added to S, and their gradients taken from
dS, in FP32.

Scales of q, k and v by mode; those of dO are the same, but a block's in the modes cast and per_row:

    cast         none, values saturate      per_head     a user and head
    per_row      a row and head (below)     per_batch    a user
    per_block    128 rows of a user, head   per_tensor   all rows of users

scale_inv is the smallest power of two with amax / scale_inv within the format, from 2**-120 to
2**60; 1 for zeros. Rows of no user enter no maximum. per_row and per_batch are emulated alone.
q, k and v are multiplied by `FP8_FACTOR` as well, which comes off with their scales.
A product contracts over rows in O, dV, dK and dQ, so a scale a row is legal in S alone: in the mode
per_row v, and q as operand of dK, have a block's scales; k in dQ is multiplied by its row's.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.hstu_attention.buckets import Bucket, MaskRule, Plan, plan_buckets
from ops.hstu_attention.padded import (
    TileBias,
    counts_of,
    head_major,
    mask_tile,
    matmul,
    pad,
    scores_of,
    unpad,
    wide,
)
from ops.hstu_attention.spec import FP8_BLOCK_ROWS, FP8_FACTOR, AttentionSpec, Fp8Spec
from ops.quantize import FP8_MAX

INTERMEDIATE: dict[str, str] = {"O": "e4m3", "dV": "e4m3", "dK": "e4m3", "dQ": "e4m3"}
"""Product -> format of P or dS in it: what the kernels do, and what a study changes ("bf16")."""

_E4M3 = torch.float8_e4m3fn
_TOP_EXPONENT = {_E4M3: 8, torch.float8_e5m2: 15}  # the largest number is 1.75 * 2**this
_LARGEST_UNIT = 2.0**30
_INFINITY = 0x7F800000  # as an integer, with what carries a mantissa above 1.75 to the exponent
_ABOVE_1_75 = 0x1FFFFF
_UNSCALED_AMAX = 8.0  # of v without a scale: activations; larger ones saturate in dS first
_STEEPEST = 1.1  # of silu
# mode -> what shares a scale: of q and k in S, of the rest, of dO
_GRANULARITIES: dict[str, tuple[str, str, str]] = {
    "cast": ("none", "none", "block"),
    "per_row": ("row", "block", "block"),
    "per_block": ("block", "block", "block"),
    "per_head": ("head", "head", "head"),
    "per_batch": ("user", "user", "user"),
    "per_tensor": ("tensor", "tensor", "tensor"),
}


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of users in FP8."""

    codes: Tensor
    """(rows, H, A)."""
    scale_inv: Tensor
    """(rows, H or 1, 1), float32 powers of two."""
    factor: float = FP8_FACTOR
    """What the values were multiplied by besides."""

    def normalised(self, dtype: torch.dtype) -> Tensor:
        """Return the codes as (H, rows, A)."""
        return head_major(self.codes.to(dtype))

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for, (H, rows, A)."""
        return head_major(self.codes.to(dtype) * (self.scale_inv.to(dtype) / self.factor))

    def scales(self, dtype: torch.dtype) -> Tensor:
        """Return scale_inv as (H, rows, 1)."""
        num_rows, num_heads, _ = self.codes.shape
        return head_major(self.scale_inv.to(dtype).expand(num_rows, num_heads, 1))


def hstu_attention(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return O_THV; see `ops.hstu_attention.hstu_attention`. spec.fp8 is not None."""
    num_users = seq_offsets.numel() - 1
    offsets = tuple(seq_offsets.tolist())
    plan = plan_buckets(
        offsets,
        counts_of(spec.num_contextuals, num_users),
        counts_of(spec.num_candidates, num_users),
        num_rows=q_THA.shape[0],
        rule=MaskRule(
            target_group_size=spec.target_group_size,
            is_causal=spec.is_causal,
            disable_contextual_mask=spec.disable_contextual_mask,
            attention_window=spec.attention_window,
        ),
        dtype=wide(q_THA.dtype),
        device=q_THA.device,
    )
    return _Fp8Attention.apply(
        q_THA, k_THA, v_THV, spec.position_bias, spec.time_bias, spec, plan, offsets
    )


class _Fp8Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        spec: AttentionSpec,
        plan: Plan,
        offsets: tuple[int, ...],
    ) -> Tensor:
        in_scores, elsewhere, _ = _GRANULARITIES[_fp8(spec).mode]
        q_rows, k_rows = (_quantize(x, _E4M3, in_scores, offsets) for x in (q, k))
        v_rows = _quantize(v, _E4M3, elsewhere, offsets)
        # of another scale only where one a row would vary along dK's contraction
        q_dK = q_rows if elsewhere == in_scores else _quantize(q, _E4M3, elsewhere, offsets)
        saved = [x for rows in (q_rows, k_rows, v_rows, q_dK) for x in (rows.codes, rows.scale_inv)]
        ctx.save_for_backward(position_bias, time_bias, *saved)
        ctx.spec, ctx.plan, ctx.offsets = spec, plan, offsets
        ctx.likes = tuple(x.new_empty(0, *x.shape[1:]) for x in (q, k, v))
        dtype, inverse_scale = wide(q.dtype), 1.0 / float(spec.scaling_seqlen)
        q_HTA, k_HTA, v_HTV = (rows.values(dtype) for rows in (q_rows, k_rows, v_rows))
        scales = q_rows.scales(dtype), k_rows.scales(dtype)
        outputs = []
        for bucket in plan.buckets:
            padded_q, padded_k = pad(q_HTA, bucket), pad(k_HTA, bucket)
            padded_v = pad(v_HTV, bucket, zero=True)
            padded_out = torch.empty_like(padded_v, memory_format=torch.contiguous_format)
            q_scale, k_scale = (pad(x, bucket) for x in scales)
            bias = TileBias(bucket, spec, position_bias, time_bias)
            for tile in bucket.tiles:
                rows, keys = slice(tile.row_start, tile.row_end), slice(0, tile.key_end)
                scores = scores_of(padded_q[:, rows], padded_k[:, keys])
                bias.add_to(scores, tile)
                unit = _weight_unit(spec, q_scale[:, rows], k_scale[:, keys], q.shape[-1])
                weights = _rounded(F.silu(scores, inplace=True), "O", unit)
                weights = mask_tile(weights, tile, bucket)
                padded_out[:, rows] = matmul(weights, padded_v[:, keys], inverse_scale)
            outputs.append(padded_out.to(v.dtype))
        return unpad(outputs, v, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        position_bias, time_bias, *saved = ctx.saved_tensors
        spec: AttentionSpec = ctx.spec
        plan: Plan = ctx.plan
        pairs = zip(saved[::2], saved[1::2], strict=True)
        q, k, v, q_dK = (_Rows(codes=codes, scale_inv=inverse) for codes, inverse in pairs)
        fp8 = _fp8(spec)
        granularity = _GRANULARITIES[fp8.mode][2]
        grad_rows = _quantize(grad_out, fp8.grad_dtype, granularity, ctx.offsets, factor=1.0)
        dtype = wide(ctx.likes[0].dtype)
        bias_grads = [
            None if table is None else torch.zeros_like(table, dtype=dtype)
            for table in (position_bias, time_bias)
        ]
        unpadded = (q.values(dtype), q_dK.values(dtype), k.values(dtype))
        scales = [x.scales(dtype) for x in (q, k, v, grad_rows)]
        scales[2] /= v.factor
        zeroed = (v.normalised(dtype), grad_rows.normalised(dtype), grad_rows.values(dtype))
        padded_grads: list[tuple[Tensor, ...]] = []
        for bucket in plan.buckets:
            padded = _Padded(
                *(pad(x, bucket) for x in (*unpadded, *scales)),
                *(pad(x, bucket, zero=True) for x in zeroed),
            )
            bias = TileBias(bucket, spec, position_bias, time_bias)
            grads = _backward_bucket(padded, bucket, bias, spec, bias_grads)
            padded_grads.append(tuple(grad.to(ctx.likes[0].dtype) for grad in grads))
        grads_of = zip(*padded_grads, strict=True) if padded_grads else ((), (), ())
        by_likes = zip(grads_of, ctx.likes, strict=True)
        whole = (unpad(list(parts), like, plan) for parts, like in by_likes)
        tables = zip(bias_grads, (position_bias, time_bias), strict=True)
        casts = (None if grad is None else grad.to(table.dtype) for grad, table in tables)
        return *whole, *casts, None, None, None


@dataclass(frozen=True)
class _Padded:
    """Operands of a bucket's backward pass, each (H * b, N, width)."""

    q: Tensor
    q_dK: Tensor
    k: Tensor
    q_scale_inv: Tensor
    k_scale_inv: Tensor
    v_scale_inv: Tensor
    grad_scale_inv: Tensor
    v_codes: Tensor
    grad_codes: Tensor
    grad_out: Tensor


def _backward_bucket(
    padded: _Padded,
    bucket: Bucket,
    bias: TileBias,
    spec: AttentionSpec,
    bias_grads: list[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    alpha, inverse_scale = padded.q.shape[-1] ** -0.5, 1.0 / float(spec.scaling_seqlen)
    of_slopes = 2.0 ** -static_exponent(_fp8(spec), padded.v_codes.shape[-1])
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (padded.q, padded.k, padded.v_codes))
    for tile in bucket.tiles:
        rows, keys = slice(tile.row_start, tile.row_end), slice(0, tile.key_end)
        scores = scores_of(padded.q[:, rows], padded.k[:, keys])
        bias.add_to(scores, tile)
        grad_weights = matmul(padded.grad_codes[:, rows], padded.v_codes[:, keys].mT, 1.0)
        torch.ops.aten.silu_backward.grad_input(grad_weights, scores, grad_input=grad_weights)
        grad_scores = mask_tile(grad_weights, tile, bucket)
        of_rows, of_keys = padded.q_scale_inv[:, rows], padded.k_scale_inv[:, keys]
        unit = _weight_unit(spec, of_rows, of_keys, padded.q.shape[-1])
        weights = mask_tile(_rounded(F.silu(scores, inplace=True), "dV", unit), tile, bucket)

        def scaled(
            normalised: Tensor, rows: slice = rows, keys: slice = keys
        ) -> Tensor:  # one factor after the other: their product may leave FP32's range
            normalised = normalised * padded.grad_scale_inv[:, rows]
            return normalised * padded.v_scale_inv[:, keys].mT

        bias.add_gradients(
            scaled(grad_scores) * inverse_scale,
            tile,
            bias_grads,
            deterministic=spec.deterministic,
        )
        grad_v[:, keys] += matmul(weights.mT, padded.grad_out[:, rows], inverse_scale)
        left = scaled(_rounded(grad_scores, "dQ", of_slopes))
        grad_q[:, rows] = matmul(left, padded.k[:, keys], alpha * inverse_scale)
        left = scaled(_rounded(grad_scores, "dK", of_slopes))
        grad_k[:, keys] += matmul(left.mT, padded.q_dK[:, rows], alpha * inverse_scale)
    return grad_q, grad_k, grad_v


def static_exponent(fp8: Fp8Spec, linear_dim: int) -> int:
    """Return c of the factor 2**-c under which |dS| made of normalised dO and v fits E4M3."""
    v_amax = _UNSCALED_AMAX if fp8.mode == "cast" else FP8_MAX[_E4M3]
    largest = _STEEPEST * linear_dim * FP8_MAX[fp8.grad_dtype] * v_amax
    return math.ceil(math.log2(largest / FP8_MAX[_E4M3]))


def _weight_unit(
    spec: AttentionSpec, q_scale: Tensor, k_scale: Tensor, attention_dim: int
) -> float | Tensor:
    """Return w, for all or for each of a tile's pairs (module docstring)."""
    fp8 = _fp8(spec)
    if fp8.mode == "cast" or spec.position_bias is not None or spec.time_bias is not None:
        return 2.0**fp8.weight_exponent
    fitting = 2.0 ** math.floor(-math.log2(attention_dim**0.5 * FP8_MAX[_E4M3]))
    return (fitting / q_scale / k_scale.mT).clamp_(1.0, _LARGEST_UNIT)


def _rounded(x: Tensor, product: str, factor: float | Tensor) -> Tensor:
    """Return P or dS as the product takes it; E4M3 of x times a power of two, which comes off."""
    if INTERMEDIATE[product] == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    return _cast(x * factor, _E4M3).to(x.dtype) / factor


def _cast(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return the nearest codes, saturated; NaN stays."""
    largest = FP8_MAX[fp8_dtype]
    return x.float().clamp_(-largest, largest).to(fp8_dtype)


def _quantize(
    x_THA: Tensor,
    fp8_dtype: torch.dtype,
    granularity: str,
    offsets: tuple[int, ...],
    *,
    factor: float = FP8_FACTOR,
) -> _Rows:
    x = x_THA[: offsets[-1]].float()
    if granularity == "none":
        ones = x.new_ones(()).expand(x.shape[0], 1, 1)
        return _Rows(codes=_cast(x * factor, fp8_dtype), scale_inv=ones, factor=factor)
    amax_TH = x.abs().amax(-1) * factor
    if granularity in ("user", "tensor"):
        amax_TH = amax_TH.amax(-1, keepdim=True)
    segment_T, num_segments = _segments(offsets, granularity, x.device)
    # as integers: the same order, and a NaN is the largest on every device
    bits = amax_TH.view(torch.int32)
    amax = bits.new_zeros(num_segments, bits.shape[1]).scatter_reduce_(
        0, segment_T[:, None].expand_as(bits), bits, "amax"
    )
    # rounded up where the mantissa is above 1.75
    exponent = ((amax.clamp(max=_INFINITY) + _ABOVE_1_75) >> 23) - 127 - _TOP_EXPONENT[fp8_dtype]
    exponent = exponent.clamp_(-120, 60).masked_fill_(amax == 0, 0)[segment_T][..., None]
    codes = _cast(x * (_two_to_the(-exponent) * factor), fp8_dtype)
    return _Rows(codes=codes, scale_inv=_two_to_the(exponent), factor=factor)


def _two_to_the(exponent: Tensor) -> Tensor:
    """Return powers of two of int32 exponents in float32, exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


@lru_cache(maxsize=16)
def _segments(
    offsets: tuple[int, ...], granularity: str, device: torch.device
) -> tuple[Tensor, int]:
    """Return which rows share a scale, (offsets[-1],), and how many scales there are.

    Cached: all layers of a step ask for the same.
    """
    total = offsets[-1]
    if granularity == "row":
        return torch.arange(total, device=device), total
    if granularity == "tensor":
        return torch.zeros(total, dtype=torch.int64, device=device), 1
    bounds = torch.tensor(offsets)
    lengths = bounds.diff()
    user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if granularity in ("head", "user"):
        return user.to(device), len(lengths)
    blocks = (lengths + FP8_BLOCK_ROWS - 1) // FP8_BLOCK_ROWS
    first = blocks.cumsum(0) - blocks
    block = first[user] + (torch.arange(total) - bounds[user]) // FP8_BLOCK_ROWS
    return block.to(device), int(blocks.sum())


def _fp8(spec: AttentionSpec) -> Fp8Spec:
    assert spec.fp8 is not None
    return spec.fp8
