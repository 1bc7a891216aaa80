"""The entry as a user starts it: whole processes, exit codes, what lands on disk and on screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import (
    PROJECT_ROOT,
    CommandResult,
    bindings,
    metric_records,
    run_command,
    start_entry,
)
from tests.support.experiments import write_movielens

ENTRY = "pretrain_gr_ranking.py"
SMALL = {
    "TrainerArgs.max_train_iters": 20,
    "TrainerArgs.log_interval": 1,
    "TrainerArgs.eval_interval": 10,
    "TrainerArgs.max_eval_iters": 2,
}


def start(
    config: str, values: dict[str, Any], *, processes: int | None = None, script: str = ENTRY
) -> CommandResult:
    return start_entry(script, config, values, processes=processes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CommandResult]:
    """A finished run of the synthetic example, started with plain python."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    result = start("benchmark_ranking.gin", SMALL | {"TrainerArgs.output_dir": str(folder)})
    assert result.returncode == 0, result.stderr
    return folder, result


def test_plain_python_trains_and_prints_the_test_metrics(run: tuple[Path, CommandResult]) -> None:
    folder, result = run
    losses = [record["loss"] for record in metric_records(folder) if record["split"] == "train"]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed["split"] == "test"
    assert printed["run"] == str(folder)
    assert 0 <= printed["auc"] <= 1
    # Without a terminal: plain lines, no control characters of a progress bar.
    assert "\x1b" not in result.stderr
    assert "step 10/20 validation" in result.stderr


def test_a_fresh_process_scores_a_checkpoint_as_training_did(
    run: tuple[Path, CommandResult],
) -> None:
    folder, _ = run
    checkpoint = folder / "checkpoints" / "step-00000020"
    command = [sys.executable, ENTRY, "--gin-config-file", str(folder / "operative_config.gin")]
    result = run_command([*command, "--evaluate", str(checkpoint)], timeout_seconds=150)
    assert result.returncode == 0, result.stderr
    printed = {(line := json.loads(text))["split"]: line for text in result.stdout.splitlines()}
    logged = {
        r["split"]: r for r in metric_records(folder) if r["step"] == 20 and r["split"] != "train"
    }
    assert set(printed) == set(logged) == {"validation", "test"}
    for split, figures in logged.items():
        del figures["step"], figures["split"], printed[split]["split"], printed[split]["run"]
        assert printed[split] == pytest.approx(figures, rel=1e-6)


def test_evaluation_of_another_model_is_refused(run: tuple[Path, CommandResult]) -> None:
    folder, _ = run
    checkpoint = folder / "checkpoints" / "step-00000020"
    command = [sys.executable, ENTRY, "--gin-config-file", str(folder / "operative_config.gin")]
    command += bindings({"NetworkArgs.scaling_seqlen": 17})
    result = run_command([*command, "--evaluate", str(checkpoint)], timeout_seconds=60)
    assert result.returncode != 0
    assert "NetworkArgs.scaling_seqlen" in result.stderr
    assert "Traceback" not in result.stderr


def test_two_processes_run_to_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = SMALL | {"TrainerArgs.output_dir": str(folder)}
    result = start("benchmark_ranking.gin", values, processes=2)
    assert result.returncode == 0, result.stderr
    assert result.processes_left == 0
    steps = [record["step"] for record in metric_records(folder) if record["split"] == "train"]
    assert steps == list(range(1, 21))
    losses = [record["loss"] for record in metric_records(folder) if record["split"] == "train"]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert result.stderr.count("step 20/20 test") == 1, "only rank 0 speaks"


RAISE_ON_RANK_ONE = f"""
import os, sys
sys.path.insert(0, {str(PROJECT_ROOT)!r})
from training.step import TrainStep
plain = TrainStep.__call__
def failing(self, batch, **options):
    if os.environ["RANK"] == "1" and self.num_steps == 1:
        raise OSError("the disk of rank one went away")
    return plain(self, batch, **options)
TrainStep.__call__ = failing
from pretrain_gr_ranking import main
main()
"""


def test_one_failing_rank_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(RAISE_ON_RANK_ONE)
    values = SMALL | {"TrainerArgs.output_dir": str(tmp_path / "run")}
    result = start("benchmark_ranking.gin", values, processes=2, script=str(script))
    assert result.returncode != 0
    assert result.seconds < 90
    assert result.processes_left == 0
    assert "the disk of rank one went away" in result.stderr
    assert "rank      : 1" in result.stderr, "torchrun's summary names the first cause"


SLEEP_ON_RANK_ONE = RAISE_ON_RANK_ONE.replace(
    'raise OSError("the disk of rank one went away")', "import time; time.sleep(600)"
)


def test_a_rank_that_never_comes_ends_the_job_after_the_time_set(tmp_path: Path) -> None:
    script = tmp_path / "sleeping.py"
    script.write_text(SLEEP_ON_RANK_ONE)
    assert "time.sleep" in SLEEP_ON_RANK_ONE, "the line to replace has changed"
    values = SMALL | {
        "TrainerArgs.output_dir": str(tmp_path / "run"),
        "TrainerArgs.process_group_timeout_seconds": 4,
    }
    result = start("benchmark_ranking.gin", values, processes=2, script=str(script))
    assert result.returncode != 0
    assert result.seconds < 90  # 30 of them torchrun's patience with the sleeper
    assert result.processes_left == 0
    assert "Timed out waiting 4000ms" in result.stderr
    assert "rank      : 0" in result.stderr


KILLED_RANK_ONE = RAISE_ON_RANK_ONE.replace(
    'raise OSError("the disk of rank one went away")',
    "import signal; os.kill(os.getpid(), signal.SIGKILL)",
)


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED_RANK_ONE)
    assert "SIGKILL" in KILLED_RANK_ONE, "the line to replace has changed"
    values = SMALL | {"TrainerArgs.output_dir": str(tmp_path / "run")}
    result = start("benchmark_ranking.gin", values, processes=2, script=str(script))
    assert result.returncode != 0
    assert result.seconds < 60
    assert result.processes_left == 0
    cause = result.stderr[result.stderr.index("Root Cause") :]
    assert "rank      : 1" in cause and "Signal 9 (SIGKILL)" in cause


def test_fp8_on_two_processes_runs_to_the_end(tmp_path: Path) -> None:
    """The file of the FP8 recipe as a user without a GPU starts it, with balanced batches."""
    data, folder = write_movielens(tmp_path / "movielens"), tmp_path / "run"
    values = movielens_values(data, folder) | {
        "TrainerArgs.max_train_iters": 6,
        "TrainerArgs.train_batch_size": 8,
        "TrainerArgs.enable_balanced_shuffler": True,
        "TrainerArgs.table_comms_forward": "bf16",
        "MixedPrecisionArgs.linear_backend": "emulated",
        "NetworkArgs.dtype_str": "float32",
    }
    result = start("movielens_ranking_fp8.gin", values, processes=2)
    assert result.returncode == 0, result.stderr
    assert result.processes_left == 0
    records = metric_records(folder)
    assert [r["step"] for r in records if r["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["split"] == "test" and 0 < records[-1]["auc"] < 1
    assert "FP8      delayed  emulated" in result.stderr
    assert "rows of tables travel as bf16, their gradients as fp32" in result.stderr


def test_a_refusal_of_one_rank_is_told_with_its_rank(tmp_path: Path) -> None:
    script = tmp_path / "refusing.py"
    script.write_text(
        "import dataclasses, os, sys\n"
        f"sys.path.insert(0, {str(PROJECT_ROOT)!r})\n"
        "import training.run\n"
        "check = training.run.check_machine\n"
        "def refuse(experiment, *, device_type):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        network = dataclasses.replace(experiment.network, kernel_backend='triton')\n"
        "        check(dataclasses.replace(experiment, network=network), device_type=device_type)\n"
        "training.run.check_machine = refuse\n"
        "from pretrain_gr_ranking import main\n"
        "main()\n"
    )
    values = SMALL | {"TrainerArgs.output_dir": str(tmp_path / "run")}
    result = start("benchmark_ranking.gin", values, processes=2, script=str(script))
    assert result.returncode != 0
    assert result.processes_left == 0
    assert "error: rank 1: NetworkArgs.kernel_backend = 'triton' cannot run" in result.stderr


REFUSALS = {
    "backend not built": (
        {"NetworkArgs.kernel_backend": "triton"},
        ["NetworkArgs.kernel_backend", "triton", "auto"],
    ),
    "package missing": ({"NetworkArgs.kernel_backend": "cutlass"}, ["cutlass", "hstu", "auto"]),
    "FP8 linears on a CPU": (
        {"MixedPrecisionArgs.mixed_precision_dtype": "fp8"},
        ['linear_backend = "te"', "CUDA", "'cpu'", 'linear_backend = "emulated"', "= None"],
    ),
    "FP8 linears with no width for it": (
        {
            "MixedPrecisionArgs.mixed_precision_dtype": "fp8",
            "MixedPrecisionArgs.linear_backend": "emulated",
            "NetworkArgs.hidden_size": 36,
        },
        ["stack.layers.0.input.uvqk", "36", "16", "MixedPrecisionArgs.linear_recipe = None"],
    ),
    "FP8 attention": (
        {
            "MixedPrecisionArgs.mixed_precision_dtype": "fp8",
            "MixedPrecisionArgs.linear_recipe": None,
            "MixedPrecisionArgs.hstu_attn_quantization_mode": "per_head",
            "NetworkArgs.kernel_backend": "triton",
            "NetworkArgs.kv_channels": 64,
        },
        ["NetworkArgs.kernel_backend = 'triton'", "CUDA device", "what runs here: pytorch"],
    ),
    "prefetch": ({"TrainerArgs.pipeline_type": "prefetch"}, ["prefetch", "native"]),
    "tensor parallel": (
        {"TensorModelParallelArgs.tensor_model_parallel_size": 2},
        ["TensorModelParallelArgs.tensor_model_parallel_size"],
    ),
    "adam on CPU tables": (
        {"OptimizerArgs.sparse_optimizer_str": "adam"},
        ["OptimizerArgs.sparse_optimizer_str", "adam", "auto"],
    ),
    "float16": ({"NetworkArgs.dtype_str": "float16"}, ["NetworkArgs.dtype_str", "bfloat16"]),
    "folder below a file": (
        {"TrainerArgs.output_dir": str(PROJECT_ROOT / "LICENSE" / "run")},
        ["TrainerArgs.output_dir", "LICENSE"],
    ),
    "checkpoints below a file": (
        {"TrainerArgs.ckpt_save_dir": str(PROJECT_ROOT / "LICENSE" / "run")},
        ["TrainerArgs.ckpt_save_dir", "LICENSE"],
    ),
    "nothing to resume": ({"TrainerArgs.resume": "latest"}, ["TrainerArgs.resume", "latest"]),
    "no such checkpoint": ({"TrainerArgs.ckpt_load_dir": "/nowhere"}, ["/nowhere"]),
    "typo": ({"TrainerArgs.max_train_iter": 5}, ["max_train_iter", "max_train_iters"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_run_is_refused_in_one_message(tmp_path: Path, case: str) -> None:
    values, expected = REFUSALS[case]
    folder = tmp_path / "run"
    values = SMALL | {"TrainerArgs.output_dir": str(folder)} | values
    result = start("benchmark_ranking.gin", values)
    assert result.returncode != 0
    assert result.seconds < 60
    assert "Traceback" not in result.stderr
    for text in expected:
        assert text in result.stderr
    assert not folder.exists(), "a refused run leaves nothing behind"


def movielens_values(data: Path, folder: Path) -> dict[str, Any]:
    return SMALL | {
        "DatasetArgs.dataset_path": str(data),
        "TrainerArgs.output_dir": str(folder),
        "TrainerArgs.max_train_iters": 2,
    }


def test_missing_data_names_the_command_that_makes_it(tmp_path: Path) -> None:
    values = movielens_values(tmp_path / "nothing", tmp_path / "run")
    result = start("movielens_ranking.gin", values)
    assert result.returncode != 0
    assert result.seconds < 10, "refused before torch is imported"
    assert "python data/preprocess.py --dataset ml-100k" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_id_outside_its_table_stops_before_step_one(tmp_path: Path) -> None:
    data = write_movielens(tmp_path / "movielens", num_items=39)
    config = tmp_path / "small_table.gin"
    config.write_text(
        f"include '{PROJECT_ROOT}/configs/movielens_ranking.gin'\n"
        "items/EmbeddingArgs.feature_names = ['item_id']\n"
        "items/EmbeddingArgs.table_name = 'items'\n"
        "items/EmbeddingArgs.item_vocab_size_or_capacity = 30\n"
        "DatasetArgs.embedding_args = [@items/EmbeddingArgs()]\n"
    )
    result = start(str(config), movielens_values(data, tmp_path / "run"))
    assert result.returncode != 0
    assert result.seconds < 10
    for text in ("item_id", "39", "30"):
        assert text in result.stderr
    assert "Traceback" not in result.stderr
