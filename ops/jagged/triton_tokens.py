"""`embed_tokens` in one launch forward, two backward (one without positions).

    bytes a token   forward:  one source row, one position row (of a table that stays in the L2
                    cache), one token; backward: the token's gradient once, one source row

The backward has to sum the position rows of the tokens that it moves. Which tokens share a row is
known from their place, so the work is cut by position row, not by token:

    piece      up to 128 candidates | one contextual slot of 128 users | one history place of
               the 32 users of a group (`HistoryGroups`: about equally long, longest first)
    per piece  move the gradients of its tokens to their source rows; write the sum as one partial
               row. With a single group a history piece is the whole sum of a row and goes straight
               to the table
    then       one program a table row adds its partial rows, in order

Every sum has a fixed order, so equal inputs give equal bits. A row that many places share (history
beyond the table) has as many partial rows: cut by columns, too, it is still the longest sum.

Limits: float32, bfloat16 and float16; D up to 8192.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.dropout.triton_mask import draw_seed, drop_below
from ops.jagged.layout import GROUP_USERS, HistoryGroups, TokenLayout
from ops.jagged.triton_rows import check_rows, tile_of
from ops.jagged.triton_token_kernels import (
    forward_kernel,
    moves_kernel,
    pieces_kernel,
    table_kernel,
)

_PIECE_ROWS = 128  # candidates of a piece, users of a contextual piece
# columns of a table row and partial rows that a program adds at a time, where many places share it
_SHARED_COLS = 64
_SHARED_PARTS = 64


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
    width = call.grad_TD.shape[1]
    device = call.grad_TD.device
    table_grad = torch.empty(rule.num_positions, width, dtype=dtype, device=device)
    num_users = layout.num_candidates_B.numel()
    num_groups = triton.cdiv(num_users, GROUP_USERS)
    candidate_pieces = triton.cdiv(layout.candidate_tokens_C.numel(), _PIECE_ROWS)
    user_chunks = triton.cdiv(num_users, _PIECE_ROWS) if layout.num_contextual_rows else 0
    contextual_pieces = rule.max_num_contextuals * user_chunks
    num_pieces = candidate_pieces + contextual_pieces + groups.max_pieces
    partials = torch.empty(num_pieces, width, dtype=torch.float32, device=device)
    rows, cols, warps = tile_of(width)
    shape = {
        "max_contextuals": rule.max_num_contextuals,
        "history_rows": rule.history_rows,
        "D": width,
        "SHARED_ROWS": rule.shared_rows,
        "ONE_GROUP": num_groups == 1,
    }
    if num_pieces and width:
        pieces_kernel[(num_pieces,)](
            call.grad_TD,
            layout.source_T,
            call.moved_TD,
            call.seed,
            table_grad,
            partials,
            *_group_arguments(layout, groups),
            call.grad_TD.stride(0),
            num_users,
            layout.candidate_tokens_C.numel(),
            num_groups,
            candidate_pieces,
            user_chunks,
            FROM_OLDEST=rule.counting_from == "oldest",
            ROWS=max(1, rows // 2),  # the sums take registers, too
            COLS=cols,
            GROUP=GROUP_USERS,
            PIECE=_PIECE_ROWS,
            **_drop_arguments(call.dropout),
            **shape,
            num_warps=warps,
        )
    if width:
        _launch_table(layout, partials, table_grad, candidate_pieces, user_chunks, shape)
    return table_grad


def _launch_table(
    layout: TokenLayout,
    partials: Tensor,
    table_grad: Tensor,
    candidate_pieces: int,
    user_chunks: int,
    shape: dict[str, Any],
) -> None:
    """Add the partial rows of each row of the table."""
    rule, groups = layout.positions, layout.history_groups
    assert rule is not None and groups is not None
    num_positions, width = table_grad.shape
    rows, cols, warps = tile_of(width)
    if rule.max_seq_len - rule.max_num_contextuals > rule.history_rows:
        # history may pass the table, whose last rows then have many parts each
        rows, cols = _SHARED_PARTS, min(cols, _SHARED_COLS)
    table_kernel[(num_positions, triton.cdiv(width, cols))](
        partials,
        table_grad,
        groups.piece_offsets,
        groups.piece_offsets.numel() - 1,
        candidate_pieces,
        user_chunks,
        ROWS=rows,
        COLS=cols,
        **shape,
        num_warps=warps,
    )


def _group_arguments(layout: TokenLayout, groups: HistoryGroups) -> tuple[Tensor, ...]:
    return (
        layout.seq_offsets_B1,
        layout.num_contextuals_B.contiguous(),
        layout.candidate_tokens_C,
        groups.anchor_B,
        groups.history_B,
        groups.piece_offsets,
    )
