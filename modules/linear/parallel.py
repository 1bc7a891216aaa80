"""Tensor and sequence parallelism of an HSTU layer, on Megatron-Core's groups and mappings.

    x (all ranks the same) -> norm -> [uvqk, own heads] -> attention of own heads -> norm over all
    heads: sums of ranks -> gate, dropout -> [proj, own heads] -> sum over ranks -> + x

Heads are cut: a rank has the rows of uvqk and the columns of proj that belong to its heads, and
nothing in between is exchanged but two numbers a token for the norm. With sequence parallelism
tokens are cut outside of the linears, too: rows are gathered behind the first norm, and the sum
behind proj leaves each rank its own tokens. Tokens are filled up to a multiple of the ranks there;
what fills them enters no product, norm sum or attention.

Gradients. All ranks of a group compute the same loss, and each counts it as its share, 1 / size
(`training.step` divides by the labels of all ranks). So gradients are 1 / size of the whole on
every rank; `GradientKind` says what has to be added up to get it.

Dropout. The mask is drawn for all heads and a rank takes its part: streams stay equal, and nothing
is dropped that one process would keep.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.linear import GatedNormLinear, NormLinear
from modules.linear.engine import LinearEngine
from ops.dropout import dropout as dropout_rows
from ops.norm import layer_norm

_ParameterT = TypeVar("_ParameterT", bound=nn.Parameter)


class GradientKind(Enum):
    """What a parameter's gradient on one rank is of the whole."""

    WHOLE = "whole"
    """1 / size of it: the sum over all ranks is the gradient."""
    TOKENS = "tokens"
    """1 / size of what this rank's tokens give: size times the sum over all ranks."""
    PART = "part"
    """1 / size of it, for this rank's part of the parameter: size times the sum over replicas."""


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The ranks that share one model, as a layer sees them.

    Attributes:
        size, rank: of the group, and in it.
        group: its process group.
        splits_tokens: sequence parallelism.
    """

    size: int
    rank: int
    group: dist.ProcessGroup
    splits_tokens: bool

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along a dimension that the size divides: a view."""
        return whole.chunk(self.size, dim)[self.rank]

    def scatter_tokens(self, rows_TD: Tensor) -> Tensor:
        """This rank's tokens, (ceil(T / size), D), the last ones filled with zeros."""
        from megatron.core.tensor_parallel import mappings

        padded = F.pad(rows_TD, (0, 0, 0, -len(rows_TD) % self.size))
        return mappings.scatter_to_sequence_parallel_region(padded, group=self.group)

    def gather_tokens(self, rows_PD: Tensor, num_rows: int, *, is_replicated: bool) -> Tensor:
        """The first `num_rows` tokens of all ranks.

        Args:
            is_replicated: all ranks do the same with them, so that each has the whole gradient;
                else the gradients of the ranks are added up.
        """
        from megatron.core.tensor_parallel import mappings

        return mappings.gather_from_sequence_parallel_region(
            rows_PD, tensor_parallel_output_grad=not is_replicated, group=self.group
        )[:num_rows]

    def copied(self, rows: Tensor) -> Tensor:
        """The same rows; the gradients of the ranks are added up."""
        from megatron.core.tensor_parallel import mappings

        return mappings.copy_to_tensor_model_parallel_region(rows, group=self.group)

    def summed(self, rows: Tensor) -> Tensor:
        """The sum over ranks, for what all of them then compute alike."""
        from megatron.core.tensor_parallel import mappings

        return mappings.reduce_from_tensor_model_parallel_region(
            rows.contiguous(), group=self.group
        )

    def summed_tokens(self, rows_PD: Tensor) -> Tensor:
        """The sum over ranks of this rank's tokens, (P / size, D)."""
        from megatron.core.tensor_parallel import mappings

        return mappings.reduce_scatter_to_sequence_parallel_region(
            rows_PD.contiguous(), group=self.group
        )


class ParallelNormLinear(NormLinear):
    """`NormLinear` of which a rank has the output features of its heads.

    Args:
        parallel: the ranks.
        hidden_size, out_features, eps, recompute_norm: of the whole, as in `NormLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        out_features: int,
        *,
        eps: float,
        parallel: TensorParallel,
        recompute_norm: bool = False,
    ) -> None:
        self.parallel = parallel
        self._whole_features = out_features
        super().__init__(
            hidden_size, out_features // parallel.size, eps=eps, recompute_norm=recompute_norm
        )
        mark(self.uvqk.weight, GradientKind.PART, dim=0)
        mark(self.uvqk.bias, GradientKind.PART, dim=0)
        if parallel.splits_tokens:
            mark(self.norm.weight, GradientKind.TOKENS)
            mark(self.norm.bias, GradientKind.TOKENS)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw what one process would and keep this rank's part."""
        self.norm.reset_parameters()
        whole = self.uvqk.weight.new_empty(self._whole_features, self.uvqk.in_features)
        nn.init.normal_(whole, std=0.02)
        self.uvqk.weight.copy_(self.parallel.own(whole, 0))
        nn.init.zeros_(self.uvqk.bias)

    def forward(self, x_TD: Tensor, *, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Return uvqk (num_rows, X / size) and x for the residual.

        Args:
            x_TD: all tokens, or with sequence parallelism this rank's.
            num_rows: tokens in all; None = as many as there are.
        """
        num_rows = len(x_TD) if num_rows is None else num_rows

        def normed(rows: Tensor) -> Tensor:
            out = layer_norm(rows, self.norm.weight, bias_D=self.norm.bias, eps=self.norm.eps)
            if self.parallel.splits_tokens:
                return self.parallel.gather_tokens(out, num_rows, is_replicated=False)
            return self.parallel.copied(out)

        if self.recompute_norm and self.training:
            # Gathered rows are gathered again, too: they are the larger part of what is kept.
            out = checkpoint(
                lambda rows: _product(self.engine, normed(rows), self.uvqk, has_bias=True),
                x_TD,
                use_reentrant=False,
            )
        else:
            out = _product(self.engine, normed(x_TD), self.uvqk, has_bias=True)
        return out, x_TD


class ParallelGatedNormLinear(GatedNormLinear):
    """`GatedNormLinear` of which a rank has the input features of its heads.

    Args:
        parallel: the ranks.
        in_features, hidden_size, eps, dropout: of the whole, as in `GatedNormLinear`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_size: int,
        *,
        eps: float,
        dropout: float,
        parallel: TensorParallel,
    ) -> None:
        self.parallel = parallel
        self._whole_features = in_features
        super().__init__(in_features // parallel.size, hidden_size, eps=eps, dropout=dropout)
        mark(self.proj.weight, GradientKind.PART, dim=1)
        mark(self.norm.weight, GradientKind.PART, dim=0)
        mark(self.norm.bias, GradientKind.PART, dim=0)
        if parallel.splits_tokens:
            mark(self.proj.bias, GradientKind.TOKENS)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw what one process would and keep this rank's part."""
        self.norm.reset_parameters()
        whole = self.proj.weight.new_empty(self.proj.out_features, self._whole_features)
        nn.init.xavier_uniform_(whole)
        self.proj.weight.copy_(self.parallel.own(whole, 1))
        nn.init.zeros_(self.proj.bias)

    def forward(
        self, attn_THV: Tensor, u_THV: Tensor, x_TD: Tensor, *, u_bias_HV: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output in the shape of x, which holds this rank's tokens only with
        sequence parallelism."""
        assert u_bias_HV is None, "u comes activated"
        gated = self._normed(attn_THV.flatten(1)) * u_THV.flatten(1)
        if self.training and self.dropout:
            ones = gated.new_ones(len(gated), self._whole_features)
            gated = gated * self.parallel.own(dropout_rows(ones, self.dropout), 1)
        out = _product(self.engine, gated, self.proj, has_bias=False)
        if self.parallel.splits_tokens:
            missing = len(x_TD) * self.parallel.size - len(out)
            out = self.parallel.summed_tokens(F.pad(out, (0, 0, 0, missing)))
        else:
            out = self.parallel.summed(out)
        return x_TD + (out + self.proj.bias.to(out.dtype))

    def _normed(self, rows: Tensor) -> Tensor:
        """Layer norm over the features of all ranks; statistics in float32, deviations summed."""
        wide = rows.to(self.norm.weight.dtype)
        mean = self._over_ranks(wide.sum(1, keepdim=True)) / self._whole_features
        wide = wide - mean
        variance = self._over_ranks(wide.square().sum(1, keepdim=True)) / self._whole_features
        normed = wide * torch.rsqrt(variance + self.norm.eps)
        return (normed * self.norm.weight + self.norm.bias).to(rows.dtype)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """Sums over ranks, which each rank uses for its own features."""
        return self.parallel.copied(self.parallel.summed(sums))


def mark(parameter: _ParameterT, kind: GradientKind, *, dim: int | None = None) -> _ParameterT:
    """The parameter, with what its gradient is and, of a part, along which dimension it is cut."""
    parameter.gradient_kind, parameter.split_dim = kind, dim  # type: ignore[attr-defined]
    return parameter


def kind_of(parameter: nn.Parameter) -> GradientKind:
    """What a parameter was marked as; WHOLE unless it was."""
    return getattr(parameter, "gradient_kind", GradientKind.WHOLE)


def split_dim_of(parameter: nn.Parameter) -> int | None:
    """Dimension along which ranks have parts of a parameter; None: they have all of it."""
    return getattr(parameter, "split_dim", None)


def _product(
    engine: LinearEngine | None, rows: Tensor, linear: nn.Linear, *, has_bias: bool
) -> Tensor:
    bias = linear.bias if has_bias else None
    if engine is not None and engine.is_active:
        return engine.linear(rows, linear.weight, bias)
    return F.linear(
        rows, linear.weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
    )


__all__ = [
    "GradientKind",
    "ParallelGatedNormLinear",
    "ParallelNormLinear",
    "TensorParallel",
    "kind_of",
    "mark",
    "split_dim_of",
]
