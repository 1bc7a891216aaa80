"""What FP8 attention multiplies: codes in two orientations, scales by blocks; quantised in Triton.

Codes by rows (T, H, A) lie like q. Transposed codes (H, A, columns) are right operands of products
over rows: user b's position p stands in column 16 * (first row // 16 + b) + pi(p), where pi puts
position 8 j + 2 t + e of sixteen in place 4 t + 2 j + e (j, e of 0, 1; t of 0..3). So every user
starts at a multiple of 16, as TMA needs it, and an accumulator of scores, whose pairs of columns a
thread holds 8 apart, is the left operand of the next product without a shuffle.

Scales (slots, H) are those of 128 rows of a user, whatever shares a maximum: block l of user b has
slot first row // 128 + b + l. They are powers of two: the smallest scale_inv with amax / scale_inv
within the format, between 2**-120 and 2**60; 1 for zeros. Codes saturate and NaN stays NaN; a
block with NaN or infinity has the largest scale. In the mode cast q, k and v have scale 1. Besides,
q, k and v are multiplied by `FP8_FACTOR`, which is not in scale_inv: value = code * scale_inv / it.

What no user owns (rows past the last offset, columns between users, slots without a block) is not
written, but the rest of a user's last sixteen columns is zero.

Bytes of an entry of b bytes: b read, 1 written an orientation, in one pass. per_head and per_tensor
read twice: the first pass leaves maxima. A tile is held as four quarters, as in
`ops.quantize.triton_cast`, whose rows here are those of a word of four transposed codes.
"""

# ruff: noqa: ANN001  a kernel's arguments are device values without a Python type

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.hstu_attention.spec import FP8_BLOCK_ROWS, FP8_FACTOR
from ops.quantize.triton_cast import INTERPRETED, _code, running_maximum
from ops.silu_split.triton_impl import sigmoid
from ops.triton_launch import launch

_E4M3 = torch.float8_e4m3fn
_TRITON_FP8 = {_E4M3: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
# what shares a maximum, of q, k and v and of dO
_SHARED = {
    "cast": ("none", "block"),
    "per_block": ("block", "block"),
    "per_head": ("head", "head"),
    "per_tensor": ("tensor", "tensor"),
}
_WARPS = {64: 4, 128: 8, 256: 16}  # by head dim: 64 entries a thread
_REGISTERS = 64  # a thread has 32 of entries, when they are BF16; two wide blocks fit then
_ROWS = tl.constexpr(FP8_BLOCK_ROWS)
_FACTOR = tl.constexpr(FP8_FACTOR)
_IN_INTERPRETER = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True)
class Fp8Operand:
    """Rows of users in FP8; layouts: module docstring."""

    codes: Tensor
    """(T, H, A), contiguous."""
    codes_t: Tensor | None
    """(H, A, columns), contiguous; None where not asked for."""
    scale_inv: Tensor
    """(slots or more, H), float32, contiguous."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the format of the codes."""
        return self.codes.dtype


def num_columns(num_rows: int, num_users: int) -> int:
    """Return the columns of transposed codes: room for T rows of B users, a multiple of 128."""
    return -(-16 * (num_rows // 16 + num_users + 1) // 128) * 128


def num_slots(num_rows: int, num_users: int) -> int:
    """Return an upper bound of the slots of scales, a multiple of 4."""
    return -(-(num_rows // FP8_BLOCK_ROWS + num_users + 1) // 4) * 4


def quantize_qkv(
    q_THA: Tensor,
    k_THA: Tensor,
    v_THA: Tensor,
    *,
    seq_offsets: Tensor,
    mode: str,
    wants_q_k_transposed: bool = True,
    wants_v_transposed: bool = True,
) -> tuple[Fp8Operand, Fp8Operand, Fp8Operand]:
    """Return q, k and v in E4M3. Codes of the three share memory; v's transposed do not.

    Args:
        q_THA: float32, bfloat16 or float16, head dim contiguous, as are k and v; T at least 1,
            A 64, 128 or 256.
        k_THA: as q.
        v_THA: as q.
        seq_offsets: (B + 1,) on the device.
        mode: cast, per_block, per_head or per_tensor.
        wants_q_k_transposed: for dK and dQ.
        wants_v_transposed: for O.
    """
    strides = {}
    for name, x in (("v", v_THA), ("q", q_THA), ("k", k_THA)):
        strides[f"{name}_stride"], strides[f"{name}_head_stride"], _ = x.stride()
    sources = {"v_ptr": v_THA, "q_ptr": q_THA, "k_ptr": k_THA, "bias_ptr": None, **strides}
    wanted = (wants_q_k_transposed, wants_v_transposed)
    return _quantize_three(sources, q_THA.shape, q_THA.device, seq_offsets, mode, wanted)


def quantize_uvqk(
    uvqk_TX: Tensor,
    *,
    bias_X: Tensor | None,
    num_heads: int,
    seq_offsets: Tensor,
    mode: str,
    wants_q_k_transposed: bool = True,
    wants_v_transposed: bool = True,
) -> tuple[Fp8Operand, Fp8Operand, Fp8Operand]:
    """Return q, k and v = SiLU(uvqk + bias), to the bit those of `silu_split` and `quantize_qkv`.

    SiLU is rounded to the dtype of the rows before it is quantised; u is not read.

    Args:
        uvqk_TX: contiguous, X = H * 4 A, head-major [u | v | q | k]; dtypes as in `quantize_qkv`.
        bias_X: or None.
        num_heads: H.
        seq_offsets: as in `quantize_qkv`, as are the rest.
        mode: as there.
        wants_q_k_transposed: as there.
        wants_v_transposed: as there.
    """
    num_rows, width = uvqk_TX.shape
    shape = torch.Size((num_rows, num_heads, width // (4 * num_heads)))
    sources = dict.fromkeys(("v_ptr", "q_ptr", "k_ptr"), uvqk_TX) | {"bias_ptr": bias_X}
    wanted = (wants_q_k_transposed, wants_v_transposed)
    return _quantize_three(sources, shape, uvqk_TX.device, seq_offsets, mode, wanted)


def quantize_grad(
    grad_THA: Tensor, *, seq_offsets: Tensor, mode: str, dtype: torch.dtype = _E4M3
) -> Fp8Operand:
    """Return dO, which has a block's scales in the mode cast, in both orientations.

    Args:
        grad_THA: as q in `quantize_qkv`.
        seq_offsets: as there.
        mode: as there.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    num_rows, num_heads, width = grad_THA.shape
    num_users = seq_offsets.numel() - 1
    codes = grad_THA.new_empty(grad_THA.shape, dtype=dtype)
    codes_t = codes.new_empty((num_heads, width, num_columns(num_rows, num_users)))
    scale_inv = torch.empty(
        (num_slots(num_rows, num_users), num_heads), dtype=torch.float32, device=codes.device
    )
    stride, head_stride, _ = grad_THA.stride()
    outputs = {"codes_ptr": codes, "v_t_ptr": codes_t, "scale_inv_ptr": scale_inv}
    sources = {"v_ptr": grad_THA, "v_stride": stride, "v_head_stride": head_stride}
    _run({**sources, **outputs}, grad_THA.shape, seq_offsets, _SHARED[mode][1], dtype)
    return Fp8Operand(codes, codes_t, scale_inv)


def _quantize_three(
    sources: dict[str, Any],
    shape: torch.Size,
    device: torch.device,
    seq_offsets: Tensor,
    mode: str,
    wants_transposed: tuple[bool, bool],
) -> tuple[Fp8Operand, Fp8Operand, Fp8Operand]:
    num_rows, num_heads, width = shape
    num_users = seq_offsets.numel() - 1
    columns, slots = num_columns(num_rows, num_users), num_slots(num_rows, num_users)
    codes = torch.empty((3, *shape), dtype=_E4M3, device=device)
    scale_inv = torch.empty((3, slots, num_heads), dtype=torch.float32, device=device)
    qk_t = v_t = None
    if wants_transposed[0]:
        qk_t = codes.new_empty((2, num_heads, width, columns))
    if wants_transposed[1]:  # not needed as long as the others
        v_t = codes.new_empty((num_heads, width, columns))
    outputs = {"codes_ptr": codes, "v_t_ptr": v_t, "qk_t_ptr": qk_t, "scale_inv_ptr": scale_inv}
    _run({**sources, **outputs}, shape, seq_offsets, _SHARED[mode][0], _E4M3)
    v_codes, q_codes, k_codes = codes.unbind()
    v_scale, q_scale, k_scale = scale_inv.unbind()
    q_t, k_t = (None, None) if qk_t is None else qk_t.unbind()
    return (
        Fp8Operand(q_codes, q_t, q_scale),
        Fp8Operand(k_codes, k_t, k_scale),
        Fp8Operand(v_codes, v_t, v_scale),
    )


def _run(
    tensors: dict[str, Any],
    shape: torch.Size,
    seq_offsets: Tensor,
    shared: str,
    dtype: torch.dtype,
) -> None:
    """Launch the kernel; before it, where more than a block shares a scale, one that measures."""
    num_rows, num_heads, width = shape
    num_users = seq_offsets.numel() - 1
    parts = 3 if "q_ptr" in tensors else 1
    slots = num_slots(num_rows, num_users)
    arguments = {
        **dict.fromkeys(_OPTIONAL),
        **dict.fromkeys(_STRIDES, 0),
        **tensors,
        "offsets_ptr": seq_offsets,
        "num_rows": num_rows,
        "num_users": num_users,
        "num_slots": slots,
        "num_words": num_columns(num_rows, num_users) // 4,
        "H": num_heads,
        "A": width,
        "PARTS": parts,
        "ACTIVATES": "q_ptr" in tensors and "q_stride" not in tensors,
        "SHARED": shared,
        "MEASURES": False,
        "USERS": min(1024, max(32, triton.next_power_of_2(num_users))),
        "FP8": _TRITON_FP8[dtype],
    }
    grid = (slots * num_heads * parts,)
    is_packed = tensors["v_ptr"].dtype == torch.bfloat16
    options = {"num_warps": _WARPS[width], "maxnreg": _REGISTERS if is_packed else None}
    if shared in ("head", "tensor"):
        sharing = (parts, max(num_users, 1) * num_heads) if shared == "head" else (parts, 1)
        arguments["maxima_ptr"] = torch.zeros(sharing, dtype=torch.int32, device=seq_offsets.device)
        launch(_quantize_kernel, grid, {**arguments, "MEASURES": True}, **options)
    launch(_quantize_kernel, grid, arguments, **options)


_OPTIONAL = ("q_ptr", "k_ptr", "bias_ptr", "qk_t_ptr", "maxima_ptr")
_STRIDES = tuple(f"{name}_{kind}" for name in "vqk" for kind in ("stride", "head_stride"))


@triton.jit
def _sum(x):
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def _maximum_bits(maxima):
    """The largest entry of a non-negative FP32 tile as an integer: so ordered, NaN is on top.

    By a function that the interpreter knows: it takes any other one entry by entry.
    """
    bits = maxima.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.reduce(bits, 1, tl.standard._elementwise_max)
    return tl.reduce(bits, 0, tl.standard._elementwise_max)


@triton.jit
def _user_of(slot, offsets_ptr, num_users, USERS: tl.constexpr):
    """The last user whose slots begin at or before this one, -1 where there is no user."""
    user = slot * 0 - 1
    for first in range(0, num_users, USERS):
        users = first + tl.arange(0, USERS)
        start = tl.load(offsets_ptr + users, mask=users < num_users, other=0)
        begins = (start // _ROWS).to(tl.int32) + users
        user += _sum(((begins <= slot) & (users < num_users)).to(tl.int32))
    return user


@triton.jit
def _power_of_two(bits, FP8: tl.constexpr):
    """Exponent of scale_inv, from the maximum as an integer (`_maximum_bits`)."""
    TOP: tl.constexpr = 8 if tl.float8e4nv == FP8 else 15  # the largest number is 1.75 * 2**TOP
    exponent = ((tl.minimum(bits, 0x7F800000) + 0x1FFFFF) >> 23) - (127 + TOP)
    exponent = tl.minimum(tl.maximum(exponent, -120), 60)
    return tl.where(bits == 0, 0, exponent)


@triton.jit
def _two_to_the(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _silu(x, shift):
    return (x.to(tl.float32) + shift) * sigmoid(x.to(tl.float32) + shift)


def _casts(formats: str, of_bfloat16: bool) -> tl.constexpr:
    """PTX of `_codes_and_words` for four neighbours of each quarter, q: $0 to $3, words: $4 to $7.

    Cast in pairs along the rows; permutes exchange the bytes, as a second cast would cost more.
    BF16 entries are taken apart here, and not before, so that fewer registers hold them.
    """
    text = "{ .reg .b16 low, high; .reg .b32 s, t, u, w; .reg .f32 x0, x1, x2, x3;"
    for quarter in range(4):
        x = [f"${8 + 4 * quarter + i}" for i in range(4)]
        if of_bfloat16:
            x = ["x0", "x1", "x2", "x3"]
            for i in (0, 2):
                pair = f"${8 + 2 * quarter + i // 2}"
                text += f" shl.b32 {x[i]}, {pair}, 16; and.b32 {x[i + 1]}, {pair}, 0xffff0000;"
            text += "".join(f" mul.f32 {x[i]}, {x[i]}, ${16 + i};" for i in range(4))
        text += f" cvt.rn.satfinite.{formats}.f32 low, {x[1]}, {x[0]};"
        text += f" cvt.rn.satfinite.{formats}.f32 high, {x[3]}, {x[2]};"
        text += f" mov.b32 ${quarter}, {{low, high}};"
    text += " prmt.b32 s, $0, $1, 0x5140; prmt.b32 t, $2, $3, 0x5140;"
    text += " prmt.b32 u, $0, $1, 0x7362; prmt.b32 w, $2, $3, 0x7362;"
    text += " prmt.b32 $4, s, t, 0x5410; prmt.b32 $5, s, t, 0x7632;"
    text += " prmt.b32 $6, u, w, 0x5410; prmt.b32 $7, u, w, 0x7632; }"
    return tl.constexpr(text)


_E4M3_OF_BF16, _E5M2_OF_BF16 = _casts("e4m3x2", True), _casts("e5m2x2", True)
_E4M3_OF_FP32, _E5M2_OF_FP32 = _casts("e4m3x2", False), _casts("e5m2x2", False)
_OUT = ",".join(["=&r"] * 8)
_OF_BF16 = tl.constexpr(_OUT + ",r" * 8 + ",f" * 4)
_OF_FP32 = tl.constexpr(_OUT + ",f" * 16)


@triton.jit
def _codes_and_words(x0, x1, x2, x3, scale, FP8: tl.constexpr):
    """FP8 codes of four scaled tiles, as bytes, and those of all four as words, x0's lowest.

    scale: what entries are multiplied by, FP32.
    """
    IS_E4M3: tl.constexpr = tl.float8e4nv == FP8
    TYPES: tl.constexpr = (tl.int8, tl.int8, tl.int8, tl.int8, tl.int32)
    if _IN_INTERPRETER:
        c0, c1 = _code(x0.to(tl.float32) * scale, FP8), _code(x1.to(tl.float32) * scale, FP8)
        c2, c3 = _code(x2.to(tl.float32) * scale, FP8), _code(x3.to(tl.float32) * scale, FP8)
        words = c0 | (c1 << 8) | (c2 << 16) | (c3 << 24)
        return c0.to(tl.int8), c1.to(tl.int8), c2.to(tl.int8), c3.to(tl.int8), words
    elif x0.dtype == tl.bfloat16:
        OF_BF16: tl.constexpr = _E4M3_OF_BF16 if IS_E4M3 else _E5M2_OF_BF16
        entries = [x0, x1, x2, x3, scale]
        return tl.inline_asm_elementwise(OF_BF16, _OF_BF16, entries, TYPES, is_pure=True, pack=4)
    else:
        OF_FP32: tl.constexpr = _E4M3_OF_FP32 if IS_E4M3 else _E5M2_OF_FP32
        x0, x1 = x0.to(tl.float32) * scale, x1.to(tl.float32) * scale
        x2, x3 = x2.to(tl.float32) * scale, x3.to(tl.float32) * scale
        entries = [x0, x1, x2, x3]
        return tl.inline_asm_elementwise(OF_FP32, _OF_FP32, entries, TYPES, is_pure=True, pack=4)


@triton.jit(do_not_specialize=["num_rows", "num_users", "num_slots"])
def _quantize_kernel(
    v_ptr,
    q_ptr,
    k_ptr,
    bias_ptr,
    codes_ptr,
    v_t_ptr,
    qk_t_ptr,
    scale_inv_ptr,
    maxima_ptr,
    offsets_ptr,
    num_rows,
    num_users,
    num_slots,
    num_words,
    v_stride,
    v_head_stride,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    H: tl.constexpr,
    A: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    SHARED: tl.constexpr,
    MEASURES: tl.constexpr,
    USERS: tl.constexpr,
    FP8: tl.constexpr,
):
    """A block of a user, of one head, of v, q or k; or of dO, called v.

    ACTIVATES: v_ptr is uvqk, and SiLU is applied. SHARED: none, block, head or tensor. MEASURES:
    fold the maximum into maxima_ptr and write nothing else.
    """
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % H
    slot = tl.program_id(0) // (PARTS * H)
    user = _user_of(slot, offsets_ptr, num_users, USERS)
    is_user = user >= 0
    start = tl.load(offsets_ptr + user, mask=is_user, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + user + 1, mask=is_user, other=0).to(tl.int64)
    level = slot - (start // _ROWS).to(tl.int32) - user
    first = start + level * _ROWS
    num_valid = (end - first).to(tl.int32)
    if is_user & (num_valid > 0):
        source_ptr, stride, head_stride = v_ptr, v_stride, v_head_stride
        if ACTIVATES:
            stride, head_stride = 4 * A * H, 4 * A
            source_ptr += A + part * A
        elif PARTS > 1:
            if part == 1:
                source_ptr, stride, head_stride = q_ptr, q_stride, q_head_stride
            if part == 2:
                source_ptr, stride, head_stride = k_ptr, k_stride, k_head_stride
        word = tl.arange(0, _ROWS // 4)
        row = word // 4 * 16 + word % 4 * 2  # of quarter 0
        # said to run by eights: else codes get 16 a thread, and loads gaps
        col = tl.max_contiguous(tl.multiple_of(tl.arange(0, A), 8), 8)
        place = source_ptr + head.to(tl.int64) * head_stride
        place = place + (first + row)[:, None] * stride + col[None, :]
        below = (num_valid - row)[:, None]
        x0 = tl.load(place, mask=below > 0, other=0.0)
        x1 = tl.load(place + stride, mask=below > 1, other=0.0)
        x2 = tl.load(place + 8 * stride, mask=below > 8, other=0.0)
        x3 = tl.load(place + 9 * stride, mask=below > 9, other=0.0)
        if ACTIVATES:
            shift = tl.full([1, A], 0.0, tl.float32)
            if bias_ptr is not None:
                of_part = head * (4 * A) + A + part * A
                shift = tl.load(bias_ptr + of_part + col).to(tl.float32)[None, :]
            TYPE: tl.constexpr = v_ptr.dtype.element_ty
            x0, x1 = _silu(x0, shift).to(TYPE), _silu(x1, shift).to(TYPE)
            x2, x3 = _silu(x2, shift).to(TYPE), _silu(x3, shift).to(TYPE)
            if num_valid < _ROWS:  # silu(bias) is not zero
                x0, x1 = tl.where(below > 0, x0, 0.0), tl.where(below > 1, x1, 0.0)
                x2, x3 = tl.where(below > 8, x2, 0.0), tl.where(below > 9, x3, 0.0)
        FACTOR: tl.constexpr = _FACTOR if PARTS > 1 else 1.0  # dO has none
        exponent = part * 0
        if SHARED == "block" or MEASURES:
            maxima = running_maximum(tl.abs(x0.to(tl.float32)), x1.to(tl.float32))
            maxima = running_maximum(running_maximum(maxima, x2.to(tl.float32)), x3.to(tl.float32))
            bits = _maximum_bits(maxima * FACTOR)
        if SHARED == "head":
            maxima_ptr += (part * num_users + user) * H + head
        elif SHARED == "tensor":
            maxima_ptr += part
        if MEASURES:
            tl.atomic_max(maxima_ptr, bits, sem="relaxed")
        else:
            if SHARED == "head" or SHARED == "tensor":
                bits = tl.load(maxima_ptr)
            if SHARED != "none":
                exponent = _power_of_two(bits, FP8)
            tl.store(scale_inv_ptr + (part * num_slots + slot) * H + head, _two_to_the(exponent))
            scale = _two_to_the(-exponent) * FACTOR
            c0, c1, c2, c3, words = _codes_and_words(x0, x1, x2, x3, scale, FP8)
            codes = codes_ptr.to(tl.pointer_type(tl.int8)) + part.to(tl.int64) * num_rows * (H * A)
            codes = codes + (first + row)[:, None] * (H * A) + head * A + col[None, :]
            tl.store(codes, c0, mask=below > 0)
            tl.store(codes + H * A, c1, mask=below > 1)
            tl.store(codes + 8 * H * A, c2, mask=below > 8)
            tl.store(codes + 9 * H * A, c3, mask=below > 9)
            begins = ((start // 16).to(tl.int32) + user) * 4 + level * (_ROWS // 4)
            if v_t_ptr is not None and part == 0:
                _store_words(v_t_ptr, words, head * A, begins, num_valid, num_words, A)
            if qk_t_ptr is not None and part > 0:
                line = ((part - 1) * H + head) * A
                _store_words(qk_t_ptr, words, line, begins, num_valid, num_words, A)


@triton.jit
def _store_words(ptr, words, line, begins, num_valid, num_words, A: tl.constexpr):
    """Write words (ROWS / 4, A) transposed: A lines of num_words from `line` on, from `begins`."""
    word = tl.arange(0, _ROWS // 4)
    place = ptr.to(tl.pointer_type(tl.int32))
    place = place + (line + tl.arange(0, A)).to(tl.int64)[:, None] * num_words
    inside = word // 4 * 16 < num_valid
    tl.store(place + (begins + word)[None, :], tl.trans(words), mask=inside[None, :])
