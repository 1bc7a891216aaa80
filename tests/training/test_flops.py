"""FLOPs by hand, pairs by the reference mask, and the share of a peak."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from configs.schema import MixedPrecisionArgs
from modules.hstu_config import HSTUConfig
from ops.hstu_attention.reference import visible
from ops.hstu_attention.spec import AttentionSpec, Fp8Spec
from tests.support.experiments import batch_of, synthetic_experiment
from training.distributed import World
from training.flops import (
    PEAK_FLOPS,
    StepFlops,
    ideal_seconds,
    ideal_seconds_of,
    num_visible_pairs,
    peaks_of,
)
from training.trainer import Trainer

USERS = [(0, 0, 0), (2, 0, 0), (0, 7, 0), (2, 5, 4), (1, 1, 5), (3, 12, 1), (0, 0, 6), (2, 0, 3)]


def config_of(**switches: object) -> HSTUConfig:
    return HSTUConfig(
        hidden_size=16,
        num_heads=2,
        attention_dim=8,
        linear_dim=8,
        attention_backend="pytorch",
        **switches,
    )


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"disable_contextual_mask": True},
        {"target_group_size": 3},
        {"attention_window": 4},
        {"attention_window": 1},
        {"attention_window": 3, "target_group_size": 2, "disable_contextual_mask": True},
        {"attention_window": 100, "target_group_size": 9},
        {"is_causal": False},
        {"is_causal": False, "attention_window": 3},
    ],
    ids=str,
)
def test_pairs_are_those_of_the_reference_mask(switches: dict) -> None:
    config = config_of(**switches)
    spec = AttentionSpec(max_seq_len=99, scaling_seqlen=1.0, **({"is_causal": True} | switches))
    users = [u for u in USERS if config.is_causal or u[2] == 0]
    for user in users:
        alone = num_visible_pairs(*(np.array([count]) for count in user), config)
        assert alone == int(visible(*user, spec).sum()), user
    columns = [np.array(column) for column in zip(*users, strict=True)]
    together = sum(int(visible(*user, spec).sum()) for user in users)
    assert num_visible_pairs(*columns, config) == together


def fp8(**fields: object) -> MixedPrecisionArgs:
    return MixedPrecisionArgs(
        **({"mixed_precision_dtype": "fp8", "linear_backend": "emulated"} | fields)
    )


def test_flops_of_a_step_by_hand(run_folder: str, world: World) -> None:
    """Two layers, D = 16, H = 2, A = V = 8; users of 2 contextual tokens, events and candidates."""
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    flops = StepFlops.of(trainer.model.module.trunk, trainer.experiment)
    users = [(3, 2), (0, 1)]
    tokens = (2 + 2 * 3 + 2) + (2 + 1)
    layer = 3 * 2 * tokens * (16 * 64 + 16 * 16)
    head = 3 * 2 * (2 + 1) * (16 * 16 + 16 * 5)
    # Full contextual rows (no history is supervised), causal history, candidates on their own.
    pairs = (2 * 8 + 6 * 2 + 6 * 7 // 2 + 2 * (8 + 1)) + (2 * 2 + 1 * (2 + 1))
    attention = 6 * pairs * 2 * (8 + 8)
    found = flops(batch_of(users, batch_size=4))
    assert found == {"float32": 2 * (layer + attention) + head}
    assert flops(batch_of([], batch_size=4)) == {"float32": 0.0}


@pytest.mark.parametrize(
    ("changes", "fp8_products"),
    [
        ({"backend": "emulated"}, 0),
        ({"backend": "te"}, 3),
        ({"backend": "native", "fp8_wgrad": False}, 2),
        ({"backend": "native", "scaling": "rowwise"}, 2),
    ],
    ids=str,
)
def test_a_product_counts_under_the_precision_it_ran_in(
    run_folder: str, world: World, changes: dict, fp8_products: int
) -> None:
    precision = fp8(first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    experiment = dataclasses.replace(synthetic_experiment(run_folder), precision=precision)
    trainer = Trainer(experiment, world=world)
    trunk = trainer.model.module.trunk
    for half in (trunk.stack.layers[1].input, trunk.stack.layers[1].output):
        half.engine.recipe = dataclasses.replace(half.engine.recipe, **changes)
    batch = batch_of([(3, 2)], batch_size=4)
    found = StepFlops.of(trunk, trainer.experiment)(batch)
    plain = Trainer(synthetic_experiment(run_folder), world=world)
    everything = StepFlops.of(plain.model.module.trunk, plain.experiment)(batch)["float32"]
    product = 2 * 10 * (16 * 64 + 16 * 16)
    assert found.get("fp8", 0.0) == fp8_products * product
    assert sum(found.values()) == everything


def test_emulated_products_count_as_float32_in_a_bf16_model(run_folder: str, world: World) -> None:
    """Rounded to FP8, multiplied in FP32; attention and the other layers' linears stay in BF16."""
    experiment = synthetic_experiment(run_folder, network={"dtype_str": "bfloat16"})
    plain = Trainer(experiment, world=world)
    batch = batch_of([(3, 2)], batch_size=4)
    before = StepFlops.of(plain.model.module.trunk, experiment)(batch)
    precision = fp8(first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    emulated = dataclasses.replace(experiment, precision=precision)
    trunk = Trainer(emulated, world=world).model.module.trunk
    found = StepFlops.of(trunk, emulated)(batch)
    layer = 3 * 2 * 10 * (16 * 64 + 16 * 16)
    assert found == {
        "float32": before["float32"] + layer,
        "bfloat16": before["bfloat16"] - layer,
    }


@pytest.mark.parametrize(
    ("backend", "precision"), [("pytorch", "float32"), ("triton", "fp8"), ("cutlass", "fp8")]
)
def test_fp8_attention_counts_under_what_its_backend_multiplies_in(
    run_folder: str, world: World, backend: str, precision: str
) -> None:
    plain = synthetic_experiment(run_folder, network={"dtype_str": "bfloat16"})
    trunk = Trainer(plain, world=world).model.module.trunk
    batch = batch_of([(3, 2)], batch_size=4)
    before = StepFlops.of(trunk, plain)(batch)
    trunk.stack.config = dataclasses.replace(
        trunk.stack.config, attention_backend=backend, attention_fp8=Fp8Spec(mode="per_block")
    )
    found = StepFlops.of(trunk, plain)(batch)
    # one user of 2 contextual tokens, 3 events of two tokens and 2 candidates, as counted above
    attention = 2 * 6 * (2 * 8 + 6 * 2 + 6 * 7 // 2 + 2 * (8 + 1)) * 2 * (8 + 8)
    assert found["bfloat16"] == before["bfloat16"] - attention
    assert found.get(precision, 0.0) == before.get(precision, 0.0) + attention


def test_ideal_time_weighs_each_precision_by_its_peak() -> None:
    assert ideal_seconds({"fp8": 4e12, "bfloat16": 3e12}, {"fp8": 2e12, "bfloat16": 1e12}) == 5.0


def test_peaks_are_known_by_name_or_not_at_all(run_folder: str, world: World) -> None:
    h200 = peaks_of("NVIDIA H200")
    assert h200 is not None and h200["fp8"] > 1.9 * h200["bfloat16"]
    assert peaks_of("NVIDIA H100 PCIe")["bfloat16"] < peaks_of("NVIDIA H100 80GB HBM3")["bfloat16"]
    assert peaks_of("NVIDIA L40S")["fp8"] > peaks_of("NVIDIA L4")["fp8"]
    assert peaks_of(None) is None
    trainer = Trainer(synthetic_experiment(run_folder), world=world)
    trunk = trainer.model.module.trunk
    assert ideal_seconds_of(trunk, trainer.experiment, device=world.device) is None


@pytest.mark.parametrize(
    ("device_name", "entry"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
        ("NVIDIA A100X", None),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA H200 MIG 7g.141gb", None),
        ("Some other device", None),
        ("", None),
    ],
)
def test_peaks_are_found_by_whole_words(device_name: str, entry: str | None) -> None:
    """Each entry's figures are its own object, so that equal ones are told apart."""
    assert peaks_of(device_name) is (None if entry is None else PEAK_FLOPS[entry])
