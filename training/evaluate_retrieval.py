"""Ranks every held-out item in the full catalogue, whose table stays where it is.

Each rank scores its own rows of the item table for the queries of all ranks; counts of what beats
a target add up over ranks, so ranks are exact and the table is never gathered.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.batch import SequenceBatch
from data.dataset import SequenceDataset
from data.loader import SequenceLoader
from model.retrieval import RetrievalTrunk
from model.trunk import SequenceModel
from modules.catalogue import CatalogueShare, Questions, score_share
from modules.embedding import TableSpec, lookup_results
from modules.rank_metrics import RetrievalMetrics
from training.distributed import World, gather_rows

# Float64 scores that a rank holds at a time: 32 MiB, and 1 GiB on a GPU.
_MAX_SCORES = {"cpu": 2**22, "cuda": 2**27}


class RetrievalEvaluator:
    """Full-catalogue figures; the items a user had before are not offered again.

    Every candidate of a sample is a target of the user's newest query. It is ranked among the items
    that occur in the data set, less those that the user had before the first candidate, in a
    history of any length; it is itself never left out. ``loss`` is its cross entropy against all
    items of the data set, so it compares between samplers, batch sizes and numbers of ranks.

    Args:
        model: the model, its tables already sharded (a DistributedModelParallel).
        item_table: where the items are looked up.
        metric_names: figures that must be there, such as "HR@10".
        world: this process among those of the run.
        group: ranks that have other users each; None in a run of one process.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        item_table: TableSpec,
        metric_names: Sequence[str],
        world: World,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._item_table = item_table
        self._metric_names = tuple(metric_names)
        self._world = world
        # Ranks that share a model have the same users; the first of each has them counted.
        self._asks = group is None or dist.get_process_group_ranks(group)[0] == 0

    def __call__(self, loader: SequenceLoader, max_batches: int | None = None) -> dict[str, float]:
        """See ``training.evaluate.Evaluator``."""
        metrics = RetrievalMetrics(self._metric_names)
        for ranks_E, losses_E in self.ranked(loader, max_batches):
            metrics.update(ranks_E=ranks_E, losses_E=losses_E)
        return metrics.compute()

    def ranked(
        self, loader: SequenceLoader, max_batches: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Ranks from 1, int64 (C,), and cross entropies, float64 (C,), of every batch's targets.

        Those of all processes, in the order of the split. The model is in evaluation mode.
        """
        similarity = self._trunk.objective.similarity
        share = self._share(loader.dataset.catalogue())
        for batch in itertools.islice(loader.epoch(0), max_batches):
            questions = self._questions(batch, loader.dataset)
            questions = (questions if self._asks else questions.none()).of_all_ranks()
            num_better_C, logsumexp_U = score_share(
                share, questions, similarity, max_elements=_MAX_SCORES[self._world.device.type]
            )
            dist.all_reduce(num_better_C)
            logsumexp_U = gather_rows(logsumexp_U).logsumexp(dim=0)
            losses_C = logsumexp_U.index_select(0, questions.target_users_C)
            yield num_better_C + 1, losses_C - questions.target_scores_C

    @property
    def _trunk(self) -> RetrievalTrunk:
        return cast(RetrievalTrunk, cast(SequenceModel, self._model.module).trunk)

    def _questions(self, batch: SequenceBatch, dataset: SequenceDataset) -> Questions:
        """What this rank's users ask."""
        device = self._world.device
        seen_ids_S, num_seen_B = dataset.seen_items(batch.sample_ids_B.numpy())
        seen_users_S = np.repeat(np.arange(batch.batch_size), num_seen_B)
        batch = batch.to(device)
        model = cast(SequenceModel, self._model.module)
        asked = self._trunk.held_out(batch, lookup_results(model.tables(batch.features)))
        similarity = self._trunk.objective.similarity
        query_BD = similarity.embed(asked.query_BD.double())
        target_CD = similarity.embed(asked.target_rows_CD.double())
        query_CD = query_BD.index_select(0, asked.target_users_C)
        return Questions(
            query_UD=query_BD,
            target_users_C=asked.target_users_C,
            target_ids_C=asked.target_ids_C,
            target_scores_C=similarity.paired_scores(query_CD, target_CD),
            seen_users_S=torch.from_numpy(seen_users_S).to(device),
            seen_ids_S=torch.from_numpy(seen_ids_S).to(device),
        )

    def _share(self, catalogue_N: np.ndarray) -> CatalogueShare:
        """The item rows that this rank scores: its own shard, or its part of a replicated table."""
        rows_ND, first_id = self._own_rows()
        exists_N = torch.zeros(rows_ND.shape[0], dtype=torch.bool)
        known = torch.from_numpy(catalogue_N[first_id : first_id + rows_ND.shape[0]])
        exists_N[: known.shape[0]] = known  # a table may have more rows than there are items
        return CatalogueShare(
            rows_ND=rows_ND, first_id=first_id, exists_N=exists_N.to(self._world.device)
        )

    def _own_rows(self) -> tuple[Tensor, int]:
        table = self._item_table
        if not table.is_sharded:
            weight = self._trunk.replicated.weight(table.feature_names[0]).detach()
            size = -(-weight.shape[0] // self._world.world_size)
            first_id = min(self._world.rank * size, weight.shape[0])
            return weight[first_id : first_id + size], first_id
        (sharded,) = (
            value
            for name, value in self._model.state_dict().items()
            if name.startswith("tables.") and name.endswith(f".{table.module_name}.weight")
        )
        shards = sharded.local_shards()
        if not shards:  # a table-wise table lies on one rank
            return torch.empty(0, table.dim, device=self._world.device), 0
        (shard,) = shards
        first_id, first_column = shard.metadata.shard_offsets
        assert first_column == 0 and shard.tensor.shape[1] == table.dim, "rows must be whole"
        return shard.tensor.detach(), first_id
