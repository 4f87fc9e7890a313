# SPDX-License-Identifier: Apache-2.0
"""What stands for the kernels of vLLM and SGLang in tests: the recurrence token by token in float32, and the
functions of an engine that say that they ran.

Written from what the engines' kernels compute (vLLM 0.33, SGLang 0.5.23), not from their text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

# The names of an engine's own kernels that ran.
ran: list[str] = []


def records(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs):
        ran.append(function.__name__)
        return function(*args, **kwargs)

    return call


def softplus_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """The log decay of a raw gate `[T, HV]` or `[T, HV, K]`."""
    g = g.float()
    A = A_log.float().flatten().exp().view(-1, *(1,) * (g.dim() - 2))
    if dt_bias is not None:
        g = g + dt_bias.float().view(g.shape[1:])
    return -A * torch.nn.functional.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(A * g)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale=None, l2norm=True
) -> tuple[Tensor, list[Tensor]]:
    """One sequence: q, k `[T, H, K]`, v `[T, HV, V]`, g the log decay, `[T, HV]` or `[T, HV, K]`, beta
    `[T, HV]`, state `[HV, V, K]`. Returns o and the state after every token."""
    repeat = v.shape[1] // q.shape[1]
    q, k = (x.float().repeat_interleave(repeat, 1) for x in (q, k))
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    g = g.float().exp()
    g = g.unsqueeze(-1) if g.dim() == 2 else g
    S, o, states = state.float(), torch.empty(v.shape, dtype=torch.float32), []
    for t in range(v.shape[0]):
        S = S * g[t].unsqueeze(1)
        write = (v[t].float() - (S * k[t].unsqueeze(1)).sum(-1)) * beta[t].float().unsqueeze(-1)
        S = S + write.unsqueeze(-1) * k[t].unsqueeze(1)
        o[t] = (S * q[t].unsqueeze(1)).sum(-1)
        states.append(S)
    return o, states


def prefill(q, k, v, g, beta, initial_state, cu_seqlens, *, scale=None, l2norm=True) -> tuple[Tensor, Tensor]:
    """Packed `[1, T, ..]` on dense states `[N, HV, V, K]`."""
    o, final = torch.zeros_like(v), initial_state.float().clone()
    for n, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
        part = (x[0, start:end] for x in (q, k, v, g, beta))
        own, states = recurrence(*part, final[n], scale=scale, l2norm=l2norm)
        o[0, start:end] = own.to(o.dtype)
        final[n] = states[-1] if states else final[n]
    return o, final


def on_pool(
    q, k, v, g, beta, pool, cu_seqlens, indices, accepted=None, *, null=lambda slot: slot <= 0, scale=None,
    l2norm=True, out=None,
) -> Tensor:  # fmt: skip
    """Packed `[1, T, ..]` on a pool: slots `[N]`, or `[N, S]` for the state after every token."""
    o = torch.zeros(v.shape, dtype=v.dtype) if out is None else out.zero_()
    for n, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
        row = indices[n].tolist() if indices.dim() == 2 else [int(indices[n])]
        slot = row[0 if accepted is None else int(accepted[n]) - 1]
        if null(slot) or start == end:
            continue
        part = (x[0, start:end] for x in (q, k, v, g, beta))
        own, states = recurrence(*part, pool[slot], scale=scale, l2norm=l2norm)
        o[0, start:end] = own.to(o.dtype)
        if indices.dim() == 1:
            pool[slot] = states[-1].to(pool.dtype)
        else:
            for t, state in enumerate(states):
                if not null(row[t]):
                    pool[row[t]] = state.to(pool.dtype)
    return o
