"""Synthetic data with a planted signal: every sample is a pure function of (seed, sample id)."""

from __future__ import annotations

import hashlib
from statistics import NormalDist

import numpy as np

from configs.schema import BenchmarkDatasetArgs, FeatureArgs, RandomDistribution
from data.batch import PackedSamples, SequenceBatch, collate, is_history
from data.dataset import Datasets, FeatureFacts, ranges, sample_indices
from data.distributions import bounded, draw, mix, normal, uniform

_NUM_FACTORS = 3
_FIRST_SECOND = 1_600_000_000
_SECONDS_PER_EVENT = 3600
_FIRST_HELD_OUT_ID = {"validation": 2**40, "test": 2**41}
_USERS_PER_TEN_BATCHES = 32
FOLLOW_PROBABILITY = 0.8
"""Retrieval: share of events that follow from the one before; see SampleGenerator."""
_ITEM_WEIGHT, _USER_WEIGHT, _MATCH_WEIGHT, _NOISE_WEIGHT = 0.7, 0.5, 0.4, 0.3
"""Standard deviations of the parts of a score; their squares sum to about 1."""


def build_synthetic(
    args: BenchmarkDatasetArgs,
    *,
    task: str = "ranking",
    seed: int,
    global_batch_size: int,
    num_tasks: int = 1,
    num_classes: int = 2,
) -> Datasets:
    """Training, validation and test folds over disjoint sample ids.

    Training has num_generated_batches global batches, from id 0 on. The held-out folds are the
    same for any batch size and number of ranks: nothing that one run trains on is held out in
    another.

    Args:
        args: features, lengths and tables, cross-checked by ExperimentArgs.
        task: "retrieval" plants transitions, trains without candidates and holds out the last
            max(1, max_num_candidates) events.
        seed: with the sample id, all that a sample depends on.
        global_batch_size: users a batch over all ranks.
        num_tasks: more than one makes labels bit masks with a bit per task.
        num_classes: with one task, labels are classes 0..num_classes - 1.
    """
    label_kind, width = ("bitmask", num_tasks) if num_tasks > 1 else ("classes", num_classes)
    generator = SampleGenerator(
        args, task=task, seed=seed, label_kind=label_kind, num_classes=width
    )
    num_trained, num_held_out, max_history = args.max_num_candidates, args.max_num_candidates, None
    if task == "retrieval":
        num_trained, num_held_out = 0, max(1, args.max_num_candidates)
        max_history = _most_history(args)
    fold_size = -(-args.num_generated_batches // 10) * _USERS_PER_TEN_BATCHES
    held_out = {
        fold: SyntheticDataset(
            generator, first_sample_id=first, num_samples=fold_size, max_num_candidates=num_held_out
        )
        for fold, first in _FIRST_HELD_OUT_ID.items()
    }
    train = SyntheticDataset(
        generator,
        first_sample_id=0,
        num_samples=args.num_generated_batches * global_batch_size,
        max_num_candidates=num_trained,
        max_history=max_history,
    )
    return Datasets(train=train, **held_out, facts=generator.facts)


def _most_history(args: BenchmarkDatasetArgs) -> int:
    """Events of a training sample: retrieval has no candidates there, but no room for more."""
    limit = _group(args, args.item_feature_name).max_sequence_length
    if limit - args.max_num_candidates < 2:
        raise ValueError(
            f"FeatureArgs.max_sequence_length of {args.item_feature_name!r} must be >= "
            f"{args.max_num_candidates + 2} for retrieval (max_num_candidates + 2: each event is "
            f"predicted from the one before), got {limit}; raise it"
        )
    return limit - args.max_num_candidates


def _group(args: BenchmarkDatasetArgs, name: str) -> FeatureArgs:
    return next(group for group in args.feature_args if name in group.feature_names)


class SyntheticDataset:
    """The samples of a consecutive range of sample ids."""

    def __init__(
        self,
        generator: SampleGenerator,
        *,
        first_sample_id: int,
        num_samples: int,
        max_num_candidates: int,
        max_history: int | None = None,
    ) -> None:
        self.generator = generator
        self.max_num_candidates, self.max_history = max_num_candidates, max_history
        self.first_sample_id, self.num_samples = first_sample_id, num_samples
        described = f"{generator.fingerprint} {first_sample_id} {num_samples}"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.num_samples

    def at_epoch(self, seed: int, epoch: int) -> SyntheticDataset:
        return self

    def batch(self, indices_S: np.ndarray, *, batch_size: int) -> SequenceBatch:
        facts = self.generator.facts
        return collate(
            self._samples(indices_S + self.first_sample_id),
            batch_size=batch_size,
            item_feature_name=facts.item_feature_name,
            action_feature_name=facts.action_feature_name,
            contextual_feature_names=facts.contextual_feature_names,
        )

    def _samples(self, sample_ids_S: np.ndarray) -> PackedSamples:
        return self.generator.samples(
            sample_ids_S,
            max_num_candidates=self.max_num_candidates,
            max_history=self.max_history,
        )

    def num_tokens(self, indices_S: np.ndarray) -> np.ndarray:
        ids_S = indices_S + self.first_sample_id
        history_S, candidates_S = self.generator.num_events(ids_S, self.max_num_candidates)
        if self.max_history is not None:
            history_S = np.minimum(history_S, self.max_history)
        return self.generator.facts.num_tokens(history_S, candidates_S)

    def catalogue(self) -> np.ndarray:
        facts = self.generator.facts
        return np.ones(facts.vocab_sizes[facts.item_feature_name], bool)

    def seen_items(self, sample_ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_real_S = sample_ids_S != -1
        samples = self._samples(
            sample_indices(self, sample_ids_S[is_real_S]) + self.first_sample_id
        )
        lengths_S = np.zeros(len(sample_ids_S), np.int64)
        lengths_S[is_real_S] = samples.history_lengths_S
        return samples.items_E[is_history(samples)], lengths_S


class SampleGenerator:
    """Draws samples by hashing (seed, purpose, sample id, position), in numpy.

    The label of an event comes from score = item effect + user effect + <user factors, item
    factors> + noise, each with mean 0 and a fixed weight, so of variance about 1 in all: class
    floor(K * Phi(score)), or bit k of the mask = score of task k > 0. Tasks have their own effects
    and share the factors. An item's effect and factors are a hash of its id, a user's of the sample
    id and of the contextual ids: they can be learned from tables and from history.

    For retrieval an event follows from the one before with probability P = FOLLOW_PROBABILITY: its
    item is then the previous id + 1, the lowest id of the item distribution after the highest.
    Else, and at the start, it is a draw of that distribution. So drawn ids are distributed as
    asked; the others are drawn ones moved up, by P / (1 - P) = 4 in the long run on average: a
    uniform distribution stays uniform, a steep one is smoothed over that many ids.

    Putting the successor of the last item first gives an HR@1 of P + (1 - P) * p(successor), with
    p the item distribution: from 0.80 on large tables to at most 0.80 + 0.20 * max p. No model
    has more where nothing is filtered. (Filtering takes out the items a user had before, but not
    the target, so ranking those next gains a little of the remaining 0.20.)
    """

    def __init__(
        self,
        args: BenchmarkDatasetArgs,
        *,
        task: str = "ranking",
        seed: int,
        label_kind: str,
        num_classes: int,
    ) -> None:
        rows = {
            name: table.item_vocab_size_or_capacity
            for table in args.embedding_args
            for name in table.feature_names
        }
        action = () if args.action_feature_name is None else (args.action_feature_name,)
        used = (args.item_feature_name, *action, *args.contextual_feature_names)
        # A label beyond the action table is folded into it: with eight tasks a mask has 256 values.
        self._num_actions = rows[action[0]] if action else 1
        self.facts = FeatureFacts(
            item_feature_name=args.item_feature_name,
            action_feature_name=args.action_feature_name,
            contextual_feature_names=tuple(args.contextual_feature_names),
            vocab_sizes={name: rows[name] for name in used},
            num_classes=num_classes,
            label_kind=label_kind,
        )
        self._seed, self._has_transitions = seed, task == "retrieval"
        self._items = _group(args, args.item_feature_name)
        self._dists = {}
        for name in used:
            asked = (_group(args, name).value_dists or {}).get(name)
            dist = asked or RandomDistribution(dist_type="uniform")
            self._dists[name] = bounded(dist, rows[name])
        described = f"{args} {seed} {label_kind} {num_classes}"
        if self._has_transitions:
            described += f" follows with {FOLLOW_PROBABILITY}"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
        self._thresholds = np.array(
            [NormalDist().inv_cdf(k / num_classes) for k in range(1, num_classes)]
        )

    def samples(
        self, sample_ids_S: np.ndarray, *, max_num_candidates: int, max_history: int | None = None
    ) -> PackedSamples:
        """The samples with these ids.

        The latest min(max_num_candidates, events - 1) events of a sample are its candidates: it
        keeps one history event. Of the history the newest max_history events are kept.
        """
        ids_S = sample_ids_S.astype(np.int64)
        history_lengths_S, num_candidates_S = self.num_events(ids_S, max_num_candidates)
        lengths_S = history_lengths_S + num_candidates_S
        positions_E = ranges(np.zeros_like(lengths_S), lengths_S)
        owner_E = np.repeat(np.arange(len(ids_S)), lengths_S)
        events_E = mix(ids_S)[owner_E] + positions_E.astype(np.uint64)
        contextual_FS = np.array(
            [
                draw(self._dists[name], self._hash(name, ids_S))
                for name in self.facts.contextual_feature_names
            ],
            dtype=np.int64,
        ).reshape(len(self.facts.contextual_feature_names), len(ids_S))
        gaps_E = self._hash("time", events_E) % np.uint64(_SECONDS_PER_EVENT)
        items_E = self._item_ids(events_E, positions_E)
        labels_E = self._labels(ids_S, contextual_FS, items_E, owner_E, events_E)
        packed = PackedSamples(
            history_lengths_S=history_lengths_S,
            num_candidates_S=num_candidates_S,
            items_E=items_E,
            labels_E=labels_E,
            actions_E=labels_E % self._num_actions,
            timestamps_E=_FIRST_SECOND + positions_E * _SECONDS_PER_EVENT + gaps_E.astype(np.int64),
            contextual_FS=contextual_FS,
            sample_ids_S=ids_S,
            user_ids_S=ids_S,
        )
        return packed if max_history is None else packed.newest(max_history)

    def num_events(
        self, sample_ids_S: np.ndarray, max_num_candidates: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """History events and candidates of the samples with these ids, as in `samples`."""
        lengths_S = self._lengths(sample_ids_S)
        num_candidates_S = np.minimum(max_num_candidates, np.maximum(lengths_S - 1, 0))
        return lengths_S - num_candidates_S, num_candidates_S

    def _item_ids(self, events_E: np.ndarray, positions_E: np.ndarray) -> np.ndarray:
        item_name = self.facts.item_feature_name
        dist = self._dists[item_name]
        drawn_E = draw(dist, self._hash(item_name, events_E))
        if not self._has_transitions:
            return drawn_E
        follows_E = uniform(self._hash("follows", events_E)) < FOLLOW_PROBABILITY
        follows_E &= positions_E > 0
        rows_E = np.arange(len(events_E))
        # The first event of a user is drawn, so that no run of successors crosses users.
        start_E = np.maximum.accumulate(np.where(follows_E, 0, rows_E))
        assert dist.high is not None
        moved_E = drawn_E[start_E] - dist.low + (rows_E - start_E)
        return dist.low + moved_E % (dist.high - dist.low)

    def _lengths(self, ids_S: np.ndarray) -> np.ndarray:
        limit = self._items.max_sequence_length
        if not self._items.is_jagged:
            return np.full(len(ids_S), limit, np.int64)
        dist = self._items.seqlen_dist or RandomDistribution(dist_type="uniform")
        return np.minimum(draw(bounded(dist, limit + 1), self._hash("length", ids_S)), limit)

    def _labels(
        self,
        ids_S: np.ndarray,
        contextual_FS: np.ndarray,
        items_E: np.ndarray,
        owner_E: np.ndarray,
        events_E: np.ndarray,
    ) -> np.ndarray:
        is_mask = self.facts.label_kind == "bitmask"
        match_E = np.zeros(len(items_E))
        for factor in range(_NUM_FACTORS):
            user_S = self._user(f"factor {factor}", ids_S, contextual_FS)
            match_E += user_S[owner_E] * self._even(f"item factor {factor}", items_E)
        match_E *= _MATCH_WEIGHT / _NUM_FACTORS**0.5
        labels_E = np.zeros(len(items_E), np.int64)
        for task in range(self.facts.num_classes if is_mask else 1):
            user_S = self._user(f"effect {task}", ids_S, contextual_FS)
            score_E = match_E + _USER_WEIGHT * user_S[owner_E]
            score_E += _ITEM_WEIGHT * self._even(f"item effect {task}", items_E)
            score_E += _NOISE_WEIGHT * self._even(f"noise {task}", events_E)
            if is_mask:
                labels_E |= (score_E > 0).astype(np.int64) << task
            else:
                labels_E = np.searchsorted(self._thresholds, score_E).astype(np.int64)
        return labels_E

    def _user(self, purpose: str, ids_S: np.ndarray, contextual_FS: np.ndarray) -> np.ndarray:
        """Standard normal (S,): half of it from the contextual ids, where there are any."""
        own_S = self._normal(f"user {purpose}", ids_S)
        if not len(contextual_FS):
            return own_S
        names = self.facts.contextual_feature_names
        shared_S = sum(
            self._normal(f"{name} {purpose}", row)
            for name, row in zip(names, contextual_FS, strict=True)
        )
        return (own_S + shared_S / len(names) ** 0.5) / 2**0.5

    def _normal(self, purpose: str, keys: np.ndarray) -> np.ndarray:
        return normal(self._hash(purpose, keys))

    def _even(self, purpose: str, keys: np.ndarray) -> np.ndarray:
        """Uniform with mean 0 and variance 1: a tenth of the cost of a normal, one per event."""
        return (uniform(self._hash(purpose, keys)) - 0.5) * 12**0.5

    def _hash(self, purpose: str, keys: np.ndarray) -> np.ndarray:
        salt = hashlib.sha256(f"{self._seed} {purpose}".encode()).digest()[:8]
        return mix(keys.astype(np.uint64) ^ np.frombuffer(salt, np.uint64))
