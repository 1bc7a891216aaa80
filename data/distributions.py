"""Random numbers by hashing, and the distributions of synthetic data drawn from them."""

from __future__ import annotations

import dataclasses

import numpy as np

from configs.schema import RandomDistribution


def mix(keys: np.ndarray) -> np.ndarray:
    """Uniform uint64 from consecutive keys (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def uniform(bits: np.ndarray) -> np.ndarray:
    """Float64 in the open interval (0, 1)."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normal(bits: np.ndarray) -> np.ndarray:
    """Standard normal (Box and Muller 1958) from one uint64 per number."""
    radius = np.sqrt(-2.0 * np.log(uniform(bits)))
    return radius * np.cos(2.0 * np.pi * uniform(mix(bits)))


def bounded(dist: RandomDistribution, limit: int) -> RandomDistribution:
    """The same distribution with `high` filled in."""
    if dist.high is not None:
        return dist
    if dist.low >= limit:
        raise ValueError(f"RandomDistribution.low must be < {limit}, got {dist.low}")
    return dataclasses.replace(dist, high=limit)


def draw(dist: RandomDistribution, bits: np.ndarray) -> np.ndarray:
    """Whole numbers in [low, high), int64, one per uint64."""
    assert dist.high is not None
    if dist.dist_type == "uniform":
        values = np.floor(uniform(bits) * (dist.high - dist.low)) + dist.low
    elif dist.dist_type == "zipf":
        values = dist.low + _zipf(dist.high - dist.low, dist.alpha or 1.5, uniform(bits))
    elif dist.dist_type == "normal":
        assert dist.mean is not None and dist.std is not None
        values = np.round(dist.mean + dist.std * normal(bits))
    else:
        assert dist.mean is not None
        spread = (dist.std or dist.mean / 2) / dist.mean
        log_variance = np.log1p(spread**2)
        log_mean = np.log(dist.mean) - log_variance / 2
        values = np.round(np.exp(log_mean + log_variance**0.5 * normal(bits)))
    return np.clip(values, dist.low, dist.high - 1).astype(np.int64)


def _zipf(count: int, alpha: float, uniform_N: np.ndarray) -> np.ndarray:
    """Ranks 0..count - 1, rank k - 1 with about k ** -alpha: floor of a bounded Pareto draw."""
    tail = (count + 1.0) ** (1.0 - alpha)
    return np.floor((1.0 - uniform_N * (1.0 - tail)) ** (1.0 / (1.0 - alpha))) - 1.0
