"""Whole HSTU layers on the Triton elementwise path against the plain path.

On a machine without a GPU the kernels run in Triton's interpreter on CPU tensors; with one, this
same file runs them compiled.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from configs.schema import NetworkArgs
from modules import hstu_attention
from modules.hstu_config import HSTUConfig
from modules.hstu_stack import HSTUStack
from modules.jagged_sequence import JaggedSequence
from ops.jagged import lengths_to_offsets
from ops.silu_split import silu_split
from tests.modules.test_recompute_silu import kept_storages
from tests.ops.elementwise_cases import DEVICE, INTERPRETED, error, leaf

HIDDEN = 24
CONFIG = HSTUConfig(
    hidden_size=HIDDEN,
    num_heads=2,
    attention_dim=16,
    linear_dim=20,
    attention_backend="pytorch",
    elementwise_backend="triton",
)
LENGTHS, CONTEXTUALS, CANDIDATES = [11, 0, 3, 17, 1], [2, 0, 0, 2, 0], [3, 0, 3, 5, 0]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def make_stack(num_layers: int = 2, **changes) -> HSTUStack:
    """Weights large enough that every part matters, the same for all backends."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stack = HSTUStack(dataclasses.replace(CONFIG, **changes), num_layers)
        for parameter in stack.parameters():
            with torch.no_grad():
                parameter += torch.randn(parameter.shape) * 0.2
    return stack.to(DEVICE)


def make_sequence(
    values_TD: Tensor, lengths=LENGTHS, contextuals=CONTEXTUALS, candidates=CANDIDATES
):
    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=values_TD.device)

    return JaggedSequence(
        values_TD=values_TD,
        seq_offsets_B1=lengths_to_offsets(on_device(lengths)),
        num_contextuals_B=on_device(contextuals),
        num_candidates_B=on_device(candidates),
        max_seq_len=64,
        scaling_seqlen=8.0,
    )


def run(stack: HSTUStack, values_TD: Tensor, **sequence) -> dict[str, Tensor]:
    """Return output and all gradients of one fixed random cotangent."""
    out = stack(make_sequence(values_TD, **sequence)).values_TD
    weights = leaf(*out.shape, seed=9).detach().to(out.device, out.dtype)
    names = ["values", *(name for name, _ in stack.named_parameters())]
    grads = torch.autograd.grad(out, [values_TD, *stack.parameters()], weights)
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return leaf(sum(LENGTHS), HIDDEN, dtype=dtype)


ATTENTION = ["pytorch", "triton"]


@pytest.mark.parametrize("attention", ATTENTION)
def test_float32_equals_the_plain_path(attention: str) -> None:
    layers = 1 if INTERPRETED and attention == "triton" else 2
    plain = make_stack(layers, elementwise_backend="pytorch", attention_backend="pytorch")
    expected = run(plain, rows())
    actual = run(make_stack(layers, attention_backend=attention), rows())
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert error(actual[name], value.cpu().double()) < 3e-6, name


def test_bfloat16_is_as_exact_as_the_plain_path() -> None:
    exact_stack = make_stack(elementwise_backend="pytorch").cpu().double()
    values = rows(torch.bfloat16)
    exact = run(exact_stack, values.detach().cpu().double().requires_grad_())
    plain = run(make_stack(elementwise_backend="pytorch"), values)
    actual = run(make_stack(), values)
    for name, value in exact.items():
        assert actual[name].dtype == plain[name].dtype, name
        factor = 1.5 if value.numel() > 256 else 2.0  # an error of few entries scatters
        assert error(actual[name], value) <= factor * error(plain[name], value) + 1e-4, name


@pytest.mark.parametrize(
    ("switch", "attention"),
    [("recompute_input_layernorm", "pytorch"), ("recompute_input_silu", "triton")],
)
def test_recomputing_changes_no_bit(switch: str, attention: str) -> None:
    changes = {"attention_backend": attention, "dropout": 0.4, "deterministic": True}
    found = []
    for on in (False, True):
        stack = make_stack(1, **changes, **{switch: on}).train()
        torch.manual_seed(5)
        found.append(run(stack, rows()))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("recompute", [False, True])
def test_the_graph_does_not_keep_the_activation(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[int] = []

    def watched(*args, **kwargs):
        parts = silu_split(*args, **kwargs)
        addresses.append(parts[1].untyped_storage().data_ptr())
        return parts

    monkeypatch.setattr(hstu_attention, "silu_split", watched)
    stack = make_stack(1, recompute_input_silu=recompute).train()
    out = stack(make_sequence(rows())).values_TD
    assert (addresses[0] in kept_storages(out)) == (not recompute)
    out.sum().backward()
    assert len(addresses) == (2 if recompute else 1)  # once for attention and gate together


@pytest.mark.gpu
def test_recomputing_frees_what_it_says() -> None:
    num_rows, kept = 4096, {}
    switches = ("recompute_input_layernorm", "recompute_input_silu")
    values = leaf(num_rows, HIDDEN, dtype=torch.bfloat16)
    shape = {"lengths": [num_rows], "contextuals": [0], "candidates": [0]}
    for switch in (None, *switches):
        changes = {} if switch is None else {switch: True}
        stack = make_stack(1, attention_backend="triton", **changes).train()
        sequence = dataclasses.replace(make_sequence(values, **shape), max_seq_len=num_rows)
        stack(sequence)
        before = torch.cuda.memory_allocated()
        out = stack(sequence).values_TD
        kept[switch] = torch.cuda.memory_allocated() - before
        del out
    assert kept[None] - kept[switches[0]] == 2 * num_rows * HIDDEN
    assert kept[None] - kept[switches[1]] == 2 * num_rows * (CONFIG.uvqk_features - 2 * 20)


def test_dropout_in_training_only_and_by_the_seed() -> None:
    stack = make_stack(1, dropout=0.5)
    values = rows()
    torch.manual_seed(3)
    first, second = (stack(make_sequence(values)).values_TD for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(stack(make_sequence(values)).values_TD, first)
    assert not torch.equal(first, second)
    stack.eval()
    plain = make_stack(1, dropout=0.5, elementwise_backend="pytorch").eval()
    torch.testing.assert_close(
        stack(make_sequence(values)).values_TD,
        plain(make_sequence(values)).values_TD,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_no_token_and_one(recompute: bool) -> None:
    changes = {"recompute_input_layernorm": recompute, "recompute_input_silu": recompute}
    for num_tokens in (0, 1):
        shape = {"lengths": [num_tokens, 0], "contextuals": [0, 0], "candidates": [0, 0]}
        values = leaf(num_tokens, HIDDEN)
        plain = run(make_stack(elementwise_backend="pytorch"), values, **shape)
        actual = run(make_stack(**changes).train(), values, **shape)
        for name, value in plain.items():
            torch.testing.assert_close(
                actual[name],
                value,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, at=f"{name}, {num_tokens} tokens": f"{at}: {text}",
            )


def test_values_that_need_no_gradient() -> None:
    stack = make_stack(1)
    out = stack(make_sequence(rows().detach())).values_TD
    out.square().sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_frozen_weights_pass_gradients_to_values() -> None:
    values, plain_values = rows(), rows()
    for stack, x in (
        (make_stack(1), values),
        (make_stack(1, elementwise_backend="pytorch"), plain_values),
    ):
        stack.requires_grad_(False)
        stack(make_sequence(x)).values_TD.square().sum().backward()
    torch.testing.assert_close(values.grad, plain_values.grad, rtol=1e-4, atol=1e-4)


def test_checkpoints_are_the_same_file() -> None:
    triton, plain = make_stack(1), make_stack(1, elementwise_backend="pytorch")
    assert list(triton.state_dict()) == list(plain.state_dict())


NETWORK = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "kv_channels": 4}


def test_from_network_picks_triton_beside_a_triton_attention() -> None:
    device = {"disable_contextual_mask": False, "device_type": DEVICE}
    network = NetworkArgs(**NETWORK, kernel_backend="triton")
    assert HSTUConfig.from_network(network, **device).elementwise_backend == "triton"
    network = NetworkArgs(**NETWORK, kernel_backend="pytorch")
    assert HSTUConfig.from_network(network, **device).elementwise_backend == "pytorch"


def test_from_network_refuses_rows_that_are_too_wide() -> None:
    network = NetworkArgs(**(NETWORK | {"hidden_size": 9000}), kernel_backend="triton")
    with pytest.raises(NotImplementedError, match=r"hidden_size: rows must be 1 to 8192.*9000"):
        HSTUConfig.from_network(network, disable_contextual_mask=False, device_type=DEVICE)


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device() -> None:
    stack = make_stack(1, attention_backend="triton", dropout=0.3).train()
    values = rows(torch.bfloat16)
    sequence = make_sequence(values)
    stack(sequence).values_TD.float().sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stack(sequence).values_TD.float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
