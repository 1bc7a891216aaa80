"""What the raw files of each data set are called, and where they are in what a user has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from configs.datasets import DATASETS
from data.archives import RawFile, index, is_archive
from data.progress import stage

KUAIRAND_FLAGS = (
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "is_profile_enter",
)
"""Columns of KuaiRand's logs that make the label mask, bit 0 first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How one publisher names and formats the files of a data set."""

    events: Mapping[str, str]
    """Names of the files with events by role; equal times keep this order."""
    users: str | None
    separator: str
    users_separator: str = ""
    events_columns: tuple[str, ...]
    """Columns in file order; with a header, the names that it must contain."""
    users_columns: tuple[str, ...] = ()
    has_header: bool = False

    @property
    def file_names(self) -> tuple[str, ...]:
        """All files that are read."""
        return (*self.events.values(), *filter(None, (self.users,)))


_TAGGED = ("user_id", "item_id", "rating", "timestamp")


def _kuairand(version: str, *, num_log_parts: int = 1) -> tuple[Layout, ...]:
    """KuaiRand; its large version has each log in parts."""
    logs = [f"log_standard_{dates}_{version}" for dates in ("4_08_to_4_21", "4_22_to_5_08")]
    if num_log_parts > 1:
        logs = [f"{log}_part{part}" for log in logs for part in range(1, num_log_parts + 1)]
    return (
        Layout(
            events={log: f"{log}.csv" for log in logs},
            users=f"user_features_{version}.csv",
            separator=",",
            users_separator=",",
            events_columns=("user_id", "video_id", "time_ms", *KUAIRAND_FLAGS),
            users_columns=DATASETS["kuairand-pure"].contextual_feature_names,
            has_header=True,
        ),
    )


LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "ml-100k": (
        Layout(
            events={"ratings": "u.data"},
            users="u.user",
            separator="\t",
            users_separator="|",
            events_columns=_TAGGED,
            users_columns=("user_id", "age", "sex", "occupation", "zip"),
        ),
        Layout(
            events={"ratings": "ml-100k.inter"},
            users="ml-100k.user",
            separator="\t",
            users_separator="\t",
            events_columns=_TAGGED,
            users_columns=("user_id", "age", "gender", "occupation", "zip_code"),
            has_header=True,
        ),
    ),
    "ml-1m": (
        Layout(
            events={"ratings": "ratings.dat"},
            users="users.dat",
            separator="::",
            users_separator="::",
            events_columns=_TAGGED,
            users_columns=("user_id", "sex", "age", "occupation", "zip"),
        ),
    ),
    "ml-20m": (
        Layout(
            events={"ratings": "ratings.csv"},
            users=None,
            separator=",",
            events_columns=("userId", "movieId", "rating", "timestamp"),
            has_header=True,
        ),
    ),
    "kuairand-pure": _kuairand("pure"),
    "kuairand-1k": _kuairand("1k"),
    "kuairand-27k": _kuairand("27k", num_log_parts=2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawFiles:
    """The raw files of one data set."""

    layout: Layout
    events: Mapping[str, RawFile]
    """By role, as in the layout."""
    users: RawFile | None

    def sha256(self) -> dict[str, str]:
        """Checksums by role."""
        files = dict(self.events)
        if self.users is not None:
            files["users"] = self.users
        num_bytes = sum(file.num_bytes() for file in files.values())
        with stage("checking the raw files", num_bytes, unit="bytes") as advance:
            return {role: file.sha256(advance) for role, file in files.items()}


def locate(dataset_name: str, source: Path, work: Path) -> RawFiles:
    """The raw files of `dataset_name` in `source`: a folder, an archive, or a file with events.

    Args:
        dataset_name: a key of LAYOUTS.
        source: where to look.
        work: where files of a tar archive are unpacked.

    Raises:
        ValueError: nothing there, a damaged archive, another data set, or a file short.
    """
    if not source.exists():
        raise ValueError(f"--source {source} does not exist; {_expected(dataset_name)}")
    if source.is_file() and not is_archive(source):
        source = source.parent
    layouts = LAYOUTS[dataset_name]
    found = index(source, {name for layout in layouts for name in layout.file_names}, work)
    for layout in layouts:
        present = [name for name in layout.events.values() if name in found]
        if not present:
            continue
        missing = [name for name in layout.file_names if name not in found]
        if missing:
            raise ValueError(
                f"{source} has {present[0]} but no {', '.join(missing)}; "
                f"add {'that file' if len(missing) == 1 else 'these files'}"
            )
        return RawFiles(
            layout=layout,
            events={role: found[name] for role, name in layout.events.items()},
            users=None if layout.users is None else found[layout.users],
        )
    for other, other_layouts in LAYOUTS.items():
        if any(name in found for layout in other_layouts for name in layout.events.values()):
            raise ValueError(
                f"{source} looks like {other}, not {dataset_name}; use --dataset {other} or "
                f"another --source ({_expected(dataset_name)})"
            )
    raise ValueError(f"{source} holds no {dataset_name}; {_expected(dataset_name)}")


def _expected(dataset_name: str) -> str:
    names = [" and ".join(layout.file_names) for layout in LAYOUTS[dataset_name]]
    return f"expected a folder, zip or tar.gz with {', or '.join(names)}"
