"""FP8 linears on one GPU against BF16 in the same run: correctness first, then the rows.

    python benchmarks/fp8_linear.py --quick      the shapes with a target, casts and products alone
    python benchmarks/fp8_linear.py [--tokens 1024 65536 ...] [--widths 128 1024 ...]

Prints one JSON object a line: the gate's errors, the copy rate of this run, the rows; a table last.
A gate that fails ends the run with status 1 before any timing.

    fused      layer norm, linear K x N, SiLU and split (u left to its gate, as in a layer), with a
               gradient for the residual: ours in BF16 against ours in FP8
    bare       the linear alone, without bias, against nn.Linear with BF16 weights
    ms         forward + backward, every cast included, the weight's too; device time by events,
               cold L2, the device kept busy so that no launch gap counts; median
    host_us    what the host takes to launch forward + backward, nothing waited for; minimum
    speedup    BF16's time over this one's
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.elementwise import rounded
from benchmarks.fp8_linear_gate import gate
from benchmarks.hstu_attention import ceilings, kernel_ms, wall_ms
from modules.linear import NormLinear
from modules.linear.native import NativeEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.sink import gradient_sink
from modules.linear.state import Fp8State
from ops.silu_split import silu_split

NAME = "linear"
NUM_HEADS = 4
TARGETS = {
    ("fused", 512, 2048): 1.4,
    ("fused", 1024, 4096): 1.5,
    ("fused", 2048, 8192): 1.6,
    ("bare", 512, 2048): 1.1,
    ("bare", 1024, 4096): 1.4,
    ("bare", 2048, 8192): 1.55,
}
"""Of delayed scaling at 65,536 tokens."""
TOKENS = (1024, 4096, 16384, 65536, 262144)
WIDTHS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tokens T, width in K, width out N."""

    tokens: int
    in_features: int
    out_features: int

    @property
    def text(self) -> str:
        """Return "T x K x N"."""
        return f"{self.tokens}x{self.in_features}x{self.out_features}"


def make_engine(scaling: str, in_features: int, out_features: int) -> NativeEngine:
    """Return a native engine in training, in hybrid formats; blockwise in E4M3."""
    grad_dtype = torch.float8_e4m3fn if scaling == "blockwise" else torch.float8_e5m2
    recipe = LinearRecipe(backend="native", scaling=scaling, grad_dtype=grad_dtype)
    state = Fp8State([NAME], recipe).cuda() if scaling == "delayed" else None
    return NativeEngine(
        name=NAME,
        in_features=in_features,
        out_features=out_features,
        recipe=recipe,
        state=state,
    )


def fused_step(shape: Shape, scaling: str | None) -> Callable[[], Any]:
    """Return forward + backward of norm, linear and SiLU; scaling None: BF16."""
    dim = shape.out_features // (4 * NUM_HEADS)
    layer = NormLinear(shape.in_features, shape.out_features, eps=1e-5, backend="triton").cuda()
    x = torch.randn(shape.tokens, shape.in_features, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    grads = [
        torch.randn(shape.tokens, NUM_HEADS, dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    grads.append(torch.randn_like(x))
    leaves = [x, *layer.parameters()]
    engine = (
        None if scaling is None else make_engine(scaling, shape.in_features, shape.out_features)
    )

    def step() -> None:
        if engine is None:
            uvqk, residual = layer(x)
        else:
            uvqk, residual = engine.norm_linear(
                x,
                layer.norm,
                weight=layer.uvqk.weight,
                bias=None,
                backend="triton",
                recompute_norm=False,
            )
        parts = silu_split(
            uvqk,
            NUM_HEADS,
            attention_dim=dim,
            linear_dim=dim,
            bias_X=layer.uvqk.bias,
            activates_u=False,
            gradient_target=gradient_sink(uvqk),
            backend="triton",
        )
        torch.autograd.grad([*parts, residual], leaves, grads)

    return _warm(step, engine)


def bare_step(shape: Shape, variant: str) -> Callable[[], Any]:
    """Return forward + backward of the linear: "bf16", "te_" or "native_" and a scaling."""
    x = torch.randn(shape.tokens, shape.in_features, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    grad = torch.randn(shape.tokens, shape.out_features, device="cuda", dtype=torch.bfloat16)
    sizes = (shape.in_features, shape.out_features)
    if variant == "bf16":
        linear = nn.Linear(*sizes, bias=False, device="cuda", dtype=torch.bfloat16)
        leaves = [x, linear.weight]
        return lambda: torch.autograd.grad(linear(x), leaves, grad)
    backend, scaling = variant.split("_")
    if backend == "te":
        return _te_step(x, grad, sizes, scaling)
    weight = nn.Parameter(torch.randn(sizes[::-1], device="cuda") * 0.02)
    engine = make_engine(scaling, *sizes)

    def step() -> None:
        torch.autograd.grad(engine.linear(x, weight, None), [x, weight], grad)

    return _warm(step, engine)


def _warm(step: Callable[[], Any], engine: NativeEngine | None) -> Callable[[], Any]:
    if engine is not None and engine.state is not None:
        step()
        engine.state.commit()
    return step


def _te_step(x: Tensor, grad: Tensor, sizes: tuple[int, int], scaling: str) -> Callable[[], Any]:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    recipe = {
        "delayed": recipes.DelayedScaling,
        "tensorwise": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
    }[scaling]()
    linear = te.Linear(*sizes, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        if hasattr(te, "autocast"):
            region = te.autocast(enabled=True, recipe=recipe)
        else:
            region = te.fp8_autocast(enabled=True, fp8_recipe=recipe)
        with region:
            out = linear(x)
        torch.autograd.grad(out, [x, linear.weight], grad)

    return step


def host_us(step: Callable[[], Any]) -> float:
    """Return the host's time for one call, without a wait, at its best."""
    for _ in range(5):
        step()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            step()
        times.append((time.perf_counter() - start) / 20)
    torch.cuda.synchronize()
    return min(times) * 1e6


def compare(shape: Shape, scalings: list[str], *, has_te: bool) -> Iterator[dict[str, Any]]:
    """Yield rows of one shape: BF16 first, each part's time next to it."""
    for kind in ("fused", "bare"):
        variants: dict[str, Callable[[], Callable[[], Any]]] = {}
        if kind == "fused":
            variants["bf16"] = lambda: fused_step(shape, None)
            for scaling in scalings:
                variants[f"native_{scaling}"] = lambda scaling=scaling: fused_step(shape, scaling)
        else:
            names = ["bf16", *(f"native_{scaling}" for scaling in scalings)]
            if has_te:
                names += [f"te_{scaling}" for scaling in scalings if scaling != "rowwise"]
            variants = {name: lambda name=name: bare_step(shape, name) for name in names}
        baseline = wall_baseline = None
        for name, make in variants.items():
            step = make()
            milliseconds = kernel_ms(step, repeats=9)
            wall = wall_ms(step, repeats=20 if milliseconds < 2 else 4, rounds=3)
            baseline, wall_baseline = baseline or milliseconds, wall_baseline or wall
            target = TARGETS.get((kind, shape.in_features, shape.out_features))
            is_target = name == "native_delayed" and shape.tokens == 65536
            yield {
                "kind": kind,
                "shape": shape.text,
                "variant": name,
                "ms": milliseconds,
                "speedup": baseline / milliseconds,
                "wall_ms": wall,
                "wall_speedup": wall_baseline / wall,
                "target": target if is_target else None,
            }
            torch.cuda.empty_cache()


def parts(shape: Shape, copy_tb_per_s: float) -> Iterator[dict[str, Any]]:
    """Yield the casts, with their share of the copy rate, and the products, with TFLOP/s."""
    from benchmarks.fp8_linear_parts import casts, products

    for name, run, num_bytes in casts(shape.tokens, shape.in_features, shape.out_features):
        milliseconds = kernel_ms(run, repeats=9)
        rate = num_bytes / milliseconds / 1e9
        yield {
            "cast": name,
            "shape": shape.text,
            "ms": milliseconds,
            "of_copy": rate / copy_tb_per_s,
        }
    flops = 2 * shape.tokens * shape.in_features * shape.out_features
    for name, run in products(shape.tokens, shape.in_features, shape.out_features):
        milliseconds = kernel_ms(run, repeats=9)
        yield {
            "product": name,
            "shape": shape.text,
            "ms": milliseconds,
            "tflops": flops / milliseconds / 1e9,
        }
    torch.cuda.empty_cache()


def _has_te() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError, AssertionError):
        return False
    return True


def _shapes(arguments: argparse.Namespace) -> Iterator[Shape]:
    if arguments.quick:
        for width in (512, 1024, 2048):
            yield Shape(tokens=65536, in_features=width, out_features=4 * width)
        return
    for tokens in arguments.tokens:
        for width in arguments.widths:
            for out_features in (width, 4 * width):
                yield Shape(tokens=tokens, in_features=width, out_features=out_features)


def main() -> int:
    """Gate, copy rate, rows, table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the shapes with a target, and parts")
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--widths", nargs="*", type=int, default=WIDTHS)
    parser.add_argument("--scalings", nargs="*", default=["delayed", "tensorwise"])
    parser.add_argument("--no-gate", action="store_true", help="for tuning only")
    parser.add_argument("--no-te", action="store_true")
    parser.add_argument("--seconds", type=float, default=480.0, help="no new shape after this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/fp8_linear.py needs a CUDA device", file=sys.stderr)
        return 1
    started = time.perf_counter()
    if not arguments.no_gate and not gate(arguments.scalings):
        print("the correctness gate failed; nothing was timed", file=sys.stderr)
        return 1
    has_te = not arguments.no_te and _has_te()
    copy = ceilings()["copy_tb_per_s"]
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    print(json.dumps(rounded({"copy_tb_per_s": copy, "has_te": has_te, **versions})), flush=True)
    rows: list[dict[str, Any]] = []
    small = Shape(tokens=1024, in_features=512, out_features=2048)
    names = ["bf16", *(f"native_{scaling}" for scaling in arguments.scalings)]
    names += ["te_delayed"] if has_te else []
    for name in names:
        row = {"host_us": host_us(bare_step(small, name)), "variant": name, "shape": small.text}
        print(json.dumps(rounded(row)), flush=True)
        rows.append(row)
    for shape in _shapes(arguments):
        if time.perf_counter() - started > arguments.seconds:
            print(json.dumps({"left_out_from": shape.text}))
            break
        found = list(compare(shape, arguments.scalings, has_te=has_te))
        if arguments.quick:
            found += parts(shape, copy)
        for row in found:
            print(json.dumps(rounded(row)), flush=True)
        rows += found
    _print_table(rows)
    return 0


def _print_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'':34}{'ms':>9}{'of BF16':>9}{'target':>8}")
    for row in rows:
        if "speedup" in row:
            label = f"{row['kind']} {row['shape']} {row['variant']}"
            target = row["target"] or ""
            print(f"{label:46}{row['ms']:9.3f}{row['speedup']:9.2f}{target:>8}")
        elif "host_us" in row:
            print(f"{'host us ' + row['variant']:46}{row['host_us']:9.0f}")
        elif "cast" in row:
            print(f"{row['shape'] + ' ' + row['cast']:46}{row['ms']:9.3f}{row['of_copy']:9.2f}")
        else:
            print(f"{row['shape'] + ' ' + row['product']:46}{row['ms']:9.3f}{row['tflops']:9.0f}")
    speedups = [
        row["speedup"] for row in rows if "speedup" in row and row["variant"] == "native_delayed"
    ]
    if speedups:
        print(
            f"native delayed: least {min(speedups):.2f}, median {statistics.median(speedups):.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
