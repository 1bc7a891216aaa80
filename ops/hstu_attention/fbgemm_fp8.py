"""FP8 calls of FBGEMM's package `hstu`: what its wrapper needs, and what it gets wrong.

Source: hstu/cuda_hstu_attention.py at commit 71d6f8b. The wrapper quantises on the way in, once
more in its backward pass, by quant_mode (`QUANT_MODES`). What this adapter does about it:

    per_row to per_batch go from user to user on the host, and fail at a user without tokens
        (maximum of nothing); per_block fails where rows are left past the last offset. Their
        offsets are read here, too, so empty users and such rows are left out of the call.
    cast rounds as it is: beyond 448 by torch's own cast, which saturates or gives NaN by version.
        q, k and v are saturated first, their gradients are not cut. The output's gradient has no
        scale, and becomes zero below 2**-10.
    Other modes have a floor of 1e-6 under every scale, which flushes gradients below 1e-9. So in
        all modes the output's gradient is multiplied by a power of two that brings its largest
        value to 2 to 4, and those of q, k and v are divided by it: exact, for one read of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.hstu_attention.spec import Fp8Spec

QUANT_MODES = {
    "cast": 0,
    "per_row": 1,
    "per_block": 2,
    "per_head": 3,
    "per_batch": 4,
    "per_tensor": 5,
}
"""hstu_attn_quantization_mode -> their quant_mode; -1 is BF16."""
HEAD_DIMS = (64, 128, 256)
_CAPABILITY = 9
_WALKS_OVER_USERS = ("per_row", "per_block", "per_head", "per_batch")
_LARGEST = 448.0
_AIM_EXPONENT = 2  # of the gradient's largest value, as frexp has it: 2 to 4
_LARGEST_EXPONENT = 100


def refuse(fp8: Fp8Spec, attention_dim: int, *, has_quant_mode: bool) -> str | None:
    """Return why the package has no such FP8 attention, None where it has.

    Args:
        has_quant_mode: its signature is the present one.
    """
    if not has_quant_mode:
        return "FBGEMM's older hstu has FP8 in the forward pass alone; build the present one"
    if attention_dim not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        return (
            f"attention_dim must be one of {allowed} for FBGEMM's FP8 kernels, got {attention_dim}"
        )
    if fp8.grad_dtype != torch.float8_e4m3fn:
        return f"FBGEMM's package casts the output's gradient to E4M3, asked for {fp8.grad_dtype}"
    if fp8.weight_exponent:
        return (
            "FBGEMM's kernels cast silu(S) as it is, asked for Fp8Spec.weight_exponent = "
            f"{fp8.weight_exponent}"
        )
    return None


def refuse_device() -> str | None:
    """Return why this machine's GPU has no FP8 kernels of theirs; None also where there is none."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    if major == _CAPABILITY:
        return None
    return (
        "FBGEMM's FP8 attention needs a Hopper GPU (compute capability 9.0: H100, H200), "
        f"{torch.cuda.get_device_name()} has {major}.{minor}"
    )


@dataclass(frozen=True, kw_only=True)
class Users:
    """The users of a call that their wrapper may see."""

    seq_offsets: Tensor
    num_contextuals: Tensor | None
    num_candidates: Tensor | None
    num_rows: int
    """Rows that belong to them."""


def users_of(
    fp8: Fp8Spec | None,
    seq_offsets: Tensor,
    *,
    num_contextuals: Tensor | None,
    num_candidates: Tensor | None,
    num_rows: int,
) -> Users:
    """Return who goes into the call: all, or where the wrapper walks over users those with tokens.

    The latter waits for the device, as the wrapper does for each of them.
    """
    counts = {"num_contextuals": num_contextuals, "num_candidates": num_candidates}
    if fp8 is None or fp8.mode not in _WALKS_OVER_USERS:
        return Users(seq_offsets=seq_offsets, num_rows=num_rows, **counts)
    offsets = seq_offsets.tolist()
    owners = [i for i in range(len(offsets) - 1) if offsets[i + 1] > offsets[i]]
    kept = torch.tensor(owners, dtype=torch.int64, device=seq_offsets.device)
    starts = seq_offsets.index_select(0, kept)
    return Users(
        seq_offsets=torch.cat([starts, seq_offsets[-1:]]),
        num_rows=offsets[-1],
        **{
            name: None if one is None else one.to(kept.device).index_select(0, kept)
            for name, one in counts.items()
        },
    )


class Gradients:
    """The output's gradient at a size that their casts keep; those of q, k and v back from it."""

    factor: Tensor
    """A power of two, known once the backward pass has begun."""

    def of_output(self, out: Tensor) -> Tensor:
        """Return the output as it is."""
        return _Enlarged.apply(out, self)

    def of_input(self, x: Tensor, *, saturates: bool) -> Tensor:
        """Return q, k or v as it is, or cut to what E4M3 holds; the gradient is not cut."""
        return _Reduced.apply(x, self, saturates)


class _Enlarged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, gradients: Gradients) -> Tensor:
        ctx.gradients = gradients
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        largest = (
            grad.abs().amax().float() if grad.numel() else grad.new_zeros((), dtype=torch.float32)
        )
        exponent = (_AIM_EXPONENT - torch.frexp(largest).exponent).clamp(
            -_LARGEST_EXPONENT, _LARGEST_EXPONENT
        )
        factor = torch.ldexp(torch.ones_like(largest), exponent)
        ctx.gradients.factor = torch.where(largest == 0, 1.0, factor)
        return (grad * ctx.gradients.factor).to(grad.dtype), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: Gradients, saturates: bool) -> Tensor:
        ctx.gradients = gradients
        return x.clamp(-_LARGEST, _LARGEST) if saturates else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad / ctx.gradients.factor).to(grad.dtype), None, None


def with_all_rows(out: Tensor, num_rows: int) -> Tensor:
    """Return the output with zeros for rows that were left out."""
    return F.pad(out, (0, 0, 0, 0, 0, num_rows - out.shape[0]))


__all__ = [
    "HEAD_DIMS",
    "QUANT_MODES",
    "Gradients",
    "Users",
    "refuse",
    "refuse_device",
    "users_of",
    "with_all_rows",
]
