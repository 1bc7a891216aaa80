"""The Gluon kernels for Hopper against the oracle: they cannot run in Triton's interpreter.

Each mask is three kernels to compile, 4 to 6 s each with an empty cache: some two minutes in all.
"""

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import hstu_attention
from ops.jagged import lengths_to_offsets
from tests.ops.test_hstu_attention import Case
from tests.ops.triton_cases import (
    DEVICE,
    INTERPRETED,
    TRITON_CASES,
    assert_as_exact_as_pytorch,
    attend,
    make_inputs,
    oracle,
    run,
    triton_impl,
)


def _is_hopper() -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability()[0] == 9


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_hopper(), reason="needs a GPU of compute capability 9"),
]
SEVERAL_BLOCKS = Case((0, 1, 129, 300, 64, 256), (0, 0, 3, 150, 2, 0), (0, 1, 0, 70, 62, 130))
CASES = {
    **{name: c for name, c in TRITON_CASES.items() if not (c.position_bias or c.time_bias)},
    "several_blocks": SEVERAL_BLOCKS,
    "several_blocks_in_groups": Case(
        *(SEVERAL_BLOCKS.lengths, SEVERAL_BLOCKS.contextuals, SEVERAL_BLOCKS.candidates),
        {"target_group_size": 33},
    ),
    "several_blocks_windowed": Case(
        *(SEVERAL_BLOCKS.lengths, SEVERAL_BLOCKS.contextuals, SEVERAL_BLOCKS.candidates),
        {"attention_window": 70, "target_group_size": 5},
    ),
}


@pytest.fixture(autouse=True)
def _these_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a call would take the plain kernels."""

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("the plain Triton kernels ran")

    for name in ("forward_kernel", "keys_kernel", "rows_kernel"):
        monkeypatch.setattr(triton_impl, name, {(): refuse})


@pytest.mark.parametrize(
    ("name", "width"),
    [(name, 128) for name in CASES] + [("several_blocks", 64), ("several_blocks", 256)],
)
def test_every_mask_with_poison_behind_the_last_user(name: str, width: int) -> None:
    case = CASES[name]
    leaves, arguments, dims = make_inputs(
        case, dtype=torch.bfloat16, extra_rows=71, attention_dim=width, linear_dim=width
    )
    num_tokens = sum(case.lengths)
    exact = oracle(leaves, arguments, dims)
    with torch.no_grad():
        leaves["uvqk"][num_tokens:] = float("nan")
    actual = run(leaves, arguments, dims, "triton")
    for value in actual.values():
        assert torch.equal(value[num_tokens:], torch.zeros_like(value[num_tokens:]))
    assert_as_exact_as_pytorch(actual, run(leaves, arguments, dims, "pytorch"), exact)


def test_missing_counts() -> None:
    leaves, arguments, dims = make_inputs(
        SEVERAL_BLOCKS, dtype=torch.bfloat16, attention_dim=64, linear_dim=64
    )
    arguments["num_contextuals"] = arguments["num_candidates"] = None
    exact = oracle(leaves, arguments, dims)
    plain = run(leaves, arguments, dims, "pytorch")
    assert_as_exact_as_pytorch(run(leaves, arguments, dims, "triton"), plain, exact)


def _many_users(width: int) -> tuple[list[Tensor], dict[str, object]]:
    """700 users of 0 to 400 tokens: a program owns many blocks, long ones and short ones."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 400, (700,))
    num_rows = int(lengths.sum())
    leaves = [
        torch.randn(num_rows, 2, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    arguments: dict[str, object] = {
        "seq_offsets": lengths_to_offsets(lengths).to(DEVICE),
        "num_contextuals": (lengths // 100).to(DEVICE),
        "num_candidates": (lengths // 5).to(DEVICE),
        "max_seq_len": 400,
        "scaling_seqlen": 100.0,
    }
    return leaves, arguments


@pytest.mark.parametrize("width", [64, 128, 256])
def test_many_blocks_a_program(width: int) -> None:
    leaves, arguments = _many_users(width)
    grad_out = torch.randn_like(leaves[2])
    results = []
    for backend, dtype in (("pytorch", torch.float32), ("triton", torch.bfloat16)):
        q, k, v = (leaf.detach().to(dtype).requires_grad_() for leaf in leaves)
        out = hstu_attention(q, k, v_THV=v, backend=backend, **arguments)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out, [q, k, v], grad_out.to(dtype))
        results.append([out.detach(), *grads])
    for expected, actual in zip(*results, strict=True):
        error = (actual.float() - expected).norm() / expected.norm()
        assert error < 6e-3, float(error)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_same_bits_every_run_and_every_backward(width: int) -> None:
    """Programs draw their blocks in another order each time; the counters are put back."""
    leaves, arguments = _many_users(width)
    q, k, v = leaves
    first = None
    for _ in range(3):
        out = hstu_attention(q, k, v_THV=v, backend="triton", **arguments)  # type: ignore[arg-type]
        for _ in range(2):
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
            results = [out.detach(), *grads]
            if first is None:
                first = results
            assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


def test_a_batch_mate_of_nan_poisons_nobody() -> None:
    """Tiles reach into the next user's rows: those must not be read as numbers."""
    leaves, arguments, dims = make_inputs(
        SEVERAL_BLOCKS, dtype=torch.bfloat16, attention_dim=128, linear_dim=128
    )
    expected = attend(leaves, arguments, dims, "triton").detach()
    first, last = (int(x) for x in arguments["seq_offsets"][3:5])
    with torch.no_grad():
        leaves["uvqk"][first:last] = float("nan")
    actual = attend(leaves, arguments, dims, "triton").detach()
    others = torch.ones(len(actual), dtype=torch.bool)
    others[first:last] = False
    assert torch.equal(actual[others], expected[others])
