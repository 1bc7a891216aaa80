"""Plain torch in place of the FP8 Gluon kernels, which run on Hopper alone.

Takes what the launches take and reads what the kernels read: codes, transposed codes, scales, the
numbers of the batch. Its own products round nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ops.hstu_attention.reference import visible
from ops.hstu_attention.spec import AttentionSpec
from tests.ops.fp8_operands_reference import place_of


class StandIn:
    """`hopper_fp8_impl`; counts launches."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def launch_forward(
        self, q: Any, k: Any, v: Any, *, out: Tensor, structure: Callable, rule: Any, scaled: bool
    ) -> None:
        self.calls.append("forward")
        batch = structure(128)
        out.zero_()
        for user, rows, seen in _users(batch, rule):
            for head in range(out.shape[1]):
                scores = _scores(q, k, batch, user, rows, head)
                weights = torch.nn.functional.silu(scores) * seen
                values = _by_columns(v, batch, user, rows, head)
                out[rows, head] = (weights @ values / float(batch["scaling_seqlen"])).to(out.dtype)

    def launch_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        do: Any,
        *,
        grads: tuple[Tensor, Tensor, Tensor],
        structure: Callable,
        rule: Any,
        scaled: bool,
        longest: int,
    ) -> None:
        self.calls.append("backward")
        batch = structure(128)
        dq, dk, dv = (grad.zero_() for grad in grads)
        assert v.codes_t is None
        for user, rows, seen in _users(batch, rule):
            for head in range(dq.shape[1]):
                scores = _scores(q, k, batch, user, rows, head)
                scaling = float(batch["scaling_seqlen"])
                gate = scores.sigmoid()
                weights = scores * gate * seen / scaling
                grad = _by_rows(do, batch, user, rows, head)
                dp = grad @ _by_rows(v, batch, user, rows, head).T
                ds = dp * gate * (1 + scores * (1 - gate)) * seen * batch["alpha"] / scaling
                q_rows, k_rows, do_rows = (
                    _by_columns(x, batch, user, rows, head) for x in (q, k, do)
                )
                dq[rows, head] = (ds @ k_rows).to(dq.dtype)
                dk[rows, head] = (ds.T @ q_rows).to(dk.dtype)
                dv[rows, head] = (weights.T @ do_rows).to(dv.dtype)


def _users(batch: dict[str, Any], rule: Any) -> Iterator[tuple[int, slice, Tensor]]:
    """Each user with its rows and mask."""
    offsets = batch["offsets_ptr"].tolist()
    spec = AttentionSpec(
        max_seq_len=10**6,
        scaling_seqlen=1.0,
        target_group_size=batch["group_size"],
        is_causal=rule.causal,
        disable_contextual_mask=not rule.contextual_rows_see_all,
        attention_window=batch["window"] if rule.has_window else None,
    )
    for user, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        c = int(batch["contextuals_ptr"][user]) if rule.has_contextuals else 0
        t = int(batch["candidates_ptr"][user]) if rule.has_candidates else 0
        yield user, slice(start, end), visible(c, end - start - c - t, t, spec).double()


def _scales(x: Any, user: int, rows: slice, head: int) -> Tensor:
    slots = rows.start // 128 + user + torch.arange(rows.stop - rows.start) // 128
    return x.scale_inv[slots, head].double()[:, None]


def _by_rows(x: Any, batch: dict[str, Any], user: int, rows: slice, head: int) -> Tensor:
    return x.codes[rows, head].double() * _scales(x, user, rows, head)


def _by_columns(x: Any, batch: dict[str, Any], user: int, rows: slice, head: int) -> Tensor:
    first = 16 * (rows.start // 16 + user)
    columns = [first + place_of(position) for position in range(rows.stop - rows.start)]
    return x.codes_t[head][:, columns].double().T * _scales(x, user, rows, head)


def _scores(q: Any, k: Any, batch: dict[str, Any], user: int, rows: slice, head: int) -> Tensor:
    left, right = (_by_rows(x, batch, user, rows, head) for x in (q, k))
    return batch["alpha"] * left @ right.T
