"""The stack of HSTU layers between the preprocessor and the head."""

from torch import nn

from modules.hstu_config import HSTUConfig
from modules.hstu_layer import HSTULayer, ParallelHSTULayer
from modules.jagged_sequence import JaggedSequence


class HSTUStack(nn.Module):
    """num_layers HSTU layers of one config. Parameters: layers.<i>.* (see `HSTULayer`)."""

    def __init__(self, config: HSTUConfig, num_layers: int) -> None:
        super().__init__()
        self.config = config
        layer_class = HSTULayer if config.parallel is None else ParallelHSTULayer
        self.layers = nn.ModuleList(layer_class(config) for _ in range(num_layers))

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence with its values (T, hidden_size) after the last layer."""
        width = sequence.values_TD.shape[-1]
        if width != self.config.hidden_size:
            raise ValueError(
                f"NetworkArgs.hidden_size is {self.config.hidden_size}, "
                f"but the token rows are {width} wide"
            )
        parallel = self.config.parallel
        if parallel is not None and parallel.splits_tokens:
            rows = parallel.scatter_tokens(sequence.values_TD)
            for layer in self.layers:
                rows = layer.rows(rows, sequence)
            num_rows = sequence.num_tokens
            return sequence.with_values(parallel.gather_tokens(rows, num_rows, is_replicated=True))
        for layer in self.layers:
            sequence = layer(sequence)
        return sequence
