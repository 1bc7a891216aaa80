"""After a step that is not finite: the run ends, or goes on so and so many times."""

from dataclasses import dataclass

from configs.schema import TrainerArgs


class NonFiniteError(RuntimeError):
    """A loss, gradient or recorded FP8 maximum was NaN or infinite; nothing has changed."""


@dataclass(kw_only=True)
class SkipBudget:
    """How many steps of a run may be skipped (``TrainerArgs.nonfinite_policy``)."""

    size: int = 0
    """0: the first step that is not finite ends the run."""
    num_skipped: int = 0
    """So far, over resumes."""

    @classmethod
    def of(cls, trainer: TrainerArgs, *, num_skipped: int = 0) -> "SkipBudget":
        """What the settings allow a run that has skipped so many steps already."""
        skips = trainer.nonfinite_policy == "skip"
        return cls(size=trainer.nonfinite_budget if skips else 0, num_skipped=num_skipped)

    def take(self) -> bool:
        """Whether one more step may be skipped; it then counts."""
        is_left = self.num_skipped < self.size
        self.num_skipped += is_left
        return is_left

    def advice(self, last_good_step: int) -> str:
        """How a bad step that ends the run may be got over."""
        used_up = ""
        policy = 'TrainerArgs.nonfinite_policy = "skip"'
        if self.size:
            used_up = f"TrainerArgs.nonfinite_budget = {self.size} skipped steps are used up. "
            policy = "a larger TrainerArgs.nonfinite_budget"
        return (
            f"weights, tables, optimizer and FP8 state are as after step {last_good_step}. "
            f"{used_up}Lower OptimizerArgs.learning_rate, set OptimizerArgs.clip_grad or {policy}, "
            "and resume from the last checkpoint"
        )
