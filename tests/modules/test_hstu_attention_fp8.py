"""A layer whose attention is quantised straight from the projection; a stand-in for the kernels."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ops.hstu_attention
from modules import hstu_attention
from modules.hstu_stack import HSTUStack
from ops.hstu_attention import Fp8Spec
from tests.modules.test_hstu_layer_triton import make_sequence, make_stack, rows, run
from tests.ops.elementwise_cases import INTERPRETED, error
from tests.ops.fp8_kernels_stand_in import StandIn
from tests.ops.test_hstu_attention_fp8 import fp8_impl

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in is for CPUs")
FP8 = Fp8Spec(mode="per_block")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran: the stand-in's launches, quantisers of a projection, SiLU by itself."""
    stand_in = StandIn()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "ops.hstu_attention.hopper_fp8_impl", stand_in)
    monkeypatch.setattr(ops.hstu_attention, "hopper_fp8_impl", stand_in, raising=False)
    monkeypatch.setattr(ops.hstu_attention, "_check_fp8", lambda *call: None)
    for module, name in ((fp8_impl, "quantize_uvqk"), (hstu_attention, "silu_split")):
        noted = _noting(getattr(module, name), name, stand_in.calls)
        monkeypatch.setattr(module, name, noted)
    return stand_in.calls


def _noting(run: Callable, name: str, calls: list[str]) -> Callable:
    def noted(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return run(*args, **options)

    return noted


def fp8_stack(backend: str = "triton", **changes: Any) -> HSTUStack:
    dims = {"attention_dim": 64, "linear_dim": 64, "attention_backend": backend}
    return make_stack(1, **dims, attention_fp8=FP8, **changes).train()


def test_equals_the_emulation_but_for_its_roundings(calls: list[str]) -> None:
    values = rows(torch.bfloat16)
    expected = run(fp8_stack("pytorch"), values)
    assert calls == ["silu_split"]
    actual = run(fp8_stack(), values)
    assert calls[1:] == ["quantize_uvqk", "forward", "backward"]
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert error(actual[name], value.double()) < (0.02 if name == "out" else 0.08), name


def test_recomputing_quantises_again_and_changes_no_bit(calls: list[str]) -> None:
    found: list[dict[str, Tensor]] = []
    for recompute in (False, True):
        calls.clear()
        found.append(run(fp8_stack(recompute_input_silu=recompute), rows(torch.bfloat16)))
    assert calls == ["quantize_uvqk", "forward", "quantize_uvqk", "backward"]
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("fp8_eval", [False, True])
def test_evaluation_is_plain_unless_asked_for(calls: list[str], fp8_eval: bool) -> None:
    stack = fp8_stack(fp8_eval=fp8_eval).eval()
    with torch.no_grad():
        stack(make_sequence(rows(torch.bfloat16)))
    assert calls == (["quantize_uvqk", "forward"] if fp8_eval else ["silu_split"])
