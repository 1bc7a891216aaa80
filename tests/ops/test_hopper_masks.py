"""Tiles and masks of the Gluon kernels, on a CPU: their own integer code, run as Python.

Gluon has no interpreter, but what decides which pairs are met is integer arithmetic. The source of
those functions is executed on 32-bit integers that wrap and divide as the device does; every
visible pair must be met exactly once and no hidden one ever. The FP8 kernels' tiles start at
multiples of their sizes.
"""

import ast
import inspect
import random
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ops.hstu_attention.reference import visible
from ops.hstu_attention.spec import AttentionSpec

triton_kernels = pytest.importorskip("ops.hstu_attention.triton_kernels")
hopper_kernels = pytest.importorskip("ops.hstu_attention.hopper_kernels")
hopper_fp8_kernels = pytest.importorskip("ops.hstu_attention.hopper_fp8_kernels")
hopper_fp8_keys_wide = pytest.importorskip("ops.hstu_attention.hopper_fp8_keys_wide")

ROW_TILES = ((128, 128), (128, 64))  # rows of a block, keys of a tile: forward, hopper_rows
# keys of a block, rows of a tile: hopper_keys and hopper_keys_wide, and the FP8 ones
KEY_TILES = ((128, 64), (64, 64))
FP8_KEY_TILES = ((128, 64), (128, 128))


class Int32:
    """Integers of the device: 32 bits that wrap, division that truncates."""

    __array_priority__ = 1000

    def __init__(self, values: Any) -> None:
        self.values = (np.asarray(values).astype(np.int64) + 2**31) % 2**32 - 2**31

    def __add__(self, other: Any) -> "Int32":
        return Int32(self.values + _plain(other))

    def __sub__(self, other: Any) -> "Int32":
        return Int32(self.values - _plain(other))

    def __mul__(self, other: Any) -> "Int32":
        return Int32(self.values * _plain(other))

    def __floordiv__(self, other: Any) -> "Int32":
        divisor = _plain(other)
        quotient = np.abs(self.values) // np.abs(divisor)
        return Int32(np.where((self.values < 0) != (divisor < 0), -quotient, quotient))

    def __mod__(self, other: Any) -> "Int32":
        return self - self // other * other

    def __lt__(self, other: Any) -> "Flags":
        return Flags(self.values < _plain(other))

    def __le__(self, other: Any) -> "Flags":
        return Flags(self.values <= _plain(other))

    def __gt__(self, other: Any) -> "Flags":
        return Flags(self.values > _plain(other))

    def __ge__(self, other: Any) -> "Flags":
        return Flags(self.values >= _plain(other))

    def __eq__(self, other: object) -> "Flags":  # type: ignore[override]
        return Flags(self.values == _plain(other))

    def __int__(self) -> int:
        return int(self.values)


class Flags:
    """Booleans of the device."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, dtype=bool)

    def __and__(self, other: "Flags") -> "Flags":
        return Flags(self.values & other.values)

    def __or__(self, other: "Flags") -> "Flags":
        return Flags(self.values | other.values)

    def to(self, dtype: object) -> Int32:
        """As integers."""
        return Int32(self.values)


def _plain(x: Any) -> Any:
    return x.values if isinstance(x, (Int32, Flags)) else np.asarray(x, dtype=np.int64)


def _where(condition: Flags, chosen: Any, other: Any) -> Any:
    values = np.where(condition.values, _plain(chosen), _plain(other))
    is_flag = isinstance(chosen, Flags) or isinstance(other, Flags)
    return Flags(values) if is_flag else Int32(values)


def _load_functions(names: dict[Any, tuple[str, ...]]) -> SimpleNamespace:
    language = SimpleNamespace(
        where=_where,
        minimum=lambda a, b: Int32(np.minimum(_plain(a), _plain(b))),
        maximum=lambda a, b: Int32(np.maximum(_plain(a), _plain(b))),
        abs=lambda a: Int32(np.abs(_plain(a))),
        int32=None,
    )
    namespace: dict[str, Any] = {"tl": language, "gl": language, "ROWS": 128}
    for module, functions in names.items():
        for name in functions:
            tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(module, name).fn)))
            function = tree.body[0]
            assert isinstance(function, ast.FunctionDef)
            function.decorator_list = []
            for argument in function.args.args:
                argument.annotation = None
            exec(compile(tree, name, "exec"), namespace)  # our own source
    return SimpleNamespace(**{name: x for name, x in namespace.items() if callable(x)})


_PLAIN = ("_cdiv", "_position", "_visible", "_keys_of_rows", "_masked_tile", "_rows_of_keys")
_HOPPER = ("first_key", "seen_by_rows", "seen_by_columns", "first_row")
KERNEL = _load_functions({triton_kernels: _PLAIN, hopper_kernels: _HOPPER})
KERNEL.keys_of_rows, KERNEL.rows_of_keys = KERNEL._keys_of_rows, KERNEL._rows_of_keys
FP8_KERNEL = _load_functions(
    {
        triton_kernels: _PLAIN,
        hopper_kernels: _HOPPER,
        hopper_fp8_kernels: ("keys_of_rows", "rows_of_keys", "seen_by_rows"),
        hopper_fp8_keys_wide: ("_first_row",),
    }
)


def _rule(case: SimpleNamespace) -> SimpleNamespace:
    spec = case.spec
    return SimpleNamespace(
        causal=spec.is_causal,
        has_contextuals=True,
        contextual_rows_see_all=not spec.disable_contextual_mask,
        has_candidates=spec.is_causal,
        has_window=spec.attention_window is not None,
    )


def _met_by_rows(
    kernel: SimpleNamespace, case: SimpleNamespace, block: int, keys: int
) -> np.ndarray:
    """How often forward and hopper_rows meet each pair."""
    n, rule = case.n, _rule(case)
    shape = [Int32(x) for x in (n, case.c, case.m, case.group, case.window)]
    _, c, m, group, window = shape
    met = np.zeros((n, n), dtype=int)
    for first_row in range(0, n, block):
        full, front, start, main, candidates, others = kernel.keys_of_rows(
            Int32(first_row), *shape, block, keys, rule
        )
        masked = front + main + others
        assert int(masked + full) >= 1
        row = Int32(np.arange(block)[:, None] + first_row)
        own = min(block, n - first_row)
        for tile in range(int(masked + full)):
            key0, end = kernel.first_key(
                Int32(tile), masked, front, start, main, candidates, m, Int32(n), keys, rule
            )
            first = int(key0)
            assert 0 <= first < n
            assert kernel is KERNEL or first % keys == 0
            seen = np.ones((block, keys), dtype=bool)
            if tile < int(masked):
                col = Int32(np.arange(keys)[None, :] + first)
                flags = kernel.seen_by_rows(row, col, end, c, m, group, window, rule)
                seen &= flags.values
            assert not seen[:own, n - first :].any(), "a column past the end"
            width = min(keys, n - first)
            met[first_row : first_row + own, first : first + width] += seen[:own, :width]
    return met


def _met_by_keys(
    kernel: SimpleNamespace, case: SimpleNamespace, block: int, rows: int
) -> np.ndarray:
    """How often hopper_keys meets each pair."""
    n, rule = case.n, _rule(case)
    shape = [Int32(x) for x in (n, case.c, case.m, case.group, case.window)]
    length, c, m, group, window = shape
    met = np.zeros((n, n), dtype=int)
    for key0 in range(0, n, block):
        front, start, around, full_start, full, last_start, last = kernel.rows_of_keys(
            Int32(key0), *shape, rows, block, rule
        )
        masked = front + around + last
        assert int(masked + full) >= 1
        col = Int32(np.arange(block)[:, None] + key0)
        own = min(block, n - key0)
        first_row = kernel.first_row if rows == 64 else kernel._first_row
        for tile in range(int(masked + full)):
            first = int(
                first_row(Int32(tile), masked, front, start, around, full_start, last_start)
            )
            assert 0 <= first < n
            assert kernel is KERNEL or first % rows == 0
            seen = np.ones((block, rows), dtype=bool)
            if tile < int(masked):
                row = Int32(np.arange(rows)[None, :] + first)
                flags = kernel.seen_by_columns(row, col, length, c, m, group, window, rule)
                seen &= flags.values
            assert not seen[:own, n - first :].any(), "a row past the end"
            height = min(rows, n - first)
            met[first : first + height, key0 : key0 + own] += seen[:own, :height].T
    return met


def _cases(count: int) -> list[SimpleNamespace]:
    draws = random.Random(7)
    edges = (0, 1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257)
    cases: list[SimpleNamespace] = []
    while len(cases) < count:
        c, h, t = (draws.choice((0, draws.choice(edges), draws.randint(0, 250))) for _ in "cht")
        causal = draws.random() < 0.8
        if not causal:
            h, t = h + t, 0
        if not c + h + t:
            continue
        window = draws.choice((None, None, 1, 3, 64, 65, 128, draws.randint(1, 500)))
        spec = AttentionSpec(
            max_seq_len=c + h + t,
            scaling_seqlen=1.0,
            is_causal=causal,
            disable_contextual_mask=draws.random() < 0.4,
            target_group_size=draws.choice((1, 2, 5, 33, 64, 100, 10**6)),
            attention_window=window,
        )
        cases.append(
            SimpleNamespace(
                n=c + h + t,
                c=c,
                h=h,
                t=t,
                m=c + h,
                group=spec.target_group_size,
                window=window or 0,
                spec=spec,
            )
        )
    return cases


@pytest.mark.parametrize("seed", range(4))
def test_every_visible_pair_is_met_once_and_no_other(seed: int) -> None:
    for case in _cases(160)[seed::4]:
        expected = visible(case.c, case.h, case.t, case.spec).numpy().astype(int)
        for kernel, key_tiles in ((KERNEL, KEY_TILES), (FP8_KERNEL, FP8_KEY_TILES)):
            for block, keys in ROW_TILES:
                met = _met_by_rows(kernel, case, block, keys)
                assert np.array_equal(met, expected), ("rows", block, keys, case)
            for block, rows in key_tiles:
                met = _met_by_keys(kernel, case, block, rows)
                assert np.array_equal(met, expected), ("keys", block, rows, case)
