#!/usr/bin/env python
"""Does FP8 training end where BF16 training ends? Several runs at a time, on one GPU.

    python scripts/compare_precision.py --jobs 6                # everything that is not done yet
    python scripts/compare_precision.py --only planted.1000     # cells whose name contains this
    python scripts/compare_precision.py --report-only

A cell is a model with its data, a number of steps, a precision and a seed; cells of one seed share
initial weights and the order of data. Each must show, from its own module table, that every uvqk
and proj runs in FP8. Results lie in runs/compare_precision and are kept: started again, only what
is missing, or was run with other settings, runs. Then benchmarks/compare_precision.md and .svg are
written from all results there are. Exit status 1: a cell failed, a run is not finite, or a
comparison does not hold; one that lacks results does not, also where --only left them out.

Needs datasets/ml-100k (data/preprocess.py --dataset ml-100k).
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import precision_report as report  # noqa: E402
from benchmarks.precision_cells import Cell, all_cells, read_results, run_cell  # noqa: E402

_RULES = """\
Test fold; quality is AUC or NDCG@10. Cells of one seed share initial weights and the order of data.
Every uvqk and proj runs in FP8 (`auto_filter_small = False`), which each run showed from its module
table. A comparison holds if each seed asked for was run in this precision and in BF16, all runs are
finite, the mean loss is within 1% of BF16's and, with several seeds, the mean paired difference is
at least -max(0.002, 2 s / sqrt(n)), s the standard deviation of the differences over n seeds."""


def main() -> None:
    """Runs what is missing and reports on all."""
    arguments = _arguments()
    results_folder = arguments.results.resolve()
    results_folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)  # gin files name their data from here
    cells = all_cells(
        num_seeds=arguments.seeds,
        num_steps=arguments.steps,
        num_steps_once=min(arguments.steps, 300),
        backend=arguments.backend,
    )
    done = read_results(results_folder, cells)
    chosen = [cell for cell in cells if _is_chosen(cell, arguments.only)]
    missing = [] if arguments.report_only else [cell for cell in chosen if cell not in done]
    print(f"{len(cells)} cells, {len(chosen)} chosen, {len(missing)} to run", flush=True)
    failed = _run(
        missing, results_folder, num_jobs=arguments.jobs, limit_seconds=arguments.limit_seconds
    )
    results = read_results(results_folder, cells)
    all_hold = _write_report(results, arguments.report, cells=cells)
    not_finite = report.failures(results)
    for line in not_finite:
        print(f"not finite: {line}")
    if failed or not_finite or not all_hold:
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--only", nargs="+", default=[], help="parts of cell names, one must fit")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="of the cells with several seeds")
    parser.add_argument("--backend", help="of all FP8 linears; emulated runs on a CPU")
    parser.add_argument("--limit-seconds", type=float, default=3600.0, help="ends unfinished runs")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "compare_precision")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks", help="folder")
    parser.add_argument("--report-only", action="store_true")
    return parser.parse_args()


def _is_chosen(cell: Cell, only: list[str]) -> bool:
    return not only or any(part in cell.name for part in only)


def _run(
    cells: list[Cell], folder: Path, *, num_jobs: int, limit_seconds: float
) -> dict[Cell, str]:
    """Runs cells in processes of their own; returns those that left no result, and why."""
    begin = time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    waiting, running, failed = list(cells), {}, {}
    while waiting or running:
        left = limit_seconds - (time.monotonic() - begin)
        while waiting and len(running) < num_jobs and left > 0:
            cell = waiting.pop(0)
            process = context.Process(target=_in_child, args=(cell, folder), name=cell.name)
            process.start()
            running[process.sentinel] = (cell, process, time.monotonic())
        for sentinel in connection.wait(list(running), timeout=max(left, 0.0)):
            cell, process, started = running.pop(sentinel)
            seconds = time.monotonic() - started
            failed |= _outcome(cell, process, folder, seconds=seconds)
        if time.monotonic() - begin >= limit_seconds:
            for cell, process, _ in running.values():
                process.terminate()
                process.join(10)
                failed[cell] = "not finished in time"
            failed |= dict.fromkeys(waiting, "not started in time")
            break
    for cell, reason in failed.items():
        print(f"no result: {cell.name}: {reason}")
    return failed


def _outcome(cell: Cell, process: SpawnProcess, folder: Path, *, seconds: float) -> dict[Cell, str]:
    process.join()
    result = read_results(folder, [cell]).get(cell)
    if process.exitcode or result is None:
        log = _log(cell, folder)
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return {cell: f"exit status {process.exitcode}; {lines[-1] if lines else ''} ({log})"}
    shown = "  ".join(
        f"{name} {result['test'][name]:.4f}"
        for name in ("loss", "auc", "ndcg@10")
        if name in result["test"]
    )
    print(f"{cell.name}: {shown or result['failure']}  {seconds:.0f} s", flush=True)
    return {}


def _log(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.log"


def _in_child(cell: Cell, folder: Path) -> None:
    with _log(cell, folder).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        run_cell(cell, folder)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _write_report(results: report.Results, folder: Path, *, cells: list[Cell]) -> bool:
    if not results:
        print("no results: nothing is written, no comparison holds")
        return False
    text, all_hold = report.table(results, cells)
    devices = sorted({result["device"] for result in results.values()})
    head = [
        "# FP8 linears against BF16: where training ends",
        "",
        f"`python scripts/compare_precision.py`, commits {', '.join(report.commits(results))}, "
        f"on {'; '.join(devices)}: {len(results)} of {len(cells)} cells.",
        "",
        _RULES,
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare_precision.md").write_text(
        "\n".join([*head, text, "![Training loss](compare_precision.svg)", ""]), encoding="utf-8"
    )
    (folder / "compare_precision.svg").write_text(report.plot(results), encoding="utf-8")
    print(text)
    print(f"written: {folder}/compare_precision.md, .svg; all hold: {'yes' if all_hold else 'NO'}")
    return all_hold


if __name__ == "__main__":
    main()
