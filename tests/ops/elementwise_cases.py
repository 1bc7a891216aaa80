"""The elementwise ops in Triton: kernels imported for this machine, and how exact they must be."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from tests.ops.triton_cases import DEVICE, INTERPRETED
from tests.support.interpreter_rounding import round_bfloat16

__all__ = ["DEVICE", "INTERPRETED", "assert_as_exact_as_plain", "leaf", "results"]


def _import_kernels() -> None:
    """Import the kernels, in Triton's interpreter when there is no GPU; leave no trace of it."""
    before = os.environ.get("TRITON_INTERPRET")
    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from ops.dropout import triton_mask  # noqa: F401
        from ops.gated_norm import triton_impl as gated_norm_impl  # noqa: F401
        from ops.norm import triton_impl as norm_impl  # noqa: F401
        from ops.silu_split import triton_impl as silu_split_impl  # noqa: F401
    finally:
        if INTERPRETED and before is None:
            del os.environ["TRITON_INTERPRET"]


_import_kernels()
if INTERPRETED:
    round_bfloat16()


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0):
    """Return random numbers, the same on every device, that want a gradient."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return values.to(dtype).to(DEVICE).requires_grad_()


def results(
    op: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the output and the gradients of all leaves for one fixed random cotangent."""
    out = op(leaves)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    weights = weights.to(leaves[next(iter(leaves))].dtype).to(out.device, out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), weights)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_as_exact_as_plain(
    op: Callable[[dict[str, Tensor], str], Tensor],
    leaves: dict[str, Tensor],
) -> None:
    """The error of `op(leaves, "triton")` against float64 is at most 1.5 times the plain one.

    Output and every gradient, plus a tenth of a unit of the dtype and a few roundings of FP32.
    """
    exact_leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    exact = results(lambda x: op(x, "pytorch"), exact_leaves)
    plain = results(lambda x: op(x, "pytorch"), leaves)
    actual = results(lambda x: op(x, "triton"), leaves)
    for name, expected in exact.items():
        assert actual[name].dtype == plain[name].dtype, name
        assert actual[name].shape == plain[name].shape, name
        slack = 0.1 * torch.finfo(plain[name].dtype).eps + 2e-6
        allowed = 1.5 * error(plain[name], expected) + slack
        assert error(actual[name], expected) <= allowed, name


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; 0 for what is all zero in both."""
    distance = float((actual.detach().to(expected.device).double() - expected).norm())
    return distance / max(float(expected.norm()), 1e-30) if distance else 0.0
