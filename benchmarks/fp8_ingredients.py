"""What a naive build of FP8 linears with FP8 attention does wrong, one thing at a time.

Each ingredient is a context in which the emulated linears and the emulated attention lack one
protection, or the model carries rows that this code base does not let in. Nothing here is used by
the product: `benchmarks/fp8_iteration_64.py` trains with them, and
`tests/training/test_fp8_ingredients.py` shows by them that each protection is needed.

What an allocation without initialisation holds is what was freed last: `Recycled` stands for it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import modules.hstu_attention as attention_module
from modules.hstu_stack import HSTUStack
from modules.jagged_sequence import JaggedSequence
from modules.linear.emulated import EmulatedEngine
from ops.hstu_attention import emulated_impl
from ops.quantize import Quantized, reference

MULTIPLE = 16
"""Rows that an FP8 product takes."""
PAD_VALUE = 1e4
"""In alignment rows that nobody cleared, where they enter a maximum."""
_E4M3 = torch.float8_e4m3fn
# half a step beyond the largest number
_FIRST_BEYOND = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}


class Recycled:
    """Memory that was freed and is handed out again without being cleared; zeros at first."""

    def __init__(self, *, is_read_as_fp8: bool) -> None:
        self._freed: dict[str, Tensor] = {}
        self._is_read_as_fp8 = is_read_as_fp8

    def free(self, kind: str, values: Tensor) -> None:
        """Keep what an allocation of this kind held."""
        self._freed[kind] = values.detach().clone()

    def rows(self, kind: str, like: Tensor) -> Tensor:
        """Return rows shaped as `like` with what was freed: as it was, or its bytes as E4M3."""
        freed = self._freed.get(kind)
        if freed is None or not freed.numel():
            return torch.zeros_like(like)
        flat = freed.reshape(-1)
        if self._is_read_as_fp8:  # allocated with 8 bits a value, then widened
            flat = flat.view(torch.uint8).view(_E4M3).to(like.dtype)
        repeats = -(-like.numel() // flat.numel())
        return flat.repeat(repeats)[: like.numel()].view(like.shape)


class _Tail(torch.autograd.Function):
    """Leaves the rows past the last offset as they were allocated, in output and gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, memory: Recycled, num_owned: int) -> Tensor:
        ctx.memory, ctx.num_owned = memory, num_owned
        out = out.clone()
        out[num_owned:] = memory.rows("out", out[num_owned:])
        memory.free("out", out[:num_owned])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _GradientTail(torch.autograd.Function):
    """The same for the gradient of q, k or v."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Recycled, num_owned: int, kind: str) -> Tensor:
        ctx.memory, ctx.num_owned, ctx.kind = memory, num_owned, kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.clone()
        grad[ctx.num_owned :] = ctx.memory.rows(ctx.kind, grad[ctx.num_owned :])
        ctx.memory.free(ctx.kind, grad[: ctx.num_owned])
        return grad, None, None, None


@contextmanager
def alignment_rows() -> Iterator[None]:
    """Rows of zeros up to a multiple of 16 travel through the whole stack, owned by no user."""

    def padded(sequence: JaggedSequence) -> Tensor:
        return F.pad(sequence.values_TD, (0, 0, 0, -sequence.num_tokens % MULTIPLE))

    with _rows_of_stack(padded):
        yield


@contextmanager
def truncated_rows() -> Iterator[None]:
    """Rows cut to a multiple of 16; labels, candidate counts and what is asked for stay.

    Rows that are read past the end hold what the stack gave out before.
    """

    def cut(sequence: JaggedSequence) -> Tensor:
        return sequence.values_TD[: sequence.num_tokens // MULTIPLE * MULTIPLE]

    with _rows_of_stack(cut):
        yield


@contextmanager
def _rows_of_stack(change: Callable[[JaggedSequence], Tensor]) -> Iterator[None]:
    """The stack runs on other rows than its sequence has, and hands out as many as it was given."""
    plain, memory = HSTUStack.forward, Recycled(is_read_as_fp8=False)

    def forward(self: HSTUStack, sequence: JaggedSequence) -> JaggedSequence:
        values = change(sequence)
        num_rows, given = values.shape[0], sequence.num_tokens
        offsets = sequence.seq_offsets_B1.clamp(max=num_rows)
        lengths = offsets.diff()
        # counts above the length, which attention here refuses, stand for counts up to it
        contextuals = sequence.num_contextuals_B.minimum(lengths)
        with mock.patch.object(JaggedSequence, "__post_init__", lambda self: None):
            out = plain(
                self,
                replace(
                    sequence,
                    values_TD=values,
                    seq_offsets_B1=offsets,
                    num_contextuals_B=contextuals,
                    num_candidates_B=sequence.num_candidates_B.minimum(lengths - contextuals),
                    timestamps_T=_resized(sequence.timestamps_T, num_rows),
                ),
            ).values_TD
        kept = out[: min(num_rows, given)]
        behind = memory.rows("stack", kept.new_empty(given - kept.shape[0], kept.shape[1]))
        memory.free("stack", kept)
        return sequence.with_values(torch.cat([kept, behind]))

    with mock.patch.object(HSTUStack, "forward", forward):
        yield


def _resized(x: Tensor | None, num_rows: int) -> Tensor | None:
    if x is None:
        return None
    return F.pad(x, (0, max(0, num_rows - x.shape[0])))[:num_rows]


@contextmanager
def undefined_tail(*, is_read_as_fp8: bool) -> Iterator[None]:
    """Rows past the last offset keep what memory held, in attention's output and gradients."""
    memory = Recycled(is_read_as_fp8=is_read_as_fp8)

    def around(attend: Callable[..., Tensor], q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
        num_owned = int(arguments["seq_offsets"][-1])
        q, k, v = (
            _GradientTail.apply(x, memory, num_owned, kind)
            for x, kind in ((q, "dq"), (k, "dk"), (arguments["v_THV"], "dv"))
        )
        return _Tail.apply(attend(q, k, **(arguments | {"v_THV": v})), memory, num_owned)

    with alignment_rows(), _around_attention(around):
        yield


@contextmanager
def _around_attention(around: Callable[..., Tensor]) -> Iterator[None]:
    attend = attention_module.hstu_attention
    with mock.patch.object(attention_module, "hstu_attention", functools.partial(around, attend)):
        yield


@contextmanager
def float16_output() -> Iterator[None]:
    """The kernel's output, and so its gradient, pass through FP16."""

    def around(attend: Callable[..., Tensor], q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
        return attend(q, k, **arguments).to(torch.float16).to(q.dtype)

    with _around_attention(around):
        yield


@contextmanager
def raw_attention_casts() -> Iterator[None]:
    """q, k and v are cast as they are: no scale, no saturation."""
    plain = emulated_impl._quantize

    def quantize(x: Tensor, *arguments: Any, **fields: Any) -> Any:
        if fields.get("factor") == 1.0:  # the output's gradient
            return plain(x, *arguments, **fields)
        return _cast_as_they_are(x, *arguments)

    with mock.patch.object(emulated_impl, "_quantize", quantize):
        yield


@contextmanager
def unscaled_gradient() -> Iterator[None]:
    """The output's gradient is cast without a scale: what is below 2**-10 becomes zero."""
    plain = emulated_impl._quantize

    def quantize(x: Tensor, *arguments: Any, **fields: Any) -> Any:
        if fields.get("factor") == 1.0:
            return _cast_as_they_are(x, *arguments)
        return plain(x, *arguments, **fields)

    with mock.patch.object(emulated_impl, "_quantize", quantize):
        yield


def _cast_as_they_are(
    x: Tensor, fp8_dtype: torch.dtype, granularity: str, offsets: tuple[int, ...]
) -> Any:
    rows = x[: offsets[-1]].float()
    ones = rows.new_ones(rows.shape[0], 1, 1)
    return emulated_impl._Rows(codes=raw_cast(rows, fp8_dtype), scale_inv=ones, factor=1.0)


def raw_cast(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return the nearest codes, NaN beyond the largest: a conversion not told to saturate.

    Whether torch's own saturates depends on its version. (In E5M2 it would be infinity.)
    """
    codes = x.to(fp8_dtype).float()
    codes = torch.where(x.abs() < _FIRST_BEYOND[fp8_dtype], codes, x.new_tensor(torch.nan).float())
    return codes.to(fp8_dtype)


@contextmanager
def raw_linear_casts() -> Iterator[None]:
    """Operands of the linears are scaled by what past steps saw, and cast without saturation."""
    plain = reference.quantize

    def quantize(x: Tensor, fp8_dtype: torch.dtype, **fields: Any) -> Quantized:
        saturated = plain(x, fp8_dtype, **fields)
        scale = fields["scale"]
        if scale is None:  # of the present maximum: nothing is beyond it
            return saturated
        return replace(saturated, values=raw_cast(x.float() * scale, fp8_dtype))

    with mock.patch.object(reference, "quantize", quantize):
        yield


@contextmanager
def pads_in_amax() -> Iterator[None]:
    """Alignment rows of a linear are not cleared, and their values enter its maxima."""
    plain = EmulatedEngine.seen

    def seen(
        self: EmulatedEngine, values: Tensor, operand: str, *, is_right: bool = False
    ) -> Tensor:
        has_pads = operand != "w" and values.shape[0] % MULTIPLE > 0
        if has_pads and self.records and self.state is not None:
            self.state.record(self.name, operand, values.new_tensor(PAD_VALUE))
        return plain(self, values, operand, is_right=is_right)

    with mock.patch.object(EmulatedEngine, "seen", seen):
        yield


@contextmanager
def everything() -> Iterator[None]:
    """All of them, but truncation, which leaves no rows to align."""
    with ExitStack() as stack:
        for enter in (
            float16_output,
            raw_casts_and_unscaled_gradient,
            raw_linear_casts,
            pads_in_amax,
            functools.partial(undefined_tail, is_read_as_fp8=True),
        ):
            stack.enter_context(enter())
        yield


def raw_casts_and_unscaled_gradient() -> AbstractContextManager[None]:
    """Casts without scales on both sides of the attention."""
    return mock.patch.object(
        emulated_impl, "_quantize", lambda x, *arguments, **_: _cast_as_they_are(x, *arguments)
    )


@dataclass(frozen=True, kw_only=True)
class Ingredient:
    """One thing done wrong."""

    context: Callable[[], AbstractContextManager[None]]
    what: str


INGREDIENTS: Mapping[str, Ingredient] = {
    "alignment rows": Ingredient(
        context=alignment_rows, what="zero rows up to a multiple of 16 in the whole stack"
    ),
    "undefined tail": Ingredient(
        context=functools.partial(undefined_tail, is_read_as_fp8=False),
        what="alignment rows, left unwritten by attention: old values of the same kind",
    ),
    "recycled NaN": Ingredient(
        context=functools.partial(undefined_tail, is_read_as_fp8=True),
        what="the same, old bytes read as E4M3",
    ),
    "truncation": Ingredient(
        context=truncated_rows, what="rows cut to a multiple of 16, labels and counts left"
    ),
    "raw casts, attention": Ingredient(
        context=raw_attention_casts,
        what="q, k, v cast without scale or saturation (beyond 448 it would be NaN)",
    ),
    "raw casts, linears": Ingredient(
        context=raw_linear_casts, what="delayed scales without saturation"
    ),
    "pads in amax": Ingredient(
        context=pads_in_amax, what=f"alignment rows of {PAD_VALUE:g} enter the linears' maxima"
    ),
    "FP16 output": Ingredient(
        context=float16_output, what="attention's output and its gradient through FP16"
    ),
    "dO unscaled": Ingredient(
        context=unscaled_gradient, what="attention's output gradient cast as it is"
    ),
    "all but truncation": Ingredient(context=everything, what="together"),
}

__all__ = ["INGREDIENTS", "MULTIPLE", "PAD_VALUE", "Ingredient", "Recycled"]
