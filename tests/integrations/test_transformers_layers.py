# SPDX-License-Identifier: Apache-2.0
"""cula.integrations.transformers: the layers around linear attention, and packed sequences, which the
convolution has to keep apart."""

from __future__ import annotations

import types

import pytest
import torch

from cula.integrations import _transformers_layers
from cula.integrations import transformers as adapter
from cula_testing.hybrids import (
    LAYERS,
    MODELS,
    a_model,
    cached,
    gates,
    linear_layer,
    model_file,
    operands,
    prompts,
)

pytestmark = pytest.mark.cpu_only("the reference is transformers' own code in float32")

LINEAR = LAYERS.count("linear_attention")


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
    return {each: count for each, count in adapter.calls.items() if each[0] in names}


def only_ours() -> bool:
    return bool(adapter.calls) and {outcome for _, outcome in adapter.calls} == {"cula"}


class TestTheLayersAround:
    """The convolution, its next token and the norms."""

    AROUND = ("causal_conv1d_fn", "causal_conv1d_update", "rms_norm_gated", "rms_norm")

    @pytest.mark.parametrize("name", MODELS)
    def test_are_counted(self, name):
        model = a_model(name)
        adapter.register()
        cached(model, prompts(tokens=22), 20, 1, 1)
        found = counted(*self.AROUND)
        assert found.pop(("rms_norm", "cula")) % 3 == 0
        wanted = {("causal_conv1d_fn", "cula"): LINEAR, ("causal_conv1d_update", "cula"): 2 * LINEAR}
        assert found == ({} if name == "minimax" else {**wanted, ("rms_norm_gated", "cula"): 3 * LINEAR})

    @pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "olmo_hybrid"])
    def test_give_what_those_of_transformers_give(self, name):
        module = model_file(name)
        x, weight = torch.randn(2, 8, 30), torch.randn(8, 4)
        state, token = torch.randn(2, 8, 4), torch.randn(2, 8, 1)
        prefix = {"qwen3_next": "Qwen3Next", "kimi_linear": "KimiLinear", "olmo_hybrid": "OlmoHybrid"}[name]
        norms = [getattr(module, prefix + each)(8, eps=0.1) for each in ("RMSNorm", "RMSNormGated")]
        for each in norms:
            torch.nn.init.normal_(each.weight)
        rows = torch.randn(2, 5, 8)

        def run() -> list[torch.Tensor]:
            own = state.clone()
            return [
                module.causal_conv1d_fn(x, weight, None, activation="silu"),
                module.causal_conv1d_update(token, own, weight, None, "silu"),
                own,
                norms[0](rows),
                norms[1](rows, rows.flip(0)),
            ]

        with torch.no_grad():
            wanted = run()
            adapter.register()
            found = run()
        assert set(adapter.calls) == {(each, "cula") for each in self.AROUND}
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "olmo_hybrid", "minimax"])
    def test_norms_give_the_dtype_of_those_of_transformers(self, name, of_x, of_weight):
        """Some end in a product with the weight, which gives the wider dtype of both."""
        module, x = model_file(name), torch.randn(3, 5, 8).to(of_x)
        classes = [each for key, each in vars(module).items() if key.endswith(("RMSNorm", "RMSNormGated"))]
        layers = [each(8).to(of_weight) for each in classes]
        given = [(x, x.flip(0)) if each.__name__.endswith("Gated") else (x,) for each in classes]
        wanted = [layer(*each) for layer, each in zip(layers, given, strict=True)]
        adapter.register()
        found = [layer(*each) for layer, each in zip(layers, given, strict=True)]
        assert layers
        assert only_ours()
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-6, atol=1e-5)

    def test_hand_on_rows_whose_channels_are_contiguous(self):
        """So q, k and v are views of one result, which the kernels of linear attention read where it lies."""
        module, handed = model_file("qwen3_5"), []
        layer = linear_layer("qwen3_5")
        original = module.torch_chunk_gated_delta_rule
        adapter.register()
        ours = module.torch_chunk_gated_delta_rule
        module.torch_chunk_gated_delta_rule = lambda *args, **kwargs: (
            handed.extend(args) or ours(*args, **kwargs)
        )
        try:
            with torch.no_grad():
                layer(torch.randn(2, 20, 48))
        finally:
            module.torch_chunk_gated_delta_rule = ours
        adapter.unregister()
        assert module.torch_chunk_gated_delta_rule is original
        assert len({x.untyped_storage().data_ptr() for x in handed}) == 1
        assert all(x.stride(3) == 1 for x in handed)

    def test_an_unknown_norm_stays(self):
        """Which gates first, as Mamba-2's does."""

        class GateFirstRMSNormGated(torch.nn.Module):
            def __init__(self, dim: int, eps: float = 1e-6) -> None:
                super().__init__()
                self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(dim)), eps
                self.activation = "silu"

            def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
                x = x * torch.nn.functional.silu(gate)
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

        module = types.ModuleType("transformers_modules.mamba.modeling_hybrid")
        GateFirstRMSNormGated.__module__ = module.__name__
        module.GateFirstRMSNormGated = GateFirstRMSNormGated
        module.chunk_kimi_delta_attention = model_file("kimi_linear").chunk_kimi_delta_attention
        before = GateFirstRMSNormGated.forward
        adapter._replace_in(module)
        assert GateFirstRMSNormGated.forward is before

    def test_a_norm_of_an_unknown_dtype_stays(self):
        """Which gives the weight's, as T5's does, where the kernel gives x's."""

        class RoundsRMSNorm(torch.nn.Module):
            def __init__(self, dim: int, eps: float = 1e-6) -> None:
                super().__init__()
                self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(dim)), eps

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                wide = x.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
                return self.weight * wide.to(self.weight.dtype)

        assert _transformers_layers.norm_like(RoundsRMSNorm) is None

    def test_of_other_numbers_are_declined(self):
        module, reason = model_file("kimi_linear"), "takes float32, bfloat16 and float16; these are float64"
        layer = module.KimiLinearRMSNorm(8).double()
        x = torch.randn(3, 8, dtype=torch.float64)
        wanted = layer(x)
        adapter.register()
        assert torch.equal(layer(x), wanted)
        assert adapter.calls == {("rms_norm", reason): 1}


class TestPackedSequences:
    LENGTHS = torch.tensor([0, 9, 23], dtype=torch.int32)

    def apart(self, function, per_channel: bool) -> torch.Tensor:
        """What each sequence gives alone."""
        pieces = [
            function(
                *(x[:, a:b] for x in operands()), use_qk_l2norm_in_kernel=True,
                **{each: x[:, a:b] for each, x in gates(per_channel).items()},
            )[0]
            for a, b in ((0, 9), (9, 23))
        ]  # fmt: skip
        return torch.cat(pieces, dim=1)

    @pytest.mark.parametrize(
        ("name", "attribute", "lengths"),
        [
            ("qwen3_next", "torch_chunk_gated_delta_rule", "cu_seqlens"),
            ("kimi_linear", "chunk_kimi_delta_attention", "cu_seq_lens_q"),
        ],
    )
    def test_are_kept_apart_behind_a_convolution_that_does(self, name, attribute, lengths):
        """Which has read seq_idx: that of transformers raises where it is given."""
        function = getattr(model_file(name), attribute)
        wanted = self.apart(function, name == "kimi_linear")
        adapter.register()
        found, _ = getattr(model_file(name), attribute)(
            *operands(), **gates(name == "kimi_linear"), use_qk_l2norm_in_kernel=True,
            seq_idx=torch.tensor([[0] * 9 + [1] * 14], dtype=torch.int32), **{lengths: self.LENGTHS},
        )  # fmt: skip
        assert only_ours()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "glm5_next"])
    @pytest.mark.parametrize("told_by", ["cu_seq_lens_q", "seq_idx too"])
    def test_are_kept_apart_by_a_whole_layer(self, name, told_by):
        """The convolution in front is cula's too. Each sequence gives what it gives alone, and has the same
        gradients; without cula the layers raise, or mix the sequences."""
        layer = linear_layer(name)
        packed = {"cu_seq_lens_q": self.LENGTHS}
        if told_by == "seq_idx too":
            packed["seq_idx"] = torch.tensor([[0] * 9 + [1] * 14], dtype=torch.int32)
        hidden = torch.randn(1, 23, 48, generator=torch.Generator().manual_seed(3))
        alone, apart = (hidden.clone().requires_grad_() for _ in range(2))
        wanted = torch.cat([layer(alone[:, :9]), layer(alone[:, 9:])], dim=1)
        wanted.square().sum().backward()
        if name not in ("kimi_linear", "glm5_next") or "seq_idx" in packed:
            with pytest.raises(ValueError, match="can't keep packed sequences apart"):
                layer(hidden, **packed)
        else:
            assert not torch.allclose(layer(hidden, **packed), wanted, atol=1e-4)
        adapter.register()
        found = layer(apart, **packed)
        found.square().sum().backward()
        assert only_ours()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        largest = float(alone.grad.abs().max())
        torch.testing.assert_close(apart.grad, alone.grad, rtol=0, atol=1e-4 * largest)

    def test_behind_what_a_cache_has_put_in_front(self):
        """Fewer tokens than the window come with zeros in front, which are the first sequence's."""
        module = model_file("kimi_linear")
        x, weight = torch.randn(1, 8, 4), torch.randn(8, 4)
        x[..., 0] = 0
        adapter.register()
        found = module.causal_conv1d_fn(
            x, weight, None, activation="silu", cu_seq_lens_q=torch.tensor([0, 1, 3])
        )
        first = module.causal_conv1d_fn(x[..., :2], weight, None, activation="silu")
        second = module.causal_conv1d_fn(x[..., 2:], weight, None, activation="silu")
        torch.testing.assert_close(found, torch.cat([first, second], -1))

    def test_are_declined_behind_another_convolution(self):
        """Of a file that comes with a checkpoint, say."""
        module = types.ModuleType("transformers_modules.another.modeling_hybrid")
        module.chunk_kimi_delta_attention = model_file("kimi_linear").chunk_kimi_delta_attention
        adapter._replace_in(module)
        with pytest.warns(UserWarning, match="mixes neighbouring sequences"):
            module.chunk_kimi_delta_attention(*operands(), **gates(True), cu_seq_lens_q=self.LENGTHS)
        assert adapter.calls == {("chunk_kda", adapter.PACKED): 1}

    def test_warn_where_the_convolution_itself_declines(self):
        module = model_file("kimi_linear")
        adapter.register()
        with pytest.warns(UserWarning, match="mixes neighbouring sequences"):
            module.causal_conv1d_fn(
                torch.randn(1, 8, 23), torch.randn(8, 4), None, activation="gelu", cu_seq_lens_q=self.LENGTHS
            )
        assert adapter.calls == {
            ("causal_conv1d_fn", "activation must be None, silu or swish, got 'gelu'"): 1
        }

    def test_are_declined_by_minimax(self):
        model = a_model("minimax")
        adapter.register()
        with torch.no_grad():
            model(prompts(1, 23), cu_seq_lens_q=self.LENGTHS, use_cache=False)
        ((_, reason),) = counted("lightning_attn")
        assert "do not read cu_seq_lens_q" in reason
