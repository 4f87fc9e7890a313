# SPDX-License-Identifier: Apache-2.0
"""Engines' own functions: SGLang's and vLLM's `fused_sigmoid_gating_delta_rule_update`, and FLA's later
names.

Their bits are those of Level 1's `cula_decode` and `cula_verify`, which other tests hold to the oracle.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

import cula
from cula.compat import sglang, vllm
from cula_testing import oracle
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits, assert_same_chain, errors

sglang_update, vllm_update = (m.fused_sigmoid_gating_delta_rule_update for m in (sglang, vllm))
S = 4
ENGINES = ("kda", "gdn")


def draft(algorithm: str, lengths: tuple[int, ...] = (S,) * 3, **changes) -> Inputs:
    fixed = {"value_heads": 4, "value_dim": 32, "gate": "softplus", "qk_l2norm": True, "beta_is_logit": True}
    return make(Case(algorithm, lengths, **{**fixed, **changes}))


def level_1(x: Inputs, **more) -> dict:
    """The keyword arguments of cula_decode and cula_verify."""
    bound = x.case.lower_bound if x.case.gate == "bounded" else None
    return {
        "mode": x.case.algorithm, "g": x.g, "beta": x.beta, "A_log": x.A_log, "dt_bias": x.dt_bias,
        "lower_bound": bound, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, **more,
    }  # fmt: skip


def sgl(x: Inputs, pool: torch.Tensor | None, slots: torch.Tensor | None, **more) -> torch.Tensor:
    """As SGLang's backends call it: gates flattened, one row of tokens or a batch."""
    return sglang_update(
        A_log=x.A_log, a=x.g.flatten(2), dt_bias=x.dt_bias.flatten(), softplus_beta=1.0,
        softplus_threshold=20.0, q=x.q, k=x.k, v=x.v, b=x.beta, initial_state_source=pool,
        initial_state_indices=slots, use_qk_l2norm_in_kernel=True, is_kda=x.case.algorithm == "kda", **more,
    )  # fmt: skip


def vll(x: Inputs, pool: torch.Tensor | None, slots: torch.Tensor | None, **more) -> tuple:
    return vllm_update(
        x.A_log, x.g.flatten(0, 1), x.beta.flatten(0, 1), x.dt_bias, x.q, x.k, x.v, initial_state=pool,
        ssm_state_indices=slots, use_qk_l2norm_in_kernel=True, is_kda=x.case.algorithm == "kda", **more,
    )  # fmt: skip


def pool_of(x: Inputs, slots: int = 16) -> torch.Tensor:
    """A pool of drawn states, with a pitch between slots and one between the rows of a state."""
    draw = torch.Generator("cpu").manual_seed(7)
    wide = torch.randn(slots, 4, x.case.value_dim + 1, x.case.key_dim + 8, generator=draw, device="cpu") / 4
    return wide.to(x.q.device)[:, :, : x.case.value_dim, : x.case.key_dim]


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32)


def assert_equal(
    other_kernel: bool, wanted: torch.Tensor, o: torch.Tensor, pool: torch.Tensor, found: torch.Tensor
) -> None:
    """Outputs and pools: in their bits where one kernel made both, else but for the order of sums."""
    if not other_kernel:
        assert_same_bits("o", wanted, o)
        assert_same_bits("pool", pool, found)
        return
    assert (o.shape, o.dtype) == (wanted.shape, wanted.dtype)
    assert errors(o, wanted.double()).rms < torch.finfo(o.dtype).eps * 4
    assert errors(found, pool.double()).rms < 1e-6


def test_the_names_are_one_function():
    for module in (cula.kda, cula.ops):
        assert module.fused_sigmoid_gating_delta_rule_update is sglang_update
    assert vllm_update is not sglang_update


@pytest.mark.parametrize("rows", ["batch", "packed", "by token"])
@pytest.mark.parametrize(
    ("algorithm", "gate"), [("kda", "softplus"), ("kda", "bounded"), ("gdn", "softplus")]
)
def test_sglang_decodes(algorithm, gate, rows):
    x = draft(algorithm, (1,) * 3, gate=gate)
    one, two, slots = pool_of(x), pool_of(x), slots_of(5, -1, 2)
    wanted, _ = cula.cula_decode(x.q, x.k, x.v, one, state_indices=slots, **level_1(x))
    more = {"lower_bound": x.case.lower_bound} if gate == "bounded" else {}
    if rows != "batch":
        x = x.but(**{name: getattr(x, name).transpose(0, 1) for name in ("q", "k", "v", "g", "beta")})
        more |= {"cu_seqlens": torch.arange(4)} if rows == "packed" else {}
    o = sgl(x, two, slots, **more)
    assert_equal(rows == "packed", wanted.reshape(x.v.shape), o, one, two)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("algorithm", ENGINES)
def test_sglang_runs_the_tokens_of_a_row_in_order(algorithm, packed):
    x = draft(algorithm, (4, 0, 1) if packed else (S,) * 3, packed=packed)
    one, two, slots = pool_of(x), pool_of(x), slots_of(5, 9, 2)
    starts = x.cu_seqlens if packed else torch.arange(4, dtype=torch.int32) * S
    flat = {name: getattr(x, name).flatten(0, 1).unsqueeze(1) for name in ("q", "k", "v", "g", "beta")}
    wanted = torch.empty_like(flat["v"])
    for n, slot in enumerate(slots.tolist()):
        for t in range(int(starts[n]), int(starts[n + 1])):
            row = x.but(**{name: tensor[t : t + 1] for name, tensor in flat.items()})
            wanted[t], _ = cula.cula_decode(
                row.q, row.k, row.v, one, state_indices=slots_of(slot), **level_1(row)
            )
    o = sgl(x, two, slots, cu_seqlens=x.cu_seqlens)
    assert_equal(True, wanted.reshape(o.shape), o, one, two)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("algorithm", ENGINES)
def test_sglang_verifies(algorithm, shape, packed):
    """States after every token in the buffer, the pool unchanged; SGLang leaves the first token's parent
    unset."""
    x = draft(algorithm, (4, 2, 0) if packed else (S,) * 3, packed=packed)
    pool, slots = pool_of(x), slots_of(5, -1, 2)
    before = pool.clone()
    one, two = (torch.zeros(6, S + 1, 4, x.case.value_dim, x.case.key_dim) for _ in range(2))
    to, parents, given = slots_of(4, 0, 1), None, None
    if shape == "tree":
        parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 0], [-1, 0, 0, 0]], dtype=torch.int32)
        given = parents.long()
        given[:, 0] = 1 << 20
    wanted, _ = cula.cula_verify(
        x.q, x.k, x.v, pool, initial_state_indices=slots, snapshots=one, snapshot_indices=to, parents=parents,
        cu_seqlens=x.cu_seqlens, **level_1(x),
    )  # fmt: skip
    o = sgl(
        x, pool, torch.cat([slots, slots_of(7)]), cu_seqlens=x.cu_seqlens, disable_state_update=True,
        intermediate_states_buffer=two, intermediate_state_indices=torch.cat([to, slots_of(99)]),
        cache_steps=S, retrieve_parent_token=given,
    )  # fmt: skip
    assert one.abs().sum() > 0
    assert_same_bits("o", wanted, o)
    assert_same_bits("buffer", one, two)
    assert_same_bits("pool", before, pool)
    assert given is None or int(given[0, 0]) == 1 << 20


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_sglang_verifies_and_keeps_the_last_state(packed):
    x = draft("kda", (4, 2, 0) if packed else (S,) * 3, packed=packed)
    one, two, slots = pool_of(x), pool_of(x), slots_of(5, 9, 2)
    wanted, buffer = sgl(x, one, slots, cu_seqlens=x.cu_seqlens), torch.zeros(3, S, 4, 32, 64)
    o = sgl(x, two, slots, cu_seqlens=x.cu_seqlens, intermediate_states_buffer=buffer)
    assert_equal(True, wanted, o, one, two)
    assert_same_bits("row 0", two[5], buffer[0, 3])


def test_sglang_only_reads_the_pool():
    x = draft("gdn")
    pool, slots = pool_of(x), slots_of(5, 9, 2)
    before = pool.clone()
    wanted, _ = cula.cula_verify(x.q, x.k, x.v, pool, initial_state_indices=slots, **level_1(x))
    assert_same_bits("o", wanted, sgl(x, pool, slots, disable_state_update=True))
    assert_same_bits("pool", before, pool)
    wanted, _ = cula.cula_verify(x.q, x.k, x.v, None, **level_1(x))
    assert_same_bits("from zero", wanted, sgl(x, None, None, disable_state_update=True))


def test_sglang_takes_k_first_pools_and_an_out():
    x = draft("kda")
    one, slots = pool_of(x), slots_of(5, 9, 2)
    two = pool_of(x).mT.contiguous()
    buffers = torch.zeros(3, S, 4, 32, 64), torch.zeros(3, S, 4, 64, 32)
    out = torch.empty_like(x.v, dtype=torch.float32)
    more = {"disable_state_update": True}
    wanted = sgl(x, one, slots, intermediate_states_buffer=buffers[0], **more)
    o = sgl(x, two, slots, intermediate_states_buffer=buffers[1], state_layout="kv", out=out, **more)
    assert o is out
    for x, y in ((out.to(wanted.dtype), wanted), (buffers[1].mT.contiguous(), buffers[0])):
        assert_same_chain(x, y)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"cache_ring": True}, NotImplementedError, "cache_ring=True"),
        ({"match_cutedsl_decode": True}, NotImplementedError, "match_cutedsl_decode=True"),
        ({"lower_bound": -5.0, "is_kda": False}, ValueError, "lower_bound must be left out"),
        ({"softplus_beta": 2.0}, NotImplementedError, "softplus_beta must be 1"),
        ({"softplus_beta": torch.ones(1)}, TypeError, "softplus_beta must be of type float, got Tensor"),
        ({"softplus_threshold": "20"}, TypeError, "softplus_threshold must be of type float, got str"),
        ({"is_kda": "yes"}, TypeError, "is_kda must be of type bool, got str"),
        ({"disable_state_update": "no"}, TypeError, "disable_state_update must be of type bool, got str"),
        ({"cache_ring": torch.zeros(2)}, TypeError, "cache_ring must be of type bool, got Tensor"),
        ({"cache_steps": True}, TypeError, "cache_steps must be of type int, got bool"),
        ({"scale": "1"}, TypeError, "scale must be float or None, got str"),
        ({"A_log": None}, TypeError, "A_log must be a tensor, got NoneType"),
        ({"scale": 0.0}, AssertionError, "scale must be positive"),
        ({"cache_steps": S + 1}, ValueError, f"cache_steps must be at most the {S} steps"),
        pytest.param(
            {"retrieve_parent_token": torch.full((3, S), 9)}, ValueError,
            "retrieve_parent_token must name an earlier token",
            marks=pytest.mark.cpu_only("the host reads no value"),
        ),
        ({"intermediate_states_buffer": torch.zeros(3, 1, 4, 32, 64)}, ValueError, "longest row's 4 tokens"),
        ({"initial_state_source": torch.zeros(16, 4, 64, 32)}, ValueError, "State layout mismatch"),
        ({"initial_state_source": [0]}, TypeError, "initial_state_source must be a tensor, got list"),
        ({"initial_state_indices": [5, 9, 2]}, TypeError, "initial_state_indices must be a tensor, got list"),
        ({"initial_state_indices": torch.tensor(5)}, ValueError,
         "initial_state_indices must have 1 dimension"),
        ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
        ({"v": torch.zeros(3, S, 32)}, ValueError, "v must have shape [B, T, HV, V]"),
        ({"a": None}, TypeError, "a must be a tensor, got NoneType"),
        ({"b": torch.zeros(3, S)}, ValueError, "b must hold 4 values for each of 12 tokens, got [3, 4]"),
        ({"cu_seqlens": [0, 3]}, TypeError, "cu_seqlens must be a tensor, got list"),
        ({"cache_steps": "4"}, TypeError, "cache_steps must be of type int, got str"),
        ({"intermediate_states_buffer": torch.zeros(3, 4)}, ValueError,
         "intermediate_states_buffer must have 5 dim"),
        ({"intermediate_state_indices": 3}, TypeError,
         "intermediate_state_indices must be a tensor, got int"),
        ({"retrieve_parent_token": torch.zeros(3)}, ValueError,
         "retrieve_parent_token must have 2 dimensions"),
    ],
)  # fmt: skip
def test_sglang_refuses(wrong, error, words):
    x = draft("kda")
    pool, buffer = pool_of(x), torch.zeros(3, S, 4, 32, 64)
    before = pool.clone()
    named = {
        "A_log": x.A_log, "a": x.g, "dt_bias": x.dt_bias, "softplus_beta": 1.0, "softplus_threshold": 20.0,
        "q": x.q, "k": x.k, "v": x.v, "b": x.beta, "initial_state_source": pool,
        "initial_state_indices": slots_of(5, 9, 2), "is_kda": True, "disable_state_update": True,
        "intermediate_states_buffer": buffer, "cache_steps": None,
    }  # fmt: skip
    if wrong.get("is_kda") is False:
        named |= {"a": x.g[..., 0], "dt_bias": x.dt_bias[:, 0]}
    with pytest.raises(error, match=re.escape(words)):
        sglang_update(**{**named, **wrong})
    assert_same_bits("pool", before, pool)
    assert not buffer.any()


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("algorithm", ENGINES)
def test_vllm_decodes(algorithm, packed):
    """Slot 0 is vLLM's null block: a row that fills a CUDA graph."""
    x = draft(algorithm, (1,) * 3)
    one, two, slots = pool_of(x), pool_of(x), slots_of(5, 0, 2)
    out = torch.empty_like(x.v, dtype=torch.float32)
    wanted, _ = cula.cula_decode(x.q, x.k, x.v, one, state_indices=slots, null_index=0, out=out, **level_1(x))
    more = {}
    if packed:
        x = x.but(**{name: getattr(x, name).transpose(0, 1) for name in ("q", "k", "v", "g", "beta")})
        more = {"cu_seqlens": torch.arange(4, dtype=torch.int32)}
    o, pool = vll(x, two, torch.cat([slots, slots_of(7)]), **more)
    assert pool is two
    assert_equal(packed, wanted.reshape(x.v.shape), o, one, two)
    assert not o.flatten(0, 1)[1].any()


@pytest.mark.parametrize("accepted", [None, (1, 3, 4)], ids=["first slot", "accepted"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("algorithm", ENGINES)
def test_vllm_verifies(algorithm, packed, accepted):
    x = draft(algorithm, (4, 2, 0) if packed else (S,) * 3, packed=packed)
    one, two = pool_of(x), pool_of(x)
    table = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10], [0, 0, 0, 0]], dtype=torch.int32)
    counts = None if accepted is None else slots_of(*accepted)
    out = torch.empty_like(x.v, dtype=torch.float32)
    wanted, _ = cula.cula_verify(
        x.q, x.k, x.v, one, state_indices=table, num_accepted=counts, cu_seqlens=x.cu_seqlens, null_index=0,
        out=out, **level_1(x),
    )  # fmt: skip
    more = {} if counts is None else {"num_accepted_tokens": torch.cat([counts, slots_of(1)])}
    o, pool = vll(x, two, torch.cat([table, table[2:]]), cu_seqlens=x.cu_seqlens, **more)
    assert pool is two
    assert_same_bits("o", wanted, o)
    assert_same_bits("pool", one, two)


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
@pytest.mark.parametrize("algorithm", ENGINES)
def test_slots_of_int64(algorithm, engine):
    """Decode and verification with indices of either type."""
    found = []
    for kind in (torch.int32, torch.int64):
        x, y = draft(algorithm, (1,) * 3), draft(algorithm)
        pools = pool_of(x), pool_of(x)
        slots = torch.tensor([5, -1, 2], dtype=kind)
        if engine == "vLLM":
            table = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10], [0, 0, 0, 0]], dtype=kind)
            counts = torch.tensor([1, 3, 4], dtype=kind)
            o = vll(x, pools[0], slots)[0], vll(y, pools[1], table, num_accepted_tokens=counts)[0]
            found.append((*o, *pools))
        else:
            buffer, parents = torch.zeros(4, S, 4, 32, 64), torch.tensor([[-1, 0, 0, 1]] * 3, dtype=kind)
            more = {"intermediate_state_indices": torch.tensor([3, 1, 0], dtype=kind)}
            o = sgl(x, pools[0], slots), sgl(
                y, pools[1], slots, disable_state_update=True, intermediate_states_buffer=buffer,
                retrieve_parent_token=parents, **more,
            )  # fmt: skip
            found.append((*o, *pools, buffer))
    for name, one, two in zip(("decode", "verify", "pool", "pool read", "buffer"), *found, strict=False):
        assert_same_bits(name, one, two)
    assert found[0][0].abs().sum() > 0


def test_vllm_without_indices_has_a_slot_for_each_row():
    x = draft("gdn", (1,) * 3)
    one, two = pool_of(x), pool_of(x)
    wanted, _ = cula.cula_decode(x.q, x.k, x.v, one, **level_1(x))
    o, _ = vll(x, two, None)
    assert_same_bits("o", wanted, o.to(wanted.dtype))
    assert_same_bits("pool", one, two)
    half = pool_of(x).half()
    assert vll(x, half, None)[0].dtype == x.v.dtype


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"beta": 2.0}, NotImplementedError, "beta must be 1 and threshold 20"),
        ({"inplace_final_state": False}, NotImplementedError, "inplace_final_state=False"),
        ({"scale": -1.0}, AssertionError, "scale must be positive"),
        ({"num_accepted_tokens": slots_of(1, 1, 1)}, ValueError, "num_accepted_tokens must come with"),
        ({"num_accepted_tokens": [1]}, TypeError, "num_accepted_tokens must be a tensor, got list"),
        ({"cu_seqlens": torch.tensor(3)}, ValueError, "cu_seqlens must have 1 dimension, got []"),
    ],
)
def test_vllm_refuses(wrong, error, words):
    x = draft("kda", (1,) * 3)
    pool = pool_of(x)
    before = pool.clone()
    with pytest.raises(error, match=re.escape(words)):
        vll(x, pool, slots_of(5, 9, 2), **wrong)
    assert_same_bits("pool", before, pool)


def test_fla_aliases():
    assert cula.gdn.chunk_gdn is cula.gdn.chunk_gated_delta_rule
    assert cula.gdn.fused_recurrent_gdn is cula.gdn.fused_recurrent_gated_delta_rule
    assert cula.gla.fused_chunk_gla is cula.gla.chunk_gla
    assert cula.delta_rule.fused_chunk_delta_rule is cula.delta_rule.chunk_delta_rule
    x = make(Case("simple_gla", (70,), value_dim=32, head_decay=True))
    h0 = x.initial_state.mT.contiguous()
    for chunk, fused, rest in (
        (cula.simple_gla.chunk_simple_gla, cula.simple_gla.fused_chunk_simple_gla, (x.g, x.decay)),
        (cula.retention.chunk_retention, cula.retention.fused_chunk_retention, ()),
        (cula.linear_attn.chunk_linear_attn, cula.linear_attn.fused_chunk_linear_attn, ()),
    ):
        named = {"initial_state": h0, "output_final_state": True}
        for a, b in zip(
            chunk(x.q, x.k, x.v, *rest, **named), fused(x.q, x.k, x.v, *rest, **named), strict=True
        ):
            for one, two in zip(a, b, strict=True):
                assert_same_bits(fused.__name__, one, two)


def test_chunk_kda_takes_fla_0_6s_positions():
    x = make(Case("kda", (40, 30), packed=True, tail=5))
    run = cula.kda.chunk_kda
    wanted, _ = run(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens)
    options = (None, None, False, False, False, False, False, False, None, False, False, False)
    o, _ = run(x.q, x.k, x.v, x.g, x.beta, *options, x.cu_seqlens, None, None, True, 2)
    assert_same_bits("o", wanted, o)
    o, _ = run(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens, use_graph=True, max_num_seqs=2)
    assert_same_bits("o", wanted, o)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
def test_linear_attn(kind, packed):
    """Two calls with the states between them, against the sums in float64."""
    lengths, cut = ((70, 0, 9), (30, 0, 9)) if packed else ((70, 70), (30, 30))
    x = make(Case("linear", lengths, packed=packed, value_dim=32, state=False, dtype=torch.float32))
    x.q, x.k = x.q.abs(), x.k.abs()  # a feature map's values
    o, sequences = oracle.run(x)
    function = getattr(cula.linear_attn, f"{kind}_linear_attn")
    plain, state = function(x.q, x.k, x.v, output_final_state=True, normalize=False, cu_seqlens=x.cu_seqlens)
    assert errors(plain, o).rms < 1e-5
    assert errors(state, torch.stack([s.states[-1] for s in sequences]).mT).rms < 1e-5

    starts = x.cu_seqlens.tolist() if packed else [0, 70, 140]
    q, k, v, o = (tensor.flatten(0, 1) for tensor in (x.q, x.k, x.v, o))
    wanted, z = torch.empty_like(o), []
    for begin, end in pairwise(starts):
        sums = k[begin:end].double().cumsum(0)
        wanted[begin:end] = o[begin:end] / ((q[begin:end].double() * sums).sum(-1, keepdim=True) * 64**-0.5)
        z.append(sums[-1] if end > begin else torch.zeros_like(k[0]).double())

    places = [range(b, b + c) for b, c in zip(starts, cut, strict=False)]
    others = [range(b + c, e) for b, c, e in zip(starts, cut, starts[1:], strict=False)]
    states, found = None, torch.empty_like(v)
    for part in (places, others):
        at = torch.tensor([t for rows in part for t in rows])
        cu = torch.tensor([0, *(len(rows) for rows in part)]).cumsum(0)
        tokens = (tensor[at].unsqueeze(0) for tensor in (q, k, v))
        y, states = function(
            *tokens, initial_state=states, output_final_state=True, normalize=True, cu_seqlens=cu
        )  # fmt: skip
        found[at] = y[0]
    assert errors(found, wanted).rms < 1e-5
    assert errors(states[1].squeeze(1), torch.stack(z)).rms < 1e-5
    assert errors(states[0], state.double()).rms < 1e-5


def test_linear_attn_refuses_reverse():
    x = make(Case("linear", (4,), state=False))
    with pytest.raises(NotImplementedError, match="reverse"):
        cula.linear_attn.fused_recurrent_linear_attn(x.q, x.k, x.v, reverse=True)
