# SPDX-License-Identifier: Apache-2.0
"""The two overloads of a pass against each other, and wrong types on the way."""

from __future__ import annotations

import re

import pytest
import torch

import cula
from cula import _ops
from cula_testing import level1, operators
from cula_testing.arguments import BASE, PACKED, arguments
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits

PASSES = ("prefill", "decode", "verify", "segment")
SMALL = Case("kda", (1,), key_dim=16, value_dim=16)


MAKERS = ("prefill", "decode", "verify")  # they return o
VERSION = int(torch.ops.cula.option_bits().splitlines()[-1].rpartition("!")[2])


def state_bits(pass_name: str, k_first: bool = False) -> int:
    if pass_name == "verify":
        return 0
    return _ops.bit("make_final_state") | (_ops.bit("k_first") if k_first else 0)


def written_by(pass_name: str, case: Case = BASE) -> dict:
    """The arguments of a call, after the overload `out` has filled its outputs."""
    named = arguments(pass_name, case)
    operators.call(pass_name, **named)
    return named


def made_of(pass_name: str, case: Case = BASE) -> dict:
    """The arguments of the default overload for the same results."""
    op = getattr(torch.ops.cula, pass_name).default
    accepted = {argument.name for argument in op._schema.arguments}
    named = operators.packed(arguments(pass_name, case))
    return {name: value for name, value in named.items() if name in accepted}


@pytest.mark.parametrize("pass_name", [*PASSES, "backward"])
def test_a_pass_has_two_overloads(pass_name):
    for library in (torch.ops.cula, torch.ops.cula_unchecked):
        assert sorted(getattr(library, pass_name).overloads()) == ["default", "out"]


def test_what_a_call_writes_are_different_tensors():
    """Arguments with the same letter would be one tensor to PyTorch."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cula::")]
    written = {}
    for name in names:
        op_name, _, overload = name.removeprefix("cula::").partition(".")
        schema = getattr(getattr(torch.ops.cula, op_name), overload or "default")._schema
        sets = [argument.alias_info.before_set for argument in schema.arguments if argument.alias_info]
        assert all(len(letters) == 1 for letters in sets), name
        assert len(set().union(*sets)) == len(sets), name
        written[name] = len(sets)
    assert written["cula::prefill.out"] == 6
    assert written["cula::backward.out"] == 11
    assert written["cula::causal_conv1d_update"] == 1


@pytest.mark.parametrize("pass_name", MAKERS)
@pytest.mark.parametrize("k_first", [False, True], ids=["v_first", "k_first"])
@pytest.mark.parametrize("case", [BASE, PACKED], ids=["batch", "packed"])
def test_the_default_makes_o_and_a_final_state(pass_name, k_first, case):
    one, two = written_by(pass_name, case), made_of(pass_name, case)
    two["options"] |= state_bits(pass_name, k_first)
    made = getattr(torch.ops.cula, pass_name)(**two)
    o, *states = [made] if pass_name == "verify" else made
    assert_same_bits("o", one["o"], o)
    assert o.is_contiguous()
    for final_state in states:
        assert_same_bits("final_state", one["final_state"], final_state.mT if k_first else final_state)
        assert final_state.is_contiguous()


@pytest.mark.parametrize("pass_name", ["prefill", "decode"])
@pytest.mark.parametrize("case", [BASE, PACKED], ids=["batch", "packed"])
def test_the_default_makes_o_alone(pass_name, case):
    one = written_by(pass_name, case)
    o, final_state = getattr(torch.ops.cula, pass_name)(**made_of(pass_name, case))
    assert_same_bits("o", one["o"], o)
    assert final_state is None


@pytest.mark.parametrize("case", [BASE, BASE.but(algorithm="gla")], ids=["delta", "additive"])
@pytest.mark.parametrize("k_first", [False, True], ids=["v_first", "k_first"])
def test_the_default_segment_makes_what_is_asked_for(case, k_first):
    named, two = arguments("segment", case), made_of("segment", case)
    if case.algorithm == "gla":
        named["m"] = named["m"][..., 0].contiguous()
    operators.call("segment", **named)
    for asked in (("m", "b"), ("b",)):
        options = two["options"] | sum(_ops.bit(f"make_{name}") for name in asked)
        made = torch.ops.cula.segment(**{**two, "options": options | (k_first and _ops.bit("k_first"))})
        found = dict(zip(("m", "b", "kept"), made, strict=True))
        assert [name for name, value in found.items() if value is not None] == list(asked)
        assert_same_bits("b", named["b"], found["b"].mT if k_first else found["b"])
        assert found["b"].is_contiguous()
        if "m" in asked:
            assert_same_bits("m", named["m"], found["m"])


@pytest.mark.parametrize("pass_name", MAKERS)
@pytest.mark.parametrize("case", [BASE, PACKED], ids=["batch", "packed"])
def test_out_makes_an_o_that_is_left_out(pass_name, case):
    one, two = written_by(pass_name, case), arguments(pass_name, case)
    two.pop("o")
    if pass_name == "verify":
        two["snapshots"] = torch.zeros(2, 8, *two["initial_state"].shape[1:])
    made = operators.call(pass_name, **two)
    o, final_state = (made, None) if pass_name == "verify" else made
    assert_same_bits("o", one["o"], o)
    assert o.is_contiguous()
    assert final_state is None
    if pass_name != "verify":
        assert_same_bits("final_state", one["final_state"], two["final_state"])


@pytest.mark.parametrize("pass_name", ["prefill", "decode"])
@pytest.mark.parametrize("k_first", [False, True], ids=["v_first", "k_first"])
@pytest.mark.parametrize("case", [BASE, PACKED], ids=["batch", "packed"])
def test_out_makes_a_final_state_beside_an_o(pass_name, k_first, case):
    one, two = written_by(pass_name, case), {**made_of(pass_name, case)}
    two["options"] |= state_bits(pass_name, k_first)
    o = torch.full_like(one["o"], float("nan"))
    made, final_state = getattr(torch.ops.cula, pass_name).out(**two, o=o)
    assert made is None
    assert_same_bits("o", one["o"], o)
    assert_same_bits("final_state", one["final_state"], final_state.mT if k_first else final_state)
    assert final_state.is_contiguous()


def test_dense_state_of_float64_is_float64():
    x = make(SMALL.but(dtype=torch.float64)).map(torch.Tensor.cpu)  # where the oracle is
    _, final_state = cula.cula_kda(x.q, x.k, x.v, x.g, x.beta, output_final_state=True, backend="reference")
    assert final_state.dtype == torch.float64


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("all_of_it", [False, True], ids=["little", "all"])
def test_opcheck_of_what_makes_outputs(pass_name, all_of_it):
    packet, named = getattr(torch.ops.cula, pass_name), made_of(pass_name)
    if pass_name == "segment":
        named["options"] |= _ops.bit("make_b") | (all_of_it and _ops.bit("make_m"))
    elif all_of_it:
        named["options"] |= state_bits(pass_name)
    torch.library.opcheck(packet.default, (), named)
    if pass_name != "segment" and all_of_it:
        torch.library.opcheck(packet.out, (), {**named, "o": arguments(pass_name)["o"]})


@pytest.mark.parametrize("pass_name", ["prefill", "decode"])
def test_opcheck_of_out_without_o(pass_name):
    named = operators.packed(arguments(pass_name))
    named.pop("o")
    torch.library.opcheck(getattr(torch.ops.cula, pass_name).out, (), named)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"q": torch.zeros(2, 8, 16)}, "q must have shape [B, T, H, K], got [2, 8, 16]"),
        ({"v": torch.zeros(8, 4, 24)}, "v must have shape [B, T, HV, V] = [2, 8, HV, V], got [8, 4, 24]"),
        ({"cu_seqlens": torch.zeros(1, 3)}, "cu_seqlens must have shape [N + 1], got [1, 3]"),
        (
            {"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
            "cu_seqlens must have N + 1 >= 1 elements, got 0",
        ),
    ],
)
def test_shapes_that_say_nothing_of_the_outputs(wrong, sentence):
    case = PACKED if "cu_seqlens" in wrong else BASE
    named = {**made_of("prefill", case), **wrong}
    named["options"] |= state_bits("prefill")
    with pytest.raises(ValueError, match=f"^{re.escape('prefill: ' + sentence)}$"):
        torch.ops.cula.prefill(**named)
    with pytest.raises(ValueError, match=f"^{re.escape('prefill: ' + sentence)}$"):
        torch.ops.cula.prefill.out(**named, o=arguments("prefill", case)["o"])


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (1, 1, 1, 1, 1, 1, 4)])
def test_parameters_of_heads_have_any_shape(shape):
    x = make(BASE.but(gate="softplus"))
    wanted = level1.prefill(x)
    strided = torch.stack([x.dt_bias.flatten()] * 2, dim=-1)[:, 0]
    for bias in (
        x.dt_bias,
        x.dt_bias.flatten(),
        x.dt_bias[None, :, None],
        x.dt_bias.mT.contiguous().mT,
        strided,
    ):
        for one, other in zip(
            wanted, level1.prefill(x, A_log=x.A_log.view(shape), dt_bias=bias), strict=True
        ):
            assert_same_bits("any shape", one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (1, 1, 1, 1, 1, 1, 4)])
def test_parameters_of_heads_have_any_dtype(dtype, shape):
    x = make(BASE.but(gate="softplus"))
    A_log, dt_bias = x.A_log.to(dtype), x.dt_bias.to(dtype)
    wanted = level1.prefill(x, A_log=A_log.float(), dt_bias=dt_bias.float())
    strided = torch.stack([A_log.view(shape)] * 2, dim=-1)[..., 0]
    for rates in (A_log.view(shape), strided):
        found = level1.prefill(x, A_log=rates, dt_bias=dt_bias.mT.contiguous().mT)
        for one, other in zip(wanted, found, strict=True):
            assert_same_bits("any dtype", one, other)


def test_parameters_of_heads_beside_float64():
    x = make(SMALL.but(dtype=torch.float64, gate="softplus")).map(torch.Tensor.cpu)  # where the oracle is
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        kept = dtype if dtype == torch.float64 else torch.float32
        rates = x.A_log.to(dtype)
        found = level1.prefill(x, A_log=rates, backend="reference")
        for one, other in zip(
            level1.prefill(x, A_log=rates.to(kept), backend="reference"), found, strict=True
        ):
            assert_same_bits("beside float64", one, other)


def test_scale_by_default():
    x = make(BASE.but(key_dim=24))
    wanted = level1.prefill(x, scale=24**-0.5)
    for one, other in zip(wanted, level1.prefill(x, scale=None), strict=True):
        assert_same_bits("scale", one, other)


@pytest.mark.parametrize("bits", [len(cula.algorithms()), 3 << 8])
def test_options_that_mean_nothing(bits):
    named = operators.packed(arguments("decode"))
    with pytest.raises(ValueError, match=r"^decode: options must name a known"):
        torch.ops.cula.decode.out(**{**named, "options": bits | 64 << 20 | VERSION << 44})


@pytest.mark.parametrize(
    ("pass_name", "overload", "bits"),
    [
        ("decode", "out", 1 << 32),
        ("decode", "out", -1 << 60),
        ("decode", "default", _ops.bit("in_place")),
        ("verify", "default", _ops.bit("make_final_state")),
        ("prefill", "out", _ops.bit("keep")),
        ("prefill", "default", _ops.bit("make_m")),
        ("segment", "out", _ops.bit("make_b")),
    ],
)
def test_options_of_other_overloads(pass_name, overload, bits):
    op = getattr(getattr(torch.ops.cula, pass_name), overload)
    named = made_of(pass_name) if overload == "default" else operators.packed(arguments(pass_name))
    named["options"] |= bits
    text = op.name().removeprefix("cula::")
    with pytest.raises(ValueError, match=f"^{pass_name}: options must have only bits that {text} takes"):
        op(**named)


def test_options_by_name():
    for option, value in (("algorithm", "mamba"), ("gate", "tanh")):
        with pytest.raises(ValueError, match=f'^{option} must be one of .*, got "{value}"$'):
            _ops.pack(**{"algorithm": "kda", option: value})
    packed = _ops.pack("gdn", gate="bounded", qk_l2norm=True, chunk_tokens=32)
    assert packed == _ops.pack("gdn", chunk_tokens=32) + 2 * 256 + _ops.bit("qk_l2norm")


@pytest.mark.parametrize("version", [0, VERSION ^ 1])
@pytest.mark.parametrize(
    ("pass_name", "overload"),
    [*((each, "out") for each in PASSES), *((each, "default") for each in (*MAKERS, "backward"))],
)
def test_options_of_other_versions(pass_name, overload, version):
    op = getattr(getattr(torch.ops.cula, pass_name), overload)
    named = made_of(pass_name) if overload == "default" else operators.packed(arguments(pass_name))
    op(**named)
    named["options"] ^= (VERSION ^ version) << 44
    with pytest.raises(ValueError, match=f"^{pass_name}: options must come from this version's"):
        op(**named)


def test_compiled_calls_name_their_version():
    """By this a cache on disk tells graphs of other versions from this one's."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.graph)
        return graph

    torch.compiler.reset()
    torch.compile(level1.prefill, fullgraph=True, backend=keep)(make(SMALL.but(value_dim=320)))
    calls = [node for graph in graphs for node in graph.nodes if "cula" in str(node.target)]
    assert calls
    assert all(node.args[3] >> 44 == VERSION for node in calls)


@pytest.mark.parametrize("chunk_size", [0, -64, 48, 128])
def test_chunk_size(chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size must be 16, 32 or 64, got {chunk_size}$"):
        level1.prefill(make(SMALL), chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"g": 0.5}, "g must be a tensor or None, got float"),
        ({"beta": [1.0]}, "beta must be a tensor or None, got list"),
        ({"A_log": 1.0}, "A_log must be a tensor or None, got float"),
        ({"state_indices": [0]}, "decode: state_indices must be a tensor or None, got list"),
        ({"has_initial_state": True}, "has_initial_state must be a tensor or None, got bool"),
        ({"out": "o"}, "decode: out must be a tensor or None, got str"),
        ({"scale": "1"}, "scale must be of type float, got str"),
        ({"scale": torch.ones(())}, "scale must be of type float, got Tensor"),
        ({"null_index": 0.0}, "null_index must be of type int, got float"),
        ({"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel must be of type bool, got int"),
        ({"use_beta_sigmoid_in_kernel": "no"}, "use_beta_sigmoid_in_kernel must be of type bool, got str"),
        ({"backend": 1}, "backend must be of type str, got int"),
        ({"lower_bound": "-5"}, "lower_bound must be of type float, got str"),
    ],
)
def test_wrong_types(named, message):
    inputs = make(SMALL)
    before = inputs.initial_state.clone()
    with pytest.raises(TypeError, match=message):
        cula.cula_decode(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.initial_state,
            **{"g": inputs.g, "beta": inputs.beta, **named},
        )
    assert_same_bits("state", before, inputs.initial_state)


def test_explain_of_an_architecture_that_is_not_here():
    here, there = cula.explain(device="cpu"), cula.explain(device="sm_90")
    assert [row.target for row in here] == [row.target for row in there]
    assert there.problem.startswith("kda prefill on sm_90: ")
    assert all(row.verdict == "no" for row in there if row.target.startswith(("cpu", "reference")))
    with pytest.raises(
        ValueError, match='device must be cpu, cuda or an architecture such as sm_90, got "sm_x"'
    ):
        cula.explain(device="sm_x")


@pytest.mark.skipif(
    "sm90" not in [row.target for row in cula.explain()], reason="built without the CUDA kernels"
)
@pytest.mark.parametrize(
    ("device", "named", "chosen"),
    [
        ("sm_90", {}, "sm90"),
        ("sm_90", {"key_dim": 256}, "sm80"),
        ("sm_90", {"dtype": torch.float32}, "sm80:step"),
        ("sm_80", {}, "sm80"),
        ("sm_100", {}, "sm80"),
    ],
)
def test_the_best_kernel_of_an_architecture(device, named, chosen):
    explanation = cula.explain(device=device, **named)
    assert explanation.chosen == chosen
    if device != "sm_90":
        capability = f"{device[3:-1]}.{device[-1]}"
        why = {row.target: row.reason for row in explanation}["sm90"]
        assert why == f"needs compute capability 9.0, this device has {capability}"


@pytest.mark.skipif(
    "sm90" not in [row.target for row in cula.explain()], reason="built without the CUDA kernels"
)
@pytest.mark.parametrize(("device", "best"), [("sm_90", "sm90"), ("sm_80", "sm80"), ("sm_120", "sm80")])
def test_the_backward_pass_of_an_architecture(device, best):
    """Rules that add values and whose decay is constant are three walks on Hopper, and by name everywhere."""
    chosen_of = {"sm90": "sm90:three_walks", "sm80": "sm80"}[best]

    def rows(algorithm="lightning", target=f"{best}:three_walks", **named):
        explanation = cula.explain(algorithm, "backward", device=device, **named)
        return explanation.chosen, {row.target: row for row in explanation}[target]

    longer = [rows(tokens=tokens, heads=64)[1].microseconds for tokens in (8192, 16384)]
    assert 0 < longer[0] < longer[1]
    for named in ({}, {"value_dim": 64}, {"dtype": torch.float16}, {"varlen": True}, {"algorithm": "linear"}):
        chosen, row = rows(**named)
        assert chosen == chosen_of, named
        assert row.verdict == ("chosen" if best == "sm90" else "yes"), named
    assert rows(target="sm80:three_walks")[1].verdict == "yes"
    if best != "sm90":
        why = f"needs compute capability 9.0, this device has {device[3:-1]}.{device[-1]}"
        assert rows(target="sm90:three_walks")[1].reason == why
    adds = "takes rules that add values as they are, without a decay or with one per head"
    refused = [
        (best, {"algorithm": "kda"}, adds),
        (best, {"algorithm": "simple_gla"}, adds),
        (best, {"use_qk_l2norm_in_kernel": True}, "takes q and k as they are, without qk_l2norm"),
        (best, {"heads": 2, "value_heads": 4}, "takes as many value heads as heads, got 4 for 2"),
        ("sm80", {"key_dim": 256}, "takes K and V up to 128, got 256 and 256"),
        (best, {"value_dim": 15}, "takes V from 16 on: values are the keys of two of its walks"),
    ]
    for instead, named, reason in refused:
        chosen, row = rows(**named)
        assert (chosen, row.verdict, row.reason) == (instead, "no", reason), named
    for named in ({"dtype": torch.float32}, {"key_dim": 15}):
        chosen, row = rows(**named)
        assert (chosen, row.verdict) == ("sm80:step", "no"), named


@pytest.mark.parametrize("heads", [{"heads": 0}, {"value_heads": 0}, {"tokens": 0}])
@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_90"])
def test_explain_of_a_call_without_anything(heads, device):
    assert str(cula.explain("kda", device=device, **heads))


@pytest.mark.parametrize(
    "costs", ["1,2", "1,2,3,4,5,6,7,8,9,10", "nan,1,1,1,1,1,1,1,1", "-1,1,1,1,1,1,1,1,1"]
)
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ValueError, match="explain: costs must be 9 numbers of at least 0"):
        _ops.explain(
            "prefill", "kda", "cpu", batch=1, tokens=64, sequences=1, heads=1, value_heads=1, key_dim=64,
            value_dim=64, dtype="bfloat16", state_dtype="float32", gate="log_decay", lower_bound=-5.0,
            varlen=False, beta_per_value=False, checkpoints=False, chunk_states=False, tree=False,
            chunk_tokens=64, batch_invariant=False, costs=costs,
        )  # fmt: skip


@pytest.mark.skipif(
    "sm90" not in [row.target for row in cula.explain()], reason="built without the CUDA kernels"
)
def test_explain_predicts_what_each_way_to_run_a_prefill_takes():
    rows = {row.target: row for row in cula.explain("gdn", tokens=32768, heads=16, device="sm_90")}
    ways = {name: row for name, row in rows.items() if name.startswith("sm90:")}
    assert set(ways) == {"sm90:fused", "sm90:joined", "sm90:whole", "sm90:segments", "sm90:halves"}
    assert ways["sm90:fused"].microseconds is None  # it takes KDA alone
    assert ways["sm90:joined"].microseconds is None
    times = [row.microseconds for row in ways.values() if row.microseconds is not None]
    assert min(times) <= rows["sm90"].microseconds <= min(times) / 0.96  # what cuts more promises 4 % less
    assert len(set(times)) == 3
    assert rows["sm80:step"].microseconds is None  # it has no model
    longer = {row.target: row for row in cula.explain("gdn", tokens=65536, heads=16, device="sm_90")}
    assert all(longer[name].microseconds > row.microseconds for name, row in ways.items() if row.microseconds)
    assert f"{rows['sm90'].microseconds:.0f}" in str(
        cula.explain("gdn", tokens=32768, heads=16, device="sm_90")
    )


@pytest.mark.skipif(
    "sm90" not in [row.target for row in cula.explain()], reason="built without the CUDA kernels"
)
@pytest.mark.parametrize(
    ("heads", "tokens", "joins"), [(8, 4096, True), (16, 8192, True), (8, 32768, True), (34, 8192, False)]
)
def test_few_heads_of_raw_gates_run_in_segments_that_join(heads, tokens, joins):
    fields = {"tokens": tokens, "heads": heads, "gate": "bounded", "dtype": torch.bfloat16, "device": "sm_90"}
    rows = {row.target: row.microseconds for row in cula.explain("kda", key_dim=128, value_dim=128, **fields)}
    assert (rows["sm90"] == rows["sm90:joined"]) == joins
    without = cula.explain("kda", key_dim=128, value_dim=128, deterministic="batch_invariant", **fields)
    assert {row.target: row.microseconds for row in without}["sm90:joined"] is None
