# SPDX-License-Identifier: Apache-2.0
"""Linear attention in plain PyTorch: the chunk form and the recurrence, as a careful user would write them.

They are the peers that run everywhere. All arithmetic is float32; the symbols are those of ALGORITHM.md.
States are [B, HV, V, K]. A channel must not decay by more than exp(-MAX_EXPONENT) within SUB_CHUNK tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from .cases import Inputs, Maybe

CHUNK = 64
# Tokens prepared at a time. The intermediates of a block stay in cache; preparing all tokens at once, as one
# would on a GPU, takes two to three times as long on a CPU.
CPU_BLOCK = 512
# A per-channel decay is factored into exp(G_i - R) and exp(R - G_j) around an anchor R. Sixteen tokens of the
# strongest bounded gate (-5 each) stay inside float32's range; a whole chunk would not.
SUB_CHUNK = 16
MAX_EXPONENT = 80.0


def log_decay(inputs: Inputs) -> Tensor | None:
    """[B, T, HV] or [B, T, HV, K], float32."""
    case, shape = inputs.case, inputs.o_shape[:3]
    g: Maybe = None if inputs.g is None else inputs.g.float()
    if case.gate != "log_decay":
        g = g if inputs.dt_bias is None else g + inputs.dt_bias
        rate = torch.ones(()) if inputs.A_log is None else inputs.A_log.exp().view(-1, *[1] * (g.dim() - 3))
        g = case.lower_bound * torch.sigmoid(rate * g) if case.gate == "bounded" else -rate * softplus(g)
    if inputs.decay is not None:
        g = inputs.decay.expand(shape) if g is None else g + inputs.decay
    return g


def normalized(x: Tensor) -> Tensor:
    """float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _heads_first(x: Tensor, value_heads: int, tokens: int) -> Tensor:
    """[B, T, H, ...] to [B * HV, tokens, ...] in float32, q/k heads repeated and T padded with zeros."""
    x = x.float().transpose(1, 2)
    if x.shape[1] != value_heads:
        x = x.repeat_interleave(value_heads // x.shape[1], dim=1)
    if tokens != x.shape[2]:
        x = pad(x, [0, 0] * (x.dim() - 3) + [0, tokens - x.shape[2]])
    return x.flatten(0, 1)


def _by_write(x: Maybe, writes: int, at: int) -> Maybe:
    """What tokens have, for each of their writes: row `at` of them has it, and the others zeros."""
    if x is None or writes == 1:
        return x
    rows = x.new_zeros((*x.shape[:2], writes, *x.shape[2:]))
    rows[:, :, at] = x
    return rows.flatten(1, 2)


def _prepare(inputs: Inputs, rows: int) -> list[Maybe]:
    """q, k, v, log decay, beta, erase keys and low-rank keys as the equations want them, of each write: a
    token decays with its first and reads with its last."""
    case = inputs.case
    q, k, v = inputs.q.float(), inputs.k.float(), inputs.v
    if case.qk_l2norm:
        q, k = normalized(q), normalized(k)
    q = _by_write(q * case.options["scale"], case.writes, -1)
    g = _by_write(log_decay(inputs), case.writes, 0)
    beta, erase, most = inputs.beta, inputs.erase, 2 if case.allow_neg_eigval else 1
    if case.beta_is_logit:
        beta = beta.float().sigmoid() * (most if erase is None else 1)
        erase = None if erase is None else erase.float().sigmoid() * most
    e = None if erase is None else erase.float() * k.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    all_of_it = (q, k, v, g, beta, e, inputs.a_key, inputs.b_key)
    return [None if x is None else _heads_first(x, v.shape[2], rows) for x in all_of_it]


def _own_strengths(k: Tensor, v: Tensor, beta: Maybe, e: Maybe) -> tuple[Tensor, Tensor, Maybe]:
    """What reads, what is written, and the strength of both: beside erase keys beta is the values' alone."""
    if e is None:
        return k, v, beta
    return e, v * (beta if beta.dim() == v.dim() else beta[..., None]), torch.ones_like(v[..., 0])


def _start(inputs: Inputs, initial_state: Tensor | None) -> Tensor:
    """[B * HV, K, V]."""
    if initial_state is None:
        (B, _, HV, V), K = inputs.v.shape, inputs.q.shape[-1]
        return torch.zeros(B * HV, K, V, device=inputs.v.device)
    return initial_state.float().flatten(0, 1).transpose(-1, -2).contiguous()


def _finish(inputs: Inputs, o: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    B, rows, HV, _ = inputs.v.shape
    writes = inputs.case.writes
    o = o[:, writes - 1 : rows : writes].unflatten(0, (B, HV)).transpose(1, 2).to(inputs.v.dtype)
    return o, S.transpose(-1, -2).unflatten(0, (B, HV))


def _scores_per_channel(
    rows: list[Tensor], k: Tensor, G: Tensor, G_of_rows: Tensor | None = None
) -> list[Tensor]:
    """sum_k rows_ik k_jk exp(G_ik - G_jk) for j <= i, SUB_CHUNK rows at a time; above the diagonal it means
    nothing. G_of_rows: in the place of G_ik."""
    G_of_rows = G if G_of_rows is None else G_of_rows
    scores = [k.new_zeros(*k.shape[:-1], CHUNK) for _ in rows]
    for start in range(0, CHUNK, SUB_CHUNK):
        stop = start + SUB_CHUNK
        anchor = G[..., start : start + 1, :]
        below = (G_of_rows[..., start:stop, :] - anchor).exp()
        columns = (k[..., :stop, :] * (anchor - G[..., :stop, :]).clamp(max=MAX_EXPONENT).exp()).transpose(
            -1, -2
        )
        for score, row in zip(scores, rows, strict=True):
            score[..., start:stop, :stop] = (row[..., start:stop, :] * below) @ columns
    return scores


def _chunks(inputs: Inputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    count = -(-inputs.v.shape[1] // CHUNK)
    chunked: list[Maybe] = [
        None if x is None else x.unflatten(1, (count, CHUNK)) for x in _prepare(inputs, count * CHUNK)
    ]
    q, k, v, g, beta, e, a, b = chunked
    if a is not None:
        o, S = _chunks_of_low_rank(q, k, v, g, a, b, _start(inputs, initial_state))
        return _finish(inputs, o, S)
    e, v, beta = _own_strengths(k, v, beta, e)
    G = k.new_zeros(1, count, CHUNK) if g is None else g.cumsum(2)

    # score
    rows = [q] if beta is None else [q, e]
    if G.dim() == 4:
        A, *L = _scores_per_channel(rows, k, G)
    else:
        # The upper triangle is masked before exp: there the difference is positive and may overflow.
        D = (G[..., :, None] - G[..., None, :]).tril().exp()
        A, *L = (row @ k.transpose(-1, -2) * D for row in rows)
        G = G[..., None]
    A = A.tril_()
    q_decayed, e_decayed = q * G.exp(), e * G.exp()
    k_remaining = (k * (G[:, :, -1:] - G).exp()).transpose(-1, -2)
    gate_total = G[:, :, -1].exp()[..., None]

    # solve, and the part of read that needs no state: U = T V - (T K^) S
    U, W = v, None
    if beta is not None:
        T = torch.linalg.solve_triangular(
            L[0] * beta[..., None], beta.diag_embed(), upper=False, unitriangular=True
        )
        U, W = T @ v, T @ e_decayed

    # read, output, carry
    S = _start(inputs, initial_state)
    o = torch.empty_like(v)
    for c in range(count):
        u = U[:, c] if W is None else torch.baddbmm(U[:, c], W[:, c], S, alpha=-1)
        o[:, c] = torch.baddbmm(q_decayed[:, c] @ S, A[:, c], u)
        S = torch.baddbmm(gate_total[:, c] * S, k_remaining[:, c], u)
    return _finish(inputs, o.flatten(1, 2), S)


def _chunks_of_low_rank(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Of chunks [.., count, CHUNK, ..] and the state before them; o [.., count CHUNK, V]."""
    G = g.cumsum(2)
    before, total = G - g, G[:, :, -1].exp()[..., None]
    A_k, A_b = (_scores_per_channel([q], x, G)[0].tril_() for x in (k, b))
    L_k, L_b = (_scores_per_channel([a], x, G, before)[0].tril_(-1) for x in (k, b))
    k_remaining, b_remaining = ((x * (G[:, :, -1:] - G).exp()).transpose(-1, -2) for x in (k, b))
    q_decayed, one = q * G.exp(), torch.eye(CHUNK, device=q.device)
    both = torch.cat((L_k @ v, a * before.exp()), -1)
    U, W = torch.linalg.solve_triangular(one - L_b, both, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    o = torch.empty_like(v)
    for c in range(v.shape[1]):
        u = torch.baddbmm(U[:, c], W[:, c], S)
        o[:, c] = q_decayed[:, c] @ S + A_b[:, c] @ u + A_k[:, c] @ v[:, c]
        S = total[:, c] * S + b_remaining[:, c] @ u + k_remaining[:, c] @ v[:, c]
    return o.flatten(1, 2), S


def chunk_form(inputs: Inputs, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and the final state, chunk after chunk: batched products and one triangular solve per
    chunk."""
    T = inputs.q.shape[1]
    block = max(1, CPU_BLOCK // inputs.case.writes) if inputs.v.device.type == "cpu" else T
    outputs: list[Tensor] = []
    S: Maybe = initial_state
    for start in range(0, T, block):
        o, S = _chunks(inputs.tokens(start, start + block), S)
        outputs.append(o)
    return torch.cat(outputs, 1), S


def recurrence(inputs: Inputs, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same, token after token."""
    q, k, v, g, beta, e, a, b = _prepare(inputs, inputs.v.shape[1])
    e, v, beta = _own_strengths(k, v, beta, e)
    alpha = None if g is None else g.exp().reshape(*g.shape[:2], -1, 1)
    S = _start(inputs, initial_state)
    o = torch.empty_like(v)
    for t in range(v.shape[1]):
        found = None if a is None else a[:, t, None] @ S
        if alpha is not None:
            S = S * alpha[:, t]
        if found is not None:
            S = torch.baddbmm(S, b[:, t, :, None], found)
        u = v[:, t, None]
        if beta is not None:
            u = torch.baddbmm(u, e[:, t, None], S, alpha=-1) * beta[:, t, None, None]
        S = torch.baddbmm(S, k[:, t, :, None], u)
        o[:, t] = (q[:, t, None] @ S)[:, 0]
    return _finish(inputs, o, S)
