#!/usr/bin/env python
"""Does FP8 training end where BF16 training ends? Several runs at a time, on one GPU.

    python scripts/compare_precision.py --jobs 6                      # everything not done yet
    python scripts/compare_precision.py --study attention --jobs 14   # linears and attention
    python scripts/compare_precision.py --only planted.1000           # by part of a cell's name
    python scripts/compare_precision.py --report-only

A cell is a model with its data, a number of steps, a precision and a seed; cells of one seed share
initial weights and the order of data. Each must show, from its own module table, that every uvqk
and proj and the attention of every layer run in the precision asked for. Results lie in
runs/compare_precision and are kept: started again, only what is missing, or was run with other
settings, runs, in the order of the cells' weight. Then benchmarks/compare_precision.md and .svg
(compare_fp8_attention.md and .svg) are written from all results there are. Exit status 1: a
cell failed, a run is not finite, or a comparison does not hold; one that lacks results does not,
also where --only left them out.

Needs datasets/ml-100k (data/preprocess.py --dataset ml-100k).
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import precision_report as report  # noqa: E402
from benchmarks.precision_cells import (  # noqa: E402
    Cell,
    all_cells,
    attention_cells,
    read_results,
)
from benchmarks.precision_pool import log_of, run_cells  # noqa: E402

_STUDIES = {
    "linears": ("compare_precision", "FP8 linears against BF16: where training ends"),
    "attention": (
        "compare_fp8_attention",
        "FP8 attention, with and without FP8 linears, against BF16: where training ends",
    ),
}
_RULES = {
    "linears": """\
Test fold; quality is AUC or NDCG@10. Cells of one seed share initial weights and the order of data.
Every uvqk and proj runs in FP8 (`auto_filter_small = False`), which each run showed from its module
table. A comparison holds if each seed asked for was run in this precision and in BF16, all runs are
finite, the mean loss is within 1% of BF16's and, with several seeds, the mean paired difference is
at least -max(0.002, 2 s / sqrt(n)), s the standard deviation of the differences over n seeds.""",
    "attention": """\
Test fold; quality is AUC or NDCG@10. Cells of one seed share initial weights and the order of data.
A name is that of the linears, "+" that of FP8 attention. Every uvqk and proj (`auto_filter_small =
False`) and all attention (`auto_filter_attention = False`) run in it, which each run showed from
its module table. A comparison holds if each seed asked for was run in this precision and in BF16,
all runs are finite, the mean loss is within 1% of BF16's and, with several seeds, the mean paired
difference is at least -max(0.002, 2 s / sqrt(n)), s the standard deviation of the differences over
n seeds. Seconds in the plots are steps times the time of a step alone on the device.""",
}


def main() -> None:
    """Runs what is missing and reports on all."""
    arguments = _arguments()
    results_folder = arguments.results.resolve()
    results_folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)  # gin files name their data from here
    cells = _cells(arguments)
    done = read_results(results_folder, cells)
    chosen = [cell for cell in cells if _is_chosen(cell, arguments.only)]
    missing = [] if arguments.report_only else [cell for cell in chosen if cell not in done]
    print(f"{len(cells)} cells, {len(chosen)} chosen, {len(missing)} to run", flush=True)
    failed = _run(
        missing, results_folder, num_jobs=arguments.jobs, limit_seconds=arguments.limit_seconds
    )
    results = read_results(results_folder, cells)
    all_hold = _write_report(results, arguments.report, cells=cells, study=arguments.study)
    not_finite = report.failures(results)
    for line in not_finite:
        print(f"not finite: {line}")
    if failed or not_finite or not all_hold:
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--study", choices=_STUDIES, default="linears")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--only", nargs="+", default=[], help="parts of cell names, one must fit")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of the cells with several seeds")
    parser.add_argument("--steps-long", type=int, default=10_000, help="of attention's longest run")
    parser.add_argument("--backend", help="of all FP8 linears; emulated, attention too, on a CPU")
    parser.add_argument("--limit-seconds", type=float, default=3600.0, help="ends unfinished runs")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "compare_precision")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks", help="folder")
    parser.add_argument("--report-only", action="store_true")
    return parser.parse_args()


def _cells(arguments: argparse.Namespace) -> list[Cell]:
    if arguments.study == "attention":
        return attention_cells(
            num_seeds=arguments.seeds,
            num_steps=arguments.steps or 2000,
            num_steps_long=arguments.steps_long,
            backend=arguments.backend,
        )
    num_steps = arguments.steps or 1000
    return all_cells(
        num_seeds=arguments.seeds,
        num_steps=num_steps,
        num_steps_once=min(num_steps, 300),
        backend=arguments.backend,
    )


def _is_chosen(cell: Cell, only: list[str]) -> bool:
    return not only or any(part in cell.name for part in only)


def _run(
    cells: list[Cell], folder: Path, *, num_jobs: int, limit_seconds: float
) -> dict[Cell, str]:
    """Runs cells in processes of their own; returns those that left no result, and why."""
    deadline, failed = time.monotonic() + limit_seconds, {}
    for cell, failure, seconds in run_cells(cells, folder, num_jobs=num_jobs, deadline=deadline):
        result = read_results(folder, [cell]).get(cell)
        if failure or result is None:
            failed[cell] = f"{failure or 'nothing was written'} ({log_of(cell, folder)})"
            print(f"no result: {cell.name}: {failed[cell]}", flush=True)
            continue
        shown = "  ".join(
            f"{name} {result['test'][name]:.4f}"
            for name in ("loss", "auc", "ndcg@10")
            if name in result["test"]
        )
        print(f"{cell.name}: {shown or result['failure']}  {seconds:.0f} s", flush=True)
    return failed


def _write_report(results: report.Results, folder: Path, *, cells: list[Cell], study: str) -> bool:
    if not results:
        print("no results: nothing is written, no comparison holds")
        return False
    of = "linears" if study == "linears" else "precision"
    text, all_hold = report.table(results, cells, of=of)
    devices = sorted({result["device"] for result in results.values()})
    file_name, title = _STUDIES[study]
    asked = "" if study == "linears" else f" --study {study}"
    head = [
        f"# {title}",
        "",
        f"`python scripts/compare_precision.py{asked}`, commits "
        f"{', '.join(report.commits(results))}, "
        f"on {'; '.join(devices)}: {len(results)} of {len(cells)} cells.",
        "",
        _RULES[study],
        "",
    ]
    times = report.times(results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{file_name}.md").write_text(
        "\n".join([*head, text, *times, f"![Curves]({file_name}.svg)", ""]), encoding="utf-8"
    )
    (folder / f"{file_name}.svg").write_text(report.plot(results), encoding="utf-8")
    print(text)
    print(f"written: {folder}/{file_name}.md, .svg; all hold: {'yes' if all_hold else 'NO'}")
    return all_hold


if __name__ == "__main__":
    main()
