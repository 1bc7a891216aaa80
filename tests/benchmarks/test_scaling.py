"""The cost model by hand, and the benchmark's cells on a laptop's sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import pytest

from benchmarks.scaling import codec_cells, exposed, imbalance
from benchmarks.scaling_model import (
    Cluster,
    Workload,
    exchange_seconds,
    fitted,
    predict,
    sum_seconds,
)
from tests.support.commands import run_command
from tests.support.experiments import cpu_world

WORK = Workload(
    tokens=50_000,
    fixed_seconds=2e-3,
    seconds_per_token=1e-6,
    dense_bytes=100e6,
    row_bytes=100e6,
    gradient_row_bytes=50e6,
    table_bytes=40e9,
    other_bytes=10e9,
)
PLAIN = Cluster(
    nvlink_bytes_per_second=400e9,
    network_bytes_per_second=40e9,
    nvlink_seconds=0.0,
    network_seconds=0.0,
    host_seconds=0.0,
)


def test_one_gpu_is_what_was_measured() -> None:
    found = predict(WORK, 1)
    assert found.step_seconds == pytest.approx(52e-3)
    assert (found.exposed_seconds, found.efficiency) == (0.0, pytest.approx(1.0))
    assert found.bytes_per_gpu == 50e9


def test_two_gpus_by_hand() -> None:
    """Half of the rows go to the other one: 50 MB there, 25 MB back; 100 MB are summed."""
    found = predict(WORK, 2, cluster=PLAIN)
    assert found.exposed_seconds == pytest.approx((50e6 + 25e6 + 100e6) / 400e9)
    assert found.step_seconds == pytest.approx(52e-3 + found.exposed_seconds)
    assert found.efficiency == pytest.approx(52e-3 / found.step_seconds)
    assert found.bytes_per_gpu == 30e9


def test_the_network_counts_beyond_a_node() -> None:
    assert exchange_seconds(100e6, 8, PLAIN) == pytest.approx(100e6 * 7 / 8 / 400e9)
    assert exchange_seconds(100e6, 64, PLAIN) == pytest.approx(100e6 * 56 / 64 / 40e9)
    inside = 2 * 100e6 * 7 / 8 / 400e9
    assert sum_seconds(100e6, 8, PLAIN) == pytest.approx(inside)
    between = 2 * (100e6 / 8) * 7 / 8 / 40e9
    assert sum_seconds(100e6, 64, PLAIN) == pytest.approx(inside + between)


def test_efficiency_falls_and_imbalance_costs() -> None:
    weak = [predict(WORK, n) for n in (1, 2, 8, 64, 1024)]
    strong = [predict(WORK, n, is_strong=True) for n in (1, 2, 8, 64, 1024)]
    for found in (weak, strong):
        shares = [one.efficiency for one in found]
        assert shares == sorted(shares, reverse=True)
    assert all(s.efficiency < w.efficiency for w, s in zip(weak[1:], strong[1:], strict=True))
    uneven = dataclasses.replace(WORK, imbalance={8: 1.4})
    assert predict(uneven, 8).compute_seconds == pytest.approx(2e-3 + 1.4 * 50e-3)


def test_a_line_through_two_steps() -> None:
    assert fitted(steps={20_000: 22e-3, 10_000: 12e-3}) == pytest.approx((2e-3, 1e-6))
    with pytest.raises(ValueError, match="two steps make a line, got 1"):
        fitted(steps={1: 1.0})
    with pytest.raises(ValueError, match="must be slower"):
        fitted(steps={10: 1.0, 20: 1.0})


def test_exposed_is_what_no_compute_covers() -> None:
    compute, comms = [(False, 0.0, 4.0), (False, 6.0, 7.0)], [(True, 3.0, 8.0), (True, 7.5, 9.0)]
    assert exposed(compute + comms) == pytest.approx(2.0 + 2.0)
    assert exposed(compute) == 0.0


def test_dealing_out_gains_more_with_more_ranks() -> None:
    few, many = (imbalance(n, users_per_rank=32, num_batches=5) for n in (2, 64))
    assert 1.0 <= few["dealt"] < few["in_order"] < many["in_order"]
    assert many["gain"] > 1.2


SIZES = ["--rows", "500", "--batch", "4", "--steps", "2", "--windows", "2", "--small"]


def test_pipelines_on_a_cpu() -> None:
    result = run_command([sys.executable, "benchmarks/scaling.py", "pipelines", *SIZES])
    assert result.returncode == 0, result.stderr
    cells = [json.loads(line) for line in result.stdout.splitlines()]
    assert [cell["pipeline_type"] for cell in cells] == ["none", "native"]
    assert all(cell["tokens_per_s"] > 0 for cell in cells)


def test_codecs_on_a_cpu() -> None:
    arguments = argparse.Namespace(rows=500, batch=1, steps=4, small=True, gin_binding=[])
    cells = list(codec_cells(arguments, cpu_world()))
    assert [(cell["codec"], cell["direction"]) for cell in cells] == [
        (codec, direction) for codec in ("fp16", "bf16") for direction in ("forward", "backward")
    ]
    assert {cell["bytes_share"] for cell in cells} == {0.5}
