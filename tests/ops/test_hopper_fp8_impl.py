"""What the FP8 launches hand to the Gluon kernels, on a CPU: the kernels run on Hopper alone."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import tests.ops.fp8_kernels  # noqa: F401, I001  before others import them

from ops.hstu_attention import hopper_fp8_impl as impl
from ops.hstu_attention.fp8_operands import Fp8Operand, num_columns, num_slots
from ops.hstu_attention.triton_kernels import Rule

NUM_ROWS, NUM_HEADS, NUM_USERS = 300, 2, 3
COLUMNS = num_columns(NUM_ROWS, NUM_USERS)
RULE = Rule(
    causal=True,
    has_contextuals=False,
    contextual_rows_see_all=False,
    has_candidates=False,
    has_window=False,
    has_position_bias=False,
    has_time_bias=False,
)
WIDTHS = (64, 128, 256)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    found: list[tuple[Any, dict[str, Any]]] = []

    def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], **_: int) -> None:
        assert grid == (132,)
        found.append((kernel, arguments))

    monkeypatch.setattr(impl, "launch", launch)
    monkeypatch.setattr(impl, "_num_multiprocessors", lambda device: 132)
    return found


def _operand(width: int, *, transposed: bool = True, dtype: Any = torch.float8_e4m3fn) -> Any:
    codes = torch.empty(NUM_ROWS, NUM_HEADS, width, dtype=dtype)
    codes_t = torch.empty(NUM_HEADS, width, COLUMNS, dtype=dtype) if transposed else None
    return Fp8Operand(codes, codes_t, torch.ones(num_slots(NUM_ROWS, NUM_USERS), NUM_HEADS))


def _structure(block: int) -> dict[str, Any]:
    offsets = torch.tensor([0, 100, 200, 300])
    return {
        "offsets_ptr": offsets,
        "contextuals_ptr": None,
        "candidates_ptr": None,
        "table_ptr": torch.zeros(block, dtype=torch.int32),  # which block: by its size
        "scaling_seqlen": torch.tensor(100.0) if block == 64 else 100.0,
        "alpha": 0.1,
        "num_rows": NUM_ROWS,
        "num_users": NUM_USERS,
        "group_size": 1,
        "window": 0,
        "weight_factor": 1.0,
        "slope_factor": 0.5,
    }


def _assert_descriptor(descriptor: Any, shape: list[int], box: list[int], codes: Any) -> None:
    assert descriptor.base is codes
    assert (descriptor.shape, descriptor.block_shape) == (shape, box)
    assert descriptor.strides == [shape[1], 1]


@pytest.mark.parametrize("width", WIDTHS)
def test_forward(width: int, launches: list[tuple[Any, dict[str, Any]]]) -> None:
    q, k = (_operand(width, transposed=False) for _ in "qk")
    v = _operand(width)
    out = torch.empty(NUM_ROWS, NUM_HEADS, width, dtype=torch.bfloat16)
    impl.launch_forward(q, k, v, out=out, structure=_structure, rule=RULE, scaled=True)
    [(kernel, given)] = launches
    assert set(kernel.arg_names) <= set(given)
    assert given["SCALED"] and not given["SCALE_IS_POINTER"]
    assert given["table_ptr"].numel() == 128
    rows, columns = [NUM_ROWS, NUM_HEADS * width], [NUM_HEADS * width, COLUMNS]
    _assert_descriptor(given["q_desc"], rows, [64, width], q.codes)
    _assert_descriptor(given["k_desc"], rows, [given["KEYS"], width], k.codes)
    box = [width // given["PARTS"], given["KEYS"]]
    _assert_descriptor(given["vt_desc"], columns, box, v.codes_t)
    # tiles that are multiples of 128 keys or divide them have one scale
    assert given["KEYS"] in (64, 128)
    assert all(
        given[f"{x}_scale_ptr"] is y.scale_inv for x, y in zip("qkv", (q, k, v), strict=True)
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("grad_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("longest", [8192, 8193])
def test_backward(
    width: int, grad_dtype: Any, longest: int, launches: list[tuple[Any, dict[str, Any]]]
) -> None:
    q, k = (_operand(width) for _ in "qk")
    v, do = _operand(width, transposed=False), _operand(width, dtype=grad_dtype)
    grads = tuple(torch.empty(NUM_ROWS, NUM_HEADS, width, dtype=torch.bfloat16) for _ in "qkv")
    options = {"structure": _structure, "rule": RULE, "scaled": False, "longest": longest}
    impl.launch_backward(*(q, k, v, do), grads=grads, **options)
    exact = width == 256 and longest > 8192  # long sums in BF16 would stop growing
    modules = {64: "keys", 128: "keys", 256: "keys_long" if exact else "keys_wide"}
    assert launches[0][0].fn.__module__.endswith(f"hopper_fp8_{modules[width]}")
    assert [kernel.fn.__name__ for kernel, _ in launches] == ["keys_kernel", "rows_kernel"]
    operands = {"q": q, "k": k, "v": v, "do": do}
    for (kernel, given), transposed in zip(launches, (("q", "do"), ("k",)), strict=True):
        assert set(kernel.arg_names) <= set(given)
        assert not given["SCALED"]
        assert given["SCALE_IS_POINTER"] == isinstance(given["scaling_seqlen"], torch.Tensor)
        assert (given["dq_ptr"], given["dk_ptr"], given["dv_ptr"]) == grads
        for name, operand in operands.items():
            assert given[f"{name}_scale_ptr"] is operand.scale_inv
            descriptor = given[f"{name}_desc"]
            box = [descriptor.block_shape[0], width]
            _assert_descriptor(descriptor, [NUM_ROWS, NUM_HEADS * width], box, operand.codes)
        for name in transposed:
            descriptor = given[f"{name}t_desc"]
            box = [width, descriptor.block_shape[1]]
            shape = [NUM_HEADS * width, COLUMNS]
            _assert_descriptor(descriptor, shape, box, operands[name].codes_t)


def test_a_window_takes_narrow_tiles(launches: list[tuple[Any, dict[str, Any]]]) -> None:
    q, k, v = (_operand(128) for _ in "qkv")
    out = torch.empty(NUM_ROWS, NUM_HEADS, 128, dtype=torch.float16)
    for has_window in (False, True):
        rule = Rule(**{**vars(RULE), "has_window": has_window})
        impl.launch_forward(q, k, v, out=out, structure=_structure, rule=rule, scaled=True)
    assert [given["KEYS"] for _, given in launches] == [128, 64]
