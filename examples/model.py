# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model around one linear attention: enough to see a layer do its job on real
text.

The layers have fixed random weights. Each writes "after the previous byte came this one" into its state and
asks the state about the byte at hand, so the model learns the text while it reads; only the readout is
fitted, in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, rms_norm

import cula

BYTES = 256
PREFILL = {"kda": cula.cula_kda, "gdn": cula.cula_gdn, "gla": cula.cula_gla, "lightning": cula.cula_lightning}


@dataclass(frozen=True)
class Shape:
    layers: int = 3
    width: int = 512
    heads: int = 4
    head_dim: int = 128


@dataclass
class Memory:
    """All that a layer keeps of the past, for each of N sequences."""

    state: Tensor  # [N, heads, head_dim, head_dim] float32
    last: Tensor  # [N, width]: the layer's input at the latest byte


class Layer:
    def __init__(self, algorithm: str, shape: Shape, random: torch.Generator, device: torch.device) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=random) * columns**-0.5).to(device)

        self.algorithm, self.shape = algorithm, shape
        inner = shape.heads * shape.head_dim
        self.query = weight(inner, shape.width)
        self.key = self.query  # asking about a byte is asking where it was last seen
        self.value = weight(inner, shape.width)
        self.output = weight(shape.width, inner)
        gates = {"kda": inner, "gla": inner, "gdn": shape.heads, "lightning": 0}[algorithm]
        self.gate = weight(gates, shape.width) if gates else None
        self.beta = weight(shape.heads, shape.width) if algorithm in ("kda", "gdn") else None
        self.A_log = torch.zeros(shape.heads, device=device)
        # Heads forget at different speeds: half-lives from about 16 to 4096 bytes.
        self.decay = -(2.0 ** -torch.linspace(4.5, 12.5, shape.heads)).to(device)

    def empty_memory(self, sequences: int) -> Memory:
        heads, dim, device = self.shape.heads, self.shape.head_dim, self.query.device
        return Memory(
            state=torch.zeros(sequences, heads, dim, dim, device=device),
            last=torch.zeros(sequences, self.shape.width, device=device),
        )

    def attention_inputs(self, x: Tensor, before: Tensor) -> tuple[tuple[Tensor, ...], dict]:
        """q, k, v [B, T, heads, head_dim] in bfloat16, and the algorithm's gates, raw where the kernel makes
        them.

        before [B, T, width] is x one byte earlier.
        """
        heads, decay = self.shape.heads, self.decay
        q, k, v = (
            linear(source, weight).unflatten(-1, (heads, -1)).bfloat16()
            for source, weight in ((x, self.query), (before, self.key), (x, self.value))
        )
        if self.algorithm == "lightning":
            return (normalize(q, dim=-1), normalize(k, dim=-1), v), {"decay": decay}
        g = linear(x, self.gate)
        if self.algorithm == "gla":
            g = g.unflatten(-1, (heads, -1)).sigmoid() * decay[:, None]
            return (normalize(q, dim=-1), normalize(k, dim=-1), v), {"g": g}
        options = {
            "beta": linear(x, self.beta),
            "A_log": self.A_log,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
        }
        if self.algorithm == "gdn":
            return (q, k, v), {"g": g, "dt_bias": torch.log(-decay), **options}
        bias = torch.log(-decay / 5)[:, None].expand(-1, self.shape.head_dim).contiguous()
        return (q, k, v), {"g": g.unflatten(-1, (heads, -1)), "dt_bias": bias, "lower_bound": -5.0, **options}

    def previous(self, x: Tensor, memory: Memory, cu_seqlens: Tensor | None) -> Tensor:
        """x one byte earlier; a sequence's first byte sees the memory's last."""
        before = x.roll(1, dims=1)
        if cu_seqlens is None:
            before[:, 0] = memory.last
        else:
            nonempty = cu_seqlens[1:] > cu_seqlens[:-1]
            before[0, cu_seqlens[:-1][nonempty]] = memory.last[nonempty]
        return before

    def latest(self, x: Tensor, memory: Memory, cu_seqlens: Tensor | None) -> Tensor:
        """x at each sequence's last byte; an empty sequence keeps what it had."""
        if cu_seqlens is None:
            return x[:, -1]
        nonempty = (cu_seqlens[1:] > cu_seqlens[:-1])[:, None]
        return torch.where(nonempty, x[0, (cu_seqlens[1:] - 1).clamp(min=0)], memory.last)

    def finish(self, o: Tensor) -> Tensor:
        return linear(rms_norm(o.float(), o.shape[-1:]).flatten(-2), self.output)

    def prefill(self, x: Tensor, memory: Memory, cu_seqlens: Tensor | None = None) -> Tensor:
        """x [B, T, width], or with cu_seqlens sequences packed along T; the memory moves on."""
        x = rms_norm(x, x.shape[-1:])
        qkv, gates = self.attention_inputs(x, self.previous(x, memory, cu_seqlens))
        o, memory.state = PREFILL[self.algorithm](
            *qkv, **gates, initial_state=memory.state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        memory.last = self.latest(x, memory, cu_seqlens)
        return self.finish(o)

    def decode(self, x: Tensor, memory: Memory) -> Tensor:
        """x [N, 1, width]: one byte of each sequence; the state is updated in place."""
        x = rms_norm(x, x.shape[-1:])
        qkv, gates = self.attention_inputs(x, memory.last[:, None])
        o, _ = cula.cula_decode(*qkv, memory.state, mode=self.algorithm, **gates)
        memory.last = x[:, 0]
        return self.finish(o)


class Model:
    def __init__(self, algorithm: str, shape: Shape, device: torch.device, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(BYTES, shape.width, generator=random).to(device)
        self.layers = [Layer(algorithm, shape, random, device) for _ in range(shape.layers)]
        self.readout = torch.zeros(BYTES, shape.width, device=device)

    def empty_memory(self, sequences: int = 1) -> list[Memory]:
        return [layer.empty_memory(sequences) for layer in self.layers]

    def prefill(self, text: Tensor, memory: list[Memory], cu_seqlens: Tensor | None = None) -> Tensor:
        """Features [B, T, width] of text [B, T]."""
        x = self.embedding[text]
        for layer, own in zip(self.layers, memory, strict=True):
            x = x + layer.prefill(x, own, cu_seqlens)
        return rms_norm(x, x.shape[-1:])

    def decode(self, text: Tensor, memory: list[Memory]) -> Tensor:
        """Features [N, width] of the next byte of each sequence, text [N]."""
        x = self.embedding[text][:, None]
        for layer, own in zip(self.layers, memory, strict=True):
            x = x + layer.decode(x, own)
        return rms_norm(x, x.shape[-1:])[:, 0]

    def fit_readout(self, features: Tensor, following: Tensor) -> None:
        """Least squares from features [T, width] to the byte that follows, with a little shrinkage."""
        width = features.shape[-1]
        moment = features.T @ features + len(features) * 1e-3 * torch.eye(width, device=features.device)
        target = torch.zeros_like(self.readout).index_add_(0, following, features)
        self.readout = torch.linalg.solve(moment, target.T).T

    def next_byte(self, features: Tensor) -> Tensor:
        return linear(features, self.readout).argmax(-1)
