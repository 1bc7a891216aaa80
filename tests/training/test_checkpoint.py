"""Checkpoints: bit-equal round trips, also to another world size, and clear refusals."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support.experiments import cpu_world, synthetic_experiment
from tests.support.two_ranks import TwoRanks
from training.checkpoint import (
    FORMAT_VERSION,
    CheckpointError,
    latest_checkpoint,
    load_weights,
    read_state,
)
from training.distributed import World
from training.step import NonFiniteError
from training.trainer import Trainer


def full_state(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and optimizer state, sharded tensors gathered on every rank."""
    flat: dict[str, Tensor] = {}
    for name, value in trainer.model.state_dict().items():
        flat[name] = _gathered(value, trainer.world.world_size)
    for name, entries in trainer.optimizer.tables.state_dict()["state"].items():
        for key, value in entries.items():
            flat[f"{name}/{key}"] = _gathered(value, trainer.world.world_size)
    for name, entries in trainer.optimizer.dense_state().items():
        flat |= {f"{name}/{key}": value.clone() for key, value in entries.items()}
    return flat


def _gathered(value: Any, world_size: int) -> Tensor:
    if not hasattr(value, "local_shards"):
        return value.clone()
    import torch.distributed as dist

    own = [(s.metadata.shard_offsets[0], s.tensor.clone()) for s in value.local_shards()]
    shards: list[Any] = [None] * world_size
    dist.all_gather_object(shards, own)
    return torch.cat([rows for _, rows in sorted(sum(shards, []), key=lambda shard: shard[0])])


def _run(rank: int, world_size: int, folder: str, resume: str | None, steps: int) -> Any:
    trainer_args = {"max_train_iters": steps, "resume": resume, "train_batch_size": 8 // world_size}
    experiment = synthetic_experiment(folder, trainer=trainer_args)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    before = full_state(trainer)
    trainer.fit()
    return {"before": before, "after": full_state(trainer)}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


def test_two_to_one_to_two_is_bit_equal(tmp_path: Path, world: World, two_ranks: TwoRanks) -> None:
    folder = str(tmp_path / "run")
    (first, _) = two_ranks.run(_run, folder, None, 3)
    checkpoint = str(tmp_path / "run/checkpoints/step-00000003")
    alone = _run(0, 1, folder, checkpoint, 5)
    assert_same(alone["before"], first["after"])
    checkpoint = str(tmp_path / "run/checkpoints/step-00000005")
    (again, _) = two_ranks.run(_run, folder, checkpoint, 6)
    assert_same(again["before"], alone["after"])
    moments = [name for name in first["after"] if "momentum" in name or "exp_avg" in name]
    assert any(first["after"][name].abs().sum() > 0 for name in moments)


def test_only_the_newest_are_kept(run_folder: str, world: World) -> None:
    trainer_args = {"max_train_iters": 5, "ckpt_save_interval": 1, "ckpt_keep_last": 2}
    Trainer(synthetic_experiment(run_folder, trainer=trainer_args), world=world).fit()
    kept = sorted(path.name for path in (Path(run_folder) / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000005"]


def test_zero_interval_saves_nothing(run_folder: str, world: World) -> None:
    trainer_args = {"max_train_iters": 1, "ckpt_save_interval": 0}
    Trainer(synthetic_experiment(run_folder, trainer=trainer_args), world=world).fit()
    assert not (Path(run_folder) / "checkpoints").exists()


def test_an_unfinished_folder_is_never_the_latest(tmp_path: Path) -> None:
    for name in ("step-00000002", "step-00000010"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) is None
    state = {"format_version": FORMAT_VERSION, "files": {}}
    (tmp_path / "step-00000002" / "state.json").write_text(json.dumps(state))
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-old" / "state.json").write_text(json.dumps(state))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "step-00000002"


def test_failed_save_keeps_the_older_checkpoint(
    run_folder: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    saved = trainer.checkpointer.save(tmp_path, 1, run=tmp_path, data_state={})

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.checkpoint.dcp.save", full_disk)
    with pytest.raises(CheckpointError, match=r"step-00000002 .*No space left.*step-00000001"):
        trainer.checkpointer.save(tmp_path, 2, run=tmp_path, data_state={})
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000001"]
    assert read_state(saved)["step"] == 1


def _save_below_a_file(rank: int, world_size: int, folder: str, file: str) -> str:
    trainer = Trainer(synthetic_experiment(folder), world=cpu_world(rank, world_size))
    try:
        trainer.checkpointer.save(Path(file) / "below", 1, run=Path(folder), data_state={})
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_folder_that_only_rank_zero_tries_to_make_stops_both(
    run_folder: str, tmp_path: Path, two_ranks: TwoRanks
) -> None:
    (tmp_path / "file").write_text("")
    for text in two_ranks.run(_save_below_a_file, run_folder, str(tmp_path / "file")):
        assert "Not a directory" in text
        assert "TrainerArgs.ckpt_save_dir" in text


@pytest.fixture
def saved(run_folder: str, world: World) -> Path:
    Trainer(synthetic_experiment(run_folder, trainer={"max_train_iters": 1}), world=world).fit()
    return Path(run_folder) / "checkpoints" / "step-00000001"


def resume(saved: Path, world: World, **network: Any) -> Trainer:
    trainer_args = {"max_train_iters": 2, "resume": str(saved)}
    experiment = synthetic_experiment(
        str(saved.parent.parent), trainer=trainer_args, network=network
    )
    return Trainer(experiment, world=world)


def test_damaged_file_is_named(saved: Path, world: World) -> None:
    (data,) = saved.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 3])
    with pytest.raises(ValueError, match=rf"step-00000001: not a complete .*{data.name} must have"):
        resume(saved, world)


def test_latest_passes_over_a_damaged_checkpoint(
    run_folder: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_args = {"max_train_iters": 3, "ckpt_save_interval": 1, "ckpt_keep_last": 3}
    Trainer(synthetic_experiment(run_folder, trainer=trainer_args), world=world).fit()
    newest = Path(run_folder) / "checkpoints" / "step-00000003"
    next(newest.glob("*.distcp")).unlink()
    experiment = synthetic_experiment(run_folder, trainer=trainer_args | {"resume": "latest"})
    assert Trainer(experiment, world=world).first_step == 2
    assert "step-00000003: not a complete checkpoint" in caplog.text


def test_content_damage_is_named(saved: Path, world: World) -> None:
    (data,) = saved.glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(RuntimeError, match=r"step-00000001 cannot be loaded"):
        resume(saved, world)


def test_more_steps_than_the_run_has_are_refused(saved: Path, world: World) -> None:
    experiment = synthetic_experiment(
        str(saved.parent.parent), trainer={"max_train_iters": 1, "resume": str(saved)}
    )
    Trainer(experiment, world=world)
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"step": 5}))
    with pytest.raises(ValueError, match=r"TrainerArgs.max_train_iters must allow at least 5"):
        Trainer(experiment, world=world)


def test_another_optimizer_is_refused_naming_the_field(saved: Path, world: World) -> None:
    for changed in ({"optimizer_str": "sgd"}, {"sparse_optimizer_str": "sgd"}):
        experiment = synthetic_experiment(
            str(saved.parent.parent),
            trainer={"max_train_iters": 2, "resume": str(saved)},
            optimizer=changed,
        )
        (field,) = changed
        with pytest.raises(ValueError, match=rf"OptimizerArgs.{field} must be .* got 'sgd'"):
            Trainer(experiment, world=world)


def test_other_format_is_refused(saved: Path, world: World) -> None:
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"format_version": 99}))
    with pytest.raises(ValueError, match="format_version must be 2, got 99"):
        resume(saved, world)


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_no_checkpoint_there_is_one_clear_error(tmp_path: Path, world: World, path: str) -> None:
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        resume(tmp_path / path, world)


def test_other_model_is_refused_naming_the_field(saved: Path, world: World) -> None:
    with pytest.raises(ValueError, match=r"NetworkArgs.num_layers must be 2 .* got 3"):
        resume(saved, world, num_layers=3)


def test_settings_that_keep_the_model_are_free(saved: Path, world: World) -> None:
    assert resume(saved, world, hidden_dropout=0.5, kernel_backend="pytorch").first_step == 1


def _nan_in_step_three(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Trains until rank 1 has a NaN; then what a checkpoint of the step before restores."""
    experiment = synthetic_experiment(
        folder, trainer={"train_batch_size": 4, "ckpt_save_interval": 1}
    )
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    gradients: list[Tensor] = []

    def spoil(gradient: Tensor) -> Tensor:
        gradients.append(gradient)
        return gradient * float("nan") if rank == 1 and len(gradients) == 3 else gradient

    trainer.model.module.trunk.head.layers[0].weight.register_hook(spoil)
    with pytest.raises(NonFiniteError, match="step 3 is not finite .rank 1: the gradient of head"):
        trainer.fit()
    left = full_state(trainer)
    newest = latest_checkpoint(Path(folder) / "checkpoints")
    assert newest is not None
    resumed = dataclasses.replace(
        experiment, trainer=dataclasses.replace(experiment.trainer, resume=str(newest))
    )
    again = Trainer(resumed, world=cpu_world(rank, world_size))
    return {"newest": newest.name, "left": left, "saved": full_state(again)}


def test_a_nan_reaches_no_checkpoint_and_changes_nothing(
    run_folder: str, two_ranks: TwoRanks
) -> None:
    for found in two_ranks.run(_nan_in_step_three, run_folder):
        assert found["newest"] == "step-00000002"
        assert_same(found["left"], found["saved"])
        assert all(value.isfinite().all() for value in found["saved"].values())


def test_a_stranger_in_the_folder_is_neither_pruned_nor_counted(
    run_folder: str, tmp_path: Path, world: World
) -> None:
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    for step in (900, 901, 902):
        trainer.checkpointer.save(tmp_path, step, run=tmp_path / "stranger", data_state={})
    for step in (1, 2, 3):
        trainer.checkpointer.save(tmp_path, step, run=tmp_path / "own", data_state={})
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (2, 3, 901, 902)]
    newest = latest_checkpoint(tmp_path, run=tmp_path / "own")
    assert newest is not None
    assert newest.name == "step-00000003"


def test_what_a_killed_replacement_left_is_put_right(
    run_folder: str, tmp_path: Path, world: World
) -> None:
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    saved = trainer.checkpointer.save(tmp_path, 1, run=tmp_path, data_state={})
    saved.rename(tmp_path / f".replaced-{saved.name}")
    (tmp_path / ".writing-step-00000007").mkdir()
    trainer.checkpointer.save(tmp_path, 2, run=tmp_path, data_state={})
    assert sorted(path.name for path in tmp_path.glob("*step*")) == [
        "step-00000001",
        "step-00000002",
    ]


def test_loading_drops_rows_that_are_cached(
    saved: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are overwritten in host memory; a GPU's cache of them would not notice."""
    trainer = resume(saved, world)
    (collection,) = trainer.model.module.tables.collections
    (lookup,) = collection._lookups
    purged: list[bool] = []
    monkeypatch.setattr(lookup, "purge", lambda: purged.append(True))
    load_weights(trainer.model, saved)
    assert purged == [True]


def test_a_changed_byte_is_seen_at_the_load(saved: Path, world: World) -> None:
    (data,) = saved.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(RuntimeError, match=rf"cannot be loaded .the contents of {data.name}"):
        resume(saved, world)


class HeldBack:
    """A save in the background that waits until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.has_begun = threading.Event(), threading.Event()
        self._plain = dcp.save
        monkeypatch.setattr("training.checkpoint.dcp.save", self.save)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        return self._plain(*args, **kwargs)


def test_a_save_in_the_background_holds_what_was_then(
    run_folder: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    before = full_state(trainer)
    held = HeldBack(monkeypatch)
    saved = trainer.checkpointer.save(
        tmp_path, 1, run=tmp_path, data_state={"epoch": 0}, in_background=True
    )
    assert held.has_begun.wait(30)
    for value in trainer.model.module.trunk.parameters():
        value.data.fill_(7.0)
    for name, value in trainer.model.state_dict().items():
        for shard in getattr(value, "local_shards", list)():
            assert name
            shard.tensor.fill_(7.0)
    assert latest_checkpoint(tmp_path) is None
    held.may_go_on.set()
    trainer.checkpointer.wait()
    assert latest_checkpoint(tmp_path) == saved
    load_weights(trainer.model, saved)
    after = full_state(trainer)
    assert_same(before, after)


def test_one_save_waits_for_the_one_before(
    run_folder: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So there is never more than one copy of the state in memory."""
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    held, done = HeldBack(monkeypatch), threading.Event()
    trainer.checkpointer.save(tmp_path, 1, run=tmp_path, data_state={}, in_background=True)
    held.has_begun.wait(30)

    def second() -> None:
        trainer.checkpointer.save(tmp_path, 2, run=tmp_path, data_state={}, in_background=True)
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(0.3)
    held.may_go_on.set()
    assert done.wait(30)
    thread.join()
    trainer.checkpointer.close()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]


def test_a_failed_save_in_the_background_ends_the_run_at_the_next_one(
    run_folder: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    plain = dcp.save

    def full_disk(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return plain(*args, **kwargs)

    monkeypatch.setattr("training.checkpoint.dcp.save", full_disk)
    experiment = synthetic_experiment(run_folder, trainer={"ckpt_save_interval": 1})
    with pytest.raises(CheckpointError, match=r"step-00000002 could .*No space left.*-00000001"):
        Trainer(experiment, world=world).fit()
    assert len(calls) == 2
    assert [path.name for path in (Path(run_folder) / "checkpoints").iterdir()] == ["step-00000001"]


def test_both_ways_to_save_write_the_same(tmp_path: Path, world: World) -> None:
    found = []
    for waits in (True, False):
        folder = tmp_path / str(waits)
        settings = {"ckpt_save_interval": 2, "ckpt_in_background": not waits, "ckpt_keep_last": 9}
        Trainer(synthetic_experiment(str(folder), trainer=settings), world=world).fit()
        states = [read_state(path) for path in sorted((folder / "checkpoints").glob("step-*"))]
        assert [state["step"] for state in states] == [2, 4, 6]
        assert set(states[0]["versions"]) == {"python", "torch", "torchrec", "numpy"}
        found.append([state["crc32"]["__0_0.distcp"] for state in states])
    assert found[0] == found[1]


def test_a_kill_while_an_old_one_is_dropped_leaves_no_half(
    run_folder: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    with monkeypatch.context() as killed:
        killed.setattr("training.checkpoint.shutil.rmtree", lambda *args, **kwargs: None)
        for step in (1, 2, 3):
            trainer.checkpointer.save(tmp_path, step, run=tmp_path, data_state={})
    assert (tmp_path / ".dropped-step-00000001").exists()
    trainer.checkpointer.save(tmp_path, 4, run=tmp_path, data_state={})
    assert sorted(path.name for path in tmp_path.glob("*step*")) == [
        "step-00000003",
        "step-00000004",
    ]


def test_evaluation_builds_no_optimizer(saved: Path, world: World) -> None:
    experiment = synthetic_experiment(str(saved.parent.parent), trainer={"max_train_iters": 1})
    expected = Trainer(experiment, world=world).evaluate_checkpoint(saved)
    alone = Trainer(experiment, world=world, trains=False)
    assert alone.evaluate_checkpoint(saved) == expected
    assert not hasattr(alone, "optimizer")
    states = alone.model.fused_optimizer.state_dict()["state"]
    assert not any(key for entries in states.values() for key in entries)
