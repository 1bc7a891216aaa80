"""Settings of FP8: which linears, which attention, which scaling."""

from dataclasses import dataclass
from typing import Annotated, Literal

from configs.rules import (
    CheckedArgs,
    ConfigError,
    Name,
    NonNegativeInt,
    PositiveInt,
    Range,
    Spellings,
)

RECIPES_OF_BACKEND: dict[str, tuple[str, ...]] = {
    "te": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "native": ("delayed", "tensorwise", "rowwise", "blockwise"),
    "emulated": ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"),
}
"""linear_backend -> the linear_recipe values it has."""

RECOMMENDED_ATTENTION_MODE = "per_block"
"""What hstu_attn_quantization_mode = "recommended" stands for: the only place that says so."""

_ATTENTION_SPELLINGS = Spellings(
    (
        (None, "bf16"),
        ("recommended", RECOMMENDED_ATTENTION_MODE),
        ("fp8", "cast"),
        ("1xdim", "per_row"),
        ("128x1", "per_row"),
        ("per-block", "per_block"),
        ("per-head", "per_head"),
        ("per-batch", "per_batch"),
        ("per-tensor", "per_tensor"),
    )
)


_KNOWN_WRONG = (
    (
        "linear_scaling_precision",
        "e5m2",
        "'hybrid' or 'e4m3'",
        "two mantissa bits are too few for activations and weights, choose one of these",
    ),
    (
        "fp8_alignment_mode",
        "truncate",
        "'pad'",
        "truncating cuts real tokens while their labels and candidate counts stay, use 'pad'",
    ),
)


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionArgs(CheckedArgs):
    """FP8 training. Without mixed_precision_dtype = "fp8" none of the other fields has an effect.

    Linears and attention are switched separately: linear_recipe = None (or
    linear_scaling_precision = None) leaves every linear in BF16, hstu_attn_quantization_mode =
    "bf16" leaves the attention.
    """

    mixed_precision_dtype: Annotated[Literal["fp8"] | None, Spellings((("", None),))] = None
    """fp8 switches the fields below on; None = everything runs in NetworkArgs.dtype_str."""

    linear_backend: Literal["te", "native", "emulated"] = "te"
    """te: Transformer Engine. native: our quantisers and scaled GEMMs. emulated: rounds to FP8 and
    multiplies in higher precision, on any device."""

    linear_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] | None = (
        "tensorwise"
    )
    """How scales are found. delayed: from past steps; tensorwise: one per tensor, current; rowwise:
    one per row; blockwise: 128x1 and 128x128; mxfp8: one per 32 (Blackwell). None = BF16."""

    linear_scaling_precision: Literal["hybrid", "e4m3", "e5m2"] | None = "hybrid"
    """hybrid: e4m3 forward, e5m2 gradients. e4m3: both. e5m2 is refused. None = linears stay
    BF16."""

    amax_history_len: PositiveInt = 1024
    """Steps a delayed scale looks back."""

    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Which amax of that history counts."""

    margin: Annotated[int, Range(low=0, high=8)] = 0
    """A delayed scale leaves 2 ** margin of headroom, which its smallest values pay for."""

    fp8_wgrad: bool = True
    """Weight gradients of FP8 linears are FP8 GEMMs too."""

    filter_modules: tuple[Name, ...] = ()
    """A linear whose module name contains one of these stays BF16."""

    auto_filter_small: bool = True
    """A linear too small for FP8 to win at batch size x max_seq_len stays BF16."""

    first_last_layers_bf16: bool = False
    """The linears of the first and last HSTU layers stay BF16, as many as the next two say."""

    num_layers_at_start_in_bf16: NonNegativeInt = 1
    """First layers kept in BF16 by first_last_layers_bf16."""

    num_layers_at_end_in_bf16: NonNegativeInt = 1
    """Last layers kept in BF16 by first_last_layers_bf16."""

    enable_fp8_for_prediction_head: bool = False
    """The linears of the prediction head are FP8 where their width allows."""

    hstu_attn_quantization_mode: Annotated[
        Literal["bf16", "cast", "per_row", "per_block", "per_head", "per_batch", "per_tensor"],
        _ATTENTION_SPELLINGS,
    ] = "bf16"
    """Scales of q, k, v in the attention, independent of the linears. bf16: not quantised; cast:
    none, values saturate; per_block: one per 128 tokens of a user and head; per_head: one per user
    and head; per_batch: one per user. Also accepted: recommended (per_block), fp8 (cast), 1xdim and
    128x1 (per_row), per-block, per-head, per-batch, per-tensor."""

    auto_filter_attention: bool = True
    """Attention with heads or sequences too small for FP8 to win at max_seq_len stays BF16; with
    kernel_backend = "auto" on a GPU so does what FP8 kernels lack."""

    fp8_alignment_mode: Literal["pad", "truncate"] = "pad"
    """How rows reach the multiple FP8 needs; padding lives inside the linear only. truncate is
    refused."""

    fp8_eval: bool = False
    """Evaluation runs in FP8 too."""

    fp8_log_interval: PositiveInt | None = None
    """Steps between records in fp8.jsonl and TensorBoard: of every FP8 linear's operands the amax,
    the scale and which share is rounded to zero or saturates. None = never; the steps between are
    not slowed down."""

    @property
    def has_fp8_linears(self) -> bool:
        """Linears are asked to run in FP8."""
        named = self.linear_recipe is not None and self.linear_scaling_precision is not None
        return self.mixed_precision_dtype == "fp8" and named

    @property
    def has_fp8_attention(self) -> bool:
        """The attention is asked to run in FP8."""
        return self.mixed_precision_dtype == "fp8" and self.hstu_attn_quantization_mode != "bf16"

    @property
    def num_bf16_layers_at_start(self) -> int:
        """First layers whose linears stay BF16."""
        return self.num_layers_at_start_in_bf16 if self.first_last_layers_bf16 else 0

    @property
    def num_bf16_layers_at_end(self) -> int:
        """Last layers whose linears stay BF16."""
        return self.num_layers_at_end_in_bf16 if self.first_last_layers_bf16 else 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixed_precision_dtype is None:
            return
        for field, value, allowed, reason in _KNOWN_WRONG:
            if getattr(self, field) == value:
                name = f"MixedPrecisionArgs.{field}"
                raise ConfigError(f"{name} must be {allowed}, got {value!r}; {reason}", name)
        if not self.has_fp8_linears and not self.has_fp8_attention:
            raise ConfigError(
                "MixedPrecisionArgs.mixed_precision_dtype must be None when neither linears nor "
                "attention run in FP8, got 'fp8'; set linear_recipe or hstu_attn_quantization_mode",
                "MixedPrecisionArgs.mixed_precision_dtype",
                "MixedPrecisionArgs.linear_recipe",
                "MixedPrecisionArgs.linear_scaling_precision",
                "MixedPrecisionArgs.hstu_attn_quantization_mode",
            )
        self._check_formats()
        recipes = RECIPES_OF_BACKEND[self.linear_backend]
        if self.has_fp8_linears and self.linear_recipe not in recipes:
            others = [repr(n) for n, has in RECIPES_OF_BACKEND.items() if self.linear_recipe in has]
            raise ConfigError(
                f"MixedPrecisionArgs.linear_recipe must be one of {', '.join(recipes)} with "
                f"linear_backend = {self.linear_backend!r}, got {self.linear_recipe!r}; choose one "
                f"of these or set linear_backend = {' or '.join(others)}",
                "MixedPrecisionArgs.linear_recipe",
                "MixedPrecisionArgs.linear_backend",
            )

    def _check_formats(self) -> None:
        is_native_blockwise = (self.linear_backend, self.linear_recipe) == ("native", "blockwise")
        if (
            self.has_fp8_linears
            and is_native_blockwise
            and self.linear_scaling_precision == "hybrid"
        ):
            raise ConfigError(
                "MixedPrecisionArgs.linear_scaling_precision must be 'e4m3' with linear_backend = "
                "'native' and linear_recipe = 'blockwise', got 'hybrid'; products with a scale a "
                "block exist for E4M3 alone: set 'e4m3', or linear_backend = 'te'",
                "MixedPrecisionArgs.linear_scaling_precision",
                "MixedPrecisionArgs.linear_recipe",
                "MixedPrecisionArgs.linear_backend",
            )
