"""FP8 through the adapter of FBGEMM's `hstu`, on a stand-in of its wrapper: names and limits."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import CallShape, emulated_impl, fbgemm_fp8, fbgemm_impl
from ops.hstu_attention.spec import FP8_MODES, AttentionSpec, Fp8Spec
from ops.jagged import lengths_to_offsets
from tests.ops.fbgemm_stand_in import make_module
from tests.ops.test_hstu_attention import CASES, Case

DIM, NUM_HEADS = 64, 2
SIZES = {"attention_dim": DIM, "linear_dim": DIM, "dtype": torch.bfloat16}
HOSTILE = Case((0, 150, 1, 0, 130, 9, 0), (0, 2, 0, 0, 1, 0, 0), (0, 5, 1, 0, 0, 9, 0))


def install(monkeypatch: pytest.MonkeyPatch, signature: str) -> None:
    monkeypatch.setitem(sys.modules, "hstu", make_module(signature))
    fbgemm_impl.load_package.cache_clear()


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch, "present")
    yield
    fbgemm_impl.load_package.cache_clear()


def inputs(case: Case, *, extra_rows: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v as SiLU leaves them, and the arguments that all backends share."""
    generator = torch.Generator().manual_seed(3)
    num_rows = sum(case.lengths) + extra_rows
    drawn = torch.randn(3, num_rows, NUM_HEADS, DIM, generator=generator)
    rows = torch.nn.functional.silu(drawn).to(torch.bfloat16).unbind(0)
    arguments = {
        "seq_offsets": lengths_to_offsets(torch.tensor(case.lengths, dtype=torch.int64)),
        "num_contextuals": torch.tensor(case.contextuals, dtype=torch.int64),
        "num_candidates": torch.tensor(case.candidates, dtype=torch.int64),
        "max_seq_len": 300,
        "scaling_seqlen": 7.0,
        **case.options,
    }
    return [x.clone().requires_grad_() for x in rows], arguments


def attend(
    rows: list[Tensor], arguments: dict[str, Any], mode: str, module: Any = fbgemm_impl
) -> Tensor:
    q, k, v = rows
    others = {name: value for name, value in arguments.items() if name != "seq_offsets"}
    spec = AttentionSpec(fp8=Fp8Spec(mode=mode), **others)
    offsets = arguments["seq_offsets"]
    return module.hstu_attention(q, k, v_THV=v, seq_offsets=offsets, spec=spec)


def gradients(out: Tensor, rows: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(out.shape, generator=generator).to(out.dtype)
    return list(torch.autograd.grad(out, rows, weights * factor))


def distance(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).float().norm() / expected.float().norm()).detach())


def test_modes_are_those_of_the_contract() -> None:
    assert sorted(fbgemm_fp8.QUANT_MODES) == sorted(FP8_MODES)
    names = ("cast", "per_row", "per_block", "per_head", "per_batch", "per_tensor")
    assert [fbgemm_fp8.QUANT_MODES[name] for name in names] == list(range(6))


@pytest.mark.parametrize("name", ["groups_of_3", "hostile_lengths", "full_without_counts"])
@pytest.mark.parametrize("mode", FP8_MODES)
def test_every_mode_is_near_the_emulation(mode: str, name: str) -> None:
    case = CASES.get(name) or Case(
        (40, 0, 7), (), (), {"num_contextuals": None, "num_candidates": None, "is_causal": False}
    )
    rows, arguments = inputs(case)
    out = attend(rows, arguments, mode)
    expected = attend(rows, arguments, mode, emulated_impl)
    assert out.dtype == torch.bfloat16 and distance(out, expected) < 0.05
    assert not torch.equal(out, attend(rows, arguments, "cast" if mode != "cast" else "per_row"))
    for found, other in zip(gradients(out, rows), gradients(expected, rows), strict=True):
        assert distance(found, other) < 0.08


@pytest.mark.parametrize("mode", FP8_MODES)
def test_empty_users_and_rows_of_nobody_change_nothing(mode: str) -> None:
    counts = zip(HOSTILE.lengths, HOSTILE.contextuals, HOSTILE.candidates, strict=True)
    alone = Case(*zip(*(user for user in counts if user[0]), strict=True))
    rows, arguments = inputs(alone)
    padded, more = inputs(HOSTILE, extra_rows=3)
    num_tokens = rows[0].shape[0]
    for x, poisoned in zip(rows, padded, strict=True):
        poisoned.data[:num_tokens] = x.data
        poisoned.data[num_tokens:] = float("nan")
    expected, out = attend(rows, arguments, mode), attend(padded, more, mode)
    assert torch.equal(out[:num_tokens], expected) and not out[num_tokens:].any()
    weights = torch.ones_like(out)
    weights[num_tokens:] = float("nan")
    found = torch.autograd.grad(out, padded, weights)
    for grad, other in zip(found, torch.autograd.grad(expected.sum(), rows), strict=True):
        assert torch.equal(grad[:num_tokens], other) and not grad[num_tokens:].any()


@pytest.mark.parametrize("mode", FP8_MODES)
@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens_at_all(mode: str, lengths: tuple[int, ...]) -> None:
    rows, arguments = inputs(Case(lengths, (0,) * len(lengths), (0,) * len(lengths)), extra_rows=2)
    out = attend(rows, arguments, mode)
    assert not out.any() and not any(grad.any() for grad in torch.autograd.grad(out.sum(), rows))


@pytest.mark.parametrize("mode", FP8_MODES)
def test_a_small_output_gradient_is_not_flushed(mode: str) -> None:
    rows, arguments = inputs(HOSTILE)
    expected = gradients(attend(rows, arguments, mode), rows)
    found = gradients(attend(rows, arguments, mode), rows, factor=2.0**-40)
    for grad, other in zip(found, expected, strict=True):
        assert torch.equal(grad, other * 2.0**-40) and grad.any()


def test_the_stand_in_flushes_it_without_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fbgemm_fp8.Gradients, "of_output", lambda self, out: out)
    monkeypatch.setattr(fbgemm_fp8.Gradients, "of_input", lambda self, x, *, saturates: x)
    rows, arguments = inputs(HOSTILE)
    for mode in ("cast", "per_head"):
        found = gradients(attend(rows, arguments, mode), rows, factor=2.0**-40)
        assert not any(grad.any() for grad in found)


def test_a_zero_gradient_and_a_nan_stay_what_they_are() -> None:
    rows, arguments = inputs(HOSTILE)
    out = attend(rows, arguments, "per_tensor")
    assert not any(g.any() for g in torch.autograd.grad(out, rows, 0 * out, retain_graph=True))
    bad = torch.zeros_like(out)
    bad[3, 0, 0] = float("nan")
    assert all(grad.isnan().any() for grad in torch.autograd.grad(out, rows, bad))


def test_cast_saturates_and_hides_no_nan() -> None:
    rows, arguments = inputs(HOSTILE)
    with torch.no_grad():
        rows[2][5, 0, 3], rows[2][9, 1, 2] = 1e4, -1e4
    out = attend(rows, arguments, "cast")
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in gradients(out, rows))
    cut = [x.detach().clamp(-448, 448).requires_grad_() for x in rows]
    assert torch.equal(out, attend(cut, arguments, "cast"))
    with torch.no_grad():
        rows[2][5, 0, 3] = float("nan")
    assert attend(rows, arguments, "cast").isnan().any()


REFUSED = {
    "head dim": (
        {"attention_dim": 32, "linear_dim": 32},
        {},
        "attention_dim must be one of 64, 128, 256 for FBGEMM's FP8 kernels, got 32",
    ),
    "E5M2": ({}, {"grad_dtype": torch.float8_e5m2}, "output's gradient to E4M3.*float8_e5m2"),
    "weight exponent": ({}, {"weight_exponent": 4}, "weight_exponent = 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_they_do_not_have_is_refused_at_build(name: str) -> None:
    sizes, fields, message = REFUSED[name]
    shape = CallShape(**(SIZES | sizes), fp8=Fp8Spec(mode="per_head", **fields))
    reason = fbgemm_impl.refuse("cuda", shape)
    assert reason is not None
    pattern = message.split(".*")
    assert all(part in reason for part in pattern)


def test_the_older_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "older")
    shape = CallShape(**SIZES, fp8=Fp8Spec(mode="cast"))
    assert "FP8 in the forward pass alone" in (fbgemm_impl.refuse("cuda", shape) or "")
    rows, arguments = inputs(HOSTILE)
    with pytest.raises(NotImplementedError, match="forward pass alone"):
        attend(rows, arguments, "cast")


@pytest.mark.parametrize("mode", FP8_MODES)
def test_what_they_have_is_let_through(mode: str) -> None:
    assert fbgemm_impl.refuse("cuda", CallShape(**SIZES, fp8=Fp8Spec(mode=mode))) is None


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((9, 0), True)])
def test_fp8_needs_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    reason = fbgemm_impl.refuse("cuda", CallShape(**SIZES, fp8=Fp8Spec(mode="cast")))
    assert (reason is None) == runs
    assert runs or (reason is not None and "Hopper" in reason and "8.0" in reason)
    assert fbgemm_impl.refuse("cuda", CallShape(**SIZES)) is None
