"""Speed of the HSTU attention op on one GPU: correctness first, then forward, backward, both.

    python benchmarks/hstu_attention.py [--cases equal_32x2048 zipf ...] [--backend triton]

Prints one JSON object a line: the gate's errors, the ceilings measured in this run (BF16 matmul,
copy), then a row for each case. A gate that fails ends the run with status 1 before any timing.

    *_ms            kernel time: CUDA events around the call, the L2 cache overwritten before each
                    one, the device kept busy meanwhile so that no launch gap counts; median
    *_wall_ms       wall clock a call, back to back, warm cache
    *_tflops        useful pairs only: 2 (A + V) H flops a visible pair forward, 2 (3 A + 2 V) H
                    backward; *_of_matmul is its share of the matmul ceiling
    *_of_copy       bytes that must move (inputs and outputs once) over time, share of a copy's rate
    fbgemm_*        FBGEMM's `hstu` package in this run, where it can be imported and has the kernel
                    compiled: called directly, on contiguous copies, memsets and casts included;
                    *_difference is its result's from ours, relative. fbgemm_cross_run_*:
                    FBGEMM_CROSS_RUN below, another run on the same kind of machine
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ops.hstu_attention import hstu_attention
from ops.hstu_attention.fbgemm_impl import load_package
from ops.hstu_attention.reference import visible
from ops.hstu_attention.spec import AttentionSpec
from ops.jagged import lengths_to_offsets

FBGEMM_CROSS_RUN = {
    # shared/gpu/README.md: FBGEMM's HSTU attention built from source, one H200, torch 2.11 + CUDA
    # 13.0, BF16, causal, H=4, D=128: forward ms, backward ms, wall clock of both. Not this run: the
    # BF16 nn.Linear of that page reached 689 TFLOP/s forward + backward, compare `ceilings`.
    "equal_32x2048": (0.247, 0.829, 1.48),
    "equal_4x8192": (0.483, 1.469, 2.19),
    "equal_128x512": (0.075, 0.334, 0.90),
}
NUM_HEADS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the benchmark."""

    lengths: tuple[int, ...]
    dims: tuple[int, int] = (128, 128)
    num_contextuals: int = 0
    num_candidates: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    position_buckets: int = 0
    time_buckets: int = 0


def zipf_lengths(num_users: int, longest: int) -> tuple[int, ...]:
    """Longest / rank**0.7 in a fixed shuffled order."""
    order = torch.randperm(num_users, generator=torch.Generator().manual_seed(1)).tolist()
    return tuple(max(16, int(longest / (rank + 1) ** 0.7)) for rank in order)


def equal_partner(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Equal lengths of the same sum(n^2) / sum(n) and, nearly, the same sum(n)."""
    length = round(sum(n * n for n in lengths) / sum(lengths))
    return (length,) * max(1, round(sum(lengths) / length))


def uniform_lengths(num_users: int, longest: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randint(1, longest + 1, (num_users,), generator=generator).tolist())


ZIPF = zipf_lengths(256, 8192)
L2048 = (2048,) * 32
CASES = {
    "equal_32x2048": Case(lengths=L2048),
    "equal_4x8192": Case(lengths=(8192,) * 4),
    "equal_128x512": Case(lengths=(512,) * 128),
    "zipf": Case(lengths=ZIPF),
    "equal_as_zipf": Case(lengths=equal_partner(ZIPF)),
    "uniform": Case(lengths=uniform_lengths(64, 4096)),
    "d64_32x2048": Case(lengths=L2048, dims=(64, 64)),
    "d256_32x2048": Case(lengths=L2048, dims=(256, 256)),
    "d256_4x8192": Case(lengths=(8192,) * 4, dims=(256, 256)),
    "d96_32x2048": Case(lengths=L2048, dims=(96, 96)),
    "d32_32x2048": Case(lengths=L2048, dims=(32, 32)),
    "contextual_candidates": Case(lengths=L2048, num_contextuals=4, num_candidates=64),
    "groups_of_8": Case(lengths=L2048, num_candidates=64, options={"target_group_size": 8}),
    "window_256": Case(lengths=L2048, options={"attention_window": 256}),
    "not_causal": Case(lengths=L2048, options={"is_causal": False}),
    "deterministic": Case(lengths=L2048, options={"deterministic": True}),
    "position_bias": Case(lengths=L2048, position_buckets=2048),
    "time_bias": Case(lengths=L2048, time_buckets=128),
}
HOSTILE = (129, 0, 700, 1, 64, 3, 256)
MASKS = {
    "causal": Case(lengths=HOSTILE),
    "contextual_candidates": Case(lengths=HOSTILE, num_contextuals=3, num_candidates=30),
    "groups": Case(lengths=HOSTILE, num_candidates=40, options={"target_group_size": 7}),
    "window": Case(
        lengths=HOSTILE, num_contextuals=2, num_candidates=9, options={"attention_window": 100}
    ),
    "contextual_mask_off": Case(
        lengths=HOSTILE, num_contextuals=3, options={"disable_contextual_mask": True}
    ),
    "not_causal": Case(lengths=HOSTILE, options={"is_causal": False}),
}
MANY = tuple(torch.randint(0, 200, (700,), generator=torch.Generator().manual_seed(3)).tolist())
GATE = {
    **MASKS,
    **{
        f"d{width}_many_users": Case(
            lengths=MANY, dims=(width, width), num_contextuals=2, num_candidates=5
        )
        for width in (64, 128, 256)
    },
    **{
        f"d{width}_{name}": dataclasses.replace(case, dims=(width, width))
        for width in (64, 256)
        for name, case in MASKS.items()
    },
    "deterministic": Case(lengths=HOSTILE, options={"deterministic": True}),
    "different_head_dims": Case(lengths=HOSTILE, dims=(128, 64)),
    "d96": Case(lengths=HOSTILE, dims=(96, 96)),
    "everything": Case(
        lengths=HOSTILE,
        num_contextuals=3,
        num_candidates=9,
        options={"target_group_size": 2, "attention_window": 100},
        position_buckets=50,
        time_buckets=64,
    ),
}


class Call:
    """Inputs of one case on the GPU: views of one fused head-major projection."""

    def __init__(self, case: Case, *, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        attention_dim, linear_dim = case.dims
        widths = [linear_dim, linear_dim, attention_dim, attention_dim]
        num_rows = sum(case.lengths)
        self.case = case
        fused = torch.randn(num_rows, NUM_HEADS, sum(widths), device="cuda", dtype=dtype)
        _, v, q, k = fused.split(widths, dim=-1)
        self.leaves = {"q": q, "k": k, "v": v}
        sizes = {"position_bias": case.position_buckets, "time_bias": case.time_buckets}
        for name, size in sizes.items():
            if size:
                self.leaves[name] = torch.randn(NUM_HEADS, size, device="cuda", dtype=dtype)
        self.leaves = {name: x.detach().requires_grad_() for name, x in self.leaves.items()}
        self.grad_out = torch.randn(num_rows, NUM_HEADS, linear_dim, device="cuda", dtype=dtype)
        users = len(case.lengths)
        self.arguments: dict[str, Any] = {
            "seq_offsets": lengths_to_offsets(torch.tensor(case.lengths)).cuda(),
            "max_seq_len": max(case.lengths),
            "scaling_seqlen": float(max(case.lengths)),
            **case.options,
        }
        for name in ("num_contextuals", "num_candidates"):
            if count := getattr(case, name):
                limit = torch.tensor(case.lengths)
                counts = torch.full((users,), count)
                self.arguments[name] = torch.minimum(counts, limit // 4).cuda()
        if case.time_buckets:
            steps = torch.randint(1, 10**5, (num_rows,), device="cuda")
            self.arguments["timestamps"] = steps.cumsum(0)

    def forward(self, backend: str, leaves: dict[str, Tensor] | None = None) -> Tensor:
        """Return the output."""
        tensors = dict(self.leaves if leaves is None else leaves)
        q, k, v = (tensors.pop(name) for name in ("q", "k", "v"))
        return hstu_attention(q, k, v_THV=v, backend=backend, **tensors, **self.arguments)

    def num_pairs(self) -> int:
        """Visible pairs of the batch."""
        rule = {
            name: value
            for name, value in self.arguments.items()
            if name
            in ("is_causal", "disable_contextual_mask", "attention_window", "target_group_size")
        }
        spec = AttentionSpec(max_seq_len=1, scaling_seqlen=1.0, **rule)
        total, known = 0, {}
        for length in self.case.lengths:
            counts = [
                min(self.case.num_contextuals, length // 4),
                min(self.case.num_candidates, length // 4),
            ]
            if length not in known:
                history = length - sum(counts)
                known[length] = int(visible(counts[0], history, counts[1], spec).sum())
            total += known[length]
        return total


def gate(backend: str) -> bool:
    """Whether outputs and gradients are within 1.5 times PyTorch's own BF16 error, every case."""
    passed = True
    for name, case in GATE.items():
        call = Call(case)
        exact = {key: x.detach().double().requires_grad_() for key, x in call.leaves.items()}
        expected = _results(call, "reference", exact)
        plain, actual = (_results(call, which, call.leaves) for which in ("pytorch", backend))
        ratios = {
            key: _error(actual[key], expected[key]) / max(_error(plain[key], expected[key]), 1e-9)
            for key in expected
        }
        ok = all(ratio <= 1.5 for ratio in ratios.values())
        passed &= ok
        print(json.dumps({"gate": name, "ok": ok, "error_over_pytorch_bf16": _rounded(ratios)}))
    return passed


def _results(call: Call, backend: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    out = call.forward(backend, leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), call.grad_out.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30))


class Fbgemm:
    """The same call through FBGEMM's own entry."""

    def __init__(self, call: Call) -> None:
        arguments = call.arguments
        device = arguments["seq_offsets"].device
        longest = max(call.case.lengths)
        self.leaves = [
            call.leaves[name].detach().contiguous().requires_grad_() for name in ("q", "k", "v")
        ]
        offsets = arguments["seq_offsets"].int()
        counts = [
            None if arguments.get(name) is None else arguments[name].int()
            for name in ("num_contextuals", "num_candidates")
        ]
        self.arguments = (
            *(offsets, offsets, None, None, longest, longest, longest, *counts),
            *(arguments.get("target_group_size", 1), (-1, 0), call.case.dims[0] ** -0.5),
        )
        self.grad_out = call.grad_out.to(device)

    @staticmethod
    def reason_against(case: Case) -> str | None:
        """Why there is no such row, None where there is."""
        package = load_package()
        if package.refusal is not None:
            return package.refusal
        others = set(case.options) - {"target_group_size"}
        has_bias = case.position_buckets or case.time_buckets
        if others or has_bias or case.dims[0] != case.dims[1] or case.dims[0] not in (64, 128, 256):
            return "its package has no kernel for such a call"
        return None

    def forward(self) -> Tensor:
        """Return the output."""
        attend = load_package().attend
        assert attend is not None
        return attend(*self.leaves, *self.arguments)

    def row(self, ours: Tensor) -> dict[str, float]:
        """Times, and how far the result is from ours."""
        out = self.forward()

        def forward() -> None:
            with torch.no_grad():
                self.forward()

        def backward() -> None:
            torch.autograd.grad(out, self.leaves, self.grad_out, retain_graph=True)

        def both() -> None:
            torch.autograd.grad(self.forward(), self.leaves, self.grad_out)

        return {
            "fbgemm_difference": _error(out.detach(), ours.detach().double()),
            "fbgemm_forward_ms": kernel_ms(forward),
            "fbgemm_backward_ms": kernel_ms(backward),
            "fbgemm_both_wall_ms": wall_ms(both),
        }


_flush: list[Tensor] = []


def kernel_ms(run: Callable[[], Any], *, repeats: int = 15) -> float:
    """Median device time of one call, cold L2, free of launch gaps."""
    if not _flush:
        _flush.append(torch.empty(256 << 20, dtype=torch.int8, device="cuda"))
    for _ in range(3):
        run()
    pairs = []
    for _ in range(repeats):
        _flush[0].zero_()
        torch.cuda._sleep(1_500_000)  # the host launches meanwhile
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def wall_ms(run: Callable[[], Any], *, repeats: int = 30, rounds: int = 7) -> float:
    """Wall clock of one call when calls follow each other; median of some rounds of them."""
    run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats * 1e3)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """BF16 nn.Linear 4096 x 16384 forward + backward in TFLOP/s, and a copy in TB/s."""
    tokens, width, wide = 16384, 4096, 16384
    linear = torch.nn.Linear(width, wide, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, wide, device="cuda", dtype=torch.bfloat16)
    leaves = [x, linear.weight]
    matmul = kernel_ms(lambda: torch.autograd.grad(linear(x), leaves, grad), repeats=8)
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = kernel_ms(lambda: target.copy_(source), repeats=8)
    return {
        "matmul_tflops": 6 * tokens * width * wide / matmul / 1e9,
        "copy_tb_per_s": 2 * source.numel() / copy / 1e9,
    }


def measure(name: str, case: Case, backend: str, ceiling: dict[str, float]) -> dict[str, Any]:
    """Return one row."""
    call = Call(case)
    attention_dim, linear_dim = case.dims
    leaves = list(call.leaves.values())
    out = call.forward(backend)

    def forward() -> None:
        with torch.no_grad():
            call.forward(backend)

    def backward() -> None:
        torch.autograd.grad(out, leaves, call.grad_out, retain_graph=True)

    def both() -> None:
        torch.autograd.grad(call.forward(backend), leaves, call.grad_out)

    flops = 2 * NUM_HEADS * call.num_pairs()
    row_bytes = NUM_HEADS * sum(case.lengths) * call.grad_out.element_size()
    work = {
        "forward": (
            forward,
            flops * (attention_dim + linear_dim),
            2 * (attention_dim + linear_dim),
        ),
        "backward": (
            backward,
            flops * (3 * attention_dim + 2 * linear_dim),
            4 * attention_dim + 3 * linear_dim,
        ),
    }
    row: dict[str, Any] = {"case": name, "backend": backend, "tokens": sum(case.lengths)}
    for phase, (run, phase_flops, width) in work.items():
        ms = kernel_ms(run)
        row[f"{phase}_ms"] = ms
        row[f"{phase}_tflops"] = phase_flops / ms / 1e9
        row[f"{phase}_of_matmul"] = phase_flops / ms / 1e9 / ceiling["matmul_tflops"]
        row[f"{phase}_of_copy"] = row_bytes * width / ms / 1e9 / ceiling["copy_tb_per_s"]
        row[f"{phase}_wall_ms"] = wall_ms(run)
    row["both_ms"], row["both_wall_ms"] = kernel_ms(both), wall_ms(both)
    row["tokens_per_s"] = sum(case.lengths) / row["both_wall_ms"] * 1e3
    phases = ("forward_ms", "backward_ms", "both_wall_ms")
    if Fbgemm.reason_against(case) is None:
        row |= Fbgemm(call).row(out)
        row |= {f"speedup_{key}": row[f"fbgemm_{key}"] / row[key] for key in phases}
    if name in FBGEMM_CROSS_RUN:
        for key, value in zip(phases, FBGEMM_CROSS_RUN[name], strict=True):
            row[f"fbgemm_cross_run_{key}"] = value
            row[f"cross_run_speedup_{key}"] = value / row[key]
    return row


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in values.items()
    }


def main() -> int:
    """Gate, ceilings, rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--no-gate", action="store_true", help="for tuning only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/hstu_attention.py needs a CUDA device", file=sys.stderr)
        return 1
    if not arguments.no_gate and not gate(arguments.backend):
        print("the correctness gate failed; nothing was timed", file=sys.stderr)
        return 1
    ceiling = ceilings()
    print(json.dumps({"ceilings": _rounded(ceiling), "device": torch.cuda.get_device_name()}))
    for name in arguments.cases:
        row = measure(name, CASES[name], arguments.backend, ceiling)
        print(json.dumps(_rounded(row)), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
