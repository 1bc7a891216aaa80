"""Files of a checkpoint: what is read is what was written, and nothing in it is run."""

from __future__ import annotations

import dataclasses
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from benchmarks.soak_faults import tensors
from tests.support.experiments import synthetic_experiment
from training.checkpoint_files import TensorReader, TensorWriter
from training.distributed import World
from training.trainer import Trainer


class Runs:
    """Unpickled without restraint, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    trainer = Trainer(
        synthetic_experiment(str(folder), trainer={"max_train_iters": 1}), world=world
    )
    trainer.fit()
    return folder / "checkpoints" / "step-00000001"


def changed(saved: Path, folder: Path, name: str, content: bytes) -> Path:
    """A copy with another file in place, which its state.json vouches for."""
    copy = folder / saved.name
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / name).write_bytes(content)
    state = json.loads((copy / "state.json").read_text())
    state["files"][name] = len(content)
    state["crc32"][name] = zlib.crc32(content)
    (copy / "state.json").write_text(json.dumps(state))
    return copy


def refusal(checkpoint: Path, folder: Path, world: World) -> str:
    experiment = synthetic_experiment(str(folder), trainer={"resume": str(checkpoint)})
    with pytest.raises(RuntimeError, match="cannot be loaded") as refused:
        Trainer(experiment, world=world)
    return str(refused.value)


def test_a_foreign_type_in_the_index_is_refused_unrun(
    saved: Path, tmp_path: Path, world: World
) -> None:
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Runs(mark))).close()
    assert mark.exists(), "what the test relies on"
    mark.unlink()
    index = TensorReader(saved).read_metadata()
    for content in (pickle.dumps(Runs(mark)), pickle.dumps((index, Runs(mark)))):
        copy = changed(saved, tmp_path, ".metadata", content)
        assert "names io.open" in refusal(copy, tmp_path / "run", world)
        assert not mark.exists()
        for file in copy.iterdir():
            file.unlink()
        copy.rmdir()


def test_an_entry_that_is_no_tensor_is_refused(saved: Path, tmp_path: Path, world: World) -> None:
    index = TensorReader(saved).read_metadata()
    index.state_dict_metadata["fp8.surprise"] = BytesStorageMetadata()
    copy = changed(saved, tmp_path, ".metadata", pickle.dumps(index))
    assert "fp8.surprise must be a tensor" in refusal(copy, tmp_path / "run", world)


def test_a_pickle_in_place_of_tensors_is_but_numbers(
    saved: Path, tmp_path: Path, world: World
) -> None:
    mark = tmp_path / "mark"
    (data,) = saved.glob("*.distcp")
    evil = pickle.dumps(Runs(mark))
    content = (evil * (data.stat().st_size // len(evil) + 1))[: data.stat().st_size]
    copy = changed(saved, tmp_path, data.name, content)
    first = min(
        TensorReader(copy).read_metadata().storage_data.items(), key=lambda one: one[1].offset
    )
    found = tensors(copy)[first[0].fqn]
    size = min(len(evil), first[1].length)
    assert bytes(found.view(-1).view(torch.uint8).numpy())[:size] == evil[:size]
    assert not mark.exists()


def _longer(place: Any, entry: Any) -> None:
    place.length += 4


def _elsewhere(place: Any, entry: Any) -> None:
    place.offset += 2**40


def _before(place: Any, entry: Any) -> None:
    place.offset = -8


def _outside(place: Any, entry: Any) -> None:
    place.relative_path = "../other.distcp"


def _larger(place: Any, entry: Any) -> None:
    entry.chunks[0] = dataclasses.replace(entry.chunks[0], sizes=torch.Size([2**50]))


def _moved(place: Any, entry: Any) -> None:
    entry.chunks[0] = dataclasses.replace(entry.chunks[0], offsets=torch.Size([7] * 9))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_longer, "must have"),
        (_elsewhere, "ends inside of"),
        (_before, "ends inside of"),
        (_outside, "outside of the checkpoint"),
        (_larger, "must have"),
        (_moved, "does not say where"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    saved: Path, tmp_path: Path, world: World, change: Callable[[Any, Any], None], told: str
) -> None:
    """Before memory is taken for what it claims."""
    index = TensorReader(saved).read_metadata()
    key = next(key for key in index.storage_data if key.fqn.startswith("model.trunk"))
    change(index.storage_data[key], index.state_dict_metadata[key.fqn])
    copy = changed(saved, tmp_path, ".metadata", pickle.dumps(index))
    assert told in refusal(copy, tmp_path / "run", world)


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    """Empty, scalar, strided, every width of element."""
    saved = {
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "columns": torch.arange(12.0).view(3, 4).t(),
        "flags": torch.tensor([True, False]),
        "halves": torch.randn(5).bfloat16(),
        "codes": torch.randn(7).to(torch.float8_e4m3fn),
        "longs": torch.tensor([-1, 2**40]),
    }
    writer = TensorWriter(tmp_path)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    assert writer.crc32 == {file.name: zlib.crc32(file.read_bytes())}
    found = {name: torch.empty_like(value.contiguous()) for name, value in saved.items()}
    dcp.load(found, storage_reader=TensorReader(tmp_path), no_dist=True)
    for name, value in saved.items():
        as_bytes = [one.contiguous().view(-1).view(torch.uint8) for one in (found[name], value)]
        assert found[name].shape == value.shape
        assert torch.equal(*as_bytes), name


def test_what_is_no_tensor_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="surprise must be a tensor"):
        dcp.save({"surprise": "text"}, storage_writer=TensorWriter(tmp_path), no_dist=True)


@pytest.mark.parametrize("content", [b"", b"\x80", b"nonsense", pickle.dumps({"a": 1})])
def test_a_damaged_index_is_told(saved: Path, tmp_path: Path, world: World, content: bytes) -> None:
    copy = changed(saved, tmp_path, ".metadata", content)
    assert ".metadata" in refusal(copy, tmp_path / "run", world)
