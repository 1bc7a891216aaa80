"""Batches of any shape train or are refused; damaged checkpoints never load as something else."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.experiments import batch_of, synthetic_experiment
from training.checkpoint import read_state
from training.distributed import World
from training.step import TrainStep
from training.trainer import Trainer

fuzzed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

MAX_HISTORY, MAX_CANDIDATES = 9, 3  # of `synthetic_experiment`: 12 events, 3 of them candidates
sizes = st.one_of(st.integers(0, 12), st.sampled_from([0, 1, 9, 10, 100, 3000]))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, world: World) -> Trainer:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    trainer = Trainer(
        synthetic_experiment(str(folder), trainer={"max_train_iters": 1}), world=world
    )
    trainer.fit()
    return trainer


@fuzzed
@given(users=st.lists(st.tuples(sizes, sizes), max_size=8))
def test_batches_of_any_lengths(trainer: Trainer, users: list[tuple[int, int]]) -> None:
    batch = batch_of(users, batch_size=8)
    step = TrainStep(trainer.model.module, trainer.optimizer)
    longest = 2 + max((2 * history + candidates for history, candidates in users), default=0)
    limit = trainer.experiment.max_seq_len
    if longest > limit:
        with pytest.raises(ValueError, match=str(limit)):
            step(batch)
        return
    result = step(batch)
    assert math.isfinite(result.loss)
    assert result.num_labels == sum(candidates for _, candidates in users)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
@fuzzed
@given(share=st.floats(0, 0.999), put=st.binary(min_size=1, max_size=16))
def test_changed_bytes_of_a_checkpoint_are_refused(
    trainer: Trainer, tmp_path: Path, name: str, share: float, put: bytes
) -> None:
    assert trainer.folder is not None
    good = trainer.folder / "checkpoints" / "step-00000001"
    copy = tmp_path / "step-00000001"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(good, copy)
    content = (copy / name).read_bytes()
    place = int(share * len(content))
    changed = (content[:place] + put + content[place + len(put) :])[: len(content)]
    (copy / name).write_bytes(changed)
    if changed == content:
        return
    if name != "state.json":
        with pytest.raises(RuntimeError, match=f"the contents of {name}"):
            trainer.checkpointer.load(copy)
        return
    try:
        state = read_state(copy)
    except ValueError as error:
        assert "step-00000001" in str(error)
        return
    assert set(state) and json.dumps(state)
