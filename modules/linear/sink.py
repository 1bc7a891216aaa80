"""How a projection's gradient reaches its linear in FP8, past autograd.

SiLU's backward pass knows the gradient of the projection entry by entry, and writes it as the two
FP8 operands that the linear's backward pass multiplies. Autograd wants a tensor in the dtype of the
projection; it gets a placeholder of one entry, expanded, and the linear takes the operands from
here. A placeholder that was changed on its way, by a second reader of the projection, is an error.
"""

from torch import Tensor

from ops.quantize.operand import CastRule, Fp8Operand


class GradientSink:
    """Takes one gradient (T, X) in FP8 and hands it to the linear that made the sink.

    Args:
        rule: of the cast.
        row_multiple: of the columns of the transposed operand.
        wants_transposed: for a weight gradient in FP8.
        wants_plain: the gradient in the dtype of the rows, too.
    """

    def __init__(
        self, rule: CastRule, *, row_multiple: int, wants_transposed: bool, wants_plain: bool
    ) -> None:
        self.rule = rule
        self.row_multiple = row_multiple
        self.wants_transposed = wants_transposed
        self.wants_plain = wants_plain
        self._taken: tuple[Fp8Operand, Tensor | None] | None = None
        self._placeholder: Tensor | None = None

    def put(self, operand: Fp8Operand, plain_TX: Tensor | None, *, like_TX: Tensor) -> Tensor:
        """Take the gradient; return what to tell autograd instead, in shape and dtype of like_TX.

        Raises:
            RuntimeError: there is one already.
        """
        if self._taken is not None:
            raise RuntimeError(
                "a projection in FP8 has been read twice: its gradient cannot be added up; "
                "read it once, or clone what the second reader gets"
            )
        self._taken = operand, plain_TX
        self._placeholder = like_TX.new_zeros(1)
        return self._placeholder.expand(like_TX.shape)

    def take(self, grad_TX: Tensor) -> tuple[Fp8Operand, Tensor | None] | None:
        """Return what was put, None where nothing was and grad_TX is the gradient itself.

        Args:
            grad_TX: what autograd brings.

        Raises:
            RuntimeError: something was put, and autograd brings another gradient.
        """
        taken, placeholder = self._taken, self._placeholder
        self._taken = self._placeholder = None
        if taken is None or placeholder is None:
            return None
        if grad_TX.data_ptr() != placeholder.data_ptr() or any(grad_TX.stride()):
            raise RuntimeError(
                "the gradient of a projection in FP8 was changed between SiLU and the linear, by "
                "a second reader of the projection or a hook; read it once, without hooks"
            )
        return taken


def gradient_sink(uvqk_TX: Tensor) -> GradientSink | None:
    """Return the sink of the linear that made uvqk, None where it takes a plain gradient."""
    sink = getattr(uvqk_TX.grad_fn, "gradient_sink", None)
    return sink if isinstance(sink, GradientSink) else None


__all__ = ["GradientSink", "gradient_sink"]
