"""What attention a model is built with where FP8 is asked for and our kernels do not have it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.schema import ExperimentArgs, MixedPrecisionArgs
from model.build import _layer_config
from tests.support.experiments import synthetic_experiment

LACKING = {
    "bias": ({"use_time_bias": True}, {}, "no position or time bias"),
    "position": ({"use_relative_position_bias": True}, {}, "no position or time bias"),
    "mode": ({}, {"hstu_attn_quantization_mode": "per_row"}, "our FP8 kernels have the modes"),
    "head dim": ({"kv_channels": 96}, {}, "need attention_dim = linear_dim of 64, 128, 256"),
    "two dims": ({"linear_channels": 64}, {}, "need attention_dim = linear_dim of 64, 128, 256"),
    "dtype": ({"dtype_str": "float32"}, {}, "need rows in bfloat16 or float16"),
}


def experiment_of(folder: str, network: dict[str, Any], **precision: Any) -> ExperimentArgs:
    """At a size where the filter by size lets FP8 pass."""
    plain = synthetic_experiment(
        folder, network={"kv_channels": 128, "dtype_str": "bfloat16"} | network
    )
    precision = {"hstu_attn_quantization_mode": "per_block", "linear_recipe": None} | precision
    asked = MixedPrecisionArgs(mixed_precision_dtype="fp8", **precision)
    return dataclasses.replace(plain, precision=asked)


@pytest.fixture(autouse=True)
def any_size_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    always = dict.fromkeys((64, 96, 128, 256), {1: 2.0})
    monkeypatch.setattr("configs.attention_plan.MEASURED", always)


@pytest.mark.parametrize(("network", "precision", "told"), LACKING.values(), ids=LACKING.keys())
def test_auto_stays_in_bf16_and_says_why(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    network: dict[str, Any],
    precision: dict[str, Any],
    told: str,
) -> None:
    experiment = experiment_of(str(tmp_path), network, **precision)
    with caplog.at_level(logging.INFO):
        config = _layer_config(experiment, device_type="cuda", parallel=None)
    assert config.attention_fp8 is None
    assert config.attention_backend == "triton"
    (line,) = [one.message for one in caplog.records if "attention of all layers" in one.message]
    assert experiment.network.dtype_str in line
    assert "auto_filter_attention" in line
    assert told in line
    assert "emulated" not in caplog.text


@pytest.mark.parametrize(("network", "precision", "told"), LACKING.values(), ids=LACKING.keys())
def test_without_the_filter_it_is_refused(
    tmp_path: Path, network: dict[str, Any], precision: dict[str, Any], told: str
) -> None:
    experiment = experiment_of(str(tmp_path), network, auto_filter_attention=False, **precision)
    with pytest.raises(NotImplementedError) as refused:
        _layer_config(experiment, device_type="cuda", parallel=None)
    for part in ("auto_filter_attention = False", "kernel_backend = 'auto'", told, "'pytorch'"):
        assert part in str(refused.value)


def test_what_is_there_runs_and_what_is_named_is_kept(tmp_path: Path) -> None:
    ours = _layer_config(experiment_of(str(tmp_path), {}), device_type="cuda", parallel=None)
    assert (ours.attention_backend, ours.attention_fp8.mode) == ("triton", "per_block")
    biased = {"use_time_bias": True}
    named = experiment_of(str(tmp_path), biased | {"kernel_backend": "pytorch"})
    emulated = _layer_config(named, device_type="cuda", parallel=None)
    assert (emulated.attention_backend, emulated.attention_fp8.mode) == ("pytorch", "per_block")
    on_cpu = _layer_config(experiment_of(str(tmp_path), biased), device_type="cpu", parallel=None)
    assert (on_cpu.attention_backend, on_cpu.attention_fp8.mode) == ("pytorch", "per_block")
    named = experiment_of(str(tmp_path), biased | {"kernel_backend": "triton"})
    with pytest.raises(NotImplementedError, match="no position or time bias"):
        _layer_config(named, device_type="cuda", parallel=None)


def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.hstu_attention.dispatch.find_spec", lambda _: None)


def too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.hstu_attention.dispatch._TRITON_MAX_ROWS", 1)


@pytest.mark.parametrize(
    ("without", "told"),
    [(no_package, "package triton is not installed"), (too_many_rows, "rows fit our Triton")],
)
def test_auto_does_not_emulate_where_no_triton_kernel_runs(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    without: Callable[[pytest.MonkeyPatch], None],
    told: str,
) -> None:
    without(monkeypatch)
    with caplog.at_level(logging.INFO):
        config = _layer_config(experiment_of(str(tmp_path), {}), device_type="cuda", parallel=None)
    assert (config.attention_backend, config.attention_fp8) == ("pytorch", None)
    (line,) = [one.message for one in caplog.records if "attention of all layers" in one.message]
    assert told in line and "bfloat16" in line
    unfiltered = experiment_of(str(tmp_path), {}, auto_filter_attention=False)
    with pytest.raises(NotImplementedError, match=f"auto_filter_attention = False.*{told}"):
        _layer_config(unfiltered, device_type="cuda", parallel=None)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_auto_does_not_emulate_on_a_gpu_that_is_no_hopper(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=1 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with caplog.at_level(logging.INFO):
        config = _layer_config(experiment_of(str(tmp_path), {}), device_type="cuda", parallel=None)
    assert (config.attention_backend, config.attention_fp8) == ("triton", None)
    (line,) = [one.message for one in caplog.records if "attention of all layers" in one.message]
    assert "bfloat16" in line and "need a Hopper GPU" in line
    unfiltered = experiment_of(str(tmp_path), {}, auto_filter_attention=False)
    with pytest.raises(NotImplementedError, match="auto_filter_attention = False.*Hopper GPU"):
        _layer_config(unfiltered, device_type="cuda", parallel=None)
