"""Every refusal names file, line, field, value, rule and way out."""

import pytest

from configs.loader import load_experiment
from tests.configs.conftest import BASE, NUM_BASE_LINES, Load, Refusal

FIRST = f"case.gin:{NUM_BASE_LINES + 1}: "
SECOND = f"case.gin:{NUM_BASE_LINES + 2}: "


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("TrainerArgs.sed = 3", ["TrainerArgs.sed", "did you mean 'seed'?"]),
        ("TrainerArg.seed = 3", ["'TrainerArg'", "did you mean 'TrainerArgs'?"]),
        ("utils.TrainerArgs.seed = 3", ["did you mean 'TrainerArgs'?"]),
        ("TrainerArgs.hidden_size = 3", ["it is a field of NetworkArgs"]),
        ("TrainerArgs.seed = '128'", ["an integer >= 0", "'128'", "write 128 without quotes"]),
        ("TrainerArgs.seed = True", ["an integer", "got True", "write a number"]),
        ("TrainerArgs.seed = 2.0", ["got 2.0", "write 2"]),
        ("TrainerArgs.seed = 99999999999999999999", ["64 bits"]),
        ("TrainerArgs.profile = 1", ["True or False", "write True"]),
        ("TrainerArgs.profile = 'False'", ["write False without quotes"]),
        ("TrainerArgs.profile = true", ["got the value true", "write True"]),
        ("TrainerArgs.pipeline_type = native", ["'native' in quotes"]),
        ("TrainerArgs.pipeline_type = 'prefech'", ["'prefech'", "did you mean 'prefetch'?"]),
        ("TrainerArgs.log_interval = 0", ["an integer >= 1, got 0", "default 100"]),
        ("NetworkArgs.hidden_dropout = 1", [">= 0 and < 1, got 1"]),
        ("OptimizerArgs.adam_eps = 1e999", ["got inf", "finite"]),
        ("OptimizerArgs.clip_grad = '1'", ["a number > 0 or None", "write 1 without quotes"]),
        ("NetworkArgs.item_embedding_dim = 0", ["an integer >= 1 or None, got 0"]),
        ("RankingArgs.eval_metrics = 'AUC'", ["a non-empty list", "write ['AUC']"]),
        ("RankingArgs.eval_metrics = ['AOC']", ["did you mean 'AUC'?"]),
        ("RankingArgs.eval_metrics = []", ["non-empty", "at least one"]),
        ("TrainerArgs.seed = 3 4", ["Expected newline"]),
        ("TrainerArgs.seed", ["write Class.field = value"]),
        ("TrainerArgs.seed = 'abc", ["cannot be read"]),
        ("TrainerArgs = 3", ["field by field"]),
        ("import os", ["must not import code, got 'import os'"]),
        ("seed = 3", ["write TrainerArgs.seed"]),
        ("TrainerArgs.seed = %missing", ["got %missing"]),
        ("include 'nothing.gin'", ["include of nothing.gin", "no such file"]),
        ("TrainerArgs.seed = @Unknown()", ["got @Unknown()"]),
        ("DatasetArgs.embedding_args = [@t/EmbeddingArgs]", ["write @t/EmbeddingArgs()"]),
        ("DatasetArgs.embedding_args = [@t/EmbeddingArgs()]", ["t/EmbeddingArgs.feature_names"]),
    ],
)
def test_bad_line_is_refused(refusal: Refusal, lines: str, parts: list[str]) -> None:
    message = refusal(lines)
    assert FIRST in message
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "value", ["@x/RandomDistribution()", "{[1]: 2}", "1j", "b'1'", "[" * 2000 + "]" * 2000, "[1"]
)
def test_odd_value_is_refused(refusal: Refusal, value: str) -> None:
    lines = f"TrainerArgs.seed = {value}\nx/RandomDistribution.dist_type = 'uniform'"
    assert "case.gin" in refusal(lines)


def test_unknown_dataset_is_refused(refusal: Refusal) -> None:
    message = refusal("DatasetArgs.dataset_name = 'ml-10m'", without=("DatasetArgs.dataset_name",))
    assert "'ml-10m'" in message and "'kuairand-27k'" in message and "did you mean 'ml-" in message


def test_missing_required_fields_are_all_named(refusal: Refusal) -> None:
    message = refusal(without=("NetworkArgs.num_layers", "NetworkArgs.kv_channels"))
    assert "case.gin: NetworkArgs.num_layers is required" in message
    assert "NetworkArgs.kv_channels" in message


def test_empty_file_is_refused(tmp_path) -> None:
    path = tmp_path / "empty.gin"
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"empty\.gin: DatasetArgs\.dataset_name is required"):
        load_experiment(path, task="ranking")


def test_contradicting_lines_are_refused_with_both_lines(refusal: Refusal) -> None:
    message = refusal("TrainerArgs.max_train_iters = 20")
    assert FIRST in message and "got 20 here and 10 at " in message and "case.gin:3;" in message


def test_true_contradicts_one(refusal: Refusal) -> None:
    assert "one value per file" in refusal("TrainerArgs.seed = 1\nTrainerArgs.seed = True")


def test_alias_contradicts_its_field(refusal: Refusal) -> None:
    message = refusal("DatasetArgs.max_sequence_length = 60")
    assert "DatasetArgs.max_history_seqlen" in message and "case.gin:5" in message


def test_alias_stands_for_its_field(load: Load) -> None:
    experiment = load(
        "DatasetArgs.max_sequence_length = 60", without=("DatasetArgs.max_history_seqlen",)
    )
    assert experiment.dataset.max_history_seqlen == 60


def test_equal_lines_warn_once(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load("TrainerArgs.max_train_iters = 10")
    assert len(caplog.messages) == 1
    assert "TrainerArgs.max_train_iters repeats the equal line at" in caplog.messages[0]


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("RetrievalArgs.temperature = 0.1", ["RetrievalArgs", "start pretrain_gr_retrieval.py"]),
        ("x/FeatureArgs.is_jagged = True", ["x/FeatureArgs", "nothing builds", "@x/FeatureArgs()"]),
        ("EmbeddingArgs.table_name = 't'", ["nothing builds"]),
        ("RandomDistribution.low = 1", ["nothing builds"]),
        ("x/TrainerArgs.seed = 3", ["write TrainerArgs.seed without a scope"]),
        ("BenchmarkDatasetArgs.item_feature_name = 'i'", ["one data set", "case.gin:4"]),
    ],
)
def test_class_nobody_builds_is_refused(refusal: Refusal, lines: str, parts: list[str]) -> None:
    message = refusal(lines)
    assert FIRST in message
    for part in parts:
        assert part in message


def test_ranking_class_in_retrieval_run_is_refused(refusal: Refusal) -> None:
    assert "pretrain_gr_ranking.py" in refusal(task="retrieval")


def test_macros_are_replaced_and_located(load: Load, refusal: Refusal) -> None:
    size = "DatasetArgs.max_history_seqlen"
    assert load(f"n = 7\n{size} = %n", without=(size,)).dataset.max_history_seqlen == 7
    assert load(f"{size} = %s/n\ns/n = 9", without=(size,)).dataset.max_history_seqlen == 9
    message = refusal(f"n = '7'\n{size} = %n", without=(size,))
    line = NUM_BASE_LINES
    assert f"case.gin:{line + 1}: {size}" in message
    assert message.endswith(f"case.gin:{line})")
    assert "must not read itself" in refusal(f"a = %b\nb = %a\n{size} = %a", without=(size,))


def test_block_syntax_sets_fields(load: Load) -> None:
    assert load("TrainerArgs:\n  seed = 5\n  log_interval = 7").trainer.log_interval == 7


def test_scopes_inherit_from_outer_ones(load: Load) -> None:
    experiment = load(
        """
EmbeddingArgs.item_vocab_size_or_capacity = 2000
EmbeddingArgs.sharding_type = "data_parallel"
a/EmbeddingArgs.feature_names = ["item_id"]
a/EmbeddingArgs.table_name = "items"
a/b/EmbeddingArgs.feature_names = ["user_id"]
a/b/EmbeddingArgs.table_name = "users"
a/b/EmbeddingArgs.sharding_type = "model_parallel"
DatasetArgs.embedding_args = [@a/EmbeddingArgs(), @a/b/EmbeddingArgs()]
"""
    )
    items, users = experiment.dataset.embedding_args
    assert (items.sharding_type, users.sharding_type) == ("data_parallel", "model_parallel")
    assert items.item_vocab_size_or_capacity == users.item_vocab_size_or_capacity == 2000


def test_sentinels_become_none(load: Load) -> None:
    experiment = load(
        """
TrainerArgs.ckpt_save_interval = -1
TrainerArgs.ckpt_load_dir = ""
DatasetArgs.dataset_path = ""
NetworkArgs.item_embedding_dim = -1
NetworkArgs.scaling_seqlen = -1
"""
    )
    trainer, network = experiment.trainer, experiment.network
    assert (trainer.ckpt_save_interval, trainer.ckpt_load_dir) == (None, None)
    assert (experiment.dataset.dataset_path, network.item_embedding_dim) == (None, None)
    assert (network.scaling_seqlen, experiment.resolved_scaling_seqlen) == ("batch", None)


def test_byte_order_mark_and_crlf_are_read(tmp_path) -> None:
    path = tmp_path / "windows.gin"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_experiment(path, task="ranking").name == "windows"


def test_unreadable_bytes_are_refused(tmp_path) -> None:
    path = tmp_path / "latin.gin"
    path.write_bytes(b"# caf\xe9\n" + BASE.encode())
    with pytest.raises(ValueError, match=r"latin\.gin: must be a readable UTF-8 text"):
        load_experiment(path, task="ranking")


def test_missing_file_is_refused_with_near_miss() -> None:
    with pytest.raises(ValueError, match="did you mean 'movielens_ranking'"):
        load_experiment("movielens_rankin.gin", task="ranking")


def test_folder_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="got a folder"):
        load_experiment(tmp_path, task="ranking")
