"""The kernels of the jagged ops: compiled where there is a GPU, else in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

from tests.support.interpreter_rounding import round_bfloat16

pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"


def _import_kernels() -> tuple[Any, Any, Any]:
    """Import the kernels; leave no trace of the switch that makes them interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter

        from ops.jagged import triton_layout, triton_rows, triton_tokens
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
        round_bfloat16()
    return triton_layout, triton_rows, triton_tokens


triton_layout, triton_rows, triton_tokens = _import_kernels()
