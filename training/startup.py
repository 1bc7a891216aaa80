"""What this machine and this version cannot run, refused by name before any data is read.

Settings that make no sense anywhere are refused by ``configs``; here stand features that are not
built yet, packages that are missing and hardware that is not there. Each refusal names the
binding that would run.
"""

import logging
import os
import tempfile
from pathlib import Path

from configs.schema import BenchmarkDatasetArgs, DynamicEmbeddingArgs, ExperimentArgs
from data.manifest import check_tables, find_dataset, read_manifest

logger = logging.getLogger(__name__)


def check_data(experiment: ExperimentArgs) -> None:
    """Refuses missing or damaged preprocessed data and ids outside their table; needs no torch.

    Raises:
        ValueError: naming file or feature, value, rule and way out.
    """
    dataset = experiment.dataset
    if isinstance(dataset, BenchmarkDatasetArgs):
        return
    folder = find_dataset(dataset.dataset_name, dataset.dataset_path)
    manifest = read_manifest(folder, dataset_name=dataset.dataset_name)
    check_tables(manifest, manifest.vocab_sizes | _rows_by_feature(experiment))


def _rows_by_feature(experiment: ExperimentArgs) -> dict[str, int]:
    return {
        feature: table.item_vocab_size_or_capacity
        for table in experiment.dataset.embedding_args or ()
        if not isinstance(table, DynamicEmbeddingArgs)
        for feature in table.feature_names
    }


def check_built(experiment: ExperimentArgs) -> None:
    """Refuses features that this version does not have; needs no torch.

    Raises:
        NotImplementedError: naming the binding and the one that would run.
    """
    trainer, dataset, parallel = experiment.trainer, experiment.dataset, experiment.parallel
    tables = dataset.embedding_args or ()
    dynamic = [table.table_name for table in tables if isinstance(table, DynamicEmbeddingArgs)]
    refusals = {
        f"TensorModelParallelArgs.tensor_model_parallel_size = "
        f"{parallel.tensor_model_parallel_size}": (parallel.tensor_model_parallel_size > 1, "1"),
        "TrainerArgs.enable_balanced_shuffler = True": (trainer.enable_balanced_shuffler, "False"),
        "TrainerArgs.pipeline_type = 'prefetch'": (
            trainer.pipeline_type == "prefetch",
            "'native'",
        ),
        f"DynamicEmbeddingArgs for table {', '.join(dynamic)}": (
            bool(dynamic),
            "EmbeddingArgs with the same feature_names, table_name and item_vocab_size_or_capacity",
        ),
    }
    for binding, (is_asked, runs) in refusals.items():
        if is_asked:
            raise NotImplementedError(f"{binding} is not built yet; what runs: {runs}")


def check_machine(experiment: ExperimentArgs, *, device_type: str) -> None:
    """Refuses what this hardware cannot do. Called once torch is there, before data is read.

    Raises:
        NotImplementedError: a kernel backend, optimizer or precision that cannot run here.
        RuntimeError: FP8 linears without their hardware or package.
    """
    from ops.hstu_attention.dispatch import refuse_unavailable
    from training.optimizer import resolve_table_optimizer
    from training.precision import check_precision

    check_precision(experiment, device_type=device_type)

    # Only refused here: what "auto" picks depends on more, and is said when the model is built.
    refusal = refuse_unavailable(
        experiment.network.kernel_backend,
        field="NetworkArgs.kernel_backend",
        device_type=device_type,
    )
    if refusal is not None:
        raise refusal
    resolve_table_optimizer(experiment.optimizer, device_type)
    if experiment.network.dtype_str == "bfloat16" and device_type == "cpu":
        logger.warning(
            "NetworkArgs.dtype_str = 'bfloat16' is many times slower than 'float32' on most CPUs"
        )
    if experiment.network.dtype_str == "float16":
        raise NotImplementedError(
            "NetworkArgs.dtype_str = 'float16' cannot train: FP16 gradients need loss scaling, "
            "which is not built yet; what runs: 'bfloat16' or 'float32'"
        )


def check_checkpoints(experiment: ExperimentArgs, *, evaluate: str | None) -> None:
    """Refuses a path that is no checkpoint by the field that names it; needs no torch.

    Raises:
        ValueError: naming field and path.
    """
    trainer = experiment.trainer
    named = {"--evaluate": evaluate}
    if evaluate is None:
        named["TrainerArgs.ckpt_load_dir"] = trainer.ckpt_load_dir
        named["TrainerArgs.resume"] = None if trainer.resume == "latest" else trainer.resume
    for field, path in named.items():
        if path is not None and not (Path(path) / "state.json").is_file():
            raise ValueError(
                f"{field} must name a folder checkpoints/step-N of a run, got {path!r}, which has "
                "no state.json; correct the path"
            )


def check_folders(experiment: ExperimentArgs) -> None:
    """Refuses folders that cannot be written, without leaving anything in them; needs no torch.

    Raises:
        RuntimeError: naming field, folder and what the system said.
    """
    trainer = experiment.trainer
    if trainer.resume is None or trainer.resume == "latest":
        _check_folder("TrainerArgs.output_dir", Path(experiment.output_dir))
    if trainer.ckpt_save_dir is not None and trainer.ckpt_save_interval != 0:
        _check_folder("TrainerArgs.ckpt_save_dir", Path(trainer.ckpt_save_dir))


def _check_folder(field: str, folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.NamedTemporaryFile(dir=existing) as probe:
            probe.write(b"\0" * 65_536)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise RuntimeError(
            f"{field} must be a folder that can be written, got {folder} "
            f"({error.strerror or error}); free it or name another one"
        ) from None
