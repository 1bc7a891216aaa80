"""FP8 attention around its kernels: quantisers, autograd, factors; a stand-in launches.

On a CPU the quantisers run in Triton's interpreter. The kernels themselves:
test_hstu_attention_fp8_gpu.py.
"""

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import ops.hstu_attention
from ops.hstu_attention import AttentionSpec, Fp8Spec, hstu_attention_from_uvqk
from ops.hstu_attention.reference import hstu_attention as oracle
from ops.jagged import lengths_to_offsets
from ops.silu_split import silu_split
from tests.ops.fp8_kernels import fp8_impl
from tests.ops.fp8_kernels_stand_in import StandIn
from tests.ops.quantize_kernels import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in is for CPUs")
HEADS, WIDTH = 2, 64
LENGTHS, CONTEXTUALS, CANDIDATES = (0, 1, 40, 17, 130), (0, 0, 2, 0, 3), (0, 1, 5, 0, 20)
TOTAL, ROWS = sum(LENGTHS), sum(LENGTHS) + 6
MODES = ("cast", "per_block", "per_head", "per_tensor")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, where the launches are imported from, and a way past the refusal of CPUs."""
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ops.hstu_attention.hopper_fp8_impl", stand_in)
    monkeypatch.setattr(ops.hstu_attention, "hopper_fp8_impl", stand_in, raising=False)
    monkeypatch.setattr(ops.hstu_attention, "_check_fp8", lambda *call: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return stand_in


def make_spec(mode: str = "per_block", **options: Any) -> AttentionSpec:
    return AttentionSpec(
        max_seq_len=200,
        scaling_seqlen=7.0,
        num_contextuals=torch.tensor(CONTEXTUALS),
        num_candidates=torch.tensor(CANDIDATES),
        target_group_size=2,
        fp8=Fp8Spec(mode=mode, **options),
    )


OFFSETS = lengths_to_offsets(torch.tensor(LENGTHS))


def make_uvqk(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A projection with rows of no user, and a bias."""
    generator = torch.Generator().manual_seed(4)
    uvqk = torch.randn(ROWS, HEADS * 4 * WIDTH, generator=generator).to(dtype)
    bias = torch.randn(uvqk.shape[1], generator=generator).mul(0.3)
    return uvqk.requires_grad_(), bias.requires_grad_()


def run(
    uvqk: Tensor, bias: Tensor, spec: AttentionSpec, *, fused: bool, **options: Any
) -> dict[str, Tensor]:
    """Output, u and gradients by either entry."""
    if fused:
        out, u = hstu_attention_from_uvqk(
            uvqk, bias_X=bias, num_heads=HEADS, seq_offsets=OFFSETS, spec=spec, **options
        )
    else:
        dims = {"attention_dim": WIDTH, "linear_dim": WIDTH}
        split = {"bias_X": bias, "activates_u": False, "backend": "triton"}
        u, v, q, k = silu_split(uvqk, HEADS, **dims, **split)
        out = fp8_impl.hstu_attention(q, k, v_THV=v, seq_offsets=OFFSETS, spec=spec)
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, u)]
    duvqk, dbias = torch.autograd.grad([out, u], [uvqk, bias], cotangents)
    return {"out": out.detach(), "u": u.detach(), "uvqk": duvqk, "bias": dbias}


def exact(uvqk: Tensor, bias: Tensor, spec: AttentionSpec) -> dict[str, Tensor]:
    """The same in float64, without FP8."""
    uvqk, bias = (x.detach().double().requires_grad_() for x in (uvqk, bias))
    heads = (uvqk + bias).view(ROWS, HEADS, 4 * WIDTH)
    _, *parts = torch.nn.functional.silu(heads).split(WIDTH, dim=2)
    v, q, k = parts
    out = oracle(q, k, v_THV=v, seq_offsets=OFFSETS, spec=dataclasses.replace(spec, fp8=None))
    u = uvqk.view(ROWS, HEADS, 4 * WIDTH)[..., :WIDTH]
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(x.shape, generator=generator).bfloat16().double() for x in (out, u)]
    # the bias's share of u's gradient is added where SiLU is
    u_of_bias = (uvqk + bias).view(ROWS, HEADS, 4 * WIDTH)[..., :WIDTH]
    duvqk, dbias = torch.autograd.grad([out, u_of_bias], [uvqk, bias], cotangents)
    return {"out": out.detach(), "u": u.detach(), "uvqk": duvqk, "bias": dbias}


@pytest.mark.parametrize(
    ("mode", "grad_dtype"),
    [*((mode, torch.float8_e4m3fn) for mode in MODES), ("per_block", torch.float8_e5m2)],
)
def test_every_factor_comes_off_again(mode: str, grad_dtype: torch.dtype) -> None:
    """A factor that stays would show as a slope: the errors of rounding have none."""
    uvqk, bias = make_uvqk()
    spec = make_spec(mode, grad_dtype=grad_dtype)
    expected = exact(uvqk, bias, spec)
    actual = run(uvqk, bias, spec, fused=True)
    pairs = {f"its {name}": (expected[name], actual[name].double()) for name in ("out", "u")}
    heads = (x["uvqk"].double().view(ROWS, HEADS, -1) for x in (expected, actual))
    by_part = zip(*(x.split(WIDTH, -1) for x in heads), strict=True)
    pairs |= dict(zip("uvqk", by_part, strict=True))
    for name, (x, y) in pairs.items():
        assert abs(float((x * y).sum() / (x * x).sum()) - 1) < 0.012, name
        assert float((x - y).norm() / x.norm()) < 0.08, name
    sums = actual["uvqk"].double().sum(0)
    assert float((actual["bias"].double() - sums).norm() / sums.norm()) < 1e-2
    assert actual["out"].dtype == actual["uvqk"].dtype == torch.bfloat16
    assert not actual["uvqk"].view(ROWS, HEADS, 4 * WIDTH)[TOTAL:, :, WIDTH:].any()


@pytest.mark.parametrize("mode", ["cast", "per_block"])
def test_the_projection_gives_the_bits_of_its_parts(kernels: StandIn, mode: str) -> None:
    uvqk, bias = make_uvqk()
    spec = make_spec(mode)
    expected = run(uvqk, bias, spec, fused=False)
    for recompute in (False, True):
        actual = run(uvqk, bias, spec, fused=True, recompute=recompute)
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name
    assert kernels.calls == ["forward", "backward"] * 3


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept_for_the_backward_pass(recompute: bool) -> None:
    uvqk, bias = make_uvqk()
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, _ = hstu_attention_from_uvqk(
            uvqk,
            bias_X=bias,
            num_heads=HEADS,
            seq_offsets=OFFSETS,
            spec=make_spec(),
            recompute=recompute,
        )
    in_bytes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    own = uvqk.untyped_storage().nbytes() + bias.untyped_storage().nbytes()
    codes = sum(in_bytes.values()) - own
    if recompute:
        assert codes == 0
    else:  # three operands by rows, two by columns, which have room for each user's last sixteen
        entries = HEADS * WIDTH
        assert 5 * ROWS * entries <= codes < (3 * ROWS + 2 * (ROWS + 256)) * entries + 4096
    assert out.grad_fn is not None


def test_without_gradients_nothing_is_transposed_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[bool] = []
    quantize = fp8_impl.quantize_uvqk

    def watched(*args: Any, **options: Any) -> Any:
        wanted.append(options["wants_q_k_transposed"])
        return quantize(*args, **options)

    monkeypatch.setattr(fp8_impl, "quantize_uvqk", watched)
    uvqk, bias = make_uvqk()
    call = {"bias_X": bias, "num_heads": HEADS, "seq_offsets": OFFSETS, "spec": make_spec()}
    with torch.no_grad():
        out, u = hstu_attention_from_uvqk(uvqk, **call)
    assert not out.requires_grad and not u.requires_grad
    assert hstu_attention_from_uvqk(uvqk, **call)[0].requires_grad
    assert wanted == [False, True]


def test_only_the_gate_needs_a_gradient(kernels: StandIn) -> None:
    uvqk, bias = make_uvqk()
    _, u = hstu_attention_from_uvqk(
        uvqk, bias_X=bias, num_heads=HEADS, seq_offsets=OFFSETS, spec=make_spec()
    )
    (grad,) = torch.autograd.grad(u.sum(), [uvqk])
    assert kernels.calls == ["forward"]
    expected = torch.zeros(ROWS, HEADS, 4 * WIDTH)
    expected[..., :WIDTH] = 1
    assert torch.equal(grad.view(expected.shape).float(), expected)


def test_no_rows(kernels: StandIn) -> None:
    spec = dataclasses.replace(make_spec(), num_contextuals=None, num_candidates=None)
    offsets = torch.zeros(3, dtype=torch.int64)
    uvqk = torch.zeros(0, HEADS * 4 * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(uvqk.shape[1], requires_grad=True)
    out, u = hstu_attention_from_uvqk(
        uvqk, bias_X=bias, num_heads=HEADS, seq_offsets=offsets, spec=spec
    )
    grads = torch.autograd.grad(out.sum() + u.sum(), [uvqk, bias])
    assert out.shape == u.shape == (0, HEADS, WIDTH) and not grads[1].any()
    q = torch.zeros(0, HEADS, WIDTH, dtype=torch.float16, requires_grad=True)
    out = fp8_impl.hstu_attention(q, q, v_THV=q, seq_offsets=offsets, spec=spec)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    assert kernels.calls == []


def test_strided_inputs_and_an_expanded_gradient() -> None:
    uvqk, _ = make_uvqk(torch.float16)
    q, k, v = uvqk.detach().view(ROWS, HEADS, 4 * WIDTH).split(WIDTH, -1)[1:]
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)  # head dim strided
    found = []
    for first in (q, turned):
        leaves = [x.detach().requires_grad_() for x in (first, k, v)]
        out = fp8_impl.hstu_attention(
            leaves[0], leaves[1], v_THV=leaves[2], seq_offsets=OFFSETS, spec=make_spec()
        )
        assert out.dtype == torch.float16
        found.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert all(x.isfinite().all() and x[:TOTAL].any() for x in found[0])


def test_a_projection_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uvqk must be \(T, num_heads \* 4"):
        hstu_attention_from_uvqk(
            torch.zeros(4, 30), bias_X=None, num_heads=2, seq_offsets=OFFSETS, spec=make_spec()
        )


def test_nan_in_a_row_reaches_its_own_user_alone() -> None:
    uvqk, bias = make_uvqk()
    with torch.no_grad():
        uvqk[3, WIDTH : 2 * WIDTH] = math.nan  # v of head 0, of the user with 40 tokens
    out = run(uvqk, bias, make_spec(), fused=True)["out"]
    assert out[3:41, 0].isnan().any() and out[41:].isfinite().all() and out[:1].isfinite().all()
