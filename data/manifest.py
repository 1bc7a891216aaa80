"""manifest.json: what a preprocessed data set holds. Read without torch, in milliseconds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
DEFAULT_ROOT = Path(__file__).resolve().parent.parent / "datasets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFacts:
    """One file beside the manifest."""

    name: str
    num_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts about a preprocessed data set. Ids are raw, so a table needs max_ids + 1 rows."""

    format_version: int
    dataset_name: str
    item_feature_name: str
    action_feature_name: str
    contextual_feature_names: tuple[str, ...]
    num_users: int
    num_users_without_events: int
    num_items: int
    """Distinct items; ids have gaps, so this is no table size."""
    num_events: int
    max_ids: dict[str, int]
    """Highest id of every feature; the lowest is >= 0."""
    vocab_sizes: dict[str, int]
    """max_ids + 1."""
    vocabularies: dict[str, list[str]]
    """What an id stands for, for features whose ids are indices."""
    num_classes: int
    label_kind: str
    source: dict[str, str]
    """sha256 of each raw file read, by its role."""
    options: dict[str, Any]
    files: dict[str, FileFacts]
    """"events" and "users"."""

    def to_json(self) -> str:
        """The text of manifest.json; equal manifests give equal text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


def default_folder(dataset_name: str) -> Path:
    """Where preprocessing puts a data set unless told otherwise."""
    return DEFAULT_ROOT / dataset_name


def find_dataset(dataset_name: str, dataset_path: str | None = None) -> Path:
    """The folder of a data set: `dataset_path`, its sub-folder of that name, or the default."""
    if dataset_path is None:
        return default_folder(dataset_name)
    below = Path(dataset_path) / dataset_name
    return below if (below / MANIFEST_NAME).is_file() else Path(dataset_path)


def preprocess_command(folder: Path, dataset_name: str) -> str:
    """What fills `folder` with a data set."""
    command = f"python data/preprocess.py --dataset {dataset_name}"
    if folder == DEFAULT_ROOT / dataset_name:
        return command
    return f"{command} --output {folder}"


def read_manifest(path: str | Path, *, dataset_name: str | None = None) -> Manifest:
    """The manifest in folder `path`, its files checked for presence and size.

    Args:
        path: folder of a preprocessed data set.
        dataset_name: what the folder must hold; None accepts any.

    Raises:
        ValueError: no manifest, not ours, another version or data set, a missing or cut file.
    """
    folder = Path(path)
    command = preprocess_command(folder, dataset_name or folder.name)
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.is_file():
        raise ValueError(
            f"DatasetArgs.dataset_path must hold a preprocessed data set, got {folder} "
            f"(no {MANIFEST_NAME}); run {command}"
        )
    manifest = _parse(manifest_path, command)
    if dataset_name is not None and manifest.dataset_name != dataset_name:
        raise ValueError(
            f"DatasetArgs.dataset_name is {dataset_name!r} but {folder} holds "
            f"{manifest.dataset_name!r}; correct DatasetArgs.dataset_path or dataset_name"
        )
    for facts in manifest.files.values():
        file = folder / facts.name
        num_bytes = file.stat().st_size if file.is_file() else None
        if num_bytes != facts.num_bytes:
            found = "is missing" if num_bytes is None else f"has {num_bytes} bytes"
            raise ValueError(
                f"{file} {found}, its manifest says {facts.num_bytes} bytes; run {command}"
            )
    return manifest


def _parse(path: Path, command: str) -> Manifest:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no manifest of a preprocessed data set ({error}); run {command}"
        ) from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version!r}, this version reads {FORMAT_VERSION}; "
            f"run {command}"
        )
    try:
        raw["contextual_feature_names"] = tuple(raw["contextual_feature_names"])
        raw["files"] = {role: FileFacts(**facts) for role, facts in raw["files"].items()}
        return Manifest(**raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); run {command}") from None


def check_contents(folder: Path, manifest: Manifest) -> None:
    """Passes only if the files hold what preprocessing wrote, byte for byte; reads all of them.

    Raises:
        ValueError: a file has other contents, or cannot be read.
    """
    for facts in manifest.files.values():
        path = folder / facts.name
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None
        if found != facts.sha256:
            raise ValueError(
                f"{path} must have the sha256 that its manifest says, {facts.sha256[:16]}..., got "
                f"{found[:16]}...: its contents are damaged; run "
                f"{preprocess_command(folder, manifest.dataset_name)}"
            )


def check_tables(manifest: Manifest, table_sizes: Mapping[str, int]) -> None:
    """Passes only if every id of the data has a row in its table.

    Args:
        manifest: of the data set.
        table_sizes: rows of the table that serves a feature, by feature name.

    Raises:
        ValueError: a feature without a table, or one whose highest id lies outside it.
    """
    for feature, max_id in manifest.max_ids.items():
        if feature not in table_sizes:
            raise ValueError(
                f"no embedding table serves feature {feature!r} of {manifest.dataset_name}; add it "
                f"to EmbeddingArgs.feature_names of a table, or leave DatasetArgs.embedding_args "
                f"out to get tables that fit"
            )
        if max_id >= table_sizes[feature]:
            raise ValueError(
                f"EmbeddingArgs.item_vocab_size_or_capacity for feature {feature!r} must be > its "
                f"highest id {max_id} in {manifest.dataset_name}, got {table_sizes[feature]}; ids "
                f"are raw and have gaps, so set it to at least {max_id + 1}"
            )
