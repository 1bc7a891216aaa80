"""Data files with anything in them: refused with the file's name, or read as what they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.dataset import EventStore
from data.manifest import read_manifest
from data.preprocess import preprocess
from tests.data.conftest import FIXTURES

fuzzed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def damages(draw: st.DrawFn) -> tuple[float, bytes, bool]:
    """Where (as a share of the file), what is written there, and whether the file ends then."""
    return draw(st.floats(0, 1)), draw(st.binary(max_size=24)), draw(st.booleans())


def damaged(content: bytes, damage: tuple[float, bytes, bool]) -> bytes:
    share, put, is_cut = damage
    place = int(share * len(content))
    return content[:place] + put + (b"" if is_cut else content[place + len(put) :])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("good") / "ml-1m"
    return preprocess("ml-1m", source=FIXTURES / "ml-1m", output=output)[0]


@pytest.mark.parametrize("role", ["events", "users"])
@fuzzed
@given(damage=damages())
def test_a_damaged_arrow_file_is_refused_or_within_its_ranges(
    good: Path, tmp_path: Path, role: str, damage: tuple[float, bytes, bool]
) -> None:
    """Below the checksum: what a reader would do that trusts the file."""
    manifest = read_manifest(good)
    folder = tmp_path / "bad"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    file = folder / manifest.files[role].name
    file.write_bytes(damaged(file.read_bytes(), damage))
    try:
        store = EventStore(folder, manifest)
    except ValueError as error:
        assert file.name in str(error)
        return
    high = manifest.max_ids[manifest.item_feature_name]
    assert 0 <= store.items_N.min() <= store.items_N.max() <= high
    assert np.all(np.diff(store.offsets_U1) >= 0)


@pytest.mark.parametrize("name", ["ratings.dat", "users.dat"])
@fuzzed
@given(damage=damages())
def test_damaged_raw_files_are_refused_or_read(
    tmp_path: Path, name: str, damage: tuple[float, bytes, bool]
) -> None:
    raw, output = tmp_path / "raw", tmp_path / "out"
    for folder in (raw, output):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FIXTURES / "ml-1m", raw)
    (raw / name).write_bytes(damaged((raw / name).read_bytes(), damage))
    try:
        folder = preprocess("ml-1m", source=raw, output=output)[0]
    except ValueError as error:
        assert str(error)
        assert not (output / "manifest.json").exists()
        return
    EventStore(folder, read_manifest(folder))
