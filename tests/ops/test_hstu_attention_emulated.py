"""Emulated FP8 attention: against the same roundings written densely, and against the oracle."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import FP8_MODES, Fp8Spec, emulated_impl, hstu_attention
from ops.hstu_attention.reference import positions, visible
from ops.hstu_attention.spec import FP8_FACTOR, AttentionSpec
from ops.hstu_attention.time_buckets import time_bucket_boundaries
from ops.jagged import lengths_to_offsets
from tests.ops.test_hstu_attention import CASES, Case

NUM_HEADS, ATTENTION_DIM, LINEAR_DIM = 2, 4, 6
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def fp8(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """The FP32 value's nearest number of the format, ties to even, saturated; in float64."""
    mantissa_bits, lowest = (3, -6) if dtype == E4M3 else (2, -14)
    x = x.float().double().clamp(-LARGEST[dtype], LARGEST[dtype])
    exponent = torch.frexp(x).exponent.clamp(min=lowest + 1) - 1
    quantum = 2.0 ** (exponent - mantissa_bits).double()
    return torch.round(x / quantum) * quantum


def shared_amax(x: Tensor, offsets: list[int], sharing: str) -> Tensor:
    """(T, H) maxima of what shares a scale with each row, by loops over users."""
    amax = torch.zeros(x.shape[:2], dtype=torch.float64)
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        step = {"row": 1, "block": 128}.get(sharing, max(end - start, 1))
        for first in range(start, end, step):
            rows = slice(first, min(first + step, end))
            amax[rows] = x[rows].abs().amax((0, 2))
            if sharing == "user":
                amax[rows] = x[rows].abs().max()
    if sharing == "tensor" and offsets[-1]:
        amax[:] = x[: offsets[-1]].abs().max()
    return amax


def quantised(
    x: Tensor, offsets: list[int], sharing: str, dtype: torch.dtype, factor: float = FP8_FACTOR
) -> tuple[Tensor, Tensor]:
    """Codes (T, H, A) and the power of two that comes off them (T, H, 1), float64."""
    if sharing == "none":
        return fp8(x.float() * factor, dtype), torch.ones(*x.shape[:2], 1, dtype=torch.float64)
    amax = shared_amax(x.float(), offsets, sharing).float()[..., None].mul(factor).double()
    exponent = (amax / LARGEST[dtype]).log2().ceil().clamp(-120, 60)
    scale_inv = torch.where(amax == 0, 1.0, exponent.exp2())
    return fp8(x.float() * (factor / scale_inv).float(), dtype), scale_inv


def weight_unit(q_inv: Tensor, k_inv: Tensor, width: int) -> Tensor:
    """w of each pair of rows (N, 1) and keys (N, 1), where there are scales and no bias."""
    largest_score = width**0.5 * LARGEST[E4M3] ** 2 * q_inv * k_inv.T
    return (LARGEST[E4M3] / largest_score).log2().floor().clamp(0, 30).exp2()


def emulate(
    inputs: dict[str, Tensor], spec: AttentionSpec, offsets: list[int], grad_out: Tensor
) -> dict[str, Tensor]:
    """o and all gradients, dense, a user and head at a time."""
    mode, grad_dtype = spec.fp8.mode, spec.fp8.grad_dtype
    plain = mode.removeprefix("per_")
    sharing = {"cast": "none", "batch": "user"}.get(plain, plain)
    others = "block" if mode == "per_row" else sharing
    of_grad = "block" if mode in ("cast", "per_row") else sharing
    (q, q_inv), (k, k_inv) = (quantised(inputs[x], offsets, sharing, E4M3) for x in "qk")
    q2, q2_inv = quantised(inputs["q"], offsets, others, E4M3)
    v, v_inv = quantised(inputs["v"], offsets, others, E4M3)
    g, g_inv = quantised(grad_out, offsets, of_grad, grad_dtype, factor=1.0)
    q, k, q2 = (x * inv / FP8_FACTOR for x, inv in ((q, q_inv), (k, k_inv), (q2, q2_inv)))
    v_inv = v_inv / FP8_FACTOR
    alpha, n_inv = q.shape[-1] ** -0.5, 1 / spec.scaling_seqlen
    v_amax = 8 if mode == "cast" else 448
    factor = 2.0 ** -math.ceil(math.log2(1.1 * v.shape[-1] * LARGEST[grad_dtype] * v_amax / 448))
    found = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in inputs.items()}
    found["o"] = torch.zeros_like(grad_out, dtype=torch.float64)
    for user, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        c, t = int(spec.num_contextuals[user]), int(spec.num_candidates[user])
        counts = (c, end - start - c - t, t)
        mask = visible(*counts, spec)
        place = positions(*counts, spec.target_group_size)
        for head in range(q.shape[1]):
            at = (slice(start, end), head)
            index = {}
            scores = alpha * q[at] @ k[at].T
            if "position_bias" in inputs:
                distance = (place[:, None] - place).abs()
                index["position_bias"] = distance.clamp(max=inputs["position_bias"].shape[1] - 1)
            if "time_bias" in inputs:
                times = spec.timestamps[start:end]
                bounds = time_bucket_boundaries(inputs["time_bias"].shape[1], times.device)
                elapsed = (times[:, None] - times).abs()
                index["time_bias"] = torch.bucketize(elapsed, bounds, right=True)
            for name, buckets in index.items():
                scores = scores + inputs[name].detach()[head][buckets]
            sigmoid = scores.sigmoid()
            unit = torch.tensor(2.0**spec.fp8.weight_exponent, dtype=torch.float64)
            if mode != "cast" and not index:
                unit = weight_unit(q_inv[at], k_inv[at], q.shape[-1])
            p = torch.where(mask, fp8(scores * sigmoid * unit) / unit, 0.0)
            found["o"][at] = n_inv * p @ (v[at] * v_inv[at])
            found["v"][at] = n_inv * p.T @ (g[at] * g_inv[at])
            slope = sigmoid * (1 + scores * (1 - sigmoid))
            ds = torch.where(mask, slope * (g[at] @ v[at].T), 0.0)
            off = g_inv[at] * v_inv[at].T
            high = fp8(ds * factor)
            found["k"][at] = alpha * n_inv * (high / factor * off).T @ q2[at]
            found["q"][at] = alpha * n_inv * (high / factor * off) @ k[at]
            for name, buckets in index.items():
                found[name][head].index_put_((buckets,), ds * off * n_inv, accumulate=True)
    return found


def make_call(
    case: Case, mode: str, **fp8_options: Any
) -> tuple[dict[str, Tensor], AttentionSpec, Tensor, Tensor]:
    """Differentiable inputs with five rows of no user, the spec, offsets and dO."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = sum(case.lengths)
    shape = (total + 5, NUM_HEADS)
    inputs = {"q": draw(*shape, ATTENTION_DIM), "k": draw(*shape, ATTENTION_DIM)}
    inputs["v"] = draw(*shape, LINEAR_DIM)
    inputs["q"][: total // 3] *= 1e-2  # scales that differ within a user
    if case.position_bias:
        inputs["position_bias"] = draw(NUM_HEADS, 7)
    if case.time_bias:
        inputs["time_bias"] = draw(NUM_HEADS, 40)
    grad_out = draw(*shape, LINEAR_DIM)
    grad_out[: total // 2] *= 1e-5
    for x in (*(inputs[name] for name in "qkv"), grad_out):
        x[total:] = math.nan  # no user's: what recycled memory holds
    spec = AttentionSpec(
        max_seq_len=300,
        scaling_seqlen=7.0,
        num_contextuals=torch.tensor(case.contextuals),
        num_candidates=torch.tensor(case.candidates),
        timestamps=torch.randint(0, 10**6, (total + 5,), generator=generator),
        fp8=Fp8Spec(mode=mode, **fp8_options),
        **case.options,
    )
    offsets = lengths_to_offsets(torch.tensor(case.lengths))
    return {name: x.requires_grad_() for name, x in inputs.items()}, spec, offsets, grad_out


def run(
    inputs: dict[str, Tensor],
    spec: AttentionSpec,
    offsets: Tensor,
    grad_out: Tensor,
    backend: str = "pytorch",
) -> dict[str, Tensor]:
    """o and all gradients, by the op."""
    options = {name: getattr(spec, name) for name in AttentionSpec.__dataclass_fields__}
    options |= {name: x for name, x in inputs.items() if name.endswith("bias")}
    out = hstu_attention(
        inputs["q"],
        inputs["k"],
        **options | {"v_THV": inputs["v"], "seq_offsets": offsets, "backend": backend},
    )
    grads = torch.autograd.grad(out, list(inputs.values()), grad_out)
    return {"o": out.detach(), **dict(zip(inputs, grads, strict=True))}


def assert_emulated(case: Case, mode: str, **options: Any) -> None:
    call = make_call(case, mode, **options)
    inputs, spec, offsets, grad_out = call
    expected = emulate(inputs, spec, offsets.tolist(), grad_out)
    actual = run(*call)
    total = sum(case.lengths)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value.detach(), rtol=1e-8, atol=1e-14, msg=name)
        if not name.endswith("bias"):
            assert not actual[name][total:].any(), name
    if total:
        assert all(value.any() for value in actual.values())


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_emulation(name: str) -> None:
    assert_emulated(CASES[name], "per_block")


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", FP8_MODES)
def test_equals_the_dense_emulation_in_every_mode(mode: str, grad_dtype: torch.dtype) -> None:
    for name in ("one_group", "all_at_once", "long_of_one_length"):
        assert_emulated(CASES[name], mode, grad_dtype=grad_dtype)


def test_equals_the_dense_emulation_with_scaled_weights() -> None:
    assert_emulated(CASES["all_at_once"], "cast", weight_exponent=5)


@pytest.mark.parametrize("product", ["O", "dV", "dK", "dQ"])
def test_the_table_says_what_a_product_rounds(
    monkeypatch: pytest.MonkeyPatch, product: str
) -> None:
    call = make_call(CASES["hostile_lengths"], "per_block")
    before = run(*call)
    monkeypatch.setitem(emulated_impl.INTERMEDIATE, product, "bf16")
    after = run(*call)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {product.removeprefix("d").lower()}


LENGTH, HEADS, WIDTH = 512, 2, 128
# of kernels that round the same; FBGEMM's own are no better (o, dq, dk, dv)
KNOWN_ERRORS = {"o": 1.2e-2, "q": 3.0e-2, "k": 5.3e-2, "v": 4.3e-2}


def errors(
    spec: Fp8Spec, *, grad_scale: float | Tensor = 1.0, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Relative error of o and gradients against the float64 oracle; q, k, v as SiLU leaves them."""
    generator = torch.Generator().manual_seed(3)
    shape = (LENGTH, HEADS, WIDTH)
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for _ in range(4))
    inputs = {name: torch.nn.functional.silu(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    grad_out = (grad_out * grad_scale).to(dtype)
    plain = {"max_seq_len": LENGTH, "scaling_seqlen": float(LENGTH)}
    offsets = torch.tensor([0, LENGTH])
    found = {}
    for backend, fp8_spec, cast in (("pytorch", spec, dtype), ("reference", None, torch.float64)):
        leaves = {name: x.to(cast).requires_grad_() for name, x in inputs.items()}
        call = AttentionSpec(**plain, fp8=fp8_spec)
        found[backend] = run(leaves, call, offsets, grad_out.to(cast), backend=backend)
    actual, exact = found["pytorch"], found["reference"]
    assert all(value.dtype == dtype for value in actual.values())
    return {x: float((actual[x] - exact[x]).norm() / exact[x].norm()) for x in exact}


@pytest.mark.parametrize("mode", FP8_MODES)
def test_errors_are_those_of_the_rounding(mode: str) -> None:
    found = errors(Fp8Spec(mode=mode))
    allowed = 1.35 if mode == "cast" else 1.1  # without scales small values are flushed
    for name, known in KNOWN_ERRORS.items():
        assert 0.7 * known < found[name] < allowed * known, (name, found)


def test_bfloat16_adds_little() -> None:
    found = errors(Fp8Spec(mode="per_block"), dtype=torch.bfloat16)
    assert all(found[name] < 1.15 * known for name, known in KNOWN_ERRORS.items()), found


@pytest.mark.parametrize("mode", ["cast", "per_block", "per_tensor"])
def test_a_small_gradient_costs_nothing(mode: str) -> None:
    """Neither all rows at 1e-5, nor every other block, nor some rows of each block."""
    unit = errors(Fp8Spec(mode=mode))
    row = torch.arange(LENGTH)[:, None, None]
    for scale in (1e-5, torch.where(row // 128 % 2 == 0, 1e-5, 1.0), 1e-5 ** (row % 7 == 0)):
        found = errors(Fp8Spec(mode=mode), grad_scale=scale)
        assert all(found[name] < 1.05 * unit[name] for name in unit), (scale, found, unit)


def test_e5m2_is_worse_and_only_as_much_as_its_bit() -> None:
    finer, coarser = (errors(Fp8Spec(mode="per_block", grad_dtype=x)) for x in (E4M3, E5M2))
    assert coarser["o"] == finer["o"]
    assert all(1.2 < coarser[name] / finer[name] < 2 for name in "qkv"), (finer, coarser)


def test_values_beyond_the_format_saturate_and_nan_is_seen() -> None:
    for mode in FP8_MODES:
        inputs, spec, offsets, grad_out = make_call(CASES["plain_causal"], mode)
        with torch.no_grad():
            inputs["q"][0] = inputs["k"][0] = inputs["v"][0] = 1e4
        assert all(x.isfinite().all() for x in run(inputs, spec, offsets, grad_out).values())
        with torch.no_grad():
            inputs["v"][0] = math.nan
        assert run(inputs, spec, offsets, grad_out)["o"].isnan().any()


def test_zeros_stay_zeros_and_subnormal_numbers_harm_nothing() -> None:
    for mode in FP8_MODES:
        for fill in (0.0, 1e-40):
            inputs, spec, offsets, grad_out = make_call(CASES["all_at_once"], mode)
            with torch.no_grad():
                inputs["v"][: offsets[-1]] = fill
            found = run(inputs, spec, offsets, torch.full_like(grad_out, fill))
            assert all(x.isfinite().all() for x in found.values())
            assert fill or not any(x.any() for x in found.values())


def test_the_same_bits_every_run_whatever_the_batch_mates() -> None:
    for mode in ("cast", "per_row", "per_block", "per_head", "per_batch"):
        call = make_call(CASES["differing_contextuals"], mode)
        first, second = run(*call), run(*call)
        assert all(torch.equal(first[name], second[name]) for name in first)
        inputs, _, _, grad_out = call
        alone_inputs = {name: x.detach()[9:18].requires_grad_() for name, x in inputs.items()}
        case = Case((9,), (2,), (2,))
        _, spec, offsets, _ = make_call(case, mode)
        spec = AttentionSpec(**(vars(spec) | {"timestamps": None}))
        alone = run(alone_inputs, spec, offsets, grad_out[9:18])
        for name, value in alone.items():
            torch.testing.assert_close(first[name][9:18], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("backend", ["triton", "cutlass", "reference"])
def test_other_backends_refuse_by_name(backend: str) -> None:
    call = make_call(CASES["plain_causal"], "per_block")
    with pytest.raises(NotImplementedError, match=f"'{backend}' cannot run.*what runs here: pyt"):
        run(*call, backend=backend)


@pytest.mark.parametrize("fields", [{"mode": "bf16"}, {"mode": "cast", "grad_dtype": torch.int8}])
def test_a_spec_that_there_is_not_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Fp8Spec.*got"):
        Fp8Spec(**fields)


def test_the_backward_keeps_codes_and_no_inputs() -> None:
    inputs, spec, offsets, _ = make_call(CASES["long_of_one_length"], "per_block")
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        options = {"max_seq_len": 300, "scaling_seqlen": 7.0, "fp8": spec.fp8}
        q, k, v = (inputs[name] for name in "qkv")
        hstu_attention(q, k, v_THV=v, seq_offsets=offsets, backend="pytorch", **options)
    wide_ones = [x for x in kept if x.dim() == 3 and x.shape[-1] > 1]
    assert wide_ones and all(x.dtype == E4M3 for x in wide_ones)
