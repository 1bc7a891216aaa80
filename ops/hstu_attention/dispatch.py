"""Which attention backend runs: chosen once, when the model is built, by name."""

import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ops.hstu_attention import fbgemm_impl

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "pytorch", "triton", "cutlass")
_WAY_OUT = 'set NetworkArgs.kernel_backend = "auto" to run the best one that can'
_TRITON_MAX_DIM = 256
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_announced: set[tuple[str, str]] = set()


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """What of a model's attention calls is known when it is built."""

    attention_dim: int
    linear_dim: int
    dtype: torch.dtype


def refuse_unsupported(shape: CallShape) -> str | None:
    """Return why our Triton kernels cannot run such calls, None when they can."""
    for name in ("attention_dim", "linear_dim"):
        width = getattr(shape, name)
        if not 1 <= width <= _TRITON_MAX_DIM:
            return f"{name} must be 1 to {_TRITON_MAX_DIM} for our Triton kernels, got {width}"
    if shape.dtype not in _TRITON_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TRITON_DTYPES)
        return f"the dtype must be one of {names} for our Triton kernels, got {shape.dtype}"
    return None


def available_backends(
    device_type: str | None = None, shape: CallShape | None = None
) -> dict[str, str | None]:
    """Return each backend's name with None when it can run, or the reason why it cannot.

    device_type "cpu" or "cuda"; None = what this machine has. shape: also check head dims, dtype.
    """
    return {name: _refuse(name, device_type, shape) for name in BACKENDS if name != "auto"}


def _refuse(name: str, device_type: str | None, shape: CallShape | None) -> str | None:
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "triton":
        return _refuse_triton(device_type, shape)
    return fbgemm_impl.refuse(device_type, shape) if name == "cutlass" else None


def _refuse_triton(device_type: str, shape: CallShape | None) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None if shape is None else refuse_unsupported(shape)
    return (
        f"our Triton kernels need a CUDA device, got {device_type} (for tests, Triton's "
        "interpreter runs them on a CPU: TRITON_INTERPRET=1)"
    )


def choose_backend(
    name: str,
    *,
    device_type: str,
    field: str = "NetworkArgs.kernel_backend",
    shape: CallShape | None = None,
) -> str:
    """Return the backend that `name` stands for on a device type ("cpu", "cuda"); never falls back.

    "auto" picks pytorch and logs that and why, once for each device type: triton is asked for by
    name until a whole training run with it has been compared. With `shape`, head dims and dtypes
    that a backend does not have are refused here rather than at the first call.

    Raises:
        ValueError: an unknown name; "reference", which is an oracle for tests, not for training.
        NotImplementedError: a backend that cannot run here, with the reason and the way out.
    """
    if name != "auto":
        refusal = refuse_unavailable(name, field=field, device_type=device_type, shape=shape)
        if refusal is not None:
            raise refusal
        return name
    backends = available_backends(device_type, shape)
    if ("auto", device_type) not in _announced:
        _announced.add(("auto", device_type))
        reasons = [f"{key}: {why or 'only by name so far'}" for key, why in backends.items()]
        because = "the default there" if device_type == "cpu" else "; ".join(reasons[1:])
        logger.info('%s = "auto" runs "pytorch" on %s (%s)', field, device_type, because)
    return "pytorch"


def refuse_unavailable(
    name: str, *, field: str, device_type: str | None = None, shape: CallShape | None = None
) -> Exception | None:
    """Return the error for a backend that cannot run there, None for one that can."""
    if name not in BACKENDS:
        allowed = ", ".join(BACKENDS)
        return ValueError(f"{field} must be one of {allowed}, got {name!r}; {_WAY_OUT}")
    reason = None if name == "auto" else _refuse(name, device_type, shape)
    if reason is None:
        return None
    backends = available_backends(device_type, shape)
    runs = ", ".join(key for key, why in backends.items() if why is None)
    return NotImplementedError(
        f"{field} = {name!r} cannot run: {reason}; what runs here: {runs}; {_WAY_OUT}"
    )
