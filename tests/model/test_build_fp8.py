"""Models with FP8 linears: where engines sit, what stays as it was, how training goes."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.schema import ExperimentArgs, MixedPrecisionArgs
from model.build import build_model
from model.ranking import RankingTrunk
from model.trunk import SequenceModel
from modules.linear.emulated import EmulatedEngine
from modules.linear.engine import LinearEngine
from modules.linear.native import NativeEngine
from modules.linear.plan import plan_linears
from modules.linear.state import Fp8State, fp8_state_dict
from modules.linear.te import TeEngine
from tests.model.test_build import SYNTHETIC
from tests.support.experiments import batch_of, retrieval_experiment, synthetic_experiment
from training.sharding import initialize_dense

USERS = [(9, 3), (4, 2), (0, 1), (7, 3), (2, 2), (6, 1)]
LINEARS = ("input.uvqk", "output.proj")


def fp8(experiment: ExperimentArgs, **fields: Any) -> ExperimentArgs:
    known: dict[str, Any] = {
        "mixed_precision_dtype": "fp8",
        "linear_backend": "emulated",
        "linear_recipe": "delayed",
        "amax_history_len": 4,
    }
    return dataclasses.replace(experiment, precision=MixedPrecisionArgs(**(known | fields)))


def build(experiment: ExperimentArgs) -> SequenceModel:
    model, _ = build_model(experiment, SYNTHETIC, device_type="cpu")
    initialize_dense(model.trunk, seed=1)
    return model


def engines_of(model: nn.Module) -> dict[str, LinearEngine]:
    return {m.name: m for m in model.modules() if isinstance(m, LinearEngine)}


@pytest.fixture
def experiment(tmp_path: Any) -> ExperimentArgs:
    return synthetic_experiment(str(tmp_path), network={"num_layers": 4})


@pytest.mark.parametrize("make", [synthetic_experiment, retrieval_experiment])
def test_engines_are_those_of_the_plan(make: Any, tmp_path: Any) -> None:
    experiment = fp8(
        make(str(tmp_path), network={"num_layers": 4}),
        first_last_layers_bf16=True,
        enable_fp8_for_prediction_head=True,
    )
    model = build(experiment)
    engines = engines_of(model)
    assert list(engines) == [row.name for row in plan_linears(experiment) if row.is_fp8]
    for name, engine in engines.items():
        linear = model.trunk.get_submodule(name)
        assert isinstance(linear, nn.Linear) and isinstance(engine, EmulatedEngine)
        assert (linear.in_features, linear.out_features) == (
            engine.in_features,
            engine.out_features,
        )
    layers = model.trunk.stack.layers
    assert layers[0].input.engine is None and layers[3].output.engine is None
    assert layers[1].input.engine is engines["stack.layers.1.input.uvqk"]
    assert layers[2].output.engine is engines["stack.layers.2.output.proj"]
    if isinstance(model.trunk, RankingTrunk):
        head = model.trunk.head
        assert head.engine_of(head.layers[0]) is engines["head.layers.0"]
        assert head.engine_of(head.layers[3]) is None


def test_the_plan_has_every_linear_of_the_model(experiment: ExperimentArgs) -> None:
    model = build(experiment)
    parts = {"stack": model.trunk.stack, "head": model.trunk.head}
    found = {
        f"{part}.{name}": (linear.in_features, linear.out_features)
        for part, module in parts.items()
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear)
    }
    plan = plan_linears(experiment)
    assert found == {row.name: (row.in_features, row.out_features) for row in plan}


@pytest.mark.parametrize(
    ("backend", "scaling", "has_state"),
    [
        ("emulated", "delayed", True),
        ("emulated", "tensorwise", False),
        ("native", "delayed", True),
        ("te", "delayed", False),
    ],
)
def test_state_is_shared_and_only_where_it_is_ours(
    experiment: ExperimentArgs, backend: str, scaling: str, has_state: bool
) -> None:
    model = build(
        fp8(experiment, linear_backend=backend, linear_recipe=scaling, auto_filter_small=False)
    )
    states = [module for module in model.modules() if isinstance(module, Fp8State)]
    engines = engines_of(model)
    kind = {"emulated": EmulatedEngine, "native": NativeEngine, "te": TeEngine}[backend]
    assert len(engines) == 8 and all(type(engine) is kind for engine in engines.values())
    assert len(states) == has_state
    if has_state:
        assert states == [model.trunk.fp8_state] and states[0].names == tuple(engines)
    assert all(engine.state is (states[0] if states else None) for engine in engines.values())


def test_weights_and_their_names_are_those_of_bf16(experiment: ExperimentArgs) -> None:
    fp8_args = fp8(experiment, enable_fp8_for_prediction_head=True)
    plain, changed = build(experiment), build(fp8_args)
    wanted, found = plain.trunk.state_dict(), changed.trunk.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    names = [[name for name, _ in model.named_parameters()] for model in (plain, changed)]
    assert names[0] == names[1]


def test_the_start_says_what_runs_how(
    experiment: ExperimentArgs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    build(fp8(experiment, filter_modules=("layers.2.", "typo")))
    (table,) = [r.message for r in caplog.records if "stack.layers.0.input.uvqk " in r.message]
    for row in plan_linears(experiment):
        assert row.name in table and f"{row.in_features} x {row.out_features}" in table
    assert "filter_modules has 'layers.2.'" in table and "delayed" in table
    assert [
        r.message for r in caplog.records if r.levelno == logging.WARNING and "typo" in r.message
    ]
    caplog.clear()
    build(experiment)
    assert "stack.layers.0" not in caplog.text


class Run:
    """A training loop in the small: one batch a step, plain Adam."""

    def __init__(self, experiment: ExperimentArgs) -> None:
        self.trunk = build(experiment).trunk
        torch.manual_seed(3)
        self.items = nn.Embedding(60, experiment.network.hidden_size)
        parameters = [*self.trunk.parameters(), *self.items.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-2)
        self.num_steps = 0

    def output(self, users: list[tuple[int, int]], first_user: int = 0) -> Any:
        batch = batch_of(users, batch_size=8, first_user=first_user)
        return self.trunk(batch, {"item": self.items(batch.features["item"].values())})

    def step(self) -> float:
        users = USERS[self.num_steps % 3 :]
        output = self.output(users, first_user=self.num_steps % 3)
        loss = output.loss_sum / output.num_labels.clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for module in self.trunk.modules():
            if isinstance(module, Fp8State):
                assert not bool(module.non_finite())
                module.commit()
        self.num_steps += 1
        return float(loss.detach())

    def everything(self) -> dict[str, Tensor]:
        found = dict(self.trunk.state_dict()) | fp8_state_dict(self.trunk)
        found |= {f"buffer {name}": tensor for name, tensor in self.trunk.named_buffers()}
        found["rng"] = torch.get_rng_state()
        return copy.deepcopy(found)


@pytest.mark.parametrize("fp8_eval", [False, True])
def test_an_evaluation_disturbs_nothing(experiment: ExperimentArgs, fp8_eval: bool) -> None:
    runs = [Run(fp8(experiment, fp8_eval=fp8_eval)) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    for index, run in enumerate(runs):
        for _ in range(2):
            losses[index].append(run.step())
        if index == 0:
            before = run.everything()
            run.trunk.eval()
            with torch.no_grad():
                logits = run.output([(9, 3), (1, 1), (0, 2)]).logits_EK
            run.trunk.train()
            after = run.everything()
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert torch.isfinite(logits).all()
        losses[index] += [run.step() for _ in range(6)]
    assert losses[0] == losses[1]


def test_evaluation_is_that_of_the_plain_model_unless_asked_for(
    experiment: ExperimentArgs,
) -> None:
    logits = []
    for args in (experiment, fp8(experiment), fp8(experiment, fp8_eval=True)):
        run = Run(args)
        run.trunk.eval()
        with torch.no_grad():
            logits.append(run.output(USERS).logits_EK)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    "fields",
    [
        {"linear_recipe": "delayed", "enable_fp8_for_prediction_head": True},
        {"linear_recipe": "blockwise"},
    ],
    ids=["delayed", "blockwise"],
)
def test_training_ends_where_it_ends_without_fp8(
    experiment: ExperimentArgs, fields: dict[str, Any]
) -> None:
    plain, rounded = Run(experiment), Run(fp8(experiment, **fields))
    losses = [[run.step() for _ in range(40)] for run in (plain, rounded)]
    assert all(torch.isfinite(torch.tensor(losses[1])))
    assert losses[1] != losses[0]
    assert all(sum(curve[-3:]) < 0.5 * sum(curve[:3]) for curve in losses)
    assert abs(sum(losses[1]) - sum(losses[0])) < 0.05 * sum(losses[0])


def test_a_batch_without_users_gives_gradients_of_zero(experiment: ExperimentArgs) -> None:
    run = Run(fp8(experiment, enable_fp8_for_prediction_head=True))
    run.step()
    run.optimizer.zero_grad()
    run.output([]).loss_sum.backward()
    for name in engines_of(run.trunk):
        gradient = run.trunk.get_submodule(name).weight.grad
        assert gradient is not None and not gradient.any()
    run.trunk.fp8_state.commit()
    scale = run.trunk.fp8_state.scale
    assert torch.isfinite(scale).all() and (scale > 0).all()
