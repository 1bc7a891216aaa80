"""What an HSTU layer is made of, resolved: no sentinel left, the backend chosen."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ops.hstu_attention import CallShape, Fp8Spec, choose_backend
from ops.hstu_attention.dispatch import available_backends
from ops.norm import refuse_unsupported

if TYPE_CHECKING:
    from configs.schema import MixedPrecisionArgs, NetworkArgs
    from modules.linear.parallel import TensorParallel

logger = logging.getLogger(__name__)


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
    elementwise_backend: str = "pytorch"
    """What runs norms, SiLU, the gate and dropout: "pytorch" or "triton", already chosen."""
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
    """Do not keep SiLU's output for the backward pass; compute it again."""
    deterministic: bool = False
    """Ask the backend for the same bits every run."""
    attention_fp8: Fp8Spec | None = None
    """How the attention is quantised in training; None = not at all."""
    fp8_eval: bool = False
    """Evaluation quantises too."""
    parallel: "TensorParallel | None" = None
    """The ranks that heads are split over; None = each has all of them."""

    @property
    def num_own_heads(self) -> int:
        """Return the heads that this rank computes."""
        return self.num_heads // (1 if self.parallel is None else self.parallel.size)

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
        max_num_users: int | None = None,
        max_seq_len: int | None = None,
        precision: "MixedPrecisionArgs | None" = None,
        parallel: "TensorParallel | None" = None,
    ) -> "HSTUConfig":
        """Return the layer's config as a gin file's NetworkArgs asks for it.

        Args:
            network: the user's values.
            disable_contextual_mask: resolved by the leak rule, never None.
            device_type: "cpu" or "cuda"; decides what kernel_backend = "auto" runs.
            deterministic: ask the backend for the same bits every run.
            max_num_users, max_seq_len: of the largest batch and its longest user, in tokens; None
                leaves the index range to the first call that passes it.
            precision: asks for FP8 attention, or not; None = not.
            parallel: the ranks that heads are split over; norms and gates then run in PyTorch.

        Raises:
            ValueError, NotImplementedError: a backend that cannot run here (`choose_backend`).
        """
        linear_dim = network.linear_channels
        fp8 = None
        if precision is not None and precision.has_fp8_attention:
            fp8 = Fp8Spec(mode=precision.hstu_attn_quantization_mode)
        attention_backend = choose_backend(
            network.kernel_backend,
            device_type=device_type,
            shape=_call_shape(
                network,
                disable_contextual_mask=disable_contextual_mask,
                deterministic=deterministic,
                max_num_users=max_num_users,
                max_seq_len=max_seq_len,
                fp8=fp8,
            ),
        )
        return cls(
            hidden_size=network.hidden_size,
            num_heads=network.num_attention_heads,
            attention_dim=network.kv_channels,
            linear_dim=network.kv_channels if linear_dim is None else linear_dim,
            attention_backend=attention_backend,
            elementwise_backend=(
                _elementwise_backend(attention_backend, network) if parallel is None else "pytorch"
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
            attention_fp8=fp8,
            fp8_eval=precision is not None and precision.fp8_eval,
            parallel=parallel,
        )


def refusal_of_fp8_kernels(
    network: "NetworkArgs",
    precision: "MixedPrecisionArgs",
    *,
    device_type: str,
    max_num_users: int | None = None,
    max_seq_len: int | None = None,
) -> str | None:
    """Return why our kernels do not have the FP8 attention that is asked for, None where they do.

    What keeps our Triton kernels from running at all counts, too. Which masks a model needs has no
    part in it.
    """
    shape = _call_shape(
        network,
        disable_contextual_mask=False,
        deterministic=False,
        max_num_users=max_num_users,
        max_seq_len=max_seq_len,
        fp8=Fp8Spec(mode=precision.hstu_attn_quantization_mode),
    )
    return available_backends(device_type, shape)["triton"]


def _call_shape(
    network: "NetworkArgs",
    *,
    disable_contextual_mask: bool,
    deterministic: bool,
    max_num_users: int | None,
    max_seq_len: int | None,
    fp8: Fp8Spec | None,
) -> CallShape:
    """Return what is known of the attention calls, for a backend to refuse them now."""
    return CallShape(
        attention_dim=network.attention_dim,
        linear_dim=network.linear_dim,
        dtype=getattr(torch, network.dtype_str),
        num_heads=network.num_attention_heads,
        max_num_users=max_num_users,
        max_seq_len=max_seq_len,
        target_group_size=network.target_group_size,
        is_causal=network.is_causal,
        disable_contextual_mask=disable_contextual_mask,
        attention_window=network.attention_window,
        has_position_bias=network.use_relative_position_bias,
        has_time_bias=network.use_time_bias,
        deterministic=deterministic,
        fp8=fp8,
    )


def _elementwise_backend(attention_backend: str, network: "NetworkArgs") -> str:
    """Return what runs beside an attention backend: Triton beside a kernel, PyTorch beside PyTorch.

    Raises:
        NotImplementedError: rows that our Triton kernels do not have, and kernel_backend names one;
            under "auto" PyTorch runs them, and the log says why.
    """
    if attention_backend == "pytorch":
        return "pytorch"
    reason = None if find_spec("triton") else "the package triton is not installed"
    widths = {
        "NetworkArgs.hidden_size": network.hidden_size,
        "NetworkArgs.num_attention_heads * linear_channels": (
            network.num_attention_heads * network.linear_dim
        ),
    }
    for name, width in widths.items():
        refusal = refuse_unsupported(width, dtype=getattr(torch, network.dtype_str))
        reason = reason or (refusal and f"{name}: {refusal}")
    if reason is not None and network.kernel_backend == "auto":
        logger.info('NetworkArgs.kernel_backend = "auto" runs norms in "pytorch" (%s)', reason)
        return "pytorch"
    if reason is not None:
        raise NotImplementedError(
            f"NetworkArgs.kernel_backend = {network.kernel_backend!r} cannot run: {reason}; "
            'set NetworkArgs.kernel_backend = "pytorch" or another size'
        )
    return "triton"
