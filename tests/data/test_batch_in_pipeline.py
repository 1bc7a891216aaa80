"""A SequenceBatch through TorchRec's own pipelines, on both ranks of a gloo group."""

from __future__ import annotations

import pytest
import torch

from configs.schema import DatasetArgs
from data.batch import negatives_feature
from data.loader import SequenceLoader, build_datasets


class _Summing(torch.nn.Module):
    """Embeds all features, the negatives with the items' table, and reports what it was fed."""

    def __init__(self, vocab_sizes: dict[str, int], *, negatives: str | None) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        tables = [
            EmbeddingConfig(
                name=f"table_{name}",
                embedding_dim=4,
                num_embeddings=rows,
                feature_names=[name, *([negatives] if negatives and name == "item_id" else [])],
            )
            for name, rows in vocab_sizes.items()
        ]
        self.embeddings = EmbeddingCollection(tables=tables, device=torch.device("cpu"))
        self.negatives = negatives
        self.head = torch.nn.Linear(4, 1)

    def forward(self, batch):
        embedded = self.embeddings(batch.features)
        score_E = self.head(embedded["item_id"].values())[:, 0]
        loss = ((score_E - batch.labels_E) ** 2).sum()
        if not self.negatives:
            return loss, (batch.sample_ids_B, loss.detach(), None)
        return loss, (batch.sample_ids_B, loss.detach(), embedded[self.negatives].values().detach())


def _run(
    rank: int,
    world_size: int,
    pipeline: str,
    args: DatasetArgs,
    batch_size: int,
    num_negatives: int | None = None,
):
    import torch.distributed as dist
    from torchrec.distributed import DistributedModelParallel, train_pipeline
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    torch.manual_seed(0)
    datasets = build_datasets(args)
    negatives = None if num_negatives is None else negatives_feature("item_id")
    model = _Summing(datasets.facts.vocab_sizes, negatives=negatives)
    apply_optimizer_in_backward(torch.optim.SGD, model.embeddings.parameters(), {"lr": 0.01})
    sharder = EmbeddingCollectionSharder()
    tables = {f"table_{n}": row_wise(compute_kernel="fused") for n in datasets.facts.vocab_sizes}
    plan = construct_module_sharding_plan(
        model.embeddings,
        tables,
        sharder=sharder,
        world_size=world_size,
        local_size=world_size,
        device_type="cpu",
    )
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    runner = getattr(train_pipeline, pipeline)(parallel, optimizer, torch.device("cpu"))
    loader = SequenceLoader(
        datasets.test,
        batch_size=batch_size,
        shuffle=True,
        seed=1,
        rank=rank,
        world_size=world_size,
        num_negatives=num_negatives,
    )
    batches, fed = loader.epoch(0), []
    for _ in range(loader.num_batches):
        sample_ids_B, loss, rows = runner.progress(batches)
        fed.append((sample_ids_B.tolist(), float(loss), [] if rows is None else rows.tolist()))
    return fed


@pytest.mark.parametrize("count", [3, 10])
def test_pipelines_are_fed_every_sample_once(count, make_dataset, two_ranks):
    """3 samples at 2 per rank leave the second rank one; 10 leave it none in the last batch."""
    args = make_dataset([6] * count, max_num_candidates=1)
    plain = two_ranks.run(_run, "TrainPipelineBase", args, 2)
    ahead = two_ranks.run(_run, "TrainPipelineSparseDist", args, 2)
    first = build_datasets(args).test.first_sample_id
    ids = sorted(i for rank in ahead for batch, *_ in rank for i in batch if i >= 0)
    assert ids == [first + n for n in range(count)]
    assert ahead == plain
    if count == 10:
        assert ahead[1][-1] == ([-1, -1], 0.0, [])


def test_pipelines_look_the_negatives_up_on_both_ranks(make_dataset, two_ranks):
    """The samples are trained on as before; both ranks get the rows of the same five items."""
    args = make_dataset([6] * 10, max_num_candidates=1)
    without = two_ranks.run(_run, "TrainPipelineSparseDist", args, 2)
    plain = two_ranks.run(_run, "TrainPipelineBase", args, 2, 5)
    ahead = two_ranks.run(_run, "TrainPipelineSparseDist", args, 2, 5)
    assert ahead == plain
    for fed, expected in zip(ahead, without, strict=True):
        assert [batch[:2] for batch in fed] == [batch[:2] for batch in expected]
    for step, (one, other) in enumerate(zip(*ahead, strict=True)):
        assert len(one[2]) == 5, step
        assert one[2] == other[2], step
        assert len({tuple(row) for row in one[2]}) == 5, step
    assert ahead[1][-1][0] == [-1, -1], "the last batch leaves the second rank no sample"
