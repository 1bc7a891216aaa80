"""recompute_input_silu on the plain path: the same bits, and SiLU's output really gone."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from modules import hstu_attention
from modules.hstu_stack import HSTUStack
from ops.silu_split import RecomputedActivation, silu_split
from tests.modules.test_hstu_stack import (
    CANDIDATES,
    CONTEXTUALS,
    LENGTHS,
    make_sequence,
    make_stack,
    random_rows,
)


def gradients(stack: HSTUStack, values: Tensor, *, times: int = 1) -> list[Tensor]:
    torch.manual_seed(3)
    out = stack(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES)).values_TD
    weights = random_rows(sum(LENGTHS), seed=2)
    for _ in range(times):
        grads = torch.autograd.grad(
            out, [values, *stack.parameters()], weights, retain_graph=times > 1
        )
    return [out.detach(), *grads]


@pytest.mark.parametrize("attention", ["pytorch", "reference"])
@pytest.mark.parametrize("norm_too", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_changes_no_bit(attention: str, norm_too: bool, times: int) -> None:
    results = []
    for recompute in (False, True):
        stack = make_stack(
            attention_backend=attention,
            recompute_input_silu=recompute,
            recompute_input_layernorm=norm_too,
            num_position_bias_buckets=4,
            dropout=0.3,
        ).train()
        values = random_rows(sum(LENGTHS)).requires_grad_()
        results.append(gradients(stack, values, times=times))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_graph_does_not_keep_the_activation(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[int] = []

    def watched(*args, **kwargs):
        parts = silu_split(*args, **kwargs)
        addresses.append(parts[1].untyped_storage().data_ptr())
        return parts

    monkeypatch.setattr(hstu_attention, "silu_split", watched)
    stack = make_stack(1, recompute_input_silu=recompute).train()
    values = random_rows(sum(LENGTHS)).requires_grad_()
    out = stack(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES)).values_TD
    assert len(addresses) == 1
    assert (addresses[0] in kept_storages(out)) == (not recompute)
    out.sum().backward()
    assert len(addresses) == (2 if recompute else 1)  # once for attention and gate together


def kept_storages(out: Tensor) -> set[int]:
    """Return the addresses of what a graph keeps, without running hooks that compute it."""
    addresses, seen, waiting = set(), set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                entries = getattr(node, name)
                for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
                    if isinstance(kept := entry.data, Tensor):
                        addresses.add(kept.untyped_storage().data_ptr())
        waiting.extend(parent for parent, _ in node.next_functions)
    return addresses


def consume(uvqk: Tensor, recomputed: RecomputedActivation) -> Tensor:
    with recomputed:
        u, v, q, k = silu_split(uvqk, 2, attention_dim=3, linear_dim=3)
        rows = uvqk.detach()
        recomputed.watch(u, lambda: silu_split(rows, 2, attention_dim=3, linear_dim=3)[0])
        return (u * v).sum() + (q * k).sum() + (u * k).sum()


def test_another_tensor_in_freed_memory_is_not_taken_for_the_activation() -> None:
    """Consumers that keep none of the parts let go of them before the last of them has run."""
    uvqk = torch.randn(500, 24, requires_grad=True)
    recomputed = RecomputedActivation()
    with recomputed:
        u, v, q, k = silu_split(uvqk, 2, attention_dim=3, linear_dim=3)
        address = u.untyped_storage().data_ptr()
        rows = uvqk.detach()
        recomputed.watch(u, lambda: silu_split(rows, 2, attention_dim=3, linear_dim=3)[0])
        total = u.sum() + v.sum() + q.sum() + k.sum()
        del u, v, q, k
        others = [torch.full((500, 24), float(i)) for i in range(8)]
        assert address not in {x.untyped_storage().data_ptr() for x in others}
        (total * others[0]).sum().backward()
    assert recomputed._watched is None


def test_nothing_outlives_the_backward() -> None:
    uvqk = torch.randn(5, 24, requires_grad=True)
    recomputed = RecomputedActivation()
    out = consume(uvqk, recomputed)
    rows = weakref.ref(recomputed)
    del recomputed
    gc.disable()
    try:
        assert rows() is not None
        out.backward()
        assert rows() is None, "the graph's nodes still hold what the activation was made from"
    finally:
        gc.enable()


def test_without_gradients_nothing_is_watched() -> None:
    recomputed = RecomputedActivation()
    out = consume(torch.randn(5, 24), recomputed)
    assert not out.requires_grad
    leaf = torch.zeros(0, 24, requires_grad=True)
    consume(leaf, RecomputedActivation()).backward()
    assert leaf.grad is not None and leaf.grad.shape == (0, 24)
