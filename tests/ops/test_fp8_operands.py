"""The quantisers of FP8 attention against loops over users, interpreted or on a GPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.jagged import lengths_to_offsets
from tests.ops.fp8_kernels import fp8_operands, silu_impl
from tests.ops.fp8_operands_reference import Expected, expected_operand, place_of
from tests.ops.quantize_kernels import DEVICE, spread
from tests.ops.triton_cases import NUM_HEADS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = (0, 1, 15, 17, 0, 130, 16, 0)
SHARED = {"cast": "none", "per_block": "block", "per_head": "head", "per_tensor": "tensor"}


@pytest.fixture(autouse=True)
def _poison_behind_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a quantiser takes holds NaN beforehand."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def poisoned(x: Tensor) -> Tensor:
        x.view(torch.uint8).fill_(0xFF)
        return x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths)).to(DEVICE)


def rows(num_rows: int, *, width: int = 64, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    """Rows of widely spread sizes that differ from block to block."""
    x = spread(num_rows, NUM_HEADS, width, seed=seed, dtype=torch.float32)
    x *= (torch.arange(num_rows, device=DEVICE) % 97 - 48).exp2()[:, None, None]
    return x.clamp(-1e30, 1e30).to(dtype)


def assert_written(actual: Any, expected: Expected, *, transposed: bool = True) -> None:
    """Equal codes and scales where a user owns them, nothing written elsewhere."""
    pairs = [(actual.codes.cpu(), expected.codes, expected.owns_row)]
    if transposed:
        by_columns = (x.permute(2, 0, 1) for x in (actual.codes_t.cpu(), expected.codes_t))
        pairs.append((*by_columns, expected.owns_column))
    else:
        assert actual.codes_t is None
    pairs.append((actual.scale_inv.cpu(), expected.scale_inv, expected.owns_slot))
    for found, wanted, owned in pairs:
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        ours = found[owned].float().nan_to_num(1e9), wanted[owned].float().nan_to_num(1e9)
        assert torch.equal(*ours)
        assert (found[~owned].view(torch.uint8) == 0xFF).all()


def test_positions_of_a_group_are_a_permutation_of_pairs() -> None:
    places = [place_of(position) for position in range(16)]
    assert sorted(places) == list(range(16))
    assert places[:4] == [0, 1, 4, 5] and places[8:10] == [2, 3]
    assert place_of(16 + 9) == 16 + 3


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [(mode, torch.bfloat16) for mode in SHARED]
    + [("per_block", torch.float16), ("cast", torch.float32)],
)
def test_q_k_and_v(mode: str, dtype: torch.dtype) -> None:
    total = sum(LENGTHS)
    wide = torch.cat([rows(total + 9, seed=seed) for seed in range(3)], dim=2).to(dtype)
    wide[total:] = math.nan
    parts = q, k, v = wide.split(64, dim=2)
    offsets = offsets_of(LENGTHS)
    found = fp8_operands.quantize_qkv(q, k, v, seq_offsets=offsets, mode=mode)
    for actual, x in zip(found, parts, strict=True):
        assert actual.dtype == E4M3 and actual.codes.is_contiguous()
        expected = expected_operand(x.float().cpu(), offsets.tolist(), shared=SHARED[mode])
        assert_written(actual, expected)


@pytest.mark.parametrize("width", [128, 256])
def test_other_head_dims(width: int) -> None:
    x = rows(150, width=width)
    offsets = offsets_of((147,))
    found = fp8_operands.quantize_grad(x, seq_offsets=offsets, mode="per_block")
    expected = expected_operand(x.float().cpu(), offsets.tolist(), shared="block", factor=1.0)
    assert_written(found, expected)


@pytest.mark.parametrize(
    ("mode", "dtype"), [(mode, E4M3) for mode in SHARED] + [("per_block", E5M2), ("per_head", E5M2)]
)
def test_the_gradient_has_scales_in_every_mode(mode: str, dtype: torch.dtype) -> None:
    x = rows(sum(LENGTHS) + 3)
    offsets = offsets_of(LENGTHS)
    found = fp8_operands.quantize_grad(x, seq_offsets=offsets, mode=mode, dtype=dtype)
    shared = "block" if mode == "cast" else SHARED[mode]
    options = {"shared": shared, "dtype": dtype, "factor": 1.0}
    expected = expected_operand(x.float().cpu(), offsets.tolist(), **options)
    assert found.dtype == dtype
    assert_written(found, expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("mode", ["cast", "per_block", "per_tensor"])
def test_uvqk_gives_the_bits_of_silu_and_quantise(mode: str, has_bias: bool) -> None:
    total, width = sum(LENGTHS), 64
    generator = torch.Generator().manual_seed(3)
    uvqk = torch.randn(total + 5, NUM_HEADS * 4 * width, generator=generator).mul(3)
    uvqk = uvqk.to(DEVICE, torch.bfloat16)
    bias = torch.randn(uvqk.shape[1], generator=generator).to(DEVICE) if has_bias else None
    offsets = offsets_of(LENGTHS)
    dims = {"attention_dim": width, "linear_dim": width}
    _, v, q, k = silu_impl.silu_split(uvqk, NUM_HEADS, **dims, bias_X=bias, activates_u=False)
    found = fp8_operands.quantize_uvqk(
        uvqk, bias_X=bias, num_heads=NUM_HEADS, seq_offsets=offsets, mode=mode
    )
    for actual, x in zip(found, (q, k, v), strict=True):
        expected = expected_operand(x.float().cpu(), offsets.tolist(), shared=SHARED[mode])
        assert_written(actual, expected)


def test_only_what_is_asked_for_is_transposed() -> None:
    x = rows(40)
    offsets = offsets_of((33, 7))
    expected = expected_operand(x.float().cpu(), offsets.tolist(), shared="block")
    for q_k, of_v in ((False, True), (True, False)):
        options = {"wants_q_k_transposed": q_k, "wants_v_transposed": of_v}
        found = fp8_operands.quantize_qkv(x, x, x, seq_offsets=offsets, mode="per_block", **options)
        for actual, transposed in zip(found, (q_k, q_k, of_v), strict=True):
            assert_written(actual, expected, transposed=transposed)


def test_nan_and_infinity_reach_the_codes_of_their_block_alone() -> None:
    x = torch.ones(260, NUM_HEADS, 64, dtype=torch.bfloat16, device=DEVICE)
    x[3, 0, 5], x[130, 1, 7] = math.nan, -math.inf
    found = fp8_operands.quantize_grad(x, seq_offsets=offsets_of((260,)), mode="per_block")
    codes, scale_inv = found.codes.cpu().float(), found.scale_inv.cpu()
    assert codes.isnan().sum() == 1 and codes[3, 0, 5].isnan()
    assert codes[130, 1, 7] == -448.0
    assert scale_inv[:3].tolist() == [[2.0**60, 2.0**-8], [2.0**-8, 2.0**60], [2.0**-8] * 2]
    assert (codes[128:, 0] == 256.0).all() and (codes[:128, 1] == 256.0).all()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_users_without_tokens(lengths: tuple[int, ...]) -> None:
    x = rows(5)
    offsets = offsets_of(lengths)
    for mode in SHARED:
        found = fp8_operands.quantize_qkv(x, x, x, seq_offsets=offsets, mode=mode)
        expected = expected_operand(x.float().cpu(), offsets.tolist(), shared="block")
        for actual in found:
            assert_written(actual, expected)
