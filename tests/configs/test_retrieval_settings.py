"""Settings that came with retrieval and the training aids: what they mean, what is refused."""

import pytest

from tests.configs.conftest import Load, Refusal

HEAD = "RankingArgs.prediction_head_arch"
CANDIDATES = "DatasetArgs.max_num_candidates"


@pytest.mark.parametrize(
    ("lines", "candidates", "tokens"),
    [
        ("", True, 5 + 2 * 50 + 5),
        ("DatasetArgs.use_actions = False", True, 5 + 50 + 5),
        ("DatasetArgs.contextual_feature_names = []", True, 2 * 50 + 5),
        ("DatasetArgs.contextual_feature_names = ['zip', 'age']", True, 2 + 2 * 50 + 5),
        ("", False, 5 + 2 * 50 + 1),
        ("DatasetArgs.split = 'by_user'", False, 5 + 2 * 50 + 1),
    ],
)
def test_tokens_of_a_retrieval_run(load: Load, lines: str, candidates: bool, tokens: int) -> None:
    without = (HEAD,) if candidates else (HEAD, CANDIDATES)
    assert load(lines, without=without, task="retrieval").max_seq_len == tokens


def test_parts_of_the_data_can_be_left_out(load: Load) -> None:
    experiment = load(
        "DatasetArgs.use_actions = False\nDatasetArgs.contextual_feature_names = ['zip', 'sex']"
    )
    assert experiment.action_feature_name is None
    assert experiment.contextual_feature_names == ("zip", "sex")
    assert load().action_feature_name == "action" and load().num_contextuals == 5


def test_without_contextual_tokens_nothing_can_leak(load: Load) -> None:
    lines = "DatasetArgs.contextual_feature_names = []"
    experiment = load(lines, without=(HEAD,), task="retrieval")
    assert "no contextual features" in experiment.disable_contextual_mask_reason
    with_all = load(without=(HEAD,), task="retrieval")
    assert with_all.resolved_disable_contextual_mask is True


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("DatasetArgs.contextual_feature_names = ['gender']", ["got 'gender'", "user_id, sex"]),
        ("DatasetArgs.contextual_feature_names = ['ag']", ["got 'ag'", "did you mean 'age'?"]),
        ("DatasetArgs.contextual_feature_names = ['age', 'age']", ["each once, got 'age'"]),
        ("RetrievalArgs.negatives_sampler = 'random'", ["num_negatives must be set", "got None"]),
        ("RetrievalArgs.negatives_sampler = 'inbatch'", ["got 'inbatch'", "'in_batch'"]),
        ("RetrievalArgs.num_negatives = 0", ["num_negatives", "got 0"]),
        ("RetrievalArgs.temperature = 1e-300", ["temperature", "1e-300"]),
        ("RetrievalArgs.eval_metrics = ['HR@99999999999']", ["HR@k", "got 'HR@99999999999'"]),
        ("NetworkArgs.num_time_buckets = 100000000000", ["num_time_buckets", "1024"]),
        (
            "TrainerArgs.gradient_accumulation_steps = 3",
            ["must divide train_batch_size = 8", "got 3"],
        ),
        (
            "TrainerArgs.early_stopping_metric = 'mrr'\nTrainerArgs.ckpt_save_interval = 0",
            ["early_stopping_metric must be None", "ckpt_save_interval"],
        ),
        (
            "TrainerArgs.early_stopping_metric = 'mrr'\nDatasetArgs.train_on_validation = True",
            ["early_stopping_metric must be None", "train_on_validation"],
        ),
        ("TrainerArgs.early_stopping_metric = 'auc'", ["hr@k, ndcg@k, mrr, loss", "got 'auc'"]),
    ],
)
def test_what_cannot_work_is_refused(refusal: Refusal, lines: str, parts: list[str]) -> None:
    message = refusal(lines, without=(HEAD,), task="retrieval")
    assert "case.gin:" in message
    for part in parts:
        assert part in message


def test_a_table_of_an_unused_feature_is_refused(refusal: Refusal) -> None:
    message = refusal(
        "table/EmbeddingArgs.feature_names = ['action']\n"
        "table/EmbeddingArgs.table_name = 'action'\n"
        "table/EmbeddingArgs.item_vocab_size_or_capacity = 9\n"
        "DatasetArgs.embedding_args = [@table/EmbeddingArgs()]\n"
        "DatasetArgs.use_actions = False"
    )
    assert "must name features of the data" in message and "'action'" in message


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ("TrainerArgs.early_stopping_patience = 3", "early_stopping_patience"),
        (
            "NetworkArgs.use_position_embedding = False\nNetworkArgs.num_position_buckets = 99",
            "num_position_buckets",
        ),
        (
            "RetrievalArgs.normalize_embeddings = False\nRetrievalArgs.l2_norm_eps = 1e-3",
            "l2_norm_eps",
        ),
    ],
)
def test_fields_without_effect_warn(
    load: Load, caplog: pytest.LogCaptureFixture, lines: str, field: str
) -> None:
    load(lines, without=(HEAD,), task="retrieval")
    assert len(caplog.messages) == 1 and field in caplog.messages[0]


def test_one_history_event_predicts_nothing(refusal: Refusal) -> None:
    message = refusal(
        "DatasetArgs.max_history_seqlen = 1",
        without=(HEAD, "DatasetArgs.max_history_seqlen"),
        task="retrieval",
    )
    assert "at least 2 history events" in message and "got 1" in message


def test_positions_of_items_and_actions_need_a_row_each(load: Load, refusal: Refusal) -> None:
    buckets = "NetworkArgs.num_position_buckets = 7"
    message = refusal(buckets, without=(HEAD,), task="retrieval")
    assert "must be >= 8" in message and "got 7" in message
    alone = f"{buckets}\nDatasetArgs.use_actions = False"
    assert load(alone, without=(HEAD,), task="retrieval").network.num_position_buckets == 7
    without = "NetworkArgs.num_position_buckets = 1\nNetworkArgs.use_position_embedding = False\n"
    bias = "NetworkArgs.use_relative_position_bias = True"
    assert load(without + bias, without=(HEAD,), task="retrieval")


def test_candidates_count_for_nothing_where_one_event_is_held_out(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = "DatasetArgs.split = 'leave_one_out'"
    experiment = load(held_out, without=(HEAD,), task="retrieval")
    assert experiment.max_seq_len == 5 + 2 * 50 + 1
    assert any("max_num_candidates" in text and "no effect" in text for text in caplog.messages)
    assert load(held_out).max_seq_len == 5 + 2 * 50 + 5


@pytest.mark.parametrize(("metric", "hint"), [("HR@10", "hr@10"), ("ndcg10", "ndcg@10")])
def test_a_metric_hint_is_one_of_the_task(refusal: Refusal, metric: str, hint: str) -> None:
    message = refusal(
        f"TrainerArgs.early_stopping_metric = '{metric}'", without=(HEAD,), task="retrieval"
    )
    assert f"did you mean '{hint}'?" in message


def test_a_known_order_is_not_shuffled(refusal: Refusal) -> None:
    message = refusal(
        "DatasetArgs.dataset_name = 'kuairand-1k'\nDatasetArgs.shuffle_ties = True",
        without=(HEAD, "DatasetArgs.dataset_name"),
        task="retrieval",
    )
    assert "shuffle_ties must be False for kuairand-1k" in message
