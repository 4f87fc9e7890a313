# SPDX-License-Identifier: Apache-2.0
"""The operators as PyTorch sees them: opcheck, torch.compile, torch.export, modes, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import cula
from cula._ops import bit
from cula_testing import level1, passes
from cula_testing.arguments import BASE, PACKED, arguments
from cula_testing.cases import ALGORITHMS, Case, make, state_like
from cula_testing.compare import assert_same_bits
from cula_testing.operators import packed
from cula_testing.process import run_python

# opcheck


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "verify", "segment"])
@pytest.mark.parametrize("case", [BASE, PACKED], ids=["batch", "packed"])
def test_opcheck(pass_name, case):
    op = getattr(torch.ops.cula, pass_name).out
    torch.library.opcheck(op, (), packed(arguments(pass_name, case)))


def test_opcheck_of_compose():
    m, b = torch.randn(3, 1, 2, 8, 8), torch.randn(3, 1, 2, 4, 8)
    joins = torch.tensor([True, False, True])
    torch.library.opcheck(torch.ops.cula.compose.default, (m, b, torch.zeros(1, 2, 4, 8), joins))


def test_opcheck_in_place():
    for pass_name in ("prefill", "decode"):
        named = arguments(pass_name)
        named["final_state"], named["initial_state"], named["in_place"] = named["initial_state"], None, True
        torch.library.opcheck(getattr(torch.ops.cula, pass_name).out, (), packed(named))


def test_opcheck_all_outputs():
    named = arguments("prefill")
    named["checkpoints"] = state_like(BASE, 2, fill=0.0)
    named["checkpoint_plan"] = torch.tensor([[0, 8, 0], [1, 0, 1]], dtype=torch.int32)
    named["chunk_states"] = state_like(BASE, 2, fill=0.0).unflatten(0, (2, 1))
    torch.library.opcheck(torch.ops.cula.prefill.out, (), packed(named))
    named = arguments("verify")
    named["snapshots"] = state_like(BASE, 16, fill=0.0).unflatten(0, (2, 8))
    torch.library.opcheck(torch.ops.cula.verify.out, (), packed(named))


def test_schemas_say_what_is_written():
    written = {
        "prefill": {"o", "final_state", "final_scales", "checkpoints", "chunk_states", "saved"},
        "decode": {"o", "final_state", "final_scales"},
        "verify": {"o", "final_state", "final_scales", "snapshots"},
        "segment": {"m", "b"},
    }
    for pass_name, names in written.items():
        packet = getattr(torch.ops.cula, pass_name)
        marked = {
            argument.name
            for argument in packet.out._schema.arguments
            if argument.alias_info and argument.alias_info.is_write
        }
        assert marked == names
        assert not packet.default._schema.is_mutable
        for overload in (packet.default, packet.out):
            assert not any(returned.alias_info for returned in overload._schema.returns)


# torch.compile


class Layer(torch.nn.Module):
    """A small layer as models write them: projections, prefill from a state, a gated output."""

    def __init__(self, algorithm: str, width: int = 32, heads: int = 2, dim: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = Case(
            algorithm, (1,), heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, qk_l2norm=True
        )
        self.widths = [heads * dim * count for count in (1, self.case.writes, self.case.writes)]
        self.project = torch.nn.Linear(width, sum(self.widths), bias=False)
        self.gate = torch.nn.Linear(width, heads * dim, bias=False)
        self.beta = torch.nn.Linear(width, heads * self.case.writes, bias=False)
        self.out = torch.nn.Linear(heads * dim, width, bias=False)
        self.register_buffer("decay", -torch.rand(heads))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.case.heads, self.case.key_dim)
        parts = self.project(x).split(self.widths, dim=-1)
        q, k, v = (part.reshape(x.shape[0], -1, *shape) for part in parts)
        beta = self.beta(x).sigmoid().reshape(x.shape[0], -1, self.case.heads)
        g = torch.nn.functional.logsigmoid(self.gate(x)).view(*x.shape[:-1], *shape)
        named = make_named(self.case.algorithm, g, beta, self.decay)
        function, _ = level1.FUNCTIONS[self.case.algorithm]
        o, final_state = function(
            q, k, v, **named, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return self.out(torch.nn.functional.silu(o.flatten(-2))), final_state


def make_named(
    algorithm: str, g: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> dict[str, torch.Tensor]:
    row = cula.algorithms()[algorithm]
    named = {"channel": {"g": g}, "token": {"g": g[..., 0]}, "head": {"decay": decay}, "none": {}}[row.decay]
    if row.takes_beta:
        named["beta"] = beta
    if row.takes_erase:
        named["erase"] = g.exp()
    if row.takes_low_rank:
        named |= {"a_key": g.exp() / 4, "b_key": -g.exp() / 4}
    if row.takes_several_writes:
        named.setdefault("g", None)
    return named


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@torch.inference_mode()
def test_compile_with_a_dynamic_length(algorithm):
    layer, state = Layer(algorithm), torch.zeros(1, 2, 16, 16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 17, 64, 130):
        x = torch.randn(1, length, 32)
        for found, wanted in zip(compiled(x, state), layer(x, state), strict=True):
            torch.testing.assert_close(found, wanted)
    assert counter.frame_count == 1, "one graph for all lengths"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["kda", "lightning"])
def test_compile_with_inductor(name):
    layer, state = Layer(name), torch.zeros(1, 2, 16, 16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (33, 70):
        x = torch.randn(1, length, 32)
        for found, wanted in zip(compiled(x, state), layer(x, state), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("algorithm", "backend"), [*((name, "aot_eager") for name in ALGORITHMS), ("kda", "inductor")]
)
def test_compile_of_decode_writes_the_pool(algorithm, backend):
    """Two steps in one graph: functionalization must keep the second behind the first."""
    one, two = (make(Case(algorithm, (2, 2), pool=True, key_dim=16, value_dim=16)) for _ in range(2))

    def steps(inputs):
        outputs = []
        for t in range(2):
            o, _ = level1.decode(
                inputs.tokens(t, t + 1), inputs.initial_state, state_indices=inputs.initial_state_indices
            )
            outputs.append(o)
        return torch.cat(outputs, dim=1)

    rows = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key", "initial_state")

    def on_tensors(*tensors):
        return steps(two.but(**dict(zip(rows, tensors, strict=True))))

    compiled = torch.compile(on_tensors, fullgraph=True, backend=backend)
    wanted, found = steps(one), compiled(*(getattr(two, name) for name in rows))
    assert_same_bits("o", wanted, found)
    assert_same_bits("pool", one.initial_state, two.initial_state)


@torch.inference_mode()
def test_compile_of_varlen_verify_and_segment():
    case = Case("kda", (5, 3), packed=True, key_dim=16, value_dim=16)

    def everything(q, k, v, g, beta, cu_seqlens, state):
        inputs = make_inputs.but(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens)
        o, final_state = level1.prefill(inputs, initial_state=state)
        room = state.new_zeros(2, 5, *state.shape[1:])
        verified, _ = level1.verify(inputs, state, snapshots=room)
        m, b = level1.segment(inputs)
        return o, final_state, verified, room, m, b

    make_inputs = make(case)
    tensors = (
        *(getattr(make_inputs, name) for name in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")),
    )
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(*tensors), everything(*tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def kept_alone(q, k, v, g, beta):
    return cula.cula_segment(q, k, v, mode="kda", g=g, beta=beta, keep=True, out=(None, None))[2]


def with_what_was_kept(made, q, k, v, g, beta):
    """What a segment made, with what a prefill makes of what it kept: not all bytes of that are written."""
    m, b, kept = made
    return m, b, cula.cula_kda(q, k, v, g, beta, kept=kept)[0]


# (how the outputs come about, a call that makes them so)
CALLS = {
    "o": lambda q, k, v, g, beta, _: cula.cula_kda(q, k, v, g, beta)[0],
    "dense": lambda q, k, v, g, beta, _: cula.cula_kda(q, k, v, g, beta, output_final_state=True),
    "pool": lambda q, k, v, g, beta, pool: cula.cula_kda(q, k, v, g, beta, state_pool=pool),
    "out": lambda q, k, v, g, beta, _: cula.cula_kda(q, k, v, g, beta, out=torch.empty_like(v)),
    "kept": lambda q, k, v, g, beta, _: cula.cula_kda(q, k, v, g, beta, kept=kept_alone(q, k, v, g, beta))[0],
    "out, dense": lambda q, k, v, g, beta, _: cula.cula_kda(
        q, k, v, g, beta, out=torch.empty_like(v), output_final_state=True
    ),
    "kept, dense": lambda q, k, v, g, beta, _: cula.cula_kda(
        q, k, v, g, beta, kept=kept_alone(q, k, v, g, beta), output_final_state=True
    ),
    "pool, out": lambda q, k, v, g, beta, pool: cula.cula_kda(
        q, k, v, g, beta, state_pool=pool, out=torch.empty_like(v)
    ),
    "segment": lambda q, k, v, g, beta, _: cula.cula_segment(q, k, v, g=g, beta=beta),
    "segment, keep": lambda q, k, v, g, beta, _: with_what_was_kept(
        cula.cula_segment(q, k, v, g=g, beta=beta, keep=True), q, k, v, g, beta
    ),
    "segment, out": lambda q, k, v, g, beta, pool: with_what_was_kept(
        cula.cula_segment(q, k, v, g=g, beta=beta, keep=True, out=(None, torch.empty_like(pool))),
        q,
        k,
        v,
        g,
        beta,
    ),
    "verify, pool": lambda q, k, v, g, beta, pool: cula.cula_verify(
        q, k, v, pool, g=g, beta=beta, snapshots=pool.new_zeros((2, 20, *pool.shape[1:]))
    ),
    "verify": lambda q, k, v, g, beta, pool: cula.cula_verify(q, k, v, pool, g=g, beta=beta),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", CALLS)
def test_inductor_takes_every_overload(name):
    x = make(Case("kda", (20, 20), key_dim=16, value_dim=16))
    tensors, pool = (x.q, x.k, x.v, x.g, x.beta), x.initial_state.clone()
    found = torch.compile(CALLS[name], fullgraph=True)(*tensors, pool)
    wanted = CALLS[name](*tensors, x.initial_state)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert_same_bits("pool", x.initial_state, pool)


def test_what_a_compiled_segment_keeps_is_for_any_state():
    """B that nobody asked for, without M, would say that no state is before the tokens."""
    x, graphs = make(Case("kda", (20, 20), key_dim=16, value_dim=16)), []
    torch.compile(kept_alone, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)(
        x.q, x.k, x.v, x.g, x.beta
    )
    (segment,) = [
        node
        for graph in graphs
        for node in graph.graph.nodes
        if node.target == torch.ops.cula.segment.default
    ]
    named = dict(zip((each.name for each in segment.target._schema.arguments), segment.args, strict=False))
    assert bool(named["options"] & bit("make_b")) == bool(named["options"] & bit("make_m"))


# torch.export


@torch.inference_mode()
def test_export_with_a_dynamic_length(algorithm):
    layer, state = Layer(algorithm).eval(), torch.zeros(1, 2, 16, 16)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(
        layer, (torch.randn(1, 20, 32), state), dynamic_shapes={"x": {1: length}, "state": {}}
    )
    for tokens in (2, 65):
        x = torch.randn(1, tokens, 32)
        for found, wanted in zip(program.module()(x, state), layer(x, state), strict=True):
            torch.testing.assert_close(found, wanted)


def test_fake_tensors_have_the_shapes_of_real_ones(algorithm):
    inputs = make(Case(algorithm, (20, 20), key_dim=16, value_dim=24, heads=2, value_heads=4))
    real = level1.prefill(inputs, return_intermediate_states=True)
    with FakeTensorMode() as mode:
        fake = level1.prefill(inputs.map(mode.from_tensor), return_intermediate_states=True)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


# Modes, defaults, threads, processes.


def test_inference_mode(algorithm):
    inputs = make(Case(algorithm, (20,)))
    wanted = level1.prefill(inputs)
    with torch.inference_mode():
        found = level1.prefill(inputs)
    for one, other in zip(wanted, found, strict=True):
        assert_same_bits("inference_mode", one, other)


def test_default_dtype_and_device_have_no_say():
    inputs = make(Case("kda", (20,)))
    wanted = level1.prefill(inputs)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = level1.prefill(inputs)
    finally:
        torch.set_default_dtype(dtype)
    for one, other in zip(wanted, found, strict=True):
        assert_same_bits("defaults", one, other)


def test_autocast_has_no_say():
    inputs = make(Case("kda", (20,), dtype=torch.float32))
    wanted = level1.prefill(inputs)
    with torch.autocast(inputs.q.device.type, dtype=torch.bfloat16):
        found = level1.prefill(inputs)
    for one, other in zip(wanted, found, strict=True):
        assert_same_bits("autocast", one, other)


def test_calls_from_many_threads(algorithm):
    """No state is shared between calls."""
    inputs = [make(Case(algorithm, (100, 30, 7), packed=True, seed=seed)) for seed in range(8)]
    wanted = [passes.prefill(one) for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(passes.prefill, inputs))
    for one, other in zip(wanted, found, strict=True):
        assert_same_bits("o", one.o, other.o)
        assert_same_bits("final_state", one.final_state, other.final_state)


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_parameters_of_gates_are_real(name):
    named = arguments("prefill", BASE.but(gate="softplus", A_log=True, dt_bias=True))
    named[name] = torch.complex(named[name].float(), torch.ones_like(named[name]).float())
    with pytest.raises(ValueError, match=f"prefill: {name} must have a dtype of real numbers"):
        torch.ops.cula.prefill.out(**packed(named))


def test_parameters_are_tensors():
    inputs = make(Case("kda", (20,), gate="softplus"))
    with torch.no_grad():
        found = level1.prefill(inputs.but(A_log=torch.nn.Parameter(inputs.A_log)))
    for one, other in zip(level1.prefill(inputs), found, strict=True):
        assert_same_bits("parameter", one, other)


def test_a_fresh_process_loads_and_runs():
    source = (
        "import torch, cula; x = torch.ones(1, 3, 1, 8);"
        "o, _ = cula.cula_simple_gla(x, x, x, scale=1.0); print(o[0, :, 0, 0])"
    )
    assert run_python("-c", source) == "tensor([ 8., 16., 24.])\n"


def test_import_is_quiet_and_leaves_no_trace():
    source = (
        "import torch; before = torch.get_num_threads(), torch.get_default_dtype(),"
        " torch.get_rng_state().sum().item();"
        "import cula; assert before == (torch.get_num_threads(), torch.get_default_dtype(),"
        " torch.get_rng_state().sum().item())"
    )
    assert run_python("-W", "error", "-c", source) == ""


def test_explain_is_one_line_for_a_newcomer():
    printed = run_python("-c", "import cula; print(cula.explain())")
    for row in cula.explain():
        assert row.target in printed
        assert row.reason in printed
