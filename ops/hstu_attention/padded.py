"""Pieces of the plain PyTorch backends: padded users, masks and biases of a tile (`buckets`)."""

import torch
from torch import Tensor

from ops.hstu_attention.buckets import Bucket, Plan, Tile
from ops.hstu_attention.spec import AttentionSpec
from ops.hstu_attention.time_buckets import time_bucket_boundaries


class TileBias:
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


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return matmul(q, k.transpose(1, 2), q.shape[-1] ** -0.5).to(wide(q.dtype))


def matmul(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """Return factor * left @ right; the factor costs no pass of its own."""
    product = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    return product.baddbmm_(left, right, beta=0, alpha=factor)


def mask_tile(tile_weights: Tensor, tile: Tile, bucket: Bucket) -> Tensor:
    """Zero what the tile's mask hides, in place."""
    if tile.mask is not None:
        by_user = tile_weights.view(-1, bucket.num_users, *tile_weights.shape[1:])
        by_user[..., tile.key_end - tile.mask.shape[-1] :].mul_(tile.mask)
    return tile_weights


def head_major(x_THA: Tensor) -> Tensor:
    """Return (H, T, A) in one piece: one copy here instead of one a bucket in index_select."""
    return x_THA.transpose(0, 1).contiguous()


def pad(x_HTA: Tensor, bucket: Bucket, *, zero: bool = False) -> Tensor:
    """Return the bucket's rows as (H * b, N, A); padded slots are zero, or any finite row."""
    if bucket.num_users == 1:
        return x_HTA.narrow(1, bucket.first_row, bucket.padded_len)
    padded = x_HTA.index_select(1, bucket.padded_rows)
    if zero:
        padded.mul_(bucket.keep)
    return padded.view(-1, bucket.padded_len, x_HTA.shape[-1])


def unpad(padded: list[Tensor], like_THA: Tensor, plan: Plan) -> Tensor:
    """Return the rows (T, H, A) of all buckets; rows of no user are zero."""
    _, num_heads, width = like_THA.shape
    slots = [part.view(num_heads, -1, width) for part in padded]
    slots.append(like_THA.new_zeros(num_heads, 1, width))
    return torch.cat(slots, dim=1).index_select(1, plan.slot_T).transpose(0, 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def counts_of(counts_B: Tensor | None, num_users: int) -> tuple[int, ...]:
    return (0,) * num_users if counts_B is None else tuple(counts_B.tolist())
