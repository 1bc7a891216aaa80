"""One HSTU layer with FP8 linears and FP8 attention on one GPU against our BF16 layer, same run.

    python benchmarks/hstu_layer_fp8.py [--cases h1024_32x2048 ...] [--mode per_block] [--profile]

Prints one JSON object a line, a table last. First the gate: errors of output and gradients against
a float64 layer, over those of a layer whose FP8 is emulated in plain torch; a gate that fails ends
the run with status 1 before any timing. Linears are native, delayed scaling, their weights cast in
every step; columns as in benchmarks/hstu_layer.py.

    bf16        ours without FP8
    linears     uvqk and proj in FP8
    attention   attention in FP8
    both        all of it
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.elementwise import rounded
from benchmarks.hstu_layer import (
    CASES,
    Call,
    _error,
    _results,
    make_config,
    measure,
    profile,
)
from modules.hstu_layer import HSTULayer
from modules.linear.emulated import EmulatedEngine
from modules.linear.engine import LinearEngine
from modules.linear.native import NativeEngine
from modules.linear.recipe import LinearRecipe
from modules.linear.state import Fp8State
from ops.hstu_attention import Fp8Spec

TARGETS_MS = {"h1024_32x2048": 4.4, "h1024_8x8192": 8.0, "h512_32x2048": 2.3}
"""Of "both", forward + backward."""
VARIANTS = {
    "bf16": (False, False),
    "linears": (True, False),
    "attention": (False, True),
    "both": (True, True),
}
GATE_CASES = {"h512": (512, 4, 128, (129, 0, 700, 1, 64)), "h1024": (1024, 4, 256, (300, 77))}
GATE_LIMIT = 1.15
_NAMES = ("input.uvqk", "output.proj")


def make_layer(
    sizes: tuple[int, int, int], *, linears: bool, attention: bool, mode: str, emulated: bool
) -> HSTULayer:
    """Return a layer of (hidden size, heads, head dim); with FP8 linears it has `fp8_state`.

    emulated: plain torch everywhere.
    """
    backend = "pytorch" if emulated else "triton"
    config = make_config(
        *sizes,
        attention=backend,
        elementwise_backend=backend,
        attention_fp8=Fp8Spec(mode=mode) if attention else None,
    )
    layer = HSTULayer(config)
    if linears:
        kind: type[LinearEngine] = EmulatedEngine if emulated else NativeEngine
        recipe = LinearRecipe(
            backend="emulated" if emulated else "native",
            scaling="delayed",
            grad_dtype=torch.float8_e5m2,
        )
        state = Fp8State(list(_NAMES), recipe)
        layer.fp8_state = state
        for name, owner in zip(_NAMES, (layer.input, layer.output), strict=True):
            linear = layer.get_submodule(name)
            owner.engine = kind(
                name=name,
                in_features=linear.in_features,
                out_features=linear.out_features,
                recipe=recipe,
                state=state,
            )
    return layer.cuda()


def gate(mode: str) -> bool:
    """Whether errors against float64 are at most 1.15 times those of the emulation."""
    passed = True
    for name, (hidden, heads, dim, lengths) in GATE_CASES.items():
        for variant, (linears, attention) in VARIANTS.items():
            if variant == "bf16":
                continue
            ratios = _gate_ratios((hidden, heads, dim), lengths, linears, attention, mode)
            ok = all(ratio <= GATE_LIMIT for ratio in ratios.values())
            passed &= ok
            row = {"gate": name, "variant": variant, "mode": mode, "ok": ok}
            print(json.dumps(row | {"error_over_emulation": rounded(ratios)}), flush=True)
    return passed


def _gate_ratios(
    sizes: tuple[int, int, int],
    lengths: tuple[int, ...],
    linears: bool,
    attention: bool,
    mode: str,
) -> dict[str, float]:
    torch.manual_seed(0)
    switches = {"linears": linears, "attention": attention, "mode": mode}
    layer = make_layer(sizes, **switches, emulated=False)
    with torch.no_grad():
        for parameter in layer.parameters():  # biases too, and scores that matter
            parameter += 0.02 * torch.randn_like(parameter)
    emulated = make_layer(sizes, **switches, emulated=True)
    oracle = make_layer(sizes, linears=False, attention=False, mode=mode, emulated=True).double()
    for other in (emulated, oracle):
        other.load_state_dict(layer.state_dict())
    x = torch.randn(sum(lengths), sizes[0], device="cuda", dtype=torch.bfloat16)
    exact = _results(oracle, x.double(), lengths)
    expected, actual = _results(emulated, x, lengths), _results(layer, x, lengths)
    return {
        name: _error(actual[name], value) / max(_error(expected[name], value), 1e-7)
        for name, value in exact.items()
    }


def run_case(name: str, mode: str, *, profiles: bool) -> list[dict[str, Any]]:
    """Print and return the rows of one case."""
    hidden, heads, dim, users, length = CASES[name]
    rows = []
    for variant, (linears, attention) in VARIANTS.items():
        layer = make_layer(
            (hidden, heads, dim), linears=linears, attention=attention, mode=mode, emulated=False
        )
        call = Call(layer, hidden, (length,) * users)
        if linears:
            _warm(call)
        row = measure(name, variant, call)
        row["speedup"] = (rows[0] if rows else row)["both_ms"] / row["both_ms"]
        row["target_ms"] = TARGETS_MS.get(name) if variant == "both" else None
        print(json.dumps(rounded(row)), flush=True)
        rows.append(row)
        if profiles:
            profile(f"{name} {variant}", call)
        del call, layer
        torch.cuda.empty_cache()
    return rows


def _warm(call: Call) -> tuple[Tensor, ...]:
    grads = call.both()
    call.layer.fp8_state.commit()
    return grads


def main() -> int:
    """Gate, rows, table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--mode", default="per_block")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--no-gate", action="store_true", help="for tuning only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/hstu_layer_fp8.py needs a CUDA device", file=sys.stderr)
        return 1
    if not arguments.no_gate and not gate(arguments.mode):
        print("the correctness gate failed; nothing was timed", file=sys.stderr)
        return 1
    rows = []
    for name in arguments.cases:
        rows += run_case(name, arguments.mode, profiles=arguments.profile)
    print(
        f"\n{'':28}{'forward':>9}{'both':>9}{'wall':>9}{'of BF16':>9}{'kept MiB':>10}{'target':>8}"
    )
    for row in rows:
        print(
            f"{row['case'] + ' ' + row['layer']:28}{row['forward_ms']:9.3f}{row['both_ms']:9.3f}"
            f"{row['both_wall_ms']:9.3f}{row['speedup']:9.2f}{row['kept_with_input_mib']:10.0f}"
            f"{row['target_ms'] or '':>8}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
