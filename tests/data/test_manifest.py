from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.manifest import (
    MANIFEST_NAME,
    check_contents,
    check_tables,
    find_dataset,
    read_manifest,
)
from data.preprocess import preprocess
from tests.data.conftest import FIXTURES, write_ml_100k


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return preprocess("ml-1m", source=FIXTURES / "ml-1m", output=tmp_path / "ml-1m")[0]


def test_missing_data_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"python data/preprocess\.py --dataset ml-1m --output"):
        read_manifest(tmp_path / "none", dataset_name="ml-1m")


def test_the_default_folder_needs_no_output_in_the_command():
    folder = find_dataset("ml-20m", None)
    assert folder.parts[-2:] == ("datasets", "ml-20m")
    if not folder.exists():
        with pytest.raises(ValueError, match=r"run python data/preprocess\.py --dataset ml-20m$"):
            read_manifest(folder, dataset_name="ml-20m")


def test_a_path_may_be_the_data_set_or_the_folder_above(folder):
    assert find_dataset("ml-1m", str(folder)) == folder
    assert find_dataset("ml-1m", str(folder.parent)) == folder


def test_another_data_set_is_refused(folder):
    with pytest.raises(ValueError, match="dataset_name is 'ml-100k' but .* holds 'ml-1m'"):
        read_manifest(folder, dataset_name="ml-100k")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "has format_version 99, this version reads 1"),
        ({"surplus": 1}, "is damaged"),
        ({"files": {"events": {}}}, "is damaged"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(change, message, folder):
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "7"])
def test_broken_json_is_refused(text, folder):
    (folder / MANIFEST_NAME).write_text(text)
    with pytest.raises(ValueError, match="is no manifest"):
        read_manifest(folder)


@pytest.mark.parametrize("role", ["events", "users"])
def test_a_cut_or_missing_file_is_refused(role, folder):
    facts = read_manifest(folder).files[role]
    path = folder / facts.name
    path.write_bytes(path.read_bytes()[:-1])
    cut = f"has {facts.num_bytes - 1} bytes, its manifest says {facts.num_bytes} bytes"
    with pytest.raises(ValueError, match=cut):
        read_manifest(folder)
    path.unlink()
    with pytest.raises(ValueError, match=f"{facts.name} is missing"):
        read_manifest(folder)


@pytest.mark.parametrize("role", ["events", "users"])
def test_a_changed_byte_is_seen(role, folder):
    manifest = read_manifest(folder)
    check_contents(folder, manifest)
    path = folder / manifest.files[role].name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path.name} must have the sha256.*preprocess\.py"):
        check_contents(folder, read_manifest(folder))


def test_a_table_must_hold_the_highest_id(tmp_path):
    rows = [(1, 3952, 3, 1), (1, 0, 3, 2)]
    source = write_ml_100k(tmp_path / "in", rows, users=[1])
    manifest = preprocess("ml-100k", source=source, output=tmp_path / "out")[1]
    assert manifest.num_items == 2
    assert manifest.vocab_sizes["item_id"] == 3953
    sizes = dict(manifest.vocab_sizes)
    check_tables(manifest, sizes)
    for size in (3706, 3952):
        with pytest.raises(ValueError, match=f"'item_id' must be > its highest id 3952.*{size};"):
            check_tables(manifest, sizes | {"item_id": size})
    del sizes["zip"]
    with pytest.raises(ValueError, match="no embedding table serves feature 'zip'"):
        check_tables(manifest, sizes)


def test_reading_a_manifest_does_not_import_torch(folder):
    program = (
        "import sys; from data.manifest import read_manifest; "
        "print(read_manifest(sys.argv[1]).num_events, "
        "{'torch', 'polars', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=5,
    )
    assert done.stdout == "5 set()\n"
