from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from configs.schema import DatasetArgs
from data.dataset import EventStore
from data.loader import build_datasets
from data.manifest import read_manifest
from data.preprocess import preprocess
from tests.data.conftest import FIXTURES, write_ml_100k

# The fixtures hold the same five events in the same file order in every format.
ITEMS = [5, 8, 3, 4, 9]
TIMES = [900000010, 900000020, 900000010, 900000020, 900000030]


def _store(dataset_name: str, source: Path, output: Path) -> EventStore:
    folder, manifest, _ = preprocess(dataset_name, source=source, output=output)
    return EventStore(folder, manifest)


@pytest.mark.parametrize(
    ("dataset_name", "fixture"),
    [
        ("ml-100k", "ml-100k"),
        ("ml-100k", "ml-100k-recbole"),
        ("ml-1m", "ml-1m"),
        ("ml-20m", "ml-20m"),
    ],
)
def test_every_format_gives_the_same_events(dataset_name, fixture, tmp_path):
    store = _store(dataset_name, FIXTURES / fixture, tmp_path / "out")
    assert store.items_N.tolist() == ITEMS
    assert store.timestamps_N.tolist() == TIMES
    # The half-star fixture holds 1.5 for 1, 3.5 for 5, 2.0 for 2 and 3.0 for 4.
    classes = [2, 6, 6, 3, 5] if dataset_name == "ml-20m" else [0, 4, 4, 1, 3]
    assert store.labels_N.tolist() == classes
    users = [2, 7] if dataset_name == "ml-20m" else [2, 7, 9]
    assert store.user_ids_U.tolist() == users
    assert store.offsets_U1.tolist() == [0, 2, 5] + [5] * (len(users) - 2)


def test_contextual_ids_of_ml_100k(tmp_path):
    store = _store("ml-100k", FIXTURES / "ml-100k", tmp_path / "out")
    manifest = store.manifest
    assert manifest.contextual_feature_names == ("user_id", "sex", "age", "occupation", "zip")
    assert store.contextual_FU.tolist() == [
        [2, 7, 9],
        [0, 1, 0],
        [53, 24, 33],
        [0, 1, 2],
        [1, 0, 2],
    ]
    assert manifest.vocabularies["occupation"] == ["other", "technician", "writer"]
    assert manifest.vocabularies["zip"] == ["85711", "94043", "V3N4P"]
    assert manifest.max_ids == {
        "item_id": 9, "action": 4, "user_id": 9, "sex": 1, "age": 53, "occupation": 2, "zip": 2
    }  # fmt: skip
    assert manifest.vocab_sizes == {name: n + 1 for name, n in manifest.max_ids.items()}
    assert (manifest.num_users, manifest.num_users_without_events, manifest.num_items) == (3, 1, 5)


def test_age_codes_of_ml_1m_become_indices(tmp_path):
    store = _store("ml-1m", FIXTURES / "ml-1m", tmp_path / "out")
    assert store.contextual_FU[2].tolist() == [0, 6, 2]
    assert store.manifest.max_ids["age"] == 6
    assert store.manifest.vocabularies["age"][6] == "56"


def test_both_forms_of_ml_100k_give_the_same_bytes(tmp_path):
    first = preprocess("ml-100k", source=FIXTURES / "ml-100k", output=tmp_path / "a")[1]
    second = preprocess("ml-100k", source=FIXTURES / "ml-100k-recbole", output=tmp_path / "b")[1]
    assert first.files == second.files


def test_shuffled_rows_come_out_in_time_order_with_their_ratings(tmp_path):
    rows = [(1, 10 * n, n % 5 + 1, 1000 + n) for n in (4, 1, 6, 2, 5, 3)]
    store = _store("ml-100k", write_ml_100k(tmp_path / "in", rows, users=[1]), tmp_path / "out")
    assert store.timestamps_N.tolist() == [1001, 1002, 1003, 1004, 1005, 1006]
    assert store.items_N.tolist() == [10, 20, 30, 40, 50, 60]
    assert store.labels_N.tolist() == [n % 5 for n in range(1, 7)]


def test_the_target_of_shuffled_rows_is_the_latest_event(tmp_path):
    rows = [(1, 10 * n, n % 5 + 1, 1000 + n) for n in (4, 1, 6, 2, 5, 3)]
    source = write_ml_100k(tmp_path / "in", rows, users=[1])
    preprocess("ml-100k", source=source, output=tmp_path / "ml-100k")
    args = DatasetArgs(
        dataset_name="ml-100k",
        dataset_path=str(tmp_path / "ml-100k"),
        max_history_seqlen=3,
        max_num_candidates=2,
    )
    batch = build_datasets(args).test.batch(np.arange(1), batch_size=1)
    assert batch.features["item_id"].values().tolist() == [20, 30, 40, 50, 60]
    assert batch.features["action"].values().tolist() == [2, 3, 4]
    assert batch.labels_E.tolist() == [2, 3, 4, 0, 1]
    assert batch.num_candidates_B.tolist() == [2]


def test_equal_times_keep_file_order_whatever_other_users_do(tmp_path):
    own = [(5, 9, 1, 1000), (5, 3, 2, 1000), (5, 7, 3, 1000)]
    others = [(user, item, 4, 1000) for user in (1, 4, 8) for item in range(1, 30)]
    seen = set()
    for attempt in range(3):
        random.Random(attempt).shuffle(others)
        where = sorted(random.Random(attempt + 10).sample(range(len(others) + 1), 3))
        rows = list(others)
        for place, row in zip(reversed(where), reversed(own), strict=True):
            rows.insert(place, row)
        source = write_ml_100k(tmp_path / f"in{attempt}", rows, users=[1, 4, 5, 8])
        store = _store("ml-100k", source, tmp_path / f"out{attempt}")
        row = store.user_ids_U.tolist().index(5)
        span = slice(store.offsets_U1[row], store.offsets_U1[row + 1])
        seen.add((tuple(store.items_N[span].tolist()), tuple(store.labels_N[span].tolist())))
    assert seen == {((9, 3, 7), (0, 1, 2))}


def test_a_large_file_keeps_ties_in_file_order(tmp_path):
    """More rows than the reader takes at a time, all at one moment."""
    count = 300_000
    items = np.random.default_rng(0).integers(1, 10**6, count)
    text = "userId,movieId,rating,timestamp\n" + "\n".join(f"1,{i},4.0,7" for i in items.tolist())
    (tmp_path / "ratings.csv").write_text(text)
    store = _store("ml-20m", tmp_path, tmp_path / "out")
    assert np.array_equal(store.items_N, items)


@pytest.mark.parametrize(
    ("dataset_name", "ratings", "classes"),
    [
        ("ml-20m", ["0.5", "3.5", "4.0", "5.0", "4"], [0, 6, 7, 9, 7]),
        ("ml-100k", ["1", "5", "3.0"], [0, 4, 2]),
        ("ml-1m", ["1", "5", "2"], [0, 4, 1]),
    ],
)
def test_ratings_become_classes_from_zero(dataset_name, ratings, classes, raw, tmp_path):
    source = raw(dataset_name)
    file, separator, header = _format(dataset_name)
    lines = [separator.join(["7", "1", r, str(n)]) for n, r in enumerate(ratings)]
    (source / file).write_text(header + "\n".join(lines) + "\n")
    assert _store(dataset_name, source, tmp_path / "out").labels_N.tolist() == classes


def _format(dataset_name: str) -> tuple[str, str, str]:
    return {
        "ml-100k": ("u.data", "\t", ""),
        "ml-1m": ("ratings.dat", "::", ""),
        "ml-20m": ("ratings.csv", ",", "userId,movieId,rating,timestamp\n"),
    }[dataset_name]


BAD_RATINGS = {
    "off the grid": (("7", "1", "3.7", "5"), "rating must be one of .*, got '3.7'"),
    "above the grid": (("7", "1", "6", "5"), "rating must be one of .*, got '6'"),
    "zero": (("7", "1", "0", "5"), "rating must be one of .*, got '0'"),
    "nan": (("7", "1", "nan", "5"), "rating must be one of .*, got 'nan'"),
    "no rating": (("7", "1", "", "5"), "rating must be one of .*, got ''"),
    "time is text": (("7", "1", "3", "noon"), "timestamp must be whole seconds"),
    "time has a fraction": (("7", "1", "3", "5.5"), "timestamp must be whole seconds"),
    "time before 1970": (("7", "1", "3", "-5"), "timestamp must be >= 0"),
    "infinite time": (("7", "1", "3", "inf"), "timestamp must be whole seconds"),
    "negative item": (("7", "-1", "3", "5"), "item id must be a whole number >= 0"),
    "negative user": (("-7", "1", "3", "5"), "user id must be a whole number >= 0"),
    "item is text": (("7", "x", "3", "5"), "item id must be a whole number >= 0"),
    "item beyond 64 bits": (("7", "1" * 20, "3", "5"), "item id must be a whole number >= 0"),
    "cut line": (("7", "1"), "must have the columns .*the file may be cut"),
    "one column more": (("7", "1", "3", "5", "6"), "must have the columns"),
    "Latin-1 byte": (("7", "caf\xe9", "3", "5"), "plain text, got the byte 0xE9"),
}


@pytest.mark.parametrize("dataset_name", ["ml-100k", "ml-1m", "ml-20m"])
@pytest.mark.parametrize("case", BAD_RATINGS)
def test_a_bad_rating_is_named_with_file_and_line(dataset_name, case, raw, tmp_path):
    fields, message = BAD_RATINGS[case]
    source, (file, separator, header) = raw(dataset_name), _format(dataset_name)
    good = separator.join(("7", "1", "3", "4"))
    lines = [good, "", good, separator.join(fields), good]  # a blank line counts as a line
    (source / file).write_bytes((header + "\r\n".join(lines)).encode("latin-1"))
    where = re.escape(f"{source / file}:{5 if header else 4}")
    with pytest.raises(ValueError, match=f"^{where}.*{message}"):
        preprocess(dataset_name, source=source, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


BAD_USERS = {
    "no such sex": ("7|24|X|technician|85711", "u.user:2: sex must be one of F, M, got 'X'"),
    "age is text": ("7|old|M|technician|85711", "u.user:2: age must be a whole number >= 0"),
    "age too high": ("7|900|M|technician|85711", "u.user:2: age must be <= 150"),
    "a column short": ("7|24|M|technician", "u.user:2 must have the columns"),
    "negative id": ("-7|24|M|technician|85711", "u.user:2: user id must be a whole number >= 0"),
    "twice": ("2|24|M|technician|85711", "u.user:2: user 2 was already on line 1"),
    "missing user": ("8|24|M|technician|85711", "u.data:1: user 7 is not in u.user"),
}


@pytest.mark.parametrize("case", BAD_USERS)
def test_a_bad_user_is_named_with_file_and_line(case, raw, tmp_path):
    line, message = BAD_USERS[case]
    source = raw("ml-100k")
    (source / "u.user").write_text(f"2|53|F|other|94043\n{line}\n")
    with pytest.raises(ValueError, match=message):
        preprocess("ml-100k", source=source, output=tmp_path / "out")


def test_an_unknown_age_code_of_ml_1m_is_refused(raw, tmp_path):
    source = raw("ml-1m")
    (source / "users.dat").write_text("2::F::2::10::48067\n")
    with pytest.raises(ValueError, match=r"users\.dat:1: age must be one of 1, 18, .*got '2'"):
        preprocess("ml-1m", source=source, output=tmp_path / "out")


def test_users_may_mix_utf_8_and_latin_1(raw, tmp_path):
    source = raw("ml-100k")
    lines = ["2|53|F|caf\xe9|1".encode("latin-1"), "7|24|M|caf\xe9|2".encode()]
    (source / "u.user").write_bytes(b"\n".join(lines) + b"\n")
    manifest = preprocess("ml-100k", source=source, output=tmp_path / "out")[1]
    assert manifest.vocabularies["occupation"] == ["caf\xe9"]


@pytest.mark.parametrize(
    ("dataset_name", "file", "message"),
    [
        ("ml-20m", "ratings.csv", "must be a header with the columns userId"),
        ("ml-100k", "u.data", "holds no events"),
        ("ml-1m", "ratings.dat", "holds no events"),
        ("ml-100k", "u.user", "holds no users"),
    ],
)
def test_an_empty_file_is_refused(dataset_name, file, message, raw, tmp_path):
    source = raw(dataset_name)
    (source / file).write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        preprocess(dataset_name, source=source, output=tmp_path / "out")


def test_the_manifest_on_disk_is_the_one_returned(tmp_path):
    folder, manifest, _ = preprocess("ml-1m", source=FIXTURES / "ml-1m", output=tmp_path / "o")
    assert read_manifest(folder, dataset_name="ml-1m") == manifest
