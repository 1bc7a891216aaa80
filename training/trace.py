"""What a trace of `StepProfiler` says about the steps in it: waits, copies, launches, idle time.

A step's rule is one wait for the device, the finite flag's. Everything else that makes the host
wait is listed with the operators that it happened under. Needs no torch.
"""

import bisect
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_NAME = "octet::step"
"""Name of a step in a trace: all from one step's end to the next one's but what is logged."""
WAIT_NAME = "octet::finite_flag_wait"
"""Name of the step's one wait for the device."""

# CUDA calls that return only when the device has caught up.
_WAITS = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
    | {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"}
)
# They may wait for all streams, but a caching allocator makes them rare.
_ALLOCATIONS = frozenset({"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"})
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_HOST = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time, in microseconds of the trace."""

    name: str
    kind: str
    thread: Any
    start: float
    end: float
    correlation: int | None

    def holds(self, other: "Span") -> bool:
        """Whether the other one happened inside this one, on any thread."""
        return self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, kw_only=True)
class TraceFigures:
    """Counts are over all steps of the trace; those of a single step: divide by `num_steps`."""

    num_steps: int
    step_seconds: float
    """Median, with the profiler's own cost in it."""
    num_flag_waits: int
    flag_wait_host_share: float
    """Time inside the finite-flag wait over the time of the steps: mostly the device's own work."""
    flag_wait_idle_share: float
    """What the wait costs: time from the flag's copy to the device's next work, over the steps."""
    num_copies_to_host: int
    num_pageable_copies_to_device: int
    num_pinned_copies_to_device: int
    num_waits: int
    """CUDA calls that wait, those for the finite flag included."""
    num_device_reads: int
    """aten::item and the like on tensors of the device."""
    num_host_reads: int
    """The same on tensors of the host, which cost no wait."""
    num_allocations: int
    """Calls that get memory from the driver or give it back."""
    num_launches: int
    device_busy_share: float
    """Time in which at least one kernel or copy ran, over the time of the steps."""
    leftovers: Mapping[str, int] = field(default_factory=dict)
    """What else makes the host wait, with the operators around it, and how often."""


def read_trace(path: Path) -> TraceFigures:
    """The figures of a Chrome trace file.

    Raises:
        ValueError: no whole step is in the trace.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return trace_figures(events)


def trace_figures(events: Iterable[Mapping[str, Any]]) -> TraceFigures:
    """The figures of Chrome trace events; see `read_trace`."""
    spans = [_span(event) for event in events if event.get("ph") == "X"]
    host = sorted((s for s in spans if s.kind in _ON_HOST), key=lambda s: (s.start, -s.end))
    waits = [s for s in host if s.name == WAIT_NAME]
    # The last call of an epoch's pipeline finds no batch: only what waits for a flag is a step.
    steps = [s for s in host if s.name == STEP_NAME and any(s.holds(wait) for wait in waits)]
    if not steps:
        raise ValueError(
            f"the trace must hold a whole step ({STEP_NAME!r} around {WAIT_NAME!r}), got none; set "
            "TrainerArgs.profile_step_start and profile_step_end to steps that run"
        )
    waits = [wait for wait in waits if any(step.holds(wait) for step in steps)]
    host = [s for s in host if any(step.holds(s) for step in steps)]
    calls = [s for s in host if s.kind in ("cuda_runtime", "cuda_driver")]
    issued = {s.correlation for s in calls if s.correlation is not None}
    on_device = [s for s in spans if s.kind in _ON_DEVICE and s.correlation in issued]
    copies = Counter(_copy_kind(s.name) for s in on_device if s.kind == "gpu_memcpy")
    slow_copies = {
        s.correlation for s in on_device if _copy_kind(s.name) in ("to_host", "pageable")
    }
    blocking = [s for s in calls if s.name in _WAITS or s.correlation in slow_copies]
    reads = _outermost([s for s in host if s.name in _READS])
    device_reads = [s for s in reads if any(_same_thread(s, call) for call in blocking)]
    total = sum(step.end - step.start for step in steps)
    return TraceFigures(
        num_steps=len(steps),
        step_seconds=statistics.median(step.end - step.start for step in steps) / 1e6,
        num_flag_waits=len(waits),
        flag_wait_host_share=sum(wait.end - wait.start for wait in waits) / total,
        flag_wait_idle_share=sum(_idle_after(wait, calls, on_device) for wait in waits) / total,
        num_copies_to_host=copies["to_host"],
        num_pageable_copies_to_device=copies["pageable"],
        num_pinned_copies_to_device=copies["pinned"],
        num_waits=sum(s.name in _WAITS for s in calls),
        num_device_reads=len(device_reads),
        num_host_reads=len(reads) - len(device_reads),
        num_allocations=sum(s.name in _ALLOCATIONS for s in calls),
        num_launches=sum(s.name.startswith(_LAUNCHES) for s in calls),
        device_busy_share=_covered(on_device, steps) / total,
        leftovers=_leftovers(blocking, host, waits),
    )


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(
        name=event["name"],
        kind=event.get("cat", ""),
        thread=(event.get("pid"), event.get("tid")),
        start=start,
        end=start + float(event.get("dur", 0)),
        correlation=event.get("args", {}).get("correlation"),
    )


def _copy_kind(name: str) -> str:
    """Of a device copy, by CUPTI's name for it, such as "Memcpy HtoD (Pageable -> Device)"."""
    if "DtoH" in name:
        return "to_host"
    if "HtoD" in name:
        return "pageable" if "Pageable" in name else "pinned"
    return "inside"


def _same_thread(outer: Span, inner: Span) -> bool:
    return outer.thread == inner.thread and outer.holds(inner)


def _outermost(reads: Sequence[Span]) -> list[Span]:
    """Without those inside another: aten::item calls aten::_local_scalar_dense, one read."""
    return [s for s in reads if not any(o is not s and _same_thread(o, s) for o in reads)]


def _idle_after(wait: Span, calls: Sequence[Span], on_device: Sequence[Span]) -> float:
    """Microseconds from the end of the flag's copy to the device's next work."""
    asked = {call.correlation for call in calls if _same_thread(wait, call)}
    flag = [s for s in on_device if s.correlation in asked and _copy_kind(s.name) == "to_host"]
    if not flag:
        return 0.0
    arrived = max(s.end for s in flag)
    if any(s.start < arrived < s.end for s in on_device):
        return 0.0
    starts = sorted(s.start for s in on_device)
    following = bisect.bisect_left(starts, arrived)
    return starts[following] - arrived if following < len(starts) else 0.0


def _covered(on_device: Sequence[Span], steps: Sequence[Span]) -> float:
    """Microseconds of the steps in which anything ran on the device."""
    covered, until = 0.0, 0.0
    pieces = [(max(s.start, step.start), min(s.end, step.end)) for s in on_device for step in steps]
    for start, end in sorted(piece for piece in pieces if piece[0] < piece[1]):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _leftovers(
    blocking: Sequence[Span], host: Sequence[Span], waits: Sequence[Span]
) -> dict[str, int]:
    """Blocking calls outside the flag's wait, by the operators around them, outermost first."""
    found: Counter[str] = Counter()
    for call in blocking:
        if any(_same_thread(wait, call) for wait in waits):
            continue
        around = [s.name for s in host if s is not call and _same_thread(s, call)]
        found[" > ".join([*around, call.name])] += 1
    return dict(found.most_common())
