"""Files of the right size with the wrong content are refused before anything trains on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.schema import DatasetArgs
from data.loader import build_datasets
from data.manifest import read_manifest
from data.preprocess import preprocess

COUNTS = [9, 12, 4]


@pytest.fixture
def args(make_dataset) -> DatasetArgs:
    return make_dataset(COUNTS, max_num_candidates=2)


def _file(args: DatasetArgs, role: str) -> Path:
    return Path(args.dataset_path) / read_manifest(args.dataset_path).files[role].name


def _columns(args: DatasetArgs) -> dict[str, np.ndarray]:
    store = build_datasets(args).train.store
    names = store.manifest.contextual_feature_names
    return {
        "item_id": store.items_N,
        "label": store.labels_N,
        "event_offset": store.offsets_U1[:-1],
        **dict(zip(names, store.contextual_FU, strict=True)),
    }


def _refusal(args: DatasetArgs) -> str:
    read_manifest(args.dataset_path)  # sizes are as they were
    with pytest.raises(ValueError) as refused:
        build_datasets(args)
    assert type(refused.value) is ValueError
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    command = f"python data/preprocess.py --dataset ml-100k --output {args.dataset_path}"
    assert message.endswith(f"; run {command} again")
    return message


@pytest.mark.parametrize(
    ("role", "column", "row", "value", "rule"),
    [
        ("events", "item_id", 3, 13, "must lie in [0, 12]"),
        ("events", "item_id", 24, -1, "must lie in [0, 12]"),
        ("events", "label", 5, 5, "must lie in [0, 4]"),
        ("events", "label", 0, -3, "must lie in [0, 4]"),
        ("users", "user_id", 1, 2**40, "must lie in [0, 3]"),
        ("users", "age", 0, 24, "must lie in [0, 23]"),
        ("users", "event_offset", 0, 1, "must rise from 0 to 25"),
        ("users", "event_offset", 1, 22, "must rise from 0 to 25"),
        ("users", "event_offset", 2, 26, "must rise from 0 to 25"),
        ("users", "event_offset", 2, 2**63 - 1, "must rise from 0 to 25"),
    ],
)
def test_a_value_outside_its_range_is_refused(role, column, row, value, rule, args, tmp_path):
    path = _file(args, role)
    content, values = path.read_bytes(), _columns(args)[column]
    changed = values.copy()
    changed[row] = value
    assert content.count(values.tobytes()) == 1
    path.write_bytes(content.replace(values.tobytes(), changed.tobytes()))
    assert f"{path} is damaged: {column} {rule}, got {value};" in _refusal(args)
    # The way out works: preprocessing notices the damage and the data set is whole again.
    assert preprocess("ml-100k", source=tmp_path / "source", output=tmp_path / "ml-100k")[2]
    assert path.read_bytes() == content
    assert len(build_datasets(args).test) == len(COUNTS)


@pytest.mark.parametrize("role", ["events", "users"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: bytes(len(content)),
        lambda content: b"x" * len(content),
        lambda content: content[:-100] + bytes(100),
        lambda content: content.replace(b"event_offset", b"event_upset!").replace(
            b"label", b"lable"
        ),
    ],
    ids=["zeros", "text", "tail", "renamed"],
)
def test_a_file_that_is_no_arrow_file_is_one_error(
    role: str, damage: Callable[[bytes], bytes], args
):
    path = _file(args, role)
    content = path.read_bytes()
    damaged = damage(content)
    assert damaged != content and len(damaged) == len(content)
    path.write_bytes(damaged)
    assert f"{path} is damaged (" in _refusal(args)


def test_a_file_of_other_rows_is_refused(args):
    path = _file(args, "events")
    manifest_path = path.parent / "manifest.json"
    text = manifest_path.read_text()
    manifest_path.write_text(text.replace('"num_events": 25', '"num_events": 24'))
    assert "item_id must hold 24 whole numbers, got 25 of int64" in _refusal(args)
