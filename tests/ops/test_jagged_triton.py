"""The Triton backend of the jagged ops against the plain one.

On a machine without a GPU the kernels run in Triton's interpreter on CPU tensors; with one, this
same file runs them compiled.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.jagged import TokenLayout, build_token_layout, embed_tokens, take_rows
from ops.position import PositionRule
from tests.ops.jagged_kernels import DEVICE, INTERPRETED, triton_rows, triton_tokens


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    candidates: tuple[int, ...]
    contextuals: tuple[int, ...] | None
    has_actions: bool = True
    counting_from: str = "newest"
    num_positions: int = 24


MIXED = ((5, 0, 3, 4, 0, 1), (2, 0, 3, 0, 0, 0), (2, 0, 2, 2, 2, 2))
# three groups of users, lengths in no order, and more candidates than one piece takes
MANY = tuple(7 * user % 11 for user in range(70))
MANY_CANDIDATES = tuple(min(3, length) for length in MANY)
CASES = {
    "newest": Case(*MIXED),
    "newest_shared_last_row": Case(*MIXED, num_positions=5),
    "newest_one_history_row": Case(*MIXED, num_positions=4),
    "newest_without_actions": Case(*MIXED, has_actions=False),
    "oldest": Case(*MIXED, counting_from="oldest"),
    "oldest_shared_last_event": Case(*MIXED, counting_from="oldest", num_positions=8),
    "oldest_without_actions": Case(*MIXED, False, counting_from="oldest", num_positions=5),
    "no_contextuals": Case(*MIXED[:2], None),
    "no_contextuals_no_actions": Case(*MIXED[:2], None, has_actions=False),
    "only_candidates": Case((3, 0, 2), (3, 0, 2), (1, 1, 0)),
    "only_contextuals": Case((0, 0), (0, 0), (2, 1)),
    "one_user": Case((4,), (1,), (2,)),
    "one_token": Case((1,), (1,), None),
    "no_tokens": Case((0, 0), (0, 0), (0, 0)),
    "no_users": Case((), (), ()),
    "groups": Case(MANY, MANY_CANDIDATES, (1,) * 35 + (0,) * 35),
    "groups_shared": Case(MANY, MANY_CANDIDATES, None, counting_from="oldest", num_positions=8),
    "candidate_pieces": Case((70, 65, 3), (70, 62, 0), None, num_positions=5),
}
INTEGERS = [
    field.name for field in dataclasses.fields(TokenLayout) if field.name.endswith(("B", "T", "C"))
] + ["item_tokens_E", "seq_offsets_B1"]


def layout_of(case: Case, backend: str, dtype: torch.dtype = torch.int64) -> TokenLayout:
    contextuals = () if case.contextuals is None else case.contextuals
    num_events = sum(case.lengths)

    def counts(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return build_token_layout(
        counts(case.lengths),
        counts(case.candidates),
        num_item_rows=num_events,
        num_contextuals_B=None if case.contextuals is None else counts(contextuals),
        num_contextual_rows=sum(contextuals),
        has_actions=case.has_actions,
        num_candidate_rows=sum(case.candidates),
        timestamps_E=2**40 + 10 * torch.arange(num_events, device=DEVICE),
        positions=PositionRule(
            num_positions=case.num_positions,
            max_num_contextuals=max(contextuals, default=0),
            counting_from=case.counting_from,
            tokens_per_event=2 if case.has_actions else 1,
            max_seq_len=2 + 2 * max(case.lengths, default=0),
        ),
        backend=backend,
    )


def leaves_of(case: Case, layout: TokenLayout, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {"item_rows_ED": layout.num_item_rows}
    if case.has_actions:
        sizes["action_rows_AD"] = layout.num_action_rows
    if case.contextuals is not None:
        sizes["contextual_rows_KD"] = layout.num_contextual_rows

    def draw(num_rows: int, dtype: torch.dtype) -> Tensor:
        rows = torch.randn(num_rows, width, generator=generator).to(DEVICE, dtype)
        return rows.requires_grad_()

    leaves = {name: draw(size, dtype) for name, size in sizes.items()}
    return leaves | {"position_rows_PD": draw(case.num_positions, torch.float32)}


def run(
    leaves: dict[str, Tensor], layout: TokenLayout, backend: str, **options: Any
) -> dict[str, Tensor]:
    rows = dict(leaves)
    out = embed_tokens(layout, rows.pop("item_rows_ED"), **rows, backend=backend, **options)
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(out.shape, generator=generator).to(DEVICE, out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), weights)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("name", CASES)
def test_every_integer_of_the_layout(name: str) -> None:
    expected = layout_of(CASES[name], "pytorch")
    for dtype in (torch.int64, torch.int32):
        actual = layout_of(CASES[name], "triton", dtype)
        for field in INTEGERS:
            value = getattr(actual, field)
            assert value.dtype == torch.int64, field
            assert torch.equal(value, getattr(expected, field)), field


def assert_table_grad_is_as_exact(
    actual: Tensor, plain: Tensor, weights_of_out: Tensor, layout: TokenLayout
) -> None:
    """Against sums in float64; plain PyTorch's own error is the measure."""
    exact = torch.zeros(actual.shape, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, layout.position_T, weights_of_out.double())
    scale = torch.zeros_like(exact).index_add_(0, layout.position_T, weights_of_out.double().abs())
    error, plain_error = ((x.double() - exact).abs() for x in (actual, plain))
    assert (error <= 1.5 * plain_error.max() + 2.0**-21 * scale).all()
    assert torch.equal(actual[exact.abs().sum(1) == 0], plain[exact.abs().sum(1) == 0])


WIDTHS = [10, 96, 128]


@pytest.mark.parametrize(
    ("rows", "places", "warps", "stages"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 2), (4, 1, 2, 3), (8, 8, 4, 1), (32, 8, 4, 2)],
)
@pytest.mark.parametrize("name", ["groups", "groups_shared", "oldest_shared_last_event"])
def test_every_tile_of_the_backward(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, places: int, warps: int, stages: int
) -> None:
    """Widths, and few users, choose the tile; sums of places that share a row hang on it."""
    tile = triton_tokens.PieceTile(rows=rows, places=places, warps=warps, stages=stages)
    monkeypatch.setattr(triton_tokens, "piece_tile", lambda width, num_users: tile)
    test_tokens_and_gradients_of_float32_rows(name)


@pytest.mark.parametrize("width", [1, 16, 128, 512, 1024, 4096, 8192])
def test_tiles_fit_their_pieces(width: int) -> None:
    for num_users in (0, 1, 4, 32, 1000):
        tile = triton_tokens.piece_tile(width, num_users)
        assert tile.rows % tile.places == 0
        assert triton_tokens.BLOCK_PLACES % tile.places == 0


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_gradients_of_float32_rows(name: str) -> None:
    """Rows are moved, and added to once: equal bits. Only the table's gradient is a sum."""
    case = CASES[name]
    widths = WIDTHS if name in ("newest", "oldest") or not INTERPRETED else [16]
    for width in widths:
        layouts = {backend: layout_of(case, backend) for backend in ("pytorch", "triton")}
        leaves = leaves_of(case, layouts["pytorch"], width, torch.float32)
        plain, actual = (run(leaves, layout, name) for name, layout in layouts.items())
        for key in plain.keys() - {"position_rows_PD"}:
            assert torch.equal(actual[key], plain[key]), key
        generator = torch.Generator().manual_seed(6)
        weights = torch.randn(plain["out"].shape, generator=generator).to(DEVICE)
        assert_table_grad_is_as_exact(
            actual["position_rows_PD"], plain["position_rows_PD"], weights, layouts["pytorch"]
        )


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(rows_dtype: torch.dtype) -> None:
    """Added in float32 and rounded once, whatever the rows; gradients arrive in their dtype."""
    case, out_dtype = CASES["newest_shared_last_row"], torch.bfloat16
    layout = layout_of(case, "triton")
    leaves = leaves_of(case, layout, 96, rows_dtype)
    actual = run(leaves, layout, "triton", dtype=out_dtype)
    wide = {name: leaf.detach().float().requires_grad_() for name, leaf in leaves.items()}
    weights = torch.randn(actual["out"].shape, generator=torch.Generator().manual_seed(6))
    weights = weights.to(DEVICE, out_dtype)
    items = wide["item_rows_ED"]
    out = embed_tokens(layout_of(case, "pytorch"), items, **_others(wide))
    grads = torch.autograd.grad(out, list(wide.values()), weights.float())
    assert actual["out"].dtype == out_dtype
    assert torch.equal(actual["out"], out.to(out_dtype))
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert actual[name].dtype == leaf.dtype
        if name == "position_rows_PD":
            torch.testing.assert_close(actual[name], grad, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(actual[name], grad.to(leaf.dtype))


def test_without_positions_rows_are_moved() -> None:
    case = CASES["newest"]
    for layout in (layout_of(case, "pytorch"), layout_of(case, "triton")):
        leaves = leaves_of(case, layout, 96, torch.float32)
        leaves.pop("position_rows_PD")
        plain, actual = (run(leaves, layout, backend) for backend in ("pytorch", "triton"))
        assert all(torch.equal(actual[key], plain[key]) for key in plain)


def test_a_frozen_table_gets_no_gradient_and_sources_still_do() -> None:
    case = CASES["newest"]
    layout = layout_of(case, "triton")
    leaves = leaves_of(case, layout, 16, torch.float32)
    expected = run(leaves, layout, "triton")
    table = leaves.pop("position_rows_PD").detach()
    items = leaves["item_rows_ED"]
    rows = {name: rows for name, rows in leaves.items() if name != "item_rows_ED"}
    out = embed_tokens(layout, items, **rows, position_rows_PD=table, backend="triton")
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(out.shape, generator=generator).to(DEVICE)
    (grad,) = torch.autograd.grad(out, [items], weights)
    assert torch.equal(grad, expected["item_rows_ED"])


def test_strided_rows_and_gradients_are_read_in_place() -> None:
    case = CASES["newest"]
    layout = layout_of(case, "triton")
    leaves = leaves_of(case, layout, 16, torch.float32)
    expected = run(leaves, layout, "triton")
    rows = {
        name: torch.nn.functional.pad(leaf.detach(), (0, 5))[:, :16].requires_grad_()
        for name, leaf in leaves.items()
    }
    actual = run(rows, layout, "triton")
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    out = embed_tokens(layout, rows["item_rows_ED"], **_others(rows), backend="triton")
    wide = torch.ones(out.shape[0], 1, device=DEVICE).expand(out.shape)  # stride 0, as sum() gives
    (grad,) = torch.autograd.grad(out, [rows["item_rows_ED"]], wide)
    assert torch.equal(grad, torch.ones_like(grad))


def _others(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in leaves.items() if name != "item_rows_ED"}


def test_dropout_forward_and_backward_agree() -> None:
    case = CASES["newest"]
    layout = layout_of(case, "triton")
    leaves = leaves_of(case, layout, 96, torch.float32)
    kept_all = run(leaves, layout, "triton")
    torch.manual_seed(1)
    first = run(leaves, layout, "triton", dropout=0.3)
    kept = first["out"] != 0
    for seed in (1, 2):
        torch.manual_seed(seed)
        out = embed_tokens(
            layout, leaves["item_rows_ED"], **_others(leaves), dropout=0.3, backend="triton"
        )
        assert torch.equal(out != 0, kept) == (seed == 1)
    assert abs(float(kept.float().mean()) - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5
    assert kept.any(0).all() and kept.any(1).all()
    assert not (kept.all(0).any() or kept.all(1).any())
    torch.testing.assert_close(first["out"], torch.where(kept, kept_all["out"] / 0.7, 0.0))
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(kept.shape, generator=generator).to(DEVICE)
    masked = torch.where(kept, weights / 0.7, 0.0)
    sizes = [layout.num_contextual_rows, layout.num_item_rows, layout.num_action_rows]
    moved = masked.index_select(0, layout.token_T).split(sizes)
    names = ("contextual_rows_KD", "item_rows_ED", "action_rows_AD")
    for name, expected in zip(names, moved, strict=True):
        torch.testing.assert_close(first[name], expected)
    table = torch.zeros_like(first["position_rows_PD"])
    table.index_add_(0, layout.position_T, masked)
    torch.testing.assert_close(first["position_rows_PD"], table, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["groups_shared", "candidate_pieces", "newest", "no_tokens"])
def test_uninitialised_memory_is_never_read_and_all_is_written(name: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        layout = layout_of(CASES[name], "triton")
        leaves = leaves_of(CASES[name], layout, 16, torch.float32)
        results = [run(leaves, layout, "triton") for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for key, value in results[0].items():
        assert torch.isfinite(value).all(), key
        assert torch.equal(value, results[1][key]), key


TAKEN = {
    "some": (300, tuple(range(3, 300, 2)), 10),
    "a_run": (70, tuple(range(31, 68)), 96),
    "first_and_last": (65, (0, 64), 128),
    "all": (33, tuple(range(33)), 16),
    "none": (40, (), 16),
    "of_no_rows": (0, (), 16),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take_rows(name: str, dtype: torch.dtype) -> None:
    num_rows, index, width = TAKEN[name]
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(num_rows, width, generator=generator).to(DEVICE, dtype).requires_grad_()
    index_N = torch.tensor(index, dtype=torch.int64, device=DEVICE)
    weights = torch.randn(len(index), width, generator=generator).to(DEVICE)
    results = []
    for backend in ("pytorch", "triton"):
        out = take_rows(rows, index_N, dtype=torch.float32, backend=backend)
        assert out.dtype == torch.float32
        results.append((out, *torch.autograd.grad(out, [rows], weights)))
    (plain, _), (actual, grad) = results
    assert torch.equal(actual, plain)
    expected = torch.zeros(num_rows, width, device=DEVICE).index_copy(0, index_N, weights)
    assert grad.dtype == dtype
    assert torch.equal(grad, expected.to(dtype))
    assert take_rows(rows, index_N, backend="triton").dtype == dtype


@pytest.mark.parametrize("num_entries", [127, 128, 129, 16384, 16385])
def test_the_search_has_steps_enough(num_entries: int) -> None:
    assert triton_rows._FAN ** triton_rows._levels(num_entries) >= num_entries
    assert triton_rows._FAN ** (triton_rows._levels(num_entries) - 1) < num_entries


def test_take_rows_searches_in_two_steps() -> None:
    index_N = torch.arange(0, 400, 2, device=DEVICE)
    rows = torch.randn(400, 16, device=DEVICE, requires_grad=True)
    weights = torch.randn(200, 16, device=DEVICE)
    (grad,) = torch.autograd.grad(take_rows(rows, index_N, backend="triton"), [rows], weights)
    assert torch.equal(grad[::2], weights)
    assert not grad[1::2].any()


def test_what_triton_does_not_take_is_refused() -> None:
    case = CASES["newest"]
    layout, plain_layout = layout_of(case, "triton"), layout_of(case, "pytorch")
    leaves = leaves_of(case, layout, 16, torch.float32)
    items, others = leaves["item_rows_ED"], _others(leaves)
    with pytest.raises(ValueError, match='backend must be "pytorch" or "triton", got "cuda"|cuda'):
        embed_tokens(layout, items, **others, backend="cuda")
    with pytest.raises(ValueError, match="layout made by .*backend = "):
        embed_tokens(plain_layout, items, **others, backend="triton")
    with pytest.raises(ValueError, match="rows of one dtype, got torch.bfloat16, torch.float32"):
        embed_tokens(layout, items.bfloat16(), **others, backend="triton")
    doubles = {name: rows.double() for name, rows in others.items()}
    with pytest.raises(ValueError, match="float32, bfloat16 or float16.*torch.float64"):
        embed_tokens(layout, items.double(), **doubles, backend="triton")
    bare = dataclasses.replace(layout, positions=None)
    for backend in ("pytorch", "triton"):
        with pytest.raises(ValueError, match="position_rows_PD needs a layout with positions"):
            embed_tokens(bare, items, **others, backend=backend)
        with pytest.raises(ValueError, match="position_rows_PD must have the 24 rows"):
            short = others | {"position_rows_PD": others["position_rows_PD"][:23]}
            embed_tokens(layout, items, **short, backend=backend)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device assertion ends the process's CUDA context")
def test_take_rows_refuses_an_index_that_does_not_rise() -> None:
    for index in ([1, 1], [2, 0]):
        with pytest.raises(ValueError, match="an index that rises"):
            take_rows(torch.zeros(3, 16), torch.tensor(index), backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="a device assertion ends the process's CUDA context")
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("more candidates than item events", {"candidates": (0, 4)}),
        ("item_lengths_B and its rows differ", {"lengths": (3, 3)}),
        ("num_candidates_B and num_candidate_rows", {"candidates": (2, 1)}),
        ("num_contextuals_B and its rows differ", {"contextuals": (1, 2)}),
        ("longer than max_seq_len", {"max_seq_len": 3}),
    ],
)
def test_the_device_checks_what_the_host_cannot_see(
    monkeypatch: pytest.MonkeyPatch, message: str, changes: dict[str, Any]
) -> None:
    from triton.runtime import interpreter

    debugging = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", debugging)
    monkeypatch.setattr("ops.jagged.layout._check", lambda *_: None)
    values = {"lengths": (3, 2), "candidates": (1, 1), "contextuals": (1, 1), "max_seq_len": 6}
    for change in ({}, changes):
        given = values | change
        build = lambda given=given: build_token_layout(  # noqa: E731
            torch.tensor(given["lengths"]),
            torch.tensor(given["candidates"]),
            num_item_rows=5,
            num_contextuals_B=torch.tensor(given["contextuals"]),
            num_contextual_rows=2,
            num_candidate_rows=2,
            positions=PositionRule(
                num_positions=9, max_num_contextuals=1, max_seq_len=given["max_seq_len"]
            ),
            backend="triton",
        )
        if not change:
            assert build().num_tokens == 10
            continue
        with pytest.raises(Exception, match=message):
            build()


def test_without_an_interpreter_a_cpu_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(NotImplementedError, match='needs a CUDA tensor.*backend = "pytorch"'):
        take_rows(torch.zeros(3, 16), torch.tensor([1]), backend="triton")
    monkeypatch.setattr("ops.jagged.backend.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="package triton, which is not installed"):
        take_rows(torch.zeros(3, 16), torch.tensor([1]), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["pytorch", "triton"])
def test_nothing_waits_for_the_device(backend: str) -> None:
    case = CASES["groups"]
    counts = [torch.tensor(x, device="cuda") for x in (case.lengths, case.candidates)]
    times = torch.zeros(sum(case.lengths), dtype=torch.int64, device="cuda")
    rule = PositionRule(num_positions=24, max_num_contextuals=0, max_seq_len=30)
    sizes = {"num_item_rows": sum(case.lengths), "num_candidate_rows": sum(case.candidates)}
    leaves = leaves_of(case, layout_of(case, backend), 96, torch.float32)
    leaves.pop("contextual_rows_KD")

    def step() -> None:
        layout = build_token_layout(
            *counts, **sizes, timestamps_E=times, positions=rule, backend=backend
        )
        out = embed_tokens(
            layout,
            leaves["item_rows_ED"],
            action_rows_AD=leaves["action_rows_AD"],
            position_rows_PD=leaves["position_rows_PD"],
            dropout=0.1,
            dtype=torch.bfloat16,
            backend=backend,
        )
        taken = take_rows(out, layout.candidate_tokens_C, dtype=torch.float32, backend=backend)
        torch.autograd.grad(taken.square().sum(), list(leaves.values()))

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    """Rows that 32-bit indices cannot reach: the last user against the same user alone."""
    num_users, events, width = 2200, 1024, 1024
    num_rows = num_users * events
    assert num_rows * width > 2**31
    lengths = torch.full((num_users,), events, device="cuda")
    zeros = torch.zeros_like(lengths)
    items = torch.zeros(num_rows, width, dtype=torch.bfloat16, device="cuda")
    items[-events:] = torch.randn(events, width, device="cuda")
    items.requires_grad_()
    table = torch.randn(events + 1, width, device="cuda", requires_grad=True)
    rule = PositionRule(num_positions=events + 1, max_num_contextuals=0, max_seq_len=events)
    layout = build_token_layout(
        lengths,
        zeros,
        num_item_rows=num_rows,
        has_actions=False,
        num_candidate_rows=0,
        positions=rule,
        backend="triton",
    )
    out = embed_tokens(layout, items, position_rows_PD=table, backend="triton")
    expected = items[-events:].float() + table[1:].flip(0)
    assert torch.equal(out[-events:], expected.bfloat16())
    index = torch.arange(num_rows - events, num_rows, 2, device="cuda")
    taken = take_rows(out, index, dtype=torch.float32, backend="triton")
    assert torch.equal(taken, expected.bfloat16()[::2].float())
    weights = torch.randn(taken.shape, device="cuda").bfloat16().float()
    grad, table_grad = torch.autograd.grad(taken, [items, table], weights)
    assert torch.equal(grad[-events::2].float(), weights)
    assert not grad[-events + 1 :: 2].any()
    assert torch.equal(table_grad[1:].flip(0)[::2], weights)
