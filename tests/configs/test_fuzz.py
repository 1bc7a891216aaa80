"""Any value in any field: an experiment that says what it will run, or one clear refusal."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.loader import ConfigError, experiment_to_gin, load_experiment
from configs.precision_schema import MixedPrecisionArgs
from configs.schema import DatasetArgs, NetworkArgs, RankingArgs, TensorModelParallelArgs
from configs.training_schema import OptimizerArgs, TrainerArgs
from tests.configs.conftest import BASE

CLASSES = (
    TrainerArgs,
    DatasetArgs,
    NetworkArgs,
    OptimizerArgs,
    RankingArgs,
    MixedPrecisionArgs,
    TensorModelParallelArgs,
)
FIELDS = [f"{one.__name__}.{field.name}" for one in CLASSES for field in dataclasses.fields(one)]
WORDS = ("auto", "triton", "pytorch", "fp8", "bf16", "te", "native", "temporal", "latest", "AUC")

numbers = st.one_of(
    st.integers(-3, 600),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.sampled_from(WORDS), st.text(max_size=8))
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.text(max_size=4), scalars, max_size=2),
)
fuzzed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def outcome(folder: Path, text: str, bindings: list[str]) -> str | None:
    """The text of the refusal, None where it was accepted."""
    path = folder / "case.gin"
    path.write_text(text, encoding="utf-8")
    try:
        experiment = load_experiment(path, bindings=bindings, task="ranking")
    except ConfigError as error:
        return str(error)
    # What is accepted is what will run: dumped and read again, it is the same.
    dumped = folder / "dumped.gin"
    dumped.write_text(experiment_to_gin(experiment), encoding="utf-8")
    again = load_experiment(dumped, task="ranking")
    started = dataclasses.replace(
        experiment,
        trainer=dataclasses.replace(experiment.trainer, resume=None, ckpt_load_dir=None),
        name=again.name,
    )
    assert again == started
    return None


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@fuzzed
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), values), min_size=1, max_size=3))
def test_values_of_any_kind_in_any_field(tmp_path: Path, changes: list[tuple[str, Any]]) -> None:
    refusal = outcome(tmp_path, BASE, [f"{field} = {value!r}" for field, value in changes])
    if refusal is not None:
        assert any(part in refusal for field, _ in changes for part in (field, field.split(".")[1]))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [[[]], {"a": {"b": 1}}, -(2**70), "", "\x00", 1e308])
def test_no_field_takes_nonsense_for_an_error_of_ours(
    tmp_path: Path, field: str, value: Any
) -> None:
    refusal = outcome(tmp_path, BASE, [f"{field} = {value!r}"])
    assert refusal is None or field.split(".")[1] in refusal


@fuzzed
@given(
    data=st.data(),
    text=st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40),
)
def test_a_file_with_anything_in_it(tmp_path: Path, data: st.DataObject, text: str) -> None:
    lines = BASE.splitlines()
    place = data.draw(st.integers(0, len(lines)))
    outcome(tmp_path, "\n".join([*lines[:place], text, *lines[place:]]), [])


@fuzzed
@given(content=st.binary(max_size=60))
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "case.gin"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_experiment(path, task="ranking")
