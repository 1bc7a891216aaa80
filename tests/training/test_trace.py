"""Counting in a trace: a hand-made one whose figures are known, and one of a real CPU run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import synthetic_experiment
from training.distributed import World
from training.trace import STEP_NAME, WAIT_NAME, read_trace, trace_figures
from training.trainer import Trainer


def event(name: str, kind: str, start: float, dur: float, **more: Any) -> dict[str, Any]:
    args = {"correlation": more.pop("correlation")} if "correlation" in more else {}
    fields = {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": dur, "pid": 1, "tid": 1}
    return fields | {"args": args} | more


def call(name: str, start: float, correlation: int, **more: Any) -> dict[str, Any]:
    return event(name, "cuda_runtime", start, 1, correlation=correlation, **more)


def device(name: str, kind: str, start: float, dur: float, correlation: int) -> dict[str, Any]:
    return event(name, kind, start, dur, correlation=correlation, tid=7)


def one_step(begin: float = 0.0, number: int = 0) -> list[dict[str, Any]]:
    """100 us: a pinned copy and a kernel, the flag at 50, a kernel behind it."""
    ids = [10 * number + n for n in range(1, 6)]
    return [
        event(STEP_NAME, "user_annotation", begin, 100),
        call("cudaMemcpyAsync", begin + 1, ids[0]),
        device("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", begin + 5, 5, ids[0]),
        call("cudaLaunchKernel", begin + 3, ids[1]),
        device("forward", "kernel", begin + 10, 30, ids[1]),
        event(WAIT_NAME, "user_annotation", begin + 20, 32),
        event("aten::to", "cpu_op", begin + 21, 30),
        call("cudaMemcpyAsync", begin + 22, ids[2]),
        device("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", begin + 45, 5, ids[2]),
        call("cudaStreamSynchronize", begin + 24, ids[3]),
        event("aten::item", "cpu_op", begin + 60, 2),
        event("aten::_local_scalar_dense", "cpu_op", begin + 60.5, 1),
        call("cudaLaunchKernelExC", begin + 65, ids[4], tid=2),
        device("optimizer", "kernel", begin + 70, 10, ids[4]),
    ]


def test_a_clean_step_has_the_flag_alone() -> None:
    figures = trace_figures([*one_step(), *one_step(200.0, 1), {"ph": "M", "name": "thread"}])
    assert figures.num_steps == figures.num_flag_waits == 2
    assert figures.step_seconds == pytest.approx(100e-6)
    assert figures.flag_wait_host_share == pytest.approx(0.32)
    assert figures.flag_wait_idle_share == pytest.approx(0.20)  # 50 to 70
    assert figures.num_copies_to_host == figures.num_waits == 2
    assert (figures.num_pinned_copies_to_device, figures.num_pageable_copies_to_device) == (2, 0)
    assert (figures.num_device_reads, figures.num_host_reads) == (0, 2)
    assert figures.num_launches == 4
    assert figures.device_busy_share == pytest.approx(0.50)
    assert figures.leftovers == {}


HIDDEN = {
    "an item": (
        [
            event("aten::item", "cpu_op", 80, 10),
            event("aten::_local_scalar_dense", "cpu_op", 81, 8),
            call("cudaMemcpyAsync", 82, 100),
            device("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 83, 1, 100),
            call("cudaStreamSynchronize", 84, 101),
        ],
        {"num_copies_to_host": 2, "num_waits": 2, "num_device_reads": 1, "num_host_reads": 1},
        [
            f"{STEP_NAME} > aten::item > aten::_local_scalar_dense > cudaMemcpyAsync",
            f"{STEP_NAME} > aten::item > aten::_local_scalar_dense > cudaStreamSynchronize",
        ],
    ),
    "a pageable copy": (
        [
            event("aten::copy_", "cpu_op", 80, 10),
            call("cudaMemcpyAsync", 82, 100),
            device("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 83, 1, 100),
        ],
        {"num_pageable_copies_to_device": 1, "num_waits": 1},
        [f"{STEP_NAME} > aten::copy_ > cudaMemcpyAsync"],
    ),
    "a wait in the thread of backward": (
        [call("cudaDeviceSynchronize", 82, 100, tid=2)],
        {"num_waits": 2},
        ["cudaDeviceSynchronize"],
    ),
    "after the step": ([call("cudaDeviceSynchronize", 120, 100)], {"num_waits": 1}, []),
}


@pytest.mark.parametrize(("extra", "counts", "leftovers"), HIDDEN.values(), ids=HIDDEN)
def test_what_else_waits_is_counted_and_named(
    extra: list[dict[str, Any]], counts: dict[str, int], leftovers: list[str]
) -> None:
    figures = trace_figures([*one_step(), *extra])
    assert {name: getattr(figures, name) for name in counts} == counts
    assert figures.leftovers == dict.fromkeys(leftovers, 1)


def test_a_range_without_a_flag_is_no_step() -> None:
    """The end of an epoch: the pipeline is asked once more and has nothing."""
    end = event(STEP_NAME, "user_annotation", 150, 9)
    assert trace_figures([*one_step(), end]).num_steps == 1
    with pytest.raises(ValueError, match="whole step.*profile_step_start"):
        trace_figures([end])


@pytest.mark.parametrize("pipeline_type", ["none", "native"])
def test_a_run_marks_its_steps(tmp_path: Path, world: World, pipeline_type: str) -> None:
    trainer = {
        "max_train_iters": 5,
        "pipeline_type": pipeline_type,
        "profile": True,
        "profile_step_start": 2,
        "profile_step_end": 5,
        "ckpt_save_interval": 0,
    }
    Trainer(synthetic_experiment(str(tmp_path / "run"), trainer=trainer), world=world).fit()
    figures = read_trace(tmp_path / "run/profile/rank0.json")
    assert figures.num_steps == figures.num_flag_waits == 3
    assert 0 < figures.flag_wait_host_share < 1
    assert figures.num_copies_to_host == figures.num_waits == figures.num_launches == 0
