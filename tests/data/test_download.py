from __future__ import annotations

import hashlib
import http.server
import re
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import download as module
from data.download import Archive, download
from data.preprocess import preprocess
from tests.data.conftest import FIXTURES

BODY = bytes(range(256)) * 2000
MD5 = hashlib.md5(BODY).hexdigest()


class Publisher:
    """What a server on this machine answers, and what it was asked."""

    def __init__(self) -> None:
        self.body = BODY
        self.etag: str | None = '"v1"'
        self.modified: str | None = None
        self.status: int | None = None
        self.knows_ranges = True
        self.cuts: list[int] = []
        """Bytes after which the next connections end."""
        self.wrong_range = False
        self.asked: list[str | None] = []
        self.sent = 0
        self.url = ""

    def archive(self, md5: str = MD5) -> Archive:
        return Archive(url=f"{self.url}/x.zip", md5=md5)


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    it = Publisher()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            it.asked.append(asked)
            start = 0
            condition = self.headers.get("If-Range")
            if asked and it.knows_ranges and condition in (None, it.etag, it.modified):
                start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            if start and start >= len(it.body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(it.body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(it.status or (206 if start else 200))
            body = it.body[start:]
            if start:
                shown = start + 1 if it.wrong_range else start
                self.send_header(
                    "Content-Range", f"bytes {shown}-{len(it.body) - 1}/{len(it.body)}"
                )
            self.send_header("Content-Length", str(len(body)))
            for name, value in (("ETag", it.etag), ("Last-Modified", it.modified)):
                if value:
                    self.send_header(name, value)
            self.end_headers()
            body = body[: it.cuts.pop(0)] if it.cuts else body
            it.sent += len(body)
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    it.url = f"http://127.0.0.1:{server.server_port}"
    yield it
    server.shutdown()
    server.server_close()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_file_comes_in_one_piece(publisher, tmp_path):
    path = download(publisher.archive(), tmp_path)
    assert path.read_bytes() == BODY
    assert _names(tmp_path) == ["x.zip"]
    assert publisher.asked == [None]
    assert download(publisher.archive(), tmp_path) == path
    assert publisher.asked == [None]


def test_a_cut_connection_is_taken_up_where_it_ended(publisher, tmp_path):
    publisher.cuts = [200_000, 50_000]
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY
    assert publisher.asked == [None, "bytes=200000-", "bytes=250000-"]
    assert publisher.sent == len(BODY)


@pytest.mark.parametrize("validator", ["etag", "modified", "none", "weak"])
def test_a_later_run_goes_on_where_this_one_ended(validator, publisher, tmp_path):
    publisher.etag = {"etag": '"v1"', "weak": 'W/"v1"'}.get(validator)
    publisher.modified = "Sat, 05 Nov 2022 07:00:00 GMT" if validator == "modified" else None
    publisher.cuts = [200_000, 0]
    message = r"the connection ended after 200000 of 512000 bytes; 200000 bytes are kept\); run it"
    with pytest.raises(RuntimeError, match=message):
        download(publisher.archive(), tmp_path)
    assert _names(tmp_path) == ["facts-x.zip.part", "x.zip.part"]
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY
    assert publisher.asked[-1] == "bytes=200000-"
    assert publisher.sent == len(BODY)
    assert _names(tmp_path) == ["x.zip"]


def test_a_file_that_changed_meanwhile_is_fetched_anew(publisher, tmp_path):
    publisher.cuts = [200_000, 0]
    with pytest.raises(RuntimeError, match="are kept"):
        download(publisher.archive(), tmp_path)
    publisher.body, publisher.etag = BODY[::-1], '"v2"'
    md5 = hashlib.md5(publisher.body).hexdigest()
    assert download(publisher.archive(md5), tmp_path).read_bytes() == publisher.body


def test_a_server_that_only_sends_whole_files_is_no_endless_loop(publisher, tmp_path):
    publisher.knows_ranges = False
    publisher.cuts = [200_000, 200_000]
    with pytest.raises(RuntimeError, match="ended after 200000 of 512000"):
        download(publisher.archive(), tmp_path)
    assert len(publisher.asked) == 2
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY


def test_another_range_than_asked_for_is_refused(publisher, tmp_path):
    publisher.cuts, publisher.wrong_range = [200_000], True
    with pytest.raises(RuntimeError, match="another range than it was asked for"):
        download(publisher.archive(), tmp_path)
    publisher.wrong_range = False
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("case", ["at once", "at the end"])
def test_wrong_bytes_are_removed_and_a_rerun_starts_clean(case, publisher, tmp_path):
    wrong = b"!" + BODY[1:]
    publisher.body = wrong
    if case == "at the end":
        publisher.cuts = [200_000]
    found = hashlib.md5(wrong).hexdigest()
    with pytest.raises(RuntimeError, match=f"has the md5 {found}, not {MD5}, and was removed"):
        download(publisher.archive(), tmp_path)
    assert _names(tmp_path) == []
    publisher.body = BODY
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY
    assert publisher.asked[-1] is None


def test_a_part_longer_than_the_file_starts_anew(publisher, tmp_path):
    publisher.cuts = [200_000, 0]
    with pytest.raises(RuntimeError, match="are kept"):
        download(publisher.archive(), tmp_path)
    (tmp_path / "x.zip.part").write_bytes(bytes(len(BODY) + 10))
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY
    assert publisher.asked[-2:] == [f"bytes={len(BODY) + 10}-", None]


def test_a_whole_part_is_not_fetched_again(publisher, tmp_path):
    publisher.cuts = [200_000, 0]
    with pytest.raises(RuntimeError, match="are kept"):
        download(publisher.archive(), tmp_path)
    (tmp_path / "x.zip.part").write_bytes(BODY)
    sent = publisher.sent
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY
    assert publisher.sent == sent


def test_a_part_of_another_address_or_without_facts_is_not_used(publisher, tmp_path):
    (tmp_path / "x.zip.part").write_bytes(b"from elsewhere")
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY
    assert publisher.asked == [None]
    (tmp_path / "x.zip").unlink()
    (tmp_path / "x.zip.part").write_bytes(b"from elsewhere")
    (tmp_path / "facts-x.zip.part").write_text('{"url": "http://a/x.zip", "validator": null}')
    assert download(publisher.archive(), tmp_path).read_bytes() == BODY
    assert publisher.asked == [None, None]


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_refusal_keeps_nothing_and_says_why(status, publisher, tmp_path):
    publisher.status = status
    with pytest.raises(RuntimeError, match=rf"cannot fetch {publisher.url}.*HTTP status {status}"):
        download(publisher.archive(), tmp_path)
    assert _names(tmp_path) == []


def test_nobody_listening_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(RuntimeError, match="cannot fetch http://127.0.0.1:9/x.zip"):
        download(Archive(url="http://127.0.0.1:9/x.zip", md5=MD5), tmp_path)


@pytest.fixture
def data_set(publisher, tmp_path, monkeypatch) -> Publisher:
    """ml-1m and ml-100k come from the publisher on this machine; the body is the ml-1m fixture."""
    target = tmp_path / "made.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted((FIXTURES / "ml-1m").iterdir()):
            archive.write(path, f"ml-1m/{path.name}")
    publisher.body = target.read_bytes()
    md5 = hashlib.md5(publisher.body).hexdigest()
    for name in ("ml-1m", "ml-100k"):
        monkeypatch.setitem(module.ARCHIVES, name, publisher.archive(md5))
    return publisher


def test_preprocessing_fetches_and_leaves_no_download(data_set, tmp_path):
    output, manifest, written = preprocess("ml-1m", output=tmp_path / "out")
    assert written
    assert manifest.num_events == 5
    names = {"manifest.json", *(facts.name for facts in manifest.files.values())}
    assert set(_names(output)) == names


def test_preprocessing_goes_on_with_a_cut_download(data_set, tmp_path):
    data_set.cuts = [100, 0]
    with pytest.raises(RuntimeError, match="100 bytes are kept.*pass it with --source"):
        preprocess("ml-1m", output=tmp_path / "out")
    assert _names(tmp_path / "out") == [".download"]
    preprocess("ml-1m", output=tmp_path / "out")
    assert data_set.asked[-1] == "bytes=100-"
    assert data_set.sent == len(data_set.body)
    assert len(_names(tmp_path / "out")) == 3


def test_a_download_survives_a_failure_after_it(data_set, tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.preprocess._convert", full)
    with pytest.raises(RuntimeError, match="No space left on device.*free some space"):
        preprocess("ml-1m", output=tmp_path / "out")
    assert _names(tmp_path / "out" / ".download") == ["x.zip"]
    monkeypatch.undo()
    monkeypatch.setitem(module.ARCHIVES, "ml-1m", data_set.archive(_md5(data_set.body)))
    preprocess("ml-1m", output=tmp_path / "out")
    assert len(data_set.asked) == 1


def _md5(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()


def test_a_login_page_leaves_nothing(data_set, tmp_path):
    data_set.body = b"<html>please log in</html>"
    with pytest.raises(RuntimeError, match="was removed.*elsewhere and pass it with --source"):
        preprocess("ml-1m", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ml_100k_falls_back_to_the_published_package(data_set, tmp_path, monkeypatch):
    wheel = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (FIXTURES / "ml-100k-recbole").iterdir():
            archive.write(path, f"recbole/dataset_example/ml-100k/{path.name}")
    data_set.body = b"nothing"
    commands = []

    def pip(command: list[str], **kwargs: object) -> None:
        commands.append(command)
        shutil.copy(wheel, command[command.index("--dest") + 1])

    monkeypatch.setattr(module.subprocess, "run", pip)
    output, manifest, _ = preprocess("ml-100k", output=tmp_path / "out")
    assert manifest.num_events == 5
    assert commands[0][-1] == "recbole==1.2.1"
    assert "--no-deps" in commands[0]
    assert len(_names(output)) == 3


def test_no_network_at_all_says_what_to_do(data_set, tmp_path, monkeypatch):
    def pip(command: list[str], **kwargs: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="...\nERROR: no such version\n")

    data_set.body = b"nothing"
    monkeypatch.setattr(module.subprocess, "run", pip)
    with pytest.raises(RuntimeError, match=r"ERROR: no such version.*pass it with --source"):
        preprocess("ml-100k", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
