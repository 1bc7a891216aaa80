"""The logarithmic time buckets as integer boundaries, so that every backend agrees exactly."""

import math
from functools import lru_cache

import torch
from torch import Tensor

_LOG_WIDTH = 0.301  # natural-log width of a bucket, as in HSTU's public implementation
_INT64_MAX = 2**63 - 1


@lru_cache(maxsize=8)
def time_bucket_boundaries(num_time_buckets: int, device: torch.device) -> Tensor:
    """Return the smallest elapsed time of buckets 1, 2, ..., (num_time_buckets - 1,) int64.

    `torch.bucketize(elapsed, boundaries, right=True)` is then
    min(floor(ln(max(elapsed, 1)) / 0.301), num_time_buckets - 1) without a logarithm.
    """
    boundaries = []
    for bucket in range(1, num_time_buckets):
        exponent = _LOG_WIDTH * bucket
        boundaries.append(math.ceil(math.exp(exponent)) if exponent < 43.6 else _INT64_MAX)
    return torch.tensor(boundaries, dtype=torch.int64, device=device)
