"""Turns a raw data set into memory-mappable columns: python data/preprocess.py --dataset NAME.

Writes three files: the events, the users, and last the manifest that makes them a data set. Memory
does not grow with the number of events (data/events.py says how); the disk of the output needs
room for about 40 bytes an event, and for the logs that a tar archive holds.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: its folder is on the path, the root is not
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from configs.datasets import DATASETS, DatasetFacts
from data import kuairand, movielens
from data.arrow_files import write_events, write_users
from data.download import fetch
from data.events import EventSorter
from data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileFacts,
    Manifest,
    default_folder,
    read_manifest,
)
from data.progress import stage
from data.raw_lines import EventReader
from data.sources import KUAIRAND_FLAGS, RawFiles, locate
from data.users import UserTable

logger = logging.getLogger(__name__)

_PARTIAL = ".partial-"
_DOWNLOADS = ".download"
_CHUNK_BYTES = 1 << 20


def preprocess(
    dataset_name: str, *, source: Path | None = None, output: Path | None = None
) -> tuple[Path, Manifest, bool]:
    """Makes the output folder hold the data set.

    Everything is written aside and published by renaming, the manifest last: whatever goes wrong,
    an earlier good output stays as it was.

    Args:
        dataset_name: a key of DATASETS.
        source: folder or archive with the raw files; None fetches them.
        output: folder to fill; None = datasets/<dataset_name> of this project.

    Returns:
        The folder, its manifest, and whether anything had to be written.

    Raises:
        ValueError: raw files that are missing, cut or break their format.
        RuntimeError: the network or the output folder does not let us.
    """
    folder = default_folder(dataset_name) if output is None else output
    existing = _intact_manifest(folder, dataset_name)
    if source is None and existing is not None:
        return folder, existing, False
    downloads = folder / _DOWNLOADS
    with _output_errors(folder), _workspace(folder) as work:
        if source is None:
            source = fetch(dataset_name, downloads)
        raw = locate(dataset_name, source, work)
        checksums = raw.sha256()
        if existing is not None and existing.source == checksums:
            manifest, is_new = existing, False
        else:
            manifest, is_new = _convert(dataset_name, raw, checksums, work), True
            _publish(manifest, work, folder)
        shutil.rmtree(downloads, ignore_errors=True)
    return folder, manifest, is_new


def _convert(dataset_name: str, raw: RawFiles, checksums: dict[str, str], work: Path) -> Manifest:
    """Writes the events and the users into `work`."""
    facts = DATASETS[dataset_name]
    users, sorter, ticks_per_second = _read(dataset_name, raw, facts, work)
    user_ids_U, counts_U = sorter.user_counts()
    if users is None:
        users = UserTable(columns={"user_id": user_ids_U}, vocabularies={})
    with stage("sorting and writing", sorter.num_events, unit="rows") as advance:
        write_events(
            work / "events.arrow",
            sorter.parts(),
            num_events=sorter.num_events,
            ticks_per_second=ticks_per_second,
            advance=advance,
        )
    columns = users.with_events(user_ids_U, counts_U)
    write_users(work / "users.arrow", columns)
    files = {role: _name_by_content(work, role) for role in ("events", "users")}
    return _manifest(dataset_name, facts, sorter, users, columns, checksums, files)


def _read(
    dataset_name: str, raw: RawFiles, facts: DatasetFacts, work: Path
) -> tuple[UserTable | None, EventSorter, int]:
    """The users, if there is a file of them; all events; and in what fraction of a second."""
    users: UserTable | None = None
    layout: kuairand.KuaiRandFormat | movielens.MovieLensFormat
    if facts.label_kind == "bitmask":
        layout = kuairand.KuaiRandFormat(raw.layout)
        if raw.users is not None:
            users = kuairand.read_users(raw.users, raw.layout)
    else:
        layout = movielens.MovieLensFormat(raw.layout, facts)
        if raw.users is not None:
            users = movielens.read_users(dataset_name, raw.users, raw.layout)
    known_users = None if users is None else users.columns["user_id"]
    sorter = EventSorter(work)
    for file in raw.events.values():
        before = sorter.num_events
        reader = EventReader(file, layout, known_users=known_users, users_file=raw.layout.users)
        with stage(f"reading {Path(str(file)).name}", file.num_bytes(), unit="bytes") as advance:
            for block in reader.blocks(advance):
                sorter.add(block)
        if sorter.num_events == before:
            raise ValueError(f"{file} holds no events; it is cut or the wrong file")
        file.release()
    return users, sorter, layout.ticks_per_second


def _intact_manifest(folder: Path, dataset_name: str) -> Manifest | None:
    """The manifest in `folder` if it and its files are complete and unchanged."""
    try:
        manifest = read_manifest(folder, dataset_name=dataset_name)
    except ValueError:
        return None
    intact = all(_sha256(folder / f.name) == f.sha256 for f in manifest.files.values())
    return manifest if intact else None


@contextlib.contextmanager
def _output_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        path = Path(error.filename or folder)
        if path.exists() and folder not in (path, *path.parents):
            raise RuntimeError(f"cannot read {path} ({error.strerror}); check --source") from error
        hint = "choose another folder with --output"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = f"free some space or {hint}"
        raise RuntimeError(
            f"cannot write the output folder {folder} ({error.strerror or error}); {hint}"
        ) from error


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A folder on the disk of the output that is gone afterwards, as is an output it created."""
    with contextlib.ExitStack() as undo:
        for path in reversed((folder, *folder.parents)):  # undone last to first: deepest first
            if not path.exists():
                undo.callback(_remove_if_empty, path)
        folder.mkdir(parents=True, exist_ok=True)
        undo.callback(_remove_if_empty, folder / _DOWNLOADS)
        lock = os.open(folder, os.O_RDONLY)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is writing to {folder}; wait for it") from None
        for left_over in folder.glob(f"{_PARTIAL}*"):  # of a killed run: we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        yield work


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty: that is a success
        folder.rmdir()


def _name_by_content(work: Path, role: str) -> FileFacts:
    """Renames a file after its content: a new version never overwrites what a manifest names."""
    path = work / f"{role}.arrow"
    digest = _sha256(path)
    path = path.rename(work / f"{role}-{digest[:12]}.arrow")
    return FileFacts(name=path.name, num_bytes=path.stat().st_size, sha256=digest)


def _publish(manifest: Manifest, work: Path, folder: Path) -> None:
    draft = work / MANIFEST_NAME
    with draft.open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    names = {facts.name for facts in manifest.files.values()}
    for name in names:
        os.replace(work / name, folder / name)
    os.replace(draft, folder / MANIFEST_NAME)
    for role in manifest.files:
        for path in folder.glob(f"{role}-*.arrow"):
            if path.name not in names:
                path.unlink()


def _manifest(
    dataset_name: str,
    facts: DatasetFacts,
    sorter: EventSorter,
    users: UserTable,
    columns: Mapping[str, np.ndarray],
    checksums: dict[str, str],
    files: dict[str, FileFacts],
) -> Manifest:
    is_mask = facts.label_kind == "bitmask"
    max_ids = {
        facts.item_feature_name: sorter.max_item_id,
        facts.action_feature_name: (1 << facts.num_classes) - 1
        if is_mask
        else facts.num_classes - 1,
    }
    for name in facts.contextual_feature_names:
        max_ids[name] = int(columns[name].max())
        if name in users.vocabularies:
            max_ids[name] = len(users.vocabularies[name]) - 1
    options: dict[str, object] = {"label_bits": list(KUAIRAND_FLAGS)}
    if not is_mask:
        options = {"first_rating": facts.first_rating, "rating_step": facts.rating_step}
    return Manifest(
        format_version=FORMAT_VERSION,
        dataset_name=dataset_name,
        item_feature_name=facts.item_feature_name,
        action_feature_name=facts.action_feature_name,
        contextual_feature_names=facts.contextual_feature_names,
        num_users=len(columns["user_id"]),
        num_users_without_events=int((columns["event_count"] == 0).sum()),
        num_items=sorter.num_items,
        num_events=sorter.num_events,
        max_ids=max_ids,
        vocab_sizes={name: max_id + 1 for name, max_id in max_ids.items()},
        vocabularies=dict(users.vocabularies),
        num_classes=facts.num_classes,
        label_kind=facts.label_kind,
        source=checksums,
        options=options,
        files=files,
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: exit status 0, or 2 after one message on standard error."""
    parser = argparse.ArgumentParser(prog="preprocess.py", description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, choices=sorted(DATASETS))
    parser.add_argument("--source", type=Path, help="folder or archive; default: fetch it")
    parser.add_argument("--output", type=Path, help="default: datasets/<dataset>")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        folder, manifest, written = preprocess(
            arguments.dataset, source=arguments.source, output=arguments.output
        )
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    state = "written" if written else "up to date"
    sys.stdout.write(
        f"{folder}: {state} ({manifest.num_events} events, {manifest.num_users} users, "
        f"{manifest.num_items} items)\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
