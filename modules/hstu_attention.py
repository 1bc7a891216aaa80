"""Attention of an HSTU layer: from the fused projection to the attention output and the gate u."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modules.hstu_config import HSTUConfig
from modules.jagged_sequence import JaggedSequence
from modules.linear.parallel import GradientKind, mark
from modules.linear.sink import GradientSink
from ops.hstu_attention import AttentionSpec, hstu_attention, hstu_attention_from_uvqk
from ops.silu_split import RecomputedActivation, silu_split


class HSTUAttention(nn.Module):
    """uvqk_TX, sequence -> attn_THV, u_THV. Parameters: the bias tables, where switched on."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.position_bias = _table(config, config.num_position_bias_buckets)
        self.time_bias = _table(config, config.num_time_buckets)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the bias tables of all heads from torch's default generator: normal(0, 0.02)."""
        parallel = self.config.parallel
        for table in (self.position_bias, self.time_bias):
            if table is not None:
                whole = table.new_empty(self.config.num_heads, table.shape[1])
                nn.init.normal_(whole, std=0.02)
                table.copy_(whole if parallel is None else parallel.own(whole, 0))

    def forward(
        self,
        uvqk_TX: Tensor,
        sequence: JaggedSequence,
        *,
        bias_X: Tensor | None = None,
        gradient_target: GradientSink | None = None,
        recomputed: RecomputedActivation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return attn_THV and u_THV in the dtype of uvqk.

        With bias_X, u is handed out before bias and SiLU, which its gate applies (`silu_split`).

        Args:
            uvqk_TX: X = own heads * 2 * (linear_dim + attention_dim), head-major [u | v | q | k].
            sequence: offsets, counts and times; its values are not read.
            bias_X: added to uvqk first (`NormLinear.left_bias`).
            gradient_target: takes uvqk's gradient in FP8 (`modules.linear.sink`).
            recomputed: entered by the caller; told of SiLU's output, so that it is not kept. FP8
                kernels keep none, and with it quantise again instead of keeping codes.
        """
        config = self.config
        fp8 = config.attention_fp8 if self.training or config.fp8_eval else None
        if fp8 is not None and config.attention_backend == "triton" and bias_X is not None:
            return hstu_attention_from_uvqk(
                uvqk_TX,
                bias_X=bias_X,
                num_heads=config.num_heads,
                seq_offsets=sequence.seq_offsets_B1,
                spec=AttentionSpec(**self._call(sequence), fp8=fp8),
                gradient_target=gradient_target,
                recompute=recomputed is not None,
            )
        activate = partial(
            silu_split,
            num_heads=config.num_own_heads,
            attention_dim=config.attention_dim,
            linear_dim=config.linear_dim,
            bias_X=bias_X,
            activates_u=bias_X is None,
            backend=config.elementwise_backend,
        )
        u_THV, v_THV, q_THA, k_THA = activate(uvqk_TX, gradient_target=gradient_target)
        if recomputed is not None:
            rows = uvqk_TX.detach()
            recomputed.watch(v_THV, lambda: activate(rows)[1])
        attn_THV = hstu_attention(
            q_THA,
            k_THA,
            v_THV=v_THV,
            seq_offsets=sequence.seq_offsets_B1,
            backend=config.attention_backend,
            fp8=fp8,
            **self._call(sequence),
        )
        return attn_THV, u_THV

    def _call(self, sequence: JaggedSequence) -> dict[str, Any]:
        """Return mask, divisor and biases as `hstu_attention` and `AttentionSpec` name them."""
        config = self.config
        return {
            "max_seq_len": sequence.max_seq_len,
            "scaling_seqlen": sequence.scaling_seqlen,
            "num_contextuals": sequence.num_contextuals_B,
            "num_candidates": sequence.num_candidates_B,
            "target_group_size": config.target_group_size,
            "is_causal": config.is_causal,
            "disable_contextual_mask": config.disable_contextual_mask,
            "attention_window": config.attention_window,
            "timestamps": sequence.timestamps_T,
            "position_bias": self.position_bias,
            "time_bias": self.time_bias,
            "deterministic": config.deterministic,
        }


def _table(config: HSTUConfig, num_buckets: int | None) -> nn.Parameter | None:
    if num_buckets is None:
        return None
    table = nn.Parameter(torch.zeros(config.num_own_heads, num_buckets))
    return table if config.parallel is None else mark(table, GradientKind.PART, dim=0)
