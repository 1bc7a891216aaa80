"""How much faster FP8 linears are than BF16 ones: measured, by backend, recipe and size.

Forward and backward of one linear, everything that quantises included, on one H200. Products grow
as tokens * K * N, casts as tokens * (K + N), and the host costs the same whatever the size: so a
linear that is larger in every way than one that was measured gains at least as much, and nothing
is known of others.
"""

_Size = tuple[int, int, int]

# (backend, recipe): (tokens, K, N): BF16's time over FP8's. K and N may be exchanged: both linears
# of the pair multiply and cast as much.
_MEASURED: dict[tuple[str, str], dict[_Size, float]] = {
    # te.Linear against nn.Linear without bias, torch 2.11, Transformer Engine 2.20
    ("te", "delayed"): {
        (16_384, 256, 1024): 0.22,
        (16_384, 512, 2048): 0.23,
        (16_384, 1024, 4096): 0.61,
        (65_536, 512, 2048): 0.57,
        (65_536, 1024, 1024): 0.67,
        (65_536, 1024, 4096): 1.42,
        (65_536, 2048, 8192): 1.57,
        (65_536, 4096, 16_384): 1.78,
    },
    ("te", "tensorwise"): {
        (16_384, 256, 1024): 0.20,
        (16_384, 512, 2048): 0.22,
        (16_384, 1024, 4096): 0.46,
        (65_536, 512, 2048): 0.56,
        (65_536, 1024, 1024): 0.60,
        (65_536, 1024, 4096): 1.31,
        (65_536, 2048, 8192): 1.38,
        (65_536, 4096, 16_384): 1.62,
    },
    ("te", "blockwise"): {
        (16_384, 256, 1024): 0.22,
        (16_384, 512, 2048): 0.23,
        (16_384, 1024, 4096): 0.52,
        (65_536, 512, 2048): 0.66,
        (65_536, 1024, 1024): 0.57,
        (65_536, 1024, 4096): 1.14,
        (65_536, 2048, 8192): 1.28,
        (65_536, 4096, 16_384): 1.41,
    },
    # the lowest of two runs, of our linear alone and with norm and SiLU, of device time and wall
    # clock, against ours in BF16 (benchmarks/fp8_linear_h200_202612.md)
    ("native", "delayed"): {
        (4096, 2048, 8192): 0.63,
        (4096, 4096, 4096): 0.44,
        (4096, 4096, 16_384): 1.51,
        (16_384, 1024, 4096): 0.57,
        (16_384, 2048, 2048): 0.49,
        (16_384, 2048, 8192): 1.36,
        (16_384, 4096, 4096): 1.52,
        (16_384, 4096, 16_384): 1.70,
        (65_536, 512, 2048): 0.74,
        (65_536, 1024, 1024): 0.79,
        (65_536, 1024, 4096): 1.28,
        (65_536, 2048, 2048): 1.35,
        (65_536, 2048, 8192): 1.56,
        (65_536, 4096, 4096): 1.62,
        (65_536, 4096, 16_384): 1.70,
        (262_144, 256, 1024): 0.60,
        (262_144, 512, 512): 0.68,
        (262_144, 512, 2048): 0.97,
        (262_144, 1024, 1024): 1.00,
        (262_144, 1024, 4096): 1.37,
        (262_144, 2048, 2048): 1.41,
        (262_144, 2048, 8192): 1.53,
    },
    ("native", "tensorwise"): {
        (65_536, 512, 2048): 0.65,
        (65_536, 1024, 4096): 1.14,
        (65_536, 2048, 8192): 1.46,
    },
    ("native", "rowwise"): {
        (65_536, 1024, 1024): 0.86,
        (65_536, 1024, 4096): 1.05,
        (65_536, 2048, 2048): 1.12,
        (65_536, 2048, 8192): 1.24,
    },
    ("native", "blockwise"): {
        (65_536, 1024, 4096): 0.85,
        (65_536, 2048, 2048): 0.90,
        (65_536, 2048, 8192): 1.17,
    },
}


def expected_speedup(
    backend: str, scaling: str, *, tokens: int, width: int, out: int
) -> float | None:
    """Return how much faster than BF16 a linear is at least; below 1 it may be slower.

    The figure is that of the largest measured size that fits into this one in tokens and both
    widths; of several such sizes, none of which fits into another, the lowest. 0 where not even
    the smallest fits.

    Args:
        backend, scaling: as in `LinearRecipe`; None is returned for a pair that was not measured.
        tokens: rows of a step.
        width, out: K and N.
    """
    measured = _MEASURED.get((backend, scaling))
    if measured is None:
        return None
    sizes: dict[_Size, float] = {}
    for size, speedup in measured.items():
        sizes[_ordered(size)] = min(speedup, sizes.get(_ordered(size), speedup))
    asked = _ordered((tokens, width, out))
    inside = [size for size in sizes if _fits(size, asked)]
    largest = [
        size for size in inside if not any(other != size and _fits(size, other) for other in inside)
    ]
    return min((sizes[size] for size in largest), default=0.0)


def _ordered(size: _Size) -> _Size:
    tokens, width, out = size
    return tokens, min(width, out), max(width, out)


def _fits(size: _Size, into: _Size) -> bool:
    return all(own <= other for own, other in zip(size, into, strict=True))


__all__ = ["expected_speedup"]
