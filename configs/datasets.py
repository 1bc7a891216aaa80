"""What is fixed about each data set: its features, its labels and its rating scale."""

from dataclasses import dataclass
from typing import Literal

ITEM_FEATURE = "item_id"
ACTION_FEATURE = "action"


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """Facts that settings are checked against before any data is read.

    A rated event's class is `(rating - first_rating) / rating_step`, an integer from 0. A bit
    mask's bit k is the label of task k.
    """

    contextual_feature_names: tuple[str, ...]
    """One id per user each, in the order of their tokens."""

    label_kind: Literal["classes", "bitmask"]
    """classes: one class id per event. bitmask: one bit per task."""

    num_classes: int
    """Number of classes, or of bits."""

    first_rating: float | None = None
    """Lowest rating of the scale (class 0); None for data without ratings."""

    rating_step: float | None = None
    """Distance between neighbouring ratings; None for data without ratings."""

    liked_rating: float | None = None
    """Lowest rating that counts as positive in the binary metrics; None without ratings."""

    item_feature_name: str = ITEM_FEATURE
    """Feature with the ids of the items."""

    action_feature_name: str = ACTION_FEATURE
    """Feature with the label of each history event as an input."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Every feature that needs an embedding table."""
        return (self.item_feature_name, self.action_feature_name, *self.contextual_feature_names)

    @property
    def ratings(self) -> tuple[float, ...]:
        """The rating scale, class 0 first; empty for data without ratings."""
        if self.first_rating is None or self.rating_step is None:
            return ()
        return tuple(self.first_rating + k * self.rating_step for k in range(self.num_classes))


_MOVIELENS_USER = ("user_id", "sex", "age", "occupation", "zip")
_KUAIRAND = DatasetFacts(
    contextual_feature_names=(
        "user_id",
        "user_active_degree",
        "follow_user_num_range",
        "fans_user_num_range",
        "friend_user_num_range",
        "register_days_range",
    ),
    label_kind="bitmask",
    num_classes=8,
)
_WHOLE_STARS = DatasetFacts(
    contextual_feature_names=_MOVIELENS_USER,
    label_kind="classes",
    num_classes=5,
    first_rating=1.0,
    rating_step=1.0,
    liked_rating=4.0,
)

DATASETS: dict[str, DatasetFacts] = {
    "ml-100k": _WHOLE_STARS,
    "ml-1m": _WHOLE_STARS,
    "ml-20m": DatasetFacts(
        contextual_feature_names=("user_id",),
        label_kind="classes",
        num_classes=10,
        first_rating=0.5,
        rating_step=0.5,
        liked_rating=4.0,
    ),
    "kuairand-pure": _KUAIRAND,
    "kuairand-1k": _KUAIRAND,
    "kuairand-27k": _KUAIRAND,
}
"""Every data set a config may name, by DatasetArgs.dataset_name."""
