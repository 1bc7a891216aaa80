"""From embedding rows to tokens: their order, their width, and the divisor of the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import SequenceBatch
from data.dataset import FeatureFacts
from modules.preprocessor import SequencePreprocessor
from tests.support.experiments import batch_of

HIDDEN = 8
WIDTHS = {"item": HIDDEN, "action": HIDDEN, "user_id": HIDDEN, "age": HIDDEN}
FACTS = FeatureFacts(
    item_feature_name="item",
    action_feature_name="action",
    contextual_feature_names=("user_id", "age"),
    vocab_sizes={"item": 60, "action": 5, "user_id": 40, "age": 4},
    num_classes=5,
    label_kind="classes",
)
# The second user has no history, the third no candidate; a padding user comes last.
USERS = [(2, 2), (0, 3), (1, 0)]


def make(**changes: Any) -> SequencePreprocessor:
    """A preprocessor whose position rows are zero, so that tokens are the rows themselves."""
    settings: dict[str, Any] = {
        "feature_dims": WIDTHS,
        "hidden_size": HIDDEN,
        "max_seq_len": 20,
        "num_position_buckets": 30,
        "scaling_seqlen": 20,
        "dropout": 0.0,
        "dtype": torch.float32,
    }
    preprocessor = SequencePreprocessor(FACTS, **(settings | changes))
    torch.nn.init.zeros_(preprocessor.position.weight)
    return preprocessor


def rows_of(batch: SequenceBatch, widths: dict[str, int] = WIDTHS) -> dict[str, Tensor]:
    """Rows that tell where they come from: the n-th id of feature f holds 100 f + n throughout."""
    return {
        name: (100.0 * (f + 1) + torch.arange(len(batch.features[name].values())))[:, None].repeat(
            1, widths[name]
        )
        for f, name in enumerate(WIDTHS)
    }


def test_tokens_are_contextual_then_items_with_their_actions_then_candidates() -> None:
    batch = batch_of(USERS, batch_size=4)
    sequence, layout = make()(batch, rows_of(batch))
    item, action, user_id, age = 100, 200, 300, 400
    assert sequence.values_TD[:, 0].tolist() == [
        *(user_id, age, item, action, item + 1, action + 1, item + 2, item + 3),
        *(user_id + 1, age + 1, item + 4, item + 5, item + 6),
        *(user_id + 2, age + 2, item + 7, action + 2),
    ]
    assert sequence.seq_offsets_B1.tolist() == [0, 8, 13, 17, 17]
    assert sequence.num_contextuals_B.tolist() == [2, 2, 2, 0]
    assert sequence.num_candidates_B.tolist() == [2, 3, 0, 0]
    assert layout.candidate_tokens_C.tolist() == [6, 7, 10, 11, 12]
    assert sequence.timestamps_T.tolist() == [
        *(0, 0, 0, 0, 100, 100, 200, 300),
        *(0, 0, 0, 100, 200),
        *(0, 0, 0, 0),
    ]


def test_without_actions_or_contextual_features_only_items_are_left() -> None:
    facts = FeatureFacts(
        item_feature_name="item",
        action_feature_name=None,
        contextual_feature_names=(),
        vocab_sizes={"item": 60},
        num_classes=5,
        label_kind="classes",
    )
    preprocessor = make()
    preprocessor._facts = facts
    batch = batch_of(USERS, batch_size=4)
    sequence, _ = preprocessor(batch, {"item": rows_of(batch)["item"]})
    assert sequence.values_TD[:, 0].tolist() == [100 + n for n in range(8)]
    assert sequence.seq_offsets_B1.tolist() == [0, 4, 7, 8, 8]


def test_only_features_of_another_width_are_projected() -> None:
    widths = WIDTHS | {"item": 4, "age": 3}
    preprocessor = make(feature_dims=widths)
    assert set(preprocessor.projections) == {"feature_item", "feature_age"}
    batch = batch_of(USERS, batch_size=4)
    rows = rows_of(batch, widths)
    sequence, layout = preprocessor(batch, rows)
    assert sequence.values_TD.shape == (17, HIDDEN)
    expected = preprocessor.projections["feature_item"](rows["item"])
    torch.testing.assert_close(sequence.values_TD[layout.item_tokens_E], expected)
    assert (sequence.values_TD[0] == 300).all(), "user_id has the hidden width: left as it is"


@pytest.mark.parametrize(("asked", "divisors"), [(20, [20, 20, 20]), (None, [8, 7, 1])])
def test_divisor_is_fixed_or_the_longest_of_the_batch(
    asked: int | None, divisors: list[int]
) -> None:
    """Tokens: 2 contextual, 2 for a history event, 1 for a candidate; at least 1 for nobody."""
    preprocessor = make(scaling_seqlen=asked)
    for users, divisor in zip(([(2, 2), (1, 0)], [(2, 1)], []), divisors, strict=True):
        batch = batch_of(users, batch_size=4)
        sequence, _ = preprocessor(batch, rows_of(batch))
        assert sequence.scaling_seqlen == divisor
        assert sequence.max_seq_len == 20


def test_positions_are_added_to_tokens() -> None:
    preprocessor = make()
    torch.nn.init.constant_(preprocessor.position.weight, 0.5)
    batch = batch_of(USERS, batch_size=4)
    sequence, _ = preprocessor(batch, rows_of(batch))
    assert sequence.values_TD[0].tolist() == [300.5] * HIDDEN


def test_dropout_acts_in_training_only_and_the_type_is_the_one_asked_for() -> None:
    preprocessor = make(dropout=0.5, dtype=torch.bfloat16)
    batch = batch_of(USERS, batch_size=4)
    torch.manual_seed(0)
    dropped = preprocessor(batch, rows_of(batch))[0].values_TD
    kept = preprocessor.eval()(batch, rows_of(batch))[0].values_TD
    assert dropped.dtype == kept.dtype == torch.bfloat16
    assert 0.2 < float((dropped == 0).float().mean()) < 0.8
    assert (kept != 0).all()


def test_a_user_longer_than_the_maximum_is_refused() -> None:
    batch = batch_of([(9, 1)], batch_size=1)
    with pytest.raises(ValueError, match="has 21 tokens, but max_seq_len is 20.*max_history"):
        make()(batch, rows_of(batch))


def test_too_few_position_buckets_are_refused_when_the_model_is_built() -> None:
    with pytest.raises(ValueError, match="num_position_buckets must be at least 4 with 2"):
        make(num_position_buckets=3)
