"""Delayed scaling: from the maxima of steps to scales, over ranks and through checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from modules.linear.emulated import EmulatedEngine
from modules.linear.state import OPERANDS, Fp8State, fp8_state_dict, load_fp8_state_dict
from tests.modules.linear.test_emulated import K, N, recipe_of, rows
from tests.support.two_ranks import TwoRanks

NAMES = ("layers.0.uvqk", "layers.0.proj", "layers.1.uvqk")


def state_of(names: tuple[str, ...] = NAMES, **fields: object) -> Fp8State:
    return Fp8State(names, recipe_of("delayed", **fields))


def record_all(state: Fp8State, *, factor: float = 1.0) -> Tensor:
    """Another maximum for each operand; returns them in the order of slots."""
    values = torch.arange(1.0, 3 * len(state.names) + 1) * factor
    for index, name in enumerate(state.names):
        for place, operand in enumerate(OPERANDS):
            state.record(name, operand, values[3 * index + place])
    return values


def test_slots_are_one_per_module_and_operand() -> None:
    state = state_of()
    slots = [state.slot(name, operand) for name in NAMES for operand in OPERANDS]
    assert sorted(slots) == list(range(9))
    assert state.fp8_max[state.slot("layers.1.uvqk", "dy")] == 57344
    assert state.fp8_max[state.slot("layers.1.uvqk", "w")] == 448
    assert (state_of(grad_dtype=torch.float8_e4m3fn).fp8_max == 448).all()


def test_a_record_only_grows_and_keeps_what_is_not_finite() -> None:
    state = state_of()
    for value in (2.0, 5.0, 3.0):
        state.record(NAMES[1], "w", torch.tensor(value).bfloat16())
    assert state.amax[state.slot(NAMES[1], "w")] == 5 and state.amax.count_nonzero() == 1
    for bad in (math.nan, 7.0):
        state.record(NAMES[1], "w", torch.tensor(bad))
    assert state.amax[state.slot(NAMES[1], "w")].isnan()


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("history_len", [1, 3])
def test_scales_come_from_the_history(history_len: int, algorithm: str, margin: int) -> None:
    state = state_of(history_len=history_len, amax_compute_algo=algorithm, margin=margin)
    past: list[Tensor] = []
    for factor in (1.0, 8.0, 2.0, 0.5, 0.25):
        past.append(record_all(state, factor=factor))
        state.commit()
        seen = past[-1] if algorithm == "most_recent" else torch.stack(past[-history_len:]).amax(0)
        torch.testing.assert_close(state.scale, state.fp8_max / seen / 2**margin)
        assert torch.equal(state.history[0], past[-1])
        for age, row in enumerate(reversed(past[-history_len:])):
            assert torch.equal(state.history[age], row)
        assert not state.amax.any()


def test_a_step_of_zeros_keeps_the_scale() -> None:
    state = state_of(history_len=1)
    assert not state.is_warm and (state.scale == 1).all()
    record_all(state)
    state.commit()
    before = state.scale.clone()
    assert state.is_warm
    state.record(NAMES[0], "x", torch.tensor(1e-40))
    state.commit()
    assert state.scale[0] == 2.0**126
    assert torch.equal(state.scale[1:], before[1:])


def test_a_bad_step_leaves_nothing() -> None:
    state = state_of()
    record_all(state)
    state.commit()
    before = {name: buffer.clone() for name, buffer in state.named_buffers()}
    record_all(state, factor=100)
    assert not bool(state.non_finite()) and state.first_bad() is None
    state.record(NAMES[0], "dy", torch.tensor(math.inf))
    flag = state.non_finite()
    assert flag.dtype == torch.bool and flag.dim() == 0 and bool(flag)
    state.discard()
    assert not bool(state.non_finite())
    assert all(torch.equal(buffer, before[name]) for name, buffer in state.named_buffers())


def test_the_first_bad_operand_is_that_of_the_order_of_a_step() -> None:
    state = state_of()
    expected = [f"{name}: {operand}" for name in NAMES for operand in ("x", "w")]
    expected += [f"{name}: dy" for name in reversed(NAMES)]
    for text in reversed(expected):
        name, operand = text.split(": ")
        state.record(name, operand, torch.tensor(math.nan))
        assert state.first_bad() == text


class Model(nn.Module):
    """State as a trunk owns it, with engines of another place."""

    def __init__(self, names: tuple[str, ...], **fields: object) -> None:
        super().__init__()
        self.fp8_state = state_of(names, **fields)
        self.engines = nn.ModuleList(
            EmulatedEngine(
                name=name, in_features=K, out_features=N, recipe=self.fp8_state.recipe,
                state=self.fp8_state,
            )
            for name in names
        )  # fmt: skip


def trained(names: tuple[str, ...] = NAMES, **fields: object) -> Model:
    model = Model(names, **fields)
    for factor in (1.0, 8.0, 2.0):
        record_all(model.fp8_state, factor=factor)
        model.fp8_state.commit()
    return model


def test_state_is_saved_by_module_and_not_with_the_weights() -> None:
    model = trained()
    assert not model.state_dict()
    assert not fp8_state_dict(Model(NAMES)) and not fp8_state_dict(nn.Linear(2, 2))
    saved = fp8_state_dict(model)
    assert set(saved) == {f"{name}.{entry}" for name in NAMES for entry in ("history", "scale")}
    record_all(model.fp8_state, factor=1e3)
    model.fp8_state.commit()
    wanted = torch.tensor([448 / 32, 448 / 40, 57344 / 48])
    assert torch.equal(saved["layers.0.proj.scale"], wanted)  # a copy


@pytest.mark.parametrize("history_len", [1, 4, 9])
def test_a_run_goes_on_with_its_scales(history_len: int) -> None:
    model, other = trained(), Model(NAMES, history_len=history_len)
    record_all(other.fp8_state, factor=1e3)  # what a target has seen itself is forgotten
    load_fp8_state_dict(other, fp8_state_dict(model))
    mine, its = model.fp8_state, other.fp8_state
    assert its.is_warm and not its.amax.any()
    if history_len > 1:
        assert torch.equal(its.scale, mine.scale)
    else:  # of a history that forgets the largest maxima
        assert torch.equal(its.scale, its.fp8_max / mine.history[0])
    shared = min(history_len, 4)
    assert torch.equal(its.history[:shared], mine.history[:shared])
    assert not its.history[shared:].any()
    if history_len == 4:
        for state in (mine, its):
            record_all(state, factor=0.1)
            state.commit()
        assert torch.equal(its.scale, mine.scale)


def test_scales_of_another_format_or_margin_are_made_anew() -> None:
    """A hybrid run that goes on in E4M3: its gradient scales are 128 times too large there."""
    saved = fp8_state_dict(trained())
    for fields in ({"grad_dtype": torch.float8_e4m3fn}, {"margin": 1}):
        other = Model(NAMES, **fields).fp8_state
        load_fp8_state_dict(nn.ModuleList([other]), saved)
        largest = other.history.amax(0) * other.scale
        torch.testing.assert_close(largest, other.fp8_max / 2 ** fields.get("margin", 0))


def test_half_an_entry_is_none() -> None:
    saved = fp8_state_dict(trained())
    del saved["layers.0.proj.history"]
    model = Model(NAMES)
    load_fp8_state_dict(model, saved)
    assert not model.fp8_state.is_warm and (model.fp8_state.scale[3:6] == 1).all()


def test_a_step_without_a_label_says_nothing_of_gradients() -> None:
    state = state_of()
    state.record(NAMES[0], "x", torch.tensor(3.0))
    state.commit(had_gradients=False)
    assert not state.is_warm
    record_all(state)
    state.commit()
    assert state.is_warm
    state.commit(had_gradients=False)
    assert state.is_warm


def test_other_filters_load_what_they_share() -> None:
    saved = fp8_state_dict(trained())
    fewer = Model(NAMES[1:2])
    load_fp8_state_dict(fewer, saved)
    assert fewer.fp8_state.is_warm
    assert torch.equal(fewer.fp8_state.scale, saved["layers.0.proj.scale"])

    more = Model((*NAMES, "layers.1.proj"))
    load_fp8_state_dict(more, saved)
    # the new one has no scale that means anything: all of them measure once
    assert not more.fp8_state.is_warm
    assert torch.equal(more.fp8_state.scale[:3], saved["layers.0.uvqk.scale"])
    assert (more.fp8_state.scale[9:] == 1).all()


def test_from_bf16_everything_is_fresh() -> None:
    model = trained()
    record_all(model.fp8_state)
    load_fp8_state_dict(model, {})
    state = model.fp8_state
    assert not state.is_warm and (state.scale == 1).all()
    assert not state.history.any() and not state.amax.any()
    load_fp8_state_dict(nn.Linear(2, 2), fp8_state_dict(trained()))  # into BF16: ignored


def _one_step(rank: int, world_size: int, num_rows_of: list[int]) -> dict[str, Tensor]:
    """Ones on rank 0, hundreds on rank 1, as many rows as the rank has."""
    state = state_of(("proj",))
    engine = EmulatedEngine(
        name="proj", in_features=K, out_features=N, recipe=state.recipe, state=state
    )
    weight = nn.Parameter(torch.ones(N, K))
    for _ in range(2):
        x = torch.full((num_rows_of[rank], K), 100.0 if rank else 1.0, requires_grad=True)
        weight.grad = None
        (engine.linear(x, weight, None).sum() * (rank + 2)).backward()
        gradient = weight.grad
        assert gradient is not None and bool(gradient.any()) == (num_rows_of[rank] > 0)
        dist.all_reduce(gradient)
        state.commit()
    assert x.grad is not None and x.grad.shape == x.shape
    return {name: buffer.clone() for name, buffer in state.named_buffers()} | {"dw": gradient}


@pytest.mark.parametrize(("num_rows", "expected"), [([32, 17], [100, 1, 3]), ([32, 0], [1, 1, 2])])
def test_ranks_agree_on_scales(
    two_ranks: TwoRanks, num_rows: list[int], expected: list[float]
) -> None:
    first, second = two_ranks.run(_one_step, num_rows)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert first["history"][0].tolist() == first["history"][1].tolist() == expected
    torch.testing.assert_close(first["scale"], first["fp8_max"] / torch.tensor(expected))


def _in_groups_of_one(rank: int, world_size: int) -> list[float]:
    groups = [dist.new_group([member]) for member in range(world_size)]
    state = state_of(("proj",))
    state.record("proj", "x", torch.tensor(100.0 if rank else 1.0))
    state.commit(groups[rank])
    return state.history[0].tolist()


def test_only_the_group_agrees(two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_ranks.run(_in_groups_of_one)
    assert (first[0], second[0]) == (1.0, 100.0)

    asked: list[object] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda amax, op, group: asked.extend([op, group]))
    state_of().commit("a group")  # type: ignore[arg-type]
    assert asked == [dist.ReduceOp.MAX, "a group"]


def test_rows_are_what_the_record_says() -> None:
    """The state of a step is that of its operands, whatever runs in between."""
    state = state_of(("proj",))
    engine = EmulatedEngine(
        name="proj", in_features=K, out_features=N, recipe=state.recipe, state=state
    )
    weight = nn.Parameter(torch.randn(N, K))
    for num_rows in (0, 7, 31):
        engine.linear(rows(num_rows), weight, None).sum().backward()
    largest = max(float(rows(n).float().abs().amax()) for n in (7, 31))
    assert state.amax.tolist() == [largest, float(weight.detach().abs().amax()), 1.0]
