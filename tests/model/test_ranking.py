"""The ranking model: which events are scored, and what their scores may depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import ExperimentArgs
from data.batch import PackedSamples, SequenceBatch, collate
from data.loader import build_datasets
from model.build import build_model
from model.ranking import RankingOutput, RankingTrunk
from tests.support.experiments import synthetic_experiment
from training.sharding import initialize_dense

HISTORY, CANDIDATES = (4, 6, 1), (3, 2, 3)


def make_batch(**changes: Any) -> SequenceBatch:
    """Three users (and one padding user) with 7, 8 and 4 events."""
    lengths = [h + c for h, c in zip(HISTORY, CANDIDATES, strict=True)]
    total = sum(lengths)
    draw = np.random.default_rng(0)
    samples = {
        "history_lengths_S": np.array(HISTORY),
        "num_candidates_S": np.array(CANDIDATES),
        "items_E": draw.integers(0, 60, total),
        "labels_E": draw.integers(0, 5, total),
        "timestamps_E": np.sort(draw.integers(0, 10_000, total)),
        "contextual_FS": np.array([[1, 2, 3], [0, 1, 2]]),
        "sample_ids_S": np.arange(3),
        "user_ids_S": np.array([11, 12, 13]),
    }
    samples |= changes
    return collate(
        PackedSamples(actions_E=samples["labels_E"], **samples),
        batch_size=4,
        item_feature_name="item",
        action_feature_name="action",
        contextual_feature_names=["user_id", "age"],
    )


def build(experiment: ExperimentArgs) -> tuple[RankingTrunk, torch.nn.Embedding]:
    """The trunk with drawn weights, and a stand-in for the sharded item table."""
    facts = build_datasets(experiment.dataset, num_classes=5).facts
    model, _ = build_model(experiment, facts, device_type="cpu")
    initialize_dense(model.trunk, seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        items = torch.nn.Embedding(60, experiment.network.hidden_size)
        for parameter in model.trunk.stack.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)  # far from the identity of a fresh stack
    return model.trunk, items


def run(trunk: RankingTrunk, items: torch.nn.Embedding, batch: SequenceBatch) -> RankingOutput:
    return trunk(batch, {"item": items(batch.features["item"].values())})


@pytest.fixture
def experiment(tmp_path: Any) -> ExperimentArgs:
    return synthetic_experiment(str(tmp_path), network={"num_layers": 3})


def with_history_loss(experiment: ExperimentArgs) -> ExperimentArgs:
    dataset = dataclasses.replace(experiment.dataset, max_num_candidates=0)
    return dataclasses.replace(experiment, dataset=dataset)


def events_of(user: int) -> range:
    lengths = [h + c for h, c in zip(HISTORY, CANDIDATES, strict=True)]
    begin = sum(lengths[:user])
    return range(begin, begin + lengths[user])


def candidate_events() -> list[int]:
    return [event for user in range(3) for event in events_of(user)[HISTORY[user] :]]


def test_scores_exactly_the_candidates(experiment: ExperimentArgs) -> None:
    trunk, items = build(experiment)
    batch = make_batch()
    output = run(trunk, items, batch)
    assert output.labels_E.tolist() == batch.labels_E[candidate_events()].tolist()
    assert output.user_ids_E.tolist() == [11] * 3 + [12] * 2 + [13] * 3
    assert output.logits_EK.shape == (8, 5)
    assert int(output.num_labels) == 8


def test_a_candidate_s_label_is_never_an_input(experiment: ExperimentArgs) -> None:
    trunk, items = build(experiment)
    batch = make_batch()
    labels = batch.labels_E.numpy().copy()
    labels[candidate_events()] = (labels[candidate_events()] + 1) % 5
    changed = run(trunk, items, make_batch(labels_E=labels))
    assert torch.equal(run(trunk, items, batch).logits_EK, changed.logits_EK)


def test_a_history_label_is_an_input(experiment: ExperimentArgs) -> None:
    trunk, items = build(experiment)
    batch = make_batch()
    labels = batch.labels_E.numpy().copy()
    labels[events_of(1)[0]] = (labels[events_of(1)[0]] + 1) % 5
    changed = run(trunk, items, make_batch(labels_E=labels)).logits_EK
    plain = run(trunk, items, batch).logits_EK
    assert torch.equal(changed[:3], plain[:3])
    assert (changed[3:5] - plain[3:5]).abs().max() > 1e-6
    assert torch.equal(changed[5:], plain[5:])


def test_candidates_do_not_see_each_other(experiment: ExperimentArgs) -> None:
    trunk, items = build(experiment)
    batch = make_batch()
    changed_items = batch.features["item"].values().numpy().copy()
    second = events_of(0)[HISTORY[0] + 1]
    changed_items[second] = (changed_items[second] + 1) % 60
    plain = run(trunk, items, batch).logits_EK
    changed = run(trunk, items, make_batch(items_E=changed_items)).logits_EK
    assert (changed[1] - plain[1]).abs().max() > 1e-6
    others = [0, 2, 3, 4, 5, 6, 7]
    torch.testing.assert_close(changed[others], plain[others], rtol=0, atol=1e-6)


def test_history_loss_trains_on_every_item_and_leaks_no_label(experiment: ExperimentArgs) -> None:
    """With contextual tokens and three layers: event i's label must not reach logits 0..i."""
    trunk, items = build(with_history_loss(experiment))
    no_candidates = {
        "history_lengths_S": np.array([7, 8, 4]),
        "num_candidates_S": np.zeros(3, np.int64),
    }
    batch = make_batch(**no_candidates)
    plain = run(trunk, items, batch)
    assert plain.labels_E.tolist() == batch.labels_E.tolist()
    event = 3
    labels = batch.labels_E.numpy().copy()
    labels[event] = (labels[event] + 1) % 5
    changed = run(trunk, items, make_batch(labels_E=labels, **no_candidates))
    difference = (changed.logits_EK - plain.logits_EK).abs().amax(dim=1)
    assert difference[: event + 1].max() == 0
    assert difference[event + 1 : 7].min() > 1e-7


def test_a_user_does_not_depend_on_its_batch_mates(experiment: ExperimentArgs) -> None:
    trunk, items = build(experiment)
    batch = make_batch()
    events = events_of(0)
    alone = make_batch(
        labels_E=batch.labels_E.numpy()[events],
        items_E=batch.features["item"].values().numpy()[events],
        timestamps_E=batch.timestamps_E.numpy()[events],
        contextual_FS=np.array([[1], [0]]),
        history_lengths_S=np.array(HISTORY[:1]),
        num_candidates_S=np.array(CANDIDATES[:1]),
        sample_ids_S=np.array([0]),
        user_ids_S=np.array([11]),
    )
    together = run(trunk, items, batch).logits_EK[:3]
    torch.testing.assert_close(run(trunk, items, alone).logits_EK, together, rtol=0, atol=1e-6)


def test_an_empty_batch_has_zero_loss_and_zero_gradients(experiment: ExperimentArgs) -> None:
    trunk, items = build(experiment)
    none = np.zeros(0, np.int64)
    empty = make_batch(
        labels_E=none,
        items_E=none,
        timestamps_E=none,
        history_lengths_S=none,
        num_candidates_S=none,
        contextual_FS=np.zeros((2, 0), np.int64),
        sample_ids_S=none,
        user_ids_S=none,
    )
    output = run(trunk, items, empty)
    output.loss_sum.backward()
    assert (float(output.loss_sum), int(output.num_labels)) == (0.0, 0)
    for name, parameter in trunk.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_batch_longer_than_configured_is_refused(experiment: ExperimentArgs) -> None:
    trunk, items = build(experiment)
    batch = dataclasses.replace(make_batch(), max_length=experiment.max_seq_len + 1)
    with pytest.raises(ValueError, match="max_seq_len"):
        run(trunk, items, batch)


def test_bfloat16_stays_close_to_float32(experiment: ExperimentArgs) -> None:
    half = dataclasses.replace(
        experiment, network=dataclasses.replace(experiment.network, dtype_str="bfloat16")
    )
    batch = make_batch()
    exact, rounded = (run(*build(e), batch).logits_EK for e in (experiment, half))
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("num_tasks", [1, 2])
@pytest.mark.parametrize("with_history", [True, False])
def test_labels_are_counted_without_a_forward(
    tmp_path: Any, num_tasks: int, with_history: bool
) -> None:
    """Of this rank's training loss, whatever the mode of the model."""
    ranking = {"prediction_head_arch": (8, 5 if num_tasks == 1 else 2), "num_tasks": num_tasks}
    experiment = synthetic_experiment(str(tmp_path), ranking=ranking)
    if with_history:
        experiment = with_history_loss(experiment)
    trunk, items = build(experiment)
    for batch in (make_batch(), make_batch(num_candidates_S=np.array([1, 2, 0]),
                                           history_lengths_S=np.array([6, 6, 4]))):  # fmt: skip
        expected = run(trunk.train(), items, batch).num_labels
        assert torch.equal(trunk.num_labels(batch), expected)
        assert torch.equal(trunk.eval().num_labels(batch), expected)
    assert trunk.shared(batch, {}) is None
