"""The quantising kernels, imported for this machine: in Triton's interpreter where is no GPU."""

import os

import torch

from ops.quantize import quantize
from tests.ops.triton_cases import DEVICE, INTERPRETED
from tests.support.interpreter_rounding import round_bfloat16

__all__ = ["DEVICE", "INTERPRETED", "TOKENS", "expected_codes", "same_codes", "spread"]

TOKENS = (1, 7, 15, 16, 17, 31) if INTERPRETED else (1, 7, 15, 16, 17, 31, 4095)


def _import_kernels() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from ops.gated_norm import triton_fp8 as gate_fp8  # noqa: F401
        from ops.gated_norm import triton_impl  # noqa: F401
        from ops.norm import triton_fp8  # noqa: F401
        from ops.norm import triton_impl as norm_impl  # noqa: F401
        from ops.quantize import triton_blocks  # noqa: F401
        from ops.quantize import triton_impl as quantize_impl  # noqa: F401
        from ops.silu_split import triton_fp8 as silu_fp8  # noqa: F401
        from ops.silu_split import triton_impl as silu_impl  # noqa: F401
    finally:
        if INTERPRETED and before is None:
            del os.environ["TRITON_INTERPRET"]


_import_kernels()
if INTERPRETED:
    round_bfloat16()


def spread(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return values over thirty powers of two, zeros and 1e-40 among them."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(shape, generator=generator)
        * torch.randn(shape, generator=generator).mul(4).exp()
    )
    x.view(-1)[::11] = 0.0
    x.view(-1)[::13] = 1e-40
    return x.to(dtype).to(DEVICE)


def expected_codes(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the oracle's values in FP8."""
    return quantize(x, dtype, scale=scale).values


def same_codes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two FP8 tensors hold equal numbers; NaN equals NaN."""
    return torch.equal(actual.float().nan_to_num(999.0), expected.float().nan_to_num(999.0))
