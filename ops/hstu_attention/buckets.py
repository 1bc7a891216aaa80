"""How the pytorch backend lays a batch out: users of like length padded together, cut into tiles.

Inside a bucket of b users the padded length is N = M + C: contextual and history tokens stand at
0..M-1, candidates at M..N-1, each part with zeros behind its end. Every row then sees a prefix of
the columns, so a tile is a run of rows, the end of that prefix, and a mask for the last columns:

    contextual rows (full mask)  see [0, M)            no mask
    a run of history rows        sees [0, end of run)  lower triangle on the run's own columns
    candidate rows               see [0, N)            group mask on the candidate columns
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_ROWS_PER_TILE = 128  # measured: smaller tiles skip more future keys but call more kernels
_WEIGHTS_PER_BUCKET = {"cpu": 100_000, "cuda": 1 << 24}  # b * N * N; one head fits a CPU's L2
_MAX_PADDING = 0.2


@dataclass(frozen=True, kw_only=True)
class MaskRule:
    """The part of an attention call that shapes its mask; hashable."""

    target_group_size: int
    is_causal: bool
    disable_contextual_mask: bool
    attention_window: int | None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows [row_start, row_end) against columns [0, key_end)."""

    row_start: int
    row_end: int
    key_end: int
    mask: Tensor | None
    """Factor 0 or 1 for the last columns, (1 or b, rows, columns); None keeps all."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Users padded to one length."""

    num_users: int
    padded_len: int
    first_row: int
    """Row of the first token of the first user; all there is to know when num_users is 1."""
    padded_rows: Tensor
    """(b * N,) the row each slot reads; a slot past the end reads its user's first row."""
    is_real: Tensor
    """(b * N,) bool: a token, not padding."""
    keep: Tensor
    """(b * N, 1) is_real as a factor, in the dtype of q."""
    positions: Tensor
    """(b, N) position of each slot (`ops.hstu_attention`)."""
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The buckets of a batch, and the way back from their slots to packed rows."""

    buckets: tuple[Bucket, ...]
    slot_T: Tensor
    """(rows,) the slot of each row, all buckets' slots one after the other; a row of no user gets
    the slot after the last."""


@lru_cache(maxsize=8)
def plan_buckets(
    offsets: tuple[int, ...],
    contextuals: tuple[int, ...],
    candidates: tuple[int, ...],
    *,
    num_rows: int,
    rule: MaskRule,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """Return the plan of a batch. Cached: all layers of a step ask for the same one."""
    users = []
    for user, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if end > start:
            users.append((contextuals[user], end - start - candidates[user], user))
    users.sort(reverse=True)
    budget = _WEIGHTS_PER_BUCKET["cpu" if device.type == "cpu" else "cuda"]
    groups: list[list[tuple[int, int, int]]] = []
    for num_contextuals, num_main, user in users:
        fits = False
        if groups:
            first_contextuals, first_main, _ = groups[-1][0]
            fits = (
                first_contextuals == num_contextuals
                and (len(groups[-1]) + 1) * first_main**2 <= budget
                and first_main - num_main <= max(_MAX_PADDING * first_main, 8)
            )
        if not fits:
            groups.append([])
        groups[-1].append((num_contextuals, num_main, user))
    buckets = tuple(
        _bucket(
            group[0][0],
            torch.tensor([offsets[user] for _, _, user in group]),
            torch.tensor([num_main for _, num_main, _ in group]),
            torch.tensor([candidates[user] for _, _, user in group]),
            rule=rule,
            dtype=dtype,
            device=device,
        )
        for group in groups
    )
    num_slots = sum(bucket.is_real.numel() for bucket in buckets)
    slot_T = torch.full((num_rows,), num_slots, device=device)
    if buckets:
        is_real = torch.cat([bucket.is_real for bucket in buckets])
        rows = torch.cat([bucket.padded_rows for bucket in buckets])
        slot_T[rows[is_real]] = torch.arange(num_slots, device=device)[is_real]
    return Plan(buckets=buckets, slot_T=slot_T)


def _bucket(
    num_contextuals: int,
    starts_b: Tensor,
    main_b: Tensor,
    candidates_b: Tensor,
    *,
    rule: MaskRule,
    dtype: torch.dtype,
    device: torch.device,
) -> Bucket:
    main, num_candidates = int(main_b.max()), int(candidates_b.max())
    slot_N = torch.arange(main + num_candidates)
    is_main_N = slot_N < main
    candidate_N = slot_N - main
    is_real = torch.where(is_main_N, slot_N < main_b[:, None], candidate_N < candidates_b[:, None])
    own_index = torch.where(is_main_N, slot_N, main_b[:, None] + candidate_N)
    rows = (starts_b[:, None] + own_index.where(is_real, 0)).flatten()
    in_group_N = candidate_N.clamp(min=0) % rule.target_group_size
    positions = torch.where(is_main_N, slot_N, main_b[:, None] + in_group_N)
    tiles = _tiles(num_contextuals, main, num_candidates, positions, rule)
    return Bucket(
        num_users=len(starts_b),
        padded_len=main + num_candidates,
        first_row=int(starts_b[0]),
        padded_rows=rows.to(device),
        is_real=is_real.flatten().to(device),
        keep=is_real.flatten()[:, None].to(device, dtype),
        positions=positions.to(device),
        tiles=tuple(
            Tile(
                row_start=start,
                row_end=end,
                key_end=key_end,
                mask=None if mask is None else mask.to(device, dtype),
            )
            for start, end, key_end, mask in tiles
        ),
    )


def _tiles(
    num_contextuals: int, main: int, num_candidates: int, positions: Tensor, rule: MaskRule
) -> list[tuple[int, int, int, Tensor | None]]:
    tiles: list[tuple[int, int, int, Tensor | None]] = []
    first_causal_row = 0
    if not rule.is_causal or not rule.disable_contextual_mask:
        first_causal_row = num_contextuals
        if num_contextuals:
            tiles.append((0, num_contextuals, main, None))
    padded_len = main + num_candidates
    if num_candidates and padded_len - first_causal_row <= _ROWS_PER_TILE and rule.is_causal:
        # short users: history and candidates in one tile, for fewer kernel calls
        mask = torch.ones(padded_len - first_causal_row, padded_len - first_causal_row).tril()
        mask[-num_candidates:, -num_candidates:] = _group_mask(num_candidates, rule)
        tiles.append((first_causal_row, padded_len, padded_len, mask[None]))
    else:
        num_runs = -(-(main - first_causal_row) // _ROWS_PER_TILE)
        for run in range(num_runs):
            start = first_causal_row + (main - first_causal_row) * run // num_runs
            end = first_causal_row + (main - first_causal_row) * (run + 1) // num_runs
            causal = torch.ones(1, end - start, end - start).tril() if rule.is_causal else None
            tiles.append((start, end, end if rule.is_causal else main, causal))
        if num_candidates:
            tiles.append((main, padded_len, padded_len, _group_mask(num_candidates, rule)[None]))
    if rule.attention_window is None:
        return tiles
    window = rule.attention_window
    return [_with_window(tile, num_contextuals, main, positions, window) for tile in tiles]


def _group_mask(num_candidates: int, rule: MaskRule) -> Tensor:
    index = torch.arange(num_candidates)
    group = index // rule.target_group_size
    return ((group[:, None] == group) & (index[:, None] >= index)).float()


def _with_window(
    tile: tuple[int, int, int, Tensor | None],
    num_contextuals: int,
    main: int,
    positions: Tensor,
    window: int,
) -> tuple[int, int, int, Tensor | None]:
    """Return the tile with a mask over all its columns that also cuts what the window hides."""
    start, end, key_end, mask = tile
    column = torch.arange(key_end)
    distance = (positions[:, start:end, None] - positions[:, None, :key_end]).abs()
    is_history_column = (column >= num_contextuals) & (column < main)
    is_contextual_row = torch.arange(start, end)[:, None] < num_contextuals
    seen = (distance < window) | ~is_history_column | is_contextual_row
    if mask is not None:
        seen[..., key_end - mask.shape[-1] :] &= mask.bool()
    return start, end, key_end, seen
