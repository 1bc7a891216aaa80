"""HSTU attention in plain torch: bucketed by length, tile by tile, weights recomputed in backward.

Any device. Nothing of size n * n outlives a tile, so the arithmetic stays in cache: measured on a
CPU two to three times as fast as autograd through four padded buckets. Padding needs no mask: a
padded column has v = 0 and a padded row has a zero output gradient, so neither adds anything.
Reads the lengths on the host: free on a CPU, waits in every call on a GPU. First derivatives only.
"""

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
from ops.hstu_attention.spec import AttentionSpec


def hstu_attention(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return O_THV; see `ops.hstu_attention.hstu_attention`."""
    num_users = seq_offsets.numel() - 1
    plan = plan_buckets(
        tuple(seq_offsets.tolist()),
        counts_of(spec.num_contextuals, num_users),
        counts_of(spec.num_candidates, num_users),
        num_rows=q_THA.shape[0],
        rule=MaskRule(
            target_group_size=spec.target_group_size,
            is_causal=spec.is_causal,
            disable_contextual_mask=spec.disable_contextual_mask,
            attention_window=spec.attention_window,
        ),
        dtype=q_THA.dtype,
        device=q_THA.device,
    )
    return _Attention.apply(q_THA, k_THA, v_THV, spec.position_bias, spec.time_bias, spec, plan)


class _Attention(torch.autograd.Function):
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
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position_bias, time_bias)
        ctx.spec, ctx.plan = spec, plan
        inverse_scale = 1.0 / float(spec.scaling_seqlen)
        q_HTA, k_HTA, v_HTV = (head_major(x) for x in (q, k, v))
        outputs = []
        for bucket in plan.buckets:
            padded_q, padded_k = pad(q_HTA, bucket), pad(k_HTA, bucket)
            padded_v = pad(v_HTV, bucket, zero=True)
            padded_out = torch.empty_like(padded_v, memory_format=torch.contiguous_format)
            bias = TileBias(bucket, spec, position_bias, time_bias)
            for tile in bucket.tiles:
                rows, keys = slice(tile.row_start, tile.row_end), slice(0, tile.key_end)
                scores = scores_of(padded_q[:, rows], padded_k[:, keys])
                bias.add_to(scores, tile)
                weights = mask_tile(F.silu(scores, inplace=True), tile, bucket).to(v.dtype)
                padded_out[:, rows] = matmul(weights, padded_v[:, keys], inverse_scale)
            outputs.append(padded_out)
        return unpad(outputs, v, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = ctx.saved_tensors
        spec: AttentionSpec = ctx.spec
        plan: Plan = ctx.plan
        bias_grads = [
            None if table is None else torch.zeros_like(table, dtype=wide(q.dtype))
            for table in (position_bias, time_bias)
        ]
        q_HTA, k_HTA, v_HTV, grad_HTV = (head_major(x) for x in (q, k, v, grad_out))
        padded_grads = []
        for bucket in plan.buckets:
            padded = (
                *(pad(x, bucket) for x in (q_HTA, k_HTA)),
                *(pad(x, bucket, zero=True) for x in (v_HTV, grad_HTV)),
            )
            bias = TileBias(bucket, spec, position_bias, time_bias)
            padded_grads.append(_backward_bucket(padded, bucket, bias, spec, bias_grads))
        grads_of = zip(*padded_grads, strict=True) if padded_grads else ((), (), ())
        grads = [unpad(list(parts), x, plan) for parts, x in zip(grads_of, (q, k, v), strict=True)]
        tables = zip(bias_grads, (position_bias, time_bias), strict=True)
        casts = (None if grad is None else grad.to(table.dtype) for grad, table in tables)
        return *grads, *casts, None, None


def _backward_bucket(
    padded: tuple[Tensor, ...],
    bucket: Bucket,
    bias: "TileBias",
    spec: AttentionSpec,
    bias_grads: list[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, grad_out = padded
    alpha, inverse_scale = q.shape[-1] ** -0.5, 1.0 / float(spec.scaling_seqlen)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for tile in bucket.tiles:
        rows, keys = slice(tile.row_start, tile.row_end), slice(0, tile.key_end)
        scores = scores_of(q[:, rows], k[:, keys])
        bias.add_to(scores, tile)
        grad_weights = matmul(grad_out[:, rows], v[:, keys].transpose(1, 2), inverse_scale)
        grad_weights = grad_weights.to(scores.dtype)
        torch.ops.aten.silu_backward.grad_input(grad_weights, scores, grad_input=grad_weights)
        grad_scores = mask_tile(grad_weights, tile, bucket)
        weights = mask_tile(F.silu(scores, inplace=True), tile, bucket).to(v.dtype)
        bias.add_gradients(grad_scores, tile, bias_grads, deterministic=spec.deterministic)
        grad_scores = grad_scores.to(q.dtype)
        # a product straight into a slice would run head by head: baddbmm wants a whole tensor
        grad_v[:, keys] += matmul(weights.transpose(1, 2), grad_out[:, rows], inverse_scale)
        grad_q[:, rows] = matmul(grad_scores, k[:, keys], alpha)
        grad_k[:, keys] += matmul(grad_scores.transpose(1, 2), q[:, rows], alpha)
    return grad_q, grad_k, grad_v
