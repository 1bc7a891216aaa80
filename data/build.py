"""The data sets that settings describe."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from configs.schema import BenchmarkDatasetArgs, DatasetArgs
from data.dataset import Datasets, EventDataset, EventStore, FeatureFacts
from data.manifest import Manifest, find_dataset, read_manifest
from data.splits import FOLDS, SampleTable, SplitRule, make_splits
from data.synthetic import build_synthetic


def build_datasets(
    args: DatasetArgs | BenchmarkDatasetArgs,
    *,
    task: str = "ranking",
    seed: int = 1234,
    global_batch_size: int = 1,
    num_tasks: int = 1,
    num_classes: int = 2,
) -> Datasets:
    """The train, validation and test folds that `args` describes.

    Args:
        args: a preprocessed data set, or a synthetic one.
        task: "ranking" or "retrieval"; decides the split where `args` leaves it open. For
            retrieval no training sample has candidates and every evaluation sample has at least
            one.
        seed: of a synthetic data set.
        global_batch_size: users a batch over all ranks; sizes a synthetic data set.
        num_tasks: of a synthetic data set; more than one makes its labels bit masks.
        num_classes: of a synthetic data set with one task.

    Raises:
        ValueError: missing or damaged data, a contextual feature it has not, or a split that
            leaves no samples.
    """
    if isinstance(args, BenchmarkDatasetArgs):
        return build_synthetic(
            args,
            task=task,
            seed=seed,
            global_batch_size=global_batch_size,
            num_tasks=num_tasks,
            num_classes=num_classes,
        )
    folder = find_dataset(args.dataset_name, args.dataset_path)
    manifest = read_manifest(folder, dataset_name=args.dataset_name)
    rule = split_rule(args, task=task)
    store = EventStore(folder, manifest)
    facts = feature_facts(args, manifest)
    folds: dict[str, EventDataset] = {}
    first_sample_id = 0
    tables = make_splits(rule, offsets_U1=store.offsets_U1)
    for fold in FOLDS:
        described = [manifest.files["events"].sha256, fold, *_described(rule, tables[fold])]
        described += _features_left_out(facts, manifest)
        has_shuffled_ties = args.shuffle_ties and fold == "train"
        if has_shuffled_ties:
            described.append("shuffled ties")
        folds[fold] = EventDataset(
            store,
            tables[fold],
            facts=facts,
            first_sample_id=first_sample_id,
            fingerprint=hashlib.sha256(" ".join(described).encode()).hexdigest()[:16],
            rule=rule if fold == "train" and rule.train_windows == "random" else None,
            has_shuffled_ties=has_shuffled_ties,
        )
        first_sample_id += len(tables[fold])
    return Datasets(**folds, facts=facts)


def split_rule(args: DatasetArgs, *, task: str) -> SplitRule:
    """The split `args` asks for; None means temporal with candidates, else the task's own."""
    split = args.split
    if split is None and args.max_num_candidates > 0:
        split = "temporal"
    if split is None:
        split = "leave_one_out" if task == "retrieval" else "by_user"
    return SplitRule(
        split=split,
        max_history_seqlen=args.max_history_seqlen,
        max_num_candidates=args.max_num_candidates,
        train_windows=args.train_windows,
        train_on_validation=args.train_on_validation,
        task=task,
    )


def feature_facts(args: DatasetArgs, manifest: Manifest) -> FeatureFacts:
    """The features of a preprocessed data set that `args` uses.

    Raises:
        ValueError: it names a contextual feature that the data set has not.
    """
    contextual = args.contextual_feature_names
    if contextual is None:
        contextual = manifest.contextual_feature_names
    for name in contextual:
        if name not in manifest.contextual_feature_names:
            raise ValueError(
                f"DatasetArgs.contextual_feature_names must be among "
                f"{list(manifest.contextual_feature_names)} for {manifest.dataset_name}, got "
                f"{name!r}; correct it or leave it out"
            )
    action = manifest.action_feature_name if args.use_actions else None
    used = [manifest.item_feature_name, *([] if action is None else [action]), *contextual]
    return FeatureFacts(
        item_feature_name=manifest.item_feature_name,
        action_feature_name=action,
        contextual_feature_names=tuple(contextual),
        # In the manifest's order: replicated tables draw their first weights one after the other.
        vocab_sizes={name: rows for name, rows in manifest.vocab_sizes.items() if name in used},
        num_classes=manifest.num_classes,
        label_kind=manifest.label_kind,
    )


def _described(rule: SplitRule, samples: SampleTable) -> list[str]:
    """What a fingerprint says of the rule of a fold.

    Settings that came later are named only where they change samples: runs from before resume.
    """
    settings = dataclasses.asdict(rule)
    task = settings.pop("task")
    words = [str(settings)]
    if task != "ranking":
        words.append(task)
    elif not rule.max_num_candidates and len(samples) > len(np.unique(samples.user_rows_S)):
        words.append("blocks")  # histories beyond max_history_seqlen were cut off before
    return words


def _features_left_out(facts: FeatureFacts, manifest: Manifest) -> list[str]:
    words = [] if facts.action_feature_name is not None else ["items alone"]
    if facts.contextual_feature_names != manifest.contextual_feature_names:
        words.append(f"contextual {list(facts.contextual_feature_names)}")
    return words
