"""Keeping only the pre-activation: consumers of SiLU's output save a note instead of a view of it.

While a `RecomputedActivation` is entered, autograd hands it every tensor that it would keep for the
backward pass. A view of the watched activation is not kept; only where it lies is. The first
backward that asks computes the activation again, from the same input by the same kernel, so to the
same bits; the others get views of that one; it is dropped when the gradient reaches SiLU, after
all its consumers.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RecomputedActivation:
    """Context manager around the consumers of one activation; `watch` names it.

    Consumers that copy (a padded or flattened q) keep their copies. First derivatives only.
    """

    def __init__(self) -> None:
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._watched: Tensor | None = None
        self._compute: Callable[[], Tensor] | None = None
        self._again: Tensor | None = None

    def watch(self, view: Tensor, compute: Callable[[], Tensor]) -> None:
        """Stop keeping what lies in the storage of `view`.

        Args:
            view: one of SiLU's outputs. Does nothing where it needs no gradient, or holds no row.
            compute: makes a tensor of the same storage layout as the one `view` lies in; holds
                what it needs alive.
        """
        node = view.grad_fn
        if node is None or not view.numel():
            return
        # the node outlives the tensors kept for it, and what `compute` holds must go with those
        own = weakref.ref(self)
        node.register_prehook(lambda _: _release(own()))
        # alive while this is entered: an allocator hands a freed address to the next tensor
        self._watched = view.detach()
        self._compute = compute

    def __enter__(self) -> "RecomputedActivation":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*error)
        self._hooks = None  # it holds this object
        self._watched = None

    def _pack(self, x: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...], int]:
        if self._watched is not None and _address(x) == _address(self._watched):
            return x.shape, x.stride(), int(x.storage_offset())
        return x.detach()  # x itself could be a node's own output: a cycle that is never freed

    def _unpack(self, kept: Tensor | tuple[torch.Size, tuple[int, ...], int]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._again is None:
            assert self._compute is not None
            with torch.no_grad():
                self._again = self._compute()
        return self._again.as_strided(*kept)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _release(recomputed: RecomputedActivation | None) -> None:
    if recomputed is not None:
        recomputed._again = None
