"""Whether attention runs in FP8: asked for, filtered by what was measured, or neither."""

import pytest

from configs import attention_plan
from configs.attention_plan import AttentionPlan, expected_speedup, plan_attention
from configs.precision_schema import RECOMMENDED_ATTENTION_MODE
from tests.configs.conftest import Load

FP8 = (
    'MixedPrecisionArgs.mixed_precision_dtype = "fp8"\n'
    'MixedPrecisionArgs.hstu_attn_quantization_mode = "recommended"\n'
)
SHIPPED = attention_plan.MEASURED
MEASURED = {64: {512: 0.7, 2048: 0.9}, 128: {16: 0.8, 32: 1.2, 8192: 1.5}}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "MEASURED", MEASURED)


def plan(load: Load, lines: str, device_type: str = "cuda") -> AttentionPlan:
    experiment = load(lines, without=("NetworkArgs.kv_channels",))
    return plan_attention(experiment, device_type=device_type)


@pytest.mark.parametrize(
    ("head_dim", "length", "speedup"),
    [
        (64, 511, 0.0),
        (64, 512, 0.7),
        (64, 100_000, 0.9),
        (128, 8191, 1.2),
        (128, 8192, 1.5),
        (256, 8192, None),
    ],
)
def test_the_figure_is_that_of_the_longest_sequences_that_fit(
    head_dim: int, length: int, speedup: float | None
) -> None:
    assert expected_speedup(head_dim, length) == speedup


def test_what_ships_is_of_heads_that_kernels_have() -> None:
    assert set(SHIPPED) == set(attention_plan.FP8_HEAD_DIMS)
    assert all(0 < speedup < 3 for by_length in SHIPPED.values() for speedup in by_length.values())


def test_it_stays_as_it_is_unless_asked_for(load: Load) -> None:
    found = plan(load, "NetworkArgs.kv_channels = 128")
    assert (found.mode, found.is_fp8, found.reason) == ("bf16", False, "not asked for")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("NetworkArgs.kv_channels = 64", "110 tokens a user (shorter than all that was measured)"),
        ("NetworkArgs.kv_channels = 32", "no FP8 kernels for heads below 64"),
        ("NetworkArgs.kv_channels = 48", "no FP8 kernels for heads below 64"),
    ],
)
def test_what_loses_stays_in_bf16_and_says_why(load: Load, lines: str, reason: str) -> None:
    found = plan(load, FP8 + lines)
    assert not found.is_fp8 and found.reason.startswith("auto_filter_attention")
    assert reason in found.reason
    unfiltered = FP8 + lines + "\nMixedPrecisionArgs.auto_filter_attention = False"
    assert plan(load, unfiltered).mode == RECOMMENDED_ATTENTION_MODE
    assert plan(load, FP8 + lines, "cpu").is_fp8  # emulated
    assert plan(load, FP8 + lines + "\nNetworkArgs.kernel_backend = 'pytorch'").is_fp8


def test_what_wins_runs(load: Load) -> None:
    found = plan(load, FP8 + "NetworkArgs.kv_channels = 128")
    assert found.is_fp8 and found.reason == "asked for" and found.warning is None


def test_what_was_not_measured_runs_with_a_warning(load: Load) -> None:
    found = plan(load, FP8 + "NetworkArgs.kv_channels = 256")
    assert found.is_fp8 and found.warning is not None
    assert "head dim 256, which was not measured" in found.warning
