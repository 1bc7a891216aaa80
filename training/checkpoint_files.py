"""The files of a checkpoint: bytes of tensors, and an index of where each one lies.

torch.distributed.checkpoint plans who writes and reads what; these two are the storage under it.
Its own gives every tensor an archive with a pickle and a checksum inside: for hundreds of small
tensors that takes the interpreter from the training for a tenth of a second and more, and reading
it asks for an unpickler. Here a file is one tensor after the other, checked as a whole by the
CRC-32 that the writer tells.

Reading runs nothing that is written in a checkpoint, which is data, perhaps from elsewhere: the
index alone is a pickle, and may name only the few types it is made of.
"""

import math
import os
import pickle
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_INDEX_NAME = ".metadata"

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",  # so that it can be refused by its entry's name
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its name from Python 3.13 on
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"{_INDEX_NAME} names {module}.{name}, which no checkpoint is made of")


class TensorWriter(FileSystemWriter):
    """Writes this rank's tensors to one file of the folder.

    Attributes:
        crc32: of the file that was written, by its name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.crc32: dict[str, int] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and syncs them.

        Raises:
            TypeError: an entry is no tensor. OSError: it could not be written.
        """
        prefix: _StoragePrefix = plan.storage_data
        name, offset, checksum = f"{prefix.prefix}0.distcp", 0, 0
        results = []
        with (Path(self.path) / name).open("wb", buffering=0) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{item.index.fqn} must be a tensor to be saved, got bytes")
                data = _memory_of(tensor.detach().cpu().contiguous())
                checksum = zlib.crc32(data, checksum)
                rest = data
                while len(rest):
                    rest = rest[file.write(rest) :]
                info = _StorageInfo(name, offset, len(data))
                results.append(
                    WriteResult(index=item.index, size_in_bytes=len(data), storage_data=info)
                )
                offset += len(data)
            os.fsync(file.fileno())
        self.crc32[name] = checksum
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class TensorReader(FileSystemReader):
    """Reads the checkpoint in a folder: tensors, and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of a checkpoint.

        Raises:
            ValueError: it is damaged, names a foreign type, or an entry is no tensor.
        """
        with (Path(self.path) / _INDEX_NAME).open("rb") as file:
            index = _unpickled(file)
        if not isinstance(index, Metadata):
            raise ValueError(f"{_INDEX_NAME} holds {type(index).__name__}, not an index")
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{_INDEX_NAME}: {name} must be a tensor, got other data")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Keeps what the index says of each tensor, for `read_data`."""
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._entries = cast(Mapping[str, TensorStorageMetadata], metadata.state_dict_metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what is asked for, a part of a tensor where the ranks are others now.

        Raises:
            ValueError: index and file do not fit each other. OSError: a file cannot be read.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._place(item.storage_index).relative_path, []).append(item)
        for name, items in by_file.items():
            path = Path(self.path) / name
            if path.parent != Path(self.path):
                raise ValueError(f"{_INDEX_NAME} names {name}, which is outside of the checkpoint")
            with path.open("rb", buffering=0) as file:
                for item in sorted(items, key=lambda one: self._place(one.storage_index).offset):
                    stored = self._read(file, item)
                    part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> _StorageInfo:
        place = self.storage_data.get(index)
        if not isinstance(place, _StorageInfo):
            raise ValueError(f"{_INDEX_NAME} does not say where {index.fqn} lies")
        return place

    def _read(self, file: FileIO, item: ReadItem) -> Tensor:
        """The stored tensor, or the rank's part of one, that an item lies in."""
        index, place = item.storage_index, self._place(item.storage_index)
        if item.type == LoadItemType.BYTE_IO:
            raise ValueError(f"{_INDEX_NAME}: {index.fqn} must be a tensor, got other data")
        entry = self._entries[index.fqn]
        sizes = next(one.sizes for one in entry.chunks if one.offsets == index.offset)
        num_bytes = math.prod(sizes) * entry.properties.dtype.itemsize
        if num_bytes != place.length:
            raise ValueError(
                f"{_INDEX_NAME}: {index.fqn} must have {num_bytes} bytes, got {place.length}"
            )
        if not 0 <= place.offset <= file.seek(0, os.SEEK_END) - num_bytes:
            raise ValueError(f"{place.relative_path} ends inside of {index.fqn}")
        file.seek(place.offset)
        stored = torch.empty(sizes, dtype=entry.properties.dtype)
        data = _memory_of(stored)
        while count := file.readinto(data):
            data = data[count:]
        return stored


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they lie."""
    as_bytes: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(as_bytes)


def _unpickled(file: Any) -> object:
    try:
        return _IndexUnpickler(file).load()
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises whatever its last intact byte led to
        raise ValueError(f"{_INDEX_NAME} is damaged ({type(error).__name__}: {error})") from None
