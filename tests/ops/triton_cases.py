"""Cases, oracle and tolerances of the triton backend's tests."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import hstu_attention
from ops.jagged import lengths_to_offsets
from tests.ops.test_hstu_attention import Case

pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
NUM_HEADS = 2


def _import_kernels() -> Any:
    """Import the kernels, in Triton's interpreter when there is no GPU; leave no trace of it."""
    before = os.environ.get("TRITON_INTERPRET")
    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter

        from ops.hstu_attention import triton_impl
    finally:
        if INTERPRETED and before is None:
            del os.environ["TRITON_INTERPRET"]
    if INTERPRETED:
        original = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            # numpy 2.4 no longer turns the interpreter's arrays of one element into an int
            original(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = patched
    return triton_impl


triton_impl = _import_kernels()


HOSTILE = Case(
    (0, 1, 15, 16, 17, 63, 0, 64, 65, 129),
    (0, 0, 2, 0, 3, 2, 0, 0, 40, 2),
    (0, 1, 0, 16, 5, 7, 0, 33, 3, 40),
)
MIXED = ((70, 0, 1, 33), (2, 0, 0, 2), (20, 0, 1, 7))
TRITON_CASES = {
    "hostile_lengths": HOSTILE,
    "plain_causal": Case((70, 33, 16, 1, 0), (0,) * 5, (0,) * 5),
    "causal_contextual": Case(*MIXED, {"disable_contextual_mask": True}),
    "groups_of_3": Case(*MIXED, {"target_group_size": 3}),
    "one_group": Case(*MIXED, {"target_group_size": 100}),
    "all_candidates": Case((3, 5), (0, 0), (3, 5)),
    "some_all_candidates": Case((3, 40), (0, 0), (0, 40)),
    "contextual_and_candidates_only": Case((5, 40), (2, 20), (3, 20)),
    "contextual_only": Case((2, 35), (2, 35), (0, 0)),
    "many_contextuals": Case((70, 40), (37, 33), (3, 0)),
    "not_causal": Case((40, 0, 1, 50), (2, 0, 0, 1), (0, 0, 0, 0), {"is_causal": False}),
    "window": Case(*MIXED, {"attention_window": 3, "target_group_size": 2}),
    "wide_window": Case(*MIXED, {"attention_window": 40}),
    "window_causal_contextual": Case(
        *MIXED, {"attention_window": 2, "disable_contextual_mask": True}
    ),
    "window_not_causal": Case((60, 6), (2, 0), (0, 0), {"is_causal": False, "attention_window": 5}),
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


def make_inputs(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    extra_rows: int = 0,
    attention_dim: int = 32,
    linear_dim: int = 32,
) -> tuple[dict[str, Tensor], dict[str, Any], tuple[int, int]]:
    """Return the differentiable leaves (rounded to dtype), the other arguments, (A, V)."""
    generator = torch.Generator().manual_seed(5)
    num_rows = sum(case.lengths) + extra_rows
    width = 2 * (attention_dim + linear_dim)
    leaves = {"uvqk": torch.randn(num_rows, NUM_HEADS * width, generator=generator)}
    if case.position_bias:
        leaves["position_bias"] = torch.randn(NUM_HEADS, 7, generator=generator)
    if case.time_bias:
        leaves["time_bias"] = torch.randn(NUM_HEADS, 40, generator=generator)
    arguments = {
        "seq_offsets": lengths_to_offsets(torch.tensor(case.lengths)).to(DEVICE),
        "num_contextuals": torch.tensor(case.contextuals).to(DEVICE),
        "num_candidates": torch.tensor(case.candidates).to(DEVICE),
        "max_seq_len": 300,
        "scaling_seqlen": 7.0,
        "timestamps": torch.randint(0, 10**6, (num_rows,), generator=generator).to(DEVICE),
        **case.options,
    }
    leaves = {name: leaf.to(DEVICE, dtype).requires_grad_() for name, leaf in leaves.items()}
    return leaves, arguments, (attention_dim, linear_dim)


def attend(
    leaves: dict[str, Tensor], arguments: dict[str, Any], dims: tuple[int, int], backend: str
) -> Tensor:
    """Call the op on strided views of one fused head-major tensor."""
    attention_dim, linear_dim = dims
    heads = leaves["uvqk"].view(-1, NUM_HEADS, 2 * (attention_dim + linear_dim))
    widths = [linear_dim, linear_dim, attention_dim, attention_dim]
    _, v_THV, q_THA, k_THA = heads.split(widths, dim=-1)
    tables = {name: leaf for name, leaf in leaves.items() if name != "uvqk"}
    return hstu_attention(q_THA, k_THA, v_THV=v_THV, backend=backend, **tables, **arguments)


def gradients(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    weights = weights.to(out.device, out.dtype)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weights), strict=True))


def run(
    leaves: dict[str, Tensor], arguments: dict[str, Any], dims: tuple[int, int], backend: str
) -> dict[str, Tensor]:
    """Return output and all gradients of one backend."""
    out = attend(leaves, arguments, dims, backend)
    return {"out": out.detach(), **gradients(out, leaves)}


def oracle(
    leaves: dict[str, Tensor], arguments: dict[str, Any], dims: tuple[int, int]
) -> dict[str, Tensor]:
    """Return output and all gradients in float64 on the CPU."""
    exact = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in leaves.items()}
    moved = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return run(exact, moved, dims, "reference")


def assert_as_exact_as_pytorch(
    actual: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Each error at most 1.5 times that of the pytorch backend in the same dtype, and round-off."""
    for name, expected in exact.items():
        if not expected.numel():
            continue
        unit = torch.finfo(plain[name].dtype).eps * float(expected.abs().max())
        error = (actual[name].cpu().double() - expected).norm()
        allowed = 1.5 * (plain[name].cpu().double() - expected).norm()
        terms = 2.0 if "bias" in name else 0.25  # a table entry sums thousands of pairs
        slack = terms * unit * expected.numel() ** 0.5
        assert error <= allowed + slack, (name, float(error), float(allowed), float(slack))
        worst = float((actual[name].cpu().double() - expected).abs().max())
        assert worst <= (32 if "bias" in name else 8) * unit + 1e-30, (name, worst, unit)
