from __future__ import annotations

import pytest

from configs.datasets import DATASETS
from data.archives import RawFile
from data.download import ARCHIVES
from data.sources import LAYOUTS, locate
from tests.data.conftest import FIXTURES


def test_every_data_set_has_a_layout_and_an_archive():
    assert set(LAYOUTS) == set(ARCHIVES) == set(DATASETS)
    assert all(len(archive.md5) == 32 for archive in ARCHIVES.values())
    assert len({archive.url for archive in ARCHIVES.values()}) == len(ARCHIVES)


def test_logs_of_the_large_version_come_in_parts_in_the_order_of_their_dates():
    assert list(LAYOUTS["kuairand-27k"][0].events.values()) == [
        "log_standard_4_08_to_4_21_27k_part1.csv",
        "log_standard_4_08_to_4_21_27k_part2.csv",
        "log_standard_4_22_to_5_08_27k_part1.csv",
        "log_standard_4_22_to_5_08_27k_part2.csv",
    ]
    assert list(LAYOUTS["kuairand-1k"][0].events) == [
        "log_standard_4_08_to_4_21_1k", "log_standard_4_22_to_5_08_1k"
    ]  # fmt: skip


@pytest.mark.parametrize("dataset_name", ["ml-100k", "ml-1m", "ml-20m", "kuairand-pure"])
def test_files_of_a_folder_are_found(dataset_name, tmp_path):
    raw = locate(dataset_name, FIXTURES / dataset_name, tmp_path)
    assert list(raw.events) == list(raw.layout.events)
    assert set(raw.sha256()) == {*raw.layout.events, *(["users"] if raw.users else [])}
    assert all(file.num_bytes() > 0 for file in raw.events.values())
    assert list(tmp_path.iterdir()) == []


def test_the_shallowest_file_wins(tmp_path):
    for folder in ("", "a", "a/b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "ratings.csv").write_text("x")
    raw = locate("ml-20m", tmp_path, tmp_path)
    assert raw.events["ratings"] == RawFile(tmp_path / "ratings.csv")
