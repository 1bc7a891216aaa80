"""A GPU trains like a CPU: the same losses, with our kernels and without them.

Both devices start from the same weights and see the same batches (tests/support/loss_curves.py).
In FP32 the first loss agrees to 1e-4 and 20 steps to 1e-3; in BF16 the first loss to 1e-2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("ranking", "retrieval")
KERNELS = ("triton", "pytorch")
FP32_STEPS = 20
Curves = Mapping[str, list[float]]


def curves(cases: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.loss_curves", *cases],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Curves, Curves]]:
    """Losses on the CPU and on the GPU, from two processes at once."""
    lengths = {"float32": FP32_STEPS, "bfloat16": 1}
    runs = [f"{task}:{dtype}:{{}}:{n}" for task in TASKS for dtype, n in lengths.items()]
    cpu = curves([run.format("pytorch") for run in runs], CUDA_VISIBLE_DEVICES="")
    resumed = [f"{task}:float32:triton:{FP32_STEPS}:resumed" for task in TASKS]
    gpu = curves([*(run.format(kernels) for run in runs for kernels in KERNELS), *resumed])
    outputs = []
    try:
        for process in (cpu, gpu):
            output, _ = process.communicate(timeout=280)
            assert process.returncode == 0, f"{process.args} ended with {process.returncode}"
            outputs.append(json.loads(output.splitlines()[-1]))
    finally:
        cpu.kill()
        gpu.kill()
    yield outputs[0], outputs[1]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("task", TASKS)
def test_fp32(both: tuple[Curves, Curves], task: str, kernels: str) -> None:
    cpu = both[0][f"{task}:float32:pytorch:{FP32_STEPS}"]
    gpu = both[1][f"{task}:float32:{kernels}:{FP32_STEPS}"]
    assert len(cpu) == len(gpu) == FP32_STEPS
    assert cpu[-1] < cpu[0], "a run that learns nothing compares nothing"
    assert gpu[0] == pytest.approx(cpu[0], rel=1e-4)
    assert gpu == pytest.approx(cpu, rel=1e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("task", TASKS)
def test_bf16(both: tuple[Curves, Curves], task: str, kernels: str) -> None:
    (gpu,) = both[1][f"{task}:bfloat16:{kernels}:1"]
    (same_dtype,) = both[0][f"{task}:bfloat16:pytorch:1"]
    in_fp32 = both[0][f"{task}:float32:pytorch:{FP32_STEPS}"][0]
    assert gpu == pytest.approx(same_dtype, rel=1e-2)
    assert gpu == pytest.approx(in_fp32, rel=1e-2)


@pytest.mark.parametrize("task", TASKS)
def test_a_resumed_run_goes_on(both: tuple[Curves, Curves], task: str) -> None:
    """With the state of the fused dense optimizer and of the tables, half-way."""
    straight = both[1][f"{task}:float32:triton:{FP32_STEPS}"]
    resumed = both[1][f"{task}:float32:triton:{FP32_STEPS}:resumed"]
    assert resumed == pytest.approx(straight, rel=1e-4)
