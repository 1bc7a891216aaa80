"""Which machine runs which FP8 linears, and the region of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from configs.schema import ExperimentArgs, MixedPrecisionArgs
from modules.linear.recipe import LinearRecipe
from modules.linear.te import te_recipe
from tests.support import te_stand_in
from tests.support.experiments import synthetic_experiment
from training.precision import check_precision, fp8_autocast
from training.startup import check_machine

EMULATED = 'MixedPrecisionArgs.linear_backend = "emulated"'
BF16 = "MixedPrecisionArgs.mixed_precision_dtype = None"
TENSORWISE = 'MixedPrecisionArgs.linear_recipe = "tensorwise"'


def fp8_args(**fields: Any) -> MixedPrecisionArgs:
    return MixedPrecisionArgs(mixed_precision_dtype="fp8", **fields)


def fp8_experiment(folder: str, **fields: Any) -> ExperimentArgs:
    if (fields.get("linear_backend"), fields.get("linear_recipe")) == ("native", "blockwise"):
        fields["linear_scaling_precision"] = "e4m3"  # the only one it has
    # wide enough for every recipe
    plain = synthetic_experiment(folder, network={"hidden_size": 32, "kv_channels": 16})
    return dataclasses.replace(plain, precision=fp8_args(**fields))


def recipe_of(**fields: Any) -> LinearRecipe:
    recipe = LinearRecipe.from_args(fp8_args(**fields))
    assert recipe is not None
    return recipe


@pytest.fixture(autouse=True)
def no_recipes_kept() -> Iterator[None]:
    te_recipe.cache_clear()
    yield
    te_recipe.cache_clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the CUDA device says of itself."""

    def is_of(capability: tuple[int, int], *, cuda: str = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a device")
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return is_of


# (backend, recipe) -> which of the capabilities below run it
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
RUNS = {
    ("te", "delayed"): "01111",
    ("te", "tensorwise"): "01111",
    ("te", "blockwise"): "00111",
    ("te", "mxfp8"): "00010",
    ("native", "delayed"): "01111",
    ("native", "tensorwise"): "01111",
    ("native", "rowwise"): "00111",
    ("native", "blockwise"): "00100",
    ("emulated", "mxfp8"): "11111",
}


@pytest.mark.parametrize("pair", RUNS, ids="-".join)
@pytest.mark.parametrize("index", range(len(CAPABILITIES)), ids=map(str, CAPABILITIES))
def test_which_device_runs_what(
    run_folder: str,
    device: Any,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    index: int,
) -> None:
    te_stand_in.install(monkeypatch)
    device(CAPABILITIES[index])
    backend, scaling = pair
    asked = fp8_experiment(run_folder, linear_backend=backend, linear_recipe=scaling)
    if RUNS[pair][index] == "1":
        check_precision(asked, device_type="cuda")
        return
    with pytest.raises(RuntimeError) as caught:
        check_precision(asked, device_type="cuda")
    major, minor = CAPABILITIES[index]
    told = str(caught.value)
    for part in (backend, scaling, "needs", f"found {major}.{minor} (a device)", EMULATED, BF16):
        assert part in told
    assert (TENSORWISE in told) == (index > 0)


@pytest.mark.parametrize("backend", ["te", "native"])
def test_no_gpu_is_refused_by_name(run_folder: str, backend: str) -> None:
    asked = fp8_experiment(run_folder, linear_backend=backend)
    with pytest.raises(RuntimeError) as caught:
        check_machine(asked, device_type="cpu")
    told = str(caught.value)
    for part in (f'linear_backend = "{backend}"', "8.9", "found device 'cpu'", EMULATED, BF16):
        assert part in told
    assert "\n" not in told


def test_what_needs_no_fp8_hardware_passes(run_folder: str) -> None:
    check_precision(synthetic_experiment(run_folder), device_type="cpu")
    check_precision(fp8_experiment(run_folder, linear_backend="emulated"), device_type="cpu")
    attention_only = {"linear_recipe": None, "hstu_attn_quantization_mode": "per_block"}
    check_precision(fp8_experiment(run_folder, **attention_only), device_type="cpu")


def test_an_older_cuda_has_no_blocks(
    run_folder: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    te_stand_in.install(monkeypatch)
    device((9, 0), cuda="12.8")
    check_precision(fp8_experiment(run_folder), device_type="cuda")
    for backend in ("te", "native"):
        asked = fp8_experiment(run_folder, linear_backend=backend, linear_recipe="blockwise")
        with pytest.raises(RuntimeError, match=r"CUDA 12\.9 or later, found 12\.8.*tensorwise"):
            check_precision(asked, device_type="cuda")


def test_a_missing_package_is_refused_with_what_runs(
    run_folder: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    device((9, 0))
    with pytest.raises(RuntimeError, match=r"transformer_engine 2\.x") as caught:
        check_precision(fp8_experiment(run_folder), device_type="cuda")
    told = str(caught.value)
    assert 'MixedPrecisionArgs.linear_backend = "native"' in told and EMULATED in told
    check_precision(fp8_experiment(run_folder, linear_backend="native"), device_type="cuda")

    device((10, 0))
    with pytest.raises(RuntimeError, match=r"transformer_engine 2\.x") as caught:
        check_precision(fp8_experiment(run_folder, linear_recipe="mxfp8"), device_type="cuda")
    assert '"native"' not in str(caught.value) and EMULATED in str(caught.value)


def test_a_missing_triton_is_refused_with_what_runs(
    run_folder: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    te_stand_in.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)
    device((9, 0))
    asked = fp8_experiment(run_folder, linear_backend="native", linear_recipe="rowwise")
    with pytest.raises(RuntimeError, match=r'linear_backend = "native".*package triton') as caught:
        check_precision(asked, device_type="cuda")
    told = str(caught.value)
    assert EMULATED in told and BF16 in told and "\n" not in told
    check_precision(fp8_experiment(run_folder, linear_backend="emulated"), device_type="cuda")
    check_precision(fp8_experiment(run_folder, linear_backend="te"), device_type="cuda")


def test_a_recipe_missing_in_the_package_is_refused(
    run_folder: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    te = te_stand_in.install(monkeypatch)
    del te.recipe.Float8BlockScaling
    device((9, 0))
    asked = fp8_experiment(run_folder, linear_recipe="blockwise")
    with pytest.raises(NotImplementedError, match='"blockwise" is not in this.*"native"'):
        check_precision(asked, device_type="cuda")


@pytest.mark.parametrize("backend", [None, "native", "emulated"])
def test_the_region_of_other_backends_does_nothing(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    recipe = None if backend is None else recipe_of(linear_backend=backend)
    region = fp8_autocast(recipe, None)
    assert isinstance(region, contextlib.nullcontext)


@pytest.mark.parametrize("is_old", [False, True], ids=["autocast", "fp8_autocast"])
def test_the_region_enters_transformer_engine_once(
    monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    state = te_stand_in.install(monkeypatch, is_old=is_old).state
    recipe, group = recipe_of(linear_recipe="delayed", margin=1), object()
    with fp8_autocast(recipe, group):  # type: ignore[arg-type]
        assert state.enabled and state.depth == 1
        assert state.recipe is te_recipe(recipe) and state.recipe.margin == 1
        assert state.group is group
    assert not state.enabled and state.depth == 0
