# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention itself on this library, on a machine without an accelerator: its layers, forward,
backward and with a cache, against the same layers around recurrences in plain PyTorch.

test_fla_layers.py runs this file, in a process that has FLA.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize, softplus

import cula
from cula.integrations import fla as door
from cula_testing import fla_stand_in
from cula_testing.process import run_python

warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
fla, layers, models = map(importlib.import_module, ("fla", "fla.layers", "fla.models"))

# FLA's functions with a pool of states, by its package.
PAGED = {
    "kda": ("fused_recurrent_kda_fwd", door._paged_kda),
    "gdn2": ("fused_recurrent_gdn2_fwd", door._paged_gdn2),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.delenv("FLA_CULA", raising=False)
    door.calls.clear()
    how = door.register()
    yield how
    door.unregister()


def recurrence(q, k, v, log_decay=None, beta=None, scale=None):
    """S <- exp(log_decay) S, plus k times (v - k S) beta, or k times v without beta; o = scale q S."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state, outputs = v.new_zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        if log_decay is not None:
            state = state * log_decay[:, t].exp().unsqueeze(-1)
        write = v[:, t]
        if beta is not None:
            write = (write - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, state))
    return torch.stack(outputs, 1)


def delta(q, k, v, g=None, beta=None, scale=None, A_log=None, dt_bias=None, lower_bound=None, **options):
    """KDA, GDN and DeltaNet, with what FLA's layers leave to the kernel."""
    if g is not None and g.dim() == 3:
        g = g.unsqueeze(-1)
    if options.get("use_gate_in_kernel"):
        size = A_log.exp().view(-1, 1)
        raw = g if dt_bias is None else g + dt_bias.view(*g.shape[2:])
        g = -size * softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(size * raw)
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid() * (2 if options.get("allow_neg_eigval") else 1)
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    return recurrence(q, k, v, g, beta, scale), None


def gla(q, k, v, g, scale=None, **_):
    return recurrence(q, k, v, g, None, scale), None


def retention(q, k, v, scale=None, **_):
    heads = torch.arange(q.shape[2], dtype=torch.float32)
    decay = torch.log(1 - 2.0 ** (-5 - heads)).view(1, 1, -1, 1).expand(*q.shape[:3], 1)
    return recurrence(q, k, v, decay, None, scale), None


def linear(q, k, v, scale=None, normalize=False, **_):
    o = recurrence(q, k, v, None, None, scale)
    if normalize:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        o = o / ((q * scale * k.cumsum(1)).sum(-1, keepdim=True) + 1e-10)
    return o, None


# layer: (its class, what it is made with, the module of it, the function there, the same in plain PyTorch)
LAYERS = {
    "KDA": ("KimiDeltaAttention", {"head_dim": 16}, "kda", "chunk_kda", delta),
    "KDA, bounded": (
        "KimiDeltaAttention",
        {"head_dim": 16, "safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True},
        "kda",
        "chunk_kda",
        delta,
    ),
    "KDA, grouped": ("KimiDeltaAttention", {"head_dim": 16, "num_v_heads": 4}, "kda", "chunk_kda", delta),
    "GDN": ("GatedDeltaNet", {"head_dim": 16}, "gated_deltanet", "chunk_gated_delta_rule", delta),
    "GDN, grouped, no gate": (
        "GatedDeltaNet",
        {"head_dim": 16, "num_v_heads": 4, "use_gate": False},
        "gated_deltanet",
        "chunk_gated_delta_rule",
        delta,
    ),
    "DeltaNet": ("DeltaNet", {}, "delta_net", "chunk_delta_rule", delta),
    "DeltaNet, gate": ("DeltaNet", {"use_gate": True}, "delta_net", "chunk_delta_rule", delta),
    "GLA": ("GatedLinearAttention", {}, "gla", "chunk_gla", gla),
    "GLA, convolution": ("GatedLinearAttention", {"use_short_conv": True}, "gla", "chunk_gla", gla),
    "retention": ("MultiScaleRetention", {}, "multiscale_retention", "chunk_retention", retention),
    "linear": ("LinearAttention", {}, "linear_attn", "chunk_linear_attn", linear),
}


def make(name: str):
    kind, options, *_ = LAYERS[name]
    torch.manual_seed(0)
    if "mode" in inspect.signature(getattr(layers, kind)).parameters:
        options = {"mode": "chunk", **options}
    return getattr(layers, kind)(hidden_size=64, num_heads=2, layer_idx=0, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name, monkeypatch):
    """By x and by every parameter, in float32, as plain autograd has them."""
    _, _, module, function, plain = LAYERS[name]
    layer = make(name)
    x = torch.randn(2, 70, 64)
    upstream = torch.randn(2, 70, 64)
    found = []
    for reference in (False, True):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        with monkeypatch.context() as patch:  # which ends before the functions are put back
            if reference:
                patch.setattr(importlib.import_module(f"fla.layers.{module}"), function, plain)
            o = layer(given)[0]
        o.backward(upstream)
        found.append([o.detach(), given.grad, *(each.grad.clone() for each in layer.parameters())])
    names = ["o", "x", *(each for each, _ in layer.named_parameters())]
    for what, ours, theirs in zip(names, *found, strict=True):
        error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-6)
        assert error < 2e-5, f"{what}: {error:.1e}"
    assert door.calls[function, "cula"] == 1


@pytest.mark.parametrize("name", LAYERS)
def test_cached_steps(name):
    """A prompt and token after token, with FLA's cache, are the whole text at once."""
    layer = make(name).eval()
    x = torch.randn(2, 76, 64)
    with torch.no_grad():
        whole = layer(x)[0]
        cache = importlib.import_module("fla.models.utils").Cache()
        pieces = []
        for begin, end in ((0, 70), *((t, t + 1) for t in range(70, 76))):
            o, _, cache = layer(x[:, begin:end], past_key_values=cache, use_cache=True)
            pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-5)
    ran = {function for function, by in door.calls if by == "cula"}
    assert any(function.startswith("fused_recurrent") for function in ran)


@pytest.mark.parametrize("operation", PAGED)
def test_pool_of_states(operation):
    """Token after token by FLA's functions for pools is the recurrence. GDN-2 with one strength for all
    channels is KDA."""
    name, _ = PAGED[operation]
    function = getattr(importlib.import_module(f"fla.ops.{operation}.fused_recurrent"), name)
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(3, 6, 2, 16), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(3, 6, 2, 32), -torch.rand(3, 6, 2, 16), torch.rand(3, 6, 2)
    strengths = (beta,) if operation == "kda" else [beta[..., None].expand(x.shape).clone() for x in (k, v)]
    pool, slots = torch.zeros(7, 2, 16, 32), torch.tensor([4, 1, 6], dtype=torch.int32)
    outputs = []
    for t in range(6):
        o, final = function(
            *(x[:, t : t + 1] for x in (q, k, v, g, *strengths)),
            initial_state=pool, ssm_state_indices=slots, inplace_final_state=True,
        )  # fmt: skip
        assert final is pool
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), recurrence(q, k, v, g, beta), rtol=1e-4, atol=1e-5)
    assert not pool[[0, 2, 3, 5]].any()
    assert dict(door.calls) == {(name, "cula"): 6}


@pytest.mark.parametrize("name", ["KDA", "GDN", "DeltaNet", "GLA, convolution", "retention"])
def test_packed_sequences(name):
    """Each is what it is alone, through the convolutions and rotary embeddings too."""
    layer = make(name).eval()
    x = torch.randn(1, 100, 64)
    ends = [0, 33, 34, 100]
    with torch.no_grad():
        packed = layer(x, cu_seqlens=torch.tensor(ends))[0]
        alone = [layer(x[:, begin:end])[0] for begin, end in pairwise(ends)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["KDA", "GDN", "retention"])
def test_padded_rows(name):
    layer = make(name).eval()
    x = torch.randn(2, 40, 64)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :13] = 0
    with torch.no_grad():
        o = layer(x, attention_mask=mask)[0]
        alone = layer(x[1:, 13:])[0]
    torch.testing.assert_close(o[1:, 13:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(name, autocast):
    """In bfloat16, and in float32 under autocast, the results are near those of float32."""
    layer = make(name)
    x = torch.randn(2, 70, 64)
    whole = layer(x)[0]
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            o = layer(x)[0]
    else:
        o = layer.bfloat16()(x.bfloat16())[0]
    o.float().sum().backward()
    assert all(each.grad.isfinite().all() for each in layer.parameters())
    assert (o.float() - whole).norm() < 0.03 * whole.norm()


MODELS = {
    "KDA": 16,
    "GatedDeltaNet": 16,
    "DeltaNet": None,
    "GLA": None,
    "RetNet": None,
    "LinearAttention": None,
}


@pytest.mark.parametrize(("name", "head_dim"), MODELS.items())
def test_models(name, head_dim):
    """A language model trains a step, and greedy text with a cache is the one without."""
    torch.manual_seed(0)
    settings = getattr(models, f"{name}Config")(
        hidden_size=64, num_heads=2, num_hidden_layers=2, vocab_size=97, fuse_cross_entropy=False,
        fuse_linear_cross_entropy=False, **({} if head_dim is None else {"head_dim": head_dim}),
    )  # fmt: skip
    net = getattr(models, f"{name}ForCausalLM")(settings)
    tokens = torch.randint(0, 97, (2, 70))
    net(input_ids=tokens, labels=tokens).loss.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in net.parameters())
    if fla.__version__.startswith("0.5"):
        pytest.skip("FLA 0.5 starts from one token of the prompt with a cache of transformers 5")
    net.eval()
    with torch.no_grad():
        text = net.generate(tokens[:1], max_new_tokens=8, do_sample=False, use_cache=True, pad_token_id=0)
        again = net.generate(tokens[:1], max_new_tokens=8, do_sample=False, use_cache=False, pad_token_id=0)
    assert text.tolist() == again.tolist()


RANK = """
import sys, warnings

warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch.nn.functional import normalize

import cula.integrations.fla as door
from fla.ops.cp import build_cp_context

torch.set_num_threads(1)
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
door.register()
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda

torch.manual_seed(0)
q, k, v, upstream = (normalize(torch.randn(1, 192, 2, 16), dim=-1) for _ in range(4))
g, beta = -torch.rand(1, 192, 2, 16), torch.rand(1, 192, 2)
cu_seqlens, here = torch.tensor([0, 100, 192]), slice(96 * rank, 96 * rank + 96)
for function, decay in ((chunk_kda, g), (chunk_gated_delta_rule, g[..., 0])):
    whole = [x.clone().requires_grad_() for x in (q, k, v, decay, beta)]
    share = [x[:, here].clone().requires_grad_() for x in (q, k, v, decay, beta)]
    expected, _ = function(*whole, cu_seqlens=cu_seqlens)
    expected.backward(upstream)
    o, _ = function(*share, cp_context=build_cp_context(cu_seqlens, group=dist.group.WORLD))
    o.backward(upstream[:, here])
    torch.testing.assert_close(o, expected[:, here], rtol=1e-4, atol=1e-5)
    for mine, all_of_it in zip(share, whole, strict=True):
        torch.testing.assert_close(mine.grad, all_of_it.grad[:, here], rtol=1e-4, atol=1e-5)
print(dict(door.calls) == {("chunk_kda", "cula"): 2, ("chunk_gated_delta_rule", "cula"): 2})
dist.destroy_process_group()
"""


def test_tokens_of_several_ranks(tmp_path):
    """FLA's own context of two ranks: results and gradients of a rank are those of its tokens."""
    (tmp_path / "rank.py").write_text(RANK)
    with ThreadPoolExecutor(2) as pool:
        arguments = (
            ("-W", "ignore", str(tmp_path / "rank.py"), str(rank), str(tmp_path / "store")) for rank in (0, 1)
        )
        answers = list(pool.map(lambda each: run_python(*each), arguments))
    assert [each.split() for each in answers] == [["True"], ["True"]]


def test_everything_is_as_before():
    """Every attribute of every module of FLA is the very same after unregister()."""
    door.unregister()
    before = attributes()
    assert set(door.register().values()) == {"dispatched", "wrapped", "plain PyTorch"}
    among = attributes()
    assert any(value is not among[key] for key, value in before.items())
    door.unregister()
    after = attributes()
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if value is not after[key]] == []


def attributes() -> dict[tuple[str, str], object]:
    return {
        (name, key): value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "fla"
        for key, value in list(vars(module).items())
    }


def test_every_function_is_there(registered):
    names = {name for names in fla_stand_in.OPERATORS.values() for name in names}
    assert names | {name for name, _ in PAGED.values()} <= registered.keys()
    assert {name for _, name in door._fla_cpu.FUNCTIONS} <= registered.keys()
    assert registered["chunk_kda"] == registered["chunk_gated_delta_rule"] == "dispatched"


def test_signatures(registered):
    """FLA has no parameter that the functions here do not know: what is new there would be declined."""
    assert registered
    door.unregister()
    pairs = [
        *(
            (f"fla.ops.{each}", ours.__name__, ours)
            for each, known in door._OPERATORS.items()
            for ours in known
        ),
        *((f"fla.ops.{each}.fused_recurrent", name, ours) for each, (name, ours) in PAGED.items()),
    ]
    for path, name, ours in pairs:
        theirs = inspect.signature(getattr(importlib.import_module(path), name)).parameters.values()
        given = {each.name for each in theirs if each.kind is not each.VAR_KEYWORD}
        assert given - inspect.signature(ours).parameters.keys() == set(), name


def test_rwkv7_is_flas_own_recurrence():
    rwkv7 = importlib.import_module("fla.ops.rwkv7")
    naive = importlib.import_module("fla.ops.generalized_delta_rule.dplr.naive")
    torch.manual_seed(0)
    r, k, v, kk = (torch.randn(2, 70, 3, 32) for _ in range(4))
    w, share, kk = -torch.rand(2, 70, 3, 32), torch.rand(2, 70, 3, 32), normalize(kk, dim=-1)
    h0, named = torch.randn(2, 3, 32, 32), {"scale": 32**-0.5, "output_final_state": True}
    by_head = [x.transpose(1, 2) for x in (r, k, v, -kk, kk * share, w)]
    wanted, final = naive.dplr_recurrence(*by_head, h0)
    for o, state in (
        rwkv7.chunk_rwkv7(r, w, k, v, -kk, kk * share, initial_state=h0, **named),
        rwkv7.fused_mul_recurrent_rwkv7(r, w, k, v, kk, share, initial_state=h0, **named),
    ):
        torch.testing.assert_close(o, wanted.transpose(1, 2), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-4)
    assert dict(door.calls) == {
        ("chunk_rwkv7", "cula"): 1,
        ("fused_mul_recurrent_rwkv7", "cula"): 1,
    }


def test_switch(monkeypatch):
    """FLA's own code runs then, and has no driver here."""
    monkeypatch.setenv("FLA_CULA", "0")
    with pytest.raises(RuntimeError, match="0 active drivers"):
        make("KDA")(torch.randn(1, 8, 64))
    assert not door.calls


def test_declined():
    """FLA's own code runs, which has no driver here; the record says why."""
    x = torch.randn(1, 9, 2, 16)
    kda = importlib.import_module("fla.ops.kda")
    given = {"q": x, "k": x.double(), "v": x, "g": -x.abs(), "beta": x[..., 0]}
    with pytest.raises(ValueError, match="k must have dtype float32") as refusal:
        cula.kda.chunk_kda(**given)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        kda.chunk_kda(**given)
    assert door.calls["chunk_kda", str(refusal.value)] == 1


def test_registers_when_fla_is_imported():
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import cula, torch\n"
        "from fla.layers import KimiDeltaAttention\n"
        "layer = KimiDeltaAttention(hidden_size=32, head_dim=16, num_heads=2)\n"
        "layer(torch.randn(1, 70, 32))[0].sum().backward()\n"
        "print(cula.integrations.fla.calls['chunk_kda', 'cula'])"
    )
    assert run_python("-c", program, CULA_FLA="1").split() == ["1"]
