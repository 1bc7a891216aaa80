"""The FP8 kernels for Hopper against float64 and against the emulation of their roundings.

They cannot run in Triton's interpreter. Parts by -k: masks, modes, figures, batch, fused. A mask is
three kernels to compile, 10 s each with an empty cache; parts can run side by side.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import AttentionSpec, Fp8Spec, hstu_attention, hstu_attention_from_uvqk
from ops.jagged import lengths_to_offsets
from ops.silu_split import silu_split
from tests.ops.test_hstu_attention_hopper import CASES, SEVERAL_BLOCKS
from tests.ops.triton_cases import DEVICE, INTERPRETED, NUM_HEADS, attend, make_inputs, oracle, run


def _is_hopper() -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability()[0] == 9


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fp8,
    pytest.mark.skipif(not _is_hopper(), reason="needs a GPU of compute capability 9"),
]
E5M2 = torch.float8_e5m2
MODES = ("cast", "per_block", "per_head", "per_tensor")
NAMES = ("out", "q", "k", "v")
# of FBGEMM's FP8, to two digits
LARGEST_ERRORS = {"out": 1.2e-2, "q": 3.0e-2, "k": 5.4e-2, "v": 4.7e-2}


def error(actual: Tensor, expected: Tensor, exact: Tensor) -> float:
    """Distance in units of the exact result."""
    actual, expected = (x.double().to(exact.device) for x in (actual, expected))
    return float((actual - expected).norm() / exact.norm().clamp(min=1e-30))


def assert_as_emulated(
    actual: dict[str, Tensor], emulated: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Errors within 1.1 of the emulation's, and most of either error shared: the same roundings.

    A thousandth for the rounding of results; few entries scatter more.
    """
    for name, value in exact.items():
        assert actual[name].isfinite().all(), name
        own, known = (error(x[name], value, value) for x in (actual, emulated))
        apart = error(actual[name], emulated[name], value)
        slack = 1e-3 if value.numel() > 20_000 else 5e-3
        assert own <= 1.1 * known + slack, (name, own, known, apart)
        assert apart <= 0.6 * known + slack, (name, own, known, apart)


def assert_case(name: str, width: int, fp8: Fp8Spec) -> None:
    case = CASES[name]
    leaves, arguments, dims = make_inputs(
        case, dtype=torch.bfloat16, extra_rows=71, attention_dim=width, linear_dim=width
    )
    num_tokens = sum(case.lengths)
    exact = oracle(leaves, arguments, dims)
    arguments["fp8"] = fp8
    with torch.no_grad():
        leaves["uvqk"][num_tokens:] = float("nan")
    actual = run(leaves, arguments, dims, "triton")
    emulated = run(leaves, arguments, dims, "pytorch")
    for value in actual.values():
        assert torch.equal(value[num_tokens:], torch.zeros_like(value[num_tokens:]))
    if num_tokens:
        assert_as_emulated(actual, emulated, exact)


@pytest.mark.parametrize("name", CASES)
def test_masks_with_poison_behind_the_last_user(name: str) -> None:
    assert_case(name, 128, Fp8Spec(mode="per_block"))


@pytest.mark.parametrize("mode", ["per_block", "cast"])
@pytest.mark.parametrize("width", [64, 256])
def test_masks_at_other_head_dims(width: int, mode: str) -> None:
    assert_case("several_blocks", width, Fp8Spec(mode=mode))


def test_masks_with_missing_counts() -> None:
    leaves, arguments, dims = make_inputs(
        SEVERAL_BLOCKS, dtype=torch.bfloat16, attention_dim=128, linear_dim=128
    )
    arguments["num_contextuals"] = arguments["num_candidates"] = None
    exact = oracle(leaves, arguments, dims)
    arguments["fp8"] = Fp8Spec(mode="per_block")
    emulated = run(leaves, arguments, dims, "pytorch")
    assert_as_emulated(run(leaves, arguments, dims, "triton"), emulated, exact)


def make_rows(
    lengths: tuple[int, ...],
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    sizes: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """q, k, v as SiLU leaves them, dO, and the other arguments; `sizes` multiplies the four."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    shape = (sum(lengths), heads, width)
    rows = [torch.randn(shape, generator=generator, device=DEVICE) for _ in range(4)]
    rows = [torch.nn.functional.silu(x) for x in rows[:3]] + rows[3:]
    *leaves, grad = (size * x for size, x in zip(sizes, rows, strict=True))
    arguments = {
        "seq_offsets": lengths_to_offsets(torch.tensor(lengths)).to(DEVICE),
        "max_seq_len": max(lengths),
        "scaling_seqlen": float(max(lengths)),
    }
    return [x.to(dtype) for x in leaves], grad.to(dtype), arguments


def results(
    leaves: list[Tensor], grad: Tensor, arguments: dict[str, Any], backend: str, **options: Any
) -> dict[str, Tensor]:
    """o, dq, dk, dv by one backend; the oracle in float64."""
    dtype = torch.float64 if backend == "reference" else leaves[0].dtype
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in leaves)
    out = hstu_attention(q, k, v_THV=v, backend=backend, **arguments, **options)
    grads = torch.autograd.grad(out, [q, k, v], grad.to(dtype))
    return dict(zip(NAMES, [out.detach(), *grads], strict=True))


def assert_rows(fp8: Fp8Spec, lengths: tuple[int, ...], width: int = 128, **options: Any) -> None:
    call = make_rows(lengths, width, **options)
    exact = results(*call, "reference")
    actual, emulated = (results(*call, backend, fp8=fp8) for backend in ("triton", "pytorch"))
    assert_as_emulated(actual, emulated, exact)


@pytest.mark.parametrize("grad_dtype", [torch.float8_e4m3fn, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, grad_dtype: torch.dtype) -> None:
    assert_rows(Fp8Spec(mode=mode, grad_dtype=grad_dtype), (300, 0, 129, 1, 512))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_modes_follow_the_sizes_of_values(width: int) -> None:
    """Tiny and large operands, and a tiny gradient: scales, weights' unit, running sums."""
    for sizes in ((1e-3, 1e-2, 1e-4, 1e-7), (30.0, 1e-3, 1e4, 1e3), (8.0, 8.0, 1.0, 1.0)):
        assert_rows(Fp8Spec(mode="per_block"), (300, 0, 129, 1, 512), width, sizes=sizes)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_modes_with_blocks_of_differing_sizes(width: int) -> None:
    """Sums over blocks whose units differ by powers of two, in both directions."""
    leaves, grad, arguments = make_rows((700, 300), width)
    block = torch.arange(1000, device=DEVICE) // 128
    growing = (block % 5).float().exp2()[:, None, None]
    for factor in (growing, growing.flip(0), 1e-4 ** (block % 2)[:, None, None]):
        q, *others = leaves
        rows = [q, *((x * factor).bfloat16() for x in others)]
        call = (rows, (grad * factor.flip(0)).bfloat16(), arguments)
        exact = results(*call, "reference")
        fp8 = Fp8Spec(mode="per_block")
        actual, emulated = (results(*call, backend, fp8=fp8) for backend in ("triton", "pytorch"))
        assert_as_emulated(actual, emulated, exact)


def test_modes_with_scaled_weights() -> None:
    sizes = (0.05, 0.05, 1.0, 1.0)
    assert_rows(Fp8Spec(mode="cast", weight_exponent=9), (300, 129), sizes=sizes)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_modes_in_float16(width: int) -> None:
    assert_rows(Fp8Spec(mode="per_block"), (300, 129), width, dtype=torch.float16)


def test_modes_saturate_and_show_nan() -> None:
    for mode in MODES:
        leaves, grad, arguments = make_rows((300, 129), 128)
        for x in leaves:
            x[0] = 1e4
        actual = results(leaves, grad, arguments, "triton", fp8=Fp8Spec(mode=mode))
        assert all(x.isfinite().all() for x in actual.values()), mode
        leaves[2][0] = float("nan")
        assert (
            results(leaves, grad, arguments, "triton", fp8=Fp8Spec(mode=mode))["out"].isnan().any()
        )


@pytest.mark.parametrize("mode", ["per_block", "cast"])
@pytest.mark.parametrize("length", [2048, 8192, 8193])
def test_sums_of_long_users(length: int, mode: str) -> None:
    """Rows of dO have a part in common: sums of dV grow all the way, and BF16 would lose rows.

    At 8192, the longest that are summed in BF16, dV may have 1.35 times the emulation's error.
    """
    leaves, grad, arguments = make_rows((length,), 256, heads=1)
    grad += torch.randn(256, device=DEVICE).to(grad.dtype)
    call = (leaves, grad, arguments)
    exact = results(*call, "reference")
    actual, emulated = (results(*call, x, fp8=Fp8Spec(mode=mode)) for x in ("triton", "pytorch"))
    if length == 8192:
        own, known = (error(x["v"], exact["v"], exact["v"]) for x in (actual, emulated))
        assert own <= 1.35 * known + 1e-3, (own, known)
    else:
        assert_as_emulated(actual, emulated, exact)


@pytest.mark.parametrize("mode", ["per_block", "cast"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_figures_at_2048_tokens(width: int, mode: str) -> None:
    """The bounds of FBGEMM's kernels, and 1.1 times the emulation's errors."""
    call = make_rows((2048, 2048), width)
    exact = results(*call, "reference")
    found = {}
    for backend in ("triton", "pytorch"):
        values = results(*call, backend, fp8=Fp8Spec(mode=mode))
        found[backend] = {name: error(values[name], x, x) for name, x in exact.items()}
    print(mode, width, found)
    for name, known in found["pytorch"].items():
        assert found["triton"][name] <= 1.1 * known, (name, found)
        assert width != 128 or found["triton"][name] < LARGEST_ERRORS[name] + 5e-4, (name, found)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_batch_of_many_users_has_the_same_bits_every_run(width: int) -> None:
    """700 users of 0 to 400 tokens: programs draw their blocks in another order each time."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 400, (700,))
    leaves, grad, arguments = make_rows(tuple(lengths.tolist()), width)
    arguments["num_contextuals"] = (lengths // 100).to(DEVICE)
    arguments["num_candidates"] = (lengths // 5).to(DEVICE)
    fp8 = Fp8Spec(mode="per_block")
    plain = results([x.float() for x in leaves], grad.float(), arguments, "pytorch")
    emulated = results(leaves, grad, arguments, "pytorch", fp8=fp8)
    first = results(leaves, grad, arguments, "triton", fp8=fp8)
    assert_as_emulated(first, emulated, plain)
    for _ in range(3):
        again = results(leaves, grad, arguments, "triton", fp8=fp8)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("width", [64, 128, 256])
def test_batch_mate_of_nan_poisons_nobody(width: int) -> None:
    """Tiles reach into the next user's rows: those must not be read as numbers."""
    leaves, arguments, dims = make_inputs(
        SEVERAL_BLOCKS, dtype=torch.bfloat16, attention_dim=width, linear_dim=width
    )
    arguments["fp8"] = Fp8Spec(mode="per_block")
    first, last = (int(x) for x in arguments["seq_offsets"][3:5])
    others = torch.ones(sum(SEVERAL_BLOCKS.lengths), dtype=torch.bool, device=DEVICE)
    others[first:last] = False
    found = []
    for fill in (1.0, float("nan")):
        with torch.no_grad():
            leaves["uvqk"][first:last] = fill
        out = attend(leaves, arguments, dims, "triton")
        weights = torch.ones_like(out)
        weights[first:last] = fill
        (grad,) = torch.autograd.grad(out, [leaves["uvqk"]], weights)
        found.append((out.detach()[others], grad[others]))
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(actual, expected)


def test_batch_mates_change_no_bit() -> None:
    call = make_rows((300, 77, 129), 128)
    together = results(*call, "triton", fp8=Fp8Spec(mode="per_block"))
    leaves, grad, arguments = call
    alone = results(
        [x[300:377] for x in leaves],
        grad[300:377],
        arguments | {"seq_offsets": torch.tensor([0, 77], device=DEVICE)},
        "triton",
        fp8=Fp8Spec(mode="per_block"),
    )
    for name, value in alone.items():
        assert torch.equal(together[name][300:377], value), name


@pytest.mark.parametrize("mode", ["per_block", "cast"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_fused_with_the_projection_to_the_bit(width: int, mode: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(4)
    lengths = (0, 300, 1, 129)
    uvqk = torch.randn(450, NUM_HEADS * 4 * width, generator=generator, device=DEVICE)
    uvqk[430:] = float("nan")
    uvqk = uvqk.bfloat16().requires_grad_()
    bias = torch.randn(uvqk.shape[1], generator=generator, device=DEVICE).requires_grad_()
    offsets = lengths_to_offsets(torch.tensor(lengths)).to(DEVICE)
    spec = AttentionSpec(max_seq_len=300, scaling_seqlen=300.0, fp8=Fp8Spec(mode=mode))
    found = []
    for recompute in (None, False, True):
        if recompute is None:
            dims = {"attention_dim": width, "linear_dim": width}
            split = {"bias_X": bias, "activates_u": False, "backend": "triton"}
            u, v, q, k = silu_split(uvqk, NUM_HEADS, **dims, **split)
            options = dataclasses.asdict(spec) | {"fp8": spec.fp8, "backend": "triton"}
            out = hstu_attention(q, k, v_THV=v, seq_offsets=offsets, **options)
        else:
            call = {"bias_X": bias, "num_heads": NUM_HEADS, "recompute": recompute}
            out, u = hstu_attention_from_uvqk(uvqk, seq_offsets=offsets, spec=spec, **call)
        (grad,) = torch.autograd.grad([out, u], [uvqk], [out.detach(), torch.ones_like(u)])
        found.append([x[:430] for x in (out.detach(), u.detach(), grad)])
        assert not out[430:].any()
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, found[0], strict=True))
