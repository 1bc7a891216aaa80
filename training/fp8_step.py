"""FP8 state around a step: judged with it, committed after it, or as it was before it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modules.linear.engine import LinearEngine
from modules.linear.state import Fp8State
from modules.linear.watch import OperandFigures, Watch
from training.precision import fp8_autocast


class Fp8Step:
    """What a train step does about FP8; without FP8 linears every method does nothing.

    Delayed scaling records maxima while a step runs. They become history and scales only once
    the step is known to be good on every rank; of a bad step nothing stays.

    Args:
        trunk: whose engines and state these are.
        watch_interval: steps between looks at operands, None = never.
    """

    def __init__(self, trunk: nn.Module, *, watch_interval: int | None = None) -> None:
        modules = list(trunk.modules())
        self._engines = [module for module in modules if isinstance(module, LinearEngine)]
        self._state = next((module for module in modules if isinstance(module, Fp8State)), None)
        self._recipe = self._engines[0].recipe if self._engines else None
        self._watch_interval = watch_interval if self._engines else None
        self._snapshots: list[object] = []
        self._watch: Watch | None = None

    def region(self) -> AbstractContextManager[object]:
        """What a forward pass runs in, and a backward pass does not."""
        return fp8_autocast(self._recipe)

    @contextmanager
    def phase_one(self, step: int) -> Iterator[None]:
        """Around all forward and backward passes of a step, before anything is updated."""
        # Where a library writes scales in forward and backward, they are copied first.
        self._snapshots = [engine.snapshot() for engine in self._engines]
        interval = self._watch_interval
        is_watched = interval is not None and step % interval == 0
        self._watch = Watch() if is_watched else None
        with weights_held(self._engines), self._watch or nullcontext():
            yield

    def with_health(self, health: Tensor) -> Tensor:
        """The figure a rank is judged by; NaN where a recorded maximum is not finite."""
        if self._state is None:
            return health
        return torch.where(self._state.non_finite(), torch.nan, health)

    def first_bad(self) -> str | None:
        """The first operand of this rank whose maximum is not finite; waits for the device."""
        return None if self._state is None else self._state.first_bad()

    def commit(self, *, num_labels: float) -> None:
        """Turns maxima into scales after a good step. Collective; the host does not wait.

        num_labels: of all ranks.
        """
        self._snapshots = []
        if self._state is not None:
            self._state.commit(had_gradients=num_labels > 0)

    def undo(self) -> None:
        """Leaves state as it was before the step."""
        for engine, snapshot in zip(self._engines, self._snapshots, strict=True):
            engine.restore(snapshot)
        self._snapshots = []
        if self._state is not None:
            self._state.discard()

    def figures(self) -> tuple[OperandFigures, ...]:
        """Operands of the step over all ranks if it was watched, else none. Collective, waits."""
        if self._watch is None:
            return ()
        own, self._watch = self._watch.figures(), None
        world_size = dist.get_world_size()
        if world_size == 1:
            return tuple(own)
        of_ranks: list[list[OperandFigures]] = [[] for _ in range(world_size)]
        dist.all_gather_object(of_ranks, own)
        return merged(of_ranks)


@contextmanager
def weights_held(engines: Sequence[LinearEngine]) -> Iterator[None]:
    """Around what changes no weight: each is cast once in it."""
    for engine in engines:
        engine.hold_weights(True)
    try:
        yield
    finally:
        for engine in engines:
            engine.hold_weights(False)


def merged(of_ranks: list[list[OperandFigures]]) -> tuple[OperandFigures, ...]:
    """Figures of all ranks in one: largest amax (a NaN stays), smallest scale, sums of counts."""
    found: dict[tuple[str, str], OperandFigures] = {}
    for figures in (one for rank in of_ranks for one in rank):
        key = (figures.module, figures.operand)
        before = found.get(key)
        if before is None:
            found[key] = figures
            continue
        amaxes = torch.tensor([before.amax, figures.amax], dtype=torch.float64)
        found[key] = replace(
            before,
            amax=float(amaxes.amax()),
            scale=min(before.scale, figures.scale),
            num_values=before.num_values + figures.num_values,
            num_underflowed=before.num_underflowed + figures.num_underflowed,
            num_saturated=before.num_saturated + figures.num_saturated,
        )
    return tuple(found.values())
