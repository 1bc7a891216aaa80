"""One HSTU layer (HSTU, arXiv 2402.17152, section 3)."""

from torch import nn
from torch.utils.checkpoint import checkpoint

from modules.hstu_attention import HSTUAttention
from modules.hstu_config import HSTUConfig
from modules.jagged_sequence import JaggedSequence
from modules.linear import GatedNormLinear, NormLinear


class HSTULayer(nn.Module):
    """Three fused boundaries: x -> uvqk -> (attention, u) -> x + proj(norm(attention) * u).

    Parameters: input.norm.*, input.uvqk.*, attention.*_bias, output.norm.*, output.proj.*.
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        eps = config.norm_epsilon
        self.input = NormLinear(config.hidden_size, config.uvqk_features, eps=eps)
        self.attention = HSTUAttention(config)
        self.output = GatedNormLinear(
            config.num_heads * config.linear_dim,
            config.hidden_size,
            eps=eps,
            dropout=config.dropout,
        )

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence with its values (T, hidden_size) after this layer."""
        x_TD = sequence.values_TD
        if self.config.recompute_input_layernorm and self.training:
            # the linear's input is the last tensor kept, so its GEMM is not run again
            uvqk_TX = checkpoint(self.input, x_TD, use_reentrant=False)
        else:
            uvqk_TX = self.input(x_TD)
        attn_THV, u_THV = self.attention(uvqk_TX, sequence)
        return sequence.with_values(self.output(attn_THV, u_THV, x_TD))
