"""The stack of three layers: what may flow between tokens, in values and in gradients."""

import dataclasses

import pytest
import torch
from torch import Tensor

from configs.schema import MixedPrecisionArgs, NetworkArgs
from modules.hstu_config import HSTUConfig
from modules.hstu_stack import HSTUStack
from modules.jagged_sequence import JaggedSequence
from ops.hstu_attention import FP8_MODES, Fp8Spec
from ops.jagged import lengths_to_offsets

HIDDEN = 8
NUM_HISTORY, NUM_CANDIDATES = 6, 3
BASE = HSTUConfig(
    hidden_size=HIDDEN,
    num_heads=2,
    attention_dim=4,
    linear_dim=6,
    attention_backend="pytorch",
)


def make_stack(num_layers: int = 3, **changes) -> HSTUStack:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stack = HSTUStack(dataclasses.replace(BASE, **changes), num_layers).double()
        for name, parameter in stack.named_parameters():
            if "uvqk.weight" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    return stack


def make_sequence(
    values_TD: Tensor,
    lengths: list[int],
    contextuals: list[int],
    candidates: list[int],
) -> JaggedSequence:
    return JaggedSequence(
        values_TD=values_TD,
        seq_offsets_B1=lengths_to_offsets(torch.tensor(lengths)),
        num_contextuals_B=torch.tensor(contextuals),
        num_candidates_B=torch.tensor(candidates),
        max_seq_len=64,
        scaling_seqlen=8.0,
        timestamps_T=torch.arange(values_TD.shape[0]) * 100,
    )


def random_rows(num_rows: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, HIDDEN, generator=generator, dtype=torch.float64)


def one_user(num_contextuals: int, values: Tensor | None = None) -> JaggedSequence:
    num_tokens = num_contextuals + NUM_HISTORY + NUM_CANDIDATES
    values = random_rows(num_tokens) if values is None else values
    return make_sequence(values, [num_tokens], [num_contextuals], [NUM_CANDIDATES])


def influence(stack: HSTUStack, num_contextuals: int, *, is_exact: bool = True) -> Tensor:
    """Return [i, j]: does token j change output i? By perturbing values; gradients must agree.

    Where the stack rounds one may be zero without the other: then either counts.
    """
    base = one_user(num_contextuals)
    num_tokens = base.num_tokens
    out = stack(base).values_TD
    by_value = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for j in range(num_tokens):
        values = base.values_TD.clone()
        values[j] += random_rows(1, seed=9)[0]
        by_value[:, j] = (stack(base.with_values(values)).values_TD != out).any(1)
    values = base.values_TD.clone().requires_grad_()
    out = stack(base.with_values(values)).values_TD
    by_gradient = torch.zeros_like(by_value)
    weights = random_rows(1, seed=4)[0]
    for i in range(num_tokens):
        (grad,) = torch.autograd.grad(out[i] @ weights, values, retain_graph=True)
        by_gradient[i] = (grad != 0).any(1)
    assert torch.equal(by_value, by_gradient) or not is_exact
    return by_value | by_gradient


@pytest.mark.parametrize("backend", ["pytorch", "reference"])
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("num_contextuals", [0, 2])
@pytest.mark.parametrize("window", [None, 2])
def test_causal_contextual_mask_does_not_leak(
    num_contextuals: int, group_size: int, backend: str, window: int | None
) -> None:
    stack = make_stack(
        disable_contextual_mask=True,
        target_group_size=group_size,
        attention_backend=backend,
        attention_window=window,
        num_position_bias_buckets=4,
        num_time_buckets=4,
    )
    flows = influence(stack, num_contextuals)
    first_candidate = num_contextuals + NUM_HISTORY
    history = slice(0, first_candidate)
    # history item 6 changes itself, no earlier token; no candidate changes the history
    expected = torch.ones(first_candidate, first_candidate, dtype=torch.bool).tril()
    if window is not None:
        # three layers carry an event (window - 1) positions each; contextual columns always show
        index = torch.arange(first_candidate)
        within_reach = index[:, None] - index <= len(stack.layers) * (window - 1)
        expected &= within_reach | (index < num_contextuals)
    assert torch.equal(flows[history, history], expected)
    assert not flows[history, first_candidate:].any()
    own_group = torch.eye(NUM_CANDIDATES) if group_size == 1 else torch.ones(3, 3).tril()
    assert torch.equal(flows[first_candidate:, first_candidate:], own_group.bool())
    assert flows[first_candidate:, first_candidate - 1].all()
    if window is None:
        assert flows[first_candidate:, :first_candidate].all()


@pytest.mark.parametrize("group_size", [1, 3])
def test_fp8_attention_does_not_leak(group_size: int) -> None:
    """Without scales, where nothing of a later token reaches an earlier one."""
    changes = {"disable_contextual_mask": True, "target_group_size": group_size}
    tables = {"num_position_bias_buckets": 4, "num_time_buckets": 4}
    stack = make_stack(**changes, **tables, attention_fp8=Fp8Spec(mode="cast"))
    flows, allowed = influence(stack, 2, is_exact=False), influence(stack.eval(), 2)
    assert not (flows & ~allowed).any()
    # a token whose effect is rounded away still reaches its own row
    assert flows.diagonal().all() and flows.sum() > 0.9 * allowed.sum()


@pytest.mark.parametrize("mode", FP8_MODES)
def test_a_later_token_reaches_earlier_ones_by_rounding_alone(mode: str) -> None:
    """A scale that it shares may move them by a rounding; no gradient flows."""
    stack = make_stack(disable_contextual_mask=True, attention_fp8=Fp8Spec(mode=mode))
    base, late = one_user(2), 2 + NUM_HISTORY - 1
    values = base.values_TD.clone().requires_grad_()
    out = stack(base.with_values(values)).values_TD
    (grad,) = torch.autograd.grad(out[:late].square().sum(), values)
    assert grad[:late].any(1).all() and not grad[late:].any()
    changed = base.values_TD.clone()
    changed[late:] = random_rows(changed.shape[0] - late, seed=9)
    moved = stack(base.with_values(changed)).values_TD[:late] - out[:late]
    assert moved.norm() < 0.1 * out[:late].norm()
    assert mode != "cast" or not moved.any()


def test_fp8_attention_is_for_training_unless_evaluation_asks_for_it() -> None:
    plain, fp8 = make_stack(), make_stack(attention_fp8=Fp8Spec(mode="per_head"))
    everywhere = make_stack(attention_fp8=Fp8Spec(mode="per_head"), fp8_eval=True)
    sequence = one_user(2)
    in_training = fp8(sequence).values_TD
    assert not torch.equal(in_training, plain(sequence).values_TD)
    assert torch.equal(fp8.eval()(sequence).values_TD, plain.eval()(sequence).values_TD)
    assert torch.equal(everywhere.eval()(sequence).values_TD, in_training)


@pytest.mark.parametrize("group_size", [1, 3])
def test_full_contextual_mask_keeps_candidates_apart(group_size: int) -> None:
    """Legal when only candidates are supervised: the history may see its own future then."""
    flows = influence(make_stack(target_group_size=group_size), 2)
    first_candidate = 2 + NUM_HISTORY
    assert not flows[:first_candidate, first_candidate:].any()
    own_group = torch.eye(NUM_CANDIDATES) if group_size == 1 else torch.ones(3, 3).tril()
    assert torch.equal(flows[first_candidate:, first_candidate:], own_group.bool())


def test_full_contextual_mask_leaks_the_future_through_two_layers() -> None:
    """Why history positions must not be supervised under it (the leak rule)."""
    first_history, last_history = 2, 2 + NUM_HISTORY - 1
    assert influence(make_stack(num_layers=2), 2)[first_history, last_history]
    assert not influence(make_stack(num_layers=1), 2)[first_history, last_history]
    causal = make_stack(num_layers=2, disable_contextual_mask=True)
    assert not influence(causal, 2)[first_history, last_history]


LENGTHS, CONTEXTUALS, CANDIDATES = [11, 0, 3, 40, 5], [2, 0, 0, 2, 2], [3, 0, 3, 5, 0]


def test_batch_mates_do_not_change_a_user() -> None:
    stack = make_stack().float()
    values = random_rows(sum(LENGTHS)).float()
    together = stack(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES))
    offsets = together.seq_offsets_B1.tolist()
    for user in range(len(LENGTHS)):
        rows = slice(offsets[user], offsets[user + 1])
        alone = make_sequence(
            values[rows],
            LENGTHS[user : user + 1],
            CONTEXTUALS[user : user + 1],
            CANDIDATES[user : user + 1],
        )
        torch.testing.assert_close(
            stack(alone).values_TD, together.values_TD[rows], rtol=1e-6, atol=1e-6
        )


def test_permuting_users_permutes_outputs() -> None:
    stack = make_stack()
    values = random_rows(sum(LENGTHS))
    out = stack(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES))
    order = [3, 1, 4, 0, 2]
    offsets = out.seq_offsets_B1.tolist()
    rows = torch.cat([torch.arange(offsets[user], offsets[user + 1]) for user in order])
    permuted = make_sequence(
        values[rows],
        [LENGTHS[user] for user in order],
        [CONTEXTUALS[user] for user in order],
        [CANDIDATES[user] for user in order],
    )
    torch.testing.assert_close(stack(permuted).values_TD, out.values_TD[rows])


@pytest.mark.parametrize("backend", ["pytorch", "reference"])
def test_an_empty_batch_runs_forward_and_backward(backend: str) -> None:
    stack = make_stack(
        attention_backend=backend, num_position_bias_buckets=4, num_time_buckets=4
    ).train()
    values = random_rows(0).requires_grad_()
    stack(make_sequence(values, [0, 0], [0, 0], [0, 0])).values_TD.sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() == 0, name
    assert values.grad is not None


def test_every_parameter_receives_a_gradient() -> None:
    stack = make_stack(num_position_bias_buckets=4, num_time_buckets=30)
    values = random_rows(sum(LENGTHS)).requires_grad_()
    out = stack(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES)).values_TD
    (out * random_rows(sum(LENGTHS), seed=2)).sum().backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_stack_equals_the_same_stack_over_the_reference() -> None:
    stack, oracle = make_stack(), make_stack(attention_backend="reference")
    outputs, grads = [], []
    for model in (stack, oracle):
        values = random_rows(sum(LENGTHS)).requires_grad_()
        out = model(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES)).values_TD
        outputs.append(out)
        weights = random_rows(sum(LENGTHS), seed=2)
        grads.append(torch.autograd.grad(out, [values, *model.parameters()], weights))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(grads[0], grads[1])


def test_recompute_input_layernorm_changes_no_number() -> None:
    results = []
    for recompute in (False, True):
        stack = make_stack(recompute_input_layernorm=recompute, dropout=0.3).train()
        values = random_rows(sum(LENGTHS)).requires_grad_()
        torch.manual_seed(3)
        out = stack(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES)).values_TD
        results.append(torch.autograd.grad(out.sum(), [values, *stack.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bfloat16_rows_stay_bfloat16_over_float32_parameters() -> None:
    stack = make_stack().float()
    values = random_rows(sum(LENGTHS)).bfloat16().requires_grad_()
    out = stack(make_sequence(values, LENGTHS, CONTEXTUALS, CANDIDATES)).values_TD
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert values.grad.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in stack.parameters())


def test_parameter_names_are_the_checkpoint_names() -> None:
    names = set(make_stack(1, num_position_bias_buckets=4, num_time_buckets=4).state_dict())
    inside = {
        *(f"input.{part}.{kind}" for part in ("norm", "uvqk") for kind in ("weight", "bias")),
        *(f"output.{part}.{kind}" for part in ("norm", "proj") for kind in ("weight", "bias")),
        "attention.position_bias",
        "attention.time_bias",
    }
    assert names == {f"layers.0.{name}" for name in inside}


def test_another_row_width_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size is 8, but the token rows are 5 wide"):
        make_stack()(make_sequence(torch.zeros(2, 5), [2], [0], [0]))


NETWORK = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "kv_channels": 4}


def test_from_network() -> None:
    network = NetworkArgs(
        **NETWORK,
        linear_channels=6,
        hidden_dropout=0.1,
        use_relative_position_bias=True,
        num_position_buckets=32,
        attention_window=5,
        target_group_size=2,
    )
    config = HSTUConfig.from_network(network, disable_contextual_mask=True, device_type="cpu")
    assert config == dataclasses.replace(
        BASE,
        dropout=0.1,
        num_position_bias_buckets=32,
        attention_window=5,
        target_group_size=2,
        disable_contextual_mask=True,
    )
    plain = NetworkArgs(**NETWORK)
    config = HSTUConfig.from_network(plain, disable_contextual_mask=False, device_type="cpu")
    assert (config.linear_dim, config.num_position_bias_buckets) == (4, None)
    assert config.num_time_buckets is None


def test_from_network_takes_the_attention_mode() -> None:
    options = {"disable_contextual_mask": False, "device_type": "cpu"}
    args = MixedPrecisionArgs(
        mixed_precision_dtype="fp8", hstu_attn_quantization_mode="per_head", fp8_eval=True
    )
    config = HSTUConfig.from_network(NetworkArgs(**NETWORK), precision=args, **options)
    assert (config.attention_fp8, config.fp8_eval) == (Fp8Spec(mode="per_head"), True)
    for switch in ({"mixed_precision_dtype": None}, {"hstu_attn_quantization_mode": "bf16"}):
        off = dataclasses.replace(args, **switch)
        config = HSTUConfig.from_network(NetworkArgs(**NETWORK), precision=off, **options)
        assert config.attention_fp8 is None


@pytest.mark.parametrize("backend", ["triton", "cutlass"])
def test_from_network_refuses_a_backend_that_cannot_run(backend: str) -> None:
    network = NetworkArgs(**NETWORK, kernel_backend=backend)
    with pytest.raises(NotImplementedError, match='kernel_backend = "auto"'):
        HSTUConfig.from_network(network, disable_contextual_mask=False, device_type="cpu")
