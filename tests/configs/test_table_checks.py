"""Embedding tables that would be merged, or whose rows no kernel can read, are refused."""

import pytest

from tests.configs.conftest import Load, Refusal

HIDDEN = "NetworkArgs.hidden_size"


def table(feature: str, name: str, *fields: str) -> str:
    values = (f"feature_names = ['{feature}']", f"table_name = '{name}'", *fields)
    lines = [f"t/EmbeddingArgs.{value}" for value in values]
    if not any("item_vocab_size" in field for field in fields):
        lines.append("t/EmbeddingArgs.item_vocab_size_or_capacity = 5000")
    return "\n".join([*lines, "DatasetArgs.embedding_args = [@t/EmbeddingArgs()]", ""])


def test_a_table_may_not_be_called_like_the_default_of_another_feature(
    load: Load, refusal: Refusal
) -> None:
    message = refusal(table("zip", "user_id"))
    for part in ("DatasetArgs.embedding_args", "'user_id' for 'zip'", "feature 'user_id' gets"):
        assert part in message
    for harmless in (table("zip", "zip"), table("zip", "zip_code")):
        assert load(harmless).dataset.embedding_args


@pytest.mark.parametrize("name", ["a.b", "-a", "", "a b", "\u00e9", "a/b"])
def test_a_table_name_must_be_usable_in_a_module_name(refusal: Refusal, name: str) -> None:
    message = refusal(table("zip", name))
    assert "t/EmbeddingArgs.table_name" not in message.split(": ")[1]
    assert "EmbeddingArgs.table_name must be a text of letters, digits, _ and -" in message
    assert f"got {name!r}; rename {name!r}" in message


@pytest.mark.parametrize("name", ["items", "type", "9-lives", "_Zip-code_2"])
def test_ordinary_table_names_are_accepted(load: Load, name: str) -> None:
    assert load(table("zip", name)).dataset.embedding_args[0].table_name == name


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (f"{HIDDEN} = 30", [f"{HIDDEN} must be", "'item_id', got 30", "item_embedding_dim = 32"]),
        (
            "NetworkArgs.item_embedding_dim = 5",
            ["NetworkArgs.item_embedding_dim must be a multiple of 4", "got 5"],
        ),
        (
            "NetworkArgs.contextual_embedding_dim = 6\n"
            + table("zip", "zip", "sharding_type = 'model_parallel'"),
            ["NetworkArgs.contextual_embedding_dim must be", "'zip', got 6", "'data_parallel'"],
        ),
        (
            "NetworkArgs.contextual_embedding_dim = 6\n"
            + table("zip", "zip", "item_vocab_size_or_capacity = 70_000"),
            ["'zip', got 6"],
        ),
        (
            "NetworkArgs.item_embedding_dim = 6\n"
            + table("item_id", "item_id", "sharding_type = 'model_parallel'"),
            ["'item_id', got 6"],
        ),
    ],
)
def test_rows_of_sharded_tables_are_whole_vectors(
    refusal: Refusal, lines: str, parts: list[str]
) -> None:
    message = refusal(lines, without=(HIDDEN,) if HIDDEN in lines else ())
    assert "case.gin:" in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "lines",
    [
        "NetworkArgs.contextual_embedding_dim = 6",
        "NetworkArgs.contextual_embedding_dim = 6\n" + table("zip", "zip"),
        "NetworkArgs.item_embedding_dim = 6\n"
        + table("item_id", "item_id", "sharding_type = 'data_parallel'"),
        "NetworkArgs.item_embedding_dim = 12",
    ],
)
def test_replicated_tables_have_any_width(load: Load, lines: str) -> None:
    assert load(lines)


@pytest.mark.parametrize("shard_by", ["column_wise", "planner"])
def test_retrieval_needs_whole_item_rows(load: Load, refusal: Refusal, shard_by: str) -> None:
    lines = table("item_id", "items", f"shard_by = '{shard_by}'")
    assert load(lines).dataset.embedding_args[0].shard_by == shard_by
    message = refusal(lines, task="retrieval", without=("RankingArgs.prediction_head_arch",))
    assert "EmbeddingArgs.shard_by of the item table 'items' must be" in message
    assert f"got '{shard_by}'" in message
