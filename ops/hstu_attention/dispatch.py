"""Which attention backend runs: chosen once, when the model is built, by name."""

import logging
from importlib.util import find_spec

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "pytorch", "triton", "cutlass")
_WAY_OUT = 'set NetworkArgs.kernel_backend = "auto" to run the pytorch backend'
_announced: set[tuple[str, str]] = set()


def available_backends() -> dict[str, str | None]:
    """Return each backend's name with None when it can run here, or the reason why it cannot."""
    cutlass = "the attention adapter for FBGEMM's `hstu` package is not built yet"
    if find_spec("hstu") is None:
        cutlass += ", and the package (fbgemm_gpu_hstu) is not installed"
    return {
        "pytorch": None,
        "triton": "our Triton attention kernels are not built yet",
        "cutlass": cutlass,
    }


def choose_backend(
    name: str, *, device_type: str, field: str = "NetworkArgs.kernel_backend"
) -> str:
    """Return the backend that `name` stands for on a device type ("cpu", "cuda"); never falls back.

    "auto" picks the best one available and logs its pick and why, once for each device type.

    Raises:
        ValueError: an unknown name; "reference", which is an oracle for tests, not for training.
        NotImplementedError: a backend that cannot run here, with the reason and the way out.
    """
    if name != "auto":
        refusal = refuse_unavailable(name, field=field)
        if refusal is not None:
            raise refusal
        return name
    if ("auto", device_type) not in _announced:
        _announced.add(("auto", device_type))
        reasons = [f"{key}: {why}" for key, why in available_backends().items() if why is not None]
        because = "the default there" if device_type == "cpu" else "; ".join(reasons)
        logger.info('%s = "auto" runs "pytorch" on %s (%s)', field, device_type, because)
    return "pytorch"


def refuse_unavailable(name: str, *, field: str) -> Exception | None:
    """Return the error for a backend that cannot run here, None for one that can."""
    if name not in BACKENDS:
        allowed = ", ".join(BACKENDS)
        return ValueError(f"{field} must be one of {allowed}, got {name!r}; {_WAY_OUT}")
    reason = available_backends().get(name)
    if reason is None:
        return None
    return NotImplementedError(f"{field} = {name!r} cannot run: {reason}; {_WAY_OUT}")
