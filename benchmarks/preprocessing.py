"""Time and memory of preprocessing a look-alike of a data set, in the publisher's format.

    python benchmarks/preprocessing.py --dataset ml-20m
    python benchmarks/preprocessing.py --dataset kuairand-27k --rows 60000000

Look-alikes have the real numbers of users, items and, unless --rows says otherwise, events. The
rows of KuaiRand's logs come in random order, which is the worst case for sorting. Prints one JSON
line: wall seconds and peak resident memory of the command line of data/preprocess.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

ROOT = Path(__file__).resolve().parents[1]
ML_20M = {"rows": 20_000_263, "users": 138_493, "items": 26_744, "max_item": 131_262}
KUAIRAND = {
    "kuairand-pure": {"rows": 1_436_609, "users": 27_285, "items": 7_551},
    "kuairand-1k": {"rows": 11_713_045, "users": 1_000, "items": 4_369_953},
    "kuairand-27k": {"rows": 322_278_385, "users": 27_285, "items": 32_038_725},
}
CHUNK_ROWS = 2_000_000
FIRST_MS, LAST_MS = 1_649_347_200_000, 1_652_025_600_000  # 2022-04-08 and 2022-05-09, Beijing


def main() -> None:
    """Writes the look-alike, preprocesses it, prints the figures and removes everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", default="ml-20m", choices=["ml-20m", *KUAIRAND])
    parser.add_argument("--rows", type=int, help="default: as many as the real data set has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, help="where to work; default: the system's folder")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rows = arguments.rows or {"ml-20m": ML_20M, **KUAIRAND}[arguments.dataset]["rows"]
    if arguments.generate is not None:
        generate(arguments.dataset, rows, arguments.seed, arguments.generate)
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        raw, output = Path(folder, "raw"), Path(folder, "output")
        # In a process of its own: a child's peak includes that of the process it is forked from.
        itself = [sys.executable, __file__, "--dataset", arguments.dataset, "--rows", str(rows)]
        itself += ["--seed", str(arguments.seed), "--generate", str(raw)]
        subprocess.run(itself, check=True)
        command = [sys.executable, str(ROOT / "data" / "preprocess.py")]
        command += ["--dataset", arguments.dataset, "--source", str(raw), "--output", str(output)]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            sys.exit(f"preprocessing ended with status {status}")
        figures = {
            "dataset": arguments.dataset,
            "rows": rows,
            "raw_mb": round(sum(path.stat().st_size for path in raw.iterdir()) / 1e6),
            "output_mb": round(sum(path.stat().st_size for path in output.iterdir()) / 1e6),
            "wall_seconds": round(seconds, 1),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "peak_rss_mib": usage.ru_maxrss // 1024,
            "cores": os.cpu_count(),
        }
    print(json.dumps(figures))


def generate(dataset: str, rows: int, seed: int, folder: Path) -> None:
    """Writes the raw files of a look-alike; equal arguments give equal bytes."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    if dataset == "ml-20m":
        _movielens(rows, generator, folder)
    else:
        _kuairand(dataset, rows, generator, folder)


def _movielens(rows: int, generator: np.random.Generator, folder: Path) -> None:
    num_users = min(ML_20M["users"], rows // 20)
    weights = generator.lognormal(0.0, 1.3, num_users)
    lengths = 20 + np.floor(weights / weights.sum() * (rows - 20 * num_users)).astype(np.int64)
    lengths[: rows - lengths.sum()] += 1  # what rounding down left over
    users = np.repeat(np.arange(1, num_users + 1), lengths)
    ids = np.sort(generator.choice(ML_20M["max_item"], ML_20M["items"] - 1, replace=False))
    ids = np.append(ids[ids > 0], ML_20M["max_item"])
    path = folder / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n")
    for begin in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - begin)
        skewed = (generator.random(count) ** 3 * len(ids)).astype(np.int64)
        columns = {
            "user": users[begin : begin + count],
            "item": ids[skewed],
            "rating": generator.integers(1, 11, count) / 2,
            "timestamp": generator.integers(789_652_009, 1_427_784_002, count),
        }
        _append(path, columns)


def _kuairand(dataset: str, rows: int, generator: np.random.Generator, folder: Path) -> None:
    shape = KUAIRAND[dataset]
    version = dataset.removeprefix("kuairand-")
    parts = ("_part1", "_part2") if version == "27k" else ("",)
    dates = ("4_08_to_4_21", "4_22_to_5_08")
    files = [folder / f"log_standard_{d}_{version}{part}.csv" for d in dates for part in parts]
    chance = {"is_click": 0.4, "is_like": 0.015, "is_follow": 0.001, "is_comment": 0.002}
    chance |= {"is_forward": 0.001, "is_hate": 0.0005, "long_view": 0.3}
    for n, path in enumerate(files):
        last = n == len(files) - 1
        left = rows // len(files) + (rows % len(files) if last else 0)
        begin_ms = FIRST_MS + (LAST_MS - FIRST_MS) * n // len(files)
        end_ms = FIRST_MS + (LAST_MS - FIRST_MS) * (n + 1) // len(files)
        header = f"user_id,video_id,date,hourmin,time_ms,{','.join(chance)},play_time_ms,"
        header += "duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
        path.write_text(header)
        while left:
            count = min(CHUNK_ROWS, left)
            left -= count
            zeros = np.zeros(count, np.int64)
            columns = {
                "user_id": generator.integers(0, shape["users"], count),
                "video_id": generator.integers(0, shape["items"], count),
                "date": zeros + 20220408,
                "hourmin": generator.integers(0, 24, count) * 100,
                "time_ms": generator.integers(begin_ms, end_ms, count),
                **{name: (generator.random(count) < p) + zeros for name, p in chance.items()},
                "play_time_ms": generator.integers(0, 60_000, count),
                "duration_ms": generator.integers(5_000, 200_000, count),
                "profile_stay_time": zeros,
                "comment_stay_time": zeros,
                "is_profile_enter": (generator.random(count) < 0.001) + zeros,
                "is_rand": zeros,
                "tab": generator.integers(0, 15, count),
            }
            _append(path, columns)
    _kuairand_users(shape["users"], folder / f"user_features_{version}.csv")


def _kuairand_users(num_users: int, path: Path) -> None:
    lines = [
        "user_id,user_active_degree,follow_user_num_range,fans_user_num_range,"
        "friend_user_num_range,register_days_range"
    ]
    for user in range(num_users):
        degree = ("full_active", "high_active", "middle_active", "UNKNOWN")[user % 4]
        follows = ("0", '"(0,10]"', '"(10,50]"', "500+")[user // 4 % 4]
        lines.append(f'{user},{degree},{follows},"[1,10)",0,730+')
    path.write_text("\n".join(lines) + "\n")


def _append(path: Path, columns: dict) -> None:
    with path.open("ab") as file:
        pl.DataFrame(columns).write_csv(file, include_header=False)


if __name__ == "__main__":
    main()
