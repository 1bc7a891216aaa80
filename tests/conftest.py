"""Markers that depend on the machine, and the session-wide gloo pair."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before anything imports torch: small tensors run slower on many threads than on one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support.two_ranks import TwoRanks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow = config.getoption("--run-slow")
    for item in items:
        if item.get_closest_marker("slow") and not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: needs --run-slow"))
        if reason := _missing_hardware(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def _missing_hardware(item: pytest.Item) -> str | None:
    """Why this machine cannot run the test. torch is imported only for tests that ask."""
    wanted = {name for name in ("gpu", "fp8", "multi_gpu") if item.get_closest_marker(name)}
    if not wanted:
        return None
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        return f"{', '.join(sorted(wanted))}: no CUDA device"
    if "multi_gpu" in wanted and num_devices < 2:
        return "multi_gpu: one CUDA device only"
    if "fp8" in wanted and torch.cuda.get_device_capability() < (8, 9):
        return "fp8: compute capability below 8.9"
    return None


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[TwoRanks]:
    """The gloo pair: `two_ranks.run(fn, *args)` gives the results of both ranks."""
    pair = TwoRanks()
    yield pair
    pair.close()
