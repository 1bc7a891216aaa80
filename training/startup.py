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
from data.manifest import check_contents, check_tables, find_dataset, read_manifest

logger = logging.getLogger(__name__)

_SCALES_OVER_HEADS = ("per_batch", "per_tensor")
"""Modes of FP8 attention whose scales are of all heads, so of several ranks' where those are split.
"""


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
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a host: it reads all of the files
        check_contents(folder, manifest)
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
    tables = experiment.dataset.embedding_args or ()
    cached = [t.table_name for t in tables if isinstance(t, DynamicEmbeddingArgs) and t.caching]
    refusals = {
        **_not_built_in_parallel(experiment),
        f"DynamicEmbeddingArgs.caching = True for table {', '.join(cached)}": (
            bool(cached),
            "False",
        ),
    }
    for binding, (is_asked, runs) in refusals.items():
        if is_asked:
            raise NotImplementedError(f"{binding} is not built yet; what runs: {runs}")


def _not_built_in_parallel(experiment: ExperimentArgs) -> dict[str, tuple[bool, str]]:
    """What models that are split over ranks do not have, by binding."""
    size, precision = experiment.parallel.tensor_model_parallel_size, experiment.precision
    if size == 1:
        return {}
    asked = f"TensorModelParallelArgs.tensor_model_parallel_size = {size} with "
    is_fp8 = precision.has_fp8_linears
    pair = (precision.linear_backend, precision.linear_recipe)
    mode, retrieval = precision.hstu_attn_quantization_mode, experiment.retrieval
    return {
        # The draw is salted with the ids of all ranks, which repeat where ranks share users.
        f"{asked}RetrievalArgs.num_negatives of negatives_sampler = 'in_batch'": (
            retrieval is not None
            and retrieval.negatives_sampler == "in_batch"
            and retrieval.num_negatives is not None,
            "num_negatives = None, or 'random'",
        ),
        f"{asked}MixedPrecisionArgs.hstu_attn_quantization_mode = {mode!r}": (
            precision.has_fp8_attention and mode in _SCALES_OVER_HEADS,
            "'per_block', 'per_head', 'per_row', 'cast' or 'bf16'",
        ),
        # A maximum that is recorded is one over ranks; one of the present tensor is this rank's.
        f"{asked}MixedPrecisionArgs.linear_backend = {pair[0]!r}, linear_recipe = {pair[1]!r}": (
            is_fp8 and (pair[0] == "te" or pair[1] != "delayed"),
            "linear_backend = 'native' or 'emulated' with linear_recipe = 'delayed'",
        ),
    }


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
    table_optimizer = resolve_table_optimizer(experiment.optimizer, device_type)
    _check_exchange(experiment, device_type=device_type, table_optimizer=table_optimizer)
    if experiment.network.dtype_str == "bfloat16" and device_type == "cpu":
        logger.warning(
            "NetworkArgs.dtype_str = 'bfloat16' is many times slower than 'float32' on most CPUs"
        )
    if experiment.network.dtype_str == "float16":
        raise NotImplementedError(
            "NetworkArgs.dtype_str = 'float16' cannot train: FP16 gradients need loss scaling, "
            "which is not built yet; what runs: 'bfloat16' or 'float32'"
        )


def _check_exchange(experiment: ExperimentArgs, *, device_type: str, table_optimizer: str) -> None:
    trainer = experiment.trainer
    tables = experiment.dataset.embedding_args or ()
    gpu_only = {
        f"EmbeddingArgs.placement = {table.placement!r} of table {table.table_name!r}": "'device'"
        for table in tables
        if table.placement != "device" and table.sharding_type != "data_parallel"
    }
    for field in ("table_comms_forward", "table_comms_backward"):
        if getattr(trainer, field) == "fp8":
            gpu_only[f"TrainerArgs.{field} = 'fp8'"] = "'bf16'"
    if trainer.pipeline_type == "prefetch":
        gpu_only["TrainerArgs.pipeline_type = 'prefetch'"] = "'native'"
    if device_type == "cpu":
        for binding, runs in gpu_only.items():
            raise NotImplementedError(f"{binding} needs a GPU; what runs on the CPU: {runs}")
    for table in tables:
        if table.shard_by in ("column_wise", "planner") and table_optimizer == "rowwise_adagrad":
            logger.warning(
                "table %s: rowwise_adagrad keeps a state for each part of a row, so with "
                "EmbeddingArgs.shard_by = %r results depend on the number of processes",
                table.table_name,
                table.shard_by,
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
        # A restarted job goes on from what it has saved since (`training.restart`).
        is_named = trainer.resume != "latest" and not is_restarted()
        named["TrainerArgs.resume"] = trainer.resume if is_named else None
    for field, path in named.items():
        if path is not None and not (Path(path) / "state.json").is_file():
            raise ValueError(
                f"{field} must name a folder checkpoints/step-N of a run, got {path!r}, which has "
                "no state.json; correct the path"
            )


def is_restarted() -> bool:
    """Whether torchrun --max-restarts has started the processes of this job before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


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
