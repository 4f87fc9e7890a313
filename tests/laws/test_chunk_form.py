# SPDX-License-Identifier: Apache-2.0
"""The chunk form of the delta rule with erase strengths, and its gradients, as ALGORITHM.md writes them: in
float64 PyTorch, against the recurrence and PyTorch's derivatives of it. Nothing of the library runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

C, K, V = 24, 7, 5
pytestmark = pytest.mark.cpu_only("it is PyTorch alone")


@dataclass
class Chunk:
    """One chunk of one head, and the state before it."""

    q: torch.Tensor  # [C, K], as are k, g and b
    k: torch.Tensor
    v: torch.Tensor  # [C, V], as is beta
    g: torch.Tensor
    b: torch.Tensor
    beta: torch.Tensor
    S: torch.Tensor  # [K, V]

    def tensors(self) -> dict[str, torch.Tensor]:
        return vars(self)


def draw(same_strengths: bool = False) -> Chunk:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    q, k, v, g, b, beta, S = (
        normal(*shape) for shape in [(C, K), (C, K), (C, V), (C, K), (C, K), (C, V), (K, V)]
    )
    b, beta = b.sigmoid(), beta.sigmoid()
    if same_strengths:
        b = beta[:, :1].expand(C, K)
        beta = beta[:, :1].expand(C, V)
    return Chunk(q, k / k.norm(dim=-1, keepdim=True), v, torch.nn.functional.logsigmoid(g), b, beta, S)


def recurrence(x: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    S, rows = x.S, []
    for t in range(C):
        decayed = x.g[t].exp()[:, None] * S
        u = x.beta[t] * x.v[t] - decayed.T @ (x.b[t] * x.k[t])
        S = decayed + torch.outer(x.k[t], u)
        rows.append(S.T @ x.q[t])
    return torch.stack(rows), S


class Operands:
    """What score, solve and read make of a chunk."""

    def __init__(self, x: Chunk) -> None:
        self.gamma = x.g.cumsum(0).exp()
        self.E = x.b * x.k
        self.Q_, self.E_ = x.q * self.gamma, self.E * self.gamma  # Q~, E^
        self.K_ = x.k / self.gamma  # K-
        self.Kp = x.k * self.gamma[-1] / self.gamma  # K+
        self.A = (self.Q_ @ self.K_.T).tril()
        self.L = (self.E_ @ self.K_.T).tril(-1)
        self.T = (torch.eye(C, dtype=torch.float64) + self.L).inverse()
        self.U = self.T @ (x.beta * x.v - self.E_ @ x.S)


def test_a_chunk_is_the_recurrence():
    x = draw()
    c = Operands(x)
    o, S = recurrence(x)
    torch.testing.assert_close(c.Q_ @ x.S + c.A @ c.U, o)
    torch.testing.assert_close(c.gamma[-1, :, None] * x.S + c.Kp.T @ c.U, S)


def test_the_map_of_a_chunk_has_no_write_strength():
    x = draw()
    c = Operands(x)
    M, B = c.gamma[-1].diag() - c.Kp.T @ c.T @ c.E_, c.Kp.T @ c.T @ (x.beta * x.v)
    torch.testing.assert_close(M @ x.S + B, recurrence(x)[1])


def test_one_strength_is_kda():
    x = draw(same_strengths=True)
    S = x.S
    for t in range(C):
        decayed = x.g[t].exp()[:, None] * S
        S = decayed + torch.outer(x.k[t], x.beta[t, 0] * (x.v[t] - decayed.T @ x.k[t]))
    torch.testing.assert_close(recurrence(x)[1], S)


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
        states.append(recurrence_step(x, t, states[-1]))
    made = {name: torch.zeros_like(tensor) for name, tensor in x.tensors().items()}
    Z = of.Z
    for t in reversed(range(C)):
        alpha, e, decayed = x.g[t].exp(), x.b[t] * x.k[t], x.g[t].exp()[:, None] * states[t]
        u = x.beta[t] * x.v[t] - decayed.T @ e
        made["q"][t] = states[t + 1] @ of.d_o[t]
        Z = Z + torch.outer(x.q[t], of.d_o[t])
        d_u, d_k = Z.T @ x.k[t], Z @ u
        d_e = -decayed @ d_u
        made["beta"][t], made["v"][t] = x.v[t] * d_u, x.beta[t] * d_u
        made["b"][t], made["k"][t] = d_e * x.k[t], d_k + d_e * x.b[t]
        Z = Z - torch.outer(e, d_u)
        made["g"][t] = (Z * decayed).sum(-1)
        Z = alpha[:, None] * Z
    made["S"] = Z
    for name, wanted in derivatives(x, of).items():
        torch.testing.assert_close(made[name], wanted, msg=name)


def recurrence_step(x: Chunk, t: int, S: torch.Tensor) -> torch.Tensor:
    decayed = x.g[t].exp()[:, None] * S
    return decayed + torch.outer(x.k[t], x.beta[t] * x.v[t] - decayed.T @ (x.b[t] * x.k[t]))


def test_gradients_of_a_chunk():
    x, of = draw(), outer()
    c = Operands(x)
    d_U = c.A.T @ of.d_o + c.Kp @ of.Z
    d_V = c.T.T @ d_U
    d_A, d_L = (of.d_o @ c.U.T).tril(), -(d_V @ c.U.T).tril(-1)
    d_Q_, d_E_ = of.d_o @ x.S.T + d_A @ c.K_, -d_V @ x.S.T + d_L @ c.K_
    d_K_, d_Kp = d_A.T @ c.Q_ + d_L.T @ c.E_, c.U @ of.Z.T
    d_E = c.gamma * d_E_
    made = {
        "q": c.gamma * d_Q_,
        "k": d_K_ / c.gamma + c.gamma[-1] / c.gamma * d_Kp + d_E * x.b,
        "v": x.beta * d_V,
        "beta": x.v * d_V,
        "b": d_E * x.k,
        "S": c.gamma[-1, :, None] * of.Z + c.Q_.T @ of.d_o - c.E_.T @ d_V,
    }
    # The paths of dg: rows that read S, columns that reach the end, pairs on both sides, S on its way.
    rows = c.Q_ * (of.d_o @ x.S.T) - c.E_ * (d_V @ x.S.T)
    columns = c.Kp * d_Kp
    pairs = torch.einsum("ijc,jc->ijc", c.Q_[:, None] * d_A[..., None] + c.E_[:, None] * d_L[..., None], c.K_)
    through = c.gamma[-1] * (x.S * of.Z).sum(-1)
    made["g"] = torch.stack(
        [rows[t:].sum(0) + columns[:t].sum(0) + pairs[t:, :t].sum((0, 1)) + through for t in range(C)]
    )
    for name, wanted in derivatives(x, of).items():
        torch.testing.assert_close(made[name], wanted, msg=name)
