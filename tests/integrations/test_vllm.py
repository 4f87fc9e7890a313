# SPDX-License-Identifier: Apache-2.0
"""`cula.integrations.vllm` on a stand-in of vLLM: every batch that its layer of GDN meets, every function
that is replaced, what is declined, and that all of it can be taken out again.

The stand-in's kernels are the recurrence in float32, so that what runs here is compared with it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from cula.integrations import _vllm_functions, vllm
from cula_testing import engine_kernels
from cula_testing import vllm_stand_in as stand_in
from cula_testing.compare import assert_same_bits, errors
from cula_testing.float8 import assert_stored, dequantised, quantised
from cula_testing.process import run_python
from cula_testing.vllm_stand_in import GLM, HV, KIMI, OPERATORS, WIDTH, H, K, V

pytestmark = pytest.mark.usefixtures("engine")

BLOCKS = 24
KINDS = pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=["int32", "int64"])


def config(dtype: torch.dtype = torch.float32, mode: str = "none") -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=mode), model_config=SimpleNamespace(dtype=dtype),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )  # fmt: skip


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def batch(decodes=0, prefills=(), drafts=(), padding=0, kind=torch.int32, cached=None, kept=None):
    """A batch as vLLM's builder describes it. Every request has a block of its own (drafts one a token), from
    1 on; `padding` are rows that fill a CUDA graph. `cached`: which prefills have a state. `kept`: for each
    request that is no draft, (tokens, block) or None."""
    plain = [1] * decodes + list(prefills)
    width = max(drafts, default=0)
    table = torch.arange(1, 1 + len(drafts) * width, dtype=kind).view(len(drafts), width)
    first = 1 + table.numel()
    blocks = torch.arange(first, first + len(plain), dtype=kind)
    total = sum(plain) + sum(drafts)
    named = {}
    if drafts:
        order = torch.randperm(total, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
        spec, rest = order[: sum(drafts)].sort().values, order[sum(drafts) :].sort().values
        accepted = torch.tensor([1 + n % width for n in range(len(drafts))], dtype=kind)
        filled = torch.cat([table, torch.zeros(padding, width, dtype=kind)])
        named |= {
            "spec_query_start_loc": torch.cat([starts(drafts), starts(drafts)[-1:].expand(padding)]),
            "spec_state_indices_tensor": filled, "spec_token_indx": spec, "non_spec_token_indx": rest,
            "spec_sequence_masks": torch.ones(len(drafts) + padding, dtype=torch.bool),
            "num_accepted_tokens": torch.cat([accepted, torch.ones(padding, dtype=kind)]),
        }  # fmt: skip
    if prefills:
        cached = [True] * len(prefills) if cached is None else cached
        has_state = torch.tensor([True] * decodes + list(cached))
        named |= {
            "has_initial_state": has_state, "prefill_has_initial_state": has_state[decodes:],
            "prefill_state_indices": blocks[decodes:], "prefill_query_start_loc": starts(prefills),
        }  # fmt: skip
    if kept is not None:
        named["checkpoint"] = SimpleNamespace(
            checkpoint_offsets=torch.tensor([0 if one is None else one[0] for one in kept], dtype=kind),
            state_indices=torch.tensor([0 if one is None else one[1] for one in kept], dtype=kind),
        )
    if plain:
        fill = 0 if drafts else padding
        ends = starts(plain)
        named |= {
            "non_spec_query_start_loc": torch.cat([ends, ends[-1:].expand(fill)]),
            "non_spec_state_indices_tensor": torch.cat([blocks, torch.zeros(fill, dtype=kind)]),
        }  # fmt: skip
        total += fill if not prefills else 0
    return stand_in.GDNAttentionMetadata(
        num_prefills=len(prefills), num_decodes=decodes, num_decode_tokens=decodes,
        num_spec_decodes=len(drafts), num_actual_tokens=total, **named,
    )  # fmt: skip


def tokens(metadata, dtype=torch.float32, beyond=3) -> tuple[torch.Tensor, ...]:
    """mixed_qkv, b and a, with rows beyond the batch."""
    draw, rows = (
        torch.Generator(torch.get_default_device()).manual_seed(11),
        metadata.num_actual_tokens + beyond,
    )
    return tuple(torch.randn(rows, size, generator=draw).to(dtype) for size in (WIDTH, HV, HV))


def first_pool() -> torch.Tensor:
    """What the pool of a layer holds before a batch."""
    return stand_in.QwenGatedDeltaNetAttention.bind(SimpleNamespace(), BLOCKS)


def run(layer, metadata, inputs, state=torch.float32):
    """o, the pool, and what the convolution was asked for."""
    pool, out = layer.bind(BLOCKS, state), torch.zeros(len(inputs[0]), HV, V, dtype=inputs[0].dtype)
    stand_in.CONTEXT.attn_metadata = {layer.prefix: metadata}
    stand_in.CONVOLUTIONS.clear()
    layer._forward_core(*inputs, out)
    return out, pool, list(stand_in.CONVOLUTIONS)


def compare(engine, metadata, dtype=torch.float32, state=torch.float32, mode="none"):
    """One batch on vLLM's layer and on ours: o and the pool agree, the convolution is asked for the same."""
    inputs = tokens(metadata, dtype)
    wanted, pool, convolutions = run(engine.QwenGatedDeltaNetAttention(config(dtype, mode)), metadata, inputs)
    assert engine_kernels.ran
    engine_kernels.ran.clear()
    vllm.register()
    layer = engine.QwenGatedDeltaNetAttention(config(dtype, mode))
    assert type(layer).__name__ == "CulaQwenGatedDeltaNetAttention"
    o, found, own = run(layer, metadata, inputs, state)
    assert engine_kernels.ran == []
    assert dict(vllm.calls) == {("QwenGatedDeltaNetAttention", "cula"): 1}
    bound = 4 * max(torch.finfo(dtype).eps, torch.finfo(state).eps)
    assert errors(o, wanted.double()).rms < max(bound, 1e-6)
    assert not o[metadata.num_actual_tokens :].any()
    assert [name for name, _ in convolutions] == [name for name, _ in own]
    for (_, one), (_, two) in zip(convolutions, own, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(two[key])) for key in one)
    return layer, pool, found, bound


BATCHES = {
    "decode": {"decodes": 5},
    "decode in a graph": {"decodes": 3, "padding": 2},
    "prefill": {"prefills": (130, 1, 64)},
    "prefill, a part without a state": {"prefills": (70, 20, 5), "cached": (False, True, False)},
    "prefill and decode": {"decodes": 3, "prefills": (90, 17), "cached": (False, True)},
    "prefill, decode and padding": {"decodes": 2, "prefills": (33,), "padding": 2},
    "verify": {"drafts": (4, 4, 4)},
    "verify, ragged": {"drafts": (4, 1, 3)},
    "verify in a graph": {"drafts": (3, 3), "padding": 2},
    "verify and prefill": {"drafts": (4, 2), "prefills": (70, 1), "cached": (True, False)},
}


@KINDS
@pytest.mark.parametrize("name", BATCHES)
def test_batches(engine, name, kind):
    if BATCHES[name].get("padding") and BATCHES[name].get("prefills"):  # zero-length rows behind the prefills
        metadata = batch(**{**BATCHES[name], "padding": 0}, kind=kind)
        metadata.prefill_query_start_loc = torch.cat([metadata.prefill_query_start_loc, starts([33])[-1:]])
        metadata.prefill_state_indices = torch.cat(
            [metadata.prefill_state_indices, torch.zeros(1, dtype=kind)]
        )
        metadata.prefill_has_initial_state = torch.tensor([True, False])
    else:
        metadata = batch(**BATCHES[name], kind=kind)
    _, wanted, pool, bound = compare(engine, metadata)
    assert_same_bits("null block", first_pool()[0], pool[0])
    assert errors(pool[1:], wanted[1:].double()).rms < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["decode", "prefill and decode", "verify"])
def test_dtypes(engine, name, dtype, state):
    compare(engine, batch(**BATCHES[name]), dtype, state)


@pytest.mark.parametrize("name", ["decode in a graph", "prefill and decode", "verify and prefill"])
def test_pools_of_float8_with_a_scale_for_each_row(engine, name):
    """The third tensor of a cache."""
    metadata, ran = batch(**BATCHES[name]), []
    vllm.register()
    for eight in (False, True):
        layer = engine.QwenGatedDeltaNetAttention(config())
        wide = layer.bind(BLOCKS)
        codes, scales = quantised(wide)
        wide.copy_(dequantised(codes, scales))
        if eight:
            layer.kv_cache = (layer.kv_cache[0], codes, scales[..., None])
        stand_in.CONTEXT.attn_metadata = {layer.prefix: metadata}
        ran.append((torch.zeros(metadata.num_actual_tokens + 3, HV, V), wide))
        layer._forward_core(*tokens(metadata), ran[-1][0])
    (o, wide), (o8, _) = ran
    assert dict(vllm.calls) == {("QwenGatedDeltaNetAttention", "cula"): 2}
    assert errors(o8, o.double()).max < 1e-6
    assert_stored(codes, scales, wide)


@pytest.mark.parametrize("rows", [None, V // 4])
def test_pools_of_float8_without_a_scale_for_each_row_are_left_to_vllm(engine, rows):
    vllm.register()
    layer = engine.QwenGatedDeltaNetAttention(config())
    codes, scales = quantised(layer.bind(BLOCKS))
    cache = (layer.kv_cache[0], codes) + (() if rows is None else (scales[..., :rows, None],))
    layer.kv_cache = cache
    wanted = "must be given with" if rows is None else r"must have shape \[slots, HV, V\]"
    assert re.search(f"state_scales {wanted}", layer._cula_refuses("decode", dtype=torch.float32))


@KINDS
def test_checkpoints(engine, kind):
    """States of prompts go to the blocks that vLLM names, and the convolution's window with them."""
    kept = [None, (64, 20), None, (128, 21)]
    metadata = batch(decodes=1, prefills=(100, 70, 130), kind=kind, kept=kept)
    layer, _, pool, _ = compare(engine, metadata, mode="align")
    assert layer._checkpoint_alignment == 64
    [(checkpoint, raw, window, cu_seqlens, more)] = layer._checkpoint_exporter.exported
    assert checkpoint is metadata.checkpoint
    assert_same_bits("window", tokens(metadata)[0][: metadata.num_actual_tokens], raw)
    assert window.shape == (BLOCKS, WIDTH, 3)
    assert cu_seqlens is metadata.non_spec_query_start_loc
    assert not more
    before = first_pool()
    changed = [n for n in range(BLOCKS) if not torch.equal(before[n], pool[n])]
    assert changed == [1, 2, 3, 4, 20, 21]
    for (start, block), (length, slot) in zip(((1, 2), (171, 4)), ((64, 20), (128, 21)), strict=True):
        short = batch(prefills=(length,), kind=kind)
        short.prefill_state_indices = torch.tensor([block], dtype=kind)
        inputs = [x[start : start + length] for x in tokens(metadata)]
        _, found, _ = run(layer, short, inputs)
        assert errors(pool[slot], found[block].double()).rms < 1e-6


def test_a_plan_is_made_once_for_all_layers(engine):
    metadata = batch(prefills=(64,), kept=[(64, 20)])
    layer, *_ = compare(engine, metadata, mode="align")
    plan = metadata._cula_plan
    run(layer, metadata, tokens(metadata))
    assert metadata._cula_plan is plan


def test_vllms_promise_of_checkpoints_stays(engine, monkeypatch):
    """Where vLLM's own layer keeps states, with FlashInfer, its alignment is kept."""
    vllm.register()
    base = stand_in.QwenGatedDeltaNetAttention.__init__

    def with_flashinfer(layer, *args):
        base(layer, *args)
        layer._checkpoint_alignment = 128
        layer._checkpoint_exporter = stand_in.MambaPrefillCheckpointExporter(3)

    monkeypatch.setattr(stand_in.QwenGatedDeltaNetAttention, "__init__", with_flashinfer)
    assert engine.QwenGatedDeltaNetAttention(config(mode="align"))._checkpoint_alignment == 128


def test_no_promise_without_checkpoints(engine):
    vllm.register()
    assert engine.QwenGatedDeltaNetAttention(config())._checkpoint_alignment is None
    assert engine.QwenGatedDeltaNetAttention(config(torch.int8, "align"))._checkpoint_alignment is None


@pytest.mark.parametrize("passes", ["prefill", "prefill,decode", "prefill,verify"])
def test_no_promise_where_a_pass_beside_the_prompt_is_left_out(engine, monkeypatch, passes):
    monkeypatch.setenv("CULA_VLLM", passes)
    vllm.register()
    assert engine.QwenGatedDeltaNetAttention(config(mode="align"))._checkpoint_alignment is None


def test_states_between_chunks_are_left_to_the_engine(engine, monkeypatch):
    vllm.register()
    layer = engine.QwenGatedDeltaNetAttention(config(mode="align"))
    layer._checkpoint_alignment, layer._cula_alone_keeps = 1, False
    metadata, reached = batch(prefills=(100,), kept=[(40, 30)]), []
    theirs = type(layer).__mro__[1]
    monkeypatch.setattr(theirs, "_forward_core", lambda *_: reached.append(True))
    run(layer, metadata, tokens(metadata))
    assert reached
    assert any("multiples of 64" in why for _, why in vllm.calls)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("value", ["off", "no such pass"])
def test_the_plug_in_stops_no_engine(monkeypatch, value):
    monkeypatch.setenv("CULA_VLLM", value)
    if value == "off":
        vllm.plug_in()
    else:
        with pytest.warns(UserWarning, match="not registered: CULA_VLLM must be"):
            vllm.plug_in()
    assert not vllm._registered


def test_a_promise_that_cannot_be_kept_is_an_error(engine):
    vllm.register()
    layer = engine.QwenGatedDeltaNetAttention(config(mode="align"))
    _vllm_functions.enabled.discard("prefill")
    with pytest.raises(RuntimeError, match=r"promised checkpoints .* leaves prefill to vLLM"):
        run(layer, batch(prefills=(64,), kept=[(64, 20)]), tokens(batch(prefills=(64,))))


def test_the_log_says_each_thing_once(engine, caplog):
    caplog.set_level("INFO", logger="vllm.cula")
    vllm.register()
    layer, metadata = engine.QwenGatedDeltaNetAttention(config()), batch(decodes=2)
    for state in (torch.float32, torch.float32, torch.float64):
        run(layer, metadata, tokens(metadata), state)
        layer._cula_refusals.clear()
    assert [line.partition(": ")[0] for line in caplog.messages] == [
        "QwenGatedDeltaNetAttention runs on cula",
        "QwenGatedDeltaNetAttention runs on vLLM's own kernels",
        "fused_recurrent_gated_delta_rule_packed_decode runs on vLLM's own kernels",
    ]


def test_a_profiling_run_warms_nothing_up(engine):
    vllm.register()
    layer = engine.QwenGatedDeltaNetAttention(config())
    stand_in.CONTEXT.attn_metadata = None
    layer._forward_core(*tokens(batch(decodes=1)), torch.zeros(4, HV, V))
    assert not layer.warmed_up
    _vllm_functions.enabled.discard("prefill")
    layer = engine.QwenGatedDeltaNetAttention(config())
    layer._forward_core(*tokens(batch(decodes=1)), torch.zeros(4, HV, V))
    assert layer.warmed_up


@pytest.mark.parametrize("value", ["prefill", "decode,verify", "verify", "0"])
@pytest.mark.parametrize("name", ["decode", "prefill and decode", "verify"])
def test_passes_that_are_left_to_vllm(engine, monkeypatch, name, value):
    """Its layer runs then, and of its functions those of the other passes are still ours."""
    monkeypatch.setenv("CULA_VLLM", value)
    metadata = batch(**BATCHES[name])
    inputs = tokens(metadata)
    wanted, pool, _ = run(engine.QwenGatedDeltaNetAttention(config()), metadata, inputs)
    engine_kernels.ran.clear()
    assert bool(vllm.register()) == (value != "0")
    layer = engine.QwenGatedDeltaNetAttention(config())
    o, found, _ = run(layer, metadata, inputs)
    assert errors(o, wanted.double()).rms < 1e-6
    assert errors(found, pool.double()).rms < 1e-6
    passes = {"decode": {"decode"}, "prefill and decode": {"prefill", "decode"}, "verify": {"verify"}}[name]
    left = passes - set(value.split(","))
    assert bool(engine_kernels.ran) == bool(left)
    ran = {key for key, what in vllm.calls if what == "cula"}
    if value == "0":
        assert not vllm.calls
    elif left:
        [sentence] = [why for key, why in vllm.calls if key == "QwenGatedDeltaNetAttention"]
        assert re.fullmatch(r"CULA_VLLM=[a-z,]+ leaves (prefill|decode|verify) to vLLM", sentence)
        assert bool(ran) == bool(passes - left)
        assert layer._can_use_fused_gdn_mtp_decode(metadata) == ("verify" not in value)
    else:
        assert dict(vllm.calls) == {("QwenGatedDeltaNetAttention", "cula"): 1}


def test_what_is_declined_runs_on_vllms_kernels(engine):
    """`calls` has the library's sentence, for the layer and for the function that it goes on to."""
    vllm.register()
    layer = engine.QwenGatedDeltaNetAttention(config())
    metadata = batch(decodes=2)
    run(layer, metadata, tokens(metadata), state=torch.float64)
    assert engine_kernels.ran == ["fused_recurrent_gated_delta_rule_packed_decode"]
    sentences = {what: key for key, what in vllm.calls}
    assert len(vllm.calls) == 2
    assert len(sentences) == 1
    assert re.search("must have dtype float32 or bfloat16 .*, got float64", next(iter(sentences)))
    assert layer._can_use_fused_gdn_mtp_decode(metadata)
    assert repr(vllm.calls).count("got float64") == 2


def test_the_operator_on_dense_states(engine):
    """`ChunkGatedDeltaRule`, for layers whose prefill ours does not run."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(2)
    q, k, v = (torch.randn(1, 90, n, d, generator=draw) for n, d in ((H, K), (H, K), (HV, V)))
    g, beta = -torch.rand(1, 90, HV, generator=draw), torch.rand(1, 90, HV, generator=draw)
    named = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "output_final_state": True,
        "initial_state": torch.randn(2, HV, V, K, generator=draw), "cu_seqlens": starts([70, 20]),
        "chunk_indices": torch.zeros(3, 2),
    }  # fmt: skip
    wanted = engine.ChunkGatedDeltaRule()(**named)
    vllm.register()
    engine_kernels.ran.clear()
    operator, room = engine.ChunkGatedDeltaRule(), torch.zeros(100, HV, V)
    assert operator.gdn_prefill_backend == "triton"
    found = operator(**named, core_attn_out=room)
    assert engine_kernels.ran == []
    for one, two in zip(wanted, found, strict=True):
        assert errors(two, one.double()).rms < 1e-6
    assert_same_bits("core_attn_out", found[0][0], room[:90])
    assert not room[90:].any()
    operator(**{**named, "g": g.requires_grad_()}, core_attn_out=room)
    assert engine_kernels.ran[0] == "forward_native"
    assert vllm.calls["ChunkGatedDeltaRule", "cula"] == 1
    assert sorted(key for key, what in vllm.calls if what != "cula") == [
        "ChunkGatedDeltaRule", "chunk_gated_delta_rule",
    ]  # fmt: skip


def everything() -> dict[tuple[str, str], object]:
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    found = {(name, key): value for name, module in modules.items() for key, value in vars(module).items()}
    return {**found, ("registry", ""): dict(stand_in._Replaceable.registry)}


def test_unregister_leaves_vllm_as_it_was():
    for path in (*vllm._FUNCTIONS, "vllm.model_executor.custom_op"):
        importlib.import_module(path)
    late = ModuleType("vllm.late")
    late.update = sys.modules[OPERATORS].fused_sigmoid_gating_delta_rule_update
    sys.modules["vllm.late"] = late
    try:
        before, finders = everything(), list(sys.meta_path)
        names = vllm.register()
        assert names == vllm.register()
        assert len(names) == 15
        assert late.update is sys.modules[OPERATORS].fused_sigmoid_gating_delta_rule_update
        assert late.update is not before["vllm.late", "update"]
        assert set(stand_in._Replaceable.registry) == {"ChunkGatedDeltaRule", "QwenGatedDeltaNetAttention"}
        vllm.unregister()
        vllm.unregister()
        assert everything() == before
        assert sys.meta_path == finders
    finally:
        del sys.modules["vllm.late"]


def test_modules_that_vllm_imports_later():
    finders = list(sys.meta_path)
    vllm.register()
    assert f"{KIMI}.ops.third_party.kda" not in sys.modules
    kda = importlib.import_module(f"{KIMI}.ops.third_party.kda")
    assert "kimi_recurrent" not in vars(kda)
    assert kda.fused_recurrent_kda_packed_decode.__wrapped__.__module__ == "cula_testing.vllm_stand_in"
    vllm.unregister()
    assert sys.meta_path == finders
    importlib.import_module(f"{GLM}.ops.third_party.kda")
    assert not vllm._replaced


def test_another_plug_ins_layer_stays(engine):
    other = stand_in.PluggableLayer.register_oot(name="QwenGatedDeltaNetAttention")(
        type("Other", (stand_in.QwenGatedDeltaNetAttention,), {})
    )
    with pytest.warns(UserWarning, match="another plug-in stands for QwenGatedDeltaNetAttention"):
        vllm.register()
    assert type(engine.QwenGatedDeltaNetAttention(config())) is other
    vllm.unregister()
    assert stand_in._Replaceable.registry == {"QwenGatedDeltaNetAttention": other}


def test_a_layer_of_another_version_stays(engine, monkeypatch):
    monkeypatch.delattr(engine, "is_conv_state_dim_first")
    with pytest.warns(UserWarning, match="stays vLLM's, since this version has no is_conv_state_dim_first"):
        vllm.register()
    vllm.unregister()
    monkeypatch.undo()
    fields = [
        (name, object) for name in stand_in.GDNAttentionMetadata.__annotations__ if name != "checkpoint"
    ]
    monkeypatch.setattr(engine, "GDNAttentionMetadata", dataclasses.make_dataclass("Older", fields))
    with pytest.warns(UserWarning, match="has no GDNAttentionMetadata.checkpoint"):
        names = vllm.register()
    assert not stand_in._Replaceable.registry
    assert len(names) == 4


def test_the_variable(monkeypatch):
    monkeypatch.setenv("CULA_VLLM", "prefil")
    with pytest.raises(ValueError, match=r"CULA_VLLM must be 0, 1 or some of .* got 'prefil'"):
        vllm.register()
    monkeypatch.setenv("CULA_VLLM", " Decode, verify ")
    vllm.register()
    assert _vllm_functions.enabled == {"decode", "verify"}
    monkeypatch.setenv("CULA_VLLM", "")
    vllm.unregister()
    assert vllm.register() == ()


@pytest.mark.cpu_only("a process of its own")
def test_without_vllm():
    code = "import cula.integrations.vllm as v\ntry: v.register()\nexcept ImportError as e: print(e)"
    installed = importlib.metadata.packages_distributions().get("vllm")
    assert installed or run_python("-c", code).strip().endswith("vLLM is not installed")


@pytest.mark.cpu_only("a process of its own")
def test_nothing_of_vllm_is_imported_before_vllm_does():
    code = (
        "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); "
        "import cula.integrations.vllm as v; "
        "print(v.register(), sorted(name for name in sys.modules if name.startswith('vllm')))"
    )
    assert run_python("-c", code, CULA_VLLM="1") == "() ['vllm']\n"
