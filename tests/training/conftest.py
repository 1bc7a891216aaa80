from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.experiments import single_process_group
from training.distributed import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A gloo group of this one process, shared by all tests that train in it."""
    store = tmp_path_factory.mktemp("group") / "store"
    with single_process_group(str(store)) as world:
        yield world


@pytest.fixture
def run_folder(tmp_path: Path) -> str:
    return str(tmp_path / "run")
