"""The retrieval model: what predicts what, and what a query may depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.schema import ExperimentArgs, FeatureArgs
from data.batch import SequenceBatch, negatives_feature, with_negatives
from data.loader import build_datasets
from model.build import build_model
from model.retrieval import RetrievalTrunk, _followed_events
from modules.negatives import Negatives
from tests.support.experiments import batch_of, retrieval_experiment
from tests.support.two_ranks import TwoRanks
from training.sharding import initialize_dense

NUM_ITEMS = 60
USERS = [(5, 2), (1, 1), (0, 1), (7, 0)]
RANDOM = {"negatives_sampler": "random", "num_negatives": 9}


class Recorder:
    """Stands in for the loss and keeps what it is asked about."""

    def __init__(self) -> None:
        self.query, self.target_ids = torch.zeros(0), torch.zeros(0)
        self.target, self.is_counted = torch.zeros(0), torch.zeros(0)

    def loss_sum(self, query: Tensor, target: Tensor, target_ids: Tensor, **rest: Tensor) -> Tensor:
        self.query, self.target, self.target_ids = query, target, target_ids
        self.is_counted = rest["is_counted_R"]
        return query.sum()


class Built:
    """A trunk with drawn weights, and a stand-in for the sharded item table."""

    def __init__(self, experiment: ExperimentArgs, *, device: str = "cpu") -> None:
        facts = build_datasets(experiment.dataset, task="retrieval").facts
        model, _ = build_model(experiment, facts, device_type=device)
        trunk = model.trunk
        assert isinstance(trunk, RetrievalTrunk)
        initialize_dense(trunk, seed=1)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            width = experiment.network.item_embedding_dim or experiment.network.hidden_size
            self.items = nn.Embedding(NUM_ITEMS, width)
            for parameter in trunk.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.3)  # far from a fresh stack's identity
        self.trunk, self.facts = trunk.to(device), facts
        self.items.to(device)

    def embeddings(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """Leaves, as the cut has them; none for an item table that the trunk itself holds."""
        item = self.facts.item_feature_name
        if self.trunk.replicated.serves(item):
            return {}
        present = batch.features.keys()
        served = [name for name in (item, negatives_feature(item)) if name in present]
        return {
            name: self.items(batch.features[name].values()).detach().requires_grad_()
            for name in served
        }

    def recorded(self, batch: SequenceBatch, embeddings: Mapping[str, Tensor] | None = None):
        """What the loss is asked about in this batch."""
        objective, recorder = self.trunk.objective, Recorder()
        rows = self.embeddings(batch) if embeddings is None else embeddings
        shared = self.trunk.shared(batch, rows)
        self.trunk.objective = recorder
        try:
            self.trunk(batch, rows, shared)
        finally:
            self.trunk.objective = objective
        return recorder

    def step(self, batch: SequenceBatch, *, num_parts: int = 1) -> dict[str, Tensor]:
        """Loss, labels and all gradients, the users taken in parts."""
        self.trunk.zero_grad()
        cut = self.embeddings(batch)
        shared = self.trunk.shared(batch, cut)
        labels = torch.zeros_like(self.trunk.num_labels(batch))
        loss = torch.zeros((), device=labels.device)
        for part in batch.split(num_parts):
            rows = {name: cut[name][part.rows[name]] for name in part.rows if name in cut}
            output = self.trunk(part.batch, rows, shared)
            output.loss_sum.backward()
            loss, labels = loss + output.loss_sum.detach(), labels + output.num_labels
        shared.backward()
        gradients = {name: values.grad for name, values in cut.items()}
        gradients |= {name: p.grad for name, p in self.trunk.named_parameters()}
        leaves = cut | dict(self.trunk.named_parameters())
        return {"loss": loss, "labels": labels} | {
            name: torch.zeros_like(leaves[name]) if grad is None else grad.clone()
            for name, grad in gradients.items()
        }


@pytest.fixture
def experiment(tmp_path: Any) -> ExperimentArgs:
    network = {"num_layers": 3, "use_time_bias": True, "use_relative_position_bias": True}
    return retrieval_experiment(str(tmp_path), network=network)


def changed(experiment: ExperimentArgs, part: str, **values: Any) -> ExperimentArgs:
    new = dataclasses.replace(getattr(experiment, part), **values)
    return dataclasses.replace(experiment, **{part: new})


def replicated_items(experiment: ExperimentArgs) -> ExperimentArgs:
    tables = [
        dataclasses.replace(table, sharding_type="data_parallel")
        for table in experiment.dataset.embedding_args
    ]
    return changed(experiment, "dataset", embedding_args=tuple(tables))


def items_alone(experiment: ExperimentArgs) -> ExperimentArgs:
    dataset = experiment.dataset
    groups = (
        FeatureArgs(feature_names=("item",), max_sequence_length=12, is_jagged=True),
        dataset.feature_args[1],
    )
    tables = tuple(t for t in dataset.embedding_args if t.table_name != "action")
    return changed(
        experiment,
        "dataset",
        feature_args=groups,
        embedding_args=tables,
        action_feature_name=None,
    )


def events_of(users: list[tuple[int, int]], user: int) -> range:
    begin = sum(history + candidates for history, candidates in users[:user])
    return range(begin, begin + sum(users[user]))


def test_every_history_event_but_the_last_predicts_the_next(experiment: ExperimentArgs) -> None:
    built, batch = Built(experiment), batch_of(USERS, batch_size=6)
    found = built.recorded(batch)
    ids = batch.features["item"].values()
    counted = found.is_counted
    wanted = [
        event + 1
        for user, (history, _) in enumerate(USERS)
        for event in events_of(USERS, user)[: max(0, history - 1)]
    ]
    assert found.target_ids[counted].tolist() == ids[wanted].tolist()
    rows = built.items(ids[wanted])
    assert torch.equal(found.target[counted], rows)
    output = built.step(batch)
    assert int(output["labels"]) == int(built.trunk.num_labels(batch)) == len(wanted) == 4 + 6


def test_the_loss_tells_the_target_from_all_other_items_of_the_batch(
    experiment: ExperimentArgs,
) -> None:
    built, batch = Built(experiment), batch_of(USERS, batch_size=6)
    found, settings = built.recorded(batch), experiment.retrieval
    history = [e for u, (h, _) in enumerate(USERS) for e in events_of(USERS, u)[:h]]
    others = batch.features["item"].values()[history].unique()
    total = 0.0
    for query, target in zip(
        found.query[found.is_counted], found.target_ids[found.is_counted].long(), strict=True
    ):
        unit = [x / x.norm().clamp(min=settings.l2_norm_eps) for x in (query, *built.items(others))]
        scores = torch.stack([unit[0] @ item for item in unit[1:]]) / settings.temperature
        total += float(scores.logsumexp(0) - scores[others == target].squeeze())
    assert float(built.step(batch)["loss"]) == pytest.approx(total, rel=1e-5)


def test_a_candidate_is_no_target_no_negative_and_no_input(experiment: ExperimentArgs) -> None:
    built = Built(experiment)
    plain, other = (batch_of(USERS, batch_size=6) for _ in range(2))
    ids = other.features["item"].values()
    candidates = [e for u, (h, _) in enumerate(USERS) for e in events_of(USERS, u)[h:]]
    ids[candidates] = (ids[candidates] + 17) % NUM_ITEMS
    first, second = built.step(plain), built.step(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def with_changed_events(batch: SequenceBatch, events: list[int]) -> SequenceBatch:
    """The batch with other items, times and (where they have one) actions at some item events."""
    values = batch.features.values().clone()
    times = batch.timestamps_E.clone()
    num_events = len(times)
    is_history = np.repeat(
        np.tile([True, False], batch.batch_size),
        np.stack(
            [batch.host_lengths_KB[1], batch.host_lengths_KB[0] - batch.host_lengths_KB[1]], 1
        ).ravel(),
    )
    for event in events:
        values[event] = (values[event] + 7) % NUM_ITEMS
        times[event] += 1_000_000
        if is_history[event]:
            action = num_events + int(is_history[:event].sum())
            values[action] = (values[action] + 2) % 5
    copy = batch_of(USERS, batch_size=batch.batch_size)
    copy.features.values().copy_(values)
    copy.timestamps_E.copy_(times)
    return copy


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("event", range(4))
def test_no_query_sees_a_later_event(
    experiment: ExperimentArgs, monkeypatch: pytest.MonkeyPatch, event: int, is_causal: bool
) -> None:
    """Three layers with contextual tokens: what they see of the history, all history sees.

    So the same check finds the leak where the rule that closes it is taken away.
    """
    assert experiment.resolved_disable_contextual_mask
    monkeypatch.setattr(ExperimentArgs, "resolved_disable_contextual_mask", is_causal)
    built, batch = Built(experiment), batch_of(USERS, batch_size=6)
    later = list(events_of(USERS, 0))[event + 1 :]
    plain = built.recorded(batch).query
    difference = (built.recorded(with_changed_events(batch, later)).query - plain).abs().amax(dim=1)
    num_queries = USERS[0][0] - 1
    assert (difference[: event + 1].max() == 0) == is_causal
    if event + 1 < num_queries:
        assert difference[event + 1 : num_queries].min() > 1e-4


@pytest.mark.parametrize("event", range(4))
def test_no_gradient_of_a_query_reaches_a_later_event(
    experiment: ExperimentArgs, event: int
) -> None:
    built, batch = Built(experiment), batch_of(USERS, batch_size=6)
    cut = built.embeddings(batch)
    built.recorded(batch, cut).query[event].square().sum().backward()
    reached = cut["item"].grad.abs().amax(dim=1)
    assert reached[: event + 1].min() > 0
    assert not reached[event + 1 :].any()


def test_no_query_changes_when_events_are_taken_from_the_end(experiment: ExperimentArgs) -> None:
    """Nor does the number of later events show: positions count from the oldest."""
    built = Built(experiment)
    long, short = (built.recorded(batch_of([(n, 0)], batch_size=1)).query for n in (7, 4))
    ids = batch_of([(7, 0)], batch_size=1).features["item"].values()
    batch = batch_of([(4, 0)], batch_size=1)
    full = batch_of([(7, 0)], batch_size=1)
    batch.features.values()[:4] = ids[:4]
    batch.features.values()[4:8] = full.features.values()[7:11]
    batch.features.values()[8:] = full.features.values()[14:]
    short = built.recorded(batch).query
    torch.testing.assert_close(short, long[:3], rtol=0, atol=1e-6)


def test_a_user_s_query_does_not_depend_on_its_batch_mates(experiment: ExperimentArgs) -> None:
    built = Built(experiment)
    together = built.recorded(batch_of(USERS, batch_size=6))
    alone = built.recorded(batch_of([(7, 0)], batch_size=2, first_user=3))
    torch.testing.assert_close(alone.query, together.query[-6:], rtol=0, atol=1e-6)
    assert alone.target_ids.tolist() == together.target_ids[-6:].tolist()


def test_evaluation_asks_from_the_newest_history_event(experiment: ExperimentArgs) -> None:
    """The query of a held-out event is what training would have asked from the same place."""
    built = Built(experiment)
    batch = batch_of([(5, 2), (0, 1), (3, 0)], batch_size=4)
    with torch.no_grad():
        asked = built.trunk.held_out(batch, built.embeddings(batch))
        assert asked.target_users_C.tolist() == [0, 0, 1]
        ids = batch.features["item"].values()[[5, 6, 7]]
        assert torch.equal(asked.target_ids_C, ids)
        assert torch.equal(asked.target_rows_CD, built.items(ids))
        longer = batch_of([(7, 0)], batch_size=4)  # the same events, all of them history
        in_training = built.recorded(longer).query[4]
    torch.testing.assert_close(asked.query_BD[0], in_training, rtol=0, atol=1e-6)
    assert not asked.query_BD[1].any(), "no history: all items are alike"
    assert asked.query_BD[2].any()


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("kind", ["sharded", "replicated", "random", "few", "wide", "items alone"])
def test_parts_of_a_step_add_up_to_the_whole(
    experiment: ExperimentArgs, kind: str, num_parts: int
) -> None:
    if kind == "replicated":
        experiment = replicated_items(experiment)
    elif kind == "random":
        experiment = changed(experiment, "retrieval", **RANDOM)
    elif kind == "few":
        experiment = changed(experiment, "retrieval", num_negatives=5)
    elif kind == "wide":
        experiment = changed(experiment, "network", item_embedding_dim=12)
    elif kind == "items alone":
        experiment = items_alone(experiment)
    built = Built(experiment)
    if kind == "items alone":
        data = build_datasets(experiment.dataset, task="retrieval", global_batch_size=8).train
        batch = data.batch(np.arange(3), batch_size=4)
        assert batch.features.keys() == ["item", "user_id", "age"]
    else:
        batch = batch_of([(5, 0), (1, 0), (4, 0)], batch_size=4)
    if kind == "random":
        batch = with_negatives(batch, np.array([50, 3, 8, 59, 1, 0, 20, 30, 40]))
    whole, parts = built.step(batch), built.step(batch, num_parts=num_parts)
    assert whole.keys() == parts.keys()
    assert float(whole["loss"]) > 1
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-5, atol=1e-5, msg=name)
        if name not in ("loss", "labels") and "replicated" not in name:
            assert expected.any(), f"{name} is not trained"


def test_every_position_row_that_evaluation_asks_from_is_trained(
    experiment: ExperimentArgs,
) -> None:
    built = Built(experiment)
    events = experiment.max_history_events
    gradient = built.step(batch_of([(events, 0)], batch_size=1))["preprocessor.position.weight"]
    unused = gradient.abs().amax(dim=1) == 0
    assert unused.nonzero().squeeze(1).tolist() == [2], "only the candidates' row"


def test_position_rows_are_there_only_where_asked_for(experiment: ExperimentArgs) -> None:
    names = [name for name, _ in Built(experiment).trunk.named_parameters()]
    without = changed(experiment, "network", use_position_embedding=False)
    built = Built(without)
    left_out = set(names) - {name for name, _ in built.trunk.named_parameters()}
    assert left_out == {"preprocessor.position.weight"}
    assert float(built.step(batch_of(USERS, batch_size=6))["loss"]) > 0


def test_queries_have_the_width_of_the_items(experiment: ExperimentArgs) -> None:
    built = Built(changed(experiment, "network", item_embedding_dim=12))
    assert built.recorded(batch_of(USERS, batch_size=6)).query.shape == (6 + 1 + 6, 12)
    assert not list(Built(experiment).trunk.query.parameters())


def test_the_item_table_serves_random_negatives(experiment: ExperimentArgs) -> None:
    facts = build_datasets(experiment.dataset, task="retrieval").facts
    random = changed(experiment, "retrieval", **RANDOM)
    for chosen, names in ((experiment, ("item",)), (random, ("item", "item_negatives"))):
        model, specs = build_model(chosen, facts, device_type="cpu")
        assert specs[0].feature_names == names
        assert "feature_item_negatives" not in model.trunk.preprocessor.projections
    built = Built(random)
    batch = with_negatives(batch_of(USERS, batch_size=6), np.array([9, 4, 30]))
    shared = built.trunk.shared(batch, built.embeddings(batch))
    assert isinstance(shared, Negatives)
    assert shared.ids_M.tolist() == [4, 9, 30]
    assert torch.equal(shared.rows_MD, built.items(torch.tensor([4, 9, 30])))


def test_an_empty_batch_has_zero_loss_and_zero_gradients(experiment: ExperimentArgs) -> None:
    for users in ([], [(1, 0)], [(0, 2)]):
        found = Built(experiment).step(batch_of(users, batch_size=2))
        assert not any(value.any() for value in found.values())


def _own_step(
    rank: int, world_size: int, experiment: ExperimentArgs, shares: list[list[tuple[int, int]]]
) -> dict[str, Tensor]:
    """This rank's part of a step; dense gradients are summed over ranks, as the step does it."""
    import torch.distributed as dist

    built = Built(experiment)
    users = shares[rank]
    batch = batch_of(users, batch_size=4, first_user=sum(map(len, shares[:rank])))
    if experiment.retrieval.negatives_sampler == "random":
        batch = with_negatives(batch, np.array([50, 3, 8, 59, 1, 0, 20, 30, 40]))
    found = built.step(batch, num_parts=2)
    if world_size > 1:
        for name, value in found.items():
            if not name.startswith("item"):
                dist.all_reduce(value)
    return found


SHARES: dict[str, list[list[tuple[int, int]]]] = {
    "unequal": [[(5, 0), (3, 0), (7, 0)], [(4, 0)]],
    "second empty": [[(5, 0), (3, 0)], []],
    "first empty": [[], [(5, 0), (3, 0)]],
    "one without a target": [[(6, 0), (4, 0)], [(1, 0), (0, 0)]],
    "nobody": [[], []],
}


@pytest.mark.parametrize("kind", ["sharded", "replicated", "few", "random"])
@pytest.mark.parametrize("case", SHARES)
def test_two_ranks_are_one_process_on_the_union(
    experiment: ExperimentArgs, two_ranks: TwoRanks, case: str, kind: str
) -> None:
    if kind == "replicated":
        experiment = replicated_items(experiment)
    elif kind == "few":
        experiment = changed(experiment, "retrieval", num_negatives=5)
    elif kind == "random":
        experiment = changed(experiment, "retrieval", **RANDOM)
    alone = _own_step(0, 1, experiment, [sum(SHARES[case], [])])
    pair = two_ranks.run(_own_step, experiment, SHARES[case])
    assert (float(alone["loss"]) > 0) == (case != "nobody")
    for name, expected in alone.items():
        values = [found[name] for found in pair]
        if name == "item":
            together = torch.cat(values)
        elif name == "item_negatives":  # looked up by both; a row's gradient goes back through one
            assert not (values[0].any(dim=1) & values[1].any(dim=1)).any()
            together = sum(values)
        else:
            together = values[0]
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sharded", "few", "random"])
def test_a_gpu_gets_the_cpu_s_result_and_is_not_waited_for(
    experiment: ExperimentArgs, kind: str
) -> None:
    """Repeats are kept there instead of dropped; the stack in between may wait as it likes."""
    if kind == "few":
        experiment = changed(experiment, "retrieval", num_negatives=5)
    elif kind == "random":
        experiment = changed(experiment, "retrieval", **RANDOM)
    batch = batch_of([(5, 0), (1, 0), (9, 0)], batch_size=4)
    if kind == "random":
        batch = with_negatives(batch, np.array([50, 3, 8, 59, 1, 0, 20, 30, 40]))
    expected = Built(experiment).step(batch)
    built = Built(experiment, device="cuda")
    found = built.step(batch.to(torch.device("cuda")))
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-4, msg=name)

    batch = batch.to(torch.device("cuda"))
    asked, cut = built.recorded(batch), built.embeddings(batch)
    leaves = [x.detach().requires_grad_() for x in (asked.query, asked.target)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        built.trunk.num_labels(batch)
        events, is_counted = _followed_events(batch)
        shared = built.trunk.shared(batch, cut)
        built.trunk.objective.loss_sum(
            *leaves,
            asked.target_ids,
            negative_MD=shared.rows_MD,
            negative_ids_M=shared.ids_M,
            is_used_M=shared.is_used_M,
            is_counted_R=is_counted,
        ).backward()
        shared.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(events) == 4 + 8
