"""`embed_tokens` in one launch forward, two backward (one without positions).

    bytes a token   forward:  one source row, one position row (of a table that stays in the L2
                    cache), one token; backward: the token's gradient once, one source row

The backward has to sum the position rows of the tokens that it moves. Which tokens share a row is
known from their place, so the work is cut by position row, not by token:

    piece      up to 64 candidates | one contextual slot of 64 users | 1 to 8 neighbouring history
               places of the 32 users of a group (`HistoryGroups`: about equally long)
    per piece  move the gradients of its tokens to their source rows, a run of neighbours at a time;
               write the sum of each place as one partial row, of places that share a table row one
               for all. With a single group the sum of a place is whole and goes to the table
    then       one program some table rows adds their partial rows, in order; of the few long sums
               (candidates, contextual slots, shared places) one program some columns

Every sum has a fixed order, so equal inputs give equal bits.

Limits: float32, bfloat16 and float16; D up to 8192.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.dropout.triton_mask import draw_seed, drop_below
from ops.jagged.layout import BLOCK_PLACES, GROUP_USERS, HistoryGroups, TokenLayout
from ops.jagged.triton_rows import check_rows, tile_of
from ops.jagged.triton_token_kernels import (
    forward_kernel,
    moves_kernel,
    pieces_kernel,
    table_kernel,
)
from ops.position import PositionRule

_PIECE_ROWS = 64  # candidates of a piece, users of a contextual piece
_LONG_TILE = (256, 16)  # partial rows and columns of a long sum that a program adds at a time
_TABLE_TILE = 4096  # elements that a program of the other sums holds
_TABLE_COLS = 256
_TABLE_GROUPS = 8  # groups that it reads at a time


@dataclass(frozen=True, kw_only=True)
class PieceTile:
    """How a program of the backward walks over its piece."""

    rows: int
    """Tokens at a time: rows / places users."""
    places: int
    """Neighbouring history places of its piece, a divisor of rows and of BLOCK_PLACES."""
    warps: int
    stages: int
    """Steps whose loads are under way at a time; 1 leaves that to the other programs."""


def piece_tile(width: int, num_users: int) -> PieceTile:
    """Return the tile for rows of this width and pieces of about 16,384 elements.

    Tiles are small, for registers bound what is under way (addresses of each row, two copies of
    each element). Swept on one H200 at widths 512 and 128; more stages did not pay.
    """
    cols = tile_of(width)[1]
    rows = max(1, min(8, 2048 // cols))
    users = min(GROUP_USERS, triton.next_power_of_2(max(1, num_users)))
    places = max(1, 16384 // (users * cols))
    return PieceTile(
        rows=rows,
        places=min(places, rows, BLOCK_PLACES),
        warps=max(2, cols // 1024),
        stages=1,
    )


def embed_tokens(
    layout: TokenLayout,
    sources: tuple[Tensor | None, Tensor, Tensor | None],
    position_rows: Tensor | None,
    *,
    dropout: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the tokens; see `ops.jagged.embed_tokens`. Sources as in `TokenLayout.source_T`."""
    for rows in (*sources, position_rows):
        if rows is not None:
            check_rows(rows, name="embed_tokens")
    dtypes = {rows.dtype for rows in sources if rows is not None}
    if len(dtypes) > 1:
        raise ValueError(
            'embed_tokens(backend = "triton") needs source rows of one dtype, got '
            f'{", ".join(sorted(map(str, dtypes)))}; cast them or use backend = "pytorch"'
        )
    if position_rows is not None and layout.history_groups is None:
        raise ValueError(
            'embed_tokens(backend = "triton") needs a layout made by '
            'build_token_layout(backend = "triton")'
        )
    return _EmbedTokens.apply(layout, dropout, dtype, position_rows, *sources)


class _EmbedTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: TokenLayout,
        dropout: float,
        dtype: torch.dtype,
        position_rows: Tensor | None,
        *sources: Tensor | None,
    ) -> Tensor:
        item_rows = sources[1]
        assert item_rows is not None
        seed = draw_seed(item_rows.device) if dropout > 0.0 else None
        ctx.layout, ctx.dropout, ctx.seed = layout, dropout, seed
        ctx.dtype, ctx.present = item_rows.dtype, [rows is not None for rows in sources]
        ctx.table_dtype = None if position_rows is None else position_rows.dtype
        out = torch.empty(
            layout.num_tokens, item_rows.shape[1], dtype=dtype, device=item_rows.device
        )
        if out.numel():
            _launch_forward(layout, sources, position_rows, out, seed, dropout)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        layout: TokenLayout = ctx.layout
        if grad_TD.stride(1) != 1:
            grad_TD = grad_TD.contiguous()
        moved_TD = torch.empty(grad_TD.shape, dtype=ctx.dtype, device=grad_TD.device)
        call = _Backward(grad_TD=grad_TD, moved_TD=moved_TD, seed=ctx.seed, dropout=ctx.dropout)
        table_grad = None
        if ctx.needs_input_grad[3]:
            table_grad = _launch_pieces(layout, call, ctx.table_dtype)
        elif moved_TD.numel():
            _launch_moves(layout, call)
        sizes = (layout.num_contextual_rows, layout.num_item_rows, layout.num_action_rows)
        grads = [
            grad if is_present else None
            for grad, is_present in zip(moved_TD.split(sizes), ctx.present, strict=True)
        ]
        return None, None, None, table_grad, *grads


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """What both shapes of the backward take."""

    grad_TD: Tensor
    moved_TD: Tensor
    """The gradient in the order of the source rows, to be written."""
    seed: Tensor | None
    dropout: float


def _drop_arguments(dropout: float) -> dict[str, Any]:
    """Compile-time arguments of dropout."""
    below = drop_below(dropout) if dropout > 0.0 else 0
    return {"DROP_BELOW": below, "SCALE": 1.0 / (1.0 - dropout)}


def _launch_forward(
    layout: TokenLayout,
    sources: tuple[Tensor | None, ...],
    position_rows: Tensor | None,
    out: Tensor,
    seed: Tensor | None,
    dropout: float,
) -> None:
    contextual, item, action = sources
    num_tokens, width = out.shape
    rows, cols, warps = tile_of(width)
    forward_kernel[(triton.cdiv(num_tokens, rows),)](
        contextual,
        item,
        action,
        position_rows,
        layout.source_T,
        layout.position_T,
        seed,
        out,
        *(0 if x is None else x.stride(0) for x in (contextual, item, action, position_rows)),
        num_tokens,
        layout.num_contextual_rows,
        layout.num_item_rows,
        D=width,
        ROWS=rows,
        COLS=cols,
        **_drop_arguments(dropout),
        num_warps=warps,
    )


def _launch_moves(layout: TokenLayout, call: _Backward) -> None:
    num_tokens, width = call.grad_TD.shape
    rows, cols, warps = tile_of(width)
    moves_kernel[(triton.cdiv(num_tokens, rows),)](
        call.grad_TD,
        layout.source_T,
        call.moved_TD,
        call.seed,
        call.grad_TD.stride(0),
        num_tokens,
        D=width,
        ROWS=rows,
        COLS=cols,
        **_drop_arguments(call.dropout),
        num_warps=warps,
    )


def _launch_pieces(layout: TokenLayout, call: _Backward, dtype: torch.dtype) -> Tensor:
    """Move all gradients and return that of the position table."""
    rule, groups = layout.positions, layout.history_groups
    assert rule is not None and groups is not None
    width, device = call.grad_TD.shape[1], call.grad_TD.device
    table_grad = torch.empty(rule.num_positions, width, dtype=dtype, device=device)
    if width == 0:
        return table_grad
    num_users = layout.num_candidates_B.numel()
    tile = piece_tile(width, num_users)
    pieces = _Pieces(
        candidates=triton.cdiv(layout.candidate_tokens_C.numel(), _PIECE_ROWS),
        user_chunks=triton.cdiv(num_users, _PIECE_ROWS) if layout.num_contextual_rows else 0,
        max_contextuals=rule.max_num_contextuals,
        num_groups=triton.cdiv(num_users, GROUP_USERS),
        own_rows=rule.history_rows - rule.shared_rows,
        merged=min(tile.places, rule.shared_rows),
    )
    num_rows = pieces.num_special * pieces.merged
    if pieces.num_groups > 1 or rule.max_seq_len > pieces.own_rows:
        num_rows += groups.max_blocks * BLOCK_PLACES
    partials = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    num_pieces = pieces.num_special + groups.max_blocks * (BLOCK_PLACES // tile.places)
    if num_pieces:
        pieces_kernel[(num_pieces,)](
            call.grad_TD,
            layout.source_T,
            call.moved_TD,
            call.seed,
            table_grad,
            partials,
            layout.seq_offsets_B1,
            layout.num_contextuals_B.contiguous(),
            layout.candidate_tokens_C,
            groups.anchor_B,
            groups.history_B,
            groups.block_offsets,
            call.grad_TD.stride(0),
            num_users,
            layout.candidate_tokens_C.numel(),
            *pieces.arguments(),
            ONE_GROUP=pieces.num_groups == 1,
            FROM_OLDEST=rule.counting_from == "oldest",
            D=width,
            ROWS=tile.rows,
            PLACES=tile.places,
            MERGED=pieces.merged,
            COLS=tile_of(width)[1],
            GROUP=GROUP_USERS,
            BLOCK=BLOCK_PLACES,
            PIECE=_PIECE_ROWS,
            **_drop_arguments(call.dropout),
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    _launch_table(groups, pieces, rule, tile, partials, table_grad)
    return table_grad


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """How many pieces of each kind there are."""

    candidates: int
    user_chunks: int
    """Pieces of each contextual slot."""
    max_contextuals: int
    num_groups: int
    own_rows: int
    """History places with a table row of their own."""
    merged: int
    """Partial rows of a piece that has none for each place."""

    @property
    def num_special(self) -> int:
        """Return the pieces that are not history."""
        return self.candidates + self.max_contextuals * self.user_chunks

    def arguments(self) -> tuple[int, ...]:
        """Return what both kernels take, in their order."""
        return (
            self.num_groups,
            self.candidates,
            self.user_chunks,
            self.max_contextuals,
            self.own_rows,
        )


def _launch_table(
    groups: HistoryGroups,
    pieces: _Pieces,
    rule: PositionRule,
    tile: PieceTile,
    partials: Tensor,
    table_grad: Tensor,
) -> None:
    """Add the partial rows of each row of the table."""
    num_positions, width = table_grad.shape
    num_long = num_positions - pieces.own_rows
    cols = min(_TABLE_COLS, tile_of(width)[1])
    at_once = min(_TABLE_GROUPS, triton.next_power_of_2(max(1, pieces.num_groups)))
    # with one group there is nothing to add, only zeros to write where its history does not reach
    tile_size = 4 * _TABLE_TILE if pieces.num_groups == 1 else _TABLE_TILE
    places = max(1, min(64, tile_size // (cols * at_once)))
    long_programs = num_long * triton.cdiv(width, _LONG_TILE[1])
    programs = triton.cdiv(pieces.own_rows, places) * triton.cdiv(width, cols)
    table_kernel[(long_programs + programs,)](
        partials,
        table_grad,
        groups.block_offsets,
        *pieces.arguments(),
        num_long,
        SHARED_ROWS=rule.shared_rows,
        ONE_GROUP=pieces.num_groups == 1,
        D=width,
        MERGED=pieces.merged,
        SHARED_STEP=max(tile.places, rule.shared_rows),
        BLOCK=BLOCK_PLACES,
        LONG_ROWS=_LONG_TILE[0],
        LONG_COLS=_LONG_TILE[1],
        GROUPS=at_once,
        PLACES=places,
        COLS=cols,
        num_warps=4,
    )
