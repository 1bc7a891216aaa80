"""Speed of the way from embedding rows to tokens on one GPU: correctness first, then times.

    python benchmarks/jagged_tokens.py [--cases equal zipf ...]

Prints one JSON object a line: the gate, the copy ceiling of this run, then a row for each case and
phase. A gate that fails ends the run with status 1 before any timing.

    ms, plain_ms    kernel time of "triton" and "pytorch": CUDA events around the call, cold L2
                    cache, free of launch gaps; median
    bytes           what must move: source rows, tokens, indices and the position table, once each
    gb_per_s, of_copy   bytes / ms, and its share of the rate of a 1 GiB copy in this run
    layout rows     ms is kernel time, wall_ms wall clock with launches, back to back
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

from benchmarks.hstu_attention import kernel_ms, wall_ms, zipf_lengths
from ops.jagged import TokenLayout, build_token_layout, embed_tokens, take_rows
from ops.position import PositionRule

NUM_CONTEXTUALS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Users by their item events, and what their rows are."""

    lengths: tuple[int, ...]
    """Item events, candidates included."""
    num_candidates: int = 16
    width: int = 512
    rows: torch.dtype = torch.float32
    tokens: torch.dtype = torch.bfloat16
    dropout: float = 0.0
    num_positions: int | None = None
    """None: as many as the longest sequence has tokens, and one."""
    counting_from: str = "newest"


# 64 users of 4 contextual + 2 * 1014 history + 16 candidate tokens: T = 131,072
EQUAL = (1030,) * 64
ZIPF = tuple(length // 2 for length in zipf_lengths(512, 8192))
CASES = {
    "equal": Case(lengths=EQUAL),
    "equal_bf16": Case(lengths=EQUAL, rows=torch.bfloat16),
    "equal_dropout": Case(lengths=EQUAL, dropout=0.2),
    "equal_oldest": Case(lengths=EQUAL, counting_from="oldest"),
    "four_long_users": Case(lengths=(16390,) * 4),
    "short_users": Case(lengths=(72,) * 1024),
    "zipf": Case(lengths=ZIPF),
    "shared_positions": Case(lengths=EQUAL, num_positions=256),
    "narrow": Case(lengths=EQUAL * 4, width=128),
}
GATE = {
    "mixed": Case(lengths=(40, 0, 17, 200, 1) * 9, num_candidates=7),
    "bf16_shared": Case(
        lengths=(40, 0, 17, 200, 1) * 9, rows=torch.bfloat16, width=96, num_positions=20
    ),
    "oldest": Case(lengths=(40, 0, 17, 200, 1) * 9, counting_from="oldest", num_positions=101),
}


class Batch:
    """One case on the GPU."""

    def __init__(self, case: Case) -> None:
        self.case = case
        lengths = torch.tensor(case.lengths)
        candidates = torch.minimum(lengths, torch.full_like(lengths, case.num_candidates))
        contextuals = torch.full_like(lengths, NUM_CONTEXTUALS)
        longest = NUM_CONTEXTUALS + 2 * max(case.lengths)
        self.arguments: dict[str, Any] = {
            "num_item_rows": int(lengths.sum()),
            "num_contextual_rows": int(contextuals.sum()),
            "num_candidate_rows": int(candidates.sum()),
            "num_contextuals_B": contextuals.cuda(),
            "timestamps_E": torch.arange(int(lengths.sum()), device="cuda"),
            "positions": PositionRule(
                num_positions=case.num_positions or longest + 1,
                max_num_contextuals=NUM_CONTEXTUALS,
                counting_from="oldest" if case.counting_from == "oldest" else "newest",
                max_seq_len=longest,
            ),
        }
        self.counts = (lengths.cuda(), candidates.cuda())
        self.layouts = {name: self.layout(name) for name in ("pytorch", "triton")}
        layout = self.layouts["pytorch"]
        torch.manual_seed(0)
        sizes = {
            "item_rows_ED": layout.num_item_rows,
            "action_rows_AD": layout.num_action_rows,
            "contextual_rows_KD": layout.num_contextual_rows,
        }
        self.leaves = {name: self._rows(size, case.rows) for name, size in sizes.items()}
        num_positions = self.arguments["positions"].num_positions
        self.leaves["position_rows_PD"] = self._rows(num_positions, torch.float32)
        self.grad_TD = self._rows(layout.num_tokens, case.tokens).detach()

    def _rows(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        shape = (num_rows, self.case.width)
        return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()

    def layout(self, backend: str) -> TokenLayout:
        """Return the layout, made anew."""
        return build_token_layout(*self.counts, **self.arguments, backend=backend)

    def tokens(self, backend: str) -> Tensor:
        """Return the tokens."""
        rows = dict(self.leaves)
        items = rows.pop("item_rows_ED")
        options = {"dropout": self.case.dropout, "dtype": self.case.tokens, "backend": backend}
        return embed_tokens(self.layouts[backend], items, **rows, **options)

    def grads(self, out: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the leaves; the graph stays."""
        leaves = list(self.leaves.values())
        grads = torch.autograd.grad(out, leaves, self.grad_TD, retain_graph=True)
        return dict(zip(self.leaves, grads, strict=True))

    def num_bytes(self) -> int:
        """What forward or backward must move: rows, tokens, two indices, the position table."""
        num_tokens = self.grad_TD.shape[0]
        table = self.leaves["position_rows_PD"]
        read = sum(x.numel() * x.element_size() for x in self.leaves.values() if x is not table)
        tokens = self.grad_TD.numel() * self.grad_TD.element_size()
        longest = NUM_CONTEXTUALS + 2 * max(self.case.lengths) + 1
        used = min(longest, table.shape[0]) * table.shape[1] * table.element_size()
        return read + tokens + used + 16 * num_tokens


def gate() -> bool:
    """Whether triton equals pytorch: integers and moved rows exactly, sums as exactly as it."""
    passed = True
    for name, case in GATE.items():
        batch = Batch(case)
        plain_layout, layout = batch.layouts["pytorch"], batch.layouts["triton"]
        fields = [key for key, value in vars(plain_layout).items() if isinstance(value, Tensor)]
        wrong = [k for k in fields if not torch.equal(getattr(plain_layout, k), getattr(layout, k))]
        plain, actual, again = (batch.tokens(key) for key in ("pytorch", "triton", "triton"))
        grads, plain_grads, grads_again = (batch.grads(x) for x in (actual, plain, again))
        if case.rows == torch.float32 and not torch.equal(plain, actual):
            wrong.append("tokens")
        for key in grads:
            if not torch.equal(grads[key], grads_again[key]):
                wrong.append(f"{key} differs from run to run")
            if key != "position_rows_PD" and not torch.equal(grads[key], plain_grads[key]):
                wrong.append(key)
        ratio = _table_error_ratio(batch, grads, plain_grads)
        passed &= not wrong and ratio <= 1.5 and _take_rows_agrees(plain.detach(), layout)
        print(json.dumps({"gate": name, "wrong": wrong, "table_error_over_pytorch": ratio}))
    return passed


def _table_error_ratio(
    batch: Batch, grads: dict[str, Tensor], plain_grads: dict[str, Tensor]
) -> float:
    key = "position_rows_PD"
    exact = torch.zeros_like(grads[key], dtype=torch.float64)
    exact.index_add_(0, batch.layouts["pytorch"].position_T, batch.grad_TD.double())
    errors = [float((g[key].double() - exact).norm()) for g in (grads, plain_grads)]
    return float(f"{errors[0] / max(errors[1], 1e-9 * float(exact.norm())):.3g}")


def _take_rows_agrees(rows_TD: Tensor, layout: TokenLayout) -> bool:
    results = []
    for backend in ("pytorch", "triton"):
        leaf = rows_TD.clone().requires_grad_()
        out = take_rows(leaf, layout.candidate_tokens_C, dtype=torch.float32, backend=backend)
        results.append((out, *torch.autograd.grad(out, [leaf], torch.cos(out.detach()))))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def copy_gb_per_s() -> float:
    """Rate of a copy of 1 GiB, bytes read and written."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / kernel_ms(lambda: target.copy_(source), repeats=8) / 1e6


def rows_of(name: str, case: Case) -> Iterator[dict[str, Any]]:
    """Times of one case: tokens forward and backward, the layout, rows taken and put back."""
    batch = Batch(case)

    def forward(backend: str) -> Callable[[], Any]:
        return lambda: batch.tokens(backend)

    def backward(backend: str) -> Callable[[], Any]:
        out = batch.tokens(backend)
        return lambda: batch.grads(out)

    for phase, make in (("forward", forward), ("backward", backward)):
        row = _timed(make, batch.num_bytes())
        yield {"case": name, "phase": phase, "tokens": batch.grad_TD.shape[0], **row}
    layout = _timed(lambda backend: lambda: batch.layout(backend), None)
    for key in ("triton", "pytorch"):
        layout[f"{key}_wall_ms"] = wall_ms(lambda key=key: batch.layout(key))
    yield {"case": name, "phase": "layout", **layout}
    if name == "equal":
        yield from _take_rows_rows(name, batch)


def _take_rows_rows(name: str, batch: Batch) -> Iterator[dict[str, Any]]:
    layout = batch.layouts["triton"]
    rows_TD = batch.grad_TD.requires_grad_()
    for what, index in (
        ("candidates", layout.candidate_tokens_C),
        ("all items", layout.item_tokens_E),
    ):
        taken = index.numel() * rows_TD.shape[1]

        def forward(backend: str, index: Tensor = index) -> Callable[[], Any]:
            options = {"dtype": torch.float32, "backend": backend}
            return lambda: take_rows(rows_TD, index, **options)

        def backward(backend: str, index: Tensor = index) -> Callable[[], Any]:
            out = forward(backend, index)()
            grad = torch.ones_like(out)
            return lambda: torch.autograd.grad(out, [rows_TD], grad, retain_graph=True)

        sizes = (taken * (2 + 4), taken * 4 + rows_TD.numel() * 2)
        for phase, make, size in zip(("take", "put"), (forward, backward), sizes, strict=True):
            yield {"case": name, "phase": f"{phase} {what}", **_timed(make, size)}


def _timed(make: Callable[[str], Callable[[], Any]], num_bytes: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"ms": kernel_ms(make("triton"), repeats=9)}
    row["plain_ms"] = kernel_ms(make("pytorch"), repeats=5)
    row["speedup"] = row["plain_ms"] / row["ms"]
    if num_bytes is not None:
        row["bytes"] = num_bytes
        row["gb_per_s"] = num_bytes / row["ms"] / 1e6
    return row


def main() -> int:
    """Gate, ceiling, rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/jagged_tokens.py needs a CUDA device", file=sys.stderr)
        return 1
    if not gate():
        print("the correctness gate failed; nothing was timed", file=sys.stderr)
        return 1
    copy = copy_gb_per_s()
    print(json.dumps({"copy_gb_per_s": round(copy), "device": torch.cuda.get_device_name()}))
    for name in arguments.cases:
        for row in rows_of(name, CASES[name]):
            if "gb_per_s" in row:
                row["of_copy"] = row["gb_per_s"] / copy
            short = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
            print(json.dumps(short), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
