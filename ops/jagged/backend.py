"""Which implementation of the jagged ops runs: by name, never by itself."""

import os
from importlib.util import find_spec

from torch import Tensor

BACKENDS = ("pytorch", "triton")


def use_triton(backend: str, on: Tensor) -> bool:
    """Return whether our Triton kernels run; they need a CUDA tensor or Triton's interpreter.

    Raises:
        ValueError: a name that is neither "pytorch" nor "triton".
        RuntimeError: "triton" without the package.
        NotImplementedError: "triton" for a tensor that is not on a CUDA device.
    """
    if backend not in BACKENDS:
        raise ValueError(f'backend must be "pytorch" or "triton", got {backend!r}')
    if backend == "pytorch":
        return False
    if find_spec("triton") is None:
        raise RuntimeError(
            'backend = "triton" needs the package triton, which is not installed; install it or '
            'choose backend = "pytorch"'
        )
    if not on.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotImplementedError(
            f'backend = "triton" needs a CUDA tensor, got one on {on.device.type}; choose '
            'backend = "pytorch" (for tests, TRITON_INTERPRET=1 runs the kernels on a CPU)'
        )
    return True
