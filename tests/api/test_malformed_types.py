# SPDX-License-Identifier: Apache-2.0
"""Every parameter of every public function, given what it cannot be: the promised error, with the parameter's
name in it, and no byte written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from torch import Tensor

import cula
from cula._ops import described, pack
from cula.compat import flash_kda, vllm
from cula_testing.cases import Case, make

pytestmark = pytest.mark.cpu_only("the layouts and devices that are wrong are a CPU's")

N, H, K = 2, 2, 16
X = make(Case("kda", (8, 8), heads=H, value_heads=H, key_dim=K, value_dim=K, dtype=torch.float32))
ONE = X.tokens(0, 1)
DECAY = torch.full((H,), 0.5)
A_LOG, BIAS = torch.zeros(H), torch.zeros(H * K)
STATES = {"initial_state": X.initial_state, "output_final_state": True}
G = X.g[..., 0].contiguous()


def pool() -> Tensor:
    return torch.zeros(4, H, K, K)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def level_1(function: Callable, *positional: Tensor, gate: bool = False) -> dict:
    """A call with all that the function takes together."""
    named = dict(zip(inspect.signature(function).parameters, positional, strict=False))
    if gate:
        named |= {
            "use_gate_in_kernel": True,
            "A_log": A_LOG,
            "dt_bias": BIAS[: H if "gdn" in function.__name__ else None],
        }
    plan = i32(0, 8, 0, 1, 8, 1).view(2, 3)
    return named | {
        "output_final_state": True,
        "initial_state": X.initial_state,
        "has_initial_state": torch.ones(N, dtype=torch.bool),
        "checkpoints": cula.Checkpoints(torch.zeros(2, H, K, K), plan),
        "out": torch.empty_like(X.v),
    }


def packed(named: dict) -> dict:
    """The rows of a batch one after the other."""
    rows = ("q", "k", "v", "g", "beta", "Q", "K", "V")
    return {name: x.flatten(0, 1)[None] if name in rows else x for name, x in named.items()} | {
        "cu_seqlens": i32(0, 8, 16)
    }


def calls() -> Iterator[tuple[Callable, dict]]:
    q, k, v, g, beta = X.q, X.k, X.v, X.g, X.beta
    base = {"q": q, "k": k, "v": v}
    for function, positional, gate in (
        (cula.cula_kda, (q, k, v, g, beta), True),
        (cula.cula_gdn, (q, k, v, G, beta), True),
        (cula.cula_gla, (q, k, v, g), False),
        (cula.cula_simple_gla, (q, k, v, G), False),
        (cula.cula_lightning, (q, k, v, DECAY), False),
        (cula.cula_delta, (q, k, v, beta), False),
    ):
        named = level_1(function, *positional, gate=gate)
        yield function, named
        named = {name: x for name, x in named.items() if name not in ("initial_state", "checkpoints", "out")}
        yield function, packed(named) | {"state_pool": pool(), "initial_state_indices": i32(0, 1),
                                         "final_state_indices": i32(2, 3)}  # fmt: skip
    step = {"q": ONE.q, "k": ONE.k, "v": ONE.v, "g": ONE.g, "beta": ONE.beta, "A_log": A_LOG, "dt_bias": BIAS}
    step |= {"use_gate_in_kernel": True, "has_initial_state": torch.ones(N, dtype=torch.bool)}
    yield cula.cula_decode, step | {"state": pool(), "state_indices": i32(0, 1),
                                    "final_state_indices": i32(2, 3),
                                    "out": torch.empty_like(ONE.v)}  # fmt: skip
    yield cula.cula_decode, base | {"q": ONE.q, "k": ONE.k, "v": ONE.v, "decay": DECAY, "mode": "lightning",
                                    "state": pool()}  # fmt: skip
    draft = base | {"g": g, "beta": beta, "A_log": A_LOG, "dt_bias": BIAS, "use_gate_in_kernel": True}
    parents = (torch.arange(8, dtype=torch.int32) - 1).repeat(N, 1)
    yield cula.cula_verify, draft | {"state": torch.zeros(20, H, K, K), "parents": parents,
                                     "out": torch.empty_like(v),
                                     "state_indices": 2 + torch.arange(16, dtype=torch.int32).view(N, 8),
                                     "num_accepted": i32(1, 1),
                                     "initial_state_indices": i32(0, 1)}  # fmt: skip
    yield cula.cula_verify, draft | {"state": pool(), "snapshots": torch.zeros(3, 8, H, K, K),
                                     "snapshot_indices": i32(2, 0)}  # fmt: skip
    yield cula.cula_verify, packed({**base, "g": g, "beta": beta, "state": pool()})
    yield cula.cula_segment, draft
    yield cula.cula_segment, packed({**base, "decay": DECAY, "mode": "lightning"})

    raw = {"use_gate_in_kernel": True, "A_log": A_LOG, "dt_bias": BIAS}
    rows = {"g": g, "beta": beta}
    for function, named in (
        (cula.kda.chunk_kda, base | rows | STATES | raw),
        (cula.kda.fused_recurrent_kda, base | rows | STATES | raw),
        (cula.kda.kda_prefill_hopper, base | rows | STATES | raw),
        (cula.gdn.chunk_gated_delta_rule, base | rows | STATES | raw | {"g": G, "dt_bias": BIAS[:H]}),
        (cula.gdn.fused_recurrent_gated_delta_rule, base | rows | STATES | {"gk": g, "g": G}),
        (
            cula.gdn.fused_recurrent_gated_delta_rule,
            base | rows | STATES | raw | {"g": G, "dt_bias": BIAS[:H]},
        ),
        (cula.generalized_delta_rule.chunk_dplr_delta_rule, base | {"a": -k, "b": k, "gk": g} | STATES),
        (
            cula.generalized_delta_rule.fused_recurrent_dplr_delta_rule,
            base | {"a": -k, "b": k, "gk": g} | STATES,
        ),
        (cula.gla.chunk_gla, base | {"g": g} | STATES),
        (cula.gla.fused_recurrent_gla, base | {"gk": g} | STATES),
        (cula.simple_gla.chunk_simple_gla, base | {"g": G, "g_gamma": -DECAY} | STATES),
        (cula.simple_gla.fused_recurrent_simple_gla, base | {"g": G, "g_gamma": -DECAY} | STATES),
        (cula.delta_rule.chunk_delta_rule, base | {"beta": beta} | STATES),
        (cula.delta_rule.fused_recurrent_delta_rule, base | {"beta": beta} | STATES),
        (cula.retention.chunk_retention, base | STATES),
        (cula.retention.fused_recurrent_retention, base | STATES),
        (cula.lightning.chunk_lightning_attn, base | {"layer_idx": 1, "num_layers": 4} | STATES),
        (cula.lightning.fused_recurrent_lightning_attn, base | {"layer_idx": 1, "num_layers": 4} | STATES),
    ):
        yield function, named
        more = {name: named[name].flatten(0, 1)[None] for name in ("gk", "a", "b") if name in named}
        yield function, packed(named) | more
    large = {"Q": q, "K": k, "V": v, "decay": DECAY}
    yield cula.lightning.lightning_attn_fwd, large | STATES
    yield cula.lightning.lightning_attn_fwd_varlen, packed(large) | {
        "state_pool": pool(), "initial_state_indices": i32(3, 0)}  # fmt: skip
    flat = {name: x[:, 0] for name, x in (("q", ONE.q), ("k", ONE.k), ("v", ONE.v))}
    strides = dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_s", "stride_o"), 1)
    yield cula.lightning.linear_attention_decode, flat | strides | {
        "s": torch.zeros(N * H, K, K), "out": torch.empty_like(flat["v"]), "softmax_scale": 1.0,
        "s_offsets": None, "decay_scales": DECAY, "HEAD_DIM": K, "K_SPLIT_DIM": K,
        "V_SPLIT_DIM": K}  # fmt: skip
    yield flash_kda.fwd, base | rows | {
        "scale": 0.25, "out": torch.empty_like(v), "A_log": A_LOG, "dt_bias": BIAS.view(H, K),
        "lower_bound": -5.0, "initial_state": X.initial_state,
        "final_state": torch.zeros(N, H, K, K)}  # fmt: skip
    yield flash_kda.get_workspace_size, {"T_total": 8, "H": H}
    yield from engine_calls()
    yield cula.linear_attn.chunk_linear_attn, base | STATES
    yield cula.linear_attn.fused_chunk_linear_attn, base | STATES
    yield cula.linear_attn.fused_recurrent_linear_attn, packed(base) | STATES
    yield cula.simple_gla.fused_chunk_simple_gla, base | {"g": G, "g_gamma": -DECAY} | STATES
    yield cula.retention.fused_chunk_retention, base | STATES
    yield cula.LinearAttentionChunkwiseDecay, {}
    yield configured, large | {"initial_state": X.initial_state}
    yield configured, packed(large) | {"initial_state": pool(), "initial_state_indices": i32(3, 0)}
    yield cula.explain, {}


def engine_calls() -> Iterator[tuple[Callable, dict]]:
    step = {"q": ONE.q, "k": ONE.k, "v": ONE.v, "A_log": A_LOG, "dt_bias": BIAS, "a": ONE.g, "b": ONE.beta}
    draft = step | {"q": X.q, "k": X.k, "v": X.v, "a": X.g, "b": X.beta}
    yield cula.kda.kda_decode, step | {"initial_state_source": pool(), "initial_state_indices": i32(0, 1),
                                       "out": torch.empty_like(ONE.v)}  # fmt: skip
    engine = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_source": pool()}
    engine |= {"initial_state_indices": i32(0, 1), "is_kda": True}
    update = cula.kda.fused_sigmoid_gating_delta_rule_update
    yield update, step | engine | {"out": torch.empty_like(ONE.v)}
    parents = (torch.arange(8, dtype=torch.int32) - 1).repeat(N, 1)
    yield update, draft | engine | {
        "disable_state_update": True, "intermediate_states_buffer": torch.zeros(3, 8, H, K, K),
        "intermediate_state_indices": i32(2, 0), "cache_steps": 8,
        "retrieve_parent_token": parents}  # fmt: skip
    update = vllm.fused_sigmoid_gating_delta_rule_update
    yield update, step | {"initial_state": pool(), "ssm_state_indices": i32(1, 2), "is_kda": True}
    table = 1 + torch.arange(16, dtype=torch.int32).view(N, 8)
    yield update, draft | {"initial_state": torch.zeros(20, H, K, K), "ssm_state_indices": table,
                           "is_kda": True, "num_accepted_tokens": i32(1, 1)}  # fmt: skip


def configured(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    call = cula.LinearAttentionChunkwiseDecay(
        has_initial_state=True, is_varlen=initial_state_indices is not None
    )
    return call(Q, K, V, decay, initial_state, cu_seqlens, initial_state_indices)


# What a parameter cannot be, by what it is.
NOT_TENSORS = [3.5, 1, "q", [0, 8, 16], (0.0,), True, numpy.zeros(3), object()]
with torch.device("cpu"):  # whose layouts some are, wherever the tests that are collected beside these run
    FLAT, Z = torch.zeros(4), torch.zeros(N, 1, H, K)
    WRONG_TENSORS = [
        torch.tensor(0.5),
        torch.zeros(2, 8, 2, 16, dtype=torch.complex64),
        torch.zeros(2, 8).to_sparse(),
        torch.zeros(8, 8).to_sparse_csr(),
        torch.zeros(2, 8, 2, 16, device="meta"),
        torch.quantize_per_tensor(FLAT, 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([FLAT, FLAT[:2]]),
        torch.nested.nested_tensor([FLAT, FLAT[:2]], layout=torch.jagged),
        torch.zeros(2, 8, 2, 16).to_mkldnn(),
        torch.zeros(2, 8, 2, 16, dtype=torch.uint8),
        torch.zeros(0),
        torch.zeros(1, 1, 1, 1, 1, 1),
    ]
WRONG = {
    "Tensor": [*NOT_TENSORS, *WRONG_TENSORS, None],
    "Tensor | None": [*NOT_TENSORS, *WRONG_TENSORS],
    "Tensor | tuple[Tensor, Tensor] | None": [
        *NOT_TENSORS,
        *WRONG_TENSORS,
        (),
        (X.initial_state,),
        ("S", "z"),
        (X.initial_state, FLAT),
        (FLAT, Z),
        (X.initial_state, Z, Z),
        (X.initial_state, Z.to_sparse()),
        (X.initial_state, Z.int()),
        [X.initial_state, Z],
        (X.initial_state, Z[:1]),
        (None, 1.5),
    ],
    "bool": ["yes", 0.5, [], FLAT, object()],
    "bool | None": ["yes", 0.5, [], FLAT, object()],
    "int | None": ["1", 1.5, [1], True, FLAT, 10**30, numpy.float32(1)],
    "int": ["1", 1.5, None, [1], True, FLAT, 10**30, numpy.float32(1)],
    "float": ["1", [1.0], FLAT, True, object(), float("nan"), numpy.float32(1)],
    "float | None": ["1", [1.0], FLAT, True, object(), float("nan"), numpy.float32(1)],
    "str": ["x", 1, None, FLAT],
    "str | None": ["x", 1, FLAT],
    "torch.device | str | None": ["x", [], 0.5, "meta", FLAT],
    "torch.dtype": ["x", None, 1, torch.int8, FLAT],
    "bool | str | None": ["yes", 0.5, [], FLAT, object(), False],
    "Checkpoints | None": [1, "x", (), (FLAT,), FLAT, (FLAT, None), (None, FLAT), ("a", "b")],
    "tuple[Tensor | None, Tensor | None] | None": [1, "x", (), (FLAT,), FLAT, ("a", "b"), (FLAT, FLAT)],
}
# What has no effect, as upstream, or is compared with what it stands for: any value will do, or a sentence of
# upstream.
FREE = {
    "cp_context", "chunk_indices", "persistent", "s_offsets", "kwargs", "gv", "HEAD_DIM", "K_SPLIT_DIM",
    "V_SPLIT_DIM", "stride_q", "stride_k", "stride_v", "stride_s", "stride_o", "cu_seqlens_cpu", "use_graph",
    "max_num_seqs", "acc_dtype", "io_dtype", "use_fast_math", "replayssm_rawv", "replayssm_rawk",
    "replayssm_g", "replayssm_beta",
}  # fmt: skip
# And what one function, or one kind of its calls, does not look at.
FREE_OF = {
    "kda_decode": {"cu_seqlens"},
    "LinearAttentionChunkwiseDecay": {"H", "K", "V"},
}
# What is not looked at without another argument.
UNREAD_WITHOUT = {
    ("configured", "cu_seqlens"): "initial_state_indices",
    ("configured", "initial_state_indices"): "cu_seqlens",
    ("fused_sigmoid_gating_delta_rule_update", "intermediate_state_indices"): "intermediate_states_buffer",
    ("fused_sigmoid_gating_delta_rule_update", "cache_steps"): "intermediate_states_buffer",
}
# Those that FLA takes in any case and may not look at.
UNREAD = {"A_log", "dt_bias", "lower_bound"}
# As the operators call it, or what does not fit it.
ALIASES = {
    "state_pool": "(initial|final)_state", "state": "(initial|final)_state", "s": "(initial|final)_state",
    "state_scales": "(initial|final)_scales",
    "initial_state_source": "(initial|final)_state", "decay_scales": "decay", "g_gamma": "decay", "a": "g",
    "b": "beta", "softmax_scale": "scale", "state_indices": "initial_state_indices",
    "q": "[kv]|batch size|a must hold", "Q": "[qkv]",
    "K": "k", "V": "v", "A_log": "use_gate_in_kernel", "lower_bound": "use_gate_in_kernel",
    "cu_seqlens": "input sequences", "gk": "g|gk beside a raw gate", "out": "[obm]",
    "initial_state": "final_state|state_pool", "intermediate_state_indices": "snapshot_indices",
    "ssm_state_indices": "initial_state_indices", "num_accepted_tokens": "num_accepted",
}  # fmt: skip


# Two faults


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"q": X.q.to("meta").requires_grad_(), "output_final_state": None}, ValueError,
         "k must be on q's device"),
        ({"chunk_size": 48, "output_final_state": None}, ValueError, "`chunk_size` must be either 32 or 64"),
        ({"g": X.g[:, :4], "output_final_state": None}, AssertionError, "g must have shape"),
        ({"beta": X.beta[:1], "cu_seqlens_cpu": i32(0, 8)}, AssertionError, "beta must have shape"),
        ({"scale": "1", "use_qk_l2norm_in_kernel": "yes"}, TypeError, "scale must be of type float, got str"),
        ({"q": X.q.tolist(), "output_final_state": None}, TypeError,
         "chunk_kda: q must be a tensor, got list"),
        ({"q": X.q[0], "cu_seqlens_cpu": torch.zeros(1, device="meta")}, ValueError,
         "q must have 4 dimensions"),
    ],
)  # fmt: skip
def test_what_is_said_first_stays(wrong, error, words):
    """None for output_final_state is what FLA's layers hand on, and no fault."""
    rows = {"q": X.q, "k": X.k, "v": X.v, "g": X.g, "beta": X.beta}
    with pytest.raises(error, match=words):
        cula.kda.chunk_kda(**{**rows, **wrong})


@torch.no_grad()
def test_none_is_no_wrong_flag_in_flas_functions():
    wrong = torch.zeros(2, 8, 2, 300)
    for function in (
        cula.linear_attn.fused_recurrent_linear_attn,
        cula.simple_gla.fused_recurrent_simple_gla,
    ):
        function(X.q, X.k, X.v, output_final_state=None, reverse=None)
        with pytest.raises(ValueError, match="k must have shape"):
            function(X.q, wrong, X.v, output_final_state=None, reverse=None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no memory")])
def test_no_memory_is_no_wrong_type(monkeypatch, error):
    def raise_it(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cula.kda._passes, "forward", raise_it)
    with pytest.raises(type(error)) as raised:
        cula.kda.chunk_kda(X.q, X.k, X.v, X.g, X.beta, use_graph="no", max_num_seqs="none")
    assert raised.value is error


def test_a_flag_of_numpy_has_its_module():
    with pytest.raises(TypeError, match=r"output_final_state must be of type bool, got numpy\.bool"):
        cula.cula_kda(X.q, X.k, X.v, X.g, X.beta, output_final_state=numpy.bool_(True))
    with pytest.raises(TypeError, match=r"use_qk_l2norm_in_kernel must be of type bool, got numpy\.bool"):
        cula.cula_kda(X.q, X.k, X.v, X.g, X.beta, use_qk_l2norm_in_kernel=numpy.bool_(True))


def written(named: dict) -> list[tuple[str, Tensor]]:
    held = [*named.items(), *(("checkpoints", x) for x in named.get("checkpoints") or ())]
    return [(name, x) for name, x in held if isinstance(x, Tensor)]


def shown(value: object) -> str:
    return f"{value.dtype} {described(value)}" if isinstance(value, Tensor) else f"{value!r:.40}"


@pytest.mark.parametrize("function", [cula.cula_kda, cula.cula_gdn])
def test_a_bound_without_a_gate_is_refused_as_its_rate_is(function):
    rows = (X.q, X.k, X.v, X.g if function is cula.cula_kda else G, X.beta)
    for name, value in (("lower_bound", -5.0), ("A_log", A_LOG)):
        with pytest.raises(ValueError, match=f"{name} must be left out when g is the log decay"):
            function(*rows, **{name: value})


def test_fla_ignores_what_belongs_to_a_gate_that_is_not_used():
    rows = (X.q, X.k, X.v, X.g, X.beta)
    wanted, _ = cula.kda.chunk_kda(*rows)
    found, _ = cula.kda.chunk_kda(*rows, A_log=A_LOG, dt_bias=BIAS, lower_bound=-5.0)
    assert torch.equal(wanted, found)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sparse", "nested", "quantized", "mkldnn"])
def test_operators_name_what_is_not_dense(kind):
    wrong = {
        "sparse": torch.zeros(2, 8).to_sparse(),
        "nested": torch.nested.nested_tensor([FLAT, FLAT[:2]]),
        "quantized": torch.quantize_per_tensor(FLAT, 0.1, 0, torch.qint8),
        "mkldnn": torch.zeros(2, 8, 2, 16).to_mkldnn(),
    }[kind]
    options = pack("gla")
    for position, name in enumerate(("q", "k", "v")):
        rows = [X.q, X.k, X.v]
        rows[position] = wrong
        with pytest.raises(
            ValueError, match=f"prefill: {name} must be a dense tensor, got a .*{kind}.* tensor"
        ):
            torch.ops.cula.prefill(*rows, options, X.g)


CASES = [
    pytest.param(function, named, id=f"{function.__module__}.{function.__name__}")
    for function, named in calls()
]


@torch.no_grad()
@pytest.mark.parametrize(("function", "named"), CASES)
def test_every_parameter(function, named):
    function(**named)  # is right
    before = [(name, tensor, tensor.clone()) for name, tensor in written(named)]
    failures = []
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        unread = UNREAD if "use_gate_in_kernel" not in named else set()
        if name in FREE | FREE_OF.get(function.__name__, set()):
            continue
        if function.__module__ != "cula.api" and name in unread:
            continue
        if UNREAD_WITHOUT.get((function.__name__, name), "q") not in {"q", *named}:
            continue
        for value in WRONG[parameter.annotation]:
            try:
                function(**{**named, name: value})
            except (ValueError, TypeError, NotImplementedError) as error:
                if not re.search(rf"\b({name}|{ALIASES.get(name, name)})\b", str(error)):
                    failures.append(f"{name} = {shown(value)}: {type(error).__name__}: {error}")
            except Exception as error:
                failures.append(f"{name} = {shown(value)}: {type(error).__name__}: {error!s:.150}")
            else:
                failures.append(f"{name} = {shown(value)}: taken")
    for name, tensor, was in before:
        if not torch.equal(tensor, was):
            failures.append(f"{name} was written")
    assert not failures, "\n".join(failures)
