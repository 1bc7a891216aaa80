"""One model on two ranks, heads split, with and without its tokens: that of one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from configs.schema import MixedPrecisionArgs, TensorModelParallelArgs
from modules.linear.parallel import GradientKind, kind_of, split_dim_of
from tests.support.experiments import (
    batch_of,
    cpu_world,
    retrieval_experiment,
    synthetic_experiment,
)
from tests.support.two_ranks import TwoRanks
from training.distributed import World
from training.step import TrainStep
from training.trainer import Trainer

SGD = {"optimizer_str": "sgd", "sparse_optimizer_str": "sgd", "learning_rate": 0.1}
BIASES = {"use_time_bias": True, "use_relative_position_bias": True, "num_time_buckets": 16}
# Users by events and candidates: 9 tokens are no multiple of two, and the last step has nobody.
STEPS = [[(6, 3), (5, 2), (0, 1)], [(1, 1)], [(10, 0), (3, 3), (4, 1), (2, 2)], [], [(6, 3)]]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases and dropout": {
        "network": BIASES | {"hidden_dropout": 0.3, "input_dropout": 0.2},
    },
    "recomputed, in parts": {
        "network": {"recompute_input_layernorm": True, "recompute_input_silu": True},
        "trainer": {"gradient_accumulation_steps": 2},
    },
    "clipped": {"optimizer": {"clip_grad": 0.5}},
    "wide heads": {"network": {"linear_channels": 12, "num_attention_heads": 4}},
}


def _train(
    rank: int, world_size: int, folder: str, case: str, splits_tokens: bool
) -> dict[str, Any]:
    """Losses and norms of all steps, an evaluation, and the parameters put together."""
    asked = CASES[case]
    experiment = synthetic_experiment(
        folder,
        trainer={"train_batch_size": 4} | asked.get("trainer", {}),
        network=asked.get("network"),
        optimizer=SGD | asked.get("optimizer", {}),
    )
    parallel = TensorModelParallelArgs(
        tensor_model_parallel_size=world_size, sequence_parallel=splits_tokens
    )
    experiment = dataclasses.replace(experiment, parallel=parallel)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    trainer.model.train()
    step = trainer._train_step()
    results = [step(batch_of(users, batch_size=4)) for users in STEPS]
    dense = dict(trainer.model.module.trunk.named_parameters())
    return {
        "results": [dataclasses.asdict(result) for result in results],
        "figures": trainer.evaluate("test"),
        "dense": {name: value.detach().clone() for name, value in dense.items()},
        "dims": {name: split_dim_of(value) for name, value in dense.items()},
        "tables": torch.cat(
            [
                shard.tensor
                for value in trainer.model.state_dict().values()
                if hasattr(value, "local_shards")
                for shard in value.local_shards()
            ]
        ),
    }


@pytest.mark.parametrize("splits_tokens", [False, True], ids=["tensor", "tensor and sequence"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(
    run_folder: str, world: World, two_ranks: TwoRanks, case: str, splits_tokens: bool
) -> None:
    alone = _train(0, 1, run_folder, case, False)
    first, second = two_ranks.run(_train, run_folder, case, splits_tokens)
    assert first["results"] == second["results"]
    for expected, found in zip(alone["results"], first["results"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert first["figures"] == second["figures"] == pytest.approx(alone["figures"], rel=1e-5)
    split = [name for name, dim in first["dims"].items() if dim is not None]
    assert len(split) == 2 * (7 if "biases" in case else 5)
    for name, value in alone["dense"].items():
        parts, dim = (first["dense"][name], second["dense"][name]), first["dims"][name]
        if dim is None:
            assert torch.equal(*parts), name
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        torch.testing.assert_close(whole, value, rtol=0, atol=1e-5, msg=name)
    rows = torch.cat([first["tables"], second["tables"]])
    torch.testing.assert_close(rows, alone["tables"], rtol=0, atol=1e-5)


def _initial(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    parallel = TensorModelParallelArgs(tensor_model_parallel_size=2, sequence_parallel=True)
    experiment = dataclasses.replace(synthetic_experiment(folder), parallel=parallel)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    named = trainer.model.module.trunk.named_parameters()
    return {"kinds": {n: kind_of(p).value for n, p in named}, "draw": torch.rand(3)}


def test_what_a_gradient_is_of_the_whole(run_folder: str, two_ranks: TwoRanks) -> None:
    first, second = two_ranks.run(_initial, run_folder)
    assert torch.equal(first["draw"], second["draw"]), "peers drop the same tokens"
    kinds = first["kinds"]
    layer = {n.split("layers.1.")[1]: kind for n, kind in kinds.items() if "layers.1." in n}
    part, tokens = GradientKind.PART.value, GradientKind.TOKENS.value
    assert layer == {
        "input.norm.weight": tokens,
        "input.norm.bias": tokens,
        "input.uvqk.weight": part,
        "input.uvqk.bias": part,
        "output.norm.weight": part,
        "output.norm.bias": part,
        "output.proj.weight": part,
        "output.proj.bias": tokens,
    }
    others = {kind for name, kind in kinds.items() if "stack.layers" not in name}
    assert others == {GradientKind.WHOLE.value}


def _fp8(rank: int, world_size: int, folder: str, splits_tokens: bool) -> dict[str, Any]:
    """Emulated delayed scaling; rank 1's heads have weights four times as large."""
    precision = MixedPrecisionArgs(
        mixed_precision_dtype="fp8", linear_backend="emulated", linear_recipe="delayed"
    )
    experiment = synthetic_experiment(
        folder,
        trainer={"train_batch_size": 4},
        network={"hidden_size": 32, "kv_channels": 16},
        optimizer=SGD,
    )
    parallel = TensorModelParallelArgs(
        tensor_model_parallel_size=world_size, sequence_parallel=splits_tokens
    )
    experiment = dataclasses.replace(experiment, precision=precision, parallel=parallel)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    with torch.no_grad():
        for layer in trainer.model.module.trunk.stack.layers:
            weight = layer.input.uvqk.weight
            if world_size == 1:
                weight[len(weight) // 2 :] *= 4.0
            elif rank == 1:
                weight *= 4.0
    trainer.model.train()
    step = trainer._train_step()
    scales = trainer.model.module.trunk.fp8_state.scale
    losses = [step(batch_of(STEPS[0], batch_size=4)).loss]
    first = scales.clone()
    losses += [step(batch_of(users, batch_size=4)).loss for users in STEPS[1:]]
    return {"losses": losses, "first": first, "last": scales.clone()}


@pytest.mark.parametrize("splits_tokens", [False, True], ids=["tensor", "tensor and sequence"])
def test_scales_are_those_of_the_whole_tensor(
    run_folder: str, world: World, two_ranks: TwoRanks, splits_tokens: bool
) -> None:
    alone = _fp8(0, 1, run_folder, False)
    first, second = two_ranks.run(_fp8, run_folder, splits_tokens)
    for when in ("first", "last"):
        assert torch.equal(first[when], second[when])
    # Rows, weight, gradient of each linear; each rank's gradient is half of the whole.
    ratios = (first["first"] / alone["first"]).view(-1, 3)
    assert ratios == pytest.approx(torch.tensor([[1.0, 1.0, 2.0]]).expand_as(ratios), rel=0.1)
    assert first["losses"] == second["losses"]
    # A sum of two products in another order moves a value over a rounding border here and there.
    assert first["losses"] == pytest.approx(alone["losses"], rel=2e-2)


def _fp8_attention(rank: int, world_size: int, folder: str, mode: str) -> Any:
    """Losses with attention alone in emulated FP8, and the scores' precision that was built."""
    precision = MixedPrecisionArgs(
        mixed_precision_dtype="fp8" if mode != "bf16" else None,
        linear_recipe=None,
        hstu_attn_quantization_mode=mode,
    )
    experiment = synthetic_experiment(folder, trainer={"train_batch_size": 4}, optimizer=SGD)
    parallel = TensorModelParallelArgs(
        tensor_model_parallel_size=world_size, sequence_parallel=world_size > 1
    )
    experiment = dataclasses.replace(experiment, precision=precision, parallel=parallel)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    trainer.model.train()
    step = trainer._train_step()
    losses = [step(batch_of(users, batch_size=4)).loss for users in STEPS]
    return losses, trainer.model.module.trunk.stack.config.attention_fp8


@pytest.mark.parametrize("mode", ["per_block", "per_row"])
def test_fp8_attention_of_own_heads(
    run_folder: str, world: World, two_ranks: TwoRanks, mode: str
) -> None:
    alone, _ = _fp8_attention(0, 1, run_folder, mode)
    (first, spec), (second, _) = two_ranks.run(_fp8_attention, run_folder, mode)
    assert spec.mode == mode
    assert first == second
    assert first == pytest.approx(alone, rel=1e-4, nan_ok=True)
    plain, none = _fp8_attention(0, 1, run_folder, "bf16")
    assert none is None
    assert first != pytest.approx(plain, rel=1e-6, nan_ok=True), "nothing was rounded"


def _retrieval(
    rank: int, world_size: int, folder: str, asked: dict[str, Any], splits_tokens: bool
) -> Any:
    """Losses of two epochs, figures, and the item table at the end."""
    plain = retrieval_experiment(
        folder,
        trainer={"train_batch_size": 4},
        network={"input_dropout": 0.2},
        optimizer=SGD,
        retrieval=asked,
    )
    parallel = TensorModelParallelArgs(
        tensor_model_parallel_size=world_size, sequence_parallel=splits_tokens
    )
    experiment = dataclasses.replace(plain, parallel=parallel)
    trainer = Trainer(experiment, world=cpu_world(rank, world_size))
    trainer.model.train()
    step, loader = trainer._train_step(), trainer.loaders["train"]
    losses = [step(batch).loss for epoch in range(2) for batch in loader.epoch(epoch)]
    shards = [
        shard.tensor
        for value in trainer.model.state_dict().values()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    ]
    return losses, trainer.evaluate("test"), torch.cat(shards)


@pytest.mark.parametrize(
    ("asked", "splits_tokens"),
    [({}, True), ({"negatives_sampler": "random", "num_negatives": 7}, False)],
    ids=["in_batch", "random"],
)
def test_retrieval_on_two_ranks_is_one_process(
    run_folder: str, world: World, two_ranks: TwoRanks, asked: dict[str, Any], splits_tokens: bool
) -> None:
    losses, figures, rows = _retrieval(0, 1, run_folder, asked, False)
    first, second = two_ranks.run(_retrieval, run_folder, asked, splits_tokens)
    assert first[0] == second[0] == pytest.approx(losses, rel=1e-5)
    assert first[1] == second[1] == pytest.approx(figures, rel=1e-5)
    torch.testing.assert_close(torch.cat([first[2], second[2]]), rows, rtol=0, atol=1e-5)


def _resumed(
    rank: int, world_size: int, folder: str, resume: str | None, steps: int, size: int
) -> Any:
    """Test figures and this rank's weights after so many steps, with Adam and dropout."""
    plain = synthetic_experiment(
        folder,
        trainer={
            "train_batch_size": 8 * size // world_size,
            "max_train_iters": steps,
            "ckpt_save_interval": 3,
            "ckpt_keep_last": 9,
            "resume": resume,
        },
        network=BIASES | {"hidden_dropout": 0.2},
    )
    parallel = TensorModelParallelArgs(tensor_model_parallel_size=size, sequence_parallel=size > 1)
    trainer = Trainer(
        dataclasses.replace(plain, parallel=parallel), world=cpu_world(rank, world_size)
    )
    if steps == 3 and resume is not None:
        return trainer.evaluate("test"), None
    figures = trainer.fit()
    named = trainer.model.module.trunk.named_parameters()
    return figures, {name: value.detach().clone() for name, value in named}


def test_a_checkpoint_holds_whole_weights(
    run_folder: str, world: World, two_ranks: TwoRanks
) -> None:
    """Two ranks go on bit for bit; one process reads the same model, and two of it again."""
    whole = two_ranks.run(_resumed, run_folder, None, 6, 2)
    third = f"{run_folder}/checkpoints/step-00000003"
    again = two_ranks.run(_resumed, f"{run_folder}-again", third, 6, 2)
    for expected, found in zip(whole, again, strict=True):
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    shared, _ = two_ranks.run(_resumed, run_folder, third, 3, 2)[0]
    replicas, _ = two_ranks.run(_resumed, run_folder, third, 3, 1)[1]
    alone, _ = _resumed(0, 1, run_folder, third, 3, 1)
    assert shared == pytest.approx(alone, rel=1e-5)
    assert replicas == pytest.approx(alone, rel=1e-5)


def _odd(rank: int, world_size: int, folder: str) -> str:
    parallel = TensorModelParallelArgs(tensor_model_parallel_size=4)
    plain = synthetic_experiment(folder, network={"num_attention_heads": 4})
    experiment = dataclasses.replace(plain, parallel=parallel)
    try:
        Trainer(experiment, world=cpu_world(rank, world_size))
    except ValueError as error:
        return str(error)
    return ""


def test_processes_must_be_a_multiple(run_folder: str, two_ranks: TwoRanks) -> None:
    for message in two_ranks.run(_odd, run_folder):
        assert "tensor_model_parallel_size must divide the number of processes, got 4 and 2" in (
            message
        )


def test_one_rank_is_the_model_of_before(run_folder: str, world: World) -> None:
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    assert trainer.grid.tensor is None and trainer.grid.data == world
    assert isinstance(trainer._train_step(), TrainStep)
