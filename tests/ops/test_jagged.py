"""The token order of a batch, the gathers along it, offsets and the 32-bit guard."""

import pytest
import torch
from torch import Tensor

from ops.jagged import (
    TokenLayout,
    build_token_layout,
    embed_tokens,
    int32_offsets,
    interleave_rows,
    lengths_to_offsets,
    require_32bit_indexing,
    take_rows,
)
from ops.position import PositionRule

ITEM_LENGTHS = (5, 0, 3, 4, 0, 1)
CANDIDATES = (2, 0, 3, 0, 0, 0)
CONTEXTUALS = (2, 0, 2, 2, 2, 2)


def make_layout(*, has_actions: bool = True, contextuals: tuple[int, ...] | None = CONTEXTUALS):
    return build_token_layout(
        torch.tensor(ITEM_LENGTHS),
        torch.tensor(CANDIDATES),
        num_item_rows=sum(ITEM_LENGTHS),
        num_contextuals_B=None if contextuals is None else torch.tensor(contextuals),
        num_contextual_rows=0 if contextuals is None else sum(contextuals),
        has_actions=has_actions,
    )


def make_rows(layout: TokenLayout, width: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {
        "item_rows_ED": layout.num_item_rows,
        "action_rows_AD": layout.num_action_rows,
        "contextual_rows_KD": layout.num_contextual_rows,
    }
    return {
        name: torch.randn(size, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, size in sizes.items()
        if size
    }


def tokens_one_by_one(*, has_actions: bool, contextuals: tuple[int, ...]) -> list[list[str]]:
    """Return the names of the tokens of each user, written by a loop."""
    item = action = contextual = 0
    users = []
    for length, num_candidates, num_contextuals in zip(
        ITEM_LENGTHS, CANDIDATES, contextuals, strict=True
    ):
        names = [f"c{contextual + k}" for k in range(num_contextuals)]
        contextual += num_contextuals
        for event in range(length):
            names.append(f"i{item}")
            item += 1
            if has_actions and event < length - num_candidates:
                names.append(f"a{action}")
                action += 1
        users.append(names)
    return users


@pytest.mark.parametrize("has_actions", [True, False])
@pytest.mark.parametrize("contextuals", [CONTEXTUALS, None])
def test_interleave_rows(has_actions: bool, contextuals: tuple[int, ...] | None) -> None:
    layout = make_layout(has_actions=has_actions, contextuals=contextuals)
    rows = make_rows(layout)
    users = tokens_one_by_one(has_actions=has_actions, contextuals=contextuals or (0,) * 6)
    sources = {
        "i": rows["item_rows_ED"],
        "a": rows.get("action_rows_AD"),
        "c": rows.get("contextual_rows_KD"),
    }
    expected = torch.stack([sources[name[0]][int(name[1:])] for user in users for name in user])
    out = interleave_rows(layout, **rows)
    assert torch.equal(out, expected)
    assert layout.seq_offsets_B1.diff().tolist() == [len(user) for user in users]
    weights = torch.randn(out.shape, dtype=torch.float64)
    expected_grads = torch.autograd.grad(expected, list(rows.values()), weights)
    grads = torch.autograd.grad(out, list(rows.values()), weights)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert torch.equal(grad, expected_grad)


def test_interleave_rows_gradcheck() -> None:
    layout = make_layout()
    rows = make_rows(layout, width=2)

    def call(items: Tensor, actions: Tensor, contextuals: Tensor) -> Tensor:
        return interleave_rows(
            layout, items, action_rows_AD=actions, contextual_rows_KD=contextuals
        )

    assert torch.autograd.gradcheck(call, tuple(rows.values()))


def test_supervised_tokens() -> None:
    layout = make_layout()
    rows = make_rows(layout)
    tokens = interleave_rows(layout, **rows)
    items = rows["item_rows_ED"]
    assert torch.equal(take_rows(tokens, layout.item_tokens_E), items)
    assert layout.candidate_events_C.tolist() == [3, 4, 5, 6, 7]
    assert torch.equal(
        take_rows(tokens, layout.candidate_tokens_C), items[layout.candidate_events_C]
    )
    # candidates are the trailing tokens of their user
    assert layout.candidate_tokens_C.tolist() == [8, 9, 12, 13, 14]


def test_token_timestamps() -> None:
    times = torch.tensor([10, 20, 30, 40, 50, 60, 70, 80, 90, 91, 92, 93, 99])
    users = [
        [10, 10, 10, 10, 20, 20, 30, 30, 40, 50],
        [],
        [60, 60, 60, 70, 80],
        [90, 90, 90, 90, 91, 91, 92, 92, 93, 93],
        [0, 0],
        [99, 99, 99, 99],
    ]
    expected = [time for user in users for time in user]
    assert make_layout().token_timestamps(times).tolist() == expected


@pytest.mark.parametrize("has_actions", [True, False])
def test_an_empty_batch(has_actions: bool) -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    layout = build_token_layout(zeros, zeros, num_item_rows=0, has_actions=has_actions)
    items = torch.zeros(0, 4, requires_grad=True)
    out = interleave_rows(layout, items)
    take_rows(out, layout.candidate_tokens_C).sum().backward()
    assert out.shape == (0, 4)
    assert layout.seq_offsets_B1.tolist() == [0, 0, 0, 0]
    assert layout.token_timestamps(zeros[:0]).tolist() == []
    assert items.grad is not None
    assert items.grad.shape == (0, 4)


def test_take_rows_gradcheck() -> None:
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 3])
    assert torch.autograd.gradcheck(lambda x: take_rows(x, index), (rows,))


def make_layout_with_positions() -> TokenLayout:
    return build_token_layout(
        torch.tensor(ITEM_LENGTHS),
        torch.tensor(CANDIDATES),
        num_item_rows=sum(ITEM_LENGTHS),
        num_contextuals_B=torch.tensor(CONTEXTUALS),
        num_contextual_rows=sum(CONTEXTUALS),
        timestamps_E=torch.arange(sum(ITEM_LENGTHS)),
        positions=PositionRule(num_positions=9, max_num_contextuals=2, max_seq_len=12),
    )


def test_embed_tokens_adds_positions_in_the_rows_dtype_and_casts() -> None:
    layout = make_layout_with_positions()
    rows = make_rows(layout)
    table = torch.randn(9, 3, requires_grad=True)
    out = embed_tokens(layout, **rows, position_rows_PD=table, dtype=torch.float32)
    expected = interleave_rows(layout, **rows) + table[layout.position_T].double()
    assert torch.equal(out, expected.float())
    assert embed_tokens(layout, **rows, position_rows_PD=table).dtype == torch.float64
    out.sum().backward()
    assert table.grad[:, 0].tolist() == layout.position_T.bincount(minlength=9).tolist()


def test_embed_tokens_without_positions_only_moves() -> None:
    layout = make_layout()
    rows = make_rows(layout)
    assert torch.equal(embed_tokens(layout, **rows), interleave_rows(layout, **rows))
    with pytest.raises(ValueError, match="needs a layout with positions"):
        embed_tokens(layout, **rows, position_rows_PD=torch.zeros(9, 3))


def test_embed_tokens_drops_out() -> None:
    layout = make_layout()
    rows = make_rows(layout, width=50)
    kept, dropped = (embed_tokens(layout, **rows, dropout=p) for p in (0.0, 0.25))
    is_zero = dropped == 0
    assert 0.2 < float(is_zero.float().mean()) < 0.3
    torch.testing.assert_close(dropped[~is_zero], kept[~is_zero] / 0.75)


def test_the_layout_keeps_times_and_positions_it_was_asked_for() -> None:
    layout = make_layout_with_positions()
    times = torch.arange(sum(ITEM_LENGTHS))
    assert torch.equal(layout.timestamps_T, layout.token_timestamps(times))
    assert layout.position_T[:10].tolist() == [0, 1, 8, 7, 6, 5, 4, 3, 2, 2]
    assert make_layout().timestamps_T is None and make_layout().position_T is None


def test_take_rows_casts() -> None:
    rows = torch.randn(5, 2, dtype=torch.bfloat16, requires_grad=True)
    out = take_rows(rows, torch.tensor([3, 1]), dtype=torch.float32)
    assert torch.equal(out, rows[[3, 1]].float())
    (grad,) = torch.autograd.grad(out.sum(), [rows])
    assert grad.dtype == torch.bfloat16
    assert grad[:, 0].tolist() == [0, 1, 0, 1, 0]


def test_wrong_counts_are_refused() -> None:
    lengths = torch.tensor([3, 2])
    with pytest.raises(ValueError, match="num_candidates_B of user 1 is 4"):
        build_token_layout(lengths, torch.tensor([0, 4]), num_item_rows=5)
    with pytest.raises(ValueError, match="item_lengths_B sums to 5, but there are 6 rows"):
        build_token_layout(lengths, torch.tensor([0, 1]), num_item_rows=6)
    layout = build_token_layout(lengths, torch.tensor([0, 1]), num_item_rows=5)
    with pytest.raises(ValueError, match="action_rows_AD must have 4 rows"):
        interleave_rows(layout, torch.zeros(5, 2), action_rows_AD=torch.zeros(5, 2))
    with pytest.raises(ValueError, match="action_rows_AD must have 4 rows.*got 0"):
        interleave_rows(layout, torch.zeros(5, 2))


def test_int32_offsets() -> None:
    assert int32_offsets(torch.tensor([0, 2**31 - 1])).dtype == torch.int32
    with pytest.raises(ValueError, match="2147483648.*does not fit"):
        int32_offsets(torch.tensor([0, 2**31]))
    already = torch.tensor([0, 7], dtype=torch.int32)
    assert int32_offsets(already) is already


def test_require_32bit_indexing() -> None:
    just_under = torch.empty(2**20, 4, 511, device="meta")
    at_limit = torch.empty(2**20, 4, 512, device="meta")
    require_32bit_indexing(just_under.shape, name="q_THA", kernel="triton")
    with pytest.raises(NotImplementedError, match="q_THA of 1048576 x 4 x 512 = 2147483648"):
        require_32bit_indexing(at_limit.shape, name="q_THA", kernel="triton")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_to_offsets(dtype: torch.dtype) -> None:
    offsets = lengths_to_offsets(torch.tensor([2, 0, 3], dtype=dtype))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, 2, 2, 5]
    big = lengths_to_offsets(torch.tensor([2**31 - 1, 2**31 - 1], dtype=dtype))
    assert big.tolist()[-1] == 2**32 - 2
