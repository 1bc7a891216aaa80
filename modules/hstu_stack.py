"""The stack of HSTU layers between the preprocessor and the head."""

from torch import nn

from modules.hstu_config import HSTUConfig
from modules.hstu_layer import HSTULayer
from modules.jagged_sequence import JaggedSequence


class HSTUStack(nn.Module):
    """num_layers HSTU layers of one config. Parameters: layers.<i>.* (see `HSTULayer`)."""

    def __init__(self, config: HSTUConfig, num_layers: int) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(num_layers))

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence with its values (T, hidden_size) after the last layer."""
        width = sequence.values_TD.shape[-1]
        if width != self.config.hidden_size:
            raise ValueError(
                f"NetworkArgs.hidden_size is {self.config.hidden_size}, "
                f"but the token rows are {width} wide"
            )
        for layer in self.layers:
            sequence = layer(sequence)
        return sequence
