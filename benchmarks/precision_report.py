"""The table and the plot of scripts/compare_precision.py, out of the results of its cells."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.precision_cells import BASELINE, UNKNOWN_COMMIT, Cell

Results = Mapping[Cell, Mapping[str, Any]]

_QUALITY = ("auc", "ndcg@10")
"""Figure that tells quality, the first that a result has."""
_LOSS_TOLERANCE = 0.01
_QUALITY_TOLERANCE = 0.002
_COLOURS = ("#333333", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One precision against BF16 on the same seeds."""

    precision: str
    num_seeds: int
    """Seeds that both have results of."""
    num_asked: int
    """Seeds that there should be."""
    is_finite: bool
    loss: float
    """Mean held-out loss."""
    loss_change: float
    """Relative to BF16's mean."""
    quality_name: str
    quality: float
    """Mean."""
    quality_difference: float
    """Mean over seeds of this precision's figure less BF16's."""
    least_difference: float | None
    """The difference may be this low; None with one seed, whose scatter is not known."""

    @property
    def holds(self) -> bool:
        """Whether all of the rules do."""
        quality_holds = (
            self.least_difference is None or self.quality_difference >= self.least_difference
        )
        loss_holds = self.is_finite and abs(self.loss_change) <= _LOSS_TOLERANCE
        return self.num_seeds >= self.num_asked and loss_holds and quality_holds


def compare(results: Results, precision: str, *, num_asked: int) -> Comparison | None:
    """A precision against BF16, over the seeds that both have results of; None without any.

    The mean paired difference has to be at least -max(0.002, 2 s / sqrt(n)), s the standard
    deviation of the differences.

    Args:
        results: of one setting and number of steps.
        num_asked: seeds that the comparison is of; with fewer it does not hold.
    """
    by_seed = {(cell.precision, cell.seed): result for cell, result in results.items()}
    seeds = sorted(
        seed for name, seed in by_seed if name == precision and (BASELINE, seed) in by_seed
    )
    if not seeds:
        return None
    own = [by_seed[precision, seed] for seed in seeds]
    other = [by_seed[BASELINE, seed] for seed in seeds]
    if not all(result["is_finite"] for result in [*own, *other]):
        return Comparison(
            precision=precision,
            num_seeds=len(seeds),
            num_asked=num_asked,
            is_finite=False,
            loss=math.nan,
            loss_change=math.nan,
            quality_name="",
            quality=math.nan,
            quality_difference=math.nan,
            least_difference=None,
        )
    quality_name = next(name for name in _QUALITY if name in own[0]["test"])
    differences = [
        mine["test"][quality_name] - its["test"][quality_name]
        for mine, its in zip(own, other, strict=True)
    ]
    least = None
    if len(seeds) > 1:
        error = 2 * statistics.stdev(differences) / len(seeds) ** 0.5
        least = -max(_QUALITY_TOLERANCE, error)
    loss = statistics.fmean(result["test"]["loss"] for result in own)
    return Comparison(
        precision=precision,
        num_seeds=len(seeds),
        num_asked=num_asked,
        is_finite=True,
        loss=loss,
        loss_change=loss / statistics.fmean(r["test"]["loss"] for r in other) - 1,
        quality_name=quality_name,
        quality=statistics.fmean(result["test"][quality_name] for result in own),
        quality_difference=statistics.fmean(differences),
        least_difference=least,
    )


def groups(results: Results) -> dict[tuple[str, int], dict[Cell, Mapping[str, Any]]]:
    """Results by setting and number of steps, in the order of the cells."""
    found: dict[tuple[str, int], dict[Cell, Mapping[str, Any]]] = {}
    for cell, result in results.items():
        found.setdefault((cell.setting, cell.num_steps), {})[cell] = result
    return found


def precisions(results: Results) -> list[str]:
    """Precisions of some results, each once."""
    return list(dict.fromkeys(cell.precision for cell in results))


def table(results: Results, cells: Iterable[Cell]) -> tuple[str, bool]:
    """Markdown, and whether every comparison holds; one that lacks results does not.

    Args:
        results: of any of the cells.
        cells: all that the comparison is of.
    """
    asked: dict[tuple[str, int], dict[str, int]] = {}
    for cell in cells:
        seeds = asked.setdefault((cell.setting, cell.num_steps), {})
        seeds[cell.precision] = seeds.get(cell.precision, 0) + 1
    groups_there = groups(results)
    lines, all_hold = [], True
    for (setting, num_steps), precisions_asked in asked.items():
        group = groups_there.get((setting, num_steps), {})
        lines += [
            f"### {setting}, {num_steps} steps",
            "",
            "| linears | seeds | finite | held-out loss | against BF16 | quality "
            "| paired difference | at least | holds |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for precision, num_asked in precisions_asked.items():
            row = compare(group, precision, num_asked=num_asked)
            all_hold &= row is not None and row.holds
            if row is None:
                lines.append(f"| {precision} | 0 of {num_asked} | - | - | - | - | - | - | **no** |")
            else:
                lines.append(_row(row))
        lines.append("")
    return "\n".join(lines), all_hold


def _row(row: Comparison) -> str:
    seeds, least, change, difference = str(row.num_seeds), "-", "-", "-"
    if row.num_seeds < row.num_asked:
        seeds = f"{row.num_seeds} of {row.num_asked}"
    verdict = "yes" if row.holds else "**no**"
    if row.precision != BASELINE:
        change = f"{100 * row.loss_change:+.2f}%"
        difference = f"{row.quality_difference:+.4f}"
        if row.least_difference is not None:
            least = f"{row.least_difference:+.4f}"
    elif row.holds:
        verdict = "-"
    return (
        f"| {row.precision} | {seeds} | {'yes' if row.is_finite else '**no**'} "
        f"| {row.loss:.4f} | {change} | {row.quality_name} {row.quality:.4f} "
        f"| {difference} | {least} | {verdict} |"
    )


def commits(results: Results) -> list[str]:
    """Commits that results were made at, each once; "unknown" for results that do not say."""
    return sorted({result.get("commit", UNKNOWN_COMMIT) for result in results.values()})


def plot(results: Results) -> str:
    """SVG: a panel for each setting, training loss by step, mean over seeds of every precision."""
    width, height, gap = 460, 300, 60
    panels = list(groups(results).items())
    parts = []
    for index, ((setting, num_steps), group) in enumerate(panels):
        left, top = gap + index % 2 * (width + gap), 30 + index // 2 * (height + gap)
        parts.append(_panel(f"{setting}, {num_steps} steps", group, left, top, width, height))
    rows = -(-len(panels) // 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (width + gap) + gap}" '
        f'height="{rows * (height + gap) + 30}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panel(title: str, group: Results, left: int, top: int, width: int, height: int) -> str:
    curves = {}
    for precision in precisions(group):
        runs = [result for cell, result in group.items() if cell.precision == precision]
        runs = [result for result in runs if result["is_finite"]]
        if runs:
            losses = zip(*(result["losses"] for result in runs), strict=True)
            curves[precision] = (runs[0]["steps"], [statistics.fmean(point) for point in losses])
    if not curves:
        return ""
    low = min(min(losses) for _, losses in curves.values())
    high = max(max(losses) for _, losses in curves.values())
    last = max(steps[-1] for steps, _ in curves.values())
    span = max(high - low, 1e-9)
    parts = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}: training loss</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
        f'<text x="{left - 4}" y="{top + 10}" text-anchor="end">{high:.3f}</text>',
        f'<text x="{left - 4}" y="{top + height}" text-anchor="end">{low:.3f}</text>',
        f'<text x="{left + width}" y="{top + height + 14}" text-anchor="end">{last}</text>',
    ]
    for index, (precision, (steps, losses)) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(
            f"{left + width * step / last:.1f},{top + height * (high - loss) / span:.1f}"
            for step, loss in zip(steps, losses, strict=True)
        )
        y = top + 16 + 14 * index
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>',
            f'<text x="{left + width - 8}" y="{y}" text-anchor="end" fill="{colour}">'
            f"{precision}</text>",
        ]
    return "".join(parts)


def failures(results: Results) -> Sequence[str]:
    """What ended runs that were not finite."""
    return [
        f"{cell.name}: {result['failure'] or 'a loss is not finite'}"
        for cell, result in results.items()
        if not result["is_finite"]
    ]
