"""Speed of the elementwise kernels of an HSTU layer on one GPU, against a copy of the same run.

    python benchmarks/elementwise.py [--shapes 1024x4x256x65536 ...] [--ops gate_forward ...]

Prints one JSON object a line: the gate's errors, the copy rate of this run, then a row for each op.
A gate that fails ends the run with status 1 before any timing.

    ms          CUDA events around the call, L2 overwritten before each, no launch gaps; median. It
                includes the small reduction of the partial sums where there are parameter gradients
    bytes       what must move: every input and output once; tensors of rows only. As in the layer,
                u is left to the gate: silu moves v, q, k forward and all gradients backward
    of_copy     bytes / ms as a share of what a 1 GiB copy moves in this run
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hstu_attention import ceilings, kernel_ms
from ops.gated_norm import gated_norm
from ops.norm import layer_norm
from ops.silu_split import silu_split

DTYPE = torch.bfloat16
EPS = 1e-5
SHAPES = ("1024x4x256x65536", "512x4x128x131072")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of a layer: hidden size D, heads, width of u, v, q, k of one head, tokens."""

    hidden: int
    heads: int
    dim: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read "1024x4x256x65536"."""
        hidden, heads, dim, tokens = (int(part) for part in text.split("x"))
        return cls(hidden=hidden, heads=heads, dim=dim, tokens=tokens)


def _random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


Op = Callable[[dict[str, Tensor], str], Tensor]


def ops_of(shape: Shape) -> dict[str, tuple[Op, dict[str, Tensor]]]:
    """Return each op with its leaves: (leaves, backend) -> one tensor."""
    heads, dim, width = shape.heads, shape.dim, shape.heads * shape.dim

    def norm(x: dict[str, Tensor], backend: str) -> Tensor:
        return layer_norm(x["x"], x["weight"], bias_D=x["bias"], eps=EPS, backend=backend)

    def silu(x: dict[str, Tensor], backend: str) -> Tensor:
        parts = silu_split(
            x["uvqk"], heads, attention_dim=dim, linear_dim=dim, bias_X=x["bias"], backend=backend
        )
        return torch.stack(parts)

    def gate(x: dict[str, Tensor], backend: str) -> Tensor:
        u = x["fused"].view(-1, heads, 4 * dim)[..., :dim]
        return gated_norm(
            x["attn"], u, weight=x["weight"], bias=x["bias"], eps=EPS, backend=backend
        )

    parameter = torch.float32
    return {
        "norm": (
            norm,
            {
                "x": _random(shape.tokens, shape.hidden),
                "weight": _random(shape.hidden, dtype=parameter),
                "bias": _random(shape.hidden, dtype=parameter),
            },
        ),
        "silu": (
            silu,
            {
                "uvqk": _random(shape.tokens, 4 * width),
                "bias": _random(4 * width, dtype=parameter),
            },
        ),
        "gate": (
            gate,
            {
                "attn": _random(shape.tokens, heads, dim),
                "fused": _random(shape.tokens, 4 * width),
                "weight": _random(width, dtype=parameter),
                "bias": _random(width, dtype=parameter),
            },
        ),
    }


def gate() -> bool:
    """Whether outputs and gradients are within 1.5 times plain PyTorch's own BF16 error."""
    passed = True
    for text in ("1024x4x256x1001", "512x4x128x77", "384x4x96x300"):
        torch.manual_seed(0)
        for name, (op, leaves) in ops_of(Shape.parse(text)).items():
            exact = {key: x.detach().double().requires_grad_() for key, x in leaves.items()}
            expected = _results(op, exact, "pytorch")
            plain, actual = (_results(op, leaves, which) for which in ("pytorch", "triton"))
            ratios = {
                key: _error(actual[key], expected[key]) / max(_error(plain[key], value), 1e-7)
                for key, value in expected.items()
            }
            ok = all(ratio <= 1.5 for ratio in ratios.values())
            passed &= ok
            row = {"gate": name, "shape": text, "ok": ok, "error_over_plain_bf16": rounded(ratios)}
            print(json.dumps(row))
    return passed


def _results(op: Op, leaves: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    out = op(leaves, backend)
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(out.shape, device="cuda", dtype=DTYPE, generator=generator)
    grads = torch.autograd.grad(out, list(leaves.values()), weights.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with four digits."""
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in values.items()
    }


def timings(shape: Shape) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Yield name, call and passes over the rows in tensors of one width a token."""
    from ops.norm.triton_impl import norm_backward, norm_forward
    from ops.norm.triton_sums import sum_rows

    ops = {name: leaves for name, (_, leaves) in ops_of(shape).items()}
    x, weight, bias = (tensor.detach() for tensor in ops["norm"].values())
    grad = torch.randn_like(x)
    _, stats = norm_forward(x, weight, bias_D=bias, eps=EPS)
    yield "norm_forward", lambda: norm_forward(x, weight, bias_D=bias, eps=EPS), 2
    arguments = {"weight_D": weight, "stats": stats}
    yield "norm_backward", lambda: norm_backward(grad, x, **arguments), 3
    residual = torch.randn_like(x)  # not grad again, which would be read once
    yield (
        "norm_backward_residual",
        lambda: norm_backward(grad, x, residual_TD=residual, **arguments),
        4,
    )
    yield "residual_add", lambda: residual.add_(x), 3
    yield "bias_gradient", lambda: sum_rows(x, dtype=torch.float32), 1
    yield from _silu_timings(shape, ops["silu"])
    for dropout in (0.0, 0.2):
        yield from _gate_timings(shape, ops["gate"], dropout)


def _silu_timings(
    shape: Shape, leaves: dict[str, Tensor]
) -> Iterator[tuple[str, Callable[[], Any], int]]:
    def forward() -> tuple[Tensor, ...]:
        return silu_split(
            leaves["uvqk"],
            shape.heads,
            attention_dim=shape.dim,
            linear_dim=shape.dim,
            bias_X=leaves["bias"],
            activates_u=False,
            backend="triton",
        )

    parts = forward()
    grads = [torch.randn(part.shape, device="cuda", dtype=DTYPE) for part in parts]
    inputs = list(leaves.values())
    yield "silu_forward", forward, 6
    yield (
        "silu_backward",
        lambda: torch.autograd.grad(parts, inputs, grads, retain_graph=True),
        11,
    )


def _gate_timings(
    shape: Shape, leaves: dict[str, Tensor], dropout: float
) -> Iterator[tuple[str, Callable[[], Any], int]]:
    u = leaves["fused"].detach().view(-1, shape.heads, 4 * shape.dim)[..., : shape.dim]
    u.requires_grad_()
    u_bias = torch.zeros(shape.heads, shape.dim, device="cuda")

    def forward() -> Tensor:
        return gated_norm(
            leaves["attn"],
            u,
            weight=leaves["weight"],
            bias=leaves["bias"],
            eps=EPS,
            u_bias_HV=u_bias,
            dropout=dropout,
            training=True,
            backend="triton",
        )

    out = forward()
    grad = torch.randn_like(out)
    inputs = [leaves["attn"], u, leaves["weight"], leaves["bias"]]
    suffix = "_dropout" if dropout else ""
    yield f"gate_forward{suffix}", forward, 3
    yield (
        f"gate_backward{suffix}",
        lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
        5,
    )


def main() -> int:
    """Gate, copy rate, rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="hidden x heads x dim x tokens")
    parser.add_argument("--ops", nargs="*", help="only these")
    parser.add_argument("--no-gate", action="store_true", help="for tuning only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/elementwise.py needs a CUDA device", file=sys.stderr)
        return 1
    if not arguments.no_gate and not gate():
        print("the correctness gate failed; nothing was timed", file=sys.stderr)
        return 1
    copy = ceilings()["copy_tb_per_s"]
    device = torch.cuda.get_device_name()
    print(json.dumps({"copy_tb_per_s": float(f"{copy:.4g}"), "device": device}))
    for text in arguments.shapes:
        shape = Shape.parse(text)
        for name, run, passes in timings(shape):
            if arguments.ops and name not in arguments.ops:
                continue
            is_hidden = name.startswith(("norm", "residual", "bias"))
            width = shape.hidden if is_hidden else shape.heads * shape.dim
            unit = shape.tokens * width * DTYPE.itemsize
            ms = kernel_ms(run)
            rate = passes * unit / ms / 1e9
            row = {"op": name, "shape": text, "ms": ms, "bytes": passes * unit}
            row |= {"tensor_mb": unit / 1e6, "tb_per_s": rate, "of_copy": rate / copy}
            print(json.dumps(rounded(row)), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
