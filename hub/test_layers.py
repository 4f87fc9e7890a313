# SPDX-License-Identifier: Apache-2.0
"""The layers against the recurrence of their rule in float64, forward and backward.

kernel-builder's shells name the build to be tested in LOCAL_KERNELS.
"""

from __future__ import annotations

import kernels
import pytest
import torch
from torch import Tensor

REPOSITORY, VERSION = "owner/cula", 0  # tools/hf_kernel.py writes what it was told

kernel = kernels.get_kernel(REPOSITORY, version=VERSION, trust_remote_code=True)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LAYERS = [
    "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> list[Tensor]:
    """o `[B, T, HV, V]` and the final state `[B, HV, K, V]`; g `[B, T, HV, K]`, or `[B, T, HV, 1]`."""
    q, k = (torch.nn.functional.normalize(x, dim=-1, eps=1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    o = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return [torch.stack(o, dim=1), state]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_recurrence(name: str, device: str) -> None:
    torch.manual_seed(0)
    kimi = "kimi" in name
    q, k = (torch.randn(2, 70, 4 if kimi else 2, 32) for _ in range(2))
    v, beta, state = torch.randn(2, 70, 4, 32), torch.rand(2, 70, 4), torch.randn(2, 4, 32, 32)
    g = -torch.rand(2, 70, 4, 32) if kimi else -torch.rand(2, 70, 4)
    exact = [x.double().requires_grad_() for x in (q, k, v, g, beta, state)]
    given = [x.to(device).requires_grad_() for x in (q, k, v, g, beta, state)]

    gate = exact[3] if kimi else exact[3][..., None]
    wanted = recurrence(*exact[:3], gate, *exact[4:])
    layer = getattr(kernel.layers, name)()
    got = layer(
        *given[:3], g=given[3], beta=given[4], initial_state=given[5], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    weights = [torch.randn_like(x) for x in wanted]
    wanted += torch.autograd.grad(wanted, exact, weights)
    got = [*got, *torch.autograd.grad(got, given, [x.to(y) for x, y in zip(weights, got, strict=True)])]
    for mine, theirs in zip(got, wanted, strict=True):
        error = (mine.cpu().double() - theirs).norm() / theirs.norm()
        assert error < 1e-5
