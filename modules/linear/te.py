"""FP8 linears by Transformer Engine: its kernels and its scales, on our FP32 parameters.

What is built on here was read in Transformer Engine 2.8 to 2.20 (module/base.py, module/linear.py,
quantization.py or fp8.py, common/recipe/delayed_scaling.cu):

* A parameter may differ in dtype from the rows only under ``torch.autocast``, whose dtype is then
  that of the result. Weights are quantised from FP32; gradients come in the rows' dtype.
* FP8 needs rows divisible by 8 (16 in the weight gradient) and widths by 16. Rows of zeros enter
  no maximum.
* Delayed scaling: quantising raises row 0 of a module's amax history, in forward and in backward,
  whatever grad mode is. Leaving the region turns row 0 into history and a scale for what the
  forward pass quantised, if gradients are on; the backward pass of the region's first module does
  so for gradients. Both reduce the maxima of *every* module seen so far, so a rank that has skipped
  one, for want of tokens, would wait forever: no rows are padded too, not skipped.
* All delayed scales are 1 in the first step: gradients below 1e-5 are lost there, once.
* ``get_extra_state`` pickles, and versions from 2.18 on refuse to load that. So scales and history
  are read and written as the tensors they are.
* Outside the region a module runs in the rows' dtype without a word; here that is an error.
"""

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modules.linear.engine import LinearEngine
from modules.linear.fused import weight_gradient
from modules.linear.recipe import LinearRecipe
from modules.linear.watch import is_watched, observe
from ops.quantize import FP8_MAX, Quantized, quantize

_BROKEN = (ImportError, RuntimeError, OSError, AssertionError)
"""What importing an absent, empty or half installed Transformer Engine raises."""

_GRANULARITIES = {
    "delayed": {"x": "tensor", "w": "tensor"},
    "tensorwise": {"x": "tensor", "w": "tensor"},
    "blockwise": {"x": "1x128", "w": "128x128"},
    "mxfp8": {"x": "1x32", "w": "1x32"},
}
"""What shares a scale in rows and gradients, and in weights."""

_STATE = {"fwd": "scaling_fwd", "bwd": "scaling_bwd"}
"""Suffix in our checkpoints -> key of ``fp8_meta``."""


class TeEngine(LinearEngine):
    """Runs `linear` as a ``transformer_engine.pytorch.Linear`` whose parameters are ours.

    Runs only inside ``training.precision.fp8_autocast``. Under recomputation nothing is run again:
    what Transformer Engine keeps of the rows is their FP8 copy.
    """

    scale_entry = "scale_fwd"
    _module: Any = None
    _pending: Mapping[str, Tensor] | None = None

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Return x @ weight^T + bias, (T, N) in the dtype of x; any T.

        Gradients of weight and bias have passed through the dtype of x, that of the weight has not
        where ``fp8_wgrad`` is off.

        Raises:
            RuntimeError: outside of the FP8 region.
        """
        module = self._module_for(weight_NK, bias_N)
        num_tokens = x_TK.shape[0]
        missing = _missing_rows(num_tokens, self.recipe.row_multiple)
        rows_PK = F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK
        pending = None if self.records else self._pending_amax()
        with torch.autocast(x_TK.device.type, x_TK.dtype, enabled=x_TK.dtype != torch.float32):
            out_PN = module(rows_PK)
        if not module.fp8:
            raise RuntimeError(
                f"the FP8 linear {self.name!r} ran outside of training.precision.fp8_autocast; "
                "enter the region around the forward pass"
            )
        if not self.records:
            self._put_pending_amax(pending)
        out_TN = out_PN[:num_tokens] if missing else out_PN
        if is_watched() and self.records:
            self._show(x_TK, weight_NK, out_TN)
        if self.recipe.fp8_wgrad or not torch.is_grad_enabled():
            return out_TN
        return _WithPlainWeightGradient.apply(out_TN, x_TK, weight_NK)

    def norm_linear(
        self,
        x_TD: Tensor,
        norm: nn.LayerNorm,
        *,
        weight: Tensor,
        bias: Tensor | None,
        backend: str,
        recompute_norm: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return (uvqk_TX, residual_TD); see `LinearEngine.norm_linear`.

        recompute_norm has nothing to do: the norm keeps its input and the linear an FP8 copy.
        """
        return super().norm_linear(
            x_TD, norm, weight=weight, bias=bias, backend=backend, recompute_norm=False
        )

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of scales and history, none before the first step."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def restore(self, snapshot: object) -> None:
        """Set scales and history as they were."""
        assert isinstance(snapshot, Mapping)
        self.load_fp8_state_dict(snapshot)

    def fp8_state_dict(self) -> dict[str, Tensor]:
        """Return copies of scale_fwd, history_fwd, scale_bwd, history_bwd; delayed scaling only.

        A scale has one entry for each of input, weight, output or output's gradient, input's
        gradient. Row 0 of a history (history_len, entries) is the step under way, the last row the
        last step. largest_bwd (1,): of the gradients' format, which scale_bwd is for.
        """
        state = self.snapshot()
        if "scale_bwd" in state and "largest_bwd" not in state:
            largest = FP8_MAX[self.recipe.grad_dtype]
            state["largest_bwd"] = state["scale_bwd"].new_full((1,), largest)
        return state

    def load_fp8_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set what `fp8_state_dict` gave, also of another history_len; empty: fresh scales."""
        if self.recipe.scaling != "delayed":
            return
        if self._module is None:
            self._pending = dict(state)
            return
        _initialise(self._module, self.recipe)
        for suffix, key in _STATE.items():
            meta = self._module.fp8_meta[key]
            with torch.no_grad():
                meta.scale.copy_(state.get(f"scale_{suffix}", meta.scale.new_ones(())))
                _copy_history(state.get(f"history_{suffix}"), meta.amax_history)
                if suffix == "bwd" and "largest_bwd" in state:  # the file's format may be another
                    largest = FP8_MAX[self.recipe.grad_dtype]
                    meta.scale.mul_(largest / state["largest_bwd"].to(meta.scale))

    def _state(self) -> Mapping[str, Tensor]:
        """The live tensors; what is still to be loaded; or nothing."""
        if self._module is None:
            return self._pending or {}
        metas = {suffix: self._module.fp8_meta.get(key) for suffix, key in _STATE.items()}
        return {
            name: tensor
            for suffix, meta in metas.items()
            if self.recipe.scaling == "delayed" and meta is not None
            for name, tensor in (
                (f"scale_{suffix}", meta.scale),
                (f"history_{suffix}", meta.amax_history),
            )
        }

    def _pending_amax(self) -> Tensor | None:
        """A copy of the maxima of the step under way, which an evaluation must not raise."""
        history = self._state().get("history_fwd")
        return None if history is None else history[0].clone()

    def _put_pending_amax(self, pending: Tensor | None) -> None:
        history = self._state().get("history_fwd")
        if history is not None:
            with torch.no_grad():
                history[0].zero_() if pending is None else history[0].copy_(pending)

    def _show(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Tell a Watch of the operands, quantised again by the same rule.

        Transformer Engine's own copies are out of reach. Its blockwise scales are powers of two,
        those shown are not.
        """
        observe(self.name, "x", x, self._quantized(x, "x"))
        observe(self.name, "w", weight, self._quantized(weight, "w"))
        if out.requires_grad:
            out.register_hook(
                lambda grad: observe(self.name, "dy", grad, self._quantized(grad, "dy"))
            )

    def _quantized(self, values: Tensor, operand: str) -> Quantized:
        suffix, slot = {"x": ("fwd", 0), "w": ("fwd", 1), "dy": ("bwd", 0)}[operand]
        scale = self._state().get(f"scale_{suffix}")
        return quantize(
            values.detach(),
            self.recipe.grad_dtype if operand == "dy" else torch.float8_e4m3fn,
            granularity=_GRANULARITIES[self.recipe.scaling]["w" if operand == "w" else "x"],
            scale=None if scale is None else scale[slot].clone(),
        )

    def _module_for(self, weight: Tensor, bias: Tensor | None) -> Any:
        """The vendor's module, on these parameters; built when it is known if there is a bias."""
        module = self._module
        if module is None:
            # on "meta" it allocates and draws nothing: its parameters are replaced right below
            module = load_te().Linear(
                self.in_features, self.out_features, bias=bias is not None, device="meta"
            )
            # past nn.Module's bookkeeping: whose parameters would be listed twice
            self.__dict__["_module"] = module
            if self._pending is not None:
                self.load_fp8_state_dict(self._pending)
                self._pending = None
        if module.use_bias != (bias is not None):
            raise RuntimeError(f"the FP8 linear {self.name!r} got a bias in some calls only")
        if not self.recipe.fp8_wgrad:
            module.weight = nn.Parameter(weight.detach(), requires_grad=False)
        elif module.weight is not weight:
            module.weight = weight
        if bias is not None and module.bias is not bias:
            module.bias = bias
        return module


class _WithPlainWeightGradient(torch.autograd.Function):
    """Passes out_TN through and adds the weight's gradient, from rows that were not quantised."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return out."""
        ctx.save_for_backward(x)
        ctx.weight_dtype = weight.dtype
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the gradients of out, x (none by this way) and weight."""
        (x,) = ctx.saved_tensors
        return grad, None, weight_gradient(grad, x, dtype=ctx.weight_dtype)


def load_te() -> ModuleType:
    """Return transformer_engine.pytorch.

    Raises:
        RuntimeError: it is absent, older than 2.0 or does not load, with the first line of why.
    """
    try:
        version = importlib.import_module("transformer_engine").__version__
        te = importlib.import_module("transformer_engine.pytorch")
        reason = f"found version {version}"
        if int(version.split(".")[0]) >= 2:
            return te
    except _BROKEN as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise RuntimeError(
        'MixedPrecisionArgs.linear_backend = "te" needs the package transformer_engine 2.x with '
        f"its torch extension, which is not what loads here: {reason}"
    )


@functools.cache
def te_recipe(recipe: LinearRecipe) -> Any:
    """Return Transformer Engine's recipe for ours.

    Raises:
        NotImplementedError: Transformer Engine has no such recipe.
    """
    load_te()
    recipes = importlib.import_module("transformer_engine.common.recipe")
    is_hybrid = recipe.grad_dtype == torch.float8_e5m2
    fp8_format = recipes.Format.HYBRID if is_hybrid else recipes.Format.E4M3
    if recipe.scaling == "delayed":
        return recipes.DelayedScaling(
            margin=recipe.margin,
            fp8_format=fp8_format,
            amax_history_len=recipe.history_len,
            amax_compute_algo=recipe.amax_compute_algo,
        )
    names = {
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    kind = getattr(recipes, names.get(recipe.scaling, ""), None)
    if kind is None:
        raise NotImplementedError(
            f'MixedPrecisionArgs.linear_recipe = "{recipe.scaling}" is not in this version of '
            "Transformer Engine"
        )
    return kind(fp8_format=fp8_format)


def _missing_rows(num_tokens: int, multiple: int) -> int:
    """Rows of zeros up to the next multiple; no rows at all become one multiple."""
    return multiple if num_tokens == 0 else -num_tokens % multiple


def _initialise(module: Any, recipe: LinearRecipe) -> None:
    """Allocate scales and history, as the first forward pass would."""
    if "scaling_fwd" in module.fp8_meta:
        return
    module.fp8_meta["num_gemms"] = 1
    module.fp8_meta["recipe"] = te_recipe(recipe)
    module.init_fp8_meta_tensors(te_recipe(recipe))


def _copy_history(source: Tensor | None, history: Tensor) -> None:
    """Copy what fits, the newest steps first; row 0 is the step under way."""
    history.zero_()
    if source is None:
        return
    history[0].copy_(source[0])
    num_steps = min(len(source), len(history)) - 1
    if num_steps:
        history[-num_steps:].copy_(source[-num_steps:])


__all__ = ["TeEngine", "load_te", "te_recipe"]
