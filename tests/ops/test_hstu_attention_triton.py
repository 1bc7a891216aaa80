"""The triton backend of the attention op against the float64 oracle.

On a machine without a GPU the kernels run in Triton's interpreter on CPU tensors; with one, this
same file runs them compiled.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import available_backends, choose_backend, hstu_attention
from ops.hstu_attention.dispatch import CallShape
from ops.jagged import lengths_to_offsets
from tests.ops.test_hstu_attention import CASES, Case
from tests.ops.triton_cases import (
    DEVICE,
    HOSTILE,
    INTERPRETED,
    MIXED,
    NUM_HEADS,
    TRITON_CASES,
    assert_as_exact_as_pytorch,
    attend,
    make_inputs,
    oracle,
    run,
)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


# the kernel of dQ shares its mask code with the forward: a few cases do where each costs seconds
DETERMINISTIC_CASES = (
    ("hostile_lengths", "window_not_causal", "one_group", "all_at_once", "no_user_with_tokens")
    if INTERPRETED
    else tuple(TRITON_CASES)
)


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [(name, False) for name in TRITON_CASES] + [(name, True) for name in DETERMINISTIC_CASES],
)
def test_every_mask_and_bias_against_the_oracle(name: str, deterministic: bool) -> None:
    case = TRITON_CASES[name]
    inputs = make_inputs(case)
    inputs[1]["deterministic"] = deterministic
    exact = oracle(*inputs)
    assert_as_exact_as_pytorch(run(*inputs, "triton"), run(*inputs, "pytorch"), exact)
    if sum(case.lengths):
        assert all(value.abs().sum() > 0 for value in exact.values())


LOW_PRECISION = Case((40, 0, 35), (2, 0, 2), (5, 0, 7), position_bias=True, time_bias=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    inputs = make_inputs(LOW_PRECISION, dtype=dtype)
    actual, plain = run(*inputs, "triton"), run(*inputs, "pytorch")
    assert {name: value.dtype for name, value in actual.items()} == dict.fromkeys(actual, dtype)
    assert_as_exact_as_pytorch(actual, plain, oracle(*inputs))


HEAD_DIMS = [(32, 64), (64, 32), (64, 64), (96, 96), (128, 128), (256, 256), (96, 256), (16, 48)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_CASES = [(*dims, name) for name in DTYPES for dims in HEAD_DIMS]
if INTERPRETED:  # it multiplies in FP32 whatever the dtype: little to learn from all of them
    HEAD_CASES = [case for case in HEAD_CASES if case[2] == "float32" or case[0] == case[1] == 96]


@pytest.mark.parametrize(("attention_dim", "linear_dim", "dtype"), HEAD_CASES)
def test_head_dims(attention_dim: int, linear_dim: int, dtype: str) -> None:
    case = Case((33,), (2,), (4,)) if INTERPRETED else Case((150, 33, 300), (2, 0, 1), (4, 0, 70))
    inputs = make_inputs(
        case, dtype=DTYPES[dtype], attention_dim=attention_dim, linear_dim=linear_dim
    )
    plain, exact = run(*inputs, "pytorch"), oracle(*inputs)
    for deterministic in (True,) if INTERPRETED and dtype == "float32" else (False, True):
        inputs[1]["deterministic"] = deterministic
        assert_as_exact_as_pytorch(run(*inputs, "triton"), plain, exact)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_plain_rule(width: int, dtype: torch.dtype) -> None:
    """Causal and nothing else; poisoned rows behind the last user."""
    if INTERPRETED and dtype == torch.float16:
        pytest.skip("the interpreter multiplies in FP32 whatever the dtype")
    lengths = (0, 1, 33, 16, 0) if INTERPRETED else (0, 1, 129, 128, 127, 64, 700, 0, 65, 300)
    case = Case(lengths, (0,) * len(lengths), (0,) * len(lengths), {"max_seq_len": 700})
    leaves, arguments, dims = make_inputs(
        case, dtype=dtype, extra_rows=71, attention_dim=width, linear_dim=width
    )
    arguments["num_contextuals"] = arguments["num_candidates"] = None
    num_tokens = sum(lengths)
    exact = oracle(leaves, arguments, dims)
    with torch.no_grad():
        leaves["uvqk"][num_tokens:] = float("nan")
    plain = run(leaves, arguments, dims, "pytorch")
    for deterministic in (False,) if INTERPRETED else (False, True):
        arguments["deterministic"] = deterministic
        actual = run(leaves, arguments, dims, "triton")
        for value in actual.values():
            assert torch.equal(value[num_tokens:], torch.zeros_like(value[num_tokens:]))
        assert_as_exact_as_pytorch(actual, plain, exact)
    if not INTERPRETED:
        again = run(leaves, arguments, dims, "triton")
        assert all(torch.equal(again[name], actual[name]) for name in again)


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_past_the_last_offset_are_zero_and_never_read(deterministic: bool) -> None:
    case = Case((33, 0, 20), (2, 0, 0), (4, 0, 0), position_bias=True, time_bias=True)
    clean = make_inputs(case)
    leaves, arguments, dims = make_inputs(case, extra_rows=71)
    num_tokens = sum(case.lengths)
    with torch.no_grad():
        leaves["uvqk"][:num_tokens] = clean[0]["uvqk"]
        leaves["uvqk"][num_tokens:] = float("nan")
        for name in ("position_bias", "time_bias"):
            leaves[name].copy_(clean[0][name])
    arguments["timestamps"][:num_tokens] = clean[1]["timestamps"]
    arguments["deterministic"] = clean[1]["deterministic"] = deterministic
    out = attend(leaves, arguments, dims, "triton")
    weights = torch.ones_like(out)
    weights[num_tokens:] = float("nan")
    grads = torch.autograd.grad(out, list(leaves.values()), weights)
    clean_out = attend(*clean, "triton")
    clean_grads = torch.autograd.grad(
        clean_out, list(clean[0].values()), torch.ones_like(clean_out)
    )
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    assert torch.equal(grads[0][num_tokens:], torch.zeros_like(grads[0][num_tokens:]))
    assert torch.equal(out[:num_tokens], clean_out)
    torch.testing.assert_close(grads[0][:num_tokens], clean_grads[0])
    torch.testing.assert_close(grads[1:], clean_grads[1:])


def test_uninitialised_memory_is_never_read() -> None:
    case = Case((0, 1, 17, 65), (0, 0, 3, 2), (0, 1, 5, 20)) if INTERPRETED else HOSTILE
    inputs = make_inputs(case, extra_rows=3)
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        results = [
            run(inputs[0], inputs[1] | {"deterministic": d}, inputs[2], "triton")
            for d in (False, True)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results:
        for name, value in result.items():
            assert torch.isfinite(value).all(), name


def test_a_batch_mate_of_nan_poisons_nobody() -> None:
    leaves, arguments, dims = make_inputs(Case((33, 17, 20), (2, 0, 0), (4, 0, 3)))
    expected = run(leaves, arguments, dims, "triton")
    with torch.no_grad():
        leaves["uvqk"][33:50] = float("nan")
    out = attend(leaves, arguments, dims, "triton")
    weights = torch.ones_like(out)
    (grad,) = torch.autograd.grad(out, [leaves["uvqk"]], weights)
    for rows in (slice(0, 33), slice(50, 70)):
        assert torch.equal(out[rows], expected["out"][rows])
        assert torch.isfinite(grad[rows]).all()
    assert torch.isnan(out[33:50]).any()


def test_an_empty_batch_has_zero_gradients_not_none() -> None:
    leaves, arguments, dims = make_inputs(TRITON_CASES["no_user_with_tokens"])
    attend(leaves, arguments, dims, "triton").sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.abs().sum() == 0


def _alone(
    leaves: dict[str, Tensor], arguments: dict[str, Any], user: int
) -> tuple[dict[str, Tensor], dict[str, Any], slice]:
    offsets = arguments["seq_offsets"].tolist()
    rows = slice(offsets[user], offsets[user + 1])
    alone = arguments | {
        "seq_offsets": torch.tensor([0, rows.stop - rows.start], device=DEVICE),
        "num_contextuals": arguments["num_contextuals"][user : user + 1],
        "num_candidates": arguments["num_candidates"][user : user + 1],
        "timestamps": arguments["timestamps"][rows],
    }
    return leaves | {"uvqk": leaves["uvqk"][rows]}, alone, rows


def test_a_user_does_not_depend_on_batch_mates() -> None:
    leaves, arguments, dims = make_inputs(TRITON_CASES["all_at_once"])
    together = attend(leaves, arguments, dims, "triton")
    for user in range(len(MIXED[0])):
        alone_leaves, alone, rows = _alone(leaves, arguments, user)
        out = attend(alone_leaves, alone, dims, "triton")
        assert torch.equal(out, together[rows])


def test_permuting_users_permutes_outputs_and_gradients() -> None:
    leaves, arguments, dims = make_inputs(TRITON_CASES["groups_of_3"])
    arguments["deterministic"] = True
    (expected,) = torch.autograd.grad(
        attend(leaves, arguments, dims, "triton").square().sum(), [leaves["uvqk"]]
    )
    order = torch.tensor([3, 2, 0, 1])
    offsets = arguments["seq_offsets"].cpu()
    rows = torch.cat([torch.arange(int(offsets[u]), int(offsets[u + 1])) for u in order]).to(DEVICE)
    permuted = arguments | {
        "seq_offsets": lengths_to_offsets(offsets.diff()[order]).to(DEVICE),
        "num_contextuals": arguments["num_contextuals"][order.to(DEVICE)],
        "num_candidates": arguments["num_candidates"][order.to(DEVICE)],
        "timestamps": arguments["timestamps"][rows],
    }
    moved = {"uvqk": leaves["uvqk"].detach()[rows].requires_grad_()}
    (grad,) = torch.autograd.grad(
        attend(moved, permuted, dims, "triton").square().sum(), [moved["uvqk"]]
    )
    assert torch.equal(grad, expected[rows])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16] if INTERPRETED else [torch.float32, torch.bfloat16]
)
def test_deterministic_is_bit_equal(dtype: torch.dtype) -> None:
    inputs = make_inputs(LOW_PRECISION, dtype=dtype)
    inputs[1]["deterministic"] = True
    first = run(*inputs, "triton")
    for _ in range(1 if INTERPRETED else 5):
        again = run(*inputs, "triton")
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


def test_no_candidate_or_later_event_leaks() -> None:
    """2 context + 30 history + 3 candidates, outputs and input gradients (S15)."""
    leaves, arguments, dims = make_inputs(
        Case((35,), (2,), (3,), {"disable_contextual_mask": True})
    )
    out = attend(leaves, arguments, dims, "triton")
    for row in (5, 31, 32, 33, 34):
        (grad,) = torch.autograd.grad(out[row].sum(), [leaves["uvqk"]], retain_graph=True)
        reached = set(grad.abs().sum(1).nonzero().flatten().tolist())
        assert reached == (set(range(row + 1)) if row < 32 else {*range(32), row})


def test_time_buckets_are_exact_at_their_boundaries() -> None:
    """One query row and columns at every boundary, one second less, and one more."""
    from ops.hstu_attention.time_buckets import time_bucket_boundaries

    boundaries = [b for b in time_bucket_boundaries(64, torch.device("cpu")).tolist() if b < 2**61]
    elapsed = sorted({0, *boundaries, *(b - 1 for b in boundaries), *(b + 1 for b in boundaries)})
    times = torch.tensor([elapsed[-1] - d for d in reversed(elapsed)])
    num_tokens = len(elapsed)
    q = torch.zeros(num_tokens, 1, 32, device=DEVICE)
    v = torch.eye(num_tokens, 256, device=DEVICE)[:, None]
    table = (1.0 + torch.arange(64.0, device=DEVICE))[None]
    out = hstu_attention(
        q,
        q,
        v_THV=v,
        seq_offsets=torch.tensor([0, num_tokens], device=DEVICE),
        max_seq_len=num_tokens,
        scaling_seqlen=1.0,
        timestamps=times.to(DEVICE),
        time_bias=table,
        backend="triton",
    )
    buckets = torch.tensor(elapsed).clamp(min=1).double().log().div(0.301).floor().clamp(max=63)
    score = 1.0 + buckets
    expected = (score * torch.sigmoid(score)).float()
    torch.testing.assert_close(
        out[-1, 0, :num_tokens].cpu().flip(0), expected, rtol=1e-5, atol=1e-5
    )


def test_scaling_seqlen_may_be_a_tensor() -> None:
    inputs = make_inputs(TRITON_CASES["plain_causal"])
    number = run(*inputs, "triton")
    inputs[1]["scaling_seqlen"] = torch.tensor(7.0, device=DEVICE)
    tensor = run(*inputs, "triton")
    for name, value in number.items():
        torch.testing.assert_close(tensor[name], value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_integer_type(dtype: torch.dtype) -> None:
    inputs = make_inputs(TRITON_CASES["all_at_once"])
    expected = attend(*inputs, "triton")
    for name in ("seq_offsets", "num_contextuals", "num_candidates", "timestamps"):
        inputs[1][name] = inputs[1][name].to(dtype)
    assert torch.equal(attend(*inputs, "triton"), expected)


def test_missing_counts_are_zeros() -> None:
    inputs = make_inputs(TRITON_CASES["plain_causal"])
    expected = run(*inputs, "triton")
    inputs[1]["num_contextuals"] = inputs[1]["num_candidates"] = None
    actual = run(*inputs, "triton")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)


def test_a_head_dim_that_is_not_contiguous_is_copied() -> None:
    leaves, arguments, dims = make_inputs(TRITON_CASES["plain_causal"])
    q = torch.randn(NUM_HEADS, 32, leaves["uvqk"].shape[0], device=DEVICE).permute(2, 0, 1)
    arguments.pop("num_contextuals"), arguments.pop("num_candidates")
    results = [
        hstu_attention(x, x, v_THV=x, backend="triton", **arguments) for x in (q, q.contiguous())
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("message", "dims", "dtype"),
    [
        ("attention_dim must be 1 to 256.*got 257", (257, 32), torch.float32),
        ("linear_dim must be 1 to 256.*got 512", (32, 512), torch.float32),
        ("dtype must be one of float32.*got torch.float64", (32, 32), torch.float64),
    ],
)
def test_unsupported_calls_are_refused_by_name(
    message: str, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs = make_inputs(
        CASES["plain_causal"], dtype=dtype, attention_dim=dims[0], linear_dim=dims[1]
    )
    with pytest.raises(NotImplementedError, match=message):
        attend(*inputs, "triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="a device assertion ends the process's CUDA context")
def test_the_device_checks_what_the_host_cannot_see(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    debugging = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", debugging)
    monkeypatch.setattr("ops.hstu_attention.checks._check_values", lambda *_: None)
    monkeypatch.setattr("ops.hstu_attention.checks.check_offsets", lambda *_, **__: None)
    inputs = make_inputs(Case((5, 4), (0, 0), (3, 0)))
    monkeypatch.setattr("ops.hstu_attention.checks.check_counts", lambda *_, **__: None)
    for message, change in {
        "longer than max_seq_len": {"max_seq_len": 4},
        "than tokens": {"num_candidates": torch.tensor([0, 5])},
        "pass the rows": {"seq_offsets": torch.tensor([0, 5, 12])},
        "start at 0": {"seq_offsets": torch.tensor([1, 5, 9])},
        "not be negative": {"num_candidates": torch.tensor([0, -1])},
    }.items():
        with pytest.raises(Exception, match=message):
            attend(inputs[0], inputs[1] | change, inputs[2], "triton")


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    inputs = make_inputs(TRITON_CASES["all_at_once"])
    run(*inputs, "triton")
    weights = torch.ones_like(attend(*inputs, "triton"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for deterministic in (False, True):
            inputs[1]["deterministic"] = deterministic
            out = attend(*inputs, "triton")
            torch.autograd.grad(out, list(inputs[0].values()), weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    """The last user of a tensor that 32-bit indices cannot reach (S16)."""
    num_rows, lengths = 2**21 + 64, (2**21 - 200, 0, 264)
    fused = torch.zeros(num_rows, 4 * 288, dtype=torch.bfloat16, device=DEVICE)
    tail = slice(num_rows - 264, num_rows)
    fused[tail] = torch.randn(264, 4 * 288, device=DEVICE, dtype=torch.bfloat16)
    offsets = [0, *(300 * i for i in range(1, 6990)), 2**21 - 200, num_rows]
    heads = fused.view(num_rows, 4, 288)
    out = hstu_attention(
        heads[..., :96],
        heads[..., 96:192],
        v_THV=heads[..., 192:],
        seq_offsets=torch.tensor(offsets, device=DEVICE),
        max_seq_len=512,
        scaling_seqlen=7.0,
        backend="triton",
    )
    assert sum(lengths) == num_rows
    small = fused[tail].view(264, 4, 288)
    expected = hstu_attention(
        small[..., :96],
        small[..., 96:192],
        v_THV=small[..., 192:],
        seq_offsets=torch.tensor([0, 264], device=DEVICE),
        max_seq_len=512,
        scaling_seqlen=7.0,
        backend="triton",
    )
    assert torch.equal(out[tail], expected)


def test_where_triton_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("triton", device_type="cuda") == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(NotImplementedError, match="need a CUDA device.*TRITON_INTERPRET"):
        choose_backend("triton", device_type="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", device_type="cpu") == "triton"


def test_head_dims_are_refused_when_the_model_is_built() -> None:
    shape = CallShape(attention_dim=512, linear_dim=64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="attention_dim must be 1 to 256.*got 512"):
        choose_backend("triton", device_type="cuda", shape=shape)
    assert choose_backend("auto", device_type="cuda", shape=shape) == "pytorch"


def test_without_triton_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.hstu_attention.dispatch.find_spec", lambda name: None)
    assert "triton is not installed" in str(available_backends("cuda")["triton"])
    with pytest.raises(NotImplementedError, match="package triton is not installed"):
        choose_backend("triton", device_type="cuda")
    assert choose_backend("auto", device_type="cuda") == "pytorch"


def test_a_gpu_with_little_shared_memory_runs_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=99 << 10, major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    assert choose_backend("auto", device_type="cuda") == "pytorch"
    with pytest.raises(NotImplementedError, match="need 227 KiB of shared memory.*L4 has 99"):
        choose_backend("triton", device_type="cuda")
    properties.shared_memory_per_block_optin = 227 << 10
    assert choose_backend("triton", device_type="cuda") == "triton"


@pytest.mark.parametrize("huge", [2**31 - 1, 2**40])
def test_a_window_or_group_beyond_any_sequence_is_none(huge: int) -> None:
    """The kernels add 32-bit numbers to it."""
    case = Case((40, 0, 35), (2, 0, 2), (5, 0, 7), {"target_group_size": 40})
    leaves, arguments, dims = make_inputs(case)
    expected = run(leaves, arguments, dims, "triton")
    arguments |= {"target_group_size": huge, "attention_window": huge}
    for name, value in run(leaves, arguments, dims, "triton").items():
        assert torch.equal(value, expected[name]), name


def test_a_batch_without_tokens_may_say_so() -> None:
    case = Case((0, 0), (0, 0), (0, 0), {"max_seq_len": 0})
    inputs = make_inputs(case, extra_rows=5)
    assert all(not value.any() for value in run(*inputs, "triton").values())
