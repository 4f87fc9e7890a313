# SPDX-License-Identifier: Apache-2.0
"""The chunk form of tokens that write several times, and its gradients, as ALGORITHM.md writes them: in
float64 PyTorch, against the recurrence and PyTorch's derivatives of it. Nothing of the library runs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

K, V = 7, 5
pytestmark = pytest.mark.cpu_only("it is PyTorch alone")


@dataclass
class Chunk:
    """One chunk of one head: C writes, of tokens that write n times, after `behind` writes of its first
    token; and the state before it."""

    q: torch.Tensor  # [tokens whose last write the chunk has, K]
    k: torch.Tensor  # [C, K]
    v: torch.Tensor  # [C, V]
    g: torch.Tensor  # [tokens whose first write the chunk has]
    beta: torch.Tensor  # [C]
    S: torch.Tensor  # [K, V]
    n: int
    behind: int

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor)}

    def but(self, **changes: torch.Tensor) -> Chunk:
        return Chunk(**{**vars(self), **changes})

    @property
    def first(self) -> list[int]:
        """The rows that decay, one for each of g."""
        return [row for row in range(len(self.k)) if (self.behind + row) % self.n == 0]

    @property
    def last(self) -> list[int]:
        """The row of each query."""
        return [row for row in range(len(self.k)) if (self.behind + row + 1) % self.n == 0]


def draw(C: int, n: int, behind: int) -> Chunk:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    empty = Chunk(*(torch.empty(C, 0),) * 6, n, behind)
    k = normal(C, K)
    return Chunk(
        normal(len(empty.last), K), k / k.norm(dim=-1, keepdim=True), normal(C, V),
        torch.nn.functional.logsigmoid(normal(len(empty.first))), normal(C).sigmoid(), normal(K, V), n,
        behind,
    )  # fmt: skip


CHUNKS = pytest.mark.parametrize(
    ("C", "n", "behind"), [(24, 1, 0), (24, 2, 0), (24, 3, 2), (25, 4, 3), (23, 5, 1), (6, 30, 7), (9, 12, 3)]
)


def recurrence(x: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    S, rows, decays = x.S, [], iter(x.g)
    for row in range(len(x.k)):
        if row in x.first:
            S = next(decays).exp() * S
        S = S + torch.outer(x.k[row], x.beta[row] * (x.v[row] - S.T @ x.k[row]))
        if row in x.last:
            rows.append(S.T @ x.q[len(rows)])
    return torch.stack(rows) if rows else x.v.new_zeros(0, V), S


class Operands:
    """What score, solve and read make of a chunk."""

    def __init__(self, x: Chunk) -> None:
        g = torch.zeros(len(x.k), dtype=torch.float64)
        g[x.first] = x.g
        self.gamma = g.cumsum(0).exp()[:, None]
        self.Q_, self.K_ = x.q * self.gamma[x.last], x.k * self.gamma  # Q~, K^
        self.Km = x.k / self.gamma  # K-
        self.Kp = x.k * self.gamma[-1] / self.gamma  # K+
        columns = torch.arange(len(x.k))
        self.reached = columns <= torch.tensor(x.last, dtype=torch.int64)[:, None]
        self.A = (self.Q_ @ self.Km.T) * self.reached
        self.L = (self.K_ @ self.Km.T).tril(-1)
        self.T = (torch.eye(len(x.k), dtype=torch.float64) + x.beta[:, None] * self.L).inverse() * x.beta
        self.U = self.T @ (x.v - self.K_ @ x.S)


@CHUNKS
def test_a_chunk_is_the_recurrence(C, n, behind):
    x = draw(C, n, behind)
    c = Operands(x)
    o, S = recurrence(x)
    torch.testing.assert_close(c.Q_ @ x.S + c.A @ c.U, o)
    torch.testing.assert_close(c.gamma[-1] * x.S + c.Kp.T @ c.U, S)


@CHUNKS
def test_the_map_of_a_chunk(C, n, behind):
    x = draw(C, n, behind)
    c = Operands(x)
    M = c.gamma[-1] * torch.eye(K, dtype=torch.float64) - c.Kp.T @ c.T @ c.K_
    torch.testing.assert_close(M @ x.S + c.Kp.T @ c.T @ x.v, recurrence(x)[1])


@CHUNKS
def test_gradients_of_a_chunk(C, n, behind):
    x = draw(C, n, behind)
    random = torch.Generator().manual_seed(1)
    d_o, Z = (torch.randn(s, generator=random, dtype=torch.float64) for s in [(len(x.q), V), (K, V)])
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.tensors().items()}
    o, S = recurrence(x.but(**leaves))
    loss = (o * d_o).sum() + (S * Z).sum()
    found = torch.autograd.grad(loss, leaves.values(), materialize_grads=True)
    wanted = dict(zip(leaves, found, strict=True))

    c = Operands(x)
    d_U = c.A.T @ d_o + c.Kp @ Z
    d_V = c.T.T @ d_U
    d_A, d_L = (d_o @ c.U.T) * c.reached, -(d_V @ c.U.T).tril(-1)
    made = {
        "q": c.gamma[x.last] * (d_o @ x.S.T + d_A @ c.Km),
        "k": c.gamma * (d_L @ c.Km - d_V @ x.S.T)
        + (d_A.T @ c.Q_ + d_L.T @ c.K_) / c.gamma
        + c.gamma[-1] / c.gamma * (c.U @ Z.T),
        "v": d_V,
        "beta": (d_V / x.beta[:, None] * c.U / x.beta[:, None]).sum(-1),
        "S": c.gamma[-1] * Z + c.Q_.T @ d_o - c.K_.T @ d_V,
    }
    # The paths of dg: rows that read S, columns that reach the end, pairs on both sides, S on its way.
    reads, writes = (c.Q_ * (d_o @ x.S.T)).sum(-1), -(c.K_ * (d_V @ x.S.T)).sum(-1)
    columns = (c.Kp * (c.U @ Z.T)).sum(-1)
    of_reads, of_writes = d_A * (c.Q_ @ c.Km.T), d_L * (c.K_ @ c.Km.T)
    through = c.gamma[-1] * (x.S * Z).sum()
    made["g"] = torch.stack(
        [
            sum(reads[i] + of_reads[i, :row].sum() for i, last in enumerate(x.last) if last >= row)
            + writes[row:].sum() + of_writes[row:, :row].sum() + columns[:row].sum() + through[0]
            for row in x.first
        ]
    ) if x.first else x.g.new_zeros(0)  # fmt: skip
    for name, tensor in wanted.items():
        torch.testing.assert_close(made[name], tensor, msg=name)
