"""A transformer_engine for machines without a GPU: what our adapter relies on, in plain torch.

It follows Transformer Engine 2.20 where our code can trip over it: which dtypes may meet, which
shapes are refused, when maxima are recorded and scales change, what happens outside of the region,
under no_grad and across ranks. Its arithmetic is per-tensor quantise-dequantise whatever the recipe
(blockwise and MXFP8 differ from tensorwise only in what they ask of the shapes).

    te = te_stand_in.install(monkeypatch)
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Format(enum.Enum):
    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclasses.dataclass
class _Recipe:
    fp8_format: Format = Format.HYBRID

    rows_divide = 8

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)


@dataclasses.dataclass
class DelayedScaling(_Recipe):
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True


@dataclasses.dataclass
class Float8CurrentScaling(_Recipe):
    pass


@dataclasses.dataclass
class Float8BlockScaling(_Recipe):
    pass


@dataclasses.dataclass
class MXFP8BlockScaling(_Recipe):
    rows_divide = 32


class _State:
    """What the library keeps for the whole process."""

    def __init__(self) -> None:
        self.enabled = False
        self.recipe: Any = None
        self.group: Any = None
        self.is_first_module = False
        self.depth = 0
        # of every module that ever ran: maxima are reduced over ranks in this order
        self.scales: Mapping[str, list[_Scales]] = {"scaling_fwd": [], "scaling_bwd": []}

    def update(self, key: str) -> None:
        """Reduces the maxima of all modules, makes history of them and scales of that."""
        known = self.scales[key]
        if not known:
            return
        amax = torch.cat([scales.amax_history[0] for scales in known])
        recipe, group = known[0].recipe, known[0].group
        reduces = recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1
        if reduces:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        for scales, own in zip(known, amax.split([s.scale.numel() for s in known]), strict=True):
            scales.commit(own)


STATE = _State()


class _Scales:
    """Scales and maxima of a module in one direction, delayed scaling."""

    def __init__(self, recipe: Any, group: Any, count: int, is_forward: bool) -> None:
        self.recipe, self.group = recipe, group
        self.fp8_max = FP8_MAX[recipe.fp8_format.value[0 if is_forward else 1]]
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(recipe.amax_history_len, count)

    def commit(self, amax: Tensor) -> None:
        history = self.amax_history
        rolls = amax != 0
        history[:, rolls] = torch.cat([history[1:], amax[None]])[:, rolls]
        newest = amax if self.recipe.amax_compute_algo == "most_recent" else history.amax(0)
        # the library's fmaxf passes over NaN, its scale stays for what is not finite
        usable = newest.isfinite() & (newest > 0)
        fresh = self.fp8_max / newest / 2**self.recipe.margin
        fresh = fresh.clamp(max=torch.finfo(torch.float32).max)
        self.scale.copy_(torch.where(usable, fresh, self.scale))
        history[0].zero_()


class Region:
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
    ) -> None:
        assert not calibrating
        self._new = (enabled, recipe, amax_reduction_group)

    def __enter__(self) -> Region:
        self._old = (STATE.enabled, STATE.recipe, STATE.group, STATE.is_first_module)
        STATE.enabled, STATE.recipe, STATE.group = self._new
        STATE.is_first_module = STATE.is_first_module or STATE.depth == 0
        STATE.depth += 1
        return self

    def __exit__(self, *unused: object) -> None:
        STATE.enabled, STATE.recipe, STATE.group, STATE.is_first_module = self._old
        STATE.depth -= 1
        if self._new[0] and STATE.depth == 0 and torch.is_grad_enabled():
            STATE.update("scaling_fwd")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        x_q = module.quantise(x, "scaling_fwd", 0)
        weight_q = module.quantise(weight, "scaling_fwd", 1)
        ctx.save_for_backward(x_q, weight_q)
        ctx.module, ctx.dtype, ctx.has_bias = module, module.activation_dtype, bias is not None
        ctx.recipe, ctx.fp8 = module.recipe, module.fp8
        ctx.is_first = module.fp8 and module.is_grad_enabled and STATE.is_first_module
        if ctx.is_first:
            STATE.is_first_module = False
        out = x_q @ weight_q.t()
        if bias is not None:
            out = out + bias.to(ctx.dtype).float()
        return out.to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        module = ctx.module
        x_q, weight_q = ctx.saved_tensors
        module.seen_grads.append(grad.detach().clone())
        grad_q = module.quantise(grad, "scaling_bwd", 0, fp8=ctx.fp8, recipe=ctx.recipe)
        needs_weight = ctx.needs_input_grad[0]
        result = (
            (grad_q.t() @ x_q).to(ctx.dtype) if needs_weight else None,
            (grad_q @ weight_q).to(ctx.dtype),
            grad.float().sum(0).to(ctx.dtype) if ctx.has_bias else None,
            None,
        )
        if ctx.is_first:
            STATE.update("scaling_bwd")
        return result


class Linear(nn.Module):
    """Takes only what our adapter passes; parameters on "meta" stay undrawn."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, device: str = "cuda"
    ) -> None:
        super().__init__()
        assert device == "meta", "this stand-in draws no parameters"
        self.use_bias = bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}
        self.activation_dtype: torch.dtype | None = None
        self.recipe: Any = None
        self.is_registered = False
        self.seen_rows: list[Tensor] = []
        self.seen_grads: list[Tensor] = []

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        assert self.fp8_meta["num_gemms"] == 1
        if not recipe.delayed() or "scaling_fwd" in self.fp8_meta:
            return
        self.fp8_meta["scaling_fwd"] = _Scales(recipe, STATE.group, 3, is_forward=True)
        self.fp8_meta["scaling_bwd"] = _Scales(recipe, STATE.group, 2, is_forward=False)

    def forward(self, x: Tensor) -> Tensor:
        self._set_activation_dtype(x)
        self.fp8, self.recipe = STATE.enabled, STATE.recipe
        self.is_grad_enabled = torch.is_grad_enabled()
        if self.fp8:
            self._prepare_fp8(x)
        self.seen_rows.append(x.detach().clone())
        return _Linear.apply(self.weight, x, self.bias if self.use_bias else None, self)

    def _set_activation_dtype(self, x: Tensor) -> None:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            self.activation_dtype = torch.get_autocast_dtype(kind)
            return
        for name, parameter in self.named_parameters():
            if parameter.dtype != x.dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {x.dtype} and {name!r} dtype: {parameter.dtype}"
                )
        self.activation_dtype = x.dtype

    def _prepare_fp8(self, x: Tensor) -> None:
        for tensor, rows in ((x, self.recipe.rows_divide), (self.weight, 8)):
            # 16 in the weight gradient, where tokens are what is summed over
            if tensor.shape[0] % max(rows, 16) or tensor.shape[1] % 16:
                raise ValueError(
                    "FP8 execution requires the product of all dimensions except the last to be "
                    f"divisible by 8 and the last by 16, but got {list(tensor.shape)}"
                )
        self.fp8_meta["num_gemms"] = 1
        self.init_fp8_meta_tensors(self.recipe)
        if self.recipe.delayed() and not self.is_registered:
            self.is_registered = True
            for key, known in STATE.scales.items():
                # a state loaded beforehand did not know the group yet
                self.fp8_meta[key].group = STATE.group
                known.append(self.fp8_meta[key])

    def quantise(
        self, x: Tensor, key: str, slot: int, *, fp8: bool | None = None, recipe: Any = None
    ) -> Tensor:
        """What the matrix product sees of x, in float32; outside of a region, x in its dtype."""
        recipe = recipe or self.recipe
        if not (self.fp8 if fp8 is None else fp8):
            return x.to(self.activation_dtype).float()
        fp8_dtype = recipe.fp8_format.value[0 if key == "scaling_fwd" else 1]
        fp8_max = FP8_MAX[fp8_dtype]
        values = x.detach().float()
        amax = values.abs().amax() if values.numel() else values.new_zeros(())
        if recipe.delayed():
            scales = self.fp8_meta[key]
            scale = scales.scale[slot].clone()
            scales.amax_history[0, slot].clamp_(min=amax)
        else:
            scale = torch.where(amax > 0, fp8_max / amax, 1.0)
        return (values * scale).clamp(-fp8_max, fp8_max).to(fp8_dtype).float() / scale


def install(monkeypatch: pytest.MonkeyPatch, *, is_old: bool = False) -> SimpleNamespace:
    """Make `import transformer_engine` find this file, with fresh state.

    is_old: with the region's name from before 2.9 only.
    """
    STATE.__init__()  # type: ignore[misc]
    names = ["", ".pytorch", ".common", ".common.recipe"]
    modules = {f"transformer_engine{name}": ModuleType(name) for name in names}
    root, torch_part, common, recipe = modules.values()
    root.__version__ = "2.8.0" if is_old else "2.20.2"
    root.pytorch, root.common, common.recipe = torch_part, common, recipe
    torch_part.Linear = Linear
    if is_old:
        torch_part.fp8_autocast = lambda enabled, fp8_recipe, fp8_group: Region(
            enabled=enabled, recipe=fp8_recipe, amax_reduction_group=fp8_group
        )
    else:
        torch_part.autocast = Region
    recipes = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
    for part in (Format, *recipes):
        setattr(recipe, part.__name__, part)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(state=STATE, recipe=recipe)
