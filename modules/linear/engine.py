"""What runs a linear in FP8: the interface of the backends, without parameters of its own.

Weights and biases stay FP32 parameters of an `nn.Linear`, whatever runs, so that checkpoints,
initialisation and optimizers know nothing of FP8. An engine is attached to such a linear when the
model is built, and owns FP8 state alone.

Padding lives inside `linear`: T rows in, T rows out, T = 0 included. Rows that a product over
tokens is padded with are zeros; they enter no maximum and receive no gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.linear.recipe import LinearRecipe
from modules.linear.state import Fp8State
from ops.gated_norm import gated_norm
from ops.norm import layer_norm


class LinearEngine(nn.Module, ABC):
    """Runs one linear in FP8.

    Args:
        name: of the linear in the trunk, e.g. "stack.layers.0.input.uvqk".
        in_features: K.
        out_features: N.
        recipe: how to scale.
        state: of delayed scaling, shared by the model's engines; None for other recipes and for a
            library that keeps its own.
    """

    def __init__(
        self,
        *,
        name: str,
        in_features: int,
        out_features: int,
        recipe: LinearRecipe,
        state: Fp8State | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.in_features = in_features
        self.out_features = out_features
        self.recipe = recipe
        # past nn.Module's bookkeeping: the trunk owns it, and it must be listed once
        self.__dict__["state"] = state

    state: Fp8State | None
    scale_entry = "scale"
    """Name under which a checkpoint holds delayed scales for such an engine."""

    @property
    def is_active(self) -> bool:
        """Whether this linear runs in FP8 now: always in training, in evaluation if asked to."""
        return self.training or self.recipe.fp8_eval

    @property
    def records(self) -> bool:
        """Whether maxima are recorded: evaluation leaves FP8 state as it is."""
        return self.training

    @abstractmethod
    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Return x @ weight^T + bias, (T, N) in the dtype of x.

        Args:
            x_TK: any T; T = 0 gives gradients of zero, not none.
            weight_NK: the FP32 parameter.
            bias_N: the FP32 parameter, or None.
        """

    def norm_linear(
        self,
        x_TD: Tensor,
        norm: nn.LayerNorm,
        *,
        weight: Tensor,
        bias: Tensor | None,
        backend: str,
        recompute_norm: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return linear(layer_norm(x)), (T, X), and x for the residual.

        Args:
            x_TD: rows.
            norm: its weight, bias and eps.
            weight, bias: of the linear; no bias where a later op adds it.
            backend: of the norm, "pytorch" or "triton".
            recompute_norm: do not keep the normalised rows in training.
        """

        def run(x: Tensor) -> Tensor:
            normed = layer_norm(x, norm.weight, bias_D=norm.bias, eps=norm.eps, backend=backend)
            return self.linear(normed, weight, bias)

        if recompute_norm and self.training:
            return checkpoint(run, x_TD, use_reentrant=False), x_TD
        return run(x_TD), x_TD

    def gated_norm_linear(
        self,
        attn_THV: Tensor,
        u_THV: Tensor,
        x_TD: Tensor,
        *,
        norm: nn.LayerNorm,
        weight: Tensor,
        bias: Tensor | None,
        u_bias_HV: Tensor | None,
        dropout: float,
        backend: str,
    ) -> Tensor:
        """Return x + linear(dropout(layer_norm(attn) * u)), (T, D) in the dtype of x.

        Args:
            attn_THV, u_THV, u_bias_HV: see `ops.gated_norm.gated_norm`.
            x_TD: residual.
            norm, weight, bias, backend: as in `norm_linear`.
            dropout: probability; 0 outside of training.
        """
        gated = gated_norm(
            attn_THV,
            u_THV,
            weight=norm.weight,
            bias=norm.bias,
            eps=norm.eps,
            u_bias_HV=u_bias_HV,
            dropout=dropout,
            training=self.training,
            backend=backend,
        )
        return x_TD + self.linear(gated, weight, bias)

    def hold_weights(self, held: bool) -> None:
        """Say that no weight changes from now on (True), or that one may (False).

        In between a backend may keep its copy of a weight, whose version count does not tell:
        fused optimizers update past it.
        """

    def snapshot(self) -> object:
        """Return copies of state that a library writes during a step; None where there is none."""
        return None

    def restore(self, snapshot: object) -> None:
        """Set state as it was; takes what `snapshot` gave."""

    def fp8_state_dict(self) -> dict[str, Tensor]:
        """Return state of a library, by entry; `Fp8State` has its own."""
        return {}

    def load_fp8_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set what `fp8_state_dict` gave; an empty mapping: fresh scales."""


__all__ = ["LinearEngine"]
