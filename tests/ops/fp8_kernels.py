"""The quantisers of FP8 attention, imported for this machine: interpreted where is no GPU.

Whoever imports a kernel's module first decides how it runs, so tests that need the interpreter no
further than for the modules around it import this too.
"""

import os

from tests.ops.quantize_kernels import INTERPRETED

_before = os.environ.get("TRITON_INTERPRET")
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
try:
    from ops.hstu_attention import fp8_impl, fp8_operands
    from ops.silu_split import triton_impl as silu_impl
finally:
    if INTERPRETED and _before is None:
        del os.environ["TRITON_INTERPRET"]

__all__ = ["fp8_impl", "fp8_operands", "silu_impl"]
