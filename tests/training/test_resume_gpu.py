"""On a GPU in deterministic mode: a job that is killed and goes on ends with the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import run_command

pytestmark = pytest.mark.gpu

_WIDE = (
    "NetworkArgs.hidden_size = 128",
    "NetworkArgs.num_attention_heads = 2",
    "NetworkArgs.kv_channels = 64",
    "NetworkArgs.dtype_str = 'bfloat16'",
)
_FP8 = (
    "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'",
    "MixedPrecisionArgs.linear_backend = 'native'",
    "MixedPrecisionArgs.hstu_attn_quantization_mode = 'recommended'",
    "MixedPrecisionArgs.auto_filter_small = False",
    "MixedPrecisionArgs.auto_filter_attention = False",
)
_BIASED = (
    "NetworkArgs.use_time_bias = True",
    "NetworkArgs.use_relative_position_bias = True",
    "NetworkArgs.hidden_dropout = 0.1",
)


@pytest.mark.parametrize(
    "bindings",
    [_BIASED, (*_WIDE, *_BIASED), (*_WIDE, *_FP8)],
    ids=["float32", "bfloat16", "fp8"],
)
def test_killed_jobs_end_with_the_same_bits(tmp_path: Path, bindings: tuple[str, ...]) -> None:
    """The soak compares records and final checkpoint with a run that nobody disturbed."""
    command = [sys.executable, "benchmarks/soak.py", "--folder", str(tmp_path / "soak")]
    command += ["--processes", "1", "--steps", "60", "--faults", "kill=2"]
    for binding in ("TrainerArgs.deterministic = True", *bindings):
        command += ["--gin-binding", binding]
    result = run_command(command, timeout_seconds=280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "kill: 2 of 2 survived" in result.stdout
