# SPDX-License-Identifier: Apache-2.0
"""`cula.integrations.sglang` on a stand-in of SGLang: which dispatchers get its kernels, what those compute,
what they decline, and that the choice can be taken away again.

The stand-in's kernels are the recurrence in float32, so that what runs here is compared with it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import get_type_hints

import pytest
import torch

from cula.integrations import sglang
from cula.integrations._sglang_kernels import make_kernel
from cula_testing import engine_kernels, packages
from cula_testing import sglang_stand_in as stand_in
from cula_testing.compare import assert_same_bits, errors
from cula_testing.process import run_python
from cula_testing.sglang_stand_in import HV, H, K, LinearAttnKernelBackend, V

SLOTS = 12
KINDS = pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=["int32", "int64"])
ALGORITHMS = pytest.mark.parametrize("algorithm", ["gdn", "kda"])


@pytest.fixture(autouse=True)
def options(monkeypatch):
    """What was given to the engine."""
    monkeypatch.delenv("CULA_SGLANG", raising=False)
    sglang.calls.clear()
    yield stand_in.install(monkeypatch)
    sglang.unregister()
    sglang.calls.clear()
    packages.remove("sglang")


def kernels(algorithm: str):
    """SGLang's Triton kernel, and ours on top of it."""
    triton = {"gdn": stand_in.TritonGDNKernel, "kda": stand_in.TritonKDAKernel}[algorithm]
    return triton(), make_kernel(algorithm, triton, sglang.calls)()


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def tokens(algorithm: str, rows: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """As the backends have them: q, k, v `[1, T, ..]`, raw gates flattened, logits of beta."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(rows)
    per = K if algorithm == "kda" else 1
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": (HV * per,), "b": (HV,)}
    x = {name: torch.randn(1, rows, *shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    x["a"], x["b"] = x["a"][0], x["b"][0]
    return {**x, "A_log": torch.rand(HV, generator=draw), "dt_bias": torch.rand(HV * per, generator=draw)}


def pool(dtype=torch.float32) -> torch.Tensor:
    """Slots of one layer, in the pages of several."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    return (torch.randn(SLOTS, 3, HV, V, K, generator=draw) / 4).to(dtype)[:, 1]


def both(algorithm: str, method: str, *given, **named) -> list[dict[str, torch.Tensor]]:
    """What SGLang's kernel and ours return, and leave in the tensors that they were given."""
    found = []
    for kernel in kernels(algorithm):
        own = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in named.items()}
        own["ssm_states"] = pool(named["ssm_states"].dtype)
        engine_kernels.ran.clear()
        made = getattr(kernel, method)(*given, **own)
        assert engine_kernels.ran == ([] if found else [method])
        made = made if isinstance(made, tuple) else (made,)
        written = {key: own[key] for key in ("ssm_states", "intermediate_states_buffer") if key in own}
        found.append({**{str(n): x for n, x in enumerate(made) if x is not None}, **written})
    assert sglang.calls[f"{algorithm}.{method}", "cula"] == 1
    bound = 4 * torch.finfo(found[0]["0"].dtype).eps
    for name, one in found[0].items():
        if name in found[1]:
            assert found[1][name].shape == one.shape
            assert found[1][name].dtype == one.dtype
            eps = max(bound, 4 * torch.finfo(one.dtype).eps, 1e-6)
            assert errors(found[1][name], one.double()).rms < eps, name
    return found


def gates_of(algorithm: str) -> list[float | None]:
    return [None, -5.0] if algorithm == "kda" else [None]


@KINDS
@ALGORITHMS
def test_decode(algorithm, kind):
    """A row without a slot, which fills a CUDA graph, stores nothing."""
    slots = torch.tensor([5, -1, 2, 7, 9], dtype=kind)
    for bound in gates_of(algorithm):
        sglang.calls.clear()
        more = {} if bound is None else {"lower_bound": bound}
        _, ours = both(
            algorithm, "decode", **tokens(algorithm, 5), ssm_states=pool(), cache_indices=slots,
            query_start_loc=starts(1, 1, 1, 1, 1), **more,
        )  # fmt: skip
        assert ours["0"].shape == (1, 5, HV, V)
        assert not ours["0"][0, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
@ALGORITHMS
def test_packed_decode(algorithm, kind, dtype):
    x = tokens(algorithm, 5, dtype)
    rows = torch.cat([x.pop(name).flatten(2)[0] for name in ("q", "k", "v")], 1)
    if algorithm == "kda":
        x["a"], x["b"] = x["a"].view(5, HV, K), x["b"].unsqueeze(1)
    _, ours = both(
        algorithm, "packed_decode", rows, **x, ssm_states=pool(dtype), scale=K**-0.5, num_v_heads=HV,
        cache_indices=torch.tensor([5, -1, 2, 7, 9], dtype=kind), head_v_dim=V, replayssm_d=None,
        replayssm_k=None, replayssm_g=None, replayssm_write_pos=None, replayssm_force_flush=None,
    )  # fmt: skip
    assert ours["0"].shape == (1, 5, HV, V)
    assert ours["0"].dtype == dtype


def prompt(algorithm: str, lengths, kind=torch.int32, dtype=torch.float32) -> dict[str, object]:
    """GDN's backend computes gates and write strengths, KDA's leaves them raw."""
    x = tokens(algorithm, sum(lengths), dtype)
    a, b, A_log, dt_bias = (x.pop(name) for name in ("a", "b", "A_log", "dt_bias"))
    if algorithm == "gdn":
        x |= {"g": engine_kernels.softplus_gate(a, A_log, dt_bias)[None], "beta": b.float().sigmoid()[None]}
    else:
        x |= {
            "g": a.view(1, -1, HV, K), "beta": b[None], "A_log": A_log.view(1, 1, HV, 1), "dt_bias": dt_bias,
            "beta_is_raw": True, "lower_bound": -5.0, "is_spec_decode": False, "extend_seq_lens_cpu": lengths,
        }  # fmt: skip
    slots = torch.tensor([5, 3, 2, 7][: len(lengths)], dtype=kind)
    return {
        **x, "ssm_states": pool(), "cache_indices": slots, "query_start_loc": starts(*lengths), "layer_id": 3,
        "extend_prefix_lens": torch.zeros(len(lengths)), "num_state_checkpoints": 0,
    }  # fmt: skip


@KINDS
@ALGORITHMS
def test_extend(algorithm, kind):
    given = prompt(algorithm, (130, 1, 64), kind)
    given["cache_indices"][1] = -1
    both(algorithm, "extend", **given)


@pytest.mark.parametrize("rows", [(1, -1, 0, -1), (-1, -1, -1, -1), (2, 0, -1, 1)])
@KINDS
@ALGORITHMS
def test_tracked_states(algorithm, kind, rows):
    """One float32 state of each sequence, after so many chunks of 64 tokens, for the prefix cache."""
    given = prompt(algorithm, (130, 70, 64, 128), kind)
    given |= {
        "track_state": torch.full((4, HV, V, K), 7.0),
        "track_chunk_idx": torch.tensor(rows, dtype=kind),
    }
    if algorithm == "kda":
        given |= {"return_intermediate_states": True, "track_ssm_h_src": torch.tensor([1])}
    _, ours = kernels(algorithm)
    assert ours.supports_track_state_snapshot
    own = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    made = ours.extend(**own)
    assert made[-1] is None  # h, which nothing reads
    for n, chunk in enumerate(rows):
        if chunk < 0:
            assert (own["track_state"][n] == 7).all()
            continue
        start, slot = int(given["query_start_loc"][n]), int(given["cache_indices"][n])
        part = {name: given[name][:, start : start + 64 * chunk] for name in ("q", "k", "v", "g", "beta")}
        short = {**given, **part, "ssm_states": pool(), "query_start_loc": starts(64 * chunk)}
        short |= {
            "cache_indices": given["cache_indices"][n : n + 1],
            "track_state": None,
            "track_chunk_idx": None,
        }
        if chunk:
            ours.extend(**short)
        assert errors(own["track_state"][n], short["ssm_states"][slot].double()).rms < 1e-6


@ALGORITHMS
def test_states_of_chunks(algorithm):
    """h, where SGLang takes the states that it keeps out of it; nothing else makes it."""
    given = prompt(algorithm, (130, 70), dtype=torch.bfloat16)
    if algorithm == "kda":
        theirs, ours = both("kda", "extend", **given, return_intermediate_states=True)
        assert ours["1"].shape == theirs["1"].shape == (1, 5, HV, V, K)
        made = kernels("kda")[1].extend(
            **{**given, "ssm_states": pool()}, return_intermediate_states=True,
            track_ssm_h_src=torch.zeros(0, dtype=torch.int64),
        )  # fmt: skip
        assert made[1] is None
        assert isinstance(kernels("kda")[1].extend(**given), torch.Tensor)
    else:
        _, none, h = kernels("gdn")[1].extend(**given)
        assert none is h is None


def test_items_leave_the_pool_as_it_is():
    """Multi-item scoring: the items of a request start from one state and keep none."""
    given = {**prompt("gdn", (20, 30, 5)), "inplace_update": False}
    given["cache_indices"] = torch.tensor([5, 5, 5], dtype=torch.int32)
    _, ours = both("gdn", "extend", **given)
    assert_same_bits("pool", pool(), ours["ssm_states"])


@pytest.mark.parametrize("shape", ["chain", "tree", "ragged"])
@KINDS
@ALGORITHMS
def test_verify(algorithm, kind, shape):
    """States after every draft in the buffer; the pool is only read. More indices than rows are given."""
    lengths = (4, 2, 3) if shape == "ragged" else (4, 4, 4)
    parents = None
    if shape == "tree":
        parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 0], [-1, 0, 0, 0]], dtype=kind)
    more = {"lower_bound": -5.0} if algorithm == "kda" else {"stable_rows": False}
    _, ours = both(
        algorithm, "target_verify", **tokens(algorithm, sum(lengths)), ssm_states=pool(),
        cache_indices=torch.tensor([5, -1, 2, 0], dtype=kind), query_start_loc=starts(*lengths),
        intermediate_states_buffer=torch.zeros(6, 5, HV, V, K), cache_steps=4,
        intermediate_state_indices=torch.arange(6, dtype=kind), retrieve_parent_token=parents, **more,
    )  # fmt: skip
    assert_same_bits("pool", pool(), ours["ssm_states"])
    assert ours["intermediate_states_buffer"][[0, 2]].abs().sum() > 0
    assert not ours["intermediate_states_buffer"][1].any()


def test_a_ring_runs_on_sglangs_kernels():
    x = tokens("kda", 4)
    rows = torch.cat([x.pop(name).flatten(2)[0] for name in ("q", "k", "v")], 1)
    slots, ours = torch.tensor([5, 3, 2, 7]), kernels("kda")[1]
    ours.packed_decode(
        rows, **x, ssm_states=pool(), scale=0.1, num_v_heads=HV, head_v_dim=V, cache_indices=slots,
        replayssm_d=torch.zeros(1),
    )  # fmt: skip
    ours.target_verify(
        **tokens("kda", 4), ssm_states=pool(), cache_indices=slots, query_start_loc=starts(4),
        intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=4,
        retrieve_parent_token=None, cache_ring=True,
    )  # fmt: skip
    assert engine_kernels.ran == ["packed_decode", "target_verify"]
    assert [name for name, _ in sorted(sglang.calls)] == ["kda.packed_decode", "kda.target_verify"]
    assert {why.partition(":")[0] for _, why in sglang.calls} == {"ReplaySSM's rings are not built"}


@pytest.mark.parametrize(
    ("algorithm", "changed", "words"),
    [
        (
            "gdn",
            {"ssm_states": pool().double()},
            "must have dtype float32 or bfloat16 or float16 or float8_e4m3fn, got float64",
        ),
        (
            "gdn",
            {"ssm_states": pool().to(torch.float8_e4m3fn)},
            "state_scales must be given with a state of float8_e4m3fn",
        ),
        ("kda", {"cache_indices": torch.zeros(2)}, "must have dtype int32 or int64, got float32"),
        ("gdn", {"a_new_option": True}, "unexpected keyword argument 'a_new_option'"),
        ("kda", {"track_state": torch.zeros(2, HV, V, K)}, "track_state and track_chunk_idx must be given"),
    ],
)
def test_what_is_declined_runs_on_tritons_kernel(algorithm, changed, words, monkeypatch):
    """With the call as it was, and nothing written before."""
    given = {**prompt(algorithm, (70, 20)), **changed}
    theirs, ours = kernels(algorithm)
    seen, states = [], given["ssm_states"].clone()
    monkeypatch.setattr(type(theirs), "extend", lambda _, *args, **named: seen.append((args, named)))
    ours.extend(**given)
    [(args, named)] = seen
    everything = {**dict(zip(("q", "k", "v", "g", "beta"), args, strict=True)), **named}
    assert everything.keys() == given.keys()
    assert all(everything[key] is given[key] for key in given)
    assert_same_bits("pool", states, given["ssm_states"])
    [(_, why)] = sglang.calls
    assert words in why


def test_tracked_states_of_a_declined_call():
    """SGLang's kernel of GDN returns h alone: the states that are tracked are taken out of it."""
    given = prompt("gdn", (130, 70, 64), dtype=torch.bfloat16)
    given |= {
        "track_state": torch.full((3, HV, V, K), 7.0), "track_chunk_idx": torch.tensor([2, -1, 0]),
        "a_new_option": 1,
    }  # fmt: skip
    _, _, h = kernels("gdn")[1].extend(**given)
    assert engine_kernels.ran == ["extend"]
    assert_same_bits("row 0", h[0, 2].float(), given["track_state"][0])
    assert_same_bits("row 2", h[0, 5].float(), given["track_state"][2])
    assert (given["track_state"][1] == 7).all()


def dispatcher(algorithm: str, options):
    """Made as SGLang's backend makes it, of the options."""
    path, name, _ = sglang._DISPATCHERS[algorithm]
    base, verify = options.linear_attn_backend, options.linear_attn_verify_backend or "triton"
    names = options.linear_attn_decode_backend or base, options.linear_attn_prefill_backend or base, verify
    return getattr(importlib.import_module(path), name)(*(LinearAttnKernelBackend(name) for name in names))


@ALGORITHMS
@pytest.mark.parametrize(
    ("chosen", "passes"),
    [
        ({}, ""),
        ({"linear_attn_backend": "cula"}, "decode extend"),
        ({"linear_attn_decode_backend": "cula"}, "decode"),
        ({"linear_attn_prefill_backend": "cula"}, "extend"),
        ({"linear_attn_verify_backend": "cula"}, "verify"),
        ({"linear_attn_backend": "cula", "linear_attn_verify_backend": "cula"}, "decode extend verify"),
        ({"linear_attn_backend": "cula", "linear_attn_prefill_backend": "triton"}, "decode"),
    ],
)
def test_dispatchers(options, algorithm, chosen, passes, caplog):
    caplog.set_level("INFO", logger="cula.integrations.sglang")
    vars(options).update(chosen)
    sglang.register()
    made = dispatcher(algorithm, options)
    ours = f"Cula{algorithm.upper()}Kernel"
    for name in ("decode", "extend", "verify"):
        kernel = getattr(made, f"{name}_kernel")
        assert (type(kernel).__name__ == ours) == (name in passes.split())
        assert isinstance(kernel, getattr(stand_in, f"Triton{algorithm.upper()}Kernel"))
    if algorithm == "gdn":
        assert (type(made.tree_verify_kernel).__name__ == ours) == ("verify" in passes)
    assert made.supports_packed_decode
    said = ", ".join("prefill" if name == "extend" else name for name in passes.split())
    assert caplog.messages == ([f"{algorithm.upper()}: cula runs {said}"] if passes else [])


@pytest.mark.parametrize(
    "chosen",
    [
        {"linear_attn_decode_backend": "another"},
        {"linear_attn_decode_backend": "cula", "linear_attn_prefill_backend": "another"},
        {"linear_attn_backend": "another", "linear_attn_verify_backend": "cula"},
    ],
)
def test_another_plug_ins_name_is_left_to_it(options, chosen):
    """CUSTOM is every plug-in's: SGLang's dispatcher says what it does with another's."""
    vars(options).update(chosen)
    sglang.register()
    with pytest.raises(ValueError, match=r"Unsupported backend: LinearAttnKernelBackend\.CUSTOM"):
        dispatcher("kda", options)


def test_a_dispatcher_of_other_arguments(options):
    """Two in place of three, and by name."""
    options.linear_attn_backend = "cula"
    sglang.register()
    path, name, _ = sglang._DISPATCHERS["kda"]
    backend = LinearAttnKernelBackend("cula")
    make = getattr(importlib.import_module(path), name)
    for made in (make(backend, backend), make(backend, LinearAttnKernelBackend("triton"))):
        assert type(made.decode_kernel).__name__ == "CulaKDAKernel"
        assert type(made.verify_kernel) is stand_in.TritonKDAKernel


def test_choices(options):
    """Verification has a list of its own, which is made of the other when SGLang's arguments are imported."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    assert "sglang.srt.server_args" not in sys.modules
    sglang.register()
    assert choices == ["triton", "flashinfer", "cula"]
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
    hint = get_type_hints(arguments, include_extras=True)["linear_attn_verify_backend"]
    own = hint.__metadata__[0].choices
    assert own == ["triton", "flashinfer", "nv_cutedsl"]  # the stand-in's list is made beforehand
    assert len(sglang.register()) == 4
    assert own == ["triton", "flashinfer", "nv_cutedsl", "cula"]
    assert choices == ["triton", "flashinfer", "cula"]
    options.linear_attn_backend = "cula"
    assert type(dispatcher("kda", options).decode_kernel).__name__ == "CulaKDAKernel"
    sglang.unregister()
    sglang.unregister()
    assert choices == ["triton", "flashinfer"]
    assert own == ["triton", "flashinfer", "nv_cutedsl"]
    with pytest.raises(ValueError, match="Unsupported backend"):
        dispatcher("kda", options)
    sglang.register()
    assert type(dispatcher("kda", options).decode_kernel).__name__ == "CulaKDAKernel"


def test_hooks_wait_for_the_other_plug_ins(options):
    """While SGLang loads plug-ins it applies hooks itself, afterwards."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    options.linear_attn_backend = "cula"
    token = hooks._current_plugin_source.set(object())
    sglang.register()
    hooks._current_plugin_source.reset(token)
    with pytest.raises(ValueError, match="Unsupported backend"):
        dispatcher("gdn", options)
    hooks.HookRegistry.apply_hooks()
    assert type(dispatcher("gdn", options).extend_kernel).__name__ == "CulaGDNKernel"
    assert len(hooks.HookRegistry.hooks) == 2
    sglang.register()
    assert len(hooks.HookRegistry.hooks) == 2


def test_the_variable(monkeypatch):
    monkeypatch.setenv("CULA_SGLANG", "0")
    assert sglang.register() == ()
    choices = importlib.import_module("sglang.srt.arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    assert choices == ["triton", "flashinfer"]


def test_the_log_says_each_thing_once(caplog):
    caplog.set_level("INFO", logger="cula.integrations.sglang")
    ours = kernels("gdn")[1]
    for more in ({}, {}, {"a_new_option": 1}):
        ours.extend(**prompt("gdn", (20,)), **more)
    assert [line.partition(": ")[0] for line in caplog.messages] == [
        "gdn.extend runs on cula", "gdn.extend runs on SGLang's Triton kernel",
    ]  # fmt: skip


@pytest.mark.cpu_only("a process of its own")
def test_without_sglang():
    code = "import cula.integrations.sglang as s\ntry: s.register()\nexcept ImportError as e: print(e)"
    installed = importlib.metadata.packages_distributions().get("sglang")
    assert installed or run_python("-c", code).strip().endswith("SGLang is not installed")
