"""Padding cannot be seen: on a GPU, with memory that holds garbage wherever nobody has written.

The same T rows run three times: as views of buffers whose next rows are garbage, out of memory that
is full of NaN; the same out of memory that is full of zeros; and with rows of zeros written out up
to the next multiple, so that nothing is left to pad. Outputs and gradients of real rows, weight and
bias gradients agree to 1e-6 in FP32, maxima exactly, and equal those of the real rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.hstu_config import HSTUConfig
from modules.hstu_stack import HSTUStack
from modules.jagged_sequence import JaggedSequence
from modules.linear.plan import PlannedLinear, attach_engines
from modules.linear.recipe import LinearRecipe
from modules.linear.state import Fp8State, fp8_state_dict
from ops.jagged import lengths_to_offsets
from training.precision import fp8_autocast

pytestmark = [pytest.mark.gpu, pytest.mark.fp8]

DEVICE = "cuda"
HOSTILE = (0, 1, 7, 15, 16, 17, 31, 4095)
WIDTH, OUT = 128, 256
TOLERANCE = 1e-6
PAIRS = [
    *(("native", scaling) for scaling in ("delayed", "tensorwise", "rowwise", "blockwise")),
    *(("te", scaling) for scaling in ("delayed", "tensorwise", "blockwise")),
    *(("emulated", scaling) for scaling in ("delayed", "tensorwise", "rowwise", "blockwise")),
    ("emulated", "mxfp8"),
]
Result = dict[str, Tensor]


def fill_free_memory(value: float) -> None:
    """What the allocator hands out next holds `value`, in blocks of all sizes."""
    sizes = [1 << 24, 1 << 22, 1 << 20] * 3 + [1 << 17, 1 << 13, 1 << 9, 1 << 7] * 48
    blocks = [torch.full((size,), value, device=DEVICE) for size in sizes]
    del blocks


def test_memory_is_poisoned() -> None:
    for size in (1 << 8, 1 << 12, 1 << 20):
        fill_free_memory(torch.nan)
        found = [torch.empty(size, device=DEVICE) for _ in range(4)]
        assert any(bool(tensor.isnan().all()) for tensor in found)


def recipe_of(backend: str, scaling: str) -> LinearRecipe:
    if backend == "te":
        pytest.importorskip("transformer_engine", reason="transformer_engine is not installed")
    is_e4m3 = (backend, scaling) == ("native", "blockwise")
    grad_dtype = torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2
    return LinearRecipe(backend=backend, scaling=scaling, grad_dtype=grad_dtype, history_len=2)


class Linear(nn.Module):
    """One linear with its engine, as a trunk holds them."""

    def __init__(self, recipe: LinearRecipe) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.linear = nn.Linear(WIDTH, OUT)
        self.recipe = recipe
        self.part = nn.Module()
        self.part.engine = None
        planned = PlannedLinear(
            name="part.linear",
            in_features=WIDTH,
            out_features=OUT,
            rows=1,
            precision="FP8",
            reason="",
        )
        self.to(DEVICE)
        try:
            attach_engines(self, [planned], recipe)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return self.part.engine.linear(x, self.linear.weight, self.linear.bias)


def run(model: nn.Module, recipe: LinearRecipe, x: Tensor, grad: Tensor) -> Result:
    """Everything that a step leaves behind; the second step scales with what the first one saw."""
    state = getattr(model, "fp8_state", None)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        with fp8_autocast(recipe):
            out = model(leaf)
        out.backward(grad)
        if isinstance(state, Fp8State):
            state.commit()
    assert leaf.grad is not None
    found = {"out": out.detach(), "gradient of x": leaf.grad}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {name: tensor.clone() for name, tensor in found.items()}


def rows(num_rows: int, width: int, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, width, generator=generator) * scale).to(DEVICE)


def with_garbage(real: Tensor) -> Tensor:
    """The same rows in front of others that nobody may read."""
    buffer = torch.full((real.shape[0] + 256, real.shape[1]), 3e4, device=DEVICE)
    buffer[1::2] = torch.nan
    buffer[: real.shape[0]] = real
    return buffer[: real.shape[0]]


def with_zeros(real: Tensor, multiple: int) -> Tensor:
    missing = -real.shape[0] % multiple if len(real) else multiple
    return torch.cat([real, real.new_zeros(missing, real.shape[1])])


def assert_agree(found: Result, wanted: Result, num_rows: int) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        expected = wanted[name]
        if name in ("out", "gradient of x"):
            expected = expected[:num_rows]
        assert tensor.shape == expected.shape and tensor.isfinite().all(), name
        difference = (tensor.double() - expected.double()).norm()
        assert difference <= TOLERANCE * expected.double().norm(), name


def maxima(model: nn.Module) -> dict[str, Tensor]:
    return fp8_state_dict(model)


def newest_maxima(model: nn.Module, backend: str) -> list[float]:
    """Of rows and of output gradients, as the last step saw them."""
    state = maxima(model)
    if backend == "te":
        forward, backward = (state[f"part.linear.history_{way}"] for way in ("fwd", "bwd"))
        return [float(forward[-1, 0]), float(backward[-1, 0])]
    history = state["part.linear.history"]
    return [float(history[0, 0]), float(history[0, 2])]


@pytest.mark.parametrize("num_rows", HOSTILE)
@pytest.mark.parametrize(("backend", "scaling"), PAIRS)
def test_a_linear(backend: str, scaling: str, num_rows: int) -> None:
    recipe = recipe_of(backend, scaling)
    x, grad = rows(num_rows, WIDTH), rows(num_rows, OUT, scale=1e-3, seed=1)
    results, models = [], []
    for memory in (torch.nan, 0.0):
        model = Linear(recipe)
        hidden, hidden_grad = with_garbage(x), with_garbage(grad)
        fill_free_memory(memory)
        results.append(run(model, recipe, hidden, hidden_grad))
        models.append(model)
    full = Linear(recipe)
    explicit = with_zeros(x, recipe.row_multiple), with_zeros(grad, recipe.row_multiple)
    wanted = run(full, recipe, *explicit)
    for found in results:
        assert_agree(found, wanted, num_rows)
    if num_rows == 0:
        assert not results[0]["gradient of linear.weight"].any()
        assert not results[0]["gradient of linear.bias"].any()
    for model in models:
        for name, tensor in maxima(full).items():
            assert torch.equal(maxima(model)[name], tensor), name
    if scaling == "delayed" and num_rows:
        assert newest_maxima(models[0], backend) == [
            float(x.abs().amax()),
            float(grad.abs().amax()),
        ]


class Trunk(nn.Module):
    """Two layers whose four linears run in FP8."""

    def __init__(self, recipe: LinearRecipe, elementwise_backend: str) -> None:
        super().__init__()
        config = HSTUConfig(
            hidden_size=WIDTH,
            num_heads=2,
            attention_dim=64,
            linear_dim=64,
            attention_backend="pytorch",
            elementwise_backend=elementwise_backend,
        )
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.stack = HSTUStack(config, 2)
        self.to(DEVICE)
        planned = [
            PlannedLinear(
                name=name,
                in_features=module.in_features,
                out_features=module.out_features,
                rows=1,
                precision="FP8",
                reason="",
            )
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear)
        ]
        assert len(planned) == 4
        try:
            attach_engines(self, planned, recipe)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        self.to(DEVICE)
        self.lengths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor(self.lengths, device=DEVICE)
        none = torch.zeros_like(lengths)
        sequence = JaggedSequence(
            values_TD=x,
            seq_offsets_B1=lengths_to_offsets(lengths),
            num_contextuals_B=none,
            num_candidates_B=none,
            max_seq_len=256,
            scaling_seqlen=16.0,
        )
        return self.stack(sequence).values_TD


def lengths_of(num_rows: int) -> list[int]:
    """Users of 200 events and the rest, with one that has none."""
    return [0, *[200] * (num_rows // 200), num_rows % 200]


@pytest.fixture
def _no_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_no_tf32")
@pytest.mark.parametrize("num_rows", [n for n in HOSTILE if n])
@pytest.mark.parametrize("elementwise", ["triton", "pytorch"])
@pytest.mark.parametrize("scaling", ["delayed", "tensorwise"])
@pytest.mark.parametrize("backend", ["native", "emulated", "te"])
def test_layers_with_their_fused_casts(
    backend: str, scaling: str, elementwise: str, num_rows: int
) -> None:
    """Garbage memory against zeroed memory, norms, SiLU and gate fused with the casts."""
    recipe = recipe_of(backend, scaling)
    x, grad = rows(num_rows, WIDTH), rows(num_rows, WIDTH, scale=1e-3, seed=1)
    found: list[tuple[Result, dict[str, Any]]] = []
    for memory in (torch.nan, 0.0):
        model = Trunk(recipe, elementwise)
        model.lengths = lengths_of(num_rows)
        hidden, hidden_grad = with_garbage(x), with_garbage(grad)
        fill_free_memory(memory)
        found.append((run(model, recipe, hidden, hidden_grad), maxima(model)))
    (poisoned, poisoned_maxima), (clean, clean_maxima) = found
    assert_agree(poisoned, clean, num_rows)
    assert poisoned_maxima.keys() == clean_maxima.keys()
    assert bool(clean_maxima) == (scaling == "delayed")
    for name, tensor in clean_maxima.items():
        assert torch.equal(poisoned_maxima[name], tensor), name
