"""A stand-in for FBGEMM's package `hstu`, both signatures, and calls of the adapter on a CPU.

It follows that package's README and docstrings, not our adapter: its masks and argument checks,
rows that no user owns left unwritten (NaN here) in output and gradients, and whole tiles of rows
read past the end of a user with weight 0. In FP8 its operands are rounded as the package's Python
rounds them (`their_fp8`), with its loops, its floor and its casts without saturation; products and
weights are not. It says nothing about the real kernels.
"""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ops.hstu_attention import fbgemm_impl
from ops.hstu_attention import hstu_attention as public_op
from ops.hstu_attention.checks import check_arguments
from ops.hstu_attention.spec import AttentionSpec
from ops.jagged import lengths_to_offsets
from tests.ops.test_hstu_attention import Case
from tests.ops.test_hstu_attention import gradients as output_gradients

DIM, NUM_HEADS = 32, 2
NO_COUNTS = {"num_contextuals": None, "num_candidates": None}
OWN_CASES = {
    "window_without_counts": Case((70, 1, 0, 9), (), (), NO_COUNTS | {"attention_window": 3}),
    "window_of_itself": Case((70, 1, 0, 9), (), (), NO_COUNTS | {"attention_window": 1}),
    "window_both_ways": Case(
        (70, 1, 9), (), (), NO_COUNTS | {"attention_window": 3, "is_causal": False}
    ),
    "window_wider_than_any": Case((70, 9), (2, 1), (3, 0), {"attention_window": 300}),
    "no_users": Case((), (), ()),
    "full_without_counts": Case((40, 0, 7), (), (), NO_COUNTS | {"is_causal": False}),
    "full_causal_contextual": Case(
        (9, 5), (2, 0), (0, 0), {"is_causal": False, "disable_contextual_mask": True}
    ),
    "huge_group": Case((150, 9), (2, 0), (60, 9), {"target_group_size": 2**40}),
}
REFUSED = {
    "window": "attention_window = 3 together with num_contextuals",
    "window_causal_contextual": "attention_window = 2 together with num_contextuals",
    "window_not_causal": "attention_window = 2 together with num_contextuals",
    "position_bias": "position_bias is not in FBGEMM's kernels",
    "time_bias": "time_bias is not in FBGEMM's kernels",
    "all_at_once": "position_bias is not in FBGEMM's kernels",
    "no_user_with_tokens": "position_bias is not in FBGEMM's kernels",
}


def their_mask(
    length: int, contexts: int | None, targets: int | None, group: int, window: tuple[int, int]
) -> Tensor:
    """Row by row, as the README draws it."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    history_end = length - (targets or 0)
    for row in range(length):
        left, right = window
        first = 0 if left < 0 else max(0, row - left)
        last = length if right < 0 else min(length, row + right + 1)
        seen[row, first:last] = True
        if contexts is not None and row < contexts:
            seen[row, :history_end] = True
        if targets is not None and row >= history_end:
            own_group = history_end + (row - history_end) // group * group
            seen[row, history_end:own_group] = False
    return seen


def their_fp8(x: Tensor, call: dict[str, Any]) -> Tensor:
    """What is left of rows after their quantisation; x itself with quant_mode -1."""
    mode, offsets, fp8 = call["quant_mode"], call["offsets"].tolist(), torch.float8_e4m3fn
    if mode == -1:
        return x

    def rounded(rows: Tensor, dims: tuple[int, ...]) -> Tensor:
        scale = (rows.abs().amax(dims, keepdim=True).float() / 448.0).clamp(min=1e-6)
        return (rows / scale).to(fp8).float() * scale

    if mode == 0:
        # what torch's cast does beyond 448 depends on its version: the worse of the two
        return torch.where(x.abs() <= 464, x.to(fp8).float(), float("nan"))
    if mode == 5:
        return rounded(x, (0, 1, 2))
    pieces = []
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        blocks = [x[start:end]]
        if mode in (1, 2):
            blocks = [x[at : min(at + 128, end)] for at in range(start, end, 128)]
            assert blocks or mode == 2, "index -1: the last block of a user without one"
        dims = {1: (2,), 2: (0, 2), 3: (0, 2), 4: (0, 1, 2)}[mode]
        pieces += [rounded(block, dims) for block in blocks]  # fails on nothing
    out = torch.cat(pieces)
    assert mode != 2 or out.shape == x.shape, "x_quantized shape must equal to x shape"
    return torch.cat([out, x[len(out) :].float()])


class TheirKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call):
        ctx.save_for_backward(q, k, v)
        ctx.call = call
        out, _ = their_rows(*(their_fp8(x, call) for x in (q, k, v)), call)
        return out.to(call["out_dtype"] or q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        quantized = [their_fp8(x, ctx.call) for x in ctx.saved_tensors]
        leaves = [x.detach().float().requires_grad_() for x in quantized]
        assert grad_out.stride(-1) == 1, "dout tensor must have contiguous last dimension"
        grad_out = their_fp8(grad_out, ctx.call)
        with torch.enable_grad():
            out, owned = their_rows(*leaves, ctx.call)
            grads = torch.autograd.grad(out[owned], leaves, grad_out[owned].float())
        grads = [torch.where(owned[:, None, None], g, float("nan")) for g in grads]
        return *(g.to(x.dtype) for g, x in zip(grads, ctx.saved_tensors, strict=True)), None


def their_rows(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    offsets = call["offsets"].tolist()
    pieces, owned = [], torch.zeros(q.shape[0], dtype=torch.bool)
    for user, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        length = min(end - start, call["max_seqlen"])
        counts = [None if c is None else int(c[user]) for c in (call["contexts"], call["targets"])]
        rows = slice(start, start + length)
        tile = slice(start, start + -(-length // 128) * 128)  # also what lies behind the user
        scores = torch.einsum("ihd,jhd->hij", q[rows].float(), k[tile].float()) * call["alpha"]
        seen = torch.zeros(length, scores.shape[2], dtype=torch.bool)
        seen[:, :length] = their_mask(length, *counts, call["group"], call["window"])
        weights = torch.nn.functional.silu(scores).masked_fill(~seen, 0)
        pieces.append(torch.einsum("hij,jhd->ihd", weights, v[tile].float()) / call["divisor"])
        owned[rows] = True
    out = torch.full(q.shape, float("nan"))
    return out.index_put((owned.nonzero()[:, 0],), torch.cat(pieces)), owned


def their_call(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    """Their argument checks, then their kernel."""
    offsets, window = call["offsets"], call["window"]
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape == k.shape == v.shape and q.shape[2] in (32, 64, 128, 256)
    assert call["quant_mode"] in range(-1, 6) and (call["quant_mode"] == -1 or q.shape[2] > 32)
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets.numel() > 1
    for counts in (call["contexts"], call["targets"]):
        assert counts is None or window == (-1, 0), "undefined behavior"
        assert counts is None or counts.dtype == torch.int32
        assert counts is None or counts.shape == (offsets.numel() - 1,)
    assert call["group"] > 0
    # transposed copies of one byte an element, rows a multiple of 16 bytes apart
    assert call["quant_mode"] != 1 or q.shape[0] % 16 == 0, "no TMA descriptor"
    assert isinstance(call["divisor"], int) and isinstance(call["alpha"], float)
    if q.shape[0] == 0:
        return torch.zeros_like(q)
    return TheirKernel.apply(q, k, v, call)


def make_module(
    signature: str, *, out_dtype: torch.dtype | None = None, has_fp8: bool = True
) -> ModuleType:
    def present(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        scaling_seqlen,
        num_contexts,
        num_targets,
        target_group_size=1,
        window_size=(-1, -1),
        alpha=1.0,
        rab=None,
        has_drab=False,
        kv_cache=None,
        page_offsets=None,
        page_ids=None,
        last_page_lens=None,
        func=None,
        quant_mode=-1,
    ):
        assert seqused_q is None and seqused_k is None and rab is None
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
        if quant_mode != -1 and not has_fp8:
            raise RuntimeError("This hstu attention build does not support fp8_e4m3.\nframe #0")
        divisor = max_seqlen_q if scaling_seqlen == -1 else scaling_seqlen
        return their_call(
            q,
            k,
            v,
            offsets=cu_seqlens_q,
            max_seqlen=max_seqlen_q,
            divisor=divisor,
            contexts=num_contexts,
            targets=num_targets,
            group=target_group_size,
            window=window_size,
            alpha=alpha,
            out_dtype=out_dtype,
            quant_mode=quant_mode,
        )

    def older(
        q,
        k,
        v,
        seq_offsets_q,
        seq_offsets_k,
        max_seqlen_q,
        max_seqlen_k,
        num_contexts,
        num_targets,
        target_group_size=1,
        window_size=(-1, -1),
        alpha=1.0,
        rab=None,
        has_drab=False,
        is_delta_q=False,
        descale_q=None,
        descale_k=None,
        descale_v=None,
    ):
        assert rab is None and not is_delta_q and descale_q is None
        assert max_seqlen_q < 2**20, "its grid and semaphores grow with it"
        assert torch.equal(seq_offsets_q, seq_offsets_k) and max_seqlen_q == max_seqlen_k
        return their_call(
            q,
            k,
            v,
            offsets=seq_offsets_q,
            max_seqlen=max_seqlen_q,
            divisor=max_seqlen_q,
            contexts=num_contexts,
            targets=num_targets,
            group=target_group_size,
            window=window_size,
            alpha=alpha,
            out_dtype=out_dtype,
            quant_mode=-1,
        )

    return module_with({"present": present, "older": older}[signature])


def module_with(attend: Callable[..., Any] | None) -> ModuleType:
    module = ModuleType("hstu")
    module.__spec__ = ModuleSpec("hstu", None)
    if attend is not None:
        module.hstu_attn_varlen_func = attend
    return module


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.bfloat16, extra_rows: int = 0, dim: int = DIM
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    num_rows = sum(case.lengths) + extra_rows
    leaves = {"uvqk": torch.randn(num_rows, NUM_HEADS * 4 * dim, generator=generator).to(dtype)}
    for name in ("position_bias", "time_bias"):
        if getattr(case, name):
            leaves[name] = torch.randn(NUM_HEADS, 9, generator=generator).to(dtype)
    arguments = {
        "seq_offsets": lengths_to_offsets(torch.tensor(case.lengths, dtype=torch.int64)),
        "num_contextuals": torch.tensor(case.contextuals, dtype=torch.int64),
        "num_candidates": torch.tensor(case.candidates, dtype=torch.int64),
        "max_seq_len": 300,
        "scaling_seqlen": 7.0,
        "timestamps": torch.arange(num_rows),
        **case.options,
    }
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, arguments


def attend(leaves: dict[str, Tensor], arguments: dict[str, Any], backend: str) -> Tensor:
    """On strided views of one fused tensor; "cutlass" as the op calls it, but on a CPU."""
    _, v, q, k = leaves["uvqk"].unflatten(1, (NUM_HEADS, 4, -1)).unbind(2)
    tables = {name: leaf for name, leaf in leaves.items() if name != "uvqk"}
    if backend != "cutlass":
        return public_op(q, k, v_THV=v, backend=backend, **tables, **arguments)
    others = {name: value for name, value in arguments.items() if name != "seq_offsets"}
    spec, seq_offsets = AttentionSpec(**tables, **others), arguments["seq_offsets"]
    check_arguments(q, k, v_THV=v, seq_offsets=seq_offsets, spec=spec)
    return fbgemm_impl.hstu_attention(q, k, v_THV=v, seq_offsets=seq_offsets, spec=spec)


def gradients(out: Tensor, leaves: dict[str, Tensor]) -> Tensor:
    return output_gradients(out, leaves)["uvqk"]


def assert_equals_oracle(leaves: dict[str, Tensor], arguments: dict[str, Any]) -> None:
    """To two roundings, and FP16's smallest step times the largest power of two of a rescaling."""
    expected, actual = attend(leaves, arguments, "reference"), attend(leaves, arguments, "cutlass")
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    unit = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * unit, atol=64 * 2**-24)
    expected_grad, actual_grad = gradients(expected, leaves), gradients(actual, leaves)
    scale = float(expected_grad.abs().max()) if expected_grad.numel() else 0.0
    torch.testing.assert_close(actual_grad, expected_grad, rtol=4 * unit, atol=unit * scale)
