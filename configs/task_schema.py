"""Settings of what is learned: ranking candidates, or retrieving the next item."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from configs.rules import (
    BelowOne,
    CheckedArgs,
    ConfigError,
    Name,
    NonEmpty,
    OptionalSize,
    PositiveFloat,
    PositiveInt,
    Range,
)


def is_retrieval_metric(name: str) -> bool:
    """HR@k, NDCG@k with k from 1 to 999,999,999, or MRR, in any case."""
    return re.fullmatch(r"(HR|NDCG)@[1-9]\d{0,8}|MRR", name.upper()) is not None


@dataclass(frozen=True, kw_only=True)
class RankingArgs(CheckedArgs):
    """The ranking head and its metrics."""

    prediction_head_arch: Annotated[tuple[PositiveInt, ...], NonEmpty()]
    """Widths of the head's layers; the last one is the number of logits."""

    prediction_head_act_type: Literal["relu", "gelu"] = "relu"
    """Activation between them."""

    prediction_head_bias: bool = True
    """The head's linears have a bias."""

    prediction_head_dropout: BelowOne = 0.0
    """Dropout after each of the head's activations."""

    num_tasks: PositiveInt = 1
    """1: one label per event (a class, or yes/no). More: that many yes/no labels per event."""

    eval_metrics: Annotated[
        tuple[Literal["AUC", "GAUC", "NE", "LOGLOSS", "ACCURACY", "AUC_MULTICLASS"], ...],
        NonEmpty(),
    ] = ("AUC",)
    """Metrics named in the printed summary; metrics.jsonl always has all of them."""


@dataclass(frozen=True, kw_only=True)
class RetrievalArgs(CheckedArgs):
    """The retrieval loss and its metrics."""

    num_negatives: OptionalSize = None
    """Negatives of a step, the same ones for all its positives (one that is itself the positive
    does not count); None (also written -1) = all items of the global batch."""

    negatives_sampler: Literal["in_batch", "random"] = "in_batch"
    """in_batch: the distinct items that all ranks' users have in this step. random: num_negatives
    distinct items of the catalogue, each equally likely."""

    temperature: Annotated[float, Range(low=1e-4)] = 0.05
    """Divisor of the similarity scores."""

    normalize_embeddings: bool = True
    """Scores are cosines: users and items are divided by their norms, in training and scoring."""

    l2_norm_eps: PositiveFloat = 1e-6
    """Smallest norm an embedding is divided by."""

    eval_metrics: Annotated[tuple[Name, ...], NonEmpty()] = ("HR@10", "NDCG@10")
    """Metrics named in the printed summary: HR@k, NDCG@k, MRR."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(dict.fromkeys(name.upper() for name in self.eval_metrics))
        for name in names:
            if not is_retrieval_metric(name):
                raise ConfigError(
                    f"RetrievalArgs.eval_metrics must hold HR@k, NDCG@k (k >= 1) or MRR, got "
                    f"{name!r}; write for example 'NDCG@10'",
                    "RetrievalArgs.eval_metrics",
                )
        object.__setattr__(self, "eval_metrics", names)
        if self.negatives_sampler == "random" and self.num_negatives is None:
            raise ConfigError(
                "RetrievalArgs.num_negatives must be set with negatives_sampler = 'random', got "
                "None; say how many items are drawn a step",
                "RetrievalArgs.num_negatives",
                "RetrievalArgs.negatives_sampler",
            )
