# SPDX-License-Identifier: Apache-2.0
"""Training through the package: autograd, torch.compile, checkpointing, autocast, and every name that has a
backward pass. What the gradients are is in tests/laws/test_backward.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cula
import cula.delta_rule
import cula.gdn
import cula.gla
import cula.kda
import cula.lightning
import cula.linear_attn
import cula.retention
import cula.simple_gla
from cula import _autograd, _ops
from cula_testing import device, gradients, level1
from cula_testing.cases import ALGORITHMS, Case, Inputs, make
from cula_testing.compare import assert_same_bits

SMALL = Case("kda", (20,), heads=1, value_heads=2, key_dim=16, value_dim=16, dtype=torch.float32)


def leaves_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: getattr(inputs, name).detach().requires_grad_() for name in gradients.names(inputs)}


def loss_of(made, seed: int = 3) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(seed)
    given = [x for x in made if x is not None]
    return sum((x * torch.randn(x.shape, generator=draw, device="cpu").to(x)).float().sum() for x in given)


# Level 1


@pytest.mark.parametrize("gate", ["log_decay", "softplus", "bounded"])
def test_functions_have_the_gradients_of_the_operator(algorithm, gate):
    takes_gates = algorithm in ("kda", "gdn", "gdn2", "rwkv7")
    if gate != "log_decay" and not takes_gates:
        pytest.skip("takes no raw gate")
    logits = takes_gates and cula.algorithms()[algorithm].takes_beta
    inputs = make(SMALL.but(algorithm=algorithm, gate=gate, qk_l2norm=True, beta_is_logit=logits))
    leaves = leaves_of(inputs)
    o, final_state = level1.prefill(inputs.but(**leaves))
    d_o, d_final_state = gradients.upstream(inputs)
    found = torch.autograd.grad((o, final_state), leaves.values(), (d_o, d_final_state))
    wanted = gradients.backward(inputs, d_o, d_final_state)
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype), name
        assert_same_bits(name, gradient, wanted[name].view(gradient.shape).to(gradient.dtype))


def test_only_what_requires_gradients_gets_them():
    inputs = make(SMALL)
    v = inputs.v.clone().requires_grad_()
    level1.prefill(inputs.but(v=v))[0].sum().backward()
    assert v.grad is not None
    assert inputs.q.grad is None


def test_gradients_have_the_dtype_and_layout_of_their_inputs():
    """bfloat16 inputs, float32 gates, parameters of any shape and dtype, K-first states."""
    inputs = make(SMALL.but(dtype=torch.bfloat16, gate="softplus"))
    leaves = leaves_of(inputs)
    leaves["A_log"] = inputs.A_log.view(1, 2, 1).bfloat16().requires_grad_()
    leaves["dt_bias"] = inputs.dt_bias.reshape(-1).requires_grad_()
    leaves["initial_state"] = inputs.initial_state.mT.contiguous().requires_grad_()
    o, state = cula.cula_kda(
        leaves["q"], leaves["k"], leaves["v"], leaves["g"], leaves["beta"], A_log=leaves["A_log"],
        dt_bias=leaves["dt_bias"], use_gate_in_kernel=True, initial_state=leaves["initial_state"],
        output_final_state=True, state_v_first=False,
    )  # fmt: skip
    loss_of((o, state)).backward()
    for name, leaf in leaves.items():
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype), name
        assert leaf.grad.isfinite().all(), name
        assert leaf.grad.any(), name
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    (first,) = torch.autograd.grad(
        cula.cula_kda(
            *(leaves[name].detach() for name in ("q", "k", "v", "g", "beta")), A_log=inputs.A_log,
            dt_bias=inputs.dt_bias, use_gate_in_kernel=True, initial_state=leaves["initial_state"],
            output_final_state=True, state_v_first=False,
        ),
        leaves["initial_state"], (d_o, d_state),
    )  # fmt: skip
    wanted = gradients.backward(inputs, d_o, d_state.mT, wanted=["initial_state"])["initial_state"]
    assert_same_bits("initial_state", first, wanted.mT.contiguous())


def test_decode_trains():
    inputs = make(SMALL.but(lengths=(5,)))
    leaves = leaves_of(inputs)
    op = torch.ops.cula.decode.default
    named = {name: value for name, value in inputs.but(**leaves).tensors().items() if value is not None}
    o, _ = op(**named, options=_ops.pack("kda"), initial_state=leaves["initial_state"])
    found = torch.autograd.grad(o.sum(), leaves.values())
    o, _ = level1.prefill(inputs.but(**leaves))
    for name, one, two in zip(leaves, found, torch.autograd.grad(o.sum(), leaves.values()), strict=True):
        assert_same_bits(name, one, two)


# Drop-ins

# Each with its arguments by name and which of the tensors below each is, and with its options.
KEYS, UPPER = {"q": "q", "k": "k", "v": "v"}, {"Q": "q", "K": "k", "V": "v"}
CHANNEL, TOKEN, WRITE = {"g": "per_channel"}, {"g": "per_token"}, {"beta": "beta"}
K_FIRST, V_FIRST, NORM = {"initial_state": "k_first"}, {"initial_state": "v_first"}, {"z": "z"}
RAW_CHANNEL = {**CHANNEL, "A_log": "per_head", "dt_bias": "head_channel"}
RAW_TOKEN = {**TOKEN, "A_log": "per_head", "dt_bias": "per_head_too"}
FINAL, LAYER = {"output_final_state": True}, {"layer_idx": 1, "num_layers": 3}
GATE, BOUNDED = {**FINAL, "use_gate_in_kernel": True}, {"lower_bound": -2.0}
SLOPES = torch.tensor([0.1, 0.3], device="cpu")
CUT = torch.tensor([0, 4, 9], device="cpu")


def chunkwise(output_final_state, **named):
    return cula.LinearAttentionChunkwiseDecay(
        has_initial_state=True, output_final_state=output_final_state, scale=0.5
    )(**named)


DROP_INS = [
    (cula.kda.chunk_kda, KEYS | CHANNEL | WRITE | K_FIRST, FINAL),
    (cula.kda.chunk_kda, KEYS | RAW_CHANNEL | WRITE | K_FIRST, GATE),
    (cula.kda.chunk_kda, KEYS | RAW_CHANNEL | WRITE | K_FIRST, GATE | BOUNDED),
    (cula.kda.fused_recurrent_kda, KEYS | CHANNEL | WRITE | K_FIRST, FINAL),
    (cula.kda.fused_recurrent_kda, KEYS | RAW_CHANNEL | WRITE | K_FIRST, GATE),
    (cula.kda.kda_prefill_hopper, KEYS | CHANNEL | WRITE | V_FIRST, FINAL),
    (cula.kda.kda_prefill_hopper, KEYS | RAW_CHANNEL | WRITE | V_FIRST, GATE | BOUNDED),
    (cula.gdn.chunk_gated_delta_rule, KEYS | TOKEN | WRITE | K_FIRST, FINAL),
    (cula.gdn.chunk_gated_delta_rule, KEYS | RAW_TOKEN | WRITE | K_FIRST, GATE),
    (cula.gdn.fused_recurrent_gated_delta_rule, KEYS | TOKEN | WRITE | K_FIRST, FINAL),
    (cula.gdn.fused_recurrent_gated_delta_rule, KEYS | RAW_TOKEN | WRITE | K_FIRST, GATE),
    (cula.gdn.fused_recurrent_gated_delta_rule, KEYS | TOKEN | {"gk": "per_channel"} | K_FIRST, FINAL),
    (cula.gla.chunk_gla, KEYS | CHANNEL | K_FIRST, FINAL),
    (cula.gla.fused_recurrent_gla, KEYS | {"gk": "per_channel"} | K_FIRST, FINAL),
    (cula.simple_gla.chunk_simple_gla, KEYS | TOKEN | K_FIRST, FINAL),
    (cula.simple_gla.chunk_simple_gla, KEYS | TOKEN | K_FIRST, FINAL | {"g_gamma": -SLOPES}),
    (cula.simple_gla.fused_chunk_simple_gla, KEYS | TOKEN | K_FIRST, FINAL),
    (cula.simple_gla.fused_recurrent_simple_gla, KEYS | TOKEN | K_FIRST, FINAL),
    (cula.retention.chunk_retention, KEYS | K_FIRST, FINAL),
    (cula.retention.fused_chunk_retention, KEYS | K_FIRST, FINAL),
    (cula.retention.fused_recurrent_retention, KEYS | K_FIRST, FINAL),
    (cula.delta_rule.chunk_delta_rule, KEYS | WRITE | K_FIRST, FINAL),
    (cula.delta_rule.fused_recurrent_delta_rule, KEYS | WRITE | K_FIRST, FINAL),
    (cula.linear_attn.chunk_linear_attn, KEYS | K_FIRST, FINAL | {"normalize": False}),
    (cula.linear_attn.chunk_linear_attn, KEYS | K_FIRST | NORM, FINAL | {"normalize": True}),
    (cula.linear_attn.fused_chunk_linear_attn, KEYS | K_FIRST | NORM, FINAL | {"normalize": True}),
    (cula.linear_attn.fused_recurrent_linear_attn, KEYS | K_FIRST, FINAL),
    (cula.linear_attn.fused_recurrent_linear_attn, KEYS | K_FIRST | NORM, FINAL | {"normalize": True}),
    (cula.lightning.chunk_lightning_attn, KEYS | K_FIRST, FINAL | LAYER),
    (cula.lightning.fused_recurrent_lightning_attn, KEYS | K_FIRST, FINAL | LAYER),
    (cula.lightning.lightning_attn_fwd, UPPER | V_FIRST, FINAL | {"decay": SLOPES}),
    (cula.lightning.lightning_attn_fwd_varlen, UPPER, {"decay": SLOPES, "cu_seqlens": CUT}),
    (chunkwise, UPPER | V_FIRST, FINAL | {"decay": SLOPES}),
]
FLOAT32_STATES = (cula.kda.chunk_kda, cula.kda.kda_prefill_hopper, cula.gla.chunk_gla)  # alone are taken


@pytest.mark.cpu_only("float64 is the reference's")
@pytest.mark.parametrize(
    ("function", "names", "options"),
    DROP_INS,
    ids=[f"{function.__name__}-{row}" for row, (function, _, _) in enumerate(DROP_INS)],
)
def test_drop_ins_train(function, names, options):
    """The gradients are those of difference quotients of the drop-in itself, in float64."""
    torch.manual_seed(0)
    rows = (1, 9, 2)
    made = {name: torch.randn(*rows, 4, dtype=torch.float64) for name in ("q", "k")}
    made["v"] = torch.randn(*rows, 3, dtype=torch.float64)
    made["per_channel"] = -torch.rand(*rows, 4, dtype=torch.float64)
    made["per_token"] = -torch.rand(rows, dtype=torch.float64)
    made["beta"] = torch.rand(rows, dtype=torch.float64)
    made["per_head"], made["per_head_too"] = torch.randn(2, 2, dtype=torch.float64)
    made["head_channel"] = torch.randn(2, 4, dtype=torch.float64)
    made["k_first"] = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    made["v_first"] = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    made["z"] = 1 + torch.rand(1, 1, 2, 4, dtype=torch.float64)
    if "z" in names:  # what o is divided by stays away from zero
        made["q"], made["k"] = made["q"].abs() + 0.1, made["k"].abs()
    leaves = {name: made[kind].clone().requires_grad_() for name, kind in names.items()}

    def run(*values):
        named = dict(zip(leaves, values, strict=True))
        if function in FLOAT32_STATES:
            named["initial_state"] = named["initial_state"].float()
        if "z" in named:
            named["initial_state"] = named["initial_state"], named.pop("z")
        o, state = function(**named, **options)
        return o, *(state if isinstance(state, tuple) else (state,))

    if "z" in names:  # which is float32 between o and q
        assert torch.autograd.gradcheck(run, list(leaves.values()), fast_mode=True, eps=1e-2, atol=1e-3)
        return
    if function in FLOAT32_STATES:  # they are linear in them
        state = leaves["initial_state"]
        leaves["initial_state"] = state.detach()
        assert torch.autograd.gradcheck(
            lambda x: run(*(x if name == "initial_state" else value for name, value in leaves.items())),
            [state], fast_mode=True, eps=1.0, atol=1e-5,
        )  # fmt: skip
    assert torch.autograd.gradcheck(run, list(leaves.values()), fast_mode=True)


@pytest.mark.cpu_only("float64 is the reference's")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradcheck(algorithm):
    case = SMALL.but(algorithm=algorithm, lengths=(5,), key_dim=4, value_dim=3, qk_l2norm=True)
    inputs = make(case).double()
    leaves = leaves_of(inputs)

    def run(*values):
        return level1.prefill(inputs.but(**dict(zip(leaves, values, strict=True))), backend="reference")

    assert torch.autograd.gradcheck(run, list(leaves.values()), fast_mode=True)


# PyTorch's own ways


def test_backward_twice_doubles():
    inputs = make(SMALL)
    leaves = leaves_of(inputs)
    loss = loss_of(level1.prefill(inputs.but(**leaves)))
    loss.backward(retain_graph=True)
    once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    loss.backward()
    for name, leaf in leaves.items():
        assert_same_bits(name, leaf.grad, 2 * once[name])


def test_checkpointing_gives_the_same_bits():
    inputs = make(SMALL)
    results = []
    for run in (level1.prefill, lambda x: checkpoint(level1.prefill, x, use_reentrant=False)):
        leaves = leaves_of(inputs)
        loss_of(run(inputs.but(**leaves))).backward()
        results.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, gradient in results[0].items():
        assert_same_bits(name, gradient, results[1][name])


def test_a_mode_sees_the_public_operators():
    """Also where gradients are required: policies of selective checkpointing name them."""
    runs = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            runs.append(op)
            return op(*args, **(kwargs or {}))

    inputs = make(SMALL)
    results = []
    for modes in (nullcontext(), Watch()):
        leaves = leaves_of(inputs)
        with modes:
            loss_of(level1.prefill(inputs.but(**leaves))).backward()
        results.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, gradient in results[0].items():
        assert_same_bits(name, gradient, results[1][name])
    passes = [torch.ops.cula.prefill.default, torch.ops.cula.backward.default]
    assert [op for op in runs if op.namespace.startswith("cula")] == passes


def test_autocast_changes_nothing_of_a_call():
    inputs = make(SMALL.but(dtype=torch.bfloat16))
    results = []
    for enabled in (False, True):
        leaves = leaves_of(inputs)
        with torch.autocast(device.kind(), torch.bfloat16, enabled=enabled):
            loss = loss_of(level1.prefill(inputs.but(**leaves)))
        loss.backward()
        results.append([leaf.grad for leaf in leaves.values()])
    for one, two in zip(*results, strict=True):
        assert_same_bits("gradient", one, two)


def test_a_saved_input_that_is_written_is_found():
    inputs = make(SMALL)
    q = inputs.q.clone().requires_grad_()
    k = inputs.k.clone()
    o, _ = level1.prefill(inputs.but(q=q, k=k))
    k.zero_()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        o.sum().backward()


def test_second_derivatives_are_refused():
    """Whatever asks for them: none is zero in silence."""
    inputs = make(SMALL)
    q = inputs.q.clone().requires_grad_()

    def o(value):
        return level1.prefill(inputs.but(q=value))[0]

    refused = pytest.raises(NotImplementedError, match="derivatives are not built: the gradient of q can")
    (first,) = torch.autograd.grad(o(q).square().sum(), q, create_graph=True)
    assert first.requires_grad
    with refused:
        first.sum().backward(retain_graph=True)
    with refused:
        torch.autograd.grad(o(q).sum() + first.square().sum(), q)
    with refused:
        torch.autograd.functional.hessian(lambda value: o(value).square().sum(), q)
    with refused:
        torch.autograd.functional.jvp(o, q, torch.ones_like(q))


# What a loss does to the final state: reduces, permutes, cuts it.
READERS = {
    "sum": lambda state: state.sum(),
    "permuted": lambda state: (state.permute(3, 0, 2, 1).reshape(16, -1) ** 2).sum(),
    "every second": lambda state: state[:, :, ::2, ::2].square().sum(),
    "one head": lambda state: state[:, 1].square().sum(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("v_first", [True, False], ids=["v_first", "k_first"])
def test_gradients_of_final_states_of_any_strides(reader, v_first):
    inputs = make(SMALL)
    state = inputs.initial_state if v_first else inputs.initial_state.mT.contiguous()
    read = READERS[reader]
    results = []
    for dense in (False, True):
        v = inputs.v.clone().requires_grad_()
        _, final = level1.prefill(inputs.but(v=v, initial_state=state), state_v_first=v_first)
        leaf = final.detach().requires_grad_()
        (d_state,) = torch.autograd.grad(read(leaf), leaf)
        loss = (final * d_state.contiguous()).sum() if dense else read(final)
        results.append(torch.autograd.grad(loss, v)[0])
    assert results[0].any()
    assert_same_bits("v", *results)


def test_wrong_arguments_are_refused_in_the_same_words():
    """With gradients on and off."""
    inputs = make(SMALL.but(state=False))
    for name, wrong in {
        "q": inputs.q.int(), "k": inputs.k[:, :3], "initial_state": torch.zeros(1, 2, 16, 16).int(),
        "beta": inputs.beta[:, 1:], "g": inputs.g.long(),
    }.items():  # fmt: skip
        assert_refused_alike(inputs.but(**{name: wrong}))
    for key_dim in (0, 300):
        q = torch.zeros(1, 20, 1, key_dim)
        words = assert_refused_alike(inputs.but(q=q, k=q, g=torch.zeros(1, 20, 2, key_dim)))
        assert words == f"prefill: q must have a key dimension K from 1 to 256, got {key_dim}"


def assert_refused_alike(inputs: Inputs) -> str:
    with torch.no_grad(), pytest.raises(ValueError) as plain:  # noqa: PT011  (compared below)
        level1.prefill(inputs)
    with pytest.raises(ValueError) as error:  # noqa: PT011  (as above)
        level1.prefill(inputs.but(v=inputs.v.clone().requires_grad_()))
    assert str(error.value) == str(plain.value)
    return str(error.value)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_train_in_one_graph(backend):
    """One graph for all lengths."""
    torch.compiler.reset()
    torch.manual_seed(0)
    project = torch.nn.Linear(8, 8)

    def model(x):
        q = project(x).view(1, -1, 1, 8)
        return cula.cula_gla(q, q, q, -q.sigmoid())[0]

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9, 33):
        x, results = torch.randn(tokens, 8), []
        for run in (model, compiled):
            project.zero_grad()
            run(x).square().sum().backward()
            results.append(project.weight.grad.clone())
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("v_first", [True, False], ids=["v_first", "k_first"])
def test_compiled_models_train_with_many_value_channels(backend, v_first):
    """More than the operator takes, so that its calls write into parts of one tensor."""
    torch.compiler.reset()
    inputs = make(SMALL.but(gate="softplus", value_dim=320))
    if not v_first:
        inputs.initial_state = inputs.initial_state.mT.contiguous()

    def model(leaves):
        return level1.prefill(inputs.but(**leaves), state_v_first=v_first)

    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        leaves = leaves_of(inputs)
        loss_of(run(leaves)).backward()
        results.append(leaves)
    for name, leaf in results[0].items():
        assert_same_bits(f"d_{name}", leaf.grad, results[1][name].grad)


def test_the_operator_follows_pytorchs_rules():
    inputs = make(SMALL.but(gate="softplus"))
    named = {name: value for name, value in inputs.tensors().items() if value is not None}
    named |= {"initial_state": inputs.initial_state, "options": _ops.pack("kda", gate="softplus")}
    wanted = sum(_ops.bit("gradients") << _ops.GRADIENTS.index(name) for name in gradients.names(inputs))
    d_o, d_final_state = gradients.upstream(inputs)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.cula.backward.default, (), {**named, "options": named["options"] + wanted, "d_o": d_o},
        test_utils=checks,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.cula.backward.out, (),
        {**named, "d_o": d_o, "d_final_state": d_final_state,
         **{f"d_{name}": gradients.empty(inputs, name) for name in gradients.names(inputs)}},
        test_utils=checks,
    )  # fmt: skip
    leaves = {
        name: value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in named.items()
    }
    torch.library.opcheck(
        torch.ops.cula.prefill.default, (), leaves,
        test_utils=(*checks, "test_autograd_registration", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


# What has no gradient


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("writes into out has", {"out": torch.empty(1, 20, 2, 16)}),
        ("writes into a state or pool has", {"state_pool": torch.zeros(1, 2, 16, 16)}),
        ("the states of return_intermediate_states", {"return_intermediate_states": True}),
        (
            "states in slots have none: give a state for each sequence and no initial_state_indices",
            {"initial_state": torch.zeros(3, 2, 16, 16), "initial_state_indices": torch.tensor([2])},
        ),
        (
            "writes into checkpoints has",
            {"checkpoints": cula.Checkpoints(torch.zeros(1, 2, 16, 16), torch.tensor([[0, 20, 0]]))},
        ),
        ("a call that is given kept has none", {"kept": torch.zeros(0, dtype=torch.int32)}),
    ],
)
def test_what_is_written_in_place_has_no_gradients(words, named):
    inputs = make(SMALL.but(state=False))
    q = inputs.q.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"prefill: q requires gradients.*{words}"):
        level1.prefill(inputs.but(q=q), **{"output_final_state": False, **named})


def test_a_constant_decay_has_no_gradient():
    inputs = make(SMALL.but(algorithm="lightning"))
    with pytest.raises(NotImplementedError, match="prefill: decay requires gradients, which are not built"):
        level1.prefill(inputs.but(decay=inputs.decay.clone().requires_grad_()))


def test_a_refusal_names_the_argument_as_its_function_does():
    inputs = make(SMALL)
    q, k, v = inputs.q, inputs.k, inputs.v
    state = inputs.initial_state.clone().requires_grad_()
    per_head = torch.full((2,), -0.1, requires_grad=True)
    token = {name: getattr(inputs, name)[:, :1] for name in ("g", "beta")}
    calls = {
        "prefill: state_pool": lambda: level1.prefill(inputs.but(initial_state=None), state_pool=state),
        "prefill: out": lambda: level1.prefill(inputs, out=torch.empty_like(v, requires_grad=True)),
        "prefill: g_gamma": lambda: cula.simple_gla.chunk_simple_gla(v, v, v, g_gamma=per_head),
        "decode: g_gamma": lambda: cula.simple_gla.fused_recurrent_simple_gla(v, v, v, g_gamma=per_head),
        "decode: state": lambda: cula.cula_decode(q[:, :1], k[:, :1], v[:, :1], state, **token),
        "verify: state": lambda: level1.verify(inputs, state),
    }
    for words, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"^{words} requires gradients"):
            call()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs.initial_state, inputs.initial_state)
        with pytest.raises(NotImplementedError, match=r"^prefill: state_pool has a tangent"):
            level1.prefill(inputs.but(initial_state=None), state_pool=dual)


def test_vmap_and_batched_gradients_are_refused():
    inputs = make(SMALL)

    def o(value):
        return level1.prefill(inputs.but(v=value))[0]

    named = {"g": inputs.g, "beta": inputs.beta, "options": _ops.pack("kda")}
    refused = pytest.raises(NotImplementedError, match=r"^prefill: torch.vmap is not built")
    for leaf in (inputs.v, inputs.v.clone().requires_grad_()):
        with refused:
            torch.vmap(o)(leaf[None])
        with refused:
            torch.vmap(lambda value: torch.ops.cula.prefill(inputs.q, inputs.k, value, **named))(leaf[None])
    with refused:
        torch.vmap(lambda value: level1.prefill(inputs.but(v=value), out=torch.empty_like(inputs.v)))(
            inputs.v[None]
        )
    refused = pytest.raises(NotImplementedError, match=r"^backward: batched gradients .* are not built")
    for value_dim in (16, 320):
        inputs = make(SMALL.but(value_dim=value_dim))
        leaf = inputs.v.clone().requires_grad_()
        made = o(leaf)
        with refused:
            torch.autograd.grad(made, leaf, torch.ones(2, *made.shape), is_grads_batched=True)
        with refused:
            torch.autograd.functional.jacobian(o, inputs.v, vectorize=True)


def test_what_no_backend_takes_is_refused_before_it_runs(monkeypatch):
    """As on a GPU that has no backward kernel."""
    rows = [_autograd._Row("sm80", False, "compute capability 7.5")]
    monkeypatch.setattr(_autograd, "_rows", lambda *_: rows)
    inputs = make(SMALL)
    with pytest.raises(NotImplementedError, match=r"q requires gradients, and no backend .*sm80: compute"):
        level1.prefill(inputs.but(q=inputs.q.clone().requires_grad_()))
    level1.prefill(inputs)
