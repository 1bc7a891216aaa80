"""The preprocessor with Triton's jagged ops, and that no backend makes a step wait for a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ops.jagged import take_rows
from tests.modules.test_preprocessor import USERS, WIDTHS, make, rows_of
from tests.ops.jagged_kernels import (
    DEVICE,
    INTERPRETED,
    triton_layout,
    triton_rows,
    triton_tokens,
)
from tests.support.experiments import batch_of


@pytest.mark.parametrize("positions", ["newest", "oldest"])
@pytest.mark.parametrize("widths", [WIDTHS, WIDTHS | {"item": 4, "age": 3}], ids=["same", "other"])
def test_triton_gives_the_same_tokens_and_gradients(
    monkeypatch: pytest.MonkeyPatch, positions: str, widths: dict[str, int]
) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    batch = batch_of(USERS, batch_size=4).to(torch.device(DEVICE))
    results = []
    for backend in ("pytorch", "triton"):
        torch.manual_seed(3)
        preprocessor = make(backend=backend, positions=positions, feature_dims=widths).to(DEVICE)
        torch.nn.init.normal_(preprocessor.position.weight)
        rows = {name: x.to(DEVICE).requires_grad_() for name, x in rows_of(batch, widths).items()}
        sequence, layout = preprocessor(batch, rows)
        taken = take_rows(sequence.values_TD, layout.candidate_tokens_C, backend=backend)
        weights = torch.randn(taken.shape).to(DEVICE)
        leaves = [*rows.values(), *preprocessor.parameters()]
        grads = torch.autograd.grad((taken * weights).sum(), leaves, allow_unused=True)
        integers = [layout.candidate_tokens_C, sequence.seq_offsets_B1, sequence.timestamps_T]
        results.append([*integers, sequence.values_TD, *grads])
    for plain, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(plain, actual) for plain, actual in list(zip(*results, strict=True))[:3])


class NoCopiesFromTheHost(TorchDispatchMode):
    """Fails on an operation of the device that is given host memory, which would be copied there.

    Reading a value back needs no check: tensors of the meta device have none, so it fails itself.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if any(x.is_meta for x in made):
            assert all(x.is_meta for x in given), f"{func}: a copy of host values to the device"
        return out


class NoLists(TorchFunctionMode):
    """Fails on a list as an index: on the meta device that is no copy, on a GPU it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list) for part in index), "a list as an index"
        return func(*args, **(kwargs or {}))


class NoLaunch:
    """In the place of a kernel."""

    launches = 0

    def __getitem__(self, grid):
        NoLaunch.launches += 1
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["pytorch", "triton"])
def test_a_step_never_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, dropout: float
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the meta device is not a GPU
    for module in (triton_layout, triton_rows, triton_tokens):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, NoLaunch())
    preprocessor = make(backend=backend, dropout=dropout, dtype=torch.bfloat16).to("meta")
    batch = batch_of(USERS, batch_size=4)
    rows = {name: x.to("meta").requires_grad_() for name, x in rows_of(batch).items()}
    on_device = batch.to(torch.device("meta"))
    monkeypatch.setattr(NoLaunch, "launches", 0)
    with NoCopiesFromTheHost(), NoLists():
        sequence, layout = preprocessor(on_device, rows)
        taken = take_rows(
            sequence.values_TD, layout.candidate_tokens_C, dtype=torch.float32, backend=backend
        )
        taken.sum().backward()
    assert all(x.grad is not None for x in (*rows.values(), *preprocessor.parameters()))
    # layout 2, tokens 1, take 1; back: take 1, tokens 2
    assert NoLaunch.launches == (7 if backend == "triton" else 0)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda x: int(x.sum()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.repeat_interleave(x, x),
        lambda x: x.index_select(0, torch.tensor([0, 1]).to("meta")),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[[0, 1]],
    ],
    ids=["int", "nonzero", "mask", "repeat_interleave", "copy", "index on the host", "list"],
)
def test_the_test_of_waits_notices(hidden) -> None:
    errors = (RuntimeError, NotImplementedError, AssertionError)
    with NoCopiesFromTheHost(), NoLists(), pytest.raises(errors):
        hidden(torch.zeros(4, dtype=torch.int64, device="meta"))
