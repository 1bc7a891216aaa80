"""No part of a model's step may make the host wait for a GPU, seen without one.

Tensors of the meta device have no values, so whatever reads one on the host fails on the spot.
What is copied to the device from ordinary memory is caught by its call.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from data.loader import SequenceLoader, build_datasets
from model.build import build_model
from tests.support.experiments import retrieval_experiment, synthetic_experiment

META = torch.device("meta")
BIASES = {"use_time_bias": True, "use_relative_position_bias": True}


class HiddenCopies(TorchFunctionMode):
    """Fails on what would copy from pageable memory to the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor"):
            assert kwargs.get("device") in (None, "cpu"), f"{name}: a copy of host values"
        if name in ("__getitem__", "__setitem__") and args[0].device == META:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            lists = [part for part in index if isinstance(part, list)]
            assert not lists, f"{name}: the indices {lists} are copied to the device"
        out = func(*args, **kwargs)
        if name in ("to", "cuda", "copy_") and isinstance(out, Tensor) and out.device == META:
            came_from = args[1 if name == "copy_" else 0]
            assert came_from.device == META, f"{name}: a copy of host values"
        return out


def attention_on_meta(q_THA: Tensor, k_THA: Tensor, *, v_THV: Tensor, **arguments: Any) -> Tensor:
    """In the place of a kernel, which is tested for this on a GPU."""
    tables = [t for t in (arguments["position_bias"], arguments["time_bias"]) if t is not None]
    return v_THV + q_THA.mean() + k_THA.mean() + sum(table.mean() for table in tables)


TASKS: dict[str, Any] = {
    "ranking": synthetic_experiment,
    "ranking, history too": functools.partial(
        synthetic_experiment, dataset={"max_num_candidates": 0}
    ),
    "ranking, other widths": functools.partial(
        synthetic_experiment, network={"item_embedding_dim": 8, "contextual_embedding_dim": 4}
    ),
    "retrieval in-batch": retrieval_experiment,
    "retrieval in-batch, some": functools.partial(
        retrieval_experiment, retrieval={"num_negatives": 9}
    ),
    "retrieval random": functools.partial(
        retrieval_experiment, retrieval={"num_negatives": 20, "negatives_sampler": "random"}
    ),
}


def on_meta(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, dict[str, Tensor]]:
    """A batch, the trunk as it is built for a GPU, and rows of the sharded tables."""
    monkeypatch.setattr("modules.hstu_attention.hstu_attention", attention_on_meta)
    network = dataclasses.replace(experiment.network, kernel_backend="pytorch", **BIASES)
    experiment = dataclasses.replace(experiment, network=network)
    random = experiment.retrieval is not None and experiment.retrieval.negatives_sampler == "random"
    datasets = build_datasets(
        experiment.dataset, task=experiment.task, seed=0, global_batch_size=8, num_classes=5
    )
    loader = SequenceLoader(
        datasets.train,
        batch_size=8,
        shuffle=False,
        seed=0,
        num_negatives=experiment.retrieval.num_negatives if random else None,
    )
    model, _ = build_model(experiment, datasets.facts, device_type="cuda")
    batch = next(loader.epoch(0)).to(META)
    width = network.item_embedding_dim or network.hidden_size
    rows = {
        name: torch.zeros(count, width, device=META, requires_grad=True)
        for name, count in zip(batch.features.keys(), batch.features.length_per_key(), strict=True)
        if name.startswith("item")
    }
    return batch, model.trunk.to(META).train(), rows


@pytest.mark.parametrize("task", TASKS)
def test_forward_and_backward_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    batch, trunk, rows = on_meta(TASKS[task](str(tmp_path / "run")), monkeypatch)
    with HiddenCopies():
        trunk.num_labels(batch)
        shared = trunk.shared(batch, rows)
        output = trunk(batch, rows, shared)
        (output.loss_sum / output.num_labels).backward()
        if shared is not None:
            shared.backward()
    assert all(value.grad is not None for value in rows.values())
    assert all(parameter.grad is not None for parameter in trunk.parameters())


@pytest.mark.parametrize(
    "hidden",
    {
        "item": lambda x: x.sum().item(),
        "tolist": lambda x: x.tolist(),
        "a branch": lambda x: bool(x.any()),
        "nonzero": lambda x: x.nonzero(),
        "boolean mask": lambda x: x[x > 0],
        "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
        "list of indices": lambda x: x[[0, 1]],
        "tensor of a list": lambda x: torch.tensor([1, 2], device=x.device),
        "copy from the host": lambda x: torch.ones(3).to(x.device),
    }.items(),
    ids=lambda case: case[0],
)
def test_the_test_notices(hidden) -> None:
    with HiddenCopies(), pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        hidden[1](torch.zeros(4, dtype=torch.int64, device=META))
