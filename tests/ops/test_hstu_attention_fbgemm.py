"""The adapter of FBGEMM's `hstu`, on a stand-in with both of its signatures, against the oracle."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.hstu_attention import CallShape, available_backends, choose_backend, fbgemm_impl
from ops.hstu_attention import hstu_attention as public_op
from ops.hstu_attention.spec import AttentionSpec, Fp8Spec
from tests.ops.fbgemm_stand_in import (
    DIM,
    NUM_HEADS,
    OWN_CASES,
    REFUSED,
    assert_equals_oracle,
    attend,
    gradients,
    make_inputs,
    make_module,
    module_with,
)
from tests.ops.test_hstu_attention import CASES, Case


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModuleType | None], None]]:
    """Put a module in the place of `hstu`; None = not installed."""

    def put(module: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, "hstu", module)
        fbgemm_impl.load_package.cache_clear()

    yield put
    fbgemm_impl.load_package.cache_clear()


@pytest.fixture(params=["present", "older"])
def signature(request: pytest.FixtureRequest, install: Callable[..., None]) -> str:
    install(make_module(request.param))
    return request.param


@pytest.mark.parametrize("name", [*CASES, *OWN_CASES])
def test_every_case_equals_the_oracle_or_is_refused_by_name(signature: str, name: str) -> None:
    leaves, arguments = make_inputs((CASES | OWN_CASES)[name])
    if name not in REFUSED:
        assert_equals_oracle(leaves, arguments)
        return
    with pytest.raises(NotImplementedError, match=f'"cutlass".*{REFUSED[name]}.*"triton"'):
        attend(leaves, arguments, "cutlass")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", fbgemm_impl.HEAD_DIMS)
def test_head_dims_and_dtypes(signature: str, dim: int, dtype: torch.dtype) -> None:
    assert_equals_oracle(*make_inputs(CASES["hostile_lengths"], dim=dim, dtype=dtype))


@pytest.mark.parametrize(
    "scaling", [1, 7.0, 300, 1000, 10**9, 2.5, 1e30, torch.tensor(7.0), torch.tensor(300)]
)
def test_scaling_seqlen(signature: str, scaling: float | Tensor) -> None:
    leaves, arguments = make_inputs(CASES["hostile_lengths"], dtype=torch.bfloat16)
    assert_equals_oracle(leaves, arguments | {"scaling_seqlen": scaling})


@pytest.mark.parametrize("scaling", [1, 7.0, 300, 1000])
def test_older_kernels_divide_to_the_same_bits(install, scaling: float) -> None:
    leaves, arguments = make_inputs(CASES["groups_of_3"], dtype=torch.bfloat16)
    results = []
    for name in ("present", "older"):
        install(make_module(name))
        out = attend(leaves, arguments | {"scaling_seqlen": scaling}, "cutlass")
        results.append((out, gradients(out, leaves)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["hostile_lengths", "window_without_counts"])
def test_rows_past_the_last_offset_stay_zero_and_poison_nothing(signature: str, name: str) -> None:
    case = (CASES | OWN_CASES)[name]
    clean, arguments = make_inputs(case)
    poisoned, poisoned_arguments = make_inputs(case, extra_rows=2)
    num_tokens = clean["uvqk"].shape[0]
    with torch.no_grad():
        poisoned["uvqk"][:num_tokens] = clean["uvqk"]
        poisoned["uvqk"][num_tokens:] = float("nan")
    expected = attend(clean, arguments, "cutlass")
    out = attend(poisoned, poisoned_arguments, "cutlass")
    assert torch.equal(out[:num_tokens], expected)
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    weights = torch.ones_like(out)
    weights[num_tokens:] = float("nan")
    (grad,) = torch.autograd.grad(out, [poisoned["uvqk"]], weights)
    (expected_grad,) = torch.autograd.grad(expected.sum(), [clean["uvqk"]])
    assert torch.equal(grad[num_tokens:], torch.zeros_like(grad[num_tokens:]))
    assert torch.equal(grad[:num_tokens], expected_grad)


@pytest.mark.parametrize("lengths", [(), (0, 0)])
@pytest.mark.parametrize("extra_rows", [0, 3])
def test_batches_without_tokens_have_zero_gradients(
    signature: str, lengths: tuple[int, ...], extra_rows: int
) -> None:
    empty = Case(lengths, (0,) * len(lengths), (0,) * len(lengths))
    leaves, arguments = make_inputs(empty, extra_rows=extra_rows)
    leaves["uvqk"].data.fill_(float("nan"))
    out = attend(leaves, arguments, "cutlass")
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(leaves["uvqk"].grad, torch.zeros_like(leaves["uvqk"]))


def test_any_strides_of_inputs_and_output_gradient(signature: str) -> None:
    case = Case((9, 5), (0, 0), (2, 0))
    leaves, arguments = make_inputs(case)
    expected = attend(leaves, arguments, "cutlass")
    parts = leaves["uvqk"].detach().unflatten(1, (NUM_HEADS, 4, DIM)).unbind(2)
    v, q, k = (x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in parts[1:])
    others = {key: value for key, value in arguments.items() if key != "seq_offsets"}
    out = fbgemm_impl.hstu_attention(
        q.requires_grad_(),
        k,
        v_THV=v,
        seq_offsets=arguments["seq_offsets"].int(),
        spec=AttentionSpec(**others),
    )
    assert torch.equal(out, expected)
    weights = torch.ones(DIM, NUM_HEADS, 14, dtype=out.dtype).permute(2, 1, 0)
    torch.autograd.grad(out, [q], weights)


def test_nothing_is_read_on_the_host(install) -> None:
    """A meta tensor has no values: the whole adapter runs on them, up to 2**31 - 1 elements."""
    seen = {}

    def attend_on_meta(q, k, v, **arguments):
        seen.update(arguments)
        return torch.empty_like(q)

    for name in ("present", "older"):
        module = make_module(name)
        attend_on_meta.__signature__ = inspect.signature(module.hstu_attn_varlen_func)
        install(module_with(attend_on_meta))
        for num_rows in (9, 2**21 - 1):
            q = torch.empty(num_rows, 4, 256, dtype=torch.bfloat16, device="meta")
            spec = AttentionSpec(
                max_seq_len=7,
                scaling_seqlen=torch.empty((), device="meta"),
                num_candidates=torch.empty(2, dtype=torch.int64, device="meta"),
            )
            offsets = torch.empty(3, dtype=torch.int64, device="meta")
            out = fbgemm_impl.hstu_attention(q, q, v_THV=q, seq_offsets=offsets, spec=spec)
            assert out.shape == q.shape and seen["num_targets"].dtype == torch.int32
        q = torch.empty(2**21, 4, 256, dtype=torch.bfloat16, device="meta")
        with pytest.raises(NotImplementedError, match="2097152 x 4 x 256 = 2147483648"):
            fbgemm_impl.hstu_attention(q, q, v_THV=q, seq_offsets=offsets, spec=spec)
        q = torch.empty(2**31 - 256, 0, 64, dtype=torch.bfloat16, device="meta")
        with pytest.raises(NotImplementedError, match="the padded rows of 2147483648"):
            fbgemm_impl.hstu_attention(q, q, v_THV=q, seq_offsets=offsets, spec=spec)
        q = torch.empty(9, 4, 64, dtype=torch.bfloat16, device="meta")
        offsets = torch.empty(65537, dtype=torch.int64, device="meta")
        with pytest.raises(NotImplementedError, match="at most 65535 users.* got 65536"):
            fbgemm_impl.hstu_attention(
                q,
                q,
                v_THV=q,
                seq_offsets=offsets,
                spec=dataclasses.replace(spec, num_candidates=None),
            )


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("longer than max_seq_len", {"max_seq_len": 8}),
        ("offsets fall", {"seq_offsets": torch.tensor([0, 9, 8])}),
        ("past the 14 rows", {"seq_offsets": torch.tensor([0, 9, 15])}),
        ("is_causal = False with candidates", {"is_causal": False}),
    ],
)
def test_values_are_checked_on_the_device(
    signature: str, message: str, change: dict[str, Any]
) -> None:
    _, arguments = make_inputs(Case((9, 5), (0, 0), (2, 0)))
    arguments |= change
    q = torch.zeros(14, 1, DIM, dtype=torch.bfloat16)
    others = {key: value for key, value in arguments.items() if key != "seq_offsets"}
    with pytest.raises(RuntimeError, match=message):
        fbgemm_impl.hstu_attention(
            q, q, v_THV=q, seq_offsets=arguments["seq_offsets"], spec=AttentionSpec(**others)
        )


def test_long_users_of_candidates_only_stop_the_older_kernels(install) -> None:
    leaves, arguments = make_inputs(Case((5, 65), (0, 0), (0, 65)))
    install(make_module("present"))
    assert_equals_oracle(leaves, arguments)
    install(make_module("older"))
    with pytest.raises(RuntimeError, match="neighbour"):
        attend(leaves, arguments, "cutlass")


@pytest.mark.parametrize("name", ["present", "older"])
def test_float16_output_of_a_bfloat16_model_is_cast_and_checked(install, name: str) -> None:
    install(make_module(name, out_dtype=torch.float16))
    leaves, arguments = make_inputs(CASES["groups_of_3"], dtype=torch.bfloat16)
    assert_equals_oracle(leaves, arguments)
    with torch.no_grad():
        leaves["uvqk"].mul_(1e3)
    with pytest.raises(RuntimeError, match="overflowed"):
        attend(leaves, arguments | {"scaling_seqlen": 1}, "cutlass")


BAD_SHAPES = {
    "one of 32, 64, 128, 256.*got 96": (96, 96, torch.bfloat16),
    "must be equal.*got 64 and 32": (64, 32, torch.bfloat16),
    "bfloat16 or float16.*float32": (64, 64, torch.float32),
}


@pytest.mark.parametrize(("message", "shape"), BAD_SHAPES.items(), ids=BAD_SHAPES.keys())
def test_shapes_they_do_not_have_are_refused(signature: str, message: str, shape: Any) -> None:
    attention_dim, linear_dim, dtype = shape
    call_shape = CallShape(attention_dim=attention_dim, linear_dim=linear_dim, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"cutlass.*{message}.*pytorch"):
        choose_backend("cutlass", device_type="cuda", shape=call_shape)
    q, v = (torch.zeros(5, 1, dim, dtype=dtype) for dim in (attention_dim, linear_dim))
    spec = AttentionSpec(max_seq_len=5, scaling_seqlen=5)
    with pytest.raises(NotImplementedError, match=message):
        fbgemm_impl.hstu_attention(q, q, v_THV=v, seq_offsets=torch.tensor([0, 5]), spec=spec)


CALL = {"attention_dim": 64, "linear_dim": 64, "dtype": torch.bfloat16}
SIZES = {"num_heads": 4, "max_seq_len": 2**13}
REFUSED_AT_BUILD = {
    "position_bias is not in FBGEMM's kernels": {"has_position_bias": True},
    "time_bias is not in FBGEMM's kernels": {"has_time_bias": True},
    "deterministic = True": {"deterministic": True},
    "attention_window = 9 together with num_contextuals": {"attention_window": 9},
    "q of 8388608 x 4 x 64 = 2147483648 elements": SIZES | {"max_num_users": 2**10},
    "at most 65535 users": SIZES | {"max_num_users": 65536},
    "the padded rows of 2155839360": {
        "num_heads": 0,
        "max_seq_len": 2**15,
        "max_num_users": 65535,
    },
}
RUNS = {
    "every mask": {"target_group_size": 7, "disable_contextual_mask": True},
    "not causal": {"is_causal": False},
    "a window that cuts nothing": {"attention_window": 2**13, **SIZES},
    "a window without counts": {
        "attention_window": 9,
        "has_contextuals": False,
        "has_candidates": False,
    },
    "rows just under the limit": SIZES | {"max_num_users": 2**10 - 1},
}


@pytest.mark.parametrize(("message", "fields"), REFUSED_AT_BUILD.items(), ids=REFUSED_AT_BUILD)
def test_calls_they_do_not_have_are_refused_at_build(
    signature: str, message: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(NotImplementedError, match=f"cutlass.*{message}.*what runs here"):
        choose_backend("cutlass", device_type="cuda", shape=CallShape(**CALL, **fields))


@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_calls_they_have_are_let_through_at_build(signature: str, fields: dict[str, Any]) -> None:
    shape = CallShape(**CALL, **fields)
    assert choose_backend("cutlass", device_type="cuda", shape=shape) == "cutlass"


@pytest.mark.parametrize("has_fp8", [True, False])
def test_a_build_without_fp8_is_refused_at_build(
    install, monkeypatch: pytest.MonkeyPatch, has_fp8: bool
) -> None:
    install(make_module("present", has_fp8=has_fp8))
    ask = fbgemm_impl._refuse_build
    monkeypatch.setattr(fbgemm_impl, "_refuse_build", lambda package, _: ask(package, "cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(fbgemm_impl.fbgemm_fp8, "refuse_device", lambda: None)
    shape = CallShape(**CALL, fp8=Fp8Spec(mode="per_head"))
    reason = fbgemm_impl.refuse("cuda", shape)
    assert (reason is None) == has_fp8
    assert has_fp8 or "does not support fp8_e4m3.); build it without HSTU_DISABLE" in (reason or "")
    assert fbgemm_impl.refuse("cuda", CallShape(**CALL)) is None


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17])
def test_fp8_per_row_gets_whole_rows_of_transposed_copies(install, num_rows: int) -> None:
    module, seen = make_module("present"), []
    theirs = module.hstu_attn_varlen_func

    def note(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        seen.append((q.shape[0], others["quant_mode"]))
        return theirs(q, k, v, **others)

    note.__signature__ = inspect.signature(theirs)
    install(module_with(note))
    q = torch.randn(num_rows, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, num_rows])
    for mode in ("per_row", "per_batch"):
        spec = AttentionSpec(max_seq_len=17, scaling_seqlen=17, fp8=Fp8Spec(mode=mode))
        out = fbgemm_impl.hstu_attention(q, q, v_THV=q, seq_offsets=offsets, spec=spec)
        (grad,) = torch.autograd.grad(out.sum(), [q])
        assert out.shape == q.shape and out.isfinite().all() and grad.isfinite().all()
    assert seen == [(-(-num_rows // 16) * 16, 1), (num_rows, 4)]


def test_deterministic_is_refused(signature: str) -> None:
    leaves, arguments = make_inputs(CASES["plain_causal"])
    with pytest.raises(NotImplementedError, match="deterministic = True"):
        attend(leaves, arguments | {"deterministic": True}, "cutlass")


def test_the_signature_is_found_once_by_its_parameters(
    install, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = inspect.signature, []
    monkeypatch.setattr(fbgemm_impl.inspect, "signature", lambda f: calls.append(f) or original(f))
    for name, is_present in (("present", True), ("older", False)):
        install(make_module(name))
        leaves, arguments = make_inputs(CASES["plain_causal"])
        for _ in range(2):
            attend(leaves, arguments, "cutlass")
        assert fbgemm_impl.load_package().takes_scaling_seqlen is is_present
    assert len(calls) == 2


def test_other_signatures_are_refused(install) -> None:
    install(module_with(lambda q, k, v, offsets: q))
    with pytest.raises(NotImplementedError, match=r"neither of the signatures.*\(q, k, v, offsets"):
        choose_backend("cutlass", device_type="cuda")
    install(module_with(None))
    with pytest.raises(NotImplementedError, match="no hstu_attn_varlen_func, so it is not FBGEMM"):
        choose_backend("cutlass", device_type="cuda")


def test_a_missing_package_is_named_with_the_way_to_get_it(install) -> None:
    install(None)
    pattern = "cutlass.*hstu is not installed.*pytorch/FBGEMM.*what runs here: pytorch.*'?auto"
    for device_type in ("cpu", "cuda"):
        with pytest.raises(NotImplementedError, match=pattern):
            choose_backend("cutlass", device_type=device_type)
    leaves, arguments = make_inputs(CASES["plain_causal"])
    with pytest.raises(NotImplementedError, match="hstu is not installed"):
        attend(leaves, arguments, "cutlass")


def test_a_package_that_fails_to_import_is_named_with_its_error(
    install, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "hstu").mkdir()
    (tmp_path / "hstu" / "__init__.py").write_text("raise OSError('libcudart.so.12: missing')")
    install(None)
    monkeypatch.delitem(sys.modules, "hstu")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotImplementedError, match="fails to import.*OSError: libcudart.so.12"):
        choose_backend("cutlass", device_type="cuda")


def test_the_package_runs_on_cuda_only(signature: str) -> None:
    assert available_backends("cuda")["cutlass"] is None
    assert choose_backend("cutlass", device_type="cuda") == "cutlass"
    leaves, arguments = make_inputs(CASES["plain_causal"])
    _, v, q, k = leaves["uvqk"].unflatten(1, (NUM_HEADS, 4, -1)).unbind(2)
    with pytest.raises(NotImplementedError, match="needs a CUDA device, got cpu; what runs here"):
        public_op(q, k, v_THV=v, backend="cutlass", **arguments)


def test_the_public_op_runs_it(signature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fbgemm_impl, "refuse", lambda device_type, shape: None)
    leaves, arguments = make_inputs(CASES["groups_of_3"])
    _, v, q, k = leaves["uvqk"].unflatten(1, (NUM_HEADS, 4, -1)).unbind(2)
    out = public_op(q, k, v_THV=v, backend="cutlass", **arguments)
    assert torch.equal(out, attend(leaves, arguments, "cutlass"))
