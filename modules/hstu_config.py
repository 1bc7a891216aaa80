"""What an HSTU layer is made of, resolved: no sentinel left, the backend chosen."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ops.hstu_attention import CallShape, choose_backend

if TYPE_CHECKING:
    from configs.schema import NetworkArgs


@dataclass(frozen=True, kw_only=True)
class HSTUConfig:
    """Sizes and switches of one HSTU layer; all layers of a stack share them."""

    hidden_size: int
    num_heads: int
    attention_dim: int
    """Width of q and k per head."""
    linear_dim: int
    """Width of u and v per head."""
    attention_backend: str
    """A name `ops.hstu_attention` runs, already chosen."""
    dropout: float = 0.0
    norm_epsilon: float = 1e-5
    is_causal: bool = True
    disable_contextual_mask: bool = False
    target_group_size: int = 1
    attention_window: int | None = None
    """Positions a row looks back over; None = all."""
    num_position_bias_buckets: int | None = None
    """Rows of the relative position bias; None = no such bias."""
    num_time_buckets: int | None = None
    """Rows of the time bias; None = no such bias."""
    recompute_input_layernorm: bool = False
    """Do not keep the normalised rows for the backward pass; compute them again."""
    recompute_input_silu: bool = False
    """Do not keep SiLU's output for the backward pass; compute it again. Not built yet."""
    deterministic: bool = False
    """Ask the backend for the same bits every run."""

    def __post_init__(self) -> None:
        if self.recompute_input_silu:
            raise NotImplementedError(
                "NetworkArgs.recompute_input_silu = True is not built yet; set it to False "
                "(the same numbers from more memory)"
            )

    @property
    def uvqk_features(self) -> int:
        """Return X, the width of the fused projection."""
        return self.num_heads * 2 * (self.linear_dim + self.attention_dim)

    @classmethod
    def from_network(
        cls,
        network: "NetworkArgs",
        *,
        disable_contextual_mask: bool,
        device_type: str,
        deterministic: bool = False,
    ) -> "HSTUConfig":
        """Return the layer's config as a gin file's NetworkArgs asks for it.

        Args:
            network: the user's values.
            disable_contextual_mask: resolved by the leak rule, never None.
            device_type: "cpu" or "cuda"; decides what kernel_backend = "auto" runs.
            deterministic: ask the backend for the same bits every run.

        Raises:
            ValueError, NotImplementedError: a backend that cannot run here (`choose_backend`).
        """
        linear_dim = network.linear_channels
        return cls(
            hidden_size=network.hidden_size,
            num_heads=network.num_attention_heads,
            attention_dim=network.kv_channels,
            linear_dim=network.kv_channels if linear_dim is None else linear_dim,
            attention_backend=choose_backend(
                network.kernel_backend,
                device_type=device_type,
                shape=CallShape(
                    attention_dim=network.attention_dim,
                    linear_dim=network.linear_dim,
                    dtype=getattr(torch, network.dtype_str),
                ),
            ),
            dropout=network.hidden_dropout,
            norm_epsilon=network.norm_epsilon,
            is_causal=network.is_causal,
            disable_contextual_mask=disable_contextual_mask,
            target_group_size=network.target_group_size,
            attention_window=network.attention_window,
            num_position_bias_buckets=(
                network.num_position_buckets if network.use_relative_position_bias else None
            ),
            num_time_buckets=network.num_time_buckets if network.use_time_bias else None,
            recompute_input_layernorm=network.recompute_input_layernorm,
            recompute_input_silu=network.recompute_input_silu,
            deterministic=deterministic,
        )
