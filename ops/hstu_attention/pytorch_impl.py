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

from ops.hstu_attention.buckets import Bucket, MaskRule, Plan, Tile, plan_buckets
from ops.hstu_attention.spec import AttentionSpec
from ops.hstu_attention.time_buckets import time_bucket_boundaries


def hstu_attention(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return O_THV; see `ops.hstu_attention.hstu_attention`."""
    num_users = seq_offsets.numel() - 1
    plan = plan_buckets(
        tuple(seq_offsets.tolist()),
        _counts(spec.num_contextuals, num_users),
        _counts(spec.num_candidates, num_users),
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
        q_HTA, k_HTA, v_HTV = (_head_major(x) for x in (q, k, v))
        outputs = []
        for bucket in plan.buckets:
            padded_q, padded_k = _pad(q_HTA, bucket), _pad(k_HTA, bucket)
            padded_v = _pad(v_HTV, bucket, zero=True)
            padded_out = torch.empty_like(padded_v, memory_format=torch.contiguous_format)
            bias = _Bias(bucket, spec, position_bias, time_bias)
            for tile in bucket.tiles:
                rows, keys = slice(tile.row_start, tile.row_end), slice(0, tile.key_end)
                scores = _scores(padded_q[:, rows], padded_k[:, keys])
                bias.add_to(scores, tile)
                weights = _mask(F.silu(scores, inplace=True), tile, bucket).to(v.dtype)
                padded_out[:, rows] = _matmul(weights, padded_v[:, keys], inverse_scale)
            outputs.append(padded_out)
        return _unpad(outputs, v, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_bias, time_bias = ctx.saved_tensors
        spec: AttentionSpec = ctx.spec
        plan: Plan = ctx.plan
        bias_grads = [
            None if table is None else torch.zeros_like(table, dtype=_wide(q.dtype))
            for table in (position_bias, time_bias)
        ]
        q_HTA, k_HTA, v_HTV, grad_HTV = (_head_major(x) for x in (q, k, v, grad_out))
        padded_grads = []
        for bucket in plan.buckets:
            padded = (
                *(_pad(x, bucket) for x in (q_HTA, k_HTA)),
                *(_pad(x, bucket, zero=True) for x in (v_HTV, grad_HTV)),
            )
            bias = _Bias(bucket, spec, position_bias, time_bias)
            padded_grads.append(_backward_bucket(padded, bucket, bias, spec, bias_grads))
        grads_of = zip(*padded_grads, strict=True) if padded_grads else ((), (), ())
        grads = [_unpad(list(parts), x, plan) for parts, x in zip(grads_of, (q, k, v), strict=True)]
        tables = zip(bias_grads, (position_bias, time_bias), strict=True)
        casts = (None if grad is None else grad.to(table.dtype) for grad, table in tables)
        return *grads, *casts, None, None


def _backward_bucket(
    padded: tuple[Tensor, ...],
    bucket: Bucket,
    bias: "_Bias",
    spec: AttentionSpec,
    bias_grads: list[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, grad_out = padded
    alpha, inverse_scale = q.shape[-1] ** -0.5, 1.0 / float(spec.scaling_seqlen)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for tile in bucket.tiles:
        rows, keys = slice(tile.row_start, tile.row_end), slice(0, tile.key_end)
        scores = _scores(q[:, rows], k[:, keys])
        bias.add_to(scores, tile)
        grad_weights = _matmul(grad_out[:, rows], v[:, keys].transpose(1, 2), inverse_scale)
        grad_weights = grad_weights.to(scores.dtype)
        torch.ops.aten.silu_backward.grad_input(grad_weights, scores, grad_input=grad_weights)
        grad_scores = _mask(grad_weights, tile, bucket)
        weights = _mask(F.silu(scores, inplace=True), tile, bucket).to(v.dtype)
        bias.add_gradients(grad_scores, tile, bias_grads, deterministic=spec.deterministic)
        grad_scores = grad_scores.to(q.dtype)
        # a product straight into a slice would run head by head: baddbmm wants a whole tensor
        grad_v[:, keys] += _matmul(weights.transpose(1, 2), grad_out[:, rows], inverse_scale)
        grad_q[:, rows] = _matmul(grad_scores, k[:, keys], alpha)
        grad_k[:, keys] += _matmul(grad_scores.transpose(1, 2), q[:, rows], alpha)
    return grad_q, grad_k, grad_v


class _Bias:
    """The bias of one bucket's tiles: gathers table entries, scatters their gradients back."""

    def __init__(
        self,
        bucket: Bucket,
        spec: AttentionSpec,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
    ) -> None:
        self.num_users = bucket.num_users
        self.tables = (position_bias, time_bias)
        self.positions = bucket.positions
        if time_bias is not None:
            assert spec.timestamps is not None
            self.times = spec.timestamps[bucket.padded_rows].view(bucket.num_users, -1)
            self.boundaries = time_bucket_boundaries(time_bias.shape[1], time_bias.device)

    def add_to(self, scores: Tensor, tile: Tile) -> None:
        for table, index in zip(self.tables, self._indices(tile), strict=True):
            if table is not None and index is not None:
                entries = table.index_select(1, index.flatten())
                scores.add_(entries.view(scores.shape))

    def add_gradients(
        self,
        grad_scores: Tensor,
        tile: Tile,
        bias_grads: list[Tensor | None],
        *,
        deterministic: bool,
    ) -> None:
        for grad, index in zip(bias_grads, self._indices(tile), strict=True):
            if grad is None or index is None:
                continue
            flat_index, grad_HN = index.flatten(), grad_scores.view(grad.shape[0], -1)
            if deterministic and grad.device.type == "cuda":
                # sorts instead of racing atomic additions
                grad.t().index_put_((flat_index,), grad_HN.t(), accumulate=True)
            else:
                grad.scatter_add_(1, flat_index.expand_as(grad_HN), grad_HN)

    def _indices(self, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
        """Return the bucket (b, rows, columns) of each pair in either table."""
        position_table, time_table = self.tables
        position_index = time_index = None
        if position_table is not None:
            position_index = _distances(self.positions, tile).clamp_(
                max=position_table.shape[1] - 1
            )
        if time_table is not None:
            elapsed = _distances(self.times, tile)
            time_index = torch.bucketize(elapsed, self.boundaries, right=True)
        return position_index, time_index


def _distances(values_bN: Tensor, tile: Tile) -> Tensor:
    rows = values_bN[:, tile.row_start : tile.row_end, None]
    return (rows - values_bN[:, None, : tile.key_end]).abs_()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return _matmul(q, k.transpose(1, 2), q.shape[-1] ** -0.5).to(_wide(q.dtype))


def _matmul(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """Return factor * left @ right; the factor costs no pass of its own."""
    product = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    return product.baddbmm_(left, right, beta=0, alpha=factor)


def _mask(tile_weights: Tensor, tile: Tile, bucket: Bucket) -> Tensor:
    """Zero what the tile's mask hides, in place."""
    if tile.mask is not None:
        by_user = tile_weights.view(-1, bucket.num_users, *tile_weights.shape[1:])
        by_user[..., tile.key_end - tile.mask.shape[-1] :].mul_(tile.mask)
    return tile_weights


def _head_major(x_THA: Tensor) -> Tensor:
    """Return (H, T, A) in one piece: one copy here instead of one a bucket in index_select."""
    return x_THA.transpose(0, 1).contiguous()


def _pad(x_HTA: Tensor, bucket: Bucket, *, zero: bool = False) -> Tensor:
    """Return the bucket's rows as (H * b, N, A); padded slots are zero, or any finite row."""
    if bucket.num_users == 1:
        return x_HTA.narrow(1, bucket.first_row, bucket.padded_len)
    padded = x_HTA.index_select(1, bucket.padded_rows)
    if zero:
        padded.mul_(bucket.keep)
    return padded.view(-1, bucket.padded_len, x_HTA.shape[-1])


def _unpad(padded: list[Tensor], like_THA: Tensor, plan: Plan) -> Tensor:
    """Return the rows (T, H, A) of all buckets; rows of no user are zero."""
    _, num_heads, width = like_THA.shape
    slots = [part.view(num_heads, -1, width) for part in padded]
    slots.append(like_THA.new_zeros(num_heads, 1, width))
    return torch.cat(slots, dim=1).index_select(1, plan.slot_T).transpose(0, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _counts(counts_B: Tensor | None, num_users: int) -> tuple[int, ...]:
    return (0,) * num_users if counts_B is None else tuple(counts_B.tolist())
