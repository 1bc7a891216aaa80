"""How FP8 linears scale and round, resolved from the settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from configs.schema import MixedPrecisionArgs

_ROW_MULTIPLES = {"mxfp8": 32, "blockwise": 128}


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """What all FP8 linears of a model have in common (DESIGN.md section 6)."""

    backend: str
    """"te", "native" or "emulated"."""
    scaling: str
    """"delayed", "tensorwise", "rowwise", "blockwise" or "mxfp8"."""
    grad_dtype: torch.dtype
    """Of output gradients: float8_e5m2 for hybrid, float8_e4m3fn for e4m3. Activations and weights
    are always float8_e4m3fn."""
    history_len: int = 1024
    """Steps a delayed scale looks back."""
    amax_compute_algo: str = "max"
    """"max" of the history, or its "most_recent" entry."""
    margin: int = 0
    """A delayed scale leaves 2 ** margin of headroom."""
    fp8_wgrad: bool = True
    """Weight gradients are FP8 products too."""
    fp8_eval: bool = False
    """Evaluation runs in FP8 too."""

    @property
    def row_multiple(self) -> int:
        """Rows that a product over tokens is padded to a multiple of."""
        return _ROW_MULTIPLES.get(self.scaling, 16)

    @classmethod
    def from_args(cls, args: "MixedPrecisionArgs") -> "LinearRecipe | None":
        """Return the recipe that a gin file asks for, None where no linear runs in FP8."""
        if not args.has_fp8_linears:
            return None
        assert args.linear_recipe is not None
        is_hybrid = args.linear_scaling_precision == "hybrid"
        return cls(
            backend=args.linear_backend,
            scaling=args.linear_recipe,
            grad_dtype=torch.float8_e5m2 if is_hybrid else torch.float8_e4m3fn,
            history_len=args.amax_history_len,
            amax_compute_algo=args.amax_compute_algo,
            margin=args.margin,
            fp8_wgrad=args.fp8_wgrad,
            fp8_eval=args.fp8_eval,
        )
