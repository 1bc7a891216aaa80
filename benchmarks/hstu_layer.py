"""Speed and memory of one HSTU layer in BF16 on one GPU: correctness first, then the rows.

    python benchmarks/hstu_layer.py [--cases h1024_32x2048 ...] [--variants plain both ...]
        [--peers eager compiled] [--attention triton] [--profile]

Prints one JSON object a line: the gate's errors against a float64 layer, the ceilings measured in
this run, then for each case the layer, its recompute variants and the peers. A gate that fails ends
the run with status 1 before any timing. Sequences are equally long, causal, without candidates.

    *_ms        device time: CUDA events around the call, L2 overwritten before each, the device
                kept busy meanwhile so that no launch gap counts; median
    *_wall_ms   wall clock a call, back to back
    kept_mib    memory_allocated after a forward in training less before it: what the backward
                needs, and the output. The input is not in it: in a stack it is the output of the
                layer before. kept_with_input_mib counts it, too
    eager       nn.LayerNorm, nn.Linear, the same attention op, PyTorch's elementwise ops, BF16
                weights; compiled: what stands before and behind attention under torch.compile
    peer_*      PEER_CROSS_RUN below: another run on the same kind of machine
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.elementwise import rounded
from benchmarks.hstu_attention import ceilings, wall_ms
from modules.hstu_config import HSTUConfig
from modules.hstu_layer import HSTULayer
from modules.jagged_sequence import JaggedSequence
from ops.hstu_attention import hstu_attention
from ops.jagged import lengths_to_offsets

# (hidden size, heads, width of u, v, q, k a head, users, tokens a user)
CASES = {
    "h1024_32x2048": (1024, 4, 256, 32, 2048),
    "h512_32x2048": (512, 4, 128, 32, 2048),
    "h1024_8x8192": (1024, 4, 256, 8, 8192),
    "h512_128x512": (512, 4, 128, 128, 512),
}
PEER_CROSS_RUN = {
    # shared/gpu/README.md: the comparable public trainer's fused layer with its best backend, one
    # H200: forward ms, forward + backward ms, MiB kept. Not this run: there a BF16 matmul of
    # 65536 x 1024 x 4096 reached 748 TFLOP/s, a copy 4.24 TB/s, nn.Linear 4096 x 16384 689 TFLOP/s.
    "h1024_32x2048": (2.28, 7.25, 1537),
    "h512_32x2048": (2.04, 3.39, 769),
    "h1024_8x8192": (3.59, 13.78, 1537),
    "h512_128x512": (2.28, 4.82, 769),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.2},
    "recompute_norm": {"recompute_input_layernorm": True},
    "recompute_silu": {"recompute_input_silu": True},
    "recompute_both": {"recompute_input_layernorm": True, "recompute_input_silu": True},
}
GATE_CASES = {
    "h512": (512, 4, 128, (129, 0, 700, 1, 64)),
    "h1024": (1024, 4, 256, (300, 77)),
    "h96": (96, 3, 32, (129, 0, 61)),
}


class EagerLayer(nn.Module):
    """The layer as one would write it, with the same parameters' names.

    compiles: run what stands before and behind the attention op under torch.compile.
    """

    def __init__(self, config: HSTUConfig, *, compiles: bool) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.linear_dim
        self.input = nn.ModuleDict(
            {
                "norm": nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon),
                "uvqk": nn.Linear(config.hidden_size, config.uvqk_features),
            }
        )
        self.output = nn.ModuleDict(
            {
                "norm": nn.LayerNorm(width, eps=config.norm_epsilon),
                "proj": nn.Linear(width, config.hidden_size),
            }
        )
        self.before, self.behind = self._before, self._behind
        if compiles:
            self.before = torch.compile(self._before, fullgraph=True)
            self.behind = torch.compile(self._behind, fullgraph=True)

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Return the sequence after this layer."""
        u, v, q, k = self.before(sequence.values_TD)
        attn = _attention(q, k, v, sequence, self.config)
        return sequence.with_values(self.behind(attn, u, sequence.values_TD))

    def _before(self, x: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        uvqk = F.silu(self.input["uvqk"](self.input["norm"](x)))
        widths = [config.linear_dim] * 2 + [config.attention_dim] * 2
        return uvqk.view(-1, config.num_heads, sum(widths)).split(widths, dim=-1)

    def _behind(self, attn: Tensor, u: Tensor, x: Tensor) -> Tensor:
        gated = self.output["norm"](attn.flatten(1)) * u.flatten(1)
        gated = F.dropout(gated, self.config.dropout, self.training)
        return x + self.output["proj"](gated)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sequence: JaggedSequence, config: HSTUConfig
) -> Tensor:
    return hstu_attention(
        q,
        k,
        v_THV=v,
        seq_offsets=sequence.seq_offsets_B1,
        max_seq_len=sequence.max_seq_len,
        scaling_seqlen=sequence.scaling_seqlen,
        backend=config.attention_backend,
        num_contextuals=sequence.num_contextuals_B,
        num_candidates=sequence.num_candidates_B,
    )


def make_config(hidden: int, heads: int, dim: int, *, attention: str, **changes: Any) -> HSTUConfig:
    """Return the layer's config on the Triton path unless changed."""
    values: dict[str, Any] = {"elementwise_backend": "triton", "attention_backend": attention}
    return HSTUConfig(
        hidden_size=hidden, num_heads=heads, attention_dim=dim, linear_dim=dim, **(values | changes)
    )


def make_sequence(values_TD: Tensor, lengths: tuple[int, ...]) -> JaggedSequence:
    """Return histories of these lengths and nothing else."""
    nothing = torch.zeros(len(lengths), dtype=torch.int64, device="cuda")
    return JaggedSequence(
        values_TD=values_TD,
        seq_offsets_B1=lengths_to_offsets(torch.tensor(lengths)).cuda(),
        num_contextuals_B=nothing,
        num_candidates_B=nothing,
        max_seq_len=max(lengths),
        scaling_seqlen=float(max(lengths)),
    )


def gate(attention: str) -> bool:
    """Whether the layer's error against float64 is within 1.5 times the plain BF16 layer's."""
    passed = True
    for name, (hidden, heads, dim, lengths) in GATE_CASES.items():
        for variant in ("plain", "recompute_both"):
            ratios = _gate_ratios((hidden, heads, dim), lengths, attention, VARIANTS[variant])
            ok = all(ratio <= 1.5 for ratio in ratios.values())
            passed &= ok
            row = {"gate": name, "variant": variant, "ok": ok}
            print(json.dumps(row | {"error_over_plain_bf16": rounded(ratios)}))
    return passed


def _gate_ratios(
    sizes: tuple[int, int, int],
    lengths: tuple[int, ...],
    attention: str,
    changes: dict[str, Any],
) -> dict[str, float]:
    torch.manual_seed(0)
    plain = {"elementwise_backend": "pytorch"}
    layer = HSTULayer(make_config(*sizes, attention=attention, **changes)).cuda()
    with torch.no_grad():
        for parameter in layer.parameters():  # biases too, and scores that matter
            parameter += 0.02 * torch.randn_like(parameter)
    baseline = HSTULayer(make_config(*sizes, attention="pytorch", **plain)).cuda()
    oracle = HSTULayer(make_config(*sizes, attention="pytorch", **plain)).cuda().double()
    for other in (baseline, oracle):
        other.load_state_dict(layer.state_dict())
    x = torch.randn(sum(lengths), sizes[0], device="cuda", dtype=torch.bfloat16)
    exact = _results(oracle, x.double(), lengths)
    expected, actual = _results(baseline, x, lengths), _results(layer, x, lengths)
    return {
        name: _error(actual[name], value) / max(_error(expected[name], value), 1e-7)
        for name, value in exact.items()
    }


def _results(layer: nn.Module, values_TD: Tensor, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    x = values_TD.detach().requires_grad_()
    out = layer(make_sequence(x, lengths)).values_TD
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad(out, [x, *layer.parameters()], weights.to(out.dtype))
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


_flush: list[Tensor] = []


def device_ms(run: Callable[[], Any], *, repeats: int = 10) -> float:
    """Median device time of one call, cold L2; the device sleeps while the host launches it."""
    if not _flush:
        _flush.append(torch.empty(256 << 20, dtype=torch.int8, device="cuda"))
    for _ in range(3):
        run()
    pairs = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(15_000_000)  # 8 ms
        _flush[0].zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


class Call:
    """A layer with its input and the gradient of its output."""

    def __init__(self, layer: nn.Module, hidden: int, lengths: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.layer = layer.cuda().train()
        shape = (sum(lengths), hidden)
        self.x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.sequence = make_sequence(self.x, lengths)
        self.leaves = [self.x, *layer.parameters()]

    def forward(self) -> Tensor:
        """Return the output; the graph goes with it."""
        return self.layer(self.sequence).values_TD

    def both(self) -> tuple[Tensor, ...]:
        """Return all gradients."""
        return torch.autograd.grad(self.forward(), self.leaves, self.grad)

    def kept_bytes(self) -> int:
        """Return what a forward leaves allocated, the output included."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = self.forward()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        del out
        return kept


def measure(name: str, kind: str, call: Call) -> dict[str, Any]:
    """Return one row."""
    call.both()
    kept, with_input = call.kept_bytes(), call.x.numel() * call.x.element_size()
    both = wall_ms(call.both)
    row: dict[str, Any] = {
        "case": name,
        "layer": kind,
        "forward_ms": device_ms(call.forward),
        "both_ms": device_ms(call.both),
        "forward_wall_ms": wall_ms(call.forward),
        "both_wall_ms": both,
        "tokens_per_s": call.x.shape[0] / both * 1e3,
        "kept_mib": kept / 2**20,
        "kept_with_input_mib": (kept + with_input) / 2**20,
    }
    if not kind.startswith(("eager", "compiled")):
        peer = PEER_CROSS_RUN[name]
        row["peer_cross_run_forward_ms"], row["peer_cross_run_both_ms"] = peer[:2]
        row["peer_cross_run_kept_mib"] = peer[2]
        row["speedup_both"] = peer[1] / row["both_wall_ms"]
    return row


def profile(name: str, call: Call) -> None:
    """Print the kernels of one forward and backward, longest first, and how many there are."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    call.both()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as recorded:
        call.both()
        torch.cuda.synchronize()
    kernels = [event for event in recorded.key_averages() if event.device_time_total > 0]
    kernels.sort(key=lambda event: -event.device_time_total)
    launches = sum(event.count for event in kernels)
    total = sum(event.device_time_total for event in kernels)
    print(json.dumps({"profile": name, "launches": launches, "total_us": round(total)}))
    for event in kernels[:30]:
        row = {"kernel": event.key[:90], "count": event.count, "us": round(event.device_time_total)}
        print(json.dumps(row))


def matmul_tflops() -> float:
    """Return the rate of a BF16 matmul of 65536 x 1024 x 4096."""
    x = torch.randn(65536, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    return 2 * 65536 * 1024 * 4096 / device_ms(lambda: x @ w.t()) / 1e9


def run_case(name: str, arguments: argparse.Namespace, *, is_first: bool) -> None:
    """Print the rows of one case; variants beyond "plain" only for the first unless named."""
    hidden, heads, dim, users, length = CASES[name]
    lengths = (length,) * users
    config = make_config(hidden, heads, dim, attention=arguments.attention)
    variants = arguments.variants or (list(VARIANTS) if is_first else ["plain"])
    for variant in variants:
        layer = HSTULayer(dataclasses.replace(config, **VARIANTS[variant]))
        call = Call(layer, hidden, lengths)
        kind = "ours" if variant == "plain" else f"ours {variant}"
        print(json.dumps(rounded(measure(name, kind, call))), flush=True)
        if arguments.profile:
            profile(f"{name} {kind}", call)
        del call, layer
        torch.cuda.empty_cache()
    for peer in arguments.peers:
        layer = EagerLayer(config, compiles=peer == "compiled").bfloat16()
        try:
            row = measure(name, peer, Call(layer, hidden, lengths))
        except Exception as error:  # whatever the compiler raises belongs into the row
            if peer != "compiled":
                raise
            row = {"case": name, "layer": peer, "failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(rounded(row)), flush=True)
        torch.cuda.empty_cache()


def main() -> int:
    """Gate, ceilings, rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS))
    parser.add_argument(
        "--peers", nargs="*", default=["eager", "compiled"], choices=["eager", "compiled"]
    )
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a step")
    parser.add_argument("--no-gate", action="store_true", help="for tuning only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/hstu_layer.py needs a CUDA device", file=sys.stderr)
        return 1
    if not arguments.no_gate and not gate(arguments.attention):
        print("the correctness gate failed; nothing was timed", file=sys.stderr)
        return 1
    ceiling = ceilings()
    ceiling["matmul_65536x1024x4096_tflops"] = matmul_tflops()
    row = {
        "linear_4096x16384_tflops": ceiling.pop("matmul_tflops"),
        **ceiling,
        "linear_4096x16384_tflops_cross_run": 689.0,
    }
    print(json.dumps(rounded(row) | {"device": torch.cuda.get_device_name()}))
    for index, name in enumerate(arguments.cases):
        run_case(name, arguments, is_first=index == 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
