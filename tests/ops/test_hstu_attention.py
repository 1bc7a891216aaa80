"""The attention op: both backends against the written rule and each other, values and gradients."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import (
    hstu_attention,
)
from ops.hstu_attention.reference import visible
from ops.hstu_attention.spec import AttentionSpec
from ops.hstu_attention.time_buckets import time_bucket_boundaries
from ops.jagged import lengths_to_offsets

BACKENDS = ("reference", "pytorch")
NUM_HEADS, ATTENTION_DIM, LINEAR_DIM = 2, 4, 6


@dataclass(frozen=True)
class Case:
    """Lengths, contextuals and candidates of each user, and the switches of the call."""

    lengths: tuple[int, ...]
    contextuals: tuple[int, ...]
    candidates: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    position_bias: bool = False
    time_bias: bool = False


MIXED = ((11, 0, 1, 63, 9, 10, 150, 12), (2, 0, 0, 2, 2, 2, 2, 2), (3, 0, 1, 20, 7, 0, 3, 3))
CASES = {
    "plain_causal": Case((5, 3, 1), (0, 0, 0), (0, 0, 0)),
    "hostile_lengths": Case(*MIXED),
    "causal_contextual": Case(*MIXED, {"disable_contextual_mask": True}),
    "groups_of_3": Case(*MIXED, {"target_group_size": 3}),
    "one_group": Case(*MIXED, {"target_group_size": 100}),
    "all_candidates": Case((3, 5), (0, 0), (3, 5)),
    "some_all_candidates": Case((3, 5), (0, 0), (0, 5)),
    "contextual_and_candidates_only": Case((5, 4), (2, 2), (3, 2)),
    "contextual_only": Case((2, 2), (2, 2), (0, 0)),
    "differing_contextuals": Case((9, 9, 9), (0, 2, 4), (2, 2, 2)),
    "long_of_one_length": Case((280, 280), (3, 3), (20, 20)),
    "not_causal": Case((11, 0, 1, 150), (2, 0, 0, 1), (0, 0, 0, 0), {"is_causal": False}),
    "window": Case(*MIXED, {"attention_window": 3, "target_group_size": 2}),
    "window_causal_contextual": Case(
        *MIXED, {"attention_window": 2, "disable_contextual_mask": True}
    ),
    "window_not_causal": Case((11, 6), (2, 0), (0, 0), {"is_causal": False, "attention_window": 2}),
    "position_bias": Case(*MIXED, {"target_group_size": 2}, position_bias=True),
    "time_bias": Case(*MIXED, time_bias=True),
    "all_at_once": Case(
        *MIXED,
        {"attention_window": 5, "target_group_size": 2},
        position_bias=True,
        time_bias=True,
    ),
    "no_user_with_tokens": Case((0, 0), (0, 0), (0, 0), position_bias=True, time_bias=True),
}


def make_inputs(case: Case, *, dtype: torch.dtype = torch.float64, extra_rows: int = 0):
    """Return the call's differentiable leaves and its other arguments."""
    generator = torch.Generator().manual_seed(5)
    num_rows = sum(case.lengths) + extra_rows
    width = 2 * (ATTENTION_DIM + LINEAR_DIM)
    leaves = {"uvqk": torch.randn(num_rows, NUM_HEADS * width, generator=generator, dtype=dtype)}
    if case.position_bias:
        leaves["position_bias"] = torch.randn(NUM_HEADS, 7, generator=generator, dtype=dtype)
    if case.time_bias:
        leaves["time_bias"] = torch.randn(NUM_HEADS, 40, generator=generator, dtype=dtype)
    arguments = {
        "seq_offsets": lengths_to_offsets(torch.tensor(case.lengths)),
        "num_contextuals": torch.tensor(case.contextuals),
        "num_candidates": torch.tensor(case.candidates),
        "max_seq_len": 300,
        "scaling_seqlen": 7.0,
        "timestamps": torch.randint(0, 10**6, (num_rows,), generator=generator),
        **case.options,
    }
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, arguments


def attend(leaves: dict[str, Tensor], arguments: dict[str, Any], backend: str) -> Tensor:
    """Call the op on strided views of one fused head-major tensor."""
    heads = leaves["uvqk"].view(-1, NUM_HEADS, 2 * (ATTENTION_DIM + LINEAR_DIM))
    widths = [LINEAR_DIM, LINEAR_DIM, ATTENTION_DIM, ATTENTION_DIM]
    _, v_THV, q_THA, k_THA = heads.split(widths, dim=-1)
    tables = {name: leaf for name, leaf in leaves.items() if name != "uvqk"}
    return hstu_attention(q_THA, k_THA, v_THV=v_THV, backend=backend, **tables, **arguments)


def gradients(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weights), strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_pytorch_equals_reference(case: Case) -> None:
    leaves, arguments = make_inputs(case)
    expected = attend(leaves, arguments, "reference")
    actual = attend(leaves, arguments, "pytorch")
    assert expected.shape == (sum(case.lengths), NUM_HEADS, LINEAR_DIM)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    expected_grads, actual_grads = gradients(expected, leaves), gradients(actual, leaves)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(actual_grads[name], grad, rtol=1e-9, atol=1e-11, msg=name)
    if sum(case.lengths):
        assert all(grad.abs().sum() > 0 for grad in expected_grads.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["groups_of_3", "window", "not_causal", "all_at_once"])
def test_gradcheck(name: str, backend: str) -> None:
    case = CASES[name]
    lengths = tuple(min(length, 9) for length in case.lengths[:4])
    candidates = tuple(min(count, 4) for count in case.candidates[:4])
    small = Case(
        lengths,
        case.contextuals[:4],
        candidates,
        case.options,
        case.position_bias,
        case.time_bias,
    )
    leaves, arguments = make_inputs(small, extra_rows=1)
    names = list(leaves)

    def call(*values: Tensor) -> Tensor:
        return attend(dict(zip(names, values, strict=True)), arguments, backend)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_visible_pair_is_the_formula(backend: str) -> None:
    """One number at a time, from the written rule, for c=1 h=3 t=2."""
    mask = torch.tensor(
        [
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 0],
            [1, 1, 1, 1, 0, 1],
        ]
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, 1, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    out = hstu_attention(
        q,
        k,
        v_THV=v,
        seq_offsets=torch.tensor([0, 6]),
        max_seq_len=6,
        scaling_seqlen=4.0,
        num_contextuals=torch.tensor([1]),
        num_candidates=torch.tensor([2]),
        backend=backend,
    )
    for i in range(6):
        expected = torch.zeros(2, dtype=torch.float64)
        for j in range(6):
            score = float(q[i, 0] @ k[j, 0]) / math.sqrt(2)
            expected += float(mask[i, j]) * score / (1 + math.exp(-score)) / 4.0 * v[j, 0]
        torch.testing.assert_close(out[i, 0], expected)


def test_window_keeps_contextual_columns_and_own_group() -> None:
    spec = AttentionSpec(max_seq_len=9, scaling_seqlen=1.0, attention_window=2, target_group_size=2)
    expected = torch.tensor(
        [
            [1, 1, 1, 1, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 0, 1, 1, 0, 0, 0],
            [1, 0, 0, 1, 1, 0, 0],
            [1, 0, 0, 0, 1, 1, 0],
            [1, 0, 0, 1, 0, 0, 1],
        ]
    )
    assert torch.equal(visible(1, 3, 3, spec).long(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_last_offset_stay_zero_and_poison_nothing(backend: str) -> None:
    clean, arguments = make_inputs(CASES["all_at_once"])
    poisoned, poisoned_arguments = make_inputs(CASES["all_at_once"], extra_rows=2)
    num_tokens = clean["uvqk"].shape[0]
    with torch.no_grad():
        poisoned["uvqk"][:num_tokens] = clean["uvqk"]
        poisoned["uvqk"][num_tokens:] = float("nan")
        for name in ("position_bias", "time_bias"):
            poisoned[name].copy_(clean[name])
    poisoned_arguments["timestamps"][:num_tokens] = arguments["timestamps"]
    out = attend(poisoned, poisoned_arguments, backend)
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    torch.testing.assert_close(out[:num_tokens], attend(clean, arguments, backend))
    weights = torch.ones_like(out)
    weights[num_tokens:] = float("nan")
    grads = torch.autograd.grad(out, list(poisoned.values()), weights)
    assert torch.equal(grads[0][num_tokens:], torch.zeros_like(grads[0][num_tokens:]))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_uninitialised_memory_is_never_read() -> None:
    leaves, arguments = make_inputs(CASES["hostile_lengths"], extra_rows=3)
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        out = attend(leaves, arguments, "pytorch")
        grads = gradients(out, leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isfinite(out).all()
    assert torch.isfinite(grads["uvqk"]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_has_zero_gradients_not_none(backend: str) -> None:
    leaves, arguments = make_inputs(CASES["no_user_with_tokens"])
    attend(leaves, arguments, backend).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    case = Case((40, 63, 9), (2, 2, 2), (5, 0, 7), position_bias=True)
    exact, arguments = make_inputs(case)
    rounded = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in exact.items()}
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in rounded.items()}
    expected, actual = attend(exact, arguments, "reference"), attend(rounded, arguments, "pytorch")
    assert actual.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert (actual.double() - expected).abs().max() <= 8 * unit * expected.abs().max()
    expected_grads, actual_grads = gradients(expected, exact), gradients(actual, rounded)
    for name, grad in expected_grads.items():
        assert actual_grads[name].dtype == dtype
        assert (actual_grads[name].double() - grad).abs().max() <= 8 * unit * grad.abs().max(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_user_does_not_depend_on_batch_mates(backend: str) -> None:
    case = CASES["all_at_once"]
    leaves, arguments = make_inputs(case, dtype=torch.float32)
    together = attend(leaves, arguments, backend)
    offsets = arguments["seq_offsets"].tolist()
    for user in range(len(case.lengths)):
        rows = slice(offsets[user], offsets[user + 1])
        alone = arguments | {
            "seq_offsets": torch.tensor([0, case.lengths[user]]),
            "num_contextuals": arguments["num_contextuals"][user : user + 1],
            "num_candidates": arguments["num_candidates"][user : user + 1],
            "timestamps": arguments["timestamps"][rows],
        }
        out = attend(leaves | {"uvqk": leaves["uvqk"][rows]}, alone, backend)
        torch.testing.assert_close(out, together[rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_users_permutes_outputs(backend: str) -> None:
    leaves, arguments = make_inputs(CASES["all_at_once"])
    out = attend(leaves, arguments, backend)
    order = torch.tensor([6, 2, 0, 7, 1, 5, 3, 4])
    offsets = arguments["seq_offsets"]
    rows = torch.cat([torch.arange(int(offsets[u]), int(offsets[u + 1])) for u in order])
    permuted = arguments | {
        "seq_offsets": lengths_to_offsets(offsets.diff()[order]),
        "num_contextuals": arguments["num_contextuals"][order],
        "num_candidates": arguments["num_candidates"][order],
        "timestamps": arguments["timestamps"][rows],
    }
    again = attend(leaves | {"uvqk": leaves["uvqk"][rows]}, permuted, backend)
    torch.testing.assert_close(again, out[rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_candidate_does_not_depend_on_its_slot(backend: str) -> None:
    case = Case((12,), (2,), (4,), {"attention_window": 4}, position_bias=True)
    leaves, arguments = make_inputs(case)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 11, 9])
    out = attend(leaves, arguments, backend)
    moved = attend(leaves | {"uvqk": leaves["uvqk"][rows]}, arguments, backend)
    torch.testing.assert_close(moved, out[rows])


def test_scaling_seqlen_may_be_a_tensor() -> None:
    leaves, arguments = make_inputs(CASES["hostile_lengths"])
    number = attend(leaves, arguments, "pytorch")
    tensor = attend(leaves, arguments | {"scaling_seqlen": torch.tensor(7.0)}, "pytorch")
    assert torch.equal(number, tensor)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_integer_type(dtype: torch.dtype, backend: str) -> None:
    leaves, arguments = make_inputs(CASES["hostile_lengths"])
    expected = attend(leaves, arguments, backend)
    converted = arguments | {
        name: arguments[name].to(dtype)
        for name in ("seq_offsets", "num_contextuals", "num_candidates")
    }
    assert torch.equal(attend(leaves, converted, backend), expected)


BAD_CALLS = {
    "max_seq_len is 4": {"max_seq_len": 4},
    "past the 9 rows": {"seq_offsets": torch.tensor([0, 5, 2**31])},
    "must not fall": {"seq_offsets": torch.tensor([0, 9, 8])},
    "must start at 0": {"seq_offsets": torch.tensor([1, 5, 9])},
    "int32 or int64": {"seq_offsets": torch.tensor([0.0, 5.0, 9.0])},
    "num_candidates of user 1 is 5": {"num_candidates": torch.tensor([0, 5])},
    "num_contextuals of user 0 is 3": {"num_contextuals": torch.tensor([3, 0])},
    "must not be negative": {"num_candidates": torch.tensor([-1, 0])},
    "must have shape": {"num_candidates": torch.tensor([1])},
    "is_causal = False": {"is_causal": False},
    "target_group_size": {"target_group_size": 0},
    "attention_window": {"attention_window": 0},
    "scaling_seqlen": {"scaling_seqlen": 0.0},
    "position_bias must be": {"position_bias": torch.zeros(3, 7)},
    "needs timestamps": {"time_bias": torch.zeros(NUM_HEADS, 7), "timestamps": None},
    "one entry a row": {"timestamps": torch.zeros(3, dtype=torch.int64)},
}


@pytest.mark.parametrize(("message", "change"), BAD_CALLS.items(), ids=BAD_CALLS.keys())
def test_contradictions_are_refused(message: str, change: dict[str, Any]) -> None:
    leaves, arguments = make_inputs(Case((5, 4), (0, 0), (3, 0)))
    attend(leaves, arguments, "pytorch")
    with pytest.raises(ValueError, match=message):
        attend(leaves, arguments | change, "pytorch")


def test_time_buckets_are_those_of_the_formula() -> None:
    elapsed = torch.cat([torch.arange(100_000), (2.0 ** torch.arange(17, 60).double()).long()])
    boundaries = time_bucket_boundaries(64, torch.device("cpu"))
    expected = (elapsed.clamp(min=1).double().log() / 0.301).floor().long().clamp(max=63)
    assert torch.equal(torch.bucketize(elapsed, boundaries, right=True), expected)
    assert int(time_bucket_boundaries(1000, torch.device("cpu"))[-1]) == 2**63 - 1
