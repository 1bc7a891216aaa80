"""The norm, SiLU and gate kernels against the plain computation and float64.

On a machine without a GPU the kernels run in Triton's interpreter on CPU tensors; with one, this
same file runs them compiled.
"""

import pytest
import torch
from torch import Tensor

from ops.gated_norm import gated_norm
from ops.norm import layer_norm
from ops.silu_split import silu_split
from tests.ops.elementwise_cases import (
    DEVICE,
    INTERPRETED,
    assert_as_exact_as_plain,
    leaf,
    results,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 5, 37] if INTERPRETED else [1, 5, 9000]
# compiled, each kernel costs about a second: what does not depend on the compiler is not repeated
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="the interpreter shows it")


def dims_and_dtypes(interpreted: list, compiled: list) -> list[tuple]:
    """Return all pairs for the interpreter; compiled, all dtypes for the first dims alone."""
    if INTERPRETED:
        return [(dims, dtype) for dims in interpreted for dtype in DTYPES]
    half = [(dims, torch.bfloat16) for dims in compiled[1:]]
    return [*((compiled[0], dtype) for dtype in DTYPES), *half]


def norm_leaves(num_rows: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": leaf(num_rows, width, dtype=dtype, scale=3.0),
        "weight": leaf(width),
        "bias": leaf(width, seed=1),
    }


def norm(leaves: dict[str, Tensor], backend: str) -> Tensor:
    x, weight, bias = leaves.values()
    return layer_norm(x, weight, bias_D=bias, eps=1e-5, backend=backend)


@pytest.mark.parametrize(("width", "dtype"), dims_and_dtypes([10, 64, 384], [10, 384, 1024, 8192]))
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    for num_rows in ROWS[:2] if width > 2048 else ROWS:
        assert_as_exact_as_plain(norm, norm_leaves(num_rows, width, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_kernel_is_not_taken_for_other_arguments(dtype: torch.dtype) -> None:
    """Aligned, not aligned, 16 rows, 1 row, and all of them again."""
    weight, bias = leaf(64).detach(), leaf(64, seed=1).detach()
    buffer = leaf(17 * 64, dtype=dtype).detach()
    for start, num_rows in [(0, 16), (1, 16), (0, 1), (3, 5)] * 2:
        x = buffer[start : start + 64 * num_rows].view(num_rows, 64)
        actual, expected = (
            layer_norm(x, weight, bias_D=bias, eps=1e-5, backend=which)
            for which in ("triton", "pytorch")
        )
        tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@only_interpreted
def test_layer_norm_of_rows_far_from_zero() -> None:
    """A mean 300 times the spread: no sum of squares may be taken before it is subtracted."""
    leaves = norm_leaves(9, 64, torch.float32)
    leaves["x"] = (leaves["x"].detach() + 1000).requires_grad_()
    assert_as_exact_as_plain(norm, leaves)


def test_layer_norm_adds_a_residual_gradient() -> None:
    from ops.norm.triton_impl import norm_backward, norm_forward

    x, weight, bias = (value.detach() for value in norm_leaves(19, 48, torch.float32).values())
    grad, residual = leaf(19, 48, seed=3).detach(), leaf(19, 48, seed=4).detach()
    _, stats = norm_forward(x, weight, bias_D=bias, eps=1e-5)
    without = norm_backward(grad, x, weight_D=weight, stats=stats)
    joined = norm_backward(grad, x, weight_D=weight, stats=stats, residual_TD=residual)
    torch.testing.assert_close(joined[0], without[0] + residual)
    assert torch.equal(joined[1], without[1])
    assert torch.equal(joined[2], without[2])


GATES = [(2, 5), (1, 64), (4, 96)]
COMPILED_GATES = [(2, 5), (4, 256)]


def gate_leaves(num_rows: int, dims: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    num_heads, width = dims
    return {
        "attn": leaf(num_rows, num_heads, width, dtype=dtype),
        "fused": leaf(num_rows, num_heads, 2 * width + 6, dtype=dtype, seed=1),
        "weight": leaf(num_heads * width, seed=2),
        "bias": leaf(num_heads * width, seed=3),
    }


def gate(leaves: dict[str, Tensor], backend: str, dropout: float = 0.0) -> Tensor:
    """u is a strided view inside a wider tensor."""
    attn = leaves["attn"]
    return gated_norm(
        attn,
        leaves["fused"][..., 3 : 3 + attn.shape[2]],
        weight=leaves["weight"],
        bias=leaves["bias"],
        eps=1e-5,
        dropout=dropout,
        training=dropout > 0.0,
        backend=backend,
    )


@pytest.mark.parametrize(("dims", "dtype"), dims_and_dtypes(GATES, COMPILED_GATES))
def test_gated_norm(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for num_rows in ROWS[:3]:
        assert_as_exact_as_plain(gate, gate_leaves(num_rows, dims, dtype))


@pytest.mark.parametrize("dims", GATES if INTERPRETED else COMPILED_GATES)
def test_dropout_of_the_gate(dims: tuple[int, int]) -> None:
    """Share and scale of what is kept; the backward drops the very same entries."""
    num_rows = max(40, 4000 // (dims[0] * dims[1])) if INTERPRETED else 5000
    leaves = gate_leaves(num_rows, dims, torch.float32)
    whole = results(lambda x: gate(x, "triton"), leaves)
    torch.manual_seed(3)
    dropped = results(lambda x: gate(x, "triton", 0.3), leaves)
    kept = dropped["out"] != 0
    share = float(kept.double().mean())
    assert share == pytest.approx(0.7, abs=4 * (0.21 / kept.numel()) ** 0.5)
    torch.testing.assert_close(dropped["out"][kept], whole["out"][kept] / 0.7)
    width = dims[1]
    du = dropped["fused"][..., 3 : 3 + width].flatten(1)
    torch.testing.assert_close(
        du, torch.where(kept, whole["fused"][..., 3 : 3 + width].flatten(1) / 0.7, 0.0)
    )

    def masked(x: dict[str, Tensor]) -> Tensor:
        return gate(x, "pytorch") * kept / 0.7

    expected = results(masked, leaves)
    for name, value in expected.items():
        torch.testing.assert_close(dropped[name], value, rtol=2e-4, atol=2e-4)


@only_interpreted
def test_dropout_follows_the_seed_and_does_not_repeat() -> None:
    leaves = gate_leaves(64, (2, 40), torch.float32)
    torch.manual_seed(1)
    first, second = (gate(leaves, "triton", 0.5) != 0 for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(gate(leaves, "triton", 0.5) != 0, first)
    agree = float((first == second).double().mean())
    assert agree == pytest.approx(0.5, abs=0.04)
    rows = float((first[1:] == first[:-1]).double().mean())  # neighbours do not share their fate
    assert rows == pytest.approx(0.5, abs=0.04)
    columns = float((first[:, 1:] == first[:, :-1]).double().mean())
    assert columns == pytest.approx(0.5, abs=0.04)


def test_dropout_draws_all_columns_alike() -> None:
    from ops.dropout.triton_mask import draw_key, draw_seed

    leaves = gate_leaves(512 if INTERPRETED else 4096, (1, 16), torch.float32)
    torch.manual_seed(2)
    kept = gate(leaves, "triton", 0.1) != 0
    rows = kept.shape[0]
    assert (kept.double().mean(0) - 0.9).abs().max() < 5 * (0.09 / rows) ** 0.5
    for draw in (draw_seed, draw_key):
        seeds = {int(draw(leaves["attn"].device)) for _ in range(4)}
        assert len(seeds) == 4


def test_a_mask_key_follows_the_seed_and_moves_the_generator() -> None:
    """Its type as a kernel's argument never changes; restoring the generator restores it."""
    from ops.dropout.triton_mask import draw_key

    device = leaf(1).device
    state = torch.cuda if DEVICE == "cuda" else torch
    torch.manual_seed(7)
    before = state.get_rng_state()
    first, second = draw_key(device), draw_key(device)
    assert first != second
    state.set_rng_state(before)
    assert draw_key(device) == first
    keys = set()
    for seed in range(50):
        torch.manual_seed(seed)
        keys |= {draw_key(device) for _ in range(4)}
    assert len(keys) == 200
    assert all(2**62 <= key < 2**63 for key in keys)


@only_interpreted
def test_no_dropout_in_evaluation_and_none_drawn() -> None:
    leaves = gate_leaves(6, (2, 8), torch.float32)
    torch.manual_seed(4)
    before = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    gated_norm(
        leaves["attn"],
        leaves["attn"],
        weight=leaves["weight"],
        bias=leaves["bias"],
        eps=1e-5,
        dropout=0.5,
        training=False,
        backend="triton",
    )
    after = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    assert torch.equal(before, after)


# heads, attention_dim, linear_dim
SPLITS = dims_and_dtypes(
    [(2, 3, 4), (1, 32, 64), (2, 96, 32), (3, 5, 40)], [(2, 3, 4), (4, 256, 256), (2, 96, 32)]
)


def split_leaves(num_rows: int, dims: tuple[int, int, int], dtype: torch.dtype):
    num_heads, attention_dim, linear_dim = dims
    width = num_heads * 2 * (attention_dim + linear_dim)
    return {"uvqk": leaf(num_rows, width, dtype=dtype), "bias": leaf(width, seed=1)}


def split_parts(leaves: dict[str, Tensor], dims: tuple[int, int, int], backend: str):
    return silu_split(
        leaves["uvqk"],
        dims[0],
        attention_dim=dims[1],
        linear_dim=dims[2],
        bias_X=leaves.get("bias"),
        backend=backend,
    )


@pytest.mark.parametrize(("dims", "dtype"), SPLITS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_silu_split(dims: tuple[int, int, int], dtype: torch.dtype, has_bias: bool) -> None:
    if not INTERPRETED and not has_bias and dtype != torch.bfloat16:
        pytest.skip("the interpreter shows it")
    for num_rows in ROWS[:3]:
        leaves = split_leaves(num_rows, dims, dtype)
        if not has_bias:
            del leaves["bias"]
        assert_as_exact_as_plain(
            lambda x, backend: torch.cat([p.flatten(1) for p in split_parts(x, dims, backend)], 1),
            leaves,
        )


@pytest.mark.parametrize("present", [(1, 3), (0, 1, 2, 3), *([(0,), (2,)] if INTERPRETED else [])])
def test_silu_split_with_gradients_of_some_parts(present: tuple[int, ...]) -> None:
    """Absent, strided and transposed gradients, and all four as views of one buffer."""
    dims, num_rows = (2, 32, 32), 21
    leaves = split_leaves(num_rows, dims, torch.float32)
    buffer = leaf(num_rows, 2, 130, seed=5).detach()
    cotangents = [buffer[:, :, 32 * part : 32 * part + 32] for part in range(4)]
    cotangents[1] = leaf(32, 2, num_rows, seed=6).detach().permute(2, 1, 0)
    grads = []
    for backend in ("pytorch", "triton"):
        parts = split_parts(leaves, dims, backend)
        grads.append(
            torch.autograd.grad(
                [parts[i] for i in present],
                list(leaves.values()),
                [cotangents[i] for i in present],
            )
        )
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


@only_interpreted
def test_silu_split_parts_are_views_of_one_tensor() -> None:
    parts = split_parts(split_leaves(5, (2, 3, 4), torch.float32), (2, 3, 4), "triton")
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert [part.stride() for part in parts] == [(28, 14, 1)] * 4
    assert [part.storage_offset() for part in parts] == [0, 4, 8, 11]


def split_then_gate(leaves: dict[str, Tensor], dims: tuple[int, int, int], lazy: bool) -> Tensor:
    """Both ops one behind the other; lazy: u travels as a pre-activation."""
    num_heads, attention_dim, linear_dim = dims
    u, v, q, k = silu_split(
        leaves["uvqk"],
        num_heads,
        attention_dim=attention_dim,
        linear_dim=linear_dim,
        bias_X=leaves["bias"],
        activates_u=not lazy,
        backend="triton" if lazy else "pytorch",
    )
    gated = gated_norm(
        v * 1.5,
        u,
        weight=leaves["weight"],
        bias=leaves["shift"],
        eps=1e-5,
        u_bias_HV=leaves["bias"].detach().view(num_heads, -1)[:, :linear_dim] if lazy else None,
        backend="triton" if lazy else "pytorch",
    )
    return torch.cat([gated, (q * k).flatten(1)], 1)


@pytest.mark.parametrize(("dims", "dtype"), SPLITS if INTERPRETED else SPLITS[1:4])
def test_the_gate_activates_u_itself(dims: tuple[int, int, int], dtype: torch.dtype) -> None:
    width = dims[0] * dims[2]
    for num_rows in ROWS[:3]:
        leaves = split_leaves(num_rows, dims, dtype)
        leaves |= {"weight": leaf(width, seed=2), "shift": leaf(width, seed=3)}
        assert_as_exact_as_plain(
            lambda x, backend: split_then_gate(x, dims, backend == "triton"), leaves
        )


@only_interpreted
def test_a_pre_activation_is_not_copied() -> None:
    leaves = split_leaves(5, (2, 3, 4), torch.float32)
    u, v, _, _ = silu_split(
        leaves["uvqk"], 2, attention_dim=3, linear_dim=4, activates_u=False, backend="triton"
    )
    assert u.data_ptr() == leaves["uvqk"].data_ptr()
    assert v.stride() == (20, 10, 1)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 3), (700, 300), (9, 1024), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_rows(num_rows: int, width: int, dtype: torch.dtype) -> None:
    from ops.norm.triton_sums import sum_partials, sum_rows

    x = leaf(num_rows, width, dtype=dtype).detach()
    sums = sum_rows(x, dtype=torch.float32)
    torch.testing.assert_close(sums, x.double().sum(0).float(), rtol=1e-5, atol=2e-5)
    assert torch.equal(sum_rows(x, dtype=torch.bfloat16), sums.bfloat16())
    if num_rows and dtype == torch.float32:
        again = sum_partials(x, dtype=torch.float32)
        torch.testing.assert_close(again, sums, rtol=1e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_values_do_not_overflow() -> None:
    uvqk = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, 1.0]], device=DEVICE)
    grads = []
    for backend in ("pytorch", "triton"):
        x = uvqk.clone().requires_grad_()
        parts = silu_split(x, 1, attention_dim=2, linear_dim=2, backend=backend)
        out = torch.cat(parts, -1)
        grads.append((out, torch.autograd.grad(out.sum(), x)[0]))
    torch.testing.assert_close(grads[1][0], grads[0][0], rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(grads[1][1], grads[0][1], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows(dtype: torch.dtype) -> None:
    cases = [
        (lambda x: norm(x, "triton"), norm_leaves(0, 10, dtype)),
        (lambda x: gate(x, "triton", 0.5), gate_leaves(0, (2, 5), dtype)),
        (lambda x: split_parts(x, (2, 3, 4), "triton")[1], split_leaves(0, (2, 3, 4), dtype)),
    ]
    for op, leaves in cases:
        for name, value in results(op, leaves).items():
            assert value.numel() == 0 or value.abs().sum() == 0, name


def test_uninitialised_memory_is_never_read() -> None:
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    try:
        for op, leaves in [
            (lambda x: norm(x, "triton"), norm_leaves(37, 10, torch.float32)),
            (lambda x: gate(x, "triton", 0.5), gate_leaves(37, (2, 5), torch.float32)),
            (
                lambda x: split_parts(x, (2, 3, 4), "triton")[1],
                split_leaves(37, (2, 3, 4), torch.float32),
            ),
        ]:
            for name, value in results(op, leaves).items():
                assert torch.isfinite(value).all(), name
    finally:
        torch.use_deterministic_algorithms(False)


@only_interpreted
def test_rows_do_not_touch_each_other() -> None:
    """A row of NaN poisons itself and the sums over rows, no other row."""
    leaves = gate_leaves(9, (2, 40), torch.float32)
    expected = results(lambda x: gate(x, "triton"), leaves)
    with torch.no_grad():
        leaves["attn"][4] = float("nan")
    actual = results(lambda x: gate(x, "triton"), leaves)
    others = [row for row in range(9) if row != 4]
    for name in ("out", "attn", "fused"):
        assert torch.equal(actual[name][others], expected[name][others]), name
    assert torch.isnan(actual["out"][4]).all()


def test_bit_equal_from_run_to_run() -> None:
    num_rows = 100 if INTERPRETED else 30_000
    for op, leaves in [
        (lambda x: norm(x, "triton"), norm_leaves(num_rows, 64, torch.bfloat16)),
        (
            lambda x: split_parts(x, (2, 32, 32), "triton")[0],
            split_leaves(num_rows, (2, 32, 32), torch.bfloat16),
        ),
    ]:
        first, again = results(op, leaves), results(op, leaves)
        for name, value in first.items():
            assert torch.equal(again[name], value), name


def test_what_the_kernels_do_not_have_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"dtype must be one of float32.*float64"):
        norm(norm_leaves(3, 4, torch.float64), "triton")
    with pytest.raises(NotImplementedError, match=r"silu_split.*dtype must be.*float64"):
        split_parts(split_leaves(3, (2, 3, 4), torch.float64), (2, 3, 4), "triton")
    with pytest.raises(NotImplementedError, match=r"gated_norm.*1 to 8192 wide.*got 9000"):
        gate(gate_leaves(1, (2, 4500), torch.float32), "triton")
    with pytest.raises(NotImplementedError, match="activates_u = False. needs backend"):
        silu_split(leaf(3, 28), 2, attention_dim=3, linear_dim=4, activates_u=False)
    with pytest.raises(NotImplementedError, match="u_bias_HV. needs backend"):
        rows = leaf(3, 2, 4)
        gated_norm(rows, rows, weight=leaf(8), bias=leaf(8), eps=1e-5, u_bias_HV=leaf(2, 4))
    with pytest.raises(ValueError, match=r'must be "pytorch" or "triton", got "?.cuda'):
        norm(norm_leaves(3, 4, torch.float32), "cuda")


@pytest.mark.gpu
def test_more_than_2_to_31_elements() -> None:
    """The last rows of a tensor whose last index needs 64 bits."""
    width, num_rows = 8192, 2**31 // 8192 + 3
    x = torch.zeros(num_rows, width, device="cuda", dtype=torch.bfloat16)
    tail = leaf(3, width, dtype=torch.bfloat16).detach()
    x[-3:] = tail
    weight, bias = leaf(width).detach(), leaf(width, seed=1).detach()
    out = layer_norm(x, weight, bias_D=bias, eps=1e-5, backend="triton")
    expected = layer_norm(tail, weight, bias_D=bias, eps=1e-5, backend="triton")
    assert torch.equal(out[-3:], expected)
    del out
    x.requires_grad_()
    parts = silu_split(x, 8, attention_dim=256, linear_dim=256, backend="triton")
    wide = tail.float().requires_grad_()
    expected = torch.nn.functional.silu(wide).view(3, 8, 1024)[..., 768:]
    torch.testing.assert_close(parts[3][-3:].float(), expected, rtol=2**-7, atol=2**-9)
    (grad,) = torch.autograd.grad(parts[3].sum(), x)
    (expected_grad,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(grad[-3:].float(), expected_grad, rtol=2**-7, atol=2**-9)
