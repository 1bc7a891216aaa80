"""The prediction head: a small multi-layer perceptron that runs in FP32, in FP8 where asked to."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modules.linear.engine import LinearEngine

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class MLP(nn.Module):
    """Linear layers with an activation (and dropout) between them, none after the last.

    Args:
        in_features: width D of the input.
        widths: output width of every layer; the last one is the number of logits.
        activation: "relu" or "gelu".
        bias: whether the layers have a bias.
        dropout: probability of zeroing a hidden activation.

    Raises:
        ValueError: no widths, or an unknown activation.
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        *,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not widths:
            raise ValueError("MLP.widths must name at least one layer, got none")
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"MLP.activation must be one of {sorted(_ACTIVATIONS)}, got {activation!r}"
            )
        layers: list[nn.Module] = []
        for index, width in enumerate(widths):
            layers.append(nn.Linear(in_features, width, bias=bias))
            if index < len(widths) - 1:
                layers += [_ACTIVATIONS[activation](), nn.Dropout(dropout)]
            in_features = width
        self.layers = nn.Sequential(*layers)
        self.engines = nn.ModuleDict()

    def attach(self, index: int, engine: LinearEngine) -> None:
        """Run the linear `layers[index]` by an FP8 engine."""
        self.engines[str(index)] = engine

    def engine_of(self, linear: nn.Linear) -> LinearEngine | None:
        """Return what runs a linear of `layers` in FP8, None for nothing."""
        return self._engine_at(list(self.layers).index(linear))

    def forward(self, x_ED: Tensor) -> Tensor:
        """Logits of shape (E, widths[-1]), float32, whatever the dtype of ``x_ED``."""
        x = x_ED.to(torch.float32)
        if not self.engines:
            return self.layers(x)
        for index, layer in enumerate(self.layers):
            engine = self._engine_at(index)
            if engine is not None and engine.is_active and isinstance(layer, nn.Linear):
                x = engine.linear(x, layer.weight, layer.bias)
            else:
                x = layer(x)
        return x

    def _engine_at(self, index: int) -> LinearEngine | None:
        if str(index) not in self.engines:
            return None
        engine = self.engines[str(index)]
        assert isinstance(engine, LinearEngine)
        return engine
