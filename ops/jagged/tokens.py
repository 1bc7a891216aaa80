"""From embedding rows to the rows that enter the first layer, as one op.

out[t] = cast(dropout(row of token t + position row of token t))
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.jagged.backend import use_triton
from ops.jagged.layout import TokenLayout
from ops.jagged.rows import check_sources, interleave_rows


def embed_tokens(
    layout: TokenLayout,
    item_rows_ED: Tensor,
    *,
    action_rows_AD: Tensor | None = None,
    contextual_rows_KD: Tensor | None = None,
    position_rows_PD: Tensor | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    backend: str = "pytorch",
) -> Tensor:
    """Return the tokens (T, D) of a batch in the compute dtype; order as in `ops.jagged.layout`.

    Differentiable in all rows. The gradient of the position rows is summed in float32 (pytorch: as
    F.embedding does), by triton in an order that depends on the layout alone: the same bits every
    run.

    Args:
        layout: where each row goes; with position rows, made with `positions`, and for "triton" by
            the "triton" backend.
        item_rows_ED: item events, history and candidates, packed by user.
        action_rows_AD: actions of the history events, packed by user; None for none.
        contextual_rows_KD: contextual rows, packed by user, features in order; None for none.
        position_rows_PD: the position table; None adds no positions.
        dropout: probability of zeroing an element, the others scaled by 1 / (1 - dropout); drawn
            from torch's default generator of the device. "triton" draws a seed from it, so its
            masks are its own, and meets the probability to 2**-17.
        dtype: of the tokens; None keeps that of the rows.
        backend: "pytorch", which adds in the dtype of the rows, or "triton", which adds in float32
            and rounds once.

    Raises:
        ValueError: row counts that differ from the layout's, a layout made without what is needed;
            triton: rows of several dtypes or of a dtype other than float32, bfloat16, float16.
    """
    sources = check_sources(layout, contextual_rows_KD, item_rows_ED, action_rows_AD)
    _check_positions(layout, position_rows_PD)
    if use_triton(backend, item_rows_ED):
        from ops.jagged.triton_tokens import embed_tokens as run

        out_dtype = item_rows_ED.dtype if dtype is None else dtype
        return run(layout, sources, position_rows_PD, dropout=dropout, dtype=out_dtype)
    tokens_TD = interleave_rows(
        layout,
        item_rows_ED,
        action_rows_AD=action_rows_AD,
        contextual_rows_KD=contextual_rows_KD,
    )
    if position_rows_PD is not None:
        assert layout.position_T is not None
        rows_TD = F.embedding(layout.position_T, position_rows_PD)
        tokens_TD = tokens_TD + rows_TD.to(tokens_TD.dtype)
    tokens_TD = F.dropout(tokens_TD, dropout)
    return tokens_TD if dtype is None else tokens_TD.to(dtype)


def _check_positions(layout: TokenLayout, position_rows_PD: Tensor | None) -> None:
    if position_rows_PD is None:
        return
    if layout.positions is None:
        raise ValueError(
            "position_rows_PD needs a layout with positions; pass `positions` to build_token_layout"
        )
    if position_rows_PD.shape[0] != layout.positions.num_positions:
        raise ValueError(
            f"position_rows_PD must have the {layout.positions.num_positions} rows of the layout's "
            f"rule, got {position_rows_PD.shape[0]}"
        )
