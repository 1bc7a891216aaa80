"""The same bits from the same settings: what ``TrainerArgs.deterministic`` asks of libraries."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUBLAS_WORKSPACE = ":4096:8"


@contextmanager
def fixed_order_of_sums(is_asked: bool) -> Iterator[None]:
    """Inside, libraries add in one order only; without ``is_asked`` nothing changes.

    torch takes slower forms of its operations and raises RuntimeError for one that has none, and
    FBGEMM reads the same switch for the gradients of rows; cuBLAS needs work space that streams do
    not share, which has to be said before its first product. Our own attention is told through
    `HSTUConfig`.
    """
    if not is_asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # What is not written is not read here, so filling it first would only take time.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills
