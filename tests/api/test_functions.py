# SPDX-License-Identifier: Apache-2.0
"""Level 1: the published names and signatures, each function against the op it stands for, and its errors."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cula
from cula_testing import device, level1, passes
from cula_testing.cases import ALGORITHMS, Case, make, state_like
from cula_testing.compare import assert_same_bits
from cula_testing.strategies import cases

# As published; our own keywords follow.
PUBLISHED = {
    "cula_kda": "q, k, v, g, beta, *, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, safe_gate=False, "
    "lower_bound=None, disable_recompute=False, return_intermediate_states=False, device=None",
    "cula_lightning": "Q, K, V, decay, *, scale=None, initial_state=None, output_final_state=False, "
    "cu_seqlens=None, state_pool=None, initial_state_indices=None, chunk_size=64, device=None",
    "cula_decode": "q, k, v, state, *, mode='kda', state_indices=None, scale=None, device=None",
}
OURS = {
    "cula_kda": "A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
    "state_v_first=True, state_pool=None, initial_state_indices=None, final_state_indices=None, "
    "has_initial_state=None, null_index=-1, checkpoints=None, backend=None, deterministic=None, out=None, "
    "kept=None, cp_context=None, state_scales=None, **kwargs",
    "cula_decode": "g=None, beta=None, erase=None, a_key=None, b_key=None, decay=None, A_log=None, "
    "dt_bias=None, lower_bound=None",
}


def signature(function) -> str:
    """Names, kinds and defaults, without annotations."""
    plain = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in plain.parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_signatures(name):
    found = signature(getattr(cula, name))
    assert getattr(cula, name) is getattr(cula.api, name)
    assert found.startswith(PUBLISHED[name])
    rest = found[len(PUBLISHED[name]) + 2 :]
    assert rest.startswith(OURS.get(name, ""))
    assert "**kwargs" in rest


def test_all_functions_share_their_words():
    """An option has one name, one default and one kind wherever it appears."""
    seen = {}
    for function, _ in level1.FUNCTIONS.values():
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                assert seen.setdefault(name, parameter.default) == parameter.default, name
    assert {"state_v_first", "null_index", "checkpoints", "backend", "deterministic", "out"} <= seen.keys()


# Each function is the op of its algorithm.


def level1_cases(algorithm: str, **fixed):
    """What Level 1 offers: gates in the kernel for the delta rules alone, float32 final states."""
    if algorithm in ("gdn", "gdp"):
        fixed = {"head_decay": False, **fixed}
    if algorithm in ("gla", "simple_gla"):
        fixed = {"gate": "log_decay", **fixed}
    return cases(algorithm, **{"state_dtype": torch.float32, "A_log": True, **fixed})


@given(data=st.data())
def test_prefill(algorithm, data):
    inputs = make(data.draw(level1_cases(algorithm)))
    wanted = passes.prefill(inputs)
    o, final_state = level1.prefill(inputs)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state, final_state)


@given(data=st.data())
def test_prefill_of_a_pool(algorithm, data):
    case = data.draw(level1_cases(algorithm, state=True, pool=True))
    one, two = make(case), make(case)
    wanted = passes.prefill(one, in_place=True)
    o, pool = level1.prefill(two, initial_state=None, state_pool=two.initial_state)
    assert pool is two.initial_state
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("pool", one.initial_state, pool)


@given(data=st.data())
def test_prefill_of_k_first_states(algorithm, data):
    inputs = make(data.draw(level1_cases(algorithm)))
    o, final_state = level1.prefill(inputs)
    k_first = None if inputs.initial_state is None else inputs.initial_state.mT
    other_o, other_state = level1.prefill(inputs, initial_state=k_first, state_v_first=False)
    assert_same_bits("o", o, other_o)
    assert_same_bits("final_state", final_state.mT, other_state)


@given(data=st.data())
@pytest.mark.parametrize("rows_along", ["batch", "tokens"])
def test_decode(algorithm, rows_along, data):
    case = data.draw(level1_cases(algorithm, packed=False, state=True)).but(lengths=(1,) * 5, pool=True)
    one, two = make(case), make(case)
    wanted = passes.decode(one, in_place=True)
    if rows_along == "tokens":
        for name in ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"):
            tensor = getattr(two, name)
            if tensor is not None:
                setattr(two, name, tensor.flatten(0, 1)[None])
    o, state = level1.decode(two, two.initial_state, state_indices=two.initial_state_indices)
    assert state is two.initial_state
    assert o.shape == two.o_shape
    assert_same_bits("o", wanted.o, o.view_as(wanted.o))
    assert_same_bits("state", one.initial_state, state)


def test_decode_without_indices(algorithm):
    """Row n owns slot n, and the slots beyond the rows are not touched."""
    inputs = make(Case(algorithm, (1,) * 3, state_dtype=torch.bfloat16))
    pool = state_like(inputs.case, 5, fill=0.0)
    pool[:3], pool[3:] = inputs.initial_state, 7.0
    wanted = passes.decode(inputs)
    o, _ = level1.decode(inputs, pool)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("state", wanted.final_state, pool[:3])
    assert (pool[3:] == 7).all()


def test_decode_that_ends_in_other_slots(algorithm):
    """Row n starts from slot n, which nothing names, and ends where `final_state_indices` says."""
    inputs = make(Case(algorithm, (1,) * 3, state_dtype=torch.bfloat16))
    pool = state_like(inputs.case, 7, fill=0.0)
    pool[:3], pool[3:] = inputs.initial_state, 7.0
    wanted, ends = passes.decode(inputs), torch.tensor([5, 3, 6])
    with pytest.raises(ValueError, match="state_indices must be given with final_state_indices and null_"):
        level1.decode(inputs, pool, final_state_indices=ends, null_index=2)
    o, _ = level1.decode(inputs, pool, final_state_indices=ends)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("state", wanted.final_state, pool[ends])
    assert_same_bits("others", inputs.initial_state, pool[:3])
    assert (pool[4] == 7).all()


def test_verify(algorithm):
    case = Case(algorithm, (4, 4))
    inputs, table = make(case), 2 + torch.arange(8, dtype=torch.int32).view(2, 4)
    room = passes.empty_states(inputs, 8).unflatten(0, (2, 4))
    wanted = passes.verify(inputs, snapshots=room)
    pool = state_like(case, 10)
    pool[:2] = inputs.initial_state
    base = torch.arange(2, dtype=torch.int32)
    o, state = level1.verify(inputs, pool, state_indices=table, initial_state_indices=base)
    assert state is pool
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("states", room.flatten(0, 1), pool[2:])
    again = passes.empty_states(inputs, 8).unflatten(0, (2, 4))
    before = pool.clone()
    o, _ = level1.verify(inputs, pool, initial_state_indices=base, snapshots=again)
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("snapshots", room, again)
    assert_same_bits("base", before, pool)


def test_segment(algorithm):
    inputs = make(Case(algorithm, (70, 0, 5), packed=True, state=False))
    wanted = passes.segment(inputs)
    m, b = level1.segment(inputs)
    assert_same_bits("m", wanted.m, m)
    assert_same_bits("b", wanted.b, b)
    _, k_first = level1.segment(inputs, state_v_first=False)
    assert_same_bits("b", wanted.b.mT, k_first)


# Options.


def test_a_gate_per_head_is_expanded():
    inputs = make(Case("kda", (70,), dtype=torch.float32))
    g = inputs.g[..., 0].contiguous()
    expanded = inputs.but(g=g[..., None].expand_as(inputs.g).contiguous())

    def either(inputs, backend):
        if backend:
            return passes.prefill(expanded.double() if backend == "reference" else expanded, backend=backend)
        o, final_state = cula.cula_kda(
            inputs.q,
            inputs.k,
            inputs.v,
            g,
            inputs.beta,
            initial_state=inputs.initial_state,
            output_final_state=True,
        )
        return passes.Result(o=o, final_state=final_state)

    passes.assert_rule(either, inputs)


DECAYS = pytest.mark.parametrize("name", ["lightning", "simple_gla", "delta_per_head"])


@DECAYS
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_an_integer_decay_shrinks_the_state(name, dtype):
    x = make(Case(name, (6, 6), head_decay=True))
    decay = torch.tensor([1, 3], dtype=dtype)
    one, other = (
        [*level1.prefill(x, decay=each), *level1.verify(x, x.initial_state, decay=each)]
        for each in (decay, -decay.float())
    )
    for found, wanted in zip(one, other, strict=True):
        assert_same_bits("integers", wanted, found)


@DECAYS
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
def test_a_decay_is_a_real_number(name, dtype):
    x, pool = make(Case(name, (1, 1), head_decay=True)), torch.zeros(2, 2, 64, 64)
    decay = torch.ones(2, dtype=dtype)
    for call in (
        lambda: level1.prefill(x, decay=decay),
        lambda: level1.decode(x, pool, decay=decay),
        lambda: level1.verify(x, pool, decay=decay),
        lambda: level1.segment(x, decay=decay),
    ):
        with pytest.raises(ValueError, match=rf"decay must have a floating or an integer dtype, got {dtype}"):
            call()
    assert not pool.any()


def test_defaults(algorithm):
    inputs = make(Case(algorithm, (20,), state=False))
    o, final_state = level1.prefill(inputs, output_final_state=False)
    assert final_state is None
    assert (o.shape, o.dtype) == (inputs.o_shape, inputs.v.dtype)
    explicit, final_state = level1.prefill(inputs, scale=64**-0.5)
    assert_same_bits("scale is K ** -0.5", explicit, o)
    assert (final_state.shape, final_state.dtype) == ((1, 2, 64, 64), torch.float32)


def test_out(algorithm):
    inputs = make(Case(algorithm, (20,)))
    out = passes.empty_o(inputs)
    o, _ = level1.prefill(inputs, out=out)
    assert o is out
    assert_same_bits("o", level1.prefill(inputs)[0], out)


def test_checkpoints(algorithm):
    inputs = make(Case(algorithm, (130,)))
    plan = torch.tensor([[0, 64, 1], [0, 130, 0]], dtype=torch.int32)
    kept = cula.Checkpoints(passes.empty_states(inputs, 2), plan)
    _, final_state = level1.prefill(inputs, checkpoints=kept)
    assert_same_bits("last", final_state[0], kept.states[0])
    _, half = level1.prefill(make(inputs.case).tokens(0, 64))
    assert torch.allclose(half[0], kept.states[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_return_intermediate_states(algorithm, chunk, packed):
    lengths = (100, 0, 30) if packed else (100, 100)
    inputs = make(Case(algorithm, lengths, packed=packed))
    counts = [-(-length // chunk) for length in lengths]
    shape = (1, sum(counts)) if packed else (2, counts[0])
    room = torch.full((*shape, 2, 64, 64), float("nan"), dtype=torch.bfloat16)
    wanted = passes.prefill(inputs, chunk_states=room, chunk_tokens=chunk)
    o, final_state, h = level1.prefill(inputs, return_intermediate_states=True, chunk_size=chunk)
    assert (final_state.dtype, h.dtype) == (torch.float32, torch.bfloat16)
    if (
        h.device.type == "cuda" and packed
    ):  # lengths that only the device knows: room for the most chunks there can be
        assert not h[:, shape[1] :].any()
        h = h[:, : shape[1]]
    assert_same_bits("h", room, h)
    assert_same_bits("o", wanted.o, o)


def test_batch_invariant(algorithm):
    inputs = make(Case(algorithm, (100, 30), packed=True))
    wanted = passes.prefill(inputs, batch_invariant=True)
    o, final_state = level1.prefill(inputs, deterministic="batch_invariant")
    assert_same_bits("o", wanted.o, o)
    assert_same_bits("final_state", wanted.final_state, final_state)


def test_masks_and_null_rows(algorithm):
    inputs = make(Case(algorithm, (5,) * 3))
    pool = state_like(inputs.case, 4)
    pool[1:] = inputs.initial_state
    slots = torch.tensor([1, 0, 3], dtype=torch.int32)
    mask = torch.tensor([True, True, False])
    o, _ = level1.prefill(
        inputs,
        initial_state=None,
        state_pool=pool,
        initial_state_indices=slots,
        has_initial_state=mask,
        null_index=0,
    )
    assert not o[1].any()
    assert pool[0].isnan().all()
    assert_same_bits("kept", level1.prefill(inputs)[0][0], o[0])
    assert_same_bits("fresh", level1.prefill(inputs, initial_state=None)[0][2], o[2])


def test_a_null_row_leaves_zero_in_a_new_final_state(algorithm):
    inputs = make(Case(algorithm, (5,) * 3, pool=True))
    inputs.initial_state_indices[1] = -1
    o, final_state = level1.prefill(inputs)
    assert not o[1].any()
    assert not final_state[1].any()
    assert final_state.isfinite().all()


def test_forced_backend(algorithm):
    inputs = make(Case(algorithm, (20,)))
    o, _ = level1.prefill(inputs, backend=device.family())
    assert_same_bits("o", passes.prefill(inputs, backend=device.family()).o, o)


@pytest.mark.cpu_only("the oracle runs on the CPU")
def test_forced_oracle(algorithm):
    inputs = make(Case(algorithm, (20,)))
    o, _ = level1.prefill(inputs, backend="reference")
    assert_same_bits("o", passes.prefill(inputs, backend="reference").o, o)


# Errors.

SMALL = Case("kda", (4,), key_dim=16, value_dim=16)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_unknown_option(name):
    inputs = make(SMALL.but(algorithm=name))
    with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'head_first'"):
        level1.prefill(inputs, head_first=True)
    with pytest.raises(TypeError, match=r"cula_decode\(\) got an unexpected keyword argument 'head_first'"):
        level1.decode(inputs, inputs.initial_state, head_first=True)


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "beta", "initial_state"])
def test_tensors_on_two_devices(argument):
    inputs = make(SMALL)
    away = inputs.but(**{argument: getattr(inputs, argument).to("meta")})
    with pytest.raises(ValueError, match=rf"{argument if argument != 'q' else 'k'} must be on q's device"):
        level1.prefill(away)


def test_device_is_checked():
    inputs, other = make(SMALL), "cuda" if device.kind() == "cpu" else "cpu"
    with pytest.raises(ValueError, match=f"device must be q's device, {inputs.q.device}, got {other}"):
        level1.prefill(inputs, device=other)
    level1.prefill(inputs, device=inputs.q.device)


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "beta", "initial_state"])
def test_gradients_are_made(argument):
    inputs = make(SMALL.but(dtype=torch.float32))
    getattr(inputs, argument).requires_grad_()
    assert level1.prefill(inputs)[0].requires_grad
    with torch.no_grad():
        o, _ = level1.prefill(inputs)
    assert not o.requires_grad


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        (
            {"mode": "mamba"},
            ValueError,
            "mode must be one of kda, gdn, gla, simple_gla, lightning, delta, gdn2, gdp, rwkv7, got 'mamba'",
        ),
        (
            {"deterministic": "yes"},
            ValueError,
            "deterministic must be None, True or \"batch_invariant\", got 'yes'",
        ),
        ({"backend": "tpu"}, ValueError, 'backend must be one of .*, got "tpu"'),
        (
            {"out": torch.zeros(1, 1, 2, 8).bfloat16()},
            ValueError,
            r"decode: out must have shape .*, got \[1, 1, 2, 8\]",
        ),
        ({"g": None}, ValueError, "g must be given for kda, got none"),
        (
            {"state_indices": torch.zeros(1)},
            ValueError,
            "decode: state_indices must have dtype int32 or int64, got float32",
        ),
    ],
)
def test_decode_errors(named, error, message):
    inputs = make(SMALL.but(lengths=(1,)))
    before = inputs.initial_state.clone()
    with pytest.raises(error, match=message):
        cula.cula_decode(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.initial_state,
            **{"g": inputs.g, "beta": inputs.beta, **named},
        )
    assert_same_bits("state", before, inputs.initial_state)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"use_gate_in_kernel": True}, "A_log must be given"),
        (
            {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0},
            r"lower_bound must lie in \[-5, 0\)",
        ),
        ({"allow_neg_eigval": True}, "allow_neg_eigval must come with use_beta_sigmoid_in_kernel"),
        ({"final_state_indices": torch.zeros(1).int()}, "final_state_indices must come with state_pool"),
        ({"state_pool": torch.zeros(1, 2, 16, 16)}, "initial_state must be left out with state_pool"),
        ({"scale": float("nan")}, "scale must be a finite float32 number, got nan"),
    ],
)
def test_prefill_errors(named, message):
    with pytest.raises(ValueError, match=message):
        level1.prefill(make(SMALL), **named)


@pytest.mark.parametrize("wrong", [None, 1.0, "q"])
def test_not_a_tensor(wrong):
    inputs = make(SMALL)
    with pytest.raises(TypeError, match="q must be a tensor"):
        cula.cula_kda(wrong, inputs.k, inputs.v, inputs.g, inputs.beta)


# explain


def test_explain_names_every_target():
    explanation = cula.explain()
    targets = [row.target for row in explanation]
    assert targets[-2:] == ["reference", "reference:naive"]
    assert "cpu:portable" in targets
    assert [row.target for row in explanation if row.verdict == "chosen"] == [explanation.chosen]
    for row in explanation:
        assert row.verdict in ("chosen", "yes", "no")
        assert bool(row.reason) == (row.verdict == "no"), "yes, or the reason"
        assert row.target in str(explanation)
        assert row.reason in str(explanation)


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "verify", "segment"])
def test_the_oracle_is_never_chosen(algorithm, pass_name):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        chosen = cula.explain(algorithm, pass_name, dtype=dtype, device=device.kind()).chosen
        assert chosen in device.targets(pass_name), f"{algorithm} {pass_name} {dtype}: {chosen}"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"algorithm": "mamba"}, 'algorithm must be one of kda, gdn, .*, got "mamba"'),
        ({"pass_name": "train"}, 'must be one of prefill, decode, verify, segment, backward, got "train"'),
        ({"dtype": torch.int8}, 'dtype must be one of .*, got "int8"'),
        ({"lower_bound": -math.inf}, "lower_bound must be negative and finite, got -inf"),
        ({"gate": "tanh"}, 'gate must be one of log_decay, softplus, bounded, got "tanh"'),
    ],
)
def test_explain_errors(named, message):
    with pytest.raises(ValueError, match=message):
        cula.explain(**named)


@pytest.mark.parametrize("pass_name", ["prefill", "decode", "verify", "segment"])
@pytest.mark.parametrize("place", ["cpu", "sm_80", "sm_90", "sm_100"])
def test_no_kernel_takes_more_than_256_key_channels(pass_name, place):
    rows = cula.explain(pass_name=pass_name, key_dim=300, device=place)
    assert rows.chosen is None
    assert {row.verdict for row in rows} == {"no"}
    if place == "cpu" or cula.build_info().cuda:
        assert any(row.reason == "takes K up to 256, got 300" for row in rows)
