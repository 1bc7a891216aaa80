"""Which attention backend runs: chosen once, when the model is built, by name."""

import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ops.hstu_attention import fbgemm_impl
from ops.hstu_attention.spec import Fp8Spec

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "pytorch", "triton", "cutlass")
_WAY_OUT = 'set NetworkArgs.kernel_backend = "auto" to run the best one that can'
_TRITON_SHARED_BYTES = 227 << 10
_TRITON_MAX_DIM = 256
_TRITON_MAX_ROWS = 2**31 - 1
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8_MODES = ("cast", "per_block", "per_head", "per_tensor")  # of our Triton kernels
_FP8_DIMS = (64, 128, 256)
_FP8_DTYPES = (torch.bfloat16, torch.float16)
_FP8_WAY_OUT = 'or MixedPrecisionArgs.hstu_attn_quantization_mode = "bf16"'
_announced: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """What of a model's attention calls is known when it is built; None = not known there.

    Fields from `num_heads` on say what the calls will pass (`ops.hstu_attention.hstu_attention`).
    """

    attention_dim: int
    linear_dim: int
    dtype: torch.dtype
    num_heads: int | None = None
    max_num_users: int | None = None
    """Users of the largest batch."""
    max_seq_len: int | None = None
    has_contextuals: bool = True
    """num_contextuals is passed, be it of zeros; so for has_candidates."""
    has_candidates: bool = True
    target_group_size: int = 1
    is_causal: bool = True
    disable_contextual_mask: bool = False
    attention_window: int | None = None
    has_position_bias: bool = False
    has_time_bias: bool = False
    deterministic: bool = False
    fp8: Fp8Spec | None = None

    @property
    def max_num_rows(self) -> int | None:
        """Rows of a batch of which every user is as long as allowed."""
        if self.max_num_users is None or self.max_seq_len is None:
            return None
        return self.max_num_users * self.max_seq_len


def refuse_fp8(name: str, device_type: str, shape: CallShape) -> str | None:
    """Return why a backend has no such FP8 attention, None where it has."""
    if name == "reference":
        return "the oracle rounds nothing"
    if name != "triton":
        return None  # pytorch has all of it, cutlass says itself what it lacks
    mode = None if shape.fp8 is None else shape.fp8.mode
    if mode not in _FP8_MODES:
        return (
            f"our FP8 kernels have the modes {', '.join(_FP8_MODES)}, got {mode!r}; choose one of "
            f'them, {_FP8_WAY_OUT}, or emulate it with backend "pytorch"'
        )
    dims = shape.attention_dim, shape.linear_dim
    if dims[0] != dims[1] or dims[0] not in _FP8_DIMS:
        return (
            f"our FP8 kernels need attention_dim = linear_dim of {', '.join(map(str, _FP8_DIMS))}, "
            f"got {dims[0]} and {dims[1]}; choose one of these, {_FP8_WAY_OUT}"
        )
    if shape.dtype not in _FP8_DTYPES:
        return (
            f"our FP8 kernels need rows in bfloat16 or float16, got {shape.dtype}; "
            f"choose one of these, {_FP8_WAY_OUT}"
        )
    if shape.has_position_bias or shape.has_time_bias:
        return (
            "our FP8 kernels have no position or time bias; switch "
            f"NetworkArgs.use_relative_position_bias and use_time_bias off, {_FP8_WAY_OUT}"
        )
    return _refuse_fp8_device(device_type)


def _refuse_fp8_device(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"our FP8 kernels need a Hopper GPU (H100, H200), got {device_type}"
    if not torch.cuda.is_available():
        return None  # asked for another machine
    major, minor = torch.cuda.get_device_capability()
    if major == 9:
        return None
    return (
        f"our FP8 kernels need a Hopper GPU (compute capability 9.0: H100, H200), "
        f"{torch.cuda.get_device_name()} has {major}.{minor}; set "
        f"{_FP8_WAY_OUT.removeprefix('or ')}"
    )


def refuse_unsupported(shape: CallShape) -> str | None:
    """Return why our Triton kernels cannot run such calls, None when they can.

    They have every mask and both biases, with any group size, window and deterministic.
    """
    for name in ("attention_dim", "linear_dim"):
        width = getattr(shape, name)
        if not 1 <= width <= _TRITON_MAX_DIM:
            return f"{name} must be 1 to {_TRITON_MAX_DIM} for our Triton kernels, got {width}"
    if shape.dtype not in _TRITON_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TRITON_DTYPES)
        return f"the dtype must be one of {names} for our Triton kernels, got {shape.dtype}"
    if shape.max_num_rows is not None and shape.max_num_rows > _TRITON_MAX_ROWS:
        return (
            f"at most {_TRITON_MAX_ROWS} rows fit our Triton kernels, a batch may have "
            f"{shape.max_num_users} users x {shape.max_seq_len} = {shape.max_num_rows}; "
            "lower the batch size or max_history_seqlen"
        )
    return None


def available_backends(
    device_type: str | None = None, shape: CallShape | None = None
) -> dict[str, str | None]:
    """Return each backend's name with None when it can run, or the reason why it cannot.

    Args:
        device_type: "cpu" or "cuda"; None = what this machine has.
        shape: also check everything that is known of the calls.
    """
    return {name: _refuse(name, device_type, shape) for name in BACKENDS if name != "auto"}


def _refuse(name: str, device_type: str | None, shape: CallShape | None) -> str | None:
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    refusal = None
    if shape is not None and shape.fp8 is not None:
        refusal = refuse_fp8(name, device_type, shape)
    if refusal is not None:
        return refusal
    if name == "triton":
        return _refuse_triton(device_type, shape)
    return fbgemm_impl.refuse(device_type, shape) if name == "cutlass" else None


def _refuse_triton(device_type: str, shape: CallShape | None) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install triton, as torch for CUDA does)"
    if device_type == "cuda" and torch.cuda.is_available():
        shared = torch.cuda.get_device_properties().shared_memory_per_block_optin
        if shared < _TRITON_SHARED_BYTES:
            return (
                f"the tiles of our Triton kernels need {_TRITON_SHARED_BYTES >> 10} KiB of shared "
                f"memory (H100, H200, B200), {torch.cuda.get_device_name()} has {shared >> 10}"
            )
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
    """Return the backend that `name` stands for on a device type ("cpu", "cuda").

    "auto" is triton on a GPU and pytorch on a CPU. Where triton cannot run the calls, auto, and
    auto alone, runs pytorch instead. It logs what it picked and what each other backend refuses,
    once for each outcome. With `shape`, calls that a backend does not have are refused here rather
    than at the first one.

    Raises:
        ValueError: an unknown name; "reference", which is an oracle for tests, not for training.
        NotImplementedError: a backend that cannot run here, with the reason and the way out.
    """
    if name != "auto":
        refusal = refuse_unavailable(name, field=field, device_type=device_type, shape=shape)
        if refusal is not None:
            raise refusal
        _announce_emulation(name, device_type, shape)
        return name
    backends = available_backends(device_type, shape)
    picked = "triton" if device_type == "cuda" and backends["triton"] is None else "pytorch"
    because = "the default there"
    if device_type != "cpu":
        refusals = [f"{key}: {why}" for key, why in backends.items() if why is not None]
        because = "; ".join(refusals) or "nothing refused"
    message = f'{field} = "auto" runs "{picked}" on {device_type} ({because})'
    if message not in _announced:
        _announced.add(message)
        logger.info("%s", message)
    _announce_emulation(picked, device_type, shape)
    return picked


def _announce_emulation(name: str, device_type: str, shape: CallShape | None) -> None:
    if shape is None or shape.fp8 is None or name != "pytorch":
        return
    message = (
        f'FP8 attention ({shape.fp8.mode}) is emulated by "pytorch" on {device_type}: the rounding '
        "of FP8 kernels, slower than attention in BF16"
    )
    if message not in _announced:
        _announced.add(message)
        logger.warning("%s", message)


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
