# SPDX-License-Identifier: Apache-2.0
"""The recurrence in float64 PyTorch, written from the mathematics alone: the witness for the C++ oracle.

S'  = diag(exp(g_t)) S_{t-1}
u_t = v_t  or  beta_t (v_t - S'^T k_t)  or  beta_t o v_t - S'^T (erase_t o k_t)
S_t = S' + k_t u_t^T
o_t = scale S_t^T q_t

With low-rank keys u_t = v_t, and S_t has b_t (S_{t-1}^T a_t)^T besides.

A token that writes n times does so one write after another, between its decay and its output; row t n + j of
k, v and beta is write j of token t.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional

from cula_testing.cases import FAMILY, Inputs


@dataclass
class Sequence:
    """One sequence: its outputs [T, HV, V] and its states [T + 1, HV, V, K] before each token and after the
    last."""

    o: torch.Tensor
    states: torch.Tensor


def log_decay(inputs: Inputs) -> torch.Tensor:
    """[B, T, HV, K or 1], natural logarithm, float64."""
    case, kind = inputs.case, FAMILY[inputs.case.algorithm][0]
    B, T, HV, _ = inputs.o_shape
    a = torch.zeros(B, T, HV, 1, dtype=torch.float64)
    if kind in ("channel", "token"):
        a = inputs.g.double()
        a = a if kind == "channel" else a[..., None]
        if case.gate != "log_decay":
            if inputs.dt_bias is not None:
                a = a + inputs.dt_bias.double().view(HV, -1)
            rate = torch.ones(HV, 1, dtype=torch.float64)
            if inputs.A_log is not None:
                rate = inputs.A_log.double().exp().clamp(max=1e30)[:, None]
            if case.gate == "softplus":
                a = -rate * functional.softplus(a, threshold=100)
            else:
                a = case.lower_bound * torch.sigmoid(rate * a)
    if inputs.decay is not None:
        a = a + inputs.decay.double()[:, None]
    return a


def beta(inputs: Inputs) -> torch.Tensor | None:
    """[B, T, HV, V or 1], float64."""
    if inputs.beta is None:
        return None
    b = inputs.beta.double()
    if inputs.case.beta_is_logit:
        b = b.sigmoid() * (2 if inputs.case.allow_neg_eigval and inputs.erase is None else 1)
    return b if b.ndim == 4 else b[..., None]


def erase(inputs: Inputs) -> torch.Tensor | None:
    """[B, T, HV, K], float64."""
    if inputs.erase is None:
        return None
    x = inputs.erase.double()
    return x.sigmoid() * (2 if inputs.case.allow_neg_eigval else 1) if inputs.case.beta_is_logit else x


def recurrence(
    inputs: Inputs, batch: int, begin: int, end: int, state: torch.Tensor | None, parents=None
) -> Sequence:
    """Tokens begin..end of row `batch` from `state` [HV, V, K]; parents[t] names the token whose state t
    continues."""
    options, update = inputs.case.options, FAMILY[inputs.case.algorithm][1]
    HV, V, K = inputs.v.shape[2], inputs.v.shape[3], inputs.q.shape[3]
    n = inputs.case.writes
    q = inputs.q[batch, begin:end].double()
    k, v = (tensor[batch, begin * n : end * n].double() for tensor in (inputs.k, inputs.v))
    if options["qk_l2norm"]:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[1], dim=1) for x in (q, k))
    alpha = log_decay(inputs)[batch, begin:end].exp()
    write, erased = beta(inputs), erase(inputs)

    base = torch.zeros(HV, V, K, dtype=torch.float64) if state is None else state.double()
    states, outputs = [base], []
    for t in range(end - begin):
        parent = t - 1 if parents is None else int(parents[t])
        before = states[max(parent, -1) + 1]
        S = before * alpha[t, :, None, :]
        for row in range(t * n, (t + 1) * n):
            u, strength = v[row], None if write is None else write[batch, begin * n + row]
            match update:
                case "additive":
                    pass
                case "delta" | "product":
                    u = strength * (u - torch.einsum("hvk,hk->hv", S, k[row]))
                case "erase":
                    key = erased[batch, begin * n + row] * k[row]
                    u = strength * u - torch.einsum("hvk,hk->hv", S, key)
                case "dplr":
                    read = torch.einsum("hvk,hk->hv", before, inputs.a_key[batch, begin + row].double())
                    S = S + torch.einsum("hv,hk->hvk", read, inputs.b_key[batch, begin + row].double())
                case _:
                    raise NotImplementedError(f"the oracle has no update rule {update!r}")
            S = S + torch.einsum("hv,hk->hvk", u, k[row])
        states.append(S)
        outputs.append(options["scale"] * torch.einsum("hvk,hk->hv", S, q[t]))
    o = torch.stack(outputs) if outputs else torch.zeros(0, HV, V, dtype=torch.float64)
    return Sequence(o, torch.stack(states))


def spans(inputs: Inputs) -> list[tuple[int, int, int]]:
    """(row of the batch, first token, end) of each sequence."""
    if inputs.cu_seqlens is None:
        return [(b, 0, inputs.q.shape[1]) for b in range(inputs.q.shape[0])]
    cu = inputs.cu_seqlens.tolist()
    return [(0, begin, end) for begin, end in itertools.pairwise(cu)]


def initial_states(inputs: Inputs) -> list[torch.Tensor | None]:
    """The state [HV, V, K] that each sequence starts from."""
    states = []
    for n in range(len(spans(inputs))):
        slot = n if inputs.initial_state_indices is None else int(inputs.initial_state_indices[n])
        starts = inputs.has_initial_state is None or bool(inputs.has_initial_state[n])
        states.append(inputs.initial_state[slot] if inputs.initial_state is not None and starts else None)
    return states


def run(inputs: Inputs) -> tuple[torch.Tensor, list[Sequence]]:
    """o [B, T, HV, V], zero where no sequence is, and every sequence."""
    o = torch.zeros(inputs.o_shape, dtype=torch.float64)
    sequences = []
    for (b, begin, end), state in zip(spans(inputs), initial_states(inputs), strict=True):
        sequences.append(recurrence(inputs, b, begin, end, state))
        o[b, begin:end] = sequences[-1].o
    return o, sequences
