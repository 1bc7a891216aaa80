from __future__ import annotations

import io
import random
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from configs.datasets import DATASETS
from configs.schema import DatasetArgs
from data.dataset import EventStore
from data.loader import SequenceLoader, build_datasets
from data.manifest import check_tables, read_manifest
from data.preprocess import preprocess
from data.sources import KUAIRAND_FLAGS, LAYOUTS
from tests.data.conftest import FIXTURES

HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,"
    "is_hate,long_view,play_time_ms,duration_ms,profile_stay_time,comment_stay_time,"
    "is_profile_enter,is_rand,tab"
)
FIRST, SECOND = "log_standard_4_08_to_4_21_pure.csv", "log_standard_4_22_to_5_08_pure.csv"
USERS = "user_features_pure.csv"


def log_line(user: object, video: object, time_ms: object, mask: int = 0, **flags: object) -> str:
    """A line of a log; `flags` stand in place of what the mask says."""
    values = {name: mask >> bit & 1 for bit, name in enumerate(KUAIRAND_FLAGS)} | flags
    known = {"user_id": user, "video_id": video, "time_ms": time_ms, **values}
    return ",".join(str(known.get(name, 0)) for name in HEADER.split(","))


def write_logs(folder: Path, *logs: list[str], header: str = HEADER, end: str = "\n") -> Path:
    """KuaiRand-Pure with the fixture's users and these log lines."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / USERS).write_bytes((FIXTURES / "kuairand-pure" / "data" / USERS).read_bytes())
    for name, lines in zip((FIRST, SECOND), logs, strict=True):
        (data / name).write_text(end.join([header, *lines]) + end, newline="", encoding="latin-1")
    return folder


def store_of(source: Path, output: Path) -> EventStore:
    folder, manifest, _ = preprocess("kuairand-pure", source=source, output=output)
    return EventStore(folder, manifest)


def test_two_logs_with_interleaved_times_become_one_history(tmp_path):
    store = store_of(FIXTURES / "kuairand-pure", tmp_path / "out")
    assert store.user_ids_U.tolist() == [2, 7, 9]
    assert store.offsets_U1.tolist() == [0, 2, 6, 6]
    assert store.items_N.tolist() == [5, 8, 4, 3, 3, 9]
    # Equal milliseconds keep the order of the files; the second log has the earliest event.
    assert store.labels_N.tolist() == [0, 32, 66, 0b00000101, 128, 255]
    assert store.timestamps_N.tolist() == [
        1649466000, 1650592800, 1649408076, 1649408076, 1649408076, 1650553200
    ]  # fmt: skip


def test_range_features_become_indices_of_sorted_vocabularies(tmp_path):
    store = store_of(FIXTURES / "kuairand-pure", tmp_path / "out")
    manifest = store.manifest
    assert manifest.contextual_feature_names == DATASETS["kuairand-pure"].contextual_feature_names
    assert manifest.vocabularies == {
        "user_active_degree": ["UNKNOWN", "full_active"],
        "follow_user_num_range": ["(0,10]", "0", "500+"],
        "fans_user_num_range": ["0", "[1,10)", "[100,1k)"],
        "friend_user_num_range": ["0", "[1,5)"],
        "register_days_range": ["31-60", "730+"],
    }
    assert store.contextual_FU.tolist() == [
        [2, 7, 9], [0, 1, 1], [1, 0, 2], [2, 1, 0], [1, 0, 0], [0, 1, 1]
    ]  # fmt: skip
    assert (manifest.max_ids["action"], manifest.vocab_sizes["action"]) == (255, 256)
    assert (manifest.max_ids["item_id"], manifest.num_items) == (9, 5)
    assert (manifest.num_users, manifest.num_users_without_events) == (3, 1)
    assert (manifest.label_kind, manifest.num_classes) == ("bitmask", 8)
    assert manifest.options == {"label_bits": list(KUAIRAND_FLAGS)}
    assert read_manifest(store.folder, dataset_name="kuairand-pure") == manifest


@pytest.mark.parametrize("bit", range(8))
def test_task_k_is_bit_k(bit, tmp_path):
    """One flag set in the text, one bit set in the label, one task positive."""
    lines = [log_line(7, n, 1000 * n, **{KUAIRAND_FLAGS[bit]: 1}) for n in range(1, 4)]
    store = store_of(write_logs(tmp_path / "raw", lines, [log_line(2, 1, 1)]), tmp_path / "out")
    assert store.labels_N.tolist() == [0, 1 << bit, 1 << bit, 1 << bit]


def test_bits_are_in_the_order_of_the_public_trainers():
    weights = {name: 1 << bit for bit, name in enumerate(KUAIRAND_FLAGS)}
    assert weights == {
        "is_click": 1,
        "is_like": 2,
        "is_follow": 4,
        "is_comment": 8,
        "is_forward": 16,
        "is_hate": 32,
        "long_view": 64,
        "is_profile_enter": 128,
    }


def test_the_loader_reads_it_with_a_task_per_bit(tmp_path):
    masks = [1, 0b101, 2, 64, 128, 0b101, 255]
    first = [log_line(7, n, 1000 * n, mask) for n, mask in enumerate(masks[:4])]
    second = [log_line(7, n, 1000 * n, mask) for n, mask in enumerate(masks[4:], start=4)]
    source = write_logs(tmp_path / "raw", first, second)
    preprocess("kuairand-pure", source=source, output=tmp_path / "kuairand-pure")
    args = DatasetArgs(
        dataset_name="kuairand-pure",
        dataset_path=str(tmp_path),
        max_history_seqlen=4,
        max_num_candidates=2,
        split="temporal",
    )
    datasets = build_datasets(args, num_tasks=8)
    assert (datasets.facts.label_kind, datasets.facts.num_classes) == ("bitmask", 8)
    loader = SequenceLoader(datasets.test, batch_size=1, shuffle=False, seed=0)
    (batch,) = loader.epoch(0)
    assert batch.features["item_id"].values().tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.features["action"].values().tolist() == [0b101, 2, 64, 128]
    assert batch.labels_E[-2:].tolist() == [0b101, 255]
    assert batch.num_candidates_B.tolist() == [2]
    assert batch.features["register_days_range"].values().tolist() == [1]


def test_too_small_a_table_is_refused_with_the_highest_id(tmp_path):
    manifest = store_of(FIXTURES / "kuairand-pure", tmp_path / "out").manifest
    sizes = dict(manifest.vocab_sizes)
    check_tables(manifest, sizes)
    with pytest.raises(ValueError, match="highest id 255"):
        check_tables(manifest, sizes | {"action": 8})
    with pytest.raises(ValueError, match="highest id 9"):
        check_tables(manifest, sizes | {"item_id": manifest.num_items})


def test_shuffled_rows_keep_their_columns_together(tmp_path):
    rows = [(7, n, 1000 * n, n % 256) for n in range(1, 400)]
    lines = [log_line(*row) for row in rows]
    random.Random(0).shuffle(lines)
    store = store_of(write_logs(tmp_path / "raw", lines[:200], lines[200:]), tmp_path / "out")
    assert store.items_N.tolist() == [row[1] for row in rows]
    assert store.timestamps_N.tolist() == [row[1] for row in rows]
    assert store.labels_N.tolist() == [row[3] for row in rows]


def test_equal_milliseconds_keep_file_order_whatever_other_users_do(tmp_path):
    own = [log_line(7, video, 5000) for video in (9, 3, 7)]
    seen = set()
    for attempt in range(3):
        others = [log_line(user, n, 5000) for user in (2, 9) for n in range(30)]
        random.Random(attempt).shuffle(others)
        lines = [*others[:20], own[0], *others[20:40], own[1], *others[40:]]
        source = write_logs(tmp_path / f"in{attempt}", lines, [own[2]])
        store = store_of(source, tmp_path / f"out{attempt}")
        seen.add(tuple(store.items_N[store.offsets_U1[1] : store.offsets_U1[2]].tolist()))
    assert seen == {(9, 3, 7)}


def test_columns_are_found_by_name_and_line_ends_do_not_matter(tmp_path):
    names = HEADER.split(",")
    order = np.random.default_rng(0).permutation(len(names))

    def mixed(line: str) -> str:
        fields = line.split(",")
        return ",".join(fields[k] for k in order)

    plain = [log_line(7, 3, 1000, 5), log_line(2, 4, 2000, 66)]
    other = [log_line(7, 5, 3000, 1)]
    first = preprocess(
        "kuairand-pure", source=write_logs(tmp_path / "a", plain, other), output=tmp_path / "oa"
    )[1]
    moved = write_logs(
        tmp_path / "b",
        [*map(mixed, plain), "", ""],
        [mixed(other[0]), "  "],
        header=mixed(HEADER),
        end="\r\n",
    )
    second = preprocess("kuairand-pure", source=moved, output=tmp_path / "ob")[1]
    assert first.files == second.files


BAD_LINES = {
    "flag of two": (log_line(7, 1, 5, is_like=2), "is_like must be 0 or 1, got '2'"),
    "negative flag": (log_line(7, 1, 5, is_hate=-1), "is_hate must be 0 or 1, got '-1'"),
    "flag is text": (log_line(7, 1, 5, is_click="yes"), "is_click must be 0 or 1, got 'yes'"),
    "flag missing": (log_line(7, 1, 5, long_view=""), "long_view must be 0 or 1, got ''"),
    "flag has a fraction": (log_line(7, 1, 5, is_click=0.5), "is_click must be 0 or 1, got '0.5'"),
    "time is text": (log_line(7, 1, "noon"), "time_ms must be whole milliseconds since 1970"),
    "time has a fraction": (log_line(7, 1, 5.5), "time_ms must be whole milliseconds"),
    "negative video": (log_line(7, -1, 5), "item id must be a whole number >= 0"),
    "user is text": (log_line("u7", 1, 5), "user id must be a whole number >= 0"),
    "video beyond 64 bits": (log_line(7, "1" * 20, 5), "item id must be a whole number >= 0"),
    "cut line": (log_line(7, 1, 5)[:-6], "must have the columns .*the file may be cut"),
    "one column more": (log_line(7, 1, 5) + ",0", "must have the columns"),
    "unknown user": (log_line(8, 1, 5), r"user 8 is not in user_features_pure\.csv"),
    "user above all": (log_line(80, 1, 5), r"user 80 is not in user_features_pure\.csv"),
    "Latin-1 byte": (log_line(7, 1, 5, is_click="\xe9"), "plain text, got the byte 0xE9"),
    "Latin-1 byte elsewhere": (log_line(7, 1, 5)[:-1] + "\xe9", "plain text, got the byte 0xE9"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_with_file_and_line(case, tmp_path):
    bad, message = BAD_LINES[case]
    good = log_line(7, 1, 5)
    source = write_logs(tmp_path / "raw", [good], [good, good, bad, good])
    where = re.escape(f"{source / 'data' / SECOND}:4")
    with pytest.raises(ValueError, match=f"^{where}.*{message}"):
        preprocess("kuairand-pure", source=source, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_long_line_hidden_among_good_ones_is_found(tmp_path):
    """As many separators as there should be, in all; the wrong line is still wrong."""
    long, short = log_line(7, 1, 5) + ",0", log_line(7, 1, 5).rpartition(",")[0]
    source = write_logs(tmp_path / "raw", [log_line(7, 1, 5), long, short], [log_line(7, 1, 5)])
    with pytest.raises(ValueError, match=rf"{FIRST}:3 must have the columns"):
        preprocess("kuairand-pure", source=source, output=tmp_path / "out")


@pytest.mark.parametrize("column", ["user_id", "time_ms", "is_profile_enter"])
def test_a_missing_column_is_named(column, tmp_path):
    good = [log_line(7, 1, 5)]
    source = write_logs(tmp_path / "raw", good, good, header=HEADER.replace(column, "other"))
    with pytest.raises(ValueError, match=rf"{FIRST}:1 must be a header with .*{column}"):
        preprocess("kuairand-pure", source=source, output=tmp_path / "out")


def test_a_column_named_twice_is_refused(tmp_path):
    twice = HEADER.replace("is_rand", "is_click")
    source = write_logs(tmp_path / "raw", [log_line(7, 1, 5)], [log_line(7, 1, 6)], header=twice)
    with pytest.raises(ValueError, match=rf"{FIRST}:1 must name each column once, got 'is_click'"):
        preprocess("kuairand-pure", source=source, output=tmp_path / "out")


BAD_USERS = {
    "twice": ("7,full_active,0,0,0,0,0,0,1", ":5: user 7 was already on line 2"),
    "negative": ("-3,full_active,0,0,0,0,0,0,1", ":5: user id must be a whole number >= 0"),
    "cut": ("3,full_active,0,0", ":5 must have 9 columns, user_id to onehot_feat4, got 4 in"),
    "range without quotes": ("3,full_active,0,0,(0,10],0,0,0,1", ":5 must have 9 .*got 10 in"),
    "open quote": ('3,full_active,0,0,"(0,10],0,0,0,1', ":5 must quote whole values"),
    "quotes in the wrong places": (
        '3,full_active,0,0,"(0,10],"[1,10)",0,1',
        ":5 must quote whole values",
    ),
}


@pytest.mark.parametrize("case", BAD_USERS)
def test_a_bad_user_is_named_with_file_and_line(case, raw, tmp_path):
    line, message = BAD_USERS[case]
    source = raw("kuairand-pure")
    with (source / "data" / USERS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"user_features_pure\.csv{message}"):
        preprocess("kuairand-pure", source=source, output=tmp_path / "out")


@pytest.mark.parametrize("name", [FIRST, SECOND, USERS])
@pytest.mark.parametrize("content", ["", "header only"])
def test_an_empty_file_is_refused(name, content, raw, tmp_path):
    source = raw("kuairand-pure")
    path = source / "data" / name
    path.write_text(path.read_text().partition("\n")[0] + "\n" if content else "")
    with pytest.raises(ValueError, match=rf"{name}(:1 must be a header| holds no (events|users))"):
        preprocess("kuairand-pure", source=source, output=tmp_path / "out")


def _archive(target: Path, version: str) -> Path:
    """The fixture under the names of another version, as the publisher packs it."""
    fixture = FIXTURES / "kuairand-pure" / "data"
    layout = LAYOUTS[f"kuairand-{version}"][0]
    logs = [(fixture / name).read_bytes() for name in (FIRST, SECOND)]
    contents = dict.fromkeys(layout.events.values(), logs[1]) | {layout.file_names[0]: logs[0]}
    contents[layout.users] = (fixture / USERS).read_bytes()
    contents = {f"KuaiRand/data/{name}": content for name, content in contents.items()}
    contents = {"KuaiRand/data/video_features_basic.csv": b"video_id\n1\n" * 1000, **contents}
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w") as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
        return target
    with tarfile.open(target, "w:gz" if target.suffix == ".gz" else "w") as archive:
        for name, content in contents.items():
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            archive.addfile(facts, io.BytesIO(content))
    return target


def test_folder_and_archives_give_the_same_bytes(raw, tmp_path):
    source = raw("kuairand-pure")
    (tmp_path / "above").mkdir()
    source = source.rename(tmp_path / "above" / "KuaiRand-Pure")
    sources = [
        source,
        source / "data",
        source.parent,
        source / "data" / FIRST,
        _archive(tmp_path / "KuaiRand-Pure.tar.gz", "pure"),
        _archive(tmp_path / "some.tar", "pure"),
        _archive(tmp_path / "some.zip", "pure"),
    ]
    made = [
        preprocess("kuairand-pure", source=source, output=tmp_path / str(n))[1]
        for n, source in enumerate(sources)
    ]
    assert all(manifest == made[0] for manifest in made)


@pytest.mark.parametrize(("version", "num_events"), [("1k", 6), ("27k", 12)])
def test_the_other_versions_differ_in_names_only(version, num_events, tmp_path):
    source = _archive(tmp_path / "x.tar.gz", version)
    _, manifest, _ = preprocess(f"kuairand-{version}", source=source, output=tmp_path / "out")
    assert manifest.num_events == num_events
    assert len(manifest.source) == num_events // 3 + 1
    assert not preprocess(f"kuairand-{version}", source=source, output=tmp_path / "out")[2]


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6, 0.9])
def test_a_cut_tar_archive_is_refused_and_a_retry_works(kept, tmp_path):
    whole = _archive(tmp_path / "whole.tar.gz", "pure").read_bytes()
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ValueError, match=r"cut\.tar\.gz is cut or damaged .*download it again"):
        preprocess("kuairand-pure", source=cut, output=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    cut.write_bytes(whole)
    assert preprocess("kuairand-pure", source=cut, output=tmp_path / "new")[2]


def test_a_bad_line_in_an_archive_is_named_by_its_member(tmp_path):
    source = write_logs(tmp_path / "raw", [log_line(7, 1, 5, is_like=2)], [log_line(7, 1, 5)])
    target = tmp_path / "x.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        archive.add(source, "KuaiRand-Pure")
    where = re.escape(f"{target}/KuaiRand-Pure/data/{FIRST}:2: is_like")
    with pytest.raises(ValueError, match=f"^{where}"):
        preprocess("kuairand-pure", source=target, output=tmp_path / "out")


def test_a_missing_log_is_named(raw, tmp_path):
    source = raw("kuairand-pure")
    (source / "data" / SECOND).unlink()
    (source / "data" / USERS).unlink()
    message = rf"has {FIRST} but no {SECOND}, {USERS}; add these files"
    with pytest.raises(ValueError, match=message):
        preprocess("kuairand-pure", source=source, output=tmp_path / "out")


def test_another_version_is_named(tmp_path):
    source = FIXTURES / "kuairand-pure"
    with pytest.raises(ValueError, match="looks like kuairand-pure, not kuairand-1k; use --data"):
        preprocess("kuairand-1k", source=source, output=tmp_path / "out")
    with pytest.raises(ValueError, match="looks like ml-1m, not kuairand-1k"):
        preprocess("kuairand-1k", source=FIXTURES / "ml-1m", output=tmp_path / "out")
