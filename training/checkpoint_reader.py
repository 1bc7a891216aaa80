"""Reads checkpoint files without running anything that is written in them.

torch.distributed.checkpoint keeps its index as a pickle, which may name any function to be called,
and reads entries that are no tensors with the unrestricted unpickler. A checkpoint is data, perhaps
from elsewhere: the index may name the few types it is made of, and entries must be tensors (their
bytes are read with ``weights_only``, by torch).
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

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


def _unpickled(file: Any) -> object:
    try:
        return _IndexUnpickler(file).load()
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises whatever its last intact byte led to
        raise ValueError(f"{_INDEX_NAME} is damaged ({type(error).__name__}: {error})") from None
