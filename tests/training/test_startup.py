"""What is refused before any data is read, by the binding that would run instead."""

from __future__ import annotations

import dataclasses
import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from configs.schema import (
    DynamicEmbeddingArgs,
    ExperimentArgs,
    MixedPrecisionArgs,
    TensorModelParallelArgs,
)
from tests.support.experiments import (
    movielens_experiment,
    retrieval_experiment,
    synthetic_experiment,
)
from training.run import _without_start
from training.startup import check_built, check_data, check_folders, check_machine


def with_field(experiment: ExperimentArgs, part: str, **fields: Any) -> ExperimentArgs:
    changed = dataclasses.replace(getattr(experiment, part), **fields)
    return dataclasses.replace(experiment, **{part: changed})


def cached_items(experiment: ExperimentArgs) -> ExperimentArgs:
    items, *others = experiment.dataset.embedding_args
    dynamic = DynamicEmbeddingArgs(
        feature_names=items.feature_names,
        table_name=items.table_name,
        item_vocab_size_or_capacity=items.item_vocab_size_or_capacity,
        caching=True,
    )
    return with_field(experiment, "dataset", embedding_args=(dynamic, *others))


NOT_BUILT = {
    "tensor parallel FP8 by the present tensor": (
        lambda e: dataclasses.replace(
            e,
            parallel=TensorModelParallelArgs(tensor_model_parallel_size=2),
            precision=MixedPrecisionArgs(
                mixed_precision_dtype="fp8", linear_backend="emulated", linear_recipe="tensorwise"
            ),
        ),
        "tensor_model_parallel_size = 2 with .*linear_recipe = 'tensorwise' is not built yet; "
        "what runs: .*'delayed'",
    ),
    "tensor parallel FP8 attention": (
        lambda e: dataclasses.replace(
            e,
            parallel=TensorModelParallelArgs(tensor_model_parallel_size=2),
            precision=MixedPrecisionArgs(
                mixed_precision_dtype="fp8",
                linear_recipe=None,
                hstu_attn_quantization_mode="per_tensor",
            ),
        ),
        "tensor_model_parallel_size = 2 with .*mode = 'per_tensor' is not built yet; .*'per_block'",
    ),
    "cached table": (cached_items, "DynamicEmbeddingArgs.caching.*item is.*what runs: False"),
}


def test_some_negatives_of_the_batch_with_split_heads_are_not_built(run_folder: str) -> None:
    parallel = TensorModelParallelArgs(tensor_model_parallel_size=2)
    retrieval = {"num_negatives": 5}
    experiment = dataclasses.replace(
        retrieval_experiment(run_folder, retrieval=retrieval), parallel=parallel
    )
    told = "RetrievalArgs.num_negatives of .*'in_batch' is not built yet.*None, or 'random'"
    with pytest.raises(NotImplementedError, match=told):
        check_built(experiment)
    check_built(dataclasses.replace(synthetic_experiment(run_folder), parallel=parallel))


@pytest.mark.parametrize("case", NOT_BUILT)
def test_a_feature_not_built_is_refused_with_what_runs(run_folder: str, case: str) -> None:
    change, message = NOT_BUILT[case]
    plain = synthetic_experiment(run_folder)
    check_built(plain)
    with pytest.raises(NotImplementedError, match=message):
        check_built(change(plain))


@pytest.mark.parametrize("backend", ["te", "native"])
def test_fp8_linears_are_built_but_not_for_a_cpu(run_folder: str, backend: str) -> None:
    precision = MixedPrecisionArgs(mixed_precision_dtype="fp8", linear_backend=backend)
    experiment = dataclasses.replace(synthetic_experiment(run_folder), precision=precision)
    check_built(experiment)
    with pytest.raises(
        RuntimeError, match=rf'{backend}.*needs a CUDA.*linear_backend = "emulated"'
    ):
        check_machine(experiment, device_type="cpu")
    emulated = dataclasses.replace(precision, linear_backend="emulated")
    check_machine(dataclasses.replace(experiment, precision=emulated), device_type="cpu")


@pytest.mark.parametrize("backend", ["te", "native"])
def test_evaluation_needs_fp8_hardware_only_where_it_runs_in_fp8(
    run_folder: str, backend: str
) -> None:
    precision = MixedPrecisionArgs(mixed_precision_dtype="fp8", linear_backend=backend)
    experiment = dataclasses.replace(synthetic_experiment(run_folder), precision=precision)
    check_machine(_without_start(experiment), device_type="cpu")
    in_fp8 = dataclasses.replace(precision, fp8_eval=True)
    asked = _without_start(dataclasses.replace(experiment, precision=in_fp8))
    assert asked.precision == in_fp8
    with pytest.raises(RuntimeError, match=rf'linear_backend = "{backend}".*needs a CUDA'):
        check_machine(asked, device_type="cpu")


@pytest.mark.parametrize("backend", ["pytorch", "auto"])
def test_fp8_attention_is_emulated_where_pytorch_runs_it(run_folder: str, backend: str) -> None:
    precision = MixedPrecisionArgs(
        mixed_precision_dtype="fp8", linear_recipe=None, hstu_attn_quantization_mode="per_block"
    )
    experiment = synthetic_experiment(run_folder, network={"kernel_backend": backend})
    experiment = dataclasses.replace(experiment, precision=precision)
    check_built(experiment)
    check_machine(experiment, device_type="cpu")


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("network", {"kernel_backend": "triton"}, "NetworkArgs.kernel_backend.*'auto'"),
        ("network", {"kernel_backend": "cutlass"}, "NetworkArgs.kernel_backend.*'auto'"),
        ("network", {"dtype_str": "float16"}, "NetworkArgs.dtype_str.*'bfloat16' or 'float32'"),
        (
            "trainer",
            {"pipeline_type": "prefetch"},
            "TrainerArgs.pipeline_type = 'prefetch' needs a GPU.*on the CPU: 'native'",
        ),
        (
            "trainer",
            {"table_comms_forward": "fp8"},
            "TrainerArgs.table_comms_forward = 'fp8' needs a GPU.*'bf16'",
        ),
        (
            "optimizer",
            {"sparse_optimizer_str": "adam"},
            "OptimizerArgs.sparse_optimizer_str.*'adam'.*'auto'",
        ),
    ],
)
def test_what_a_cpu_cannot_run_is_refused_by_its_binding(
    run_folder: str, part: str, fields: dict[str, str], message: str
) -> None:
    plain = synthetic_experiment(run_folder)
    check_machine(plain, device_type="cpu")
    with pytest.raises(NotImplementedError) as refused:
        check_machine(with_field(plain, part, **fields), device_type="cpu")
    for text in message.replace("'", '"').split(".*"):
        assert text in str(refused.value).replace("'", '"')


def test_evaluation_has_no_pipeline_to_refuse(run_folder: str) -> None:
    experiment = synthetic_experiment(run_folder, trainer={"pipeline_type": "prefetch"})
    check_machine(_without_start(experiment), device_type="cpu")


@pytest.mark.parametrize("placement", ["host", "host_cached"])
def test_rows_on_the_host_of_a_gpu_need_one(run_folder: str, placement: str) -> None:
    plain = synthetic_experiment(run_folder)
    items, *others = plain.dataset.embedding_args
    hosted = dataclasses.replace(items, placement=placement)
    experiment = with_field(plain, "dataset", embedding_args=(hosted, *others))
    with pytest.raises(NotImplementedError, match=f"placement = '{placement}' of table 'item'"):
        check_machine(experiment, device_type="cpu")
    idle = dataclasses.replace(hosted, sharding_type="data_parallel")
    check_machine(with_field(plain, "dataset", embedding_args=(idle, *others)), device_type="cpu")


def test_states_that_depend_on_the_cut_are_said(
    run_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = synthetic_experiment(run_folder)
    items, *others = plain.dataset.embedding_args
    by_columns = dataclasses.replace(items, shard_by="column_wise")
    experiment = with_field(plain, "dataset", embedding_args=(by_columns, *others))
    check_machine(experiment, device_type="cpu")
    assert "table item: rowwise_adagrad keeps a state for each part of a row" in caplog.text
    caplog.clear()
    by_number = with_field(experiment, "optimizer", sparse_optimizer_str="adagrad")
    check_machine(by_number, device_type="cpu")
    assert caplog.text == ""


def test_data_that_is_not_there_is_refused_with_its_command(tmp_path: Path) -> None:
    check_data(synthetic_experiment(str(tmp_path / "run")))
    experiment = movielens_experiment(tmp_path / "nothing", str(tmp_path / "run"))
    with pytest.raises(ValueError, match="python data/preprocess.py --dataset ml-100k"):
        check_data(experiment)
    assert list(tmp_path.iterdir()) == []


def test_checking_folders_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    experiment = synthetic_experiment(
        str(tmp_path / "runs" / "deep" / "run"),
        trainer={"ckpt_save_dir": str(tmp_path / "elsewhere" / "checkpoints")},
    )
    check_folders(experiment)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "runs"]


@pytest.mark.parametrize("field", ["output_dir", "ckpt_save_dir"])
def test_a_folder_below_a_file_is_refused_by_its_field(tmp_path: Path, field: str) -> None:
    (tmp_path / "file").write_text("here")
    folder = str(tmp_path / "file" / "run")
    experiment = synthetic_experiment(str(tmp_path / "run"), trainer={field: folder})
    with pytest.raises(RuntimeError, match=rf"TrainerArgs\.{field} must be .*got {folder} .*file"):
        check_folders(experiment)
    assert (tmp_path / "file").read_text() == "here"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_refused_with_the_system_s_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    reason = OSError(code, "the reason of the system")

    def refuse(*args: object, **kwargs: object) -> None:
        raise reason

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(RuntimeError, match=r"TrainerArgs\.output_dir .*the reason of the system"):
        check_folders(synthetic_experiment(str(tmp_path / "run")))


def test_folders_that_a_run_will_not_write_are_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = str(tmp_path / "file" / "run")
    unused = {"ckpt_save_dir": blocked, "ckpt_save_interval": 0}
    check_folders(synthetic_experiment(str(tmp_path / "run"), trainer=unused))
    resumed = {"output_dir": blocked, "resume": "some/checkpoint"}
    check_folders(synthetic_experiment(str(tmp_path / "run"), trainer=resumed))
