"""Which attention backend runs: by name, by auto, and what is refused with the way out."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops.hstu_attention import (
    CallShape,
    Fp8Spec,
    available_backends,
    choose_backend,
)
from tests.ops.test_hstu_attention import CASES, attend, make_inputs
from tests.support.commands import run_command


@pytest.mark.parametrize(
    ("name", "reason"), [("triton", "need a CUDA device"), ("cutlass", "needs a CUDA device")]
)
def test_backends_that_cannot_run_are_refused_by_name(name: str, reason: str) -> None:
    assert available_backends("cpu")[name] is not None
    with pytest.raises(NotImplementedError, match=f"{name}.*{reason}.*kernel_backend"):
        choose_backend(name, device_type="cpu")
    leaves, arguments = make_inputs(CASES["plain_causal"])
    with pytest.raises(NotImplementedError, match=name):
        attend(leaves, arguments, name)


@pytest.mark.parametrize("name", ["reference", "cuttlass"])
def test_other_names_cannot_be_chosen(name: str) -> None:
    with pytest.raises(ValueError, match="must be one of auto, pytorch"):
        choose_backend(name, device_type="cpu")


def test_auto_is_resolved_before_the_call() -> None:
    assert choose_backend("auto", device_type="cpu") == "pytorch"
    leaves, arguments = make_inputs(CASES["plain_causal"])
    with pytest.raises(ValueError, match="choose_backend"):
        attend(leaves, arguments, "auto")


def test_auto_says_once_what_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ops.hstu_attention.dispatch"):
        choose_backend("auto", device_type="test_device")
        choose_backend("auto", device_type="test_device")
    assert len(caplog.records) == 1
    assert '"pytorch" on test_device' in caplog.text
    assert "triton: our Triton kernels need a CUDA device" in caplog.text


@pytest.fixture
def quiet_so_far(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("ops.hstu_attention.dispatch._announced", set())
    monkeypatch.setattr("ops.hstu_attention.dispatch.find_spec", lambda name: True)
    monkeypatch.setattr("ops.hstu_attention.fbgemm_impl.refuse", lambda device, shape: "no hstu")
    with caplog.at_level("INFO", logger="ops.hstu_attention.dispatch"):
        yield caplog


def test_auto_is_triton_on_a_gpu_and_names_what_was_refused(quiet_so_far) -> None:
    assert choose_backend("auto", device_type="cuda") == "triton"
    assert '"auto" runs "triton" on cuda (cutlass: no hstu)' in quiet_so_far.text


def test_auto_is_pytorch_on_a_cpu_even_in_the_interpreter(
    quiet_so_far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("auto", device_type="cpu") == "pytorch"


def test_a_model_is_built_where_the_packages_of_kernels_are_absent() -> None:
    """None in sys.modules: an import fails as if the package were not there."""
    script = (
        "import sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "for absent in ('triton', 'hstu'): sys.modules[absent] = None\n"
        "import training.trainer\n"
        "from ops.hstu_attention import available_backends, choose_backend\n"
        "print(available_backends('cuda'))\n"
        "print(choose_backend('auto', device_type='cuda'))\n"
        "choose_backend('triton', device_type='cuda')\n"
    )
    result = run_command([sys.executable, "-c", script], timeout_seconds=120.0)
    found, picked = result.stdout.splitlines()[-2:]
    assert "'pytorch': None" in found and picked == "pytorch"
    assert "'cutlass': 'the package hstu is not installed (build it" in found
    assert "NotImplementedError" in result.stderr, result.stderr[-2000:]
    assert "the package triton is not installed (pip install triton" in result.stderr


TRITON_LACKS = {
    "attention_dim must be 1 to 256.*got 512": {"attention_dim": 512},
    "linear_dim must be 1 to 256.*got 0": {"linear_dim": 0},
    "dtype must be one of float32, bfloat16, float16.*float64": {"dtype": torch.float64},
    "2147483647 rows.*262144 users x 8192 = 2147483648": {
        "max_num_users": 2**18,
        "max_seq_len": 2**13,
    },
}


@pytest.mark.parametrize(("reason", "fields"), TRITON_LACKS.items(), ids=TRITON_LACKS.keys())
def test_what_triton_lacks_auto_gives_to_pytorch_and_says_why(
    quiet_so_far, reason: str, fields: dict[str, Any]
) -> None:
    plain = {"attention_dim": 64, "linear_dim": 64, "dtype": torch.bfloat16}
    shape = CallShape(**(plain | fields))
    with pytest.raises(NotImplementedError, match=f"'triton' cannot run: .*{reason}"):
        choose_backend("triton", device_type="cuda", shape=shape)
    for _ in range(2):
        assert choose_backend("auto", device_type="cuda", shape=shape) == "pytorch"
    (record,) = quiet_so_far.records
    assert re.search(
        f'runs "pytorch" on cuda .triton: .*{reason}.*cutlass: no hstu', record.message
    )


def test_fp8_attention_that_auto_emulates_on_a_gpu_is_a_warning(quiet_so_far) -> None:
    fp8 = Fp8Spec(mode="per_row")
    shape = CallShape(attention_dim=64, linear_dim=64, dtype=torch.bfloat16, fp8=fp8)
    for backend in ("triton", "cutlass"):
        with pytest.raises(NotImplementedError, match="; what runs here: pytorch;"):
            choose_backend(backend, device_type="cuda", shape=shape)
    for _ in range(2):
        assert choose_backend("auto", device_type="cuda", shape=shape) == "pytorch"
    picked, emulated = quiet_so_far.records
    assert "triton: our FP8 kernels have the modes" in picked.message
    assert emulated.levelname == "WARNING" and "(per_row) is emulated" in emulated.message


FP8_LACKS = {
    "modes cast, per_block, per_head, per_tensor, got 'per_batch'": {
        "fp8": Fp8Spec(mode="per_batch")
    },
    "attention_dim = linear_dim of 64, 128, 256, got 96 and 96": {
        "attention_dim": 96,
        "linear_dim": 96,
    },
    "linear_dim of 64, 128, 256, got 64 and 128": {"linear_dim": 128},
    "rows in bfloat16 or float16, got torch.float32": {"dtype": torch.float32},
    "no position or time bias": {"has_time_bias": True},
}


@pytest.mark.parametrize(("reason", "fields"), FP8_LACKS.items(), ids=FP8_LACKS.keys())
def test_what_the_fp8_kernels_lack_is_refused_with_the_way_out(
    reason: str, fields: dict[str, Any]
) -> None:
    plain = {"attention_dim": 64, "linear_dim": 64, "dtype": torch.bfloat16}
    plain["fp8"] = Fp8Spec(mode="per_block")
    shape = CallShape(**(plain | fields))
    way_out = 'hstu_attn_quantization_mode = "bf16"'
    with pytest.raises(NotImplementedError, match=f"'triton' cannot run: .*{reason}.*{way_out}"):
        choose_backend("triton", device_type="cuda", shape=shape)


def test_fp8_kernels_are_refused_where_is_no_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = Fp8Spec(mode="cast")
    shape = CallShape(attention_dim=64, linear_dim=64, dtype=torch.bfloat16, fp8=fp8)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # it knows nothing of Gluon
    with pytest.raises(NotImplementedError, match="FP8 kernels need a Hopper GPU .*got cpu"):
        choose_backend("triton", device_type="cpu", shape=shape)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    properties = SimpleNamespace(shared_memory_per_block_optin=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    for capability, runs in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        reason = available_backends("cuda", shape)["triton"]
        assert reason is None if runs else reason is not None and "a GPU has" in reason
