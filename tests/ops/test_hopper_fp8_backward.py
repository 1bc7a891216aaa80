"""Powers of two and tails of the FP8 backward kernels: their sources, run with numpy for Gluon.

The kernels themselves need a GPU: test_hstu_attention_fp8_gpu.py.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
import tests.ops.fp8_kernels  # noqa: F401, I001  before others import them

from ops.hstu_attention import hopper_fp8_backward


class Scalars(np.ndarray):
    """Device values: C division, and `.to` that may keep the bits."""

    def to(self, dtype: Any, *, bitcast: bool) -> "Scalars":
        assert bitcast
        return np.asarray(self).view(dtype).view(Scalars)

    def __floordiv__(self, other: int) -> "Scalars":
        return np.trunc(np.asarray(self) / other).astype(np.int32).view(Scalars)


def _device(values: Any, dtype: Any) -> Scalars:
    return np.asarray(values, dtype=dtype).view(Scalars)


def _where(condition: Any, chosen: Any, other: Any) -> Scalars:
    return _device(np.where(condition, chosen, other), np.int32)


_GLUON = SimpleNamespace(
    where=_where,
    minimum=np.minimum,
    maximum=np.maximum,
    int32=np.int32,
    float32=np.float32,
    constexpr=None,
)


def _load(*names: str) -> list[Callable[..., Any]]:
    namespace: dict[str, Any] = {"gl": _GLUON}
    for name in names:
        function = getattr(hopper_fp8_backward, name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        assert isinstance(tree.body[0], ast.FunctionDef)
        tree.body[0].decorator_list = []
        exec(compile(tree, name, "exec"), namespace)  # our own source
    return [namespace[name] for name in names]


exponent, power, times_power, power_pair = _load("exponent", "power", "times_power", "power_pair")


def test_power_and_exponent_are_inverse() -> None:
    e = np.arange(-126, 128)
    powers = power(_device(e, np.int32))
    np.testing.assert_array_equal(powers, 2.0**e)
    np.testing.assert_array_equal(exponent(powers), e)


def test_power_below_the_smallest_normal_number_is_zero() -> None:
    assert not power(_device([-1000, -128, -127], np.int32)).any()


def test_times_power_reaches_past_the_exponents_of_a_factor() -> None:
    e = np.arange(-240, 28)
    x = np.full(e.shape, 2.0**100 * 0.37, dtype=np.float32)
    got = times_power(_device(x, np.float32), _device(e, np.int32))
    np.testing.assert_array_equal(got, (x * 2.0**e).astype(np.float32))


def test_power_pair_is_a_power_in_fp16_twice() -> None:
    e = np.arange(-24, 16)
    words = np.asarray(power_pair(_device(e, np.int32)), dtype=np.int32)
    halves = words.view(np.uint16).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(halves, np.stack([2.0**e, 2.0**e], axis=1))


@pytest.mark.parametrize(("e", "half"), [(-25, 0.0), (-1000, 0.0), (16, 2.0**15), (60, 2.0**15)])
def test_power_pair_out_of_range(e: int, half: float) -> None:
    words = np.asarray(power_pair(_device([e], np.int32)), dtype=np.int32)
    assert words.view(np.uint16).view(np.float16).tolist() == [half, half]
