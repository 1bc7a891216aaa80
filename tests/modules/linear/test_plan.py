"""Which linears run in FP8, and why the others do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from configs.rules import ConfigError
from configs.schema import ExperimentArgs, MixedPrecisionArgs
from modules.linear import speed_table
from modules.linear.plan import PlannedLinear, format_plan, plan_linears, warnings_of
from modules.linear.recipe import LinearRecipe
from modules.linear.speed_table import expected_speedup
from tests.support.experiments import retrieval_experiment, synthetic_experiment

HEAD = ["head.layers.0", "head.layers.3"]


def experiment_of(
    precision: dict[str, Any] | None = None,
    *,
    num_layers: int = 4,
    make: Any = synthetic_experiment,
    **parts: Any,
) -> ExperimentArgs:
    network = {"num_layers": num_layers} | parts.pop("network", {})
    base = make("runs/none", network=network, **parts)
    fields: dict[str, Any] = {"mixed_precision_dtype": "fp8", "linear_backend": "emulated"}
    args = MixedPrecisionArgs(**(fields | (precision or {})))
    return dataclasses.replace(base, precision=args)


def in_layers(*layers: int) -> list[str]:
    names = ("input.uvqk", "output.proj")
    return [f"stack.layers.{layer}.{name}" for layer in layers for name in names]


def fp8_names(plan: tuple[PlannedLinear, ...]) -> list[str]:
    return [linear.name for linear in plan if linear.is_fp8]


def reason_of(plan: tuple[PlannedLinear, ...], name: str) -> str:
    return next(linear.reason for linear in plan if linear.name == name)


FIRST_AND_LAST = {"first_last_layers_bf16": True}
SWITCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "neither": ({"mixed_precision_dtype": None}, []),
    "linears": ({}, in_layers(0, 1, 2, 3)),
    "attention": (
        {"linear_recipe": None, "hstu_attn_quantization_mode": "per_head"},
        [],
    ),
    "both": ({"hstu_attn_quantization_mode": "per_head"}, in_layers(0, 1, 2, 3)),
    "first and last": (FIRST_AND_LAST, in_layers(1, 2)),
    "first two": (
        FIRST_AND_LAST | {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 0},
        in_layers(2, 3),
    ),
    "numbers without their switch": ({"num_layers_at_start_in_bf16": 3}, in_layers(0, 1, 2, 3)),
    "head": ({"enable_fp8_for_prediction_head": True}, [*in_layers(0, 1, 2, 3), HEAD[0]]),
    "one kind": ({"filter_modules": ("proj",)}, [f"stack.layers.{i}.input.uvqk" for i in range(4)]),
    "some layers": ({"filter_modules": ("layers.0.", "layers.3.")}, in_layers(1, 2)),
}


@pytest.mark.parametrize(("precision", "names"), SWITCHES.values(), ids=SWITCHES)
def test_what_runs_in_fp8(precision: dict[str, Any], names: list[str]) -> None:
    plan = plan_linears(experiment_of(precision))
    assert [linear.name for linear in plan] == in_layers(0, 1, 2, 3) + HEAD
    assert fp8_names(plan) == names
    assert all(linear.reason for linear in plan)


def test_default_is_off() -> None:
    plan = plan_linears(synthetic_experiment("runs/none"))
    assert fp8_names(plan) == []
    assert {linear.reason for linear in plan} == {"FP8 is off"}


def test_retrieval_has_no_head() -> None:
    precision = {"enable_fp8_for_prediction_head": True}
    plan = plan_linears(experiment_of(precision, make=retrieval_experiment))
    assert [linear.name for linear in plan] == in_layers(0, 1, 2, 3)


def test_shapes_and_reasons_are_told() -> None:
    experiment = experiment_of(
        FIRST_AND_LAST
        | {"filter_modules": ("layers.1.input",), "enable_fp8_for_prediction_head": True},
        network={
            "hidden_size": 32,
            "num_attention_heads": 3,
            "kv_channels": 16,
            "linear_channels": 8,
            "dtype_str": "bfloat16",
        },
    )
    plan = plan_linears(experiment)
    shapes = {linear.name: (linear.in_features, linear.out_features) for linear in plan}
    assert shapes["stack.layers.2.input.uvqk"] == (32, 3 * 2 * (16 + 8))
    assert shapes["stack.layers.2.output.proj"] == (24, 32)
    assert shapes["head.layers.3"] == (16, 5)
    assert "first 1" in reason_of(plan, "stack.layers.0.input.uvqk")
    assert "last 1" in reason_of(plan, "stack.layers.3.input.uvqk")
    assert "'layers.1.input'" in reason_of(plan, "stack.layers.1.input.uvqk")
    assert "24" in reason_of(plan, "stack.layers.2.output.proj")
    assert "width 5 is not divisible by 16" in reason_of(plan, "head.layers.3")
    assert fp8_names(plan) == ["stack.layers.2.input.uvqk", "head.layers.0"]

    table = format_plan(plan, LinearRecipe.from_args(experiment.precision)).splitlines()
    assert len(table) == 1 + len(plan)
    row = next(line for line in table if line.startswith("stack.layers.2.input.uvqk "))
    assert row.split()[1:] == ["32", "x", "144", "FP8", "tensorwise", "emulated", "asked", "for"]
    assert "BF16" in table[1] and "FP32" in table[-1] and "tensorwise" not in table[1]


def test_a_model_that_no_linear_of_can_run_is_refused_by_layer_and_width() -> None:
    network = {"hidden_size": 100, "num_attention_heads": 2, "kv_channels": 50}
    with pytest.raises(ConfigError) as caught:
        experiment_of(network=network)
    for part in ("stack.layers.0.input.uvqk", "100", "16", "MixedPrecisionArgs", "linear_recipe"):
        assert part in str(caught.value)
    assert caught.value.fields[0] == "NetworkArgs.hidden_size"
    with pytest.raises(ConfigError, match=r"filter_modules has 'layers'") as caught:
        experiment_of({"filter_modules": ("layers",)})
    assert caught.value.fields[0] == "MixedPrecisionArgs.filter_modules"
    experiment_of({"mixed_precision_dtype": None}, network=network)


def test_microscaling_needs_wider_multiples() -> None:
    network = {"hidden_size": 48, "num_attention_heads": 2, "kv_channels": 24}
    assert fp8_names(plan_linears(experiment_of({"linear_recipe": "blockwise"}, network=network)))
    with pytest.raises(ConfigError, match="48 is not divisible by 32"):
        experiment_of({"linear_recipe": "mxfp8"}, network=network)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"amax_history_len": 0}, "amax_history_len"),
        ({"linear_scaling_precision": "e3m4"}, "linear_scaling_precision"),
        (FIRST_AND_LAST | {"num_layers_at_start_in_bf16": 4}, "num_layers_at_start_in_bf16"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"MixedPrecisionArgs.{name}"):
        experiment_of(fields)


TE = {"linear_backend": "te", "linear_recipe": "delayed"}
LARGE = {"hidden_size": 1024, "num_attention_heads": 4, "kv_channels": 256}
"""uvqk 1024 x 4096, proj 1024 x 1024."""


def large(precision: dict[str, Any], *, users: int, **trainer: int) -> ExperimentArgs:
    """2 + 2 * 9 + 3 = 23 tokens a user."""
    experiment = experiment_of(
        precision, network=LARGE, trainer={"train_batch_size": users, **trainer}
    )
    assert experiment.max_seq_len == 23
    return experiment


def test_small_linears_stay_as_they_are() -> None:
    plan = plan_linears(large(TE, users=3000))  # 69,000 tokens: proj is measured as slower
    assert fp8_names(plan) == [f"stack.layers.{i}.input.uvqk" for i in range(4)]
    reason = reason_of(plan, "stack.layers.0.output.proj")
    assert "auto_filter_small" in reason and "69000 rows" in reason and "0.67x" in reason
    assert plan[0].rows == 69_000

    everything = plan_linears(large(TE | {"auto_filter_small": False}, users=3000))
    assert fp8_names(everything) == in_layers(0, 1, 2, 3)


def test_parts_of_a_step_count_one_by_one() -> None:
    experiment = large(TE, users=3000, gradient_accumulation_steps=2)
    plan = plan_linears(experiment)
    assert fp8_names(plan) == [] and plan[0].rows == 34_500
    (warning,) = warnings_of(plan, experiment)
    assert "auto_filter_small = False" in warning


def test_the_head_has_fewer_rows_than_the_stack() -> None:
    experiment = experiment_of(
        TE | {"enable_fp8_for_prediction_head": True}, network=LARGE,
        trainer={"train_batch_size": 3000}, ranking={"prediction_head_arch": (4096, 5)},
    )  # fmt: skip
    head = next(linear for linear in plan_linears(experiment) if linear.name == "head.layers.0")
    assert head.rows == 3 * 3000 and head.is_too_small


def test_emulated_linears_are_never_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {("emulated", "tensorwise"): {(1, 1, 1): 0.1}}
    monkeypatch.setattr(speed_table, "_MEASURED", slow)
    assert fp8_names(plan_linears(experiment_of())) == in_layers(0, 1, 2, 3)


def test_a_filter_of_no_name_is_told_of() -> None:
    experiment = experiment_of({"filter_modules": ("proj", "prjo")})
    (warning,) = warnings_of(plan_linears(experiment), experiment)
    assert "'prjo'" in warning and "stack.layers.0.input.uvqk" in warning
    assert not warnings_of(plan_linears(experiment_of()), experiment_of())


def test_a_pair_without_figures_is_told_of_because_nothing_is_filtered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blockwise = {
        "linear_backend": "native",
        "linear_recipe": "blockwise",
        "linear_scaling_precision": "e4m3",
    }
    measured = dict(speed_table._MEASURED)
    measured.pop(("native", "blockwise"), None)
    monkeypatch.setattr(speed_table, "_MEASURED", measured)

    def warnings(**fields: Any) -> list[str]:
        experiment = experiment_of(blockwise | fields)
        plan = plan_linears(experiment)
        assert fp8_names(plan) == in_layers(0, 1, 2, 3)
        return warnings_of(plan, experiment)

    (warning,) = warnings()
    assert "not measured, so not filtered" in warning
    assert "'native'" in warning and "'blockwise'" in warning
    assert warnings(auto_filter_small=False) == []
    assert warnings(linear_backend="emulated") == []
    measured["native", "blockwise"] = {(1, 1, 1): 2.0}
    assert warnings() == []


def test_history_that_moves_once_a_part_of_a_step_is_told_of() -> None:
    parts = {"users": 6000, "gradient_accumulation_steps": 2}

    def warnings(**fields: Any) -> list[str]:
        experiment = large(TE | {"auto_filter_small": False} | fields, **parts)
        return warnings_of(plan_linears(experiment), experiment)

    (warning,) = warnings()
    assert "2 times a step" in warning and "gradient_accumulation_steps = 2" in warning
    assert "'te'" in warning and "'delayed'" in warning
    assert warnings(linear_backend="native") == []
    assert warnings(linear_recipe="tensorwise") == []
    parts["gradient_accumulation_steps"] = 1
    assert warnings() == []


def test_speed_is_that_of_the_largest_measured_size_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = {
        (1000, 64, 256): 0.3,
        (1000, 128, 512): 0.8,
        (9000, 64, 256): 0.9,
        (9000, 128, 512): 1.4,
        (9000, 512, 128): 1.3,
    }
    monkeypatch.setattr(speed_table, "_MEASURED", {("native", "delayed"): measured})

    def speed(tokens: int, width: int, out: int) -> float | None:
        return expected_speedup("native", "delayed", tokens=tokens, width=width, out=out)

    assert speed(1000, 64, 256) == speed(8999, 127, 512) == speed(1000, 256, 64) == 0.3
    assert speed(8999, 512, 128) == 0.8
    assert speed(9000, 64, 512) == 0.9
    # both orientations of one size were measured: the lower one holds for both
    assert speed(10**6, 4096, 4096) == speed(9000, 128, 512) == 1.3
    assert speed(999, 64, 256) == speed(10**6, 63, 4096) == speed(0, 64, 256) == 0.0
    assert expected_speedup("te", "delayed", tokens=1000, width=64, out=256) is None


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise"])
def test_the_known_figures_decide(scaling: str) -> None:
    def speed(tokens: int, width: int, out: int) -> float:
        found = expected_speedup("te", scaling, tokens=tokens, width=width, out=out)
        assert found is not None
        return found

    assert speed(65_536, 1024, 4096) > 1.1 and speed(262_144, 8192, 2048) > 1.2
    assert speed(65_536, 512, 2048) < 0.7 and speed(16_384, 1024, 4096) < 0.7
    assert speed(1024, 4096, 4096) == 0.0
