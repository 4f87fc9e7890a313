# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins put in the place of vLLM's and SGLang's own Triton functions, beside those, on one GPU.

The engines need not be installed whole: their modules of kernels on the path are enough, and a test is
skipped where they cannot be imported. Outputs, and all states of the pools, are compared: in float32 up to
the order of sums, prompts in bfloat16 up to the roundings of two chunk forms.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cula.integrations import _sglang_kernels
from cula.integrations import _vllm_functions as ours
from cula.integrations._calls import Calls
from cula_testing.compare import errors

VLLM = "vllm.third_party.flash_linear_attention.ops"
SGLANG = "sglang.srt.layers.attention.linear.kernels"
H, HV, K, V, SLOTS = 2, 4, 128, 128, 12
RECURRENT, CHUNKED = 1e-5, 1e-2  # relative root mean squares


def module(path: str):
    return pytest.importorskip(path, reason=f"{path} is not here", exc_type=ImportError)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def starts(*lengths: int) -> Tensor:
    return torch.nn.functional.pad(ints(*lengths).cumsum(0, dtype=torch.int32), (1, 0))


def pool(seed: int = 1) -> Tensor:
    return drawn(SLOTS, HV, V, K, seed=seed) / 4


def tokens(rows: int, heads: int = H, value_heads: int = HV) -> dict[str, Tensor]:
    return {
        "q": drawn(1, rows, heads, K, seed=2), "k": drawn(1, rows, heads, K, seed=3),
        "v": drawn(1, rows, value_heads, V, seed=4),
    }  # fmt: skip


def gate(rows: int) -> dict[str, Tensor]:
    """The raw gate, logits of beta, and their parameters, of GDN."""
    return {
        "a": drawn(rows, HV, seed=5), "b": drawn(rows, HV, seed=6), "A_log": drawn(HV, seed=7).abs(),
        "dt_bias": drawn(HV, seed=8),
    }  # fmt: skip


def assert_alike(name: str, found: object, wanted: object, bound: float) -> None:
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape
        assert errors(one, other.double()).rms < bound, f"{name}: {at}"


class TestVllm:
    def test_packed_decode(self):
        rows = torch.cat([x.flatten(2)[0] for x in tokens(5).values()], 1)
        slots, found = ints(3, 0, 5, 1, 2), []  # 0 is none
        for functions in (ours, module(VLLM)):
            states, out = pool(), torch.zeros(5, 1, HV, V, device="cuda")
            functions.fused_recurrent_gated_delta_rule_packed_decode(
                rows, **gate(5), scale=K**-0.5, initial_state=states, out=out, ssm_state_indices=slots,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            found.append((out[slots != 0], states))
        assert_alike("packed decode", *found, RECURRENT)

    @pytest.mark.parametrize("drafts", [False, True])
    @pytest.mark.parametrize("name", ["gated_delta_rule", "sigmoid_gating", "kda"])
    def test_decode_and_drafts(self, name, drafts):
        x, rows = tokens(9, HV if name == "kda" else H), gate(9)
        slots = ints(*range(1, 10))
        given = {
            "cu_seqlens": starts(3, 3, 3) if drafts else starts(*[1] * 9),
            "ssm_state_indices": slots.view(3, 3) if drafts else slots,
            "num_accepted_tokens": ints(1, 3, 2) if drafts else None,
            "use_qk_l2norm_in_kernel": True,
        }
        if name == "sigmoid_gating":
            function, path = "fused_sigmoid_gating_delta_rule_update", VLLM
            given |= rows
        elif name == "gated_delta_rule":
            function, path = "fused_recurrent_gated_delta_rule", VLLM
            given |= {"g": -rows["a"].abs()[None], "beta": rows["b"].sigmoid()[None]}
        else:
            function, path = "fused_recurrent_kda_fwd", f"{VLLM}.kda"
            given |= {"g": -drawn(1, 9, HV, K, seed=9).abs(), "beta": rows["b"].sigmoid()[None]}
            given["scale"] = K**-0.5
        found = []
        for made in (
            ours.log_decay_recurrent_fwd if name == "kda" else getattr(ours, function),
            getattr(module(path), function),
        ):
            states = pool()
            o, _ = made(**x, **given, initial_state=states, inplace_final_state=True)
            found.append((o.view(1, 9, HV, V), states))
        assert_alike(function, *found, RECURRENT)

    @pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
    def test_prompts(self, name):
        kda = name == "chunk_kda"
        x = {key: each.bfloat16() for key, each in tokens(200, HV if kda else H).items()}
        x["beta"] = drawn(1, 200, HV, seed=6).sigmoid().bfloat16()
        log_decay = -drawn(1, 200, HV, K, seed=9).abs() / 8 if kda else -drawn(1, 200, HV, seed=9).abs() / 4
        found = []
        for made in (
            ours.log_decay_chunk if kda else ours.chunk_gated_delta_rule,
            getattr(module(f"{VLLM}.kda" if kda else VLLM), name),
        ):
            o, final = made(
                **x, g=log_decay, initial_state=pool()[:2], output_final_state=True,
                cu_seqlens=starts(130, 70), use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            found.append((o, final))
        assert_alike(name, *found, CHUNKED)


class TestSglang:
    def kernels(self, algorithm: str) -> tuple[object, object]:
        """Ours, and the Triton kernel below it."""
        triton = getattr(module(f"{SGLANG}.{algorithm}_triton"), f"Triton{algorithm.upper()}Kernel")
        return _sglang_kernels.make_kernel(algorithm, triton, self.calls)(), triton()

    @pytest.fixture(autouse=True)
    def only_ours(self):
        """A call that was declined would compare SGLang's kernel with itself."""
        self.calls = Calls()
        yield
        assert {outcome for _, outcome in self.calls} <= {"cula"}

    @staticmethod
    def given(algorithm: str, rows: int) -> dict[str, Tensor]:
        if algorithm == "gdn":
            return {**tokens(rows), **gate(rows)}
        return {
            **tokens(rows, HV), "a": drawn(rows, HV * K, seed=5), "b": drawn(rows, HV, seed=6),
            "A_log": drawn(HV, seed=7).abs(), "dt_bias": drawn(HV * K, seed=8),
        }  # fmt: skip

    @pytest.mark.parametrize("algorithm", ["gdn", "kda"])
    def test_decode(self, algorithm):
        x, found = self.given(algorithm, 5), []
        for kernel in self.kernels(algorithm):
            states = pool()
            o = kernel.decode(
                **x, ssm_states=states, cache_indices=ints(5, 1, 2, 7, 9), query_start_loc=starts(*[1] * 5)
            )
            found.append((o.view(1, 5, HV, V), states))
        assert_alike("decode", *found, RECURRENT)

    def test_packed_decode(self):
        x, found = self.given("gdn", 5), []
        rows = torch.cat([x.pop(name).flatten(2)[0] for name in ("q", "k", "v")], 1)
        for kernel in self.kernels("gdn"):
            states = pool()
            o = kernel.packed_decode(
                rows, **x, scale=K**-0.5, ssm_states=states, cache_indices=ints(5, -1, 2, 7, 9),
                num_v_heads=HV, head_v_dim=V,
            )  # fmt: skip
            found.append((o[:, [0, 2, 3, 4]], states))
        assert_alike("packed decode", *found, RECURRENT)

    @pytest.mark.parametrize("tree", [False, True])
    @pytest.mark.parametrize("algorithm", ["gdn", "kda"])
    def test_drafts(self, algorithm, tree):
        x, found = self.given(algorithm, 12), []
        parents = ints(-1, 0, 0, 1, -1, 0, 1, 0, -1, 0, 0, 0).view(3, 4) if tree else None
        for kernel in self.kernels(algorithm):
            states, room = pool(), torch.zeros(3, 4, HV, V, K, device="cuda")
            o = kernel.target_verify(
                **x, ssm_states=states, cache_indices=ints(5, 2, 0), query_start_loc=starts(4, 4, 4),
                intermediate_states_buffer=room, intermediate_state_indices=ints(0, 1, 2), cache_steps=4,
                retrieve_parent_token=parents,
            )  # fmt: skip
            found.append((o.view(1, 12, HV, V), room, states))
        assert_alike("drafts", *found, RECURRENT)

    def test_prompts(self):
        x = {key: each.bfloat16() for key, each in tokens(200).items()}
        found = []
        for kernel in self.kernels("gdn"):
            states = pool()
            o, *_ = kernel.extend(
                **x, g=-drawn(1, 200, HV, seed=9).abs() / 4, beta=drawn(1, 200, HV, seed=6).sigmoid(),
                ssm_states=states, cache_indices=ints(5, 3), query_start_loc=starts(130, 70),
            )  # fmt: skip
            found.append((o, states[[5, 3]], states[[0, 1, 2, 4]]))
        assert_alike("prompts", *found, CHUNKED)
