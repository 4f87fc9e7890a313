# SPDX-License-Identifier: Apache-2.0
"""The chunk form of the rule with low-rank keys, and its gradients, as ALGORITHM.md writes them: in float64
PyTorch, against the recurrence and PyTorch's derivatives of it. Nothing of the library runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

C, K, V = 24, 7, 5
pytestmark = pytest.mark.cpu_only("it is PyTorch alone")


@dataclass
class Chunk:
    """One chunk of one head, and the state before it."""

    q: torch.Tensor  # [C, K], as are k, g, a and b
    k: torch.Tensor
    v: torch.Tensor  # [C, V]
    g: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    S: torch.Tensor  # [K, V]

    def tensors(self) -> dict[str, torch.Tensor]:
        return vars(self)


def draw() -> Chunk:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k, v, g, a, b, S = (
        normal(*shape) for shape in [(C, K), (C, K), (C, V), (C, K), (C, K), (C, K), (K, V)]
    )
    return Chunk(q, k, v, torch.nn.functional.logsigmoid(g), a / K**0.5, b / K**0.5, S)


def step(x: Chunk, t: int, S: torch.Tensor) -> torch.Tensor:
    read = S.T @ x.a[t]
    return x.g[t].exp()[:, None] * S + torch.outer(x.b[t], read) + torch.outer(x.k[t], x.v[t])


def recurrence(x: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    S, rows = x.S, []
    for t in range(C):
        S = step(x, t, S)
        rows.append(S.T @ x.q[t])
    return torch.stack(rows), S


class Operands:
    """What score, solve and read make of a chunk."""

    def __init__(self, x: Chunk) -> None:
        self.gamma = x.g.cumsum(0).exp()
        self.before = (x.g.cumsum(0) - x.g).exp()  # of the tokens before
        self.Q_, self.F_ = x.q * self.gamma, x.a * self.before  # Q~, F^
        self.K_, self.H_ = x.k / self.gamma, x.b / self.gamma  # K-, H-
        self.Kp, self.Hp = (y * self.gamma[-1] / self.gamma for y in (x.k, x.b))  # K+, H+
        self.A_k, self.A_h = ((self.Q_ @ y.T).tril() for y in (self.K_, self.H_))
        self.L_k, self.L_h = ((self.F_ @ y.T).tril(-1) for y in (self.K_, self.H_))
        self.T = (torch.eye(C, dtype=torch.float64) - self.L_h).inverse()
        self.R = self.T @ (self.F_ @ x.S + self.L_k @ x.v)


def test_a_chunk_is_the_recurrence():
    x = draw()
    c = Operands(x)
    o, S = recurrence(x)
    torch.testing.assert_close(c.Q_ @ x.S + c.A_h @ c.R + c.A_k @ x.v, o)
    torch.testing.assert_close(c.gamma[-1, :, None] * x.S + c.Hp.T @ c.R + c.Kp.T @ x.v, S)


def test_the_map_of_a_chunk():
    x = draw()
    c = Operands(x)
    M, B = c.gamma[-1].diag() + c.Hp.T @ c.T @ c.F_, c.Kp.T @ x.v + c.Hp.T @ c.T @ c.L_k @ x.v
    torch.testing.assert_close(M @ x.S + B, recurrence(x)[1])


def test_removing_what_lies_along_a_key_is_kda():
    """The delta rule reads with its key what has decayed: a is -alpha o k, and b is beta k."""
    x = draw()
    k = x.k / x.k.norm(dim=-1, keepdim=True)
    beta = x.v[:, :1].sigmoid()
    S = x.S
    for t in range(C):
        decayed = x.g[t].exp()[:, None] * S
        S = decayed + torch.outer(k[t], beta[t] * (x.v[t] - decayed.T @ k[t]))
    same = Chunk(x.q, beta * k, x.v, x.g, -x.g.exp() * k, beta * k, x.S)
    torch.testing.assert_close(recurrence(same)[1], S)


@dataclass
class Outer:
    d_o: torch.Tensor  # [C, V]
    Z: torch.Tensor  # [K, V], the gradient of the state after the chunk


def outer() -> Outer:
    random = torch.Generator().manual_seed(1)
    return Outer(*(torch.randn(s, generator=random, dtype=torch.float64) for s in [(C, V), (K, V)]))


def derivatives(x: Chunk, of: Outer) -> dict[str, torch.Tensor]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.tensors().items()}
    o, S = recurrence(Chunk(**leaves))
    found = torch.autograd.grad((o, S), leaves.values(), (of.d_o, of.Z))
    return dict(zip(leaves, found, strict=True))


def test_gradients_token_by_token():
    x, of = draw(), outer()
    states = [x.S]
    for t in range(C):
        states.append(step(x, t, states[-1]))
    made = {name: torch.zeros_like(tensor) for name, tensor in x.tensors().items()}
    Z = of.Z
    for t in reversed(range(C)):
        before, alpha = states[t], x.g[t].exp()
        made["q"][t] = states[t + 1] @ of.d_o[t]
        Z = Z + torch.outer(x.q[t], of.d_o[t])
        read, d_read = before.T @ x.a[t], Z.T @ x.b[t]
        made["v"][t], made["k"][t] = Z.T @ x.k[t], Z @ x.v[t]
        made["a"][t], made["b"][t] = before @ d_read, Z @ read
        made["g"][t] = alpha * (Z * before).sum(-1)
        Z = alpha[:, None] * Z + torch.outer(x.a[t], d_read)
    made["S"] = Z
    for name, wanted in derivatives(x, of).items():
        torch.testing.assert_close(made[name], wanted, msg=name)


def test_gradients_of_a_chunk():
    x, of = draw(), outer()
    c = Operands(x)
    d_R = c.A_h.T @ of.d_o + c.Hp @ of.Z
    d_X = c.T.T @ d_R
    d_A_k, d_A_h = ((of.d_o @ y.T).tril() for y in (x.v, c.R))
    d_L_k, d_L_h = ((d_X @ y.T).tril(-1) for y in (x.v, c.R))
    d_Q_ = of.d_o @ x.S.T + d_A_k @ c.K_ + d_A_h @ c.H_
    d_F_ = d_X @ x.S.T + d_L_k @ c.K_ + d_L_h @ c.H_
    d_K_, d_Kp = d_A_k.T @ c.Q_ + d_L_k.T @ c.F_, x.v @ of.Z.T
    d_H_, d_Hp = d_A_h.T @ c.Q_ + d_L_h.T @ c.F_, c.R @ of.Z.T
    to_end = c.gamma[-1] / c.gamma
    made = {
        "q": c.gamma * d_Q_,
        "k": d_K_ / c.gamma + to_end * d_Kp,
        "v": c.A_k.T @ of.d_o + c.Kp @ of.Z + c.L_k.T @ d_X,
        "a": c.before * d_F_,
        "b": d_H_ / c.gamma + to_end * d_Hp,
        "S": c.gamma[-1, :, None] * of.Z + c.Q_.T @ of.d_o + c.F_.T @ d_X,
    }

    # The paths of dg. A row of F reads before its token's decay, so that it crosses those before alone.
    def pairs(rows: torch.Tensor, of_k: torch.Tensor, of_h: torch.Tensor) -> torch.Tensor:
        columns = of_k[..., None] * c.K_[None] + of_h[..., None] * c.H_[None]
        return rows[:, None] * columns

    of_q, of_f = c.Q_ * (of.d_o @ x.S.T), c.F_ * (d_X @ x.S.T)
    pairs_q, pairs_f = pairs(c.Q_, d_A_k, d_A_h), pairs(c.F_, d_L_k, d_L_h)
    columns = c.Kp * d_Kp + c.Hp * d_Hp
    through = c.gamma[-1] * (x.S * of.Z).sum(-1)
    made["g"] = torch.stack(
        [
            of_q[t:].sum(0) + of_f[t + 1 :].sum(0) + columns[:t].sum(0) + through
            + pairs_q[t:, :t].sum((0, 1)) + pairs_f[t + 1 :, :t].sum((0, 1))
            for t in range(C)
        ]
    )  # fmt: skip
    for name, wanted in derivatives(x, of).items():
        torch.testing.assert_close(made[name], wanted, msg=name)
