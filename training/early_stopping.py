"""Early stopping: which validation was the best one, and how many have passed since."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from configs.schema import TrainerArgs

logger = logging.getLogger(__name__)

_FALLING = ("loss", "ne", "logloss")


class EarlyStopping:
    """Follows one figure of the validation fold.

    Args:
        metric: its name in the validation records; loss, ne and logloss are better the lower
            they are, all others the higher.
        patience: validations in a row without an improvement that end the training.
    """

    def __init__(self, metric: str, *, patience: int) -> None:
        self.metric = metric
        self._patience = patience
        self._sign = -1.0 if metric in _FALLING else 1.0
        self.best_step: int | None = None
        self.best_value = math.nan
        self.num_without_improvement = 0

    @property
    def is_over(self) -> bool:
        """Whether the patience is used up: training ends here."""
        return self.num_without_improvement >= self._patience

    def check(self, figures: Mapping[str, float]) -> None:
        """Refuses a metric that validations will not have, given the figures of one.

        Raises:
            ValueError: it is not among them.
        """
        if figures["num_events"] and self.metric not in figures:
            raise ValueError(
                f"TrainerArgs.early_stopping_metric must be a figure of the validation fold, one "
                f"of {', '.join(figures)}, got {self.metric!r}; choose one of these"
            )

    def update(self, step: int, value: float, *, counts: bool = True) -> bool:
        """Takes in the figure of a validation; returns whether it is the best so far.

        Args:
            counts: False for an extra validation at the end, which a longer run would not have.

        Raises:
            ValueError: it is NaN or infinite, so that no other one is better or worse.
        """
        if not math.isfinite(value):
            raise ValueError(
                f"TrainerArgs.early_stopping_metric must be a metric with a value on the "
                f"validation fold, got {self.metric!r} = {value} after step {step}; choose "
                "another one (an AUC needs both labels) or give the fold more events "
                "(TrainerArgs.max_eval_iters)"
            )
        if self.best_step is None or self._sign * (value - self.best_value) > 0:
            self.best_step, self.best_value, self.num_without_improvement = step, value, 0
            return True
        self.num_without_improvement += counts
        if self.is_over:
            logger.info("training ends after step %d: %s", step, self)
        return False

    def __str__(self) -> str:
        return (
            f"best validation {self.metric} {self.best_value:.6g} at step {self.best_step}, "
            f"validations since then: {self.num_without_improvement}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, plain numbers and text."""
        return {
            "metric": self.metric,
            "best_step": self.best_step,
            "best_value": self.best_value,
            "num_without_improvement": self.num_without_improvement,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Goes on where ``state`` was taken, or starts anew where it is of another metric."""
        if state is None or state["metric"] != self.metric:
            logger.warning(
                "TrainerArgs.early_stopping_metric = %r: the run so far followed %s, so its "
                "validations do not count",
                self.metric,
                "no metric" if state is None else repr(state["metric"]),
            )
            return
        self.best_step = state["best_step"]
        self.best_value = state["best_value"]
        self.num_without_improvement = state["num_without_improvement"]


def early_stopping(trainer: TrainerArgs, *, is_validated: bool) -> EarlyStopping | None:
    """What ``TrainerArgs.early_stopping_metric`` asks for, None without it.

    Raises:
        ValueError: there is no validation to follow.
    """
    metric = trainer.early_stopping_metric
    if metric is None:
        return None
    if not is_validated:
        raise ValueError(
            "TrainerArgs.early_stopping_metric must be None where no validation fold is held out, "
            f"got {metric!r}; choose a DatasetArgs.split that leaves validation events, or end the "
            "training with TrainerArgs.max_train_iters"
        )
    return EarlyStopping(metric, patience=trainer.early_stopping_patience)
