# SPDX-License-Identifier: Apache-2.0
"""cula.integrations.transformers: the hybrid models give what they give without it, and say what ran."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types

import pytest
import torch

import cula
from cula.integrations import transformers as adapter
from cula_testing.hybrids import LAYERS, MODELS, a_model, cached, gates, model_file, operands, prompts

pytestmark = pytest.mark.cpu_only("the reference is transformers' own code in float32")

LINEAR = LAYERS.count("linear_attention")
GDN = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
KDA = ("chunk_kda", "fused_recurrent_kda")
# model: under which names calls for prompts and for single tokens are counted
NAMES = dict.fromkeys(MODELS, GDN) | dict.fromkeys(("kimi_linear", "glm5_next"), KDA)
NAMES["minimax"] = ("lightning_attn", "lightning_attn")


@pytest.fixture(autouse=True)
def _unregistered():
    """Each test starts and ends without the adapter."""
    adapter.calls.clear()
    yield
    adapter.unregister()
    adapter.calls.clear()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models as small as these only wait for a second one, and long where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def counted(*names: str) -> dict[tuple[str, str], int]:
    """The calls of these functions; by default those of linear attention."""
    names = names or (*GDN, *KDA, "lightning_attn")
    return {each: count for each, count in adapter.calls.items() if each[0] in names}


def only_ours() -> bool:
    return bool(adapter.calls) and {outcome for _, outcome in adapter.calls} == {"cula"}


@pytest.mark.parametrize("name", MODELS)
class TestAModel:
    def test_gives_the_logits_of_a_prompt(self, name):
        model = a_model(name)
        with torch.no_grad():
            wanted = model(prompts(), use_cache=False).logits
            adapter.register()
            found = model(prompts(), use_cache=False).logits
        assert counted() == {(NAMES[name][0], "cula"): LINEAR}
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)

    def test_takes_padding_on_the_left(self, name):
        model, mask = a_model(name), torch.ones(2, 75, dtype=torch.long)
        mask[0, :21] = 0
        with torch.no_grad():
            wanted = model(prompts(), attention_mask=mask, use_cache=False).logits
            adapter.register()
            found = model(prompts(), attention_mask=mask, use_cache=False).logits
        assert only_ours()
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-5)

    def test_continues_from_the_cache(self, name):
        """Of a second prompt, and token by token."""
        model, pieces = a_model(name), (40, 31, 1, 1, 1, 1)
        wanted = cached(model, prompts(), *pieces)
        adapter.register()
        found = cached(model, prompts(), *pieces)
        chunked, recurrent = NAMES[name]
        expected = {(chunked, "cula"): 2 * LINEAR}
        expected[recurrent, "cula"] = expected.get((recurrent, "cula"), 0) + 4 * LINEAR
        assert counted() == expected
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)

    def test_generates_the_same_tokens(self, name):
        model, mask = a_model(name), torch.ones(2, 20, dtype=torch.long)
        mask[1, :6] = 0
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        wanted = model.generate(prompts(tokens=20), **options)
        adapter.register()
        assert torch.equal(model.generate(prompts(tokens=20), **options), wanted)
        assert only_ours()

    def test_has_the_gradients_of_every_parameter(self, name):
        model, found = a_model(name).train(), []
        for register in (False, True):
            if register:
                adapter.register()
            model.zero_grad()
            model(prompts(), use_cache=False, labels=prompts()).loss.backward()
            found.append({each: x.grad for each, x in model.named_parameters() if x.grad is not None})
        assert counted() == {(NAMES[name][0], "cula"): LINEAR}
        assert found[0].keys() == found[1].keys()
        for each, gradient in found[0].items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(found[1][each], gradient, rtol=0, atol=2e-7 + 1e-4 * largest, msg=each)

    def test_runs_in_bfloat16(self, name):
        """With logits as near to those of float32 as transformers' own."""
        model = a_model(name)
        with torch.no_grad():
            exact = cached(model, prompts(), 71, 1, 1, 1, 1)
        model = model.bfloat16()
        theirs = cached(model, prompts(), 71, 1, 1, 1, 1)
        adapter.register()
        ours = cached(model, prompts(), 71, 1, 1, 1, 1)
        assert only_ours()
        assert ours.dtype == torch.bfloat16
        error, budget = ((x.float() - exact).square().mean().sqrt() for x in (ours, theirs))
        assert error < 1.5 * budget + 1e-3


class TestTheCache:
    @pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
    def test_is_updated_in_place(self, name, monkeypatch):
        """A token allocates no state: the layer's own tensor holds the next one."""
        model = a_model(name)
        adapter.register()
        handed = []
        decode = cula.api.cula_decode
        monkeypatch.setattr(
            cula.api, "cula_decode", lambda *args, **kwargs: handed.append(args[3]) or decode(*args, **kwargs)
        )
        with torch.no_grad():
            cache = model(prompts(), use_cache=True).past_key_values
            states = [
                cache.layers[n].recurrent_states[0] for n, kind in enumerate(LAYERS) if "linear" in kind
            ]
            model(prompts(tokens=1), past_key_values=cache, use_cache=True)
        assert [x.data_ptr() for x in handed] == [x.data_ptr() for x in states]
        assert all(x.dtype == torch.float32 for x in states)

    @pytest.mark.parametrize("name", ["olmo_hybrid", "kimi_linear"])
    def test_stays_what_it_was_where_a_token_has_a_gradient(self, name):
        """A call that is differentiated by the state may not overwrite it."""
        recurrent = next(each for each in adapter._ROLES if adapter._ROLES[each].name == NAMES[name][1])
        module, shape = model_file(name), (2, 1, 4, 16)
        adapter.register()
        q, k, v = (torch.randn(shape) for _ in range(3))
        g = -torch.rand(shape if name == "kimi_linear" else shape[:3])
        state = torch.randn(2, 4, 16, 16, requires_grad=True)
        before = state.detach().clone()
        call = getattr(module, recurrent)
        o, after = call(
            q, k, v, g=g, beta=torch.rand(shape[:3]), initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        (o.sum() + after.sum()).backward()
        assert only_ours()
        assert state.grad.any()
        assert torch.equal(state.detach(), before)

    @pytest.mark.parametrize("name", ["past_key_values", "cache"])
    def test_of_lightning_layers_has_two_names(self, name, monkeypatch):
        """transformers 5.24 has renamed the argument, and takes the old one too."""
        module, layer = model_file("minimax"), a_model("minimax").model.layers[0].self_attn
        place, forward = type(layer), vars(type(layer))["forward"]
        known = {"past_key_values", "cache"} & inspect.signature(forward).parameters.keys()

        def of_this_version(layer, hidden_states, position_embeddings, attention_mask, given, **kwargs):
            return forward(layer, hidden_states, position_embeddings, attention_mask, given, **kwargs)

        own = [*inspect.signature(of_this_version).parameters.values()]
        own[4] = own[4].replace(name=name, default=None)
        of_this_version.__signature__ = inspect.Signature(own)
        hidden, found = torch.randn(2, 40, 48), []
        for register in (False, True):
            if register:
                monkeypatch.setattr(place, "forward", of_this_version)
                adapter.register()
            cache = module.MiniMaxCache()
            with torch.no_grad():
                first = layer(hidden[:, :33], None, None, cache)[0]
                rest = layer(hidden[:, 33:], None, None, **{name if register else known.pop(): cache})[0]
            found.append(torch.cat([first, rest], 1))
        assert counted() == {("lightning_attn", "cula"): 2}
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


class TestRegister:
    def test_puts_everything_back(self):
        modules = [model_file(name) for name in MODELS]
        before = [dict(vars(module)) for module in modules]
        forward = vars(model_file("minimax").MiniMaxLightningAttention)["forward"]
        finders = list(sys.meta_path)
        names = adapter.register()
        assert "transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule" in names
        assert any(name.endswith("MiniMaxLightningAttention.forward") for name in names)
        assert (
            model_file("qwen3_next").torch_chunk_gated_delta_rule
            is not (before[0]["torch_chunk_gated_delta_rule"])
        )
        adapter.unregister()
        for module, attributes in zip(modules, before, strict=True):
            assert vars(module).keys() == attributes.keys()
            assert all(vars(module)[each] is value for each, value in attributes.items())
        assert vars(model_file("minimax").MiniMaxLightningAttention)["forward"] is forward
        assert sys.meta_path == finders

    def test_twice_is_once(self):
        before = model_file("kimi_linear").chunk_kimi_delta_attention
        assert adapter.register() == adapter.register()
        adapter.unregister()
        assert model_file("kimi_linear").chunk_kimi_delta_attention is before
        adapter.unregister()  # of nothing

    def test_reaches_files_that_are_imported_later(self, monkeypatch):
        name = "transformers.models.bailing_hybrid.modeling_bailing_hybrid"
        monkeypatch.delitem(sys.modules, name, raising=False)
        adapter.register()
        module = importlib.import_module(name)
        ours = module.chunk_kimi_delta_attention
        assert f"{name}.chunk_kimi_delta_attention" in adapter.register()
        assert module.__spec__.loader is module.__loader__
        assert isinstance(module.__loader__, importlib.machinery.SourceFileLoader)
        adapter.unregister()
        assert module.chunk_kimi_delta_attention is ours.__wrapped__
        monkeypatch.delitem(sys.modules, name)
        again = importlib.import_module(name)  # without the adapter nothing is replaced
        assert again.chunk_kimi_delta_attention.__code__ is not ours.__code__

    def test_leaves_what_others_replaced_since(self, monkeypatch):
        module = model_file("qwen3_5")
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_chunk_gated_delta_rule)
        adapter.register()
        module.torch_chunk_gated_delta_rule = theirs = object()
        adapter.unregister()
        assert module.torch_chunk_gated_delta_rule is theirs

    def test_goes_in_front_of_a_module(self, monkeypatch):
        """Which the package `kernels` makes of transformers' functions."""
        theirs = model_file("qwen3_next").torch_chunk_gated_delta_rule.__wrapped__

        class Kernel(torch.nn.Module):
            def forward(self, query, key, value, g, beta, chunk_size=64, initial_state=None):
                return theirs(query, key, value, g, beta, chunk_size, initial_state)

        kernel, module = Kernel(), model_file("qwen3_next")
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", kernel)
        gate, state = gates(False), torch.randn(1, 2, 16, 16)
        wanted = kernel(*operands(), *gate.values(), 64, state)[0]
        adapter.register()
        found = module.torch_chunk_gated_delta_rule(*operands(), *gate.values(), 64, state)[0]
        assert only_ours()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        module.torch_chunk_gated_delta_rule(*operands(300), **gate)
        assert not only_ours()
        adapter.unregister()
        assert module.torch_chunk_gated_delta_rule is kernel

    def test_needs_transformers(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "transformers")
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(ImportError, match="transformers is not installed"):
            adapter.register()

    def test_finds_files_that_come_with_a_checkpoint(self, monkeypatch):
        module = types.ModuleType("transformers_modules.some.modeling_hybrid")
        module.chunk_kimi_delta_attention = before = model_file("kimi_linear").chunk_kimi_delta_attention
        monkeypatch.setitem(sys.modules, module.__name__, module)
        adapter.register()
        assert module.chunk_kimi_delta_attention is not before
        adapter.unregister()
        assert module.chunk_kimi_delta_attention is before


class TestDeclinedCalls:
    """Run transformers' own code, with a reason."""

    @pytest.mark.parametrize(
        ("key_dim", "dtype", "reason"),
        [
            (300, torch.float32, "takes K up to 256, got 300"),
            (16, torch.float64, "takes float32, bfloat16 and float16; q is float64"),
        ],
        ids=["K", "float64"],
    )
    def test_with_the_sentence_of_the_registry(self, key_dim, dtype, reason):
        module = model_file("qwen3_next")
        wanted, _ = module.torch_chunk_gated_delta_rule(*operands(key_dim, dtype), **gates(False))
        adapter.register()
        found, _ = module.torch_chunk_gated_delta_rule(*operands(key_dim, dtype), **gates(False))
        assert torch.equal(found, wanted)
        assert adapter.calls == {("chunk_gated_delta_rule", reason): 1}
        assert reason in repr(
            cula.explain("gdn", key_dim=key_dim, heads=2, value_heads=2, dtype=dtype, device="cpu")
        )

    def test_with_the_sentence_of_the_call(self):
        """Where the registry has kernels, and the call itself is refused."""
        module = model_file("kimi_linear")
        q, k, v = operands()
        adapter.register()
        with pytest.raises(RuntimeError):  # transformers' own, which cannot broadcast either
            module.chunk_kimi_delta_attention(q, k, v, g=gates(True)["g"], beta=torch.ones(1, 22, 2))
        ((_, reason),) = adapter.calls
        assert reason.startswith("beta must have shape")

    def test_of_a_layer(self):
        """The Lightning layer of MiniMax computes all of itself then."""
        layer = a_model("minimax").double().model.layers[0].self_attn
        hidden = torch.randn(2, 40, 48, dtype=torch.float64)
        with torch.no_grad():
            wanted = layer(hidden, None, None)
            adapter.register()
            found = layer(hidden, None, None)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        reason = "takes float32, bfloat16 and float16; q is float64"
        assert counted() == {("lightning_attn", reason): 1}

    def test_of_a_layer_with_an_argument_more(self, monkeypatch):
        """Of a version to come: what it says must not be lost."""
        layer = a_model("minimax").model.layers[0].self_attn
        forward = vars(type(layer))["forward"]

        def later(
            layer, hidden_states, position_embeddings, attention_mask, past_key_values=None, twice=None
        ):
            made, state = forward(layer, hidden_states, position_embeddings, attention_mask, past_key_values)
            return (2 * made if twice else made), state

        monkeypatch.setattr(type(layer), "forward", later)
        hidden = torch.randn(2, 40, 48)
        with torch.no_grad():
            wanted = layer(hidden, None, None, twice=True)[0]
            adapter.register()
            found = layer(hidden, None, None, twice=True)[0]
            layer(hidden, None, None, twice=None)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)  # its norm is cula's
        reason = "an argument twice of this layer is not known here"
        assert counted() == {("lightning_attn", reason): 1, ("lightning_attn", "cula"): 1}

    def test_on_other_devices(self):
        module = model_file("qwen3_next")
        adapter.register()
        inputs = [x.to("meta") for x in operands()]
        module.torch_chunk_gated_delta_rule(*inputs, **{k: x.to("meta") for k, x in gates(False).items()})
        reason = "runs on CPU and CUDA tensors, these are on meta"
        assert adapter.calls == {("chunk_gated_delta_rule", reason): 1}

    def test_in_torch_export(self):
        class Call(torch.nn.Module):
            def forward(self, q, k, v, g, beta):
                return model_file("qwen3_next").torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]

        adapter.register()
        inputs = (*operands(), *gates(False).values())
        program = torch.export.export(Call(), inputs)
        assert "cula" not in str(program.graph)

    def test_are_logged_once_for_each_reason(self, caplog):
        module = model_file("qwen3_next")
        adapter.register()
        with caplog.at_level("INFO", logger=adapter.__name__):
            for _ in range(2):
                module.torch_chunk_gated_delta_rule(*operands(300), **gates(False))
        assert [record.message for record in caplog.records] == [
            "chunk_gated_delta_rule runs transformers' own code: takes K up to 256, got 300"
        ]


class TestCompiled:
    """With AOTAutograd, which traces the backward pass too, and no code generator."""

    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.parametrize("name", MODELS)
    def test_a_model_is_one_graph(self, name):
        model = a_model(name)
        with torch.no_grad():
            wanted = model(prompts(), use_cache=False).logits
            adapter.register()
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            found = compiled(prompts(), use_cache=False).logits
        assert only_ours()
        assert counted().keys() == {(NAMES[name][0], "cula")}
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)

    def test_where_a_default_device_is_set(self):
        model = a_model("minimax")
        adapter.register()
        with torch.no_grad(), torch.device("cpu"):
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            compiled(prompts(), use_cache=False)
        assert counted().keys() == {(NAMES["minimax"][0], "cula")}

    def test_a_graph_before_and_after(self):
        model = a_model("qwen3_5", num_hidden_layers=2, layer_types=LAYERS[1:3])
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            wanted = model(prompts(), use_cache=False).logits
            adapter.register()
            found = compiled(prompts(), use_cache=False).logits
            assert counted() == {("chunk_gated_delta_rule", "cula"): 1}
            compiled(prompts(), use_cache=False)  # counts nothing: it was traced before
            assert counted() == {("chunk_gated_delta_rule", "cula"): 1}
            adapter.unregister()
            theirs = compiled(prompts(), use_cache=False).logits
        assert counted() == {("chunk_gated_delta_rule", "cula"): 1}
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(theirs, wanted, rtol=0, atol=1e-5)

    def test_a_layer_trains(self):
        model = a_model("kimi_linear")
        layer = model.model.layers[0].self_attn
        hidden = torch.randn(2, 33, 48)
        layer(hidden).square().sum().backward()
        wanted = {each: x.grad.clone() for each, x in layer.named_parameters()}
        layer.zero_grad()
        adapter.register()
        torch.compile(layer, backend="aot_eager", fullgraph=True)(hidden).square().sum().backward()
        assert counted() == {("chunk_kda", "cula"): 1}
        for each, x in layer.named_parameters():
            largest = float(wanted[each].abs().max())
            torch.testing.assert_close(x.grad, wanted[each], rtol=0, atol=2e-7 + 1e-4 * largest, msg=each)

    def test_a_token_writes_the_state_in_place(self):
        module, shape = model_file("kimi_linear"), (2, 1, 4, 16)
        q, k, v, g = (torch.randn(shape) for _ in range(4))
        state = torch.randn(2, 4, 16, 16)
        options = {"g": -g.abs(), "beta": torch.rand(shape[:3]), "output_final_state": True}
        wanted = module.recurrent_kimi_delta_attention(q, k, v, initial_state=state.clone(), **options)
        adapter.register()

        def step(state):
            return module.recurrent_kimi_delta_attention(q, k, v, initial_state=state, **options)[0]

        found = torch.compile(step, backend="aot_eager", fullgraph=True)(state)
        torch.testing.assert_close(found, wanted[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(state, wanted[1], rtol=0, atol=1e-5)

    def test_a_declined_call_is_traced_with_its_reason(self):
        module = model_file("qwen3_next")
        adapter.register()

        def call(q, k, v, g, beta):
            return module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]

        inputs = (*operands(300), *gates(False).values())
        wanted = call(*inputs)
        adapter.calls.clear()
        found = torch.compile(call, backend="aot_eager")(*inputs)
        assert adapter.calls == {("chunk_gated_delta_rule", "takes K up to 256, got 300"): 1}
        torch.testing.assert_close(found, wanted)
