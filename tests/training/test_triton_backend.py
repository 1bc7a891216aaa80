"""Whole training steps with our Triton kernels, through their interpreter without a GPU."""

from __future__ import annotations

import pytest

from tests.ops.triton_cases import INTERPRETED
from tests.support.experiments import retrieval_experiment, synthetic_experiment
from training.distributed import World
from training.trainer import Trainer

BIASES = {"use_time_bias": True, "use_relative_position_bias": True}
SHORT = {"max_train_iters": 2, "train_batch_size": 2, "eval_batch_size": 64}


@pytest.mark.skipif(not INTERPRETED, reason="the world of these tests is a CPU's")
@pytest.mark.parametrize("experiment", [synthetic_experiment, retrieval_experiment])
def test_a_run_with_triton_is_the_run_with_pytorch(
    run_folder: str, world: World, monkeypatch: pytest.MonkeyPatch, experiment
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    figures = []
    for backend in ("pytorch", "triton"):
        trainer = Trainer(
            experiment(
                f"{run_folder}-{backend}",
                trainer=SHORT,
                dataset={"num_generated_batches": 1},
                network=BIASES | {"num_layers": 1, "kernel_backend": backend},
            ),
            world=world,
        )
        trunk = trainer.model.module.trunk
        config = trunk.stack.config
        chosen = (config.attention_backend, config.elementwise_backend, trunk.preprocessor.backend)
        assert chosen == (backend, backend, backend)
        figures.append(trainer.fit())
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
