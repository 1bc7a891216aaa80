"""`TrainerArgs.deterministic`: what it switches, that the attention hears of it, that runs pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from modules.hstu_attention import HSTUAttention
from tests.support.experiments import retrieval_experiment, synthetic_experiment
from training.determinism import fixed_order_of_sums
from training.distributed import World
from training.trainer import Trainer


def test_it_lasts_as_long_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with fixed_order_of_sums(False):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with fixed_order_of_sums(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize("build", [synthetic_experiment, retrieval_experiment])
def test_a_run_passes_and_says_so_to_the_attention(
    run_folder: str, world: World, build: Callable[..., Any]
) -> None:
    """No operation of a step or an evaluation lacks a deterministic form."""
    experiment = build(run_folder, trainer={"deterministic": True, "max_train_iters": 3})
    with fixed_order_of_sums(experiment.trainer.deterministic):
        trainer = Trainer(experiment, world=world)
        assert trainer.fit()["loss"] > 0
    attentions = [one for one in trainer.model.modules() if isinstance(one, HSTUAttention)]
    assert attentions
    assert all(one.config.deterministic for one in attentions)
