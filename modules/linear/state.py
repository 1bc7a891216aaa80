"""Delayed scaling: what a model's FP8 linears remember of their operands' maxima.

A step scales with what earlier steps saw, so no operand is read twice. While it runs, kernels fold
the largest magnitude of each operand into `amax`; once the step is known to be good on every rank,
`commit` makes history and the next scales of it, and a bad step's maxima are discarded. A maximum
of maxima does not care how often, or in how many parts, an operand is computed: gradient
accumulation and recomputation leave the same state.

Until the first commit nothing is known (`is_warm` is False): engines then scale with the present
maximum, and record it.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modules.linear.recipe import LinearRecipe
from ops.quantize import FP8_MAX, scale_from_amax

OPERANDS = ("x", "w", "dy")
"""Rows, weight, output gradient."""


class Fp8State(nn.Module):
    """Maxima, history and scales of all operands, in one tensor each: S = 3 entries a linear.

    Its buffers are no part of `state_dict`: `fp8_state_dict` names them by module, so that a
    checkpoint loads into a model with other FP8 linears, or none.

    Args:
        names: of the modules, as in the trunk.
        recipe: length and use of the history, format of the gradients.
    """

    amax: Tensor
    """(S,) float32, of the step under way. Never negative; NaN and infinity stay."""
    history: Tensor
    """(history_len, S) float32, the newest step first."""
    scale: Tensor
    """(S,) float32, what values are multiplied by before they are cast."""
    fp8_max: Tensor
    """(S,) float32, the largest finite value of the operand's format."""

    def __init__(self, names: Sequence[str], recipe: LinearRecipe) -> None:
        super().__init__()
        self.names = tuple(names)
        self.recipe = recipe
        self.is_warm = False
        self._places = {name: 3 * index for index, name in enumerate(self.names)}
        largest = [FP8_MAX[torch.float8_e4m3fn]] * 2 + [FP8_MAX[recipe.grad_dtype]]
        num_slots = 3 * len(self.names)
        for name, tensor in {
            "amax": torch.zeros(num_slots),
            "history": torch.zeros(recipe.history_len, num_slots),
            "scale": torch.ones(num_slots),
            "fp8_max": torch.tensor(largest * len(self.names)),
        }.items():
            self.register_buffer(name, tensor, persistent=False)

    def slot(self, name: str, operand: str) -> int:
        """Return where an operand ("x", "w", "dy") of a module stands."""
        return self._places[name] + OPERANDS.index(operand)

    def record(self, name: str, operand: str, magnitude: Tensor) -> None:
        """Fold a largest magnitude, scalar, into that of the step under way."""
        amax = self.amax[self.slot(name, operand)]
        amax.copy_(torch.maximum(amax, magnitude.float()))

    def commit(self, group: dist.ProcessGroup | None = None, *, had_gradients: bool = True) -> None:
        """Make history and scales of the recorded maxima. Collective; the host does not wait.

        An operand whose maxima are all zero keeps its scale.

        Args:
            group: ranks that hold parts of the same tensors, or replicas; None: all.
            had_gradients: False for a step without a label on any rank: its output gradients were
                all zero, and scales of 1 for what was never seen would flush what comes next.
        """
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(self.amax, op=dist.ReduceOp.MAX, group=group)
        if self.recipe.history_len > 1:
            self.history.copy_(self.history.roll(1, 0))
        self.history[0].copy_(self.amax)
        self.rescale()
        self.amax.zero_()
        self.is_warm |= had_gradients

    def rescale(self) -> None:
        """Make scales of the history by this recipe; one without maxima stays as it is."""
        uses_newest = self.recipe.amax_compute_algo == "most_recent"
        amax = self.history[0] if uses_newest else self.history.amax(0)
        scale = scale_from_amax(amax, self.fp8_max, margin=self.recipe.margin)
        self.scale.copy_(torch.where(amax > 0, scale, self.scale))

    def discard(self) -> None:
        """Forget the maxima of the step under way."""
        self.amax.zero_()

    def non_finite(self) -> Tensor:
        """Return whether a recorded maximum is NaN or infinite, a bool scalar on the device."""
        return ~torch.isfinite(self.amax).all()

    def first_bad(self) -> str | None:
        """Return "module: operand" of the first maximum that is not finite; waits for the device.

        In the order of a step: operands of the forward pass by module, then output gradients from
        the last module back.
        """
        bad = (~torch.isfinite(self.amax)).tolist()
        forward = [(name, operand) for name in self.names for operand in ("x", "w")]
        backward = [(name, "dy") for name in reversed(self.names)]
        for name, operand in forward + backward:
            if bad[self.slot(name, operand)]:
                return f"{name}: {operand}"
        return None


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return all FP8 state of a model by "module.entry"; {} without FP8 linears or before a step.

    Entries: "history" (history_len, 3) and "scale" (3,) of x, w, dy for delayed scaling of ours,
    and whatever an engine's library keeps.
    """
    from modules.linear.engine import LinearEngine

    found: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Fp8State) and module.is_warm:
            for name in module.names:
                at = module.slot(name, "x")
                found[f"{name}.history"] = module.history[:, at : at + 3].clone()
                found[f"{name}.scale"] = module.scale[at : at + 3].clone()
        elif isinstance(module, LinearEngine):
            entries = module.fp8_state_dict()
            found |= {f"{module.name}.{entry}": value for entry, value in entries.items()}
    return found


def load_fp8_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set what `fp8_state_dict` gave, where it fits; everything else starts fresh.

    Modules that the model does not run in FP8 are ignored. A history of another length is cut, or
    filled with zeros; scales are made of it by this model's recipe. The model counts as warm only
    if every module was found: a single scale of 1 could flush what it is used for.
    """
    from modules.linear.engine import LinearEngine

    for module in model.modules():
        if isinstance(module, Fp8State):
            _load(module, state)
        elif isinstance(module, LinearEngine):
            prefix = f"{module.name}."
            entries = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix) and key[len(prefix) :] not in ("history", "scale")
            }
            module.load_fp8_state_dict(entries)


def _load(target: Fp8State, state: Mapping[str, Tensor]) -> None:
    target.amax.zero_()
    target.history.zero_()
    target.scale.fill_(1.0)
    found = [
        name for name in target.names if f"{name}.scale" in state and f"{name}.history" in state
    ]
    for name in found:
        at = target.slot(name, "x")
        history = state[f"{name}.history"]
        rows = min(len(history), len(target.history))
        target.history[:rows, at : at + 3].copy_(history[:rows])
        target.scale[at : at + 3].copy_(state[f"{name}.scale"])
    target.rescale()  # the file's may be of another format, margin or length
    target.is_warm = len(found) == len(target.names) > 0


__all__ = ["OPERANDS", "Fp8State", "fp8_state_dict", "load_fp8_state_dict"]
