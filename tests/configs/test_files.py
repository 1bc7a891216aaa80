"""Every shipped gin file, and files in the style of comparable trainers, load and round-trip."""

import dataclasses
from pathlib import Path

import pytest

from configs.attention_plan import FP8_HEAD_DIMS
from configs.loader import CONFIGS, experiment_to_gin, load_experiment
from tests.configs.conftest import FILES

SHIPPED = sorted(CONFIGS.glob("*.gin"))
LOOK_ALIKES = sorted(FILES.glob("*.gin"))


def task_of(path: Path) -> str:
    return "retrieval" if "retrieval" in path.name else "ranking"


def test_there_are_files() -> None:
    assert {path.name for path in SHIPPED} >= {
        "movielens_ranking.gin",
        "movielens_1m_ranking.gin",
        "movielens_20m_ranking.gin",
        "movielens_retrieval.gin",
        "benchmark_ranking.gin",
        "movielens_ranking_fp8.gin",
        "movielens_retrieval_fp8.gin",
        "benchmark_ranking_fp8.gin",
    }
    assert len(LOOK_ALIKES) == 6


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_loads_without_a_warning(path: Path, caplog) -> None:
    assert load_experiment(path, task=task_of(path)).name == path.stem
    assert caplog.messages == []


@pytest.mark.parametrize("path", [*SHIPPED, *LOOK_ALIKES], ids=lambda path: path.stem)
def test_operative_config_rebuilds_the_run(path: Path, tmp_path) -> None:
    task = task_of(path)
    experiment = load_experiment(path, task=task)
    text = experiment_to_gin(experiment)
    saved = tmp_path / "operative_config.gin"
    saved.write_text(text)
    rebuilt = load_experiment(saved, task=task)
    assert rebuilt == experiment
    assert rebuilt.output_dir == f"runs/{path.stem}"
    assert experiment_to_gin(rebuilt) == text


@pytest.mark.parametrize("name", ["movielens_ranking", "movielens_retrieval"])
def test_fp8_files_differ_in_precision_and_what_fp8_attention_has_not(name: str) -> None:
    """With mixed_precision_dtype = None they are what to lay their figures beside."""
    task = "retrieval" if "retrieval" in name else "ranking"
    plain = load_experiment(CONFIGS / f"{name}.gin", task=task)
    fp8 = load_experiment(CONFIGS / f"{name}_fp8.gin", task=task)
    assert fp8.precision.has_fp8_linears and fp8.precision.has_fp8_attention
    assert fp8.network.attention_dim in FP8_HEAD_DIMS
    assert not fp8.network.use_relative_position_bias and not fp8.network.use_time_bias
    alike = ("dtype_str", "kv_channels", "use_relative_position_bias", "use_time_bias")
    of_plain = {field: getattr(plain.network, field) for field in alike}
    network = dataclasses.replace(fp8.network, **of_plain)
    changed = {"network": network, "precision": plain.precision, "trainer": plain.trainer}
    assert dataclasses.replace(fp8.trainer, output_dir=plain.output_dir) == plain.trainer
    assert dataclasses.replace(fp8, **changed) == plain


def test_operative_config_forgets_how_the_run_was_started(tmp_path) -> None:
    path = CONFIGS / "benchmark_ranking.gin"
    plain = load_experiment(path, task="ranking")
    for start in ("resume = 'latest'", "ckpt_load_dir = 'weights'"):
        started = load_experiment(path, bindings=[f"TrainerArgs.{start}"], task="ranking")
        assert started != plain
        saved = tmp_path / "saved.gin"
        saved.write_text(experiment_to_gin(started))
        assert load_experiment(saved, task="ranking") == plain


def test_operative_config_keeps_odd_text(tmp_path) -> None:
    folder = 'it\'s a "folder"\\with %odd @signs\n'
    path = CONFIGS / "movielens_ranking.gin"
    binding = f"DatasetArgs.dataset_path = {folder!r}"
    experiment = load_experiment(path, bindings=[binding], task="ranking")
    saved = tmp_path / "saved.gin"
    saved.write_text(experiment_to_gin(experiment))
    assert load_experiment(saved, task="ranking").dataset.dataset_path == folder


def test_long_tailed_events(caplog) -> None:
    experiment = load_experiment(FILES / "longtail_events.gin", task="ranking")
    assert experiment.max_seq_len == 3 + 2 * 2048
    assert experiment.history_loss
    assert experiment.resolved_disable_contextual_mask
    shops, kinds, people = experiment.dataset.embedding_args
    assert (shops.sharding_type, shops.item_vocab_gpu_capacity_ratio) == ("model_parallel", 0.0)
    assert kinds.sharding_type == "data_parallel"
    assert people.global_hbm_for_values == 1048576
    assert experiment.dataset.feature_args[0].seqlen_dist.alpha == 1.3
    assert experiment.network.kernel_backend == "cutlass"
    assert experiment.ranking.eval_metrics == ("AUC",)
    assert caplog.messages == []


def test_fixed_lengths_ignore_their_distribution(caplog) -> None:
    experiment = load_experiment(FILES / "fixed_lengths_prefetch.gin", task="ranking")
    assert experiment.dataset.feature_args[0].value_dists["ad"].dist_type == "zipf"
    assert experiment.trainer.pipeline_type == "prefetch"
    assert [
        "seqlen_dist" in text or "contextual_embedding" in text for text in caplog.messages
    ] == [
        True,
        True,
    ]


def test_retrieval_file(caplog) -> None:
    experiment = load_experiment(FILES / "film_retrieval.gin", task="retrieval")
    assert experiment.task == "retrieval"
    assert experiment.retrieval.eval_metrics == ("NDCG@5", "HR@50", "MRR")
    assert experiment.resolved_disable_contextual_mask
    assert experiment.trainer.num_epochs == 1


def test_fp8_bindings_beside_none_only_warn(caplog) -> None:
    on = load_experiment(FILES / "film_fp8.gin", task="ranking")
    assert on.precision.has_fp8_linears and on.precision.has_fp8_attention
    assert on.precision.num_bf16_layers_at_start == on.precision.num_bf16_layers_at_end == 1
    assert caplog.messages == []
    off = load_experiment(FILES / "film_fp8_off.gin", task="ranking")
    assert not off.precision.has_fp8_linears and not off.precision.has_fp8_attention
    assert len(caplog.messages) == 2
    assert all("mixed_precision_dtype is None" in message for message in caplog.messages)
