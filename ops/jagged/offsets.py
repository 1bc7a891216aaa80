"""Offsets of packed sequences: checks, conversions and the 32-bit index guard."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def check_offsets(offsets: Tensor, *, num_rows: int, name: str = "seq_offsets") -> None:
    """Raise ValueError unless offsets (B + 1,) start at 0, never fall and end within num_rows.

    Values are read only from CPU tensors, so that a GPU step does not wait for the check.
    """
    if offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(f"{name} must have shape (B + 1,), got {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {offsets.dtype}")
    if offsets.device.type != "cpu":
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"{name} must start at 0, got {first}")
    if bool((torch.diff(offsets) < 0).any()):
        user = int((torch.diff(offsets) < 0).nonzero()[0])
        raise ValueError(
            f"{name} must not fall, got {int(offsets[user])} then {int(offsets[user + 1])} "
            f"for user {user}"
        )
    if last > num_rows:
        raise ValueError(f"{name} ends at {last}, past the {num_rows} rows it describes")


def check_counts(counts: Tensor, *, name: str, num_users: int) -> None:
    """Raise ValueError unless counts is (B,) of integers, on a CPU tensor also none negative."""
    if counts.shape != (num_users,):
        raise ValueError(f"{name} must have shape ({num_users},), got {tuple(counts.shape)}")
    if counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {counts.dtype}")
    if counts.device.type == "cpu" and bool((counts < 0).any()):
        raise ValueError(f"{name} must not be negative, got {int(counts.min())}")


def lengths_to_offsets(lengths_B: Tensor) -> Tensor:
    """Return the offsets (B + 1,), int64, of sequences of the given lengths (B,)."""
    offsets = lengths_B.new_zeros(lengths_B.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths_B, 0, out=offsets[1:])
    return offsets


def int32_offsets(offsets: Tensor, *, name: str = "seq_offsets") -> Tensor:
    """Return offsets as int32 for a kernel that asks for it, after a range check on the CPU.

    Raises:
        ValueError: the last offset does not fit (read only from CPU tensors).
    """
    if offsets.dtype == torch.int32:
        return offsets
    if offsets.device.type == "cpu" and offsets.numel() and int(offsets[-1]) > INT32_MAX:
        raise ValueError(
            f"{name} ends at {int(offsets[-1])}, which does not fit the int32 offsets of this "
            f"kernel (at most {INT32_MAX}); lower the batch size or max_history_seqlen"
        )
    return offsets.to(torch.int32)


def require_32bit_indexing(shape: Sequence[int], *, name: str, kernel: str) -> None:
    """Raise NotImplementedError when a tensor of this shape overflows 32-bit element indices.

    A pure function of sizes: kernels that index with 32 bits call it before they launch.
    """
    num_elements = math.prod(shape)
    if num_elements > INT32_MAX:
        sizes = " x ".join(str(size) for size in shape)
        raise NotImplementedError(
            f"{kernel} indexes with 32 bits: {name} of {sizes} = {num_elements} elements exceeds "
            f"{INT32_MAX}; lower the batch size or max_history_seqlen, or set "
            'NetworkArgs.kernel_backend = "pytorch"'
        )
