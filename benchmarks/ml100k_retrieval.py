"""Retrieval on MovieLens-100k: figures by seed, paired with a peer, and what each ingredient gives.

    python benchmarks/ml100k_retrieval.py --jobs 2                  # the gin file as it is
    python benchmarks/ml100k_retrieval.py --jobs 2 --variants all   # one ingredient off at a time

Trains configs/movielens_retrieval.gin through pretrain_gr_retrieval.py, once for each seed and
variant, then ranks every user's test item with the last checkpoint. Needs datasets/ml-100k
(data/preprocess.py). Prints a line for each run, means over seeds, and for every user the paired
difference to EASE with recency, whose settings are chosen on validation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.next_item_peers import figures, tuned_ease_ranks  # noqa: E402

GIN_FILE = ROOT / "configs" / "movielens_retrieval.gin"
VARIANTS: dict[str, list[str]] = {
    "as shipped": [],
    "no time bias": ["NetworkArgs.use_time_bias = False"],
    "no relative position bias": ["NetworkArgs.use_relative_position_bias = False"],
    "no position embedding": ["NetworkArgs.use_position_embedding = False"],
    "neither time nor position": [
        "NetworkArgs.use_time_bias = False",
        "NetworkArgs.use_relative_position_bias = False",
        "NetworkArgs.use_position_embedding = False",
    ],
    "in-batch negatives": [
        "RetrievalArgs.negatives_sampler = 'in_batch'",
        "RetrievalArgs.num_negatives = None",
    ],
    "256 random negatives": ["RetrievalArgs.num_negatives = 256"],
    "no normalisation": [
        "RetrievalArgs.normalize_embeddings = False",
        "RetrievalArgs.temperature = 1.0",
    ],
    "ties in file order": ["DatasetArgs.shuffle_ties = False"],
    "newest events only": ["DatasetArgs.train_windows = 'last'"],
    "fixed windows": ["DatasetArgs.train_windows = 'all'"],
    "30 epochs": ["TrainerArgs.num_epochs = 30"],
    "with action tokens": ["DatasetArgs.use_actions = True"],
    "with contextual tokens": ["DatasetArgs.contextual_feature_names = None"],
}


def main() -> None:
    """Trains, ranks and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--variants", nargs="+", default=["as shipped"], help="names, or all")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--ranks-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks_of:
        print(json.dumps(ranks_of(Path(arguments.ranks_of))))
        return
    chosen = list(VARIANTS) if arguments.variants == ["all"] else arguments.variants
    runs = [(variant, seed) for variant in chosen for seed in arguments.seeds]
    peer_U, settings = tuned_ease_ranks(histories(), num_rows=num_rows())
    print(f"EASE with recency {settings}: {shown(figures(peer_U))}", flush=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        outcomes = list(pool.map(lambda run: train(*run, Path(scratch)), runs))
    print("\n| variant | HR@10 | NDCG@10 | HR@50 | MRR | NDCG@10 less the peer's |")
    print("|---|---|---|---|---|---|")
    for variant in chosen:
        rows = [ranks for run, ranks in zip(runs, outcomes, strict=True) if run[0] == variant]
        ranks_SU = np.array(rows)
        means = {name: np.mean([figures(r)[name] for r in ranks_SU]) for name in figures(peer_U)}
        cells = " | ".join(f"{value:.4f}" for value in means.values())
        print(f"| {variant} | {cells} | {paired(ranks_SU, peer_U)} |")


def train(variant: str, seed: int, scratch: Path) -> list[int]:
    """One run in processes of its own; the test ranks of the users, in order."""
    folder = scratch / f"{list(VARIANTS).index(variant)}-{seed}"
    bindings = [
        *VARIANTS[variant],
        f"TrainerArgs.seed = {seed}",
        f"TrainerArgs.output_dir = '{folder}'",
    ]
    command = [sys.executable, str(ROOT / "pretrain_gr_retrieval.py")]
    command += ["--gin-config-file", str(GIN_FILE)]
    for binding in bindings:
        command += ["--gin-binding", binding]
    start = time.perf_counter()
    run(command)
    seconds = time.perf_counter() - start
    answer = run([sys.executable, str(Path(__file__).resolve()), "--ranks-of", str(folder)])
    ranks: list[int] = json.loads(answer.splitlines()[-1])
    test = shown(figures(np.array(ranks)))
    print(f"{variant}, seed {seed}: {test}  validation {validation(folder)}  {seconds:.0f} s",
          flush=True)  # fmt: skip
    return ranks


def run(command: list[str]) -> str:
    """Standard output of a command on one thread; its errors end this program."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def validation(folder: Path) -> str:
    """NDCG@10 of the validation fold at the end of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["split"] == "validation"][-1]
    return f"hr@10 {last['hr@10']:.4f} ndcg@10 {last['ndcg@10']:.4f}"


def ranks_of(folder: Path) -> list[int]:
    """Test ranks under the last checkpoint of a run, users ascending."""
    from configs.loader import load_experiment
    from model.build import item_table, table_specs
    from training.checkpoint import latest_checkpoint, load_weights
    from training.distributed import process_group
    from training.evaluate_retrieval import RetrievalEvaluator
    from training.trainer import Trainer

    experiment = load_experiment(folder / "operative_config.gin", task="retrieval")
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    with process_group() as world:
        trainer = Trainer(experiment, world=world)
        load_weights(trainer.model, checkpoint)
        facts = trainer.datasets.facts
        evaluator = RetrievalEvaluator(
            trainer.model,
            item_table=item_table(table_specs(experiment, facts), facts),
            metric_names=(),
            world=world,
        )
        trainer.model.eval()
        with torch.no_grad():
            return [rank for ranks_C, _ in evaluator.ranked(trainer.loaders["test"])
                    for rank in ranks_C.tolist()]  # fmt: skip


def histories() -> list[np.ndarray]:
    """Items of each user in the order of the preprocessed data."""
    from data.dataset import EventStore
    from data.manifest import find_dataset, read_manifest

    folder = find_dataset("ml-100k")
    store = EventStore(folder, read_manifest(folder))
    bounds = zip(store.offsets_U1[:-1], store.offsets_U1[1:], strict=True)
    return [np.array(store.items_N[begin:end]) for begin, end in bounds if end - begin >= 2]


def num_rows() -> int:
    """Highest item id + 1."""
    from data.manifest import find_dataset, read_manifest

    return read_manifest(find_dataset("ml-100k")).vocab_sizes["item_id"]


def paired(ranks_SU: np.ndarray, peer_U: np.ndarray) -> str:
    """Mean over users of the NDCG@10 difference, and its standard error."""
    gain = np.where(ranks_SU <= 10, 1 / np.log2(ranks_SU + 1), 0.0).mean(axis=0)
    peer = np.where(peer_U <= 10, 1 / np.log2(peer_U + 1), 0.0)
    difference_U = gain - peer
    return f"{difference_U.mean():+.4f} ± {difference_U.std() / len(difference_U) ** 0.5:.4f}"


def shown(values: dict[str, float]) -> str:
    """Figures in one line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


if __name__ == "__main__":
    main()
