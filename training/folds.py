"""The folds of a run and the loaders that feed them to its ranks."""

from configs.schema import ExperimentArgs
from data.loader import Datasets, SequenceLoader, build_datasets
from training.distributed import World

FOLDS = ("train", "validation", "test")


def open_datasets(experiment: ExperimentArgs, *, world: World) -> Datasets:
    """The three folds that the settings describe.

    Raises:
        ValueError: missing or damaged data, or a split that leaves nothing.
    """
    labels: dict[str, int] = {}
    if experiment.ranking is not None:
        labels["num_tasks"] = experiment.ranking.num_tasks
        labels["num_classes"] = max(2, experiment.ranking.prediction_head_arch[-1])
    return build_datasets(
        experiment.dataset,
        task=experiment.task,
        seed=experiment.trainer.seed,
        global_batch_size=experiment.trainer.train_batch_size * world.world_size,
        **labels,
    )


def fold_loader(
    experiment: ExperimentArgs, datasets: Datasets, fold: str, *, world: World
) -> SequenceLoader:
    """This rank's batches of a fold."""
    trainer, dataset = experiment.trainer, experiment.dataset
    is_train = fold == "train"
    return SequenceLoader(
        getattr(datasets, fold),
        batch_size=trainer.train_batch_size if is_train else trainer.eval_batch_size,
        shuffle=is_train and getattr(dataset, "shuffle", False),
        seed=trainer.seed,
        rank=world.rank,
        world_size=world.world_size,
        num_workers=getattr(dataset, "num_workers", 0),
        pin_memory=world.device.type == "cuda",
        num_negatives=_random_negatives(experiment, is_train=is_train),
        is_balanced=trainer.enable_balanced_shuffler,
    )


def _random_negatives(experiment: ExperimentArgs, *, is_train: bool) -> int | None:
    """Negatives that come with each batch, None where none are drawn.

    Sharded tables want the same features in every batch, so held-out ones carry a single one.
    """
    retrieval = experiment.retrieval
    if retrieval is None or retrieval.negatives_sampler != "random":
        return None
    return retrieval.num_negatives if is_train else 1
