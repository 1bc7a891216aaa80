from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import preprocess as cli
from data.preprocess import main, preprocess
from tests.data.conftest import FIXTURES

ROOT = Path(__file__).resolve().parents[2]


def _zip(folder: Path, target: Path, inside: str = "") -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, inside + path.name)
    return target


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def test_folder_file_and_archives_give_the_same_bytes(tmp_path):
    made = [
        FIXTURES / "ml-1m",
        FIXTURES / "ml-1m" / "ratings.dat",
        _zip(FIXTURES / "ml-1m", tmp_path / "ml-1m.zip", "ml-1m/"),
        _zip(FIXTURES / "ml-1m", tmp_path / "some.whl", "package/examples/ml-1m/"),
    ]
    outputs = [
        preprocess("ml-1m", source=source, output=tmp_path / str(n))[0]
        for n, source in enumerate(made)
    ]
    first, *others = [_contents(output) for output in outputs]
    assert len(first) == 3
    assert all(other == first for other in others)


def test_a_second_run_has_nothing_to_do(tmp_path, monkeypatch):
    output = tmp_path / "out"
    assert preprocess("ml-100k", source=FIXTURES / "ml-100k", output=output)[2]
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    monkeypatch.setattr(cli, "_convert", _never)
    monkeypatch.setattr(cli, "fetch", _never)
    assert not preprocess("ml-100k", source=FIXTURES / "ml-100k", output=output)[2]
    assert not preprocess("ml-100k", output=output)[2]
    assert {path.name: path.stat().st_mtime_ns for path in output.iterdir()} == before


def _never(*args: object) -> None:
    raise AssertionError("nothing was to be done")


def test_another_source_replaces_the_output_and_its_files(raw, tmp_path):
    source, output = raw("ml-100k"), tmp_path / "out"
    first = preprocess("ml-100k", source=source, output=output)[1]
    with (source / "u.data").open("a") as file:
        file.write("7\t11\t3\t900000099\n")
    _, second, written = preprocess("ml-100k", source=source, output=output)
    assert written
    assert second.num_events == first.num_events + 1
    names = {"manifest.json", *(facts.name for facts in second.files.values())}
    assert {path.name for path in output.iterdir()} == names


def test_a_changed_file_is_noticed_and_made_again(tmp_path):
    output = tmp_path / "out"
    _, manifest, _ = preprocess("ml-100k", source=FIXTURES / "ml-100k", output=output)
    events = output / manifest.files["events"].name
    good = events.read_bytes()
    events.write_bytes(good[:-9] + b"?" + good[-8:])
    assert preprocess("ml-100k", source=FIXTURES / "ml-100k", output=output)[2]
    assert events.read_bytes() == good


@pytest.fixture
def good_output(tmp_path: Path) -> Iterator[Path]:
    """An output folder that must come out of a failing run as it went in."""
    output = tmp_path / "good"
    preprocess("ml-1m", source=FIXTURES / "ml-1m", output=output)
    before = _contents(output)
    yield output
    assert _contents(output) == before
    assert not list(output.glob(".*"))


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.95])
def test_a_cut_archive_is_refused_and_a_retry_works(kept, good_output, tmp_path):
    whole = _zip(FIXTURES / "ml-1m", tmp_path / "whole.zip", "ml-1m/").read_bytes()
    cut = tmp_path / "cut.zip"
    cut.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ValueError, match=r"cut\.zip is cut or damaged .*download it again"):
        preprocess("ml-1m", source=cut, output=good_output)
    with pytest.raises(ValueError, match="is cut or damaged"):
        preprocess("ml-1m", source=cut, output=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    cut.write_bytes(whole)
    assert preprocess("ml-1m", source=cut, output=tmp_path / "new")[2]


def test_a_damaged_member_is_refused(good_output, tmp_path):
    archive = _zip(FIXTURES / "ml-1m", tmp_path / "bad.zip")
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as opened:
        start = opened.getinfo("ratings.dat").header_offset + 30 + len("ratings.dat")
    content[start + 8 : start + 20] = bytes(12)
    archive.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.zip is cut or damaged"):
        preprocess("ml-1m", source=archive, output=good_output)


def test_a_full_disk_leaves_the_earlier_output(raw, good_output):
    """A limit on file sizes stands in for the full disk: writing fails half-way in the same way."""
    source = raw("ml-1m")
    with (source / "ratings.dat").open("a") as file:
        file.writelines(f"7::{n}::3::{n}\n" for n in range(2000))
    program = (
        "import resource, sys; from data.preprocess import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main())"
    )
    arguments = ["--dataset", "ml-1m", "--source", source, "--output", good_output]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        # A coverage collector in the child would hit the limit with its own file.
        env={name: value for name, value in os.environ.items() if "COV" not in name},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: cannot write the output folder {good_output} (")
    assert "free some space" in last
    assert "Traceback" not in done.stderr


def test_an_output_that_cannot_be_made_is_one_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "out"
    code = main(
        ["--dataset", "ml-1m", "--source", str(FIXTURES / "ml-1m"), "--output", str(output)]
    )
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write the output folder {output} (")
    assert "--output" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_output_is_one_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RuntimeError, match="cannot write the output folder .*Permission denied"):
        preprocess("ml-1m", source=FIXTURES / "ml-1m", output=tmp_path / "out")


def test_read_only_is_reported_whoever_runs_this(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "new" / ".partial-x"))

    monkeypatch.setattr(cli.tempfile, "mkdtemp", refuse)
    with pytest.raises(RuntimeError, match=r"cannot write the output folder .*Permission denied"):
        preprocess("ml-1m", source=FIXTURES / "ml-1m", output=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_left_overs_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / ".partial-dead").mkdir()
    (tmp_path / ".partial-dead" / "events.arrow").write_text("half")
    preprocess("ml-1m", source=FIXTURES / "ml-1m", output=tmp_path)
    assert not (tmp_path / ".partial-dead").exists()


def test_two_runs_at_once_do_not_mix(tmp_path):
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(RuntimeError, match="another process is writing"):
            preprocess("ml-1m", source=FIXTURES / "ml-1m", output=tmp_path)
    finally:
        os.close(lock)


@pytest.mark.parametrize(
    ("dataset_name", "fixture", "message"),
    [
        ("ml-100k", "ml-1m", "looks like ml-1m, not ml-100k; use --dataset ml-1m"),
        ("ml-1m", "ml-20m", "looks like ml-20m, not ml-1m"),
        ("ml-20m", "ml-100k-recbole", "looks like ml-100k, not ml-20m"),
    ],
)
def test_a_source_of_another_data_set_is_named(dataset_name, fixture, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        preprocess(dataset_name, source=FIXTURES / fixture, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dataset_name", ["ml-1m", "kuairand-1k"])
def test_a_wrong_command_is_one_message(dataset_name, tmp_path, capsys):
    arguments = ["--dataset", dataset_name, "--source", "/no/such"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --source /no/such does not exist; expected a folder, zip or ta")
    assert error.count("\n") == 1


def test_an_unknown_data_set_names_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--dataset", "ml-10k"])
    assert stopped.value.code == 2
    assert "'ml-10k' (choose from" in capsys.readouterr().err


def test_a_source_without_its_users_file_says_which(raw, tmp_path):
    source = raw("ml-1m")
    (source / "users.dat").unlink()
    with pytest.raises(ValueError, match=r"has ratings\.dat but no users\.dat"):
        preprocess("ml-1m", source=source, output=tmp_path / "out")


def test_both_ways_to_start_it_work_from_anywhere(tmp_path):
    arguments = ["--dataset", "ml-1m", "--source", str(FIXTURES / "ml-1m")]
    script, module = [str(ROOT / "data" / "preprocess.py")], ["-m", "data.preprocess"]
    for n, (command, folder) in enumerate([(script, tmp_path), (module, ROOT)]):
        done = subprocess.run(
            [sys.executable, *command, *arguments, "--output", str(tmp_path / str(n))],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{tmp_path / str(n)}: written (5 events, 3 users, 5 items)\n"
