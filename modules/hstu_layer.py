"""One HSTU layer (HSTU, arXiv 2402.17152, section 3)."""

import contextlib

from torch import Tensor, nn

from modules.hstu_attention import HSTUAttention
from modules.hstu_config import HSTUConfig
from modules.jagged_sequence import JaggedSequence
from modules.linear import GatedNormLinear, NormLinear
from modules.linear.parallel import ParallelGatedNormLinear, ParallelNormLinear
from modules.linear.sink import gradient_sink
from ops.silu_split import RecomputedActivation


class HSTULayer(nn.Module):
    """Three fused boundaries: x -> uvqk -> (attention, u) -> x + proj(norm(attention) * u).

    Parameters: input.norm.*, input.uvqk.*, attention.*_bias, output.norm.*, output.proj.*.
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.input = self._before(config)
        self.attention = HSTUAttention(config)
        self.output = self._behind(config)

    def _before(self, config: HSTUConfig) -> NormLinear:
        return NormLinear(
            config.hidden_size,
            config.uvqk_features,
            eps=config.norm_epsilon,
            backend=config.elementwise_backend,
            recompute_norm=config.recompute_input_layernorm,
        )

    def _behind(self, config: HSTUConfig) -> GatedNormLinear:
        return GatedNormLinear(
            config.num_heads * config.linear_dim,
            config.hidden_size,
            eps=config.norm_epsilon,
            dropout=config.dropout,
            backend=config.elementwise_backend,
        )

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence with its values (T, hidden_size) after this layer."""
        return sequence.with_values(self.rows(sequence.values_TD, sequence))

    def rows(self, x_TD: Tensor, sequence: JaggedSequence) -> Tensor:
        """Return x after this layer.

        Args:
            x_TD: token rows; with sequence parallelism those of this rank.
            sequence: offsets, counts and times of all tokens; its values are not read.
        """
        uvqk_TX, residual_TD = self._projected(x_TD, sequence)
        bias_X = self.input.left_bias
        u_bias_HV = None
        if bias_X is not None:
            heads = bias_X.detach().view(self.config.num_heads, -1)
            u_bias_HV = heads[:, : self.config.linear_dim]
        recomputed = None
        if self.config.recompute_input_silu and self.training:
            recomputed = RecomputedActivation()
        with recomputed or contextlib.nullcontext():
            attn_THV, u_THV = self.attention(
                uvqk_TX,
                sequence,
                bias_X=bias_X,
                gradient_target=gradient_sink(uvqk_TX),
                recomputed=recomputed,
            )
            return self.output(attn_THV, u_THV, residual_TD, u_bias_HV=u_bias_HV)

    def _projected(self, x_TD: Tensor, sequence: JaggedSequence) -> tuple[Tensor, Tensor]:
        return self.input(x_TD)


class ParallelHSTULayer(HSTULayer):
    """The layer with its heads split over the ranks of `HSTUConfig.parallel`; same parameters."""

    def _before(self, config: HSTUConfig) -> NormLinear:
        assert config.parallel is not None
        return ParallelNormLinear(
            config.hidden_size,
            config.uvqk_features,
            eps=config.norm_epsilon,
            parallel=config.parallel,
            recompute_norm=config.recompute_input_layernorm,
        )

    def _behind(self, config: HSTUConfig) -> GatedNormLinear:
        assert config.parallel is not None
        return ParallelGatedNormLinear(
            config.num_heads * config.linear_dim,
            config.hidden_size,
            eps=config.norm_epsilon,
            dropout=config.dropout,
            parallel=config.parallel,
        )

    def _projected(self, x_TD: Tensor, sequence: JaggedSequence) -> tuple[Tensor, Tensor]:
        return self.input(x_TD, num_rows=sequence.num_tokens)
