"""Does harm to training jobs, many times, and counts what survives.

    python benchmarks/soak.py --folder /tmp/soak                      # the whole of it, an hour
    python benchmarks/soak.py --folder /tmp/soak --faults kill=2      # a short form
    python benchmarks/soak.py --folder /tmp/soak --report benchmarks/soak_NAME.md

Two ranks train the synthetic example under torchrun and save every 5 steps in the background; on a
GPU: --processes 1 --gin-binding "TrainerArgs.deterministic = True". A try survives if the job ends
as it should and nothing is lost: finished runs have the records and, bit for bit, the final
checkpoint of a run that nobody disturbed; failed ones leave a newest checkpoint that loads, and a
message. Exit status 1: a try did not survive, or hung.
"""

import argparse
import platform
import random
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.soak_faults import FAULTS, Soak  # noqa: E402
from benchmarks.soak_job import HangError  # noqa: E402

_FULL = {
    "kill": 100,
    "kill while saving": 25,
    "file cut or missing": 40,
    "full disk": 5,
    "data damaged": 20,
    "NaN in a gradient": 5,
    "rank stopped for good": 3,
    "rank stopped for a while": 5,
    "Ctrl-C": 5,
    "SIGTERM": 5,
    "SIGUSR1": 5,
}


@dataclass
class Row:
    """What came of one fault."""

    tries: int = 0
    survived: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(soak: Soak, name: str, tries: int) -> Row:
    """Tries a fault so often; a failure is noted and the next try made."""
    row, act = Row(), FAULTS[name]
    while row.tries < tries:
        try:
            seconds = act(soak, tries - row.tries)
        except (AssertionError, HangError, OSError, subprocess.SubprocessError) as error:
            row.tries += 1
            row.failures.append(f"{name}: {type(error).__name__}: {error}")
            print(row.failures[-1], flush=True)
            continue
        row.tries += len(seconds)
        row.survived += len(seconds)
        row.seconds += seconds
        print(f"{name}: {row.survived} of {row.tries} survived", flush=True)
    return row


def report(rows: dict[str, Row], *, command: str, commit: str, machine: str) -> str:
    """The table as Markdown."""
    lines = [
        "# Soak: faults against a training job",
        "",
        f"Commit {commit}, Python {platform.python_version()}, {machine}. `" + command + "`",
        "",
        (__doc__ or "").rpartition("\n\n")[2].strip(),
        "Seconds: from the fault to the next training record where the job goes on by itself, to",
        "its end where it ends, to the first record of a resume after Ctrl-C and SIGTERM.",
        "",
        "| fault | tries | survived | seconds, median | largest |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        times = (f"{median(row.seconds):.1f}", f"{max(row.seconds):.1f}") if row.seconds else "--"
        lines.append(f"| {name} | {row.tries} | {row.survived} | {times[0]} | {times[1]} |")
    failures = [f"- {text}" for row in rows.values() for text in row.failures]
    return "\n".join([*lines, *([""] if failures else []), *failures]) + "\n"


def device_name() -> str:
    """What the jobs run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults against training jobs.")
    parser.add_argument("--folder", type=Path, required=True, help="for runs; filled, not emptied")
    parser.add_argument("--faults", nargs="*", metavar="NAME=TRIES", help=", ".join(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="of a job; short ones end early")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gin-config-file", default="benchmark_ranking.gin")
    parser.add_argument("--gin-binding", action="append", default=[])
    parser.add_argument("--report", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    wanted = _FULL
    if arguments.faults:
        pairs = [text.rpartition("=") for text in arguments.faults]
        wanted = {name: int(tries) for name, _, tries in pairs}
    chance = random.Random(arguments.seed)
    soak = Soak(
        arguments.folder,
        chance,
        num_steps=arguments.steps,
        processes=arguments.processes,
        gin_file=arguments.gin_config_file,
        bindings=tuple(arguments.gin_binding),
    )
    begin = time.monotonic()
    rows = {name: run(soak, name, tries) for name, tries in wanted.items()}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    text = report(
        rows,
        command=shlex.join(["python", *sys.argv]),
        commit=commit,
        machine=f"{arguments.processes} ranks on {device_name()}",
    )
    print(f"{text}\n{time.monotonic() - begin:.0f} s")
    if arguments.report:
        arguments.report.write_text(text)
    if any(row.failures for row in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
