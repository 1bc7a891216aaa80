"""Every protection of training with both FP8 halves: what holds with it does not hold without.

Each case says whether one thing is right. It has to be right as it is, and wrong once the
ingredient of a naive build that the protection is against is added (benchmarks/fp8_ingredients.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import modules.hstu_attention as attention_module
from benchmarks.fp8_ingredients import INGREDIENTS, MULTIPLE, Recycled
from benchmarks.fp8_iteration_64 import gradient_of_stack
from configs.rules import ConfigError
from configs.schema import MixedPrecisionArgs
from modules.jagged_sequence import JaggedSequence
from modules.linear.emulated import EmulatedEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.state import Fp8State
from ops.hstu_attention import Fp8Spec
from tests.support.experiments import synthetic_experiment
from training.distributed import World
from training.trainer import Trainer

NUM_TOKENS = 2 * MULTIPLE + 5
FP8 = MixedPrecisionArgs(
    mixed_precision_dtype="fp8",
    linear_backend="emulated",
    linear_recipe="delayed",
    hstu_attn_quantization_mode="recommended",
)


def attention(
    *, num_rows: int = NUM_TOKENS, factor: float = 1.0, grad_factor: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of FP8 attention, as a layer calls it, on two users."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, num_rows, 2, 8, generator=generator).unbind(0)
    q, k, v = ((factor * x).requires_grad_() for x in rows[:3])
    out = attention_module.hstu_attention(
        q,
        k,
        v_THV=v,
        seq_offsets=torch.tensor([0, 20, NUM_TOKENS]),
        max_seq_len=20,
        scaling_seqlen=20.0,
        backend="pytorch",
        fp8=Fp8Spec(mode="per_block"),
    )
    return out, list(torch.autograd.grad(out, (q, k, v), grad_factor * rows[3]))


def rows_of_nobody_are_zero() -> bool:
    """Twice: memory is recycled from the second call on."""
    attention(num_rows=NUM_TOKENS + 3)
    out, grads = attention(num_rows=NUM_TOKENS + 3)
    return not any(x[NUM_TOKENS:].any() or x.isnan().any() for x in (out, *grads))


def large_values_stay_finite() -> bool:
    out, grads = attention(factor=1e3)
    return all(bool(x.isfinite().all()) for x in (out, *grads))


def large_outputs_stay_finite() -> bool:
    out, _ = attention(factor=1e3)
    assert float(out.detach().nan_to_num(posinf=1e9).abs().max()) > 65504
    return bool(out.isfinite().all())


def small_gradients_arrive() -> bool:
    """Of 1e-6: to the bit those of 1, but for the power of two."""
    _, large = attention()
    _, small = attention(grad_factor=2.0**-20)
    pairs = zip(small, large, strict=True)
    return all(torch.equal(x, y * 2.0**-20) and bool(x.any()) for x, y in pairs)


def engine() -> tuple[EmulatedEngine, Fp8State, Tensor]:
    recipe = LinearRecipe.from_args(FP8)
    assert recipe is not None
    state = Fp8State(["linear"], recipe)
    made = EmulatedEngine(
        name="linear", in_features=16, out_features=16, recipe=recipe, state=state
    )
    return made.train(), state, torch.randn(NUM_TOKENS, 16, generator=torch.Generator())


def maxima_are_those_of_real_rows() -> bool:
    linear, state, x = engine()
    linear.linear(x, torch.eye(16), None)
    return torch.equal(state.amax[state.slot("linear", "x")], x.abs().amax())


def values_beyond_history_stay_finite() -> bool:
    linear, state, x = engine()
    linear.linear(x, torch.eye(16), None)
    state.commit()
    return bool(linear.linear(4 * x, torch.eye(16), None).isfinite().all())


CASES: dict[str, tuple[Callable[[], bool], tuple[str, ...]]] = {
    "rows past the last offset": (rows_of_nobody_are_zero, ("undefined tail", "recycled NaN")),
    "saturation in attention": (large_values_stay_finite, ("raw casts, attention",)),
    "dtype of the output": (large_outputs_stay_finite, ("FP16 output",)),
    "scale of dO": (small_gradients_arrive, ("dO unscaled",)),
    "rows in a maximum": (maxima_are_those_of_real_rows, ("pads in amax",)),
    "saturation in linears": (values_beyond_history_stay_finite, ("raw casts, linears",)),
}


@pytest.mark.parametrize(
    ("name", "ingredient"), [(name, each) for name, (_, of) in CASES.items() for each in of]
)
def test_a_protection_is_there_and_is_needed(name: str, ingredient: str) -> None:
    is_right, _ = CASES[name]
    assert is_right()
    with INGREDIENTS[ingredient].context():
        assert not is_right()
    assert is_right()


@pytest.mark.parametrize("num_rows", [NUM_TOKENS + 11, NUM_TOKENS // MULTIPLE * MULTIPLE])
def test_rows_that_are_aligned_by_adding_or_cutting_enter_no_sequence(num_rows: int) -> None:
    counts = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="seq_offsets_B1"):
        JaggedSequence(
            values_TD=torch.zeros(num_rows, 8),
            seq_offsets_B1=torch.tensor([0, 20, NUM_TOKENS]),
            num_contextuals_B=counts,
            num_candidates_B=counts,
            max_seq_len=20,
            scaling_seqlen=20.0,
        )


def test_truncation_is_refused_by_its_field() -> None:
    with pytest.raises(ConfigError, match="fp8_alignment_mode must be 'pad'.*labels"):
        dataclasses.replace(FP8, fp8_alignment_mode="truncate")


def test_memory_that_was_not_cleared_is_what_was_freed() -> None:
    like = torch.empty(3, 4)
    values = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    for is_read_as_fp8 in (False, True):
        memory = Recycled(is_read_as_fp8=is_read_as_fp8)
        assert not memory.rows("out", like).any()
        memory.free("out", values)
        assert memory.rows("out", like).shape == like.shape
    assert torch.equal(Recycled(is_read_as_fp8=False).rows("out", like), torch.zeros(3, 4))
    assert memory.rows("out", torch.empty(200, 4)).isnan().any()


@pytest.fixture(scope="module")
def gradients(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str | None], Tensor]:
    """Gradient of a small model's stack by ingredient (None: as it is), after one step's maxima."""
    folder = tmp_path_factory.mktemp("runs")
    experiment = dataclasses.replace(synthetic_experiment(str(folder / "run")), precision=FP8)
    trainer = Trainer(experiment, world=world)
    trainer.model.train()
    loader = trainer.loaders["train"]
    batches = [
        batch
        for epoch in range(4)
        for batch in loader.epoch(epoch, 0)
        if batch.num_tokens % MULTIPLE
    ]
    model = trainer.model.module
    before = {name: value.clone() for name, value in model.trunk.fp8_state.named_buffers()}

    def run(name: str | None) -> Tensor:
        for key, value in model.trunk.fp8_state.named_buffers():
            value.copy_(before[key])
        model.trunk.fp8_state.is_warm = False
        if name is None:
            return two_steps()
        with INGREDIENTS[name].context():
            return two_steps()

    def two_steps() -> Tensor:
        gradient_of_stack(model, batches[0])
        model.trunk.fp8_state.commit()
        return gradient_of_stack(model, batches[1])

    return run


@pytest.mark.parametrize("name", ["recycled NaN", "all but truncation"])
def test_recycled_memory_alone_turns_a_step_to_nan(
    gradients: Callable[[str | None], Tensor], name: str
) -> None:
    assert gradients(None).isfinite().all()
    assert gradients(name).isnan().any()


@pytest.mark.parametrize(("name", "least"), [("undefined tail", 1e-3), ("truncation", 0.05)])
def test_what_stays_finite_is_another_gradient(
    gradients: Callable[[str | None], Tensor], name: str, least: float
) -> None:
    plain, found = gradients(None), gradients(name)
    assert found.isfinite().all()
    assert (found - plain).norm() > least * plain.norm()


def test_alignment_rows_that_attention_clears_change_little(
    gradients: Callable[[str | None], Tensor],
) -> None:
    plain = gradients(None)
    assert (gradients("alignment rows") - plain).norm() < 1e-4 * plain.norm()
