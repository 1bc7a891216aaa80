"""Loading a checkpoint runs nothing that is written in it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.support.experiments import synthetic_experiment
from training.checkpoint_reader import TensorReader
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


def test_a_pickle_in_place_of_tensors_is_refused_unrun(
    saved: Path, tmp_path: Path, world: World
) -> None:
    """Every tensor's own little archive gets another pickle, at its place and in its length."""
    mark = tmp_path / "mark"
    (data,) = saved.glob("*.distcp")
    content = bytearray(data.read_bytes())
    for info in TensorReader(saved).read_metadata().storage_data.values():
        archive = io.BytesIO()
        torch.save(torch.zeros(1), archive)
        names = zipfile.ZipFile(archive).namelist()
        evil = io.BytesIO()
        with zipfile.ZipFile(evil, "w") as out:
            for name in names:
                is_pickle = name.endswith("data.pkl")
                old = zipfile.ZipFile(archive).read(name)
                out.writestr(name, pickle.dumps(Runs(mark)) if is_pickle else old)
        size = min(info.length, len(evil.getvalue()))
        content[info.offset : info.offset + size] = evil.getvalue()[:size]
    copy = changed(saved, tmp_path, data.name, bytes(content))
    refusal(copy, tmp_path / "run", world)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"nonsense", pickle.dumps({"a": 1})])
def test_a_damaged_index_is_told(saved: Path, tmp_path: Path, world: World, content: bytes) -> None:
    copy = changed(saved, tmp_path, ".metadata", content)
    assert ".metadata" in refusal(copy, tmp_path / "run", world)
