"""The table and the plot of scripts/compare_precision.py, out of the results of its cells."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
    """Results by setting and number of steps, in the order of the cells, but those to be timed."""
    found: dict[tuple[str, int], dict[Cell, Mapping[str, Any]]] = {}
    for cell, result in results.items():
        if not cell.is_alone:
            found.setdefault((cell.setting, cell.num_steps), {})[cell] = result
    return found


def step_seconds(results: Results) -> dict[tuple[str, str], float]:
    """(setting, precision) -> median wall time of a step of the run that was alone."""
    return {
        (cell.setting, cell.precision): result["step_seconds"]
        for cell, result in results.items()
        if cell.is_alone and math.isfinite(result["step_seconds"])
    }


def times(results: Results) -> list[str]:
    """Markdown: what a step takes where nothing else runs; no lines without such runs."""
    seconds = step_seconds(results)
    if not seconds:
        return []
    lines = [
        "### Wall time of a step, alone on the device",
        "",
        "| setting | precision | median ms | BF16's time over it |",
        "|---|---|---|---|",
    ]
    for (setting, precision), one in seconds.items():
        plain = seconds.get((setting, BASELINE))
        ratio = "-" if plain is None or precision == BASELINE else f"{plain / one:.2f}"
        lines.append(f"| {setting} | {precision} | {1e3 * one:.2f} | {ratio} |")
    return [*lines, ""]


def precisions(results: Results) -> list[str]:
    """Precisions of some results, each once."""
    return list(dict.fromkeys(cell.precision for cell in results))


def table(results: Results, cells: Iterable[Cell], *, of: str = "linears") -> tuple[str, bool]:
    """Markdown, and whether every comparison holds; one that lacks results does not.

    Args:
        results: of any of the cells.
        cells: all that the comparison is of.
        of: what a precision is of, the name of the first column.
    """
    asked: dict[tuple[str, int], dict[str, int]] = {}
    for cell in cells:
        if cell.is_alone:
            continue
        seeds = asked.setdefault((cell.setting, cell.num_steps), {})
        seeds[cell.precision] = seeds.get(cell.precision, 0) + 1
    groups_there = groups(results)
    lines, all_hold = [], True
    for (setting, num_steps), precisions_asked in asked.items():
        group = groups_there.get((setting, num_steps), {})
        lines += [
            f"### {setting}, {num_steps} steps",
            "",
            f"| {of} | seeds | finite | held-out loss | against BF16 | quality "
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


_WIDTH, _HEIGHT, _GAP = 400, 260, 60


@dataclass(frozen=True, kw_only=True)
class _Curve:
    label: str
    x: Sequence[float]
    y: Sequence[float]


def plot(results: Results) -> str:
    """SVG: a row for each setting, mean over seeds of every precision.

    Training loss by step and, where there are figures for them, quality on the validation fold by
    step, and both by wall time: steps times what a step takes alone on the device. Without such
    figures two settings share a row.
    """
    rows, seconds = [], step_seconds(results)
    for (setting, num_steps), group in groups(results).items():
        losses, looks = _curves(group, _training), _curves(group, _validation)
        title = f"{setting}, {num_steps} steps"
        panels = [
            (f"{title}: training loss", losses),
            (f"{title}: validation {_looked_at(group)}", looks),
            (f"{setting}: loss by seconds", _by_time(losses, seconds, setting)),
            (f"{setting}: {_looked_at(group)} by seconds", _by_time(looks, seconds, setting)),
        ]
        rows.append([(name, curves) for name, curves in panels if curves])
    if all(len(panels) <= 1 for panels in rows):
        panels = list(chain.from_iterable(rows))
        rows = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    parts = [
        _panel(name, curves, _GAP + column * (_WIDTH + _GAP), 30 + row * (_HEIGHT + _GAP))
        for row, panels in enumerate(rows)
        for column, (name, curves) in enumerate(panels)
    ]
    width = max((len(panels) for panels in rows), default=0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * (_WIDTH + _GAP) + _GAP}" '
        f'height="{len(rows) * (_HEIGHT + _GAP) + 30}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _training(result: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    return result["steps"], result["losses"]


def _validation(result: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    looks = result.get("looks", ())
    name = _quality_of(looks)
    return [look["step"] for look in looks], [look[name] for look in looks] if name else []


def _quality_of(looks: Sequence[Mapping[str, float]]) -> str | None:
    return next((name for name in _QUALITY if looks and name in looks[0]), None)


def _looked_at(group: Results) -> str:
    names = (_quality_of(result.get("looks", ())) for result in group.values())
    return next((name for name in names if name), "quality")


def _curves(
    group: Results, figures: Callable[[Mapping[str, Any]], tuple[Sequence[float], Sequence[float]]]
) -> list[_Curve]:
    """A precision's figures by step, mean over its finite runs."""
    found = []
    for precision in precisions(group):
        runs = [result for cell, result in group.items() if cell.precision == precision]
        curves = [figures(result) for result in runs if result["is_finite"]]
        if curves and len(curves[0][1]) > 1:  # a single point is no curve
            means = [statistics.fmean(point) for point in zip(*(y for _, y in curves), strict=True)]
            found.append(_Curve(label=precision, x=curves[0][0], y=means))
    return found


def _by_time(
    curves: Sequence[_Curve], seconds: Mapping[tuple[str, str], float], setting: str
) -> list[_Curve]:
    return [
        _Curve(
            label=curve.label,
            x=[step * seconds[setting, curve.label] for step in curve.x],
            y=curve.y,
        )
        for curve in curves
        if (setting, curve.label) in seconds
    ]


def _panel(title: str, curves: Sequence[_Curve], left: int, top: int) -> str:
    low, high = min(min(curve.y) for curve in curves), max(max(curve.y) for curve in curves)
    last = max(curve.x[-1] for curve in curves)
    span, right = max(high - low, 1e-9), left + _WIDTH
    parts = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#999"/>',
        f'<text x="{left - 4}" y="{top + 10}" text-anchor="end">{high:.3f}</text>',
        f'<text x="{left - 4}" y="{top + _HEIGHT}" text-anchor="end">{low:.3f}</text>',
        f'<text x="{right}" y="{top + _HEIGHT + 14}" text-anchor="end">{last:.4g}</text>',
    ]
    is_falling = curves[0].y[-1] < curves[0].y[0]  # the names go where no curve is
    for index, curve in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(
            f"{left + _WIDTH * x / last:.1f},{top + _HEIGHT * (high - y) / span:.1f}"
            for x, y in zip(curve.x, curve.y, strict=True)
        )
        y = top + 16 + 14 * index + (0 if is_falling else _HEIGHT - 14 * len(curves) - 10)
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>',
            f'<text x="{right - 8}" y="{y}" text-anchor="end" fill="{colour}">{curve.label}</text>',
        ]
    return "".join(parts)


def failures(results: Results) -> Sequence[str]:
    """What ended runs that were not finite."""
    return [
        f"{cell.name}: {result['failure'] or 'a loss is not finite'}"
        for cell, result in results.items()
        if not result["is_finite"]
    ]
