"""The comparison of precisions: its cells, its rules by hand, and one small run of the command."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import precision_runs
from benchmarks.precision_cells import (
    BASELINE,
    Cell,
    all_cells,
    attention_cells,
    read_results,
    settings_key,
)
from benchmarks.precision_report import commits, compare, failures, plot, table, times
from benchmarks.precision_runs import check_attention, check_linears, module_table, run_cell
from configs.precision_schema import RECIPES_OF_BACKEND
from configs.schema import ExperimentArgs
from scripts import compare_precision
from tests.support.commands import run_command


def cell(precision: str, seed: int = 1, setting: str = "ml-100k") -> Cell:
    return Cell(setting=setting, num_steps=1000, precision=precision, seed=seed)


def result(loss: float, auc: float, **changes: Any) -> dict[str, Any]:
    plain = {
        "is_finite": True,
        "failure": "",
        "test": {"loss": loss, "auc": auc},
        "steps": [500, 1000],
        "losses": [1.0, loss],
    }
    return plain | changes


def test_cells_are_those_of_the_comparison() -> None:
    cells = all_cells()
    assert len(set(cells)) == len(cells)
    for setting in ("ml-100k", "planted"):
        for precision in (BASELINE, "te-tensorwise", "native-tensorwise", "native-delayed"):
            seeds = [c.seed for c in cells if c == cell(precision, c.seed, setting)]
            assert seeds == [1, 2, 3, 4, 5]
    once = [c for c in cells if c.num_steps == 300]
    assert {c.seed for c in once} == {1}
    for setting in {c.setting for c in once}:
        assert BASELINE in {c.precision for c in once if c.setting == setting}
    tried = {tuple(c.precision.split("-")[:2]) for c in cells} - {(BASELINE,)}
    hopper = {(b, r) for b in ("te", "native") for r in RECIPES_OF_BACKEND[b] if r != "mxfp8"}
    assert tried == hopper


@pytest.mark.parametrize("setting", ["ml-100k", "planted", "narrow", "retrieval"])
def test_a_cell_is_its_baseline_but_for_the_linears(setting: str) -> None:
    plain = cell(BASELINE, 3, setting).experiment("folder")
    fp8 = cell("native-delayed-e4m3", 3, setting).experiment("folder")
    assert fp8.precision.has_fp8_linears and not fp8.precision.auto_filter_small
    assert fp8.precision.linear_scaling_precision == "e4m3"
    assert (fp8.trainer, fp8.dataset, fp8.network) == (plain.trainer, plain.dataset, plain.network)
    assert plain.network.dtype_str == "bfloat16"
    assert plain.trainer.seed == 3 and plain.trainer.max_train_iters == 1000


def test_one_setting_is_the_users_shape() -> None:
    network = cell(BASELINE, setting="narrow").experiment("folder").network
    assert (network.hidden_size, network.kv_channels, network.num_layers) == (128, 128, 1)


def test_another_backend_runs_each_recipe_once() -> None:
    cells = all_cells(num_seeds=2, num_steps=4, num_steps_once=4, backend="emulated")
    assert {c.precision.split("-")[0] for c in cells} == {BASELINE, "emulated"}
    assert len(set(cells)) == len(cells)
    assert cells[-1].experiment("folder").precision.linear_backend == "emulated"


def test_a_linear_that_is_not_in_fp8_fails_the_cell() -> None:
    row = {"precision": "FP8", "engine": "native-delayed"}
    names = ["stack.layers.0.input.uvqk", "stack.layers.0.output.proj"]
    rows = [row | {"module": name} for name in names]
    check_linears(cell("native-delayed-e4m3"), rows, num_layers=1)
    for wrong in ({"precision": "BF16"}, {"engine": "none"}, {"engine": "native-tensorwise"}):
        with pytest.raises(RuntimeError, match=r"stack.layers.0.output.proj must run in FP8"):
            check_linears(cell("native-delayed"), [rows[0], rows[1] | wrong], num_layers=1)
    with pytest.raises(RuntimeError, match=r"stack.layers.1.input.uvqk"):
        check_linears(cell("native-delayed"), rows, num_layers=2)
    with pytest.raises(RuntimeError, match=r"must run in BF16 by none"):
        check_linears(cell(BASELINE), rows, num_layers=1)


def pairs(losses: list[float], aucs: list[float]) -> dict[Cell, dict[str, Any]]:
    """BF16 at loss 1 and AUC 0.7 beside the figures given, a seed each."""
    found = {}
    for seed, (loss, auc) in enumerate(zip(losses, aucs, strict=True), 1):
        found[cell(BASELINE, seed)] = result(1.0, 0.7)
        found[cell("native-delayed", seed)] = result(loss, auc)
    return found


@pytest.mark.parametrize(
    ("losses", "aucs", "least", "holds"),
    [
        ([1.0, 1.0], [0.7, 0.7], -0.002, True),
        ([1.018, 1.0], [0.7, 0.7], -0.002, True),
        ([1.022, 1.0], [0.7, 0.7], -0.002, False),
        ([0.97, 1.0], [0.7, 0.7], -0.002, False),
        ([1.0, 1.0], [0.6981, 0.6981], -0.002, True),
        ([1.0, 1.0], [0.6979, 0.6979], -0.002, False),
        # differences -0.01, 0: s = 0.01 / sqrt(2), 2 s / sqrt(2) = 0.01
        ([1.0, 1.0], [0.69, 0.7], -0.01, True),
        ([1.0], [0.6], None, True),
    ],
)
def test_rules_by_hand(
    losses: list[float], aucs: list[float], least: float | None, holds: bool
) -> None:
    found = compare(pairs(losses, aucs), "native-delayed", num_asked=len(losses))
    assert found is not None
    assert found.num_seeds == len(losses)
    assert found.loss_change == pytest.approx(sum(losses) / len(losses) - 1)
    assert found.quality_difference == pytest.approx(sum(aucs) / len(aucs) - 0.7)
    assert found.least_difference == (None if least is None else pytest.approx(least))
    assert found.holds == holds


def test_a_run_that_is_not_finite_does_not_hold() -> None:
    found = pairs([1.0, 1.0], [0.7, 0.7])
    bad = {"is_finite": False, "failure": "step 7 is not finite", "test": {}}
    found[cell("native-delayed", 2)] = result(1.0, 0.7, **bad)
    compared = compare(found, "native-delayed", num_asked=2)
    assert compared is not None and not compared.holds
    text, all_hold = table(found, list(found))
    assert not all_hold and "**no**" in text
    assert failures(found) == ["ml-100k.1000.native-delayed.2: step 7 is not finite"]
    assert math.isnan(compared.loss)


def test_seeds_without_a_pair_do_not_count() -> None:
    found = pairs([1.0, 5.0], [0.7, 0.1])
    del found[cell(BASELINE, 2)]
    compared = compare(found, "native-delayed", num_asked=1)
    assert compared is not None and compared.num_seeds == 1 and compared.loss == 1.0
    assert compare(found, "te-delayed", num_asked=1) is None


@pytest.mark.parametrize(
    ("missing", "row"),
    [
        ([], "| native-delayed | 2 | yes |"),
        ([("native-delayed", 2)], "| native-delayed | 1 of 2 | yes |"),
        ([(BASELINE, 2)], "| bf16 | 1 of 2 | yes |"),
        ([(BASELINE, 1), (BASELINE, 2)], "| native-delayed | 0 of 2 | - |"),
        ([("native-delayed", 1), ("native-delayed", 2)], "| native-delayed | 0 of 2 | - |"),
    ],
    ids=str,
)
def test_what_lacks_results_does_not_hold(missing: list[tuple[str, int]], row: str) -> None:
    found = pairs([1.0, 1.0], [0.7, 0.7])
    cells = list(found)
    for precision, seed in missing:
        del found[cell(precision, seed)]
    text, all_hold = table(found, cells)
    assert all_hold == (not missing)
    assert ("**no**" in text) == bool(missing)
    (line,) = [line for line in text.splitlines() if line.startswith(row)]
    assert line.endswith("| **no** |" if missing else "| yes |")


def test_a_setting_without_any_result_does_not_hold() -> None:
    found = pairs([1.0, 1.0], [0.7, 0.7])
    text, all_hold = table(found, [*found, cell(BASELINE, setting="planted")])
    assert not all_hold and "### planted, 1000 steps" in text


def test_results_say_their_commit() -> None:
    found = pairs([1.0, 1.0], [0.7, 0.7])
    assert commits(found) == ["unknown"]
    found[cell(BASELINE, 1)]["commit"] = found[cell(BASELINE, 2)]["commit"] = "abc1234-dirty"
    assert commits(found) == ["abc1234-dirty", "unknown"]


class TrainerOfNothing:
    """Stands in for a Trainer; another commit is checked out while it trains."""

    def __init__(self, experiment: ExperimentArgs, *, world: Any) -> None:
        self.folder = Path(experiment.trainer.output_dir)
        self.model = SimpleNamespace(module=SimpleNamespace(trunk=None))

    def fit(self) -> dict[str, float]:
        (self.folder / "metrics.jsonl").write_text("")
        precision_runs.commit = lambda: "later"
        return {"loss": 0.5}


def test_a_run_stores_the_commit_it_began_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr("training.telemetry.set_up_logging", lambda *, is_main: None)
    monkeypatch.setattr("training.trainer.Trainer", TrainerOfNothing)
    monkeypatch.setattr(precision_runs, "module_table", lambda experiment, trunk: [])
    monkeypatch.setattr(precision_runs, "check_linears", lambda *args, num_layers: None)
    monkeypatch.setattr(precision_runs, "check_attention", lambda *args, num_layers: None)
    monkeypatch.setattr(precision_runs, "commit", lambda: "abc1234")
    one = Cell(setting="planted", num_steps=2, precision=BASELINE, seed=1)
    run_cell(one, tmp_path, world=world)
    assert read_results(tmp_path, [one])[one]["commit"] == "abc1234"


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(precision_runs, "_ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert precision_runs.commit() == "unknown"
    (tmp_path / "file").write_text("1")
    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    git("tag", "-a", "v1", "-m", "a tag is not what is asked for")
    clean = precision_runs.commit()
    assert re.fullmatch("[0-9a-f]{7,40}", clean)
    (tmp_path / "file").write_text("2")
    assert precision_runs.commit() == f"{clean}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert precision_runs.commit() == "unknown"


def test_the_plot_is_a_picture_of_all_curves() -> None:
    found = pairs([1.0, 1.0], [0.7, 0.7]) | {
        cell(BASELINE, setting="planted"): result(0.5, 0.8),
        cell("te-delayed", setting="planted"): result(math.nan, 0.8, is_finite=False),
    }
    root = ElementTree.fromstring(plot(found))
    assert len(root.findall(".//{*}polyline")) == 3
    assert "nan" not in plot(found)


def test_the_command_runs_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    command = [
        sys.executable, "scripts/compare_precision.py", "--backend", "emulated", "--steps", "2",
        "--seeds", "1", "--jobs", "2", "--only", "planted.2.bf16", "--results", str(folder),
        "--report", str(tmp_path), "--limit-seconds", "1",
    ]  # fmt: skip
    started = run_command(command, timeout_seconds=60)
    assert started.returncode == 1
    assert "not finished in time" in started.stdout
    (folder / "planted.2.bf16.1.json").write_text(json.dumps(stored(2)))
    again = run_command(command, timeout_seconds=60)
    assert "1 chosen, 0 to run" in again.stdout
    assert "| bf16 | 1 | yes | 0.5000 |" in (tmp_path / "compare_precision.md").read_text()
    assert (tmp_path / "compare_precision.svg").read_text().startswith("<svg")


def test_the_exit_status_tells_whether_all_hold(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    command = [
        sys.executable, "scripts/compare_precision.py", "--backend", "emulated", "--steps", "2",
        "--seeds", "2", "--results", str(folder), "--report", str(tmp_path), "--report-only",
    ]  # fmt: skip
    assert run_command(command).returncode == 1
    cells = all_cells(num_seeds=2, num_steps=2, num_steps_once=2, backend="emulated")
    for number, one in enumerate(cells):
        commit = {"commit": "abc1234"} if number else {}
        plain = result(0.5, 0.8, settings=settings_key(one), device="none", **commit)
        (folder / f"{one.name}.json").write_text(json.dumps(plain))
    complete = run_command(command)
    assert complete.returncode == 0, complete.stdout + complete.stderr
    head = (tmp_path / "compare_precision.md").read_text().splitlines()[2]
    assert "commits abc1234, unknown, on none" in head
    assert f"{len(cells)} of {len(cells)} cells" in head
    alone = next(one for one in cells if one.precision != BASELINE)
    path = folder / f"{alone.name}.json"
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | {"is_finite": False, "test": {}}))
    broken = run_command(command)
    assert broken.returncode == 1 and f"not finite: {alone.name}" in broken.stdout
    path.unlink()
    assert run_command(command).returncode == 1


def test_a_run_that_is_not_finite_fails_the_command_whatever_the_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Cell(setting="planted", num_steps=2, precision=BASELINE, seed=1)
    bad = result(0.5, 0.8, is_finite=False, device="none")
    monkeypatch.setattr(compare_precision, "read_results", lambda folder, cells: {one: bad})
    monkeypatch.setattr(compare_precision, "_write_report", lambda *args, **kwargs: True)
    monkeypatch.chdir(tmp_path)
    arguments = ["compare_precision", "--report-only", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="1"):
        compare_precision.main()


def stored(num_steps: int) -> dict[str, Any]:
    one = Cell(setting="planted", num_steps=num_steps, precision=BASELINE, seed=1)
    return result(0.5, 0.8, settings=settings_key(one), device="none")


def test_results_of_other_settings_do_not_count(tmp_path: Path) -> None:
    one = Cell(setting="planted", num_steps=2, precision=BASELINE, seed=1)
    path = tmp_path / f"{one.name}.json"
    path.write_text(json.dumps(stored(2)))
    assert list(read_results(tmp_path, [one])) == [one]
    path.write_text(json.dumps(stored(3)))
    assert read_results(tmp_path, [one]) == {}


BOTH = "native-delayed+per_block"


def test_attention_cells_are_the_four_combinations() -> None:
    cells = attention_cells()
    assert len(set(cells)) == len(cells)
    kept = [c for c in cells if not c.is_alone]
    for setting in ("long", "movielens", "seed-user"):
        for precision in (BASELINE, BOTH, "bf16+per_block", "native-delayed"):
            at = [c for c in kept if (c.setting, c.num_steps) == (setting, 2000)]
            assert [c.seed for c in at if c.precision == precision] == [1, 2, 3, 4, 5]
        assert [c.seed for c in at if c.precision == "te-delayed+per_block"] == [1]
    assert len([c for c in kept if c.setting == "next-item"]) == 4
    assert [c.precision for c in cells if c.num_steps == 10_000] == [BOTH, BASELINE]
    seeds = [c.seed for c in kept]
    assert seeds == sorted(seeds) and cells[0].num_steps == 10_000


@pytest.mark.parametrize("setting", ["long", "movielens", "seed-user", "next-item"])
def test_an_attention_cell_is_its_baseline_but_for_what_runs_in_fp8(setting: str) -> None:
    def experiment(precision: str, **fields: Any) -> ExperimentArgs:
        one = Cell(setting=setting, num_steps=2000, precision=precision, seed=2, **fields)
        return one.experiment("folder")

    plain = experiment(BASELINE)
    assert plain.network.dtype_str == "bfloat16" and plain.network.kv_channels in (64, 128, 256)
    assert not plain.network.use_relative_position_bias and not plain.network.use_time_bias
    for precision in (BOTH, "bf16+per_block", "te-delayed+per_block"):
        fp8 = experiment(precision)
        assert fp8.precision.has_fp8_attention
        assert fp8.precision.has_fp8_linears == (not precision.startswith("bf16"))
        assert not fp8.precision.auto_filter_attention
        assert not (fp8.precision.has_fp8_linears and fp8.precision.auto_filter_small)
        assert fp8.network.kernel_backend == "triton"
        network = dataclasses.replace(fp8.network, kernel_backend=plain.network.kernel_backend)
        assert (fp8.trainer, fp8.dataset, network) == (plain.trainer, plain.dataset, plain.network)
    looks = experiment(BASELINE).trainer.eval_interval
    assert setting == "next-item" or looks == 200
    assert experiment(BASELINE, is_alone=True).trainer.eval_interval > 10**6


def test_the_long_users_reach_4096_tokens() -> None:
    assert 4000 < cell(BASELINE, setting="long").experiment("folder").max_seq_len <= 4096


def test_emulation_is_named_and_checked_as_such() -> None:
    (one,) = [
        c
        for c in attention_cells(num_seeds=1, backend="emulated")
        if (c.setting, c.linears, c.attention) == ("movielens", "emulated-delayed", "per_block")
        and not c.is_alone
    ]
    assert one.precision == "emulated-delayed+emulated-per_block"
    assert one.attention_backend == "pytorch"
    assert one.experiment("folder").network.kernel_backend == "pytorch"


def test_attention_that_is_not_in_fp8_fails_the_cell() -> None:
    row = {"module": "stack.layers.0.attention", "precision": "per_block", "engine": "triton"}
    check_attention(cell(BOTH), [row], num_layers=1)
    for wrong in ({"precision": "none"}, {"precision": "cast"}, {"engine": "pytorch"}):
        with pytest.raises(
            RuntimeError, match=r"0.attention must run in FP8 mode per_block by tri"
        ):
            check_attention(cell(BOTH), [row | wrong], num_layers=1)
    with pytest.raises(RuntimeError, match=r"layers.1.attention"):
        check_attention(cell(BOTH), [row], num_layers=2)
    with pytest.raises(RuntimeError, match=r"mode none by any backend"):
        check_attention(cell("native-delayed"), [row], num_layers=1)
    check_attention(cell("native-delayed"), [row | {"precision": "none"}], num_layers=1)


def test_the_module_table_tells_what_the_attention_of_a_layer_is() -> None:
    experiment = cell(BASELINE, setting="seed-user").experiment("folder")
    config = SimpleNamespace(
        num_heads=4,
        attention_dim=128,
        attention_fp8=SimpleNamespace(mode="per_block"),
        attention_backend="triton",
    )
    layer = SimpleNamespace(attention=SimpleNamespace(config=config))
    trunk = SimpleNamespace(modules=list, stack=SimpleNamespace(layers=[layer]))
    assert module_table(experiment, trunk)[-1] == {
        "module": "stack.layers.0.attention",
        "shape": "4 x 128",
        "precision": "per_block",
        "engine": "triton",
    }


def alone(precision: str, seconds: float) -> dict[Cell, dict[str, Any]]:
    one = dataclasses.replace(cell(precision), num_steps=150, is_alone=True)
    return {one: result(1.0, 0.7, step_seconds=seconds)}


def test_times_and_curves_by_seconds_are_of_the_runs_that_were_alone() -> None:
    looks = [{"step": 500, "auc": 0.6}, {"step": 1000, "auc": 0.7}]
    found = {
        cell(BASELINE): result(1.0, 0.7, looks=looks),
        cell(BOTH): result(1.0, 0.7, looks=looks),
    }
    assert times(found) == []
    assert len(ElementTree.fromstring(plot(found)).findall(".//{*}polyline")) == 4
    found |= alone(BASELINE, 0.010) | alone(BOTH, 0.008)
    assert f"| ml-100k | {BOTH} | 8.00 | 1.25 |" in times(found)
    assert len(ElementTree.fromstring(plot(found)).findall(".//{*}polyline")) == 8
    text, all_hold = table(found, list(found))
    assert all_hold and "150 steps" not in text
