# SPDX-License-Identifier: Apache-2.0
"""The whole family in plain PyTorch, chunk after chunk: what `examples/train.py` compares with.

Chunks are computed side by side as batched matrix products, and the state goes through them in a loop. The
letters are those of ALGORITHM.md. All arithmetic is float32, and PyTorch makes the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64
# A decay per channel is split into one factor per token, counted from the first token of a block. Log decays
# of -5 and above keep the factors of 16 tokens within float32.
BLOCK, LARGEST_EXPONENT = 16, 80.0


def in_chunks(x: Tensor) -> Tensor:
    """[B, T, H, D] to [B, H, chunks, CHUNK, D], with zeros behind the last token."""
    x = pad(x.float(), (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def scores(rows: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """sum over channels of rows_i k_j exp(G_i - G_j) for j <= i; above the diagonal it means nothing."""
    if G.shape[-1] == 1:
        return (rows @ k.mT) * (G - G.mT).tril().exp()
    blocks = G.unflatten(-2, (-1, BLOCK))
    first = blocks[..., :1, :]
    decayed = rows.unflatten(-2, (-1, BLOCK)) * (blocks - first).exp()
    grown = k.unsqueeze(-3) * (first - G.unsqueeze(-3)).clamp(max=LARGEST_EXPONENT).exp()
    return (decayed @ grown.mT).flatten(-3, -2)


def low_rank(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`attention` of RWKV-7: what a reads of the state before its decay is written along b."""
    tokens, dtype = v.shape[1], v.dtype
    q, k, v, g, a, b = (in_chunks(x) for x in (q, k, v, g, a, b))
    q = q * q.shape[-1] ** -0.5
    G = g.cumsum(-2)
    # What is read before a token's decay is read after the one before it.
    a_before = pad(a, (0, 0, 0, 1))[..., 1:, :]

    def overlaps(x: Tensor) -> Tensor:
        return pad(scores(a_before, x, G).tril(), (0, 0, 1, 0))[..., :-1, :]

    one = torch.eye(CHUNK, device=q.device)
    both = torch.cat((overlaps(k) @ v, a * (G - g).exp()), -1)
    U, W = torch.linalg.solve_triangular(one - overlaps(b), both, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    A_k, A_b = (scores(q, x, G).tril() for x in (k, b))
    k_remaining, b_remaining = (x * (G[..., -1:, :] - G).exp() for x in (k, b))
    q_decayed, total = q * G.exp(), G[..., -1, :, None].exp()

    S, outputs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for c in range(q.shape[2]):
        u = U[:, :, c] + W[:, :, c] @ S
        outputs.append(q_decayed[:, :, c] @ S + A_b[:, :, c] @ u + A_k[:, :, c] @ v[:, :, c])
        S = total[:, :, c] * S + b_remaining[:, :, c].mT @ u + k_remaining[:, :, c].mT @ v[:, :, c]
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens].to(dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, erase: Tensor | None = None
) -> Tensor:
    """o [B, T, H, V] of q and k [B, T, H, K] and v [B, T, H, V], from an empty state.

    g: the log decay, at least -5, [B, T, H, K], or [B, T, H, 1] for one of all channels. beta: the write
    strength [B, T, H, 1] of the delta rule; None for an additive update. erase: erase strengths [B, T, H, K];
    beta is then the values' alone, [B, T, H, V] or [B, T, H, 1].
    """
    tokens, dtype = v.shape[1], v.dtype
    q, k, v, g = (in_chunks(x) for x in (q, k, v, g))
    q = q * q.shape[-1] ** -0.5
    G = g.cumsum(-2)
    to_end = (G[..., -1:, :] - G).exp()
    A = scores(q, k, G).tril()
    q_decayed, k_remaining, total = q * G.exp(), k * to_end, G[..., -1, :, None].exp()
    if beta is None:
        U = v
    else:
        beta = in_chunks(beta)
        e = k * (beta if erase is None else in_chunks(erase))
        both = torch.cat((beta * v, e * G.exp()), -1)
        U, W = torch.linalg.solve_triangular(scores(e, k, G), both, upper=False, unitriangular=True).split(
            (v.shape[-1], k.shape[-1]), -1
        )

    S, outputs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for c in range(q.shape[2]):
        u = U[:, :, c] if beta is None else U[:, :, c] - W[:, :, c] @ S
        outputs.append(q_decayed[:, :, c] @ S + A[:, :, c] @ u)
        S = total[:, :, c] * S + k_remaining[:, :, c].mT @ u
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens].to(dtype)
