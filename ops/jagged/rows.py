"""Moving rows along an index without repeats, so that no gradient needs a scatter-add."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.jagged.backend import use_triton
from ops.jagged.layout import TokenLayout


def interleave_rows(
    layout: TokenLayout,
    item_rows_ED: Tensor,
    *,
    action_rows_AD: Tensor | None = None,
    contextual_rows_KD: Tensor | None = None,
) -> Tensor:
    """Return the token sequence (T, D) of a batch; order as in `ops.jagged.layout`.

    Args:
        layout: where each row goes.
        item_rows_ED: item events, history and candidates, packed by user.
        action_rows_AD: actions of the history events, packed by user; None for none.
        contextual_rows_KD: contextual rows, packed by user, features in order; None for none.

    Raises:
        ValueError: row counts that differ from the layout's.
    """
    sources = check_sources(layout, contextual_rows_KD, item_rows_ED, action_rows_AD)
    present = [rows for rows in sources if rows is not None]
    return _PermuteRows.apply(layout.source_T, layout.token_T, *present)


def check_sources(
    layout: TokenLayout,
    contextual_rows_KD: Tensor | None,
    item_rows_ED: Tensor,
    action_rows_AD: Tensor | None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the three sources in the order of the layout's source rows.

    Raises:
        ValueError: row counts that differ from the layout's.
    """
    expected = {
        "contextual_rows_KD": (contextual_rows_KD, layout.num_contextual_rows),
        "item_rows_ED": (item_rows_ED, layout.num_item_rows),
        "action_rows_AD": (action_rows_AD, layout.num_action_rows),
    }
    for name, (rows, num_rows) in expected.items():
        got = 0 if rows is None else rows.shape[0]
        if got != num_rows:
            raise ValueError(f"{name} must have {num_rows} rows to fit the layout, got {got}")
    return contextual_rows_KD, item_rows_ED, action_rows_AD


def take_rows(
    rows_TD: Tensor,
    index_N: Tensor,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "pytorch",
) -> Tensor:
    """Return rows_TD[index_N], (N, D), in `dtype` (None: that of the rows).

    The index must not repeat: gradients are copied, not added. The gradient of all rows, (T, D), is
    written in one pass by "triton", which therefore wants the index to rise: checked on CPU
    tensors, elsewhere the device stops with an assertion.

    Raises:
        ValueError: triton: an index that does not rise (CPU tensors), rows that are no
            float32, bfloat16 or float16 matrix.
    """
    if use_triton(backend, rows_TD):
        from ops.jagged.triton_rows import take_rows as run

        return run(rows_TD, index_N, dtype=rows_TD.dtype if dtype is None else dtype)
    taken_ND = _TakeRows.apply(rows_TD, index_N)
    return taken_ND if dtype is None else taken_ND.to(dtype)


class _PermuteRows(torch.autograd.Function):
    """Concatenate and permute; the gradient goes back through the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, index_T: Tensor, inverse_T: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_T)
        ctx.sizes = [source.shape[0] for source in sources]
        return torch.cat(sources).index_select(0, index_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_T,) = ctx.saved_tensors
        return None, None, *grad_TD.index_select(0, inverse_T).split(ctx.sizes)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_rows = rows_TD.shape[0]
        return rows_TD.index_select(0, index_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        grad_TD = grad_ND.new_zeros(ctx.num_rows, *grad_ND.shape[1:])
        grad_TD[index_N] = grad_ND
        return grad_TD, None
