"""Triton's interpreter rounds FP32 to bfloat16 as a GPU does; by itself it cuts off."""

from typing import Any

import numpy as np


def round_bfloat16() -> None:
    """Change the interpreter for the rest of the process; a second call changes nothing."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    if convert.__module__ == __name__:
        return

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), bits >> 16 | 0x40, rounded).astype(np.uint16)

    interpreter._convert_float = rounding
