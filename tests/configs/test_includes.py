"""Included files, their order, and overrides from the command line."""

import os
from pathlib import Path

import pytest

from configs.loader import ConfigError, load_experiment
from tests.configs.conftest import BASE


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.gin").write_text(text)


def load(path: Path, *bindings: str):
    return load_experiment(path, bindings=bindings, task="ranking")


def test_sibling_is_found_from_any_working_directory(tmp_path, monkeypatch) -> None:
    write(tmp_path, base=BASE, child="include 'base.gin'\nTrainerArgs.train_batch_size = 16\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    loaded = []
    for folder in (tmp_path, elsewhere, Path("/")):
        monkeypatch.chdir(folder)
        loaded.append(load(tmp_path / "child.gin", "NetworkArgs.hidden_size = 24"))
        loaded.append(load(Path(os.path.relpath(tmp_path / "child.gin")), "TrainerArgs.seed = 5"))
    for experiment in loaded:
        assert experiment.trainer.train_batch_size == 16
        assert experiment.trainer.eval_batch_size == 8
        assert experiment.name == "child"
    assert (loaded[0].network.hidden_size, loaded[1].network.hidden_size) == (24, 32)
    assert (loaded[0].trainer.seed, loaded[1].trainer.seed) == (1234, 5)


def test_include_falls_back_to_configs(tmp_path) -> None:
    write(tmp_path, mine="include 'movielens_ranking.gin'\nTrainerArgs.seed = 9\n")
    experiment = load(tmp_path / "mine.gin")
    assert experiment.trainer.seed == 9
    assert experiment.dataset.dataset_name == "ml-100k"


def test_bare_name_is_found_in_configs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(Path("movielens_ranking.gin")).name == "movielens_ranking"


def test_file_beside_wins_over_configs(tmp_path) -> None:
    write(tmp_path, movielens_ranking=BASE, mine="include 'movielens_ranking.gin'\n")
    assert load(tmp_path / "mine.gin").network.hidden_size == 32


def test_error_names_the_included_file_and_line(tmp_path) -> None:
    write(tmp_path, base=BASE + "TrainerArgs.sed = 1\n", child="include 'base.gin'\n")
    with pytest.raises(ConfigError, match=r"base\.gin:14: TrainerArgs\.sed"):
        load(tmp_path / "child.gin")


def test_missing_include_names_both_places(tmp_path) -> None:
    write(tmp_path, base=BASE, child="\ninclude 'bse.gin'\n")
    with pytest.raises(ConfigError, match=r"child\.gin:2: include of bse\.gin.*mean 'base'"):
        load(tmp_path / "child.gin")


def test_circular_include_is_refused(tmp_path) -> None:
    write(tmp_path, a="include 'b.gin'\n", b="include 'a.gin'\n")
    with pytest.raises(ConfigError, match=r"a\.gin -> b\.gin -> a\.gin"):
        load(tmp_path / "a.gin")


def test_later_sibling_wins_in_silence(tmp_path, caplog) -> None:
    write(
        tmp_path,
        base=BASE,
        wide="NetworkArgs.hidden_size = 64\n",
        child="include 'base.gin'\ninclude 'wide.gin'\n",
    )
    assert load(tmp_path / "child.gin").network.hidden_size == 64
    assert caplog.messages == []


def test_include_below_a_line_wins_with_a_warning(tmp_path, caplog) -> None:
    write(tmp_path, base=BASE, child="NetworkArgs.hidden_size = 64\ninclude 'base.gin'\n")
    assert load(tmp_path / "child.gin").network.hidden_size == 32
    assert len(caplog.messages) == 1
    assert "replaces 64" in caplog.messages[0] and "child.gin:1" in caplog.messages[0]


def test_second_inclusion_that_undoes_an_override_warns(tmp_path, caplog) -> None:
    write(
        tmp_path,
        base=BASE,
        model="include 'base.gin'\nNetworkArgs.hidden_size = 64\n",
        data="include 'base.gin'\nDatasetArgs.shuffle = True\n",
        child="include 'model.gin'\ninclude 'data.gin'\n",
    )
    load(tmp_path / "child.gin")
    assert len(caplog.messages) == 1
    assert "NetworkArgs.hidden_size = 32 replaces 64" in caplog.messages[0]


def test_repeated_line_below_an_include_still_counts(tmp_path) -> None:
    line = "NetworkArgs.hidden_size = 64\n"
    write(tmp_path, base=BASE, child=f"{line}include 'base.gin'\n{line}")
    assert load(tmp_path / "child.gin").network.hidden_size == 64


def test_command_line_wins_and_its_last_binding_wins(tmp_path, caplog) -> None:
    write(tmp_path, base=BASE)
    seeds = ("TrainerArgs.seed = 1", "TrainerArgs.seed=2")
    assert load(tmp_path / "base.gin", *seeds).trainer.seed == 2
    assert "replaces 1" in caplog.messages[0]


def test_command_line_is_named_in_errors(tmp_path) -> None:
    write(tmp_path, base=BASE)
    binding = "TrainerArgs.pipeline_type = none"
    with pytest.raises(ConfigError, match=rf"--gin-binding '{binding}': .*'none' in quotes"):
        load(tmp_path / "base.gin", binding)
    with pytest.raises(ConfigError, match="write the include in a file"):
        load(tmp_path / "base.gin", "include 'base.gin'")


def test_contradiction_inside_an_included_file_is_refused(tmp_path) -> None:
    write(tmp_path, base=BASE + "NetworkArgs.hidden_size = 64\n", child="include 'base.gin'\n")
    with pytest.raises(ConfigError, match=r"base\.gin:14: .*base\.gin:8"):
        load(tmp_path / "child.gin")
