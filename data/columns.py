"""Columns of a preprocessed file, mapped into memory and held against what its manifest says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa


class ColumnFile:
    """The whole-number columns of one Arrow file, by name; they stay on disk.

    Args:
        path: the file.
        names: columns it must have.
        num_rows: rows it must have.
        way_out: what to do about a damaged file.

    Raises:
        ValueError: the file is damaged.
    """

    def __init__(self, path: Path, names: Sequence[str], *, num_rows: int, way_out: str) -> None:
        self._path, self._way_out = path, way_out
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
            table.validate()
            self._columns = {name: _array(table.column(name)) for name in names}
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path} is damaged ({reason}); {way_out}") from None
        for name, values_N in self._columns.items():
            if values_N.dtype.kind != "i" or len(values_N) != num_rows:
                found = f"{len(values_N)} of {values_N.dtype}"
                raise self.damaged(name, f"must hold {num_rows} whole numbers", found)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]

    def damaged(self, name: str, rule: str, value: object) -> ValueError:
        """The error that says what is wrong with a column."""
        return ValueError(f"{self._path} is damaged: {name} {rule}, got {value}; {self._way_out}")

    def check_range(self, name: str, high: int) -> None:
        """Passes only if every value lies in [0, high]: a lookup would read 0 for another id.

        Raises:
            ValueError: the first kind of value that does not.
        """
        values_N = self._columns[name]
        for value in (values_N.min(initial=0), values_N.max(initial=0)):
            if not 0 <= value <= high:
                raise self.damaged(name, f"must lie in [0, {high}]", value)


def _array(chunks: pa.ChunkedArray) -> np.ndarray:
    # Preprocessing writes one chunk; only then is the array the file itself.
    array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    return array.to_numpy(zero_copy_only=chunks.num_chunks == 1)
