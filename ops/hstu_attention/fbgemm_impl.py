"""HSTU attention through FBGEMM's package `hstu` (kernel_backend = "cutlass").

Source: github.com/pytorch/FBGEMM, fbgemm_gpu/experimental/hstu, read at commit 71d6f8b (present
signature, with scaling_seqlen) and before commit 43791a0 (older one, with is_delta_q).

Their mask, for a user whose last `num_targets` tokens are candidates:
    window_size (-1, 0)   row i sees columns j <= i, a row below num_contexts every column before
                          the candidates, a candidate no candidate of an earlier group
    (left, right)         row i sees columns i - left to i + right; -1 = no bound; no counts allowed
From ours to theirs, equal pair by pair:
    causal                (-1, 0) with both counts
    disable_contextual_mask   without num_contexts: the contextual rows are then rows like others
    is_causal=False       (-1, -1) without counts: every row sees every column, contextual or not
    attention_window w    (w - 1, 0 or w - 1), only without counts: ours keeps contextual columns
                          and the own group. w >= max_seq_len cuts nothing: no window.
scaling_seqlen: an integer goes to the present kernels as it is. The older ones divide by the
max_seqlen they are given, so they get the integer times 2**k >= max_seq_len and the output times
2**k: the same bits (but for FP16 subnormals). A tensor, a fraction, or for the older ones more than
8 * max_seq_len, costs one more rounding of the output.

Limits beyond the contract of `ops.hstu_attention`:
    CUDA of compute capability 8 or 9; BF16, and FP16 where the package was built with it;
    attention_dim = linear_dim, one of `HEAD_DIMS`; q below 2**31 elements; no bias (their `rab` is
    a (B, H, N, N) tensor); no deterministic backward.
    Nothing is read on the host: what it cannot check stops the device with an assertion.
    Rows past the last offset: the kernels read them and leave them unwritten in output and
    gradients, so q, k, v and output pass a mask, forward and backward. That costs a copy of each; a
    benchmark of their kernels alone must call the package itself.
    Older signature: a user of more than 64 tokens, all candidates, reads the rows before its own
    (by its source), so it is stopped too.
    FP8: Hopper, the present signature, head dims 64, 128, 256; `ops.hstu_attention.fbgemm_fp8`. A
    build without it is asked, and refused, when the model is built.
    per_row: the kernels read transposed copies by TMA, whose rows must lie a multiple of 16 bytes
    apart, and launch whatever comes of one that do not: so rows are padded to a multiple of 16.

Run on the real package in BF16 at head dims 64, 128 and 256. FP8 never was: the tests hold a
stand-in of the wrapper against our emulation, and the package's own tests leave out per_row to
per_tensor with lengths that differ or are no multiple of 16. Whether a build has a kernel of a head
dim at all (one built with HSTU_DISABLE_HDIM... set writes nothing and says nothing, by its source)
shows in tests/ops/test_hstu_attention_fbgemm_gpu.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.hstu_attention import fbgemm_fp8
from ops.hstu_attention.spec import AttentionSpec, Fp8Spec
from ops.jagged.offsets import INT32_MAX, require_32bit_indexing

if TYPE_CHECKING:
    from ops.hstu_attention.dispatch import CallShape

HEAD_DIMS = (32, 64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_CAPABILITIES = (8, 9)
_MAX_USERS = 65535  # their backward has one block in z a user
_ROWS_PADDED_A_USER = 128  # of their gradient accumulator, counted in 32 bits
_TMA_ROWS = 16  # in FP8, of transposed copies
_OLDER_MAX_ONLY_CANDIDATES = 64  # their smallest tile of query rows
_OLDER_MAX_GRID_GROWTH = 8  # max_seqlen sets the grid: no scaling_seqlen far beyond the lengths
_HOW_TO_GET_IT = (
    "build it for your torch and CUDA from github.com/pytorch/FBGEMM: cd "
    "fbgemm_gpu/experimental/hstu, then python setup.py install (package fbgemm_gpu_hstu)"
)
_SHARED = {"q", "k", "v", "max_seqlen_q", "max_seqlen_k", "num_contexts", "num_targets"}
_SHARED |= {"target_group_size", "window_size", "alpha"}
_PRESENT = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "scaling_seqlen"}
_PRESENT |= _SHARED | {"quant_mode"}
_OLDER = _SHARED | {"seq_offsets_q", "seq_offsets_k"}


@dataclass(frozen=True, kw_only=True)
class Package:
    """What was found when `hstu` was imported, once a process."""

    attend: Callable[..., Tensor] | None
    """hstu_attn_varlen_func; None when it cannot be called."""
    takes_scaling_seqlen: bool = False
    """The present signature; False: the older one, which divides by max_seqlen."""
    refusal: str | None = None


@lru_cache(maxsize=1)
def load_package() -> Package:
    """Import `hstu` and tell its signature from the parameters' names; never raises."""
    try:
        import hstu
    except ModuleNotFoundError as error:
        if error.name == "hstu":
            return _refused(f"the package hstu is not installed ({_HOW_TO_GET_IT})")
        return _refused(f"the package hstu needs {error.name}, which is not installed")
    except Exception as error:  # a library built for another CUDA fails with whatever it likes
        return _refused(
            f"the package hstu is installed but fails to import ({type(error).__name__}: {error}); "
            + _HOW_TO_GET_IT
        )
    attend = getattr(hstu, "hstu_attn_varlen_func", None)
    if attend is None:
        where = getattr(hstu, "__file__", "an unknown place")
        return _refused(
            f"the package hstu at {where} has no hstu_attn_varlen_func, so it is not FBGEMM's "
            f"({_HOW_TO_GET_IT})"
        )
    parameters = inspect.signature(attend).parameters.values()
    names = {parameter.name for parameter in parameters}
    required = {p.name for p in parameters if p.default is p.empty}
    for signature in (_PRESENT, _OLDER):
        if signature <= names and required <= signature:
            return Package(attend=attend, takes_scaling_seqlen=signature is _PRESENT)
    return _refused(
        "hstu.hstu_attn_varlen_func has neither of the signatures known here, but "
        f"({', '.join(parameter.name for parameter in parameters)}) ({_HOW_TO_GET_IT})"
    )


def _refused(reason: str) -> Package:
    return Package(attend=None, refusal=reason)


def refuse(device_type: str, shape: CallShape | None) -> str | None:
    """Return why the package cannot run calls of `shape` there, None when it can."""
    if device_type != "cuda":
        reason = f"FBGEMM's package hstu needs a CUDA device, got {device_type}"
        if not _is_installed():
            reason += f", and the package hstu is not installed ({_HOW_TO_GET_IT})"
        return reason
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major not in _CAPABILITIES:
            return (
                "FBGEMM's package hstu has kernels for compute capability 8 and 9, this device "
                f"has {major}.{minor}"
            )
    package = load_package()
    if package.refusal is not None or shape is None:
        return package.refusal
    if shape.fp8 is not None and (refusal := fbgemm_fp8.refuse_device()) is not None:
        return refusal
    refusal = _refuse_fp8(package, shape.fp8, shape.attention_dim) or _refuse_built(shape)
    if refusal is None and shape.fp8 is not None and torch.cuda.device_count() > 0:
        return _refuse_build(package, "cuda")
    return refusal


def _refuse_fp8(package: Package, fp8: Fp8Spec | None, attention_dim: int) -> str | None:
    if fp8 is None:
        return None
    return fbgemm_fp8.refuse(fp8, attention_dim, has_quant_mode=package.takes_scaling_seqlen)


@lru_cache(maxsize=1)
def _refuse_build(package: Package, device_type: str) -> str | None:
    """Return why this build has no FP8, by a call without rows, which launches no attention."""
    assert package.attend is not None
    q = torch.empty(0, 1, fbgemm_fp8.HEAD_DIMS[0], dtype=torch.bfloat16, device=device_type)
    offsets = torch.zeros(2, dtype=torch.int32, device=device_type)
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": 1, "scaling_seqlen": 1, "quant_mode": 0}
    nothing = dict.fromkeys(("seqused_q", "seqused_k", "num_contexts", "num_targets"))
    try:
        package.attend(
            q=q, k=q, v=q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **sizes, **nothing
        )
    except RuntimeError as error:
        return (
            f"FBGEMM's package hstu has no FP8 in this build ({str(error).splitlines()[0]}); build "
            "it without HSTU_DISABLE_FP8"
        )
    return None


def _refuse_built(shape: CallShape) -> str | None:
    """Return why the kernels cannot run calls of `shape`, by what is known before the first one."""
    reason = _refuse_shape(shape.attention_dim, shape.linear_dim, shape.dtype)
    if reason is None:
        reason = _refuse_rule(
            {"position_bias": shape.has_position_bias, "time_bias": shape.has_time_bias},
            {"num_contextuals": shape.has_contextuals, "num_candidates": shape.has_candidates},
            window=_window(shape.attention_window, shape.max_seq_len),
            deterministic=shape.deterministic,
        )
    if reason is None and shape.max_num_rows is not None and shape.num_heads is not None:
        assert shape.max_num_users is not None
        sizes = (shape.max_num_rows, shape.num_heads, shape.attention_dim)
        reason = _refuse_rows(sizes, shape.max_num_users)
    return reason


def _is_installed() -> bool:
    """Without importing it: its library wants a GPU."""
    try:
        return find_spec("hstu") is not None
    except ValueError:  # imported, but without a spec
        return True


def _refuse_shape(attention_dim: int, linear_dim: int, dtype: torch.dtype) -> str | None:
    if dtype not in _DTYPES:
        return f"the dtype must be bfloat16 or float16 for FBGEMM's kernels, got {dtype}"
    if attention_dim != linear_dim:
        return (
            "attention_dim and linear_dim must be equal for FBGEMM's kernels, "
            f"got {attention_dim} and {linear_dim}"
        )
    if attention_dim not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        return f"attention_dim must be one of {allowed} for FBGEMM's kernels, got {attention_dim}"
    return None


def _refuse_call(q_THA: Tensor, v_THV: Tensor, num_users: int, spec: AttentionSpec) -> str | None:
    num_rows, num_heads, attention_dim = q_THA.shape
    reason = _refuse_shape(attention_dim, v_THV.shape[2], q_THA.dtype)
    if reason is None:
        is_given = {
            name: getattr(spec, name) is not None
            for name in ("position_bias", "time_bias", "num_contextuals", "num_candidates")
        }
        reason = _refuse_rule(
            {name: is_given[name] for name in ("position_bias", "time_bias")},
            {name: is_given[name] for name in ("num_contextuals", "num_candidates")},
            window=_window(spec.attention_window, spec.max_seq_len),
            deterministic=spec.deterministic,
        )
    return reason or _refuse_rows((num_rows, num_heads, attention_dim), num_users)


def _refuse_rule(
    has_bias: Mapping[str, bool],
    has_counts: Mapping[str, bool],
    *,
    window: int | None,
    deterministic: bool,
) -> str | None:
    """Return which part of mask, bias and order of sums they do not have."""
    for name in (name for name, is_given in has_bias.items() if is_given):
        return f"{name} is not in FBGEMM's kernels: their rab is a (B, H, N, N) tensor"
    if deterministic:
        return "deterministic = True: FBGEMM's backward adds gradients in no fixed order"
    for name in (name for name, is_given in has_counts.items() if is_given and window is not None):
        return (
            f"attention_window = {window} together with {name}: FBGEMM's "
            "window also cuts contextual columns and the own group"
        )
    return None


def _refuse_rows(sizes: tuple[int, int, int], num_users: int) -> str | None:
    """Return whether q of (rows, heads, attention_dim) passes what they can count."""
    if num_users > _MAX_USERS:  # a launch that fails ends the process there
        return f"at most {_MAX_USERS} users (sequences) a call, got {num_users}"
    try:
        require_32bit_indexing(sizes, name="q", kernel="FBGEMM's package hstu")
        padded = (sizes[0] + num_users * _ROWS_PADDED_A_USER,)
        require_32bit_indexing(padded, name="the padded rows", kernel="FBGEMM's package hstu")
    except NotImplementedError as error:
        return str(error)
    return None


def _window(attention_window: int | None, max_seq_len: int | None) -> int | None:
    """Return the window when it can cut anything."""
    if attention_window is None or (max_seq_len is not None and attention_window >= max_seq_len):
        return None
    return attention_window


def hstu_attention(
    q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, seq_offsets: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return O_THV; see `ops.hstu_attention.hstu_attention`. The device is the caller's check."""
    package = load_package()
    num_rows, num_users = q_THA.shape[0], seq_offsets.numel() - 1
    reason = (
        package.refusal
        or _refuse_fp8(package, spec.fp8, q_THA.shape[2])
        or _refuse_call(q_THA, v_THV, num_users, spec)
    )
    if reason is not None:
        raise NotImplementedError(
            f'hstu_attention(backend = "cutlass"): {reason}; choose another value or '
            'backend = "triton" or "pytorch"'
        )
    device = q_THA.device
    _assert_values(package, seq_offsets, num_rows, spec)
    is_token_T11 = (torch.arange(num_rows, device=device) < seq_offsets[-1]).view(-1, 1, 1)
    q, k, v = (torch.where(is_token_T11, x, 0).contiguous() for x in (q_THA, k_THA, v_THV))
    users = fbgemm_fp8.users_of(
        spec.fp8,
        seq_offsets,
        num_contextuals=spec.num_contextuals,
        num_candidates=spec.num_candidates,
        num_rows=num_rows,
    )
    if users.num_rows == 0 or num_users == 0 or spec.max_seq_len == 0:
        return q + k + v  # zeros, and zero gradients for all three
    divisor, factor = _divide(package, spec)
    gradients = None
    if spec.fp8 is not None:
        gradients = fbgemm_fp8.Gradients()
        q, k, v = (_fp8_rows(x, users.num_rows, spec.fp8, gradients) for x in (q, k, v))
    assert package.attend is not None
    out = package.attend(
        q=q,
        k=k,
        v=v,
        alpha=q.shape[2] ** -0.5,
        **_mask_arguments(spec, users, device),
        **_size_arguments(package, spec, users.seq_offsets.to(device, torch.int32), divisor),
    )
    if out.requires_grad:
        out.register_hook(Tensor.contiguous)  # they take no other output gradient
    if gradients is not None:
        out = fbgemm_fp8.with_all_rows(gradients.of_output(out), num_rows)
    out = torch.where(is_token_T11, out, 0)
    if out.dtype == torch.float16 and q.dtype != torch.float16:
        fits = ~torch.isinf(out).any()
        torch._assert_async(fits, "FBGEMM's FP16 output overflowed (above 65504) in a BF16 model")
    if factor is not None:
        out = out.float() * factor
    return out.to(q.dtype)


def _fp8_rows(x: Tensor, num_rows: int, fp8: Fp8Spec, gradients: fbgemm_fp8.Gradients) -> Tensor:
    """Return the rows of q, k or v for their wrapper, with zeros behind where it needs more."""
    x = x[:num_rows]
    if fp8.mode == "per_row":
        x = F.pad(x, (0, 0, 0, 0, 0, -num_rows % _TMA_ROWS))
    return gradients.of_input(x, saturates=fp8.mode == "cast")


def _size_arguments(
    package: Package, spec: AttentionSpec, offsets: Tensor, divisor: int
) -> dict[str, Any]:
    """Return what the two signatures call by different names."""
    offsets = offsets.contiguous()
    if not package.takes_scaling_seqlen:
        return {
            "max_seqlen_q": divisor,
            "max_seqlen_k": divisor,
            "seq_offsets_q": offsets,
            "seq_offsets_k": offsets,
        }
    return {
        "max_seqlen_q": spec.max_seq_len,
        "max_seqlen_k": spec.max_seq_len,
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "seqused_q": None,
        "seqused_k": None,
        "scaling_seqlen": divisor,
        "quant_mode": -1 if spec.fp8 is None else fbgemm_fp8.QUANT_MODES[spec.fp8.mode],
    }


def _mask_arguments(
    spec: AttentionSpec, users: fbgemm_fp8.Users, device: torch.device
) -> dict[str, Any]:
    """Return their arguments for the mask; why they are equal: module docstring."""
    contexts = None if spec.disable_contextual_mask else users.num_contextuals
    counts = (contexts, users.num_candidates) if spec.is_causal else (None, None)
    contexts, candidates = (
        None if x is None else x.to(device, torch.int32).contiguous() for x in counts
    )
    window = _window(spec.attention_window, spec.max_seq_len)
    reach = -1 if window is None else window - 1
    return {
        "num_contexts": contexts,
        "num_targets": candidates,
        "target_group_size": min(spec.target_group_size, spec.max_seq_len),
        "window_size": (reach, 0 if spec.is_causal else reach),
    }


def _divide(package: Package, spec: AttentionSpec) -> tuple[int, float | Tensor | None]:
    """Return the integer the kernels shall divide by, and what to multiply the output with."""
    scaling, max_seq_len = spec.scaling_seqlen, spec.max_seq_len
    if isinstance(scaling, Tensor) or not float(scaling).is_integer() or scaling > INT32_MAX:
        return max_seq_len, max_seq_len / scaling
    divisor = int(scaling)
    if package.takes_scaling_seqlen:
        return divisor, None
    if divisor > _OLDER_MAX_GRID_GROWTH * max_seq_len:
        return max_seq_len, max_seq_len / divisor
    factor = 1
    while divisor * factor < max_seq_len:
        factor *= 2
    return divisor * factor, None if factor == 1 else float(factor)


def _assert_values(
    package: Package, seq_offsets: Tensor, num_rows: int, spec: AttentionSpec
) -> None:
    """Stop the device where values break the contract; the host reads none of them."""
    lengths_B = torch.diff(seq_offsets)
    is_good_B = (lengths_B >= 0) & (lengths_B <= spec.max_seq_len) & (seq_offsets[1:] <= num_rows)
    message = f"a sequence is longer than max_seq_len ({spec.max_seq_len}) or offsets fall"
    torch._assert_async(is_good_B.all(), f"{message} or end past the {num_rows} rows")
    candidates_B = spec.num_candidates
    if candidates_B is None:
        return
    if not spec.is_causal:
        torch._assert_async((candidates_B == 0).all(), "is_causal = False with candidates")
    elif not package.takes_scaling_seqlen:
        is_good_B = (candidates_B < lengths_B) | (lengths_B <= _OLDER_MAX_ONLY_CANDIDATES)
        torch._assert_async(
            is_good_B.all(),
            "FBGEMM's older kernels read a user's neighbour when all of its tokens, more than "
            f"{_OLDER_MAX_ONLY_CANDIDATES}, are candidates; build the present ones",
        )
