"""The pieces that keep preprocessing inside a bounded amount of memory."""

from __future__ import annotations

import io

import numpy as np
import pytest

from data import events, progress, raw_lines
from data.arrow_files import write_events
from data.columns import ColumnFile
from data.events import EventBlock, EventSorter, concatenate
from data.preprocess import preprocess
from tests.data.conftest import write_ml_100k


def _block(users, times, *, first_item=0) -> EventBlock:
    count = len(users)
    return EventBlock(
        users_N=np.asarray(users, np.int64),
        items_N=np.arange(first_item, first_item + count, dtype=np.int64),
        labels_N=np.arange(count, dtype=np.int64).astype(np.int16),
        times_N=np.asarray(times, np.int64),
    )


def _sorted(blocks: list[EventBlock]) -> EventBlock:
    whole = concatenate(blocks)
    return whole.take(np.lexsort((whole.times_N, whole.users_N)))


def _check(sorter: EventSorter, blocks: list[EventBlock]) -> list[EventBlock]:
    for block in blocks:
        sorter.add(block)
    parts = list(sorter.parts())
    found, expected = concatenate(parts), _sorted(blocks)
    for name in ("users_N", "items_N", "labels_N", "times_N"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(blocks[0], name).dtype
    return parts


@pytest.mark.parametrize(
    ("run_rows", "part_rows"), [(1, 1), (7, 5), (100, 64), (10_000, 64), (100, 10_000)]
)
@pytest.mark.parametrize("ids", ["small", "wide"])
def test_runs_and_parts_of_any_size_give_one_order(run_rows, part_rows, ids, tmp_path):
    generator = np.random.default_rng(run_rows + part_rows)
    people = np.array([3, 4, 9, 10, 70_000]) if ids == "wide" else np.arange(12)
    blocks, item = [], 0
    for size in (1, 40, 0, 300, 77):
        users = generator.choice(people, size)
        blocks.append(_block(users, generator.integers(0, 6, size), first_item=item))
        item += size
    sorter = EventSorter(tmp_path, run_rows=run_rows, part_rows=part_rows)
    parts = _check(sorter, blocks)
    assert sorter.num_events == item == sum(map(len, parts))
    assert (sorter.num_items, sorter.max_item_id) == (item, item - 1)
    users_U, counts_U = sorter.user_counts()
    whole_U, whole_counts_U = np.unique(concatenate(blocks).users_N, return_counts=True)
    assert np.array_equal(users_U, whole_U)
    assert np.array_equal(counts_U, whole_counts_U)
    for part in parts:  # whole users, and no more than fit unless it is one user
        assert len(part) <= part_rows or len(np.unique(part.users_N)) == 1


def test_times_far_apart_do_not_overflow_the_sort_key(tmp_path):
    extreme = 1 << 62
    block = _block([5, 1, 5, 1, 9], [extreme, 3, -extreme, -extreme, extreme])
    _check(EventSorter(tmp_path), [block])


def test_distinct_items_are_counted_beyond_the_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_DENSE_IDS", 100)
    sorter = EventSorter(tmp_path)
    for items in ([0, 99, 100, 1 << 40], [99, 1 << 40, 101], [7]):
        block = _block([1] * len(items), [0] * len(items))
        sorter.add(EventBlock(**{**vars(block), "items_N": np.array(items)}))
    assert (sorter.num_items, sorter.max_item_id) == (6, 1 << 40)


def test_no_events_are_no_parts(tmp_path):
    sorter = EventSorter(tmp_path)
    assert list(sorter.parts()) == []
    assert (sorter.num_items, sorter.max_item_id, sorter.num_events) == (0, -1, 0)


@pytest.mark.parametrize("num_events", [1, 7, 8, 64, 10_001])
def test_a_file_filled_in_parts_reads_as_whole_columns(num_events, tmp_path):
    block = _block(np.ones(num_events), np.arange(num_events) * 1000 - 5)
    cut = num_events // 3
    parts = [block.take(np.arange(cut)), block.take(np.arange(cut, num_events))]
    rows: list[int] = []
    write_events(
        tmp_path / "e.arrow",
        parts,
        num_events=num_events,
        ticks_per_second=1000,
        advance=rows.append,
    )
    names = ("item_id", "label", "timestamp")
    file = ColumnFile(tmp_path / "e.arrow", names, num_rows=num_events, way_out="")
    assert np.array_equal(file["item_id"], block.items_N)
    assert np.array_equal(file["label"], block.labels_N)
    assert np.array_equal(file["timestamp"], np.arange(num_events) - 1)  # -5 ms is second -1
    assert sum(rows) == num_events


@pytest.mark.parametrize("block_bytes", [1, 16, 50, 1000])
def test_the_size_of_a_block_changes_nothing(block_bytes, tmp_path, monkeypatch):
    ratings = [(user, item, 1 + item % 5, 100 - item) for item in range(20) for user in (3, 1)]
    source = write_ml_100k(tmp_path / "raw", ratings, users=[1, 3])
    whole = preprocess("ml-100k", source=source, output=tmp_path / "whole")[1]
    monkeypatch.setattr(raw_lines, "_BLOCK_BYTES", block_bytes)
    cut = preprocess("ml-100k", source=source, output=tmp_path / "cut")[1]
    assert cut.files == whole.files


@pytest.mark.parametrize("block_bytes", [30, 1 << 20])
def test_line_numbers_count_over_blocks(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(raw_lines, "_BLOCK_BYTES", block_bytes)
    source = write_ml_100k(tmp_path / "raw", [(1, n, 3, n) for n in range(20)], users=[1])
    with (source / "u.data").open("a") as file:
        file.write("\n1\t5\t9\t7\n")
    with pytest.raises(ValueError, match=r"u\.data:22: rating must be one of"):
        preprocess("ml-100k", source=source, output=tmp_path / "out")


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_lines, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(raw_lines, "_MAX_LINE_BYTES", 200)
    source = write_ml_100k(tmp_path / "raw", [], users=[1])
    (source / "u.data").write_bytes(b"7" * 1000)
    with pytest.raises(ValueError, match=r"u\.data must hold lines of text"):
        preprocess("ml-100k", source=source, output=tmp_path / "out")


@pytest.mark.parametrize("text", ["881250949", "881250949.0", " 881250949", "8.81250949e8"])
def test_spellings_of_a_time_give_one_number(text, tmp_path):
    source = write_ml_100k(tmp_path / "raw", [], users=[1])
    (source / "u.data").write_text(f"1\t5\t3\t{text}\n")
    folder, manifest, _ = preprocess("ml-100k", source=source, output=tmp_path / "out")
    file = ColumnFile(
        folder / manifest.files["events"].name, ("timestamp",), num_rows=1, way_out=""
    )
    assert file["timestamp"].tolist() == [881250949]


def test_a_terminal_gets_a_bar_and_a_log_one_line(monkeypatch, caplog):
    caplog.set_level("INFO", logger=progress.__name__)
    with progress.stage("reading x", 2_000_000, unit="bytes") as advance:
        advance(2_000_000)
    with progress.stage("sorting", 1234, unit="rows") as advance:
        advance(1234)
    assert caplog.messages == ["reading x (2.0 MB)", "sorting (1,234 rows)"]
    caplog.clear()
    screen = io.StringIO()
    terminal = progress.Console
    monkeypatch.setattr(
        progress, "Console", lambda stderr: terminal(file=screen, force_terminal=True, width=100)
    )
    with progress.stage("sorting", 10, unit="rows") as advance:
        advance(4)
    assert caplog.messages == []
    assert "sorting" in screen.getvalue()
    assert " 4/10" in screen.getvalue()
