# SPDX-License-Identifier: Apache-2.0
"""When context parallelism composes maps and when it passes states on: an estimate of each, from numbers that
all ranks know alike, since they must decide alike.

    ring                      = P prefills + (P - 1) messages of a state
    scan, if maps keep        = prepare + maps of pieces + exchange + carry of pieces
    scan, else                = maps + exchange + prefill
    exchange                  = a message of all maps that the last rank needs + (P - 1) products

Where maps keep nothing, the first rank makes none: its prefill stands in the first place instead, alone where
there are two ranks, since nobody wants the last one's map.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Microseconds. The defaults fit what 2 and 4 H200 took with their NVLink (docs/distributed.md)."""

    # Per token and value head, keys and values of 128 channels.
    prepare: float = 0.50e-3  # what does not depend on the state
    cut: float = 0.32e-3  # the way of the state through pieces that fill the device, and likewise their maps
    # Per token, of 128 channels: the way of the state through whole sequences, all heads side by side.
    walk: float = 15.5e-3
    call: float = 20.0  # the least that a call takes: launches, and a device that fills and empties
    message: float = 15.0  # the least that a message takes
    megabyte: float = 4.5  # a message's, 220 GB/s
    product: float = 5.0  # a map applied to a state


@dataclass(frozen=True)
class Size:
    ranks: int
    tokens: int  # of the fullest rank, all its sequences together
    lanes: int  # sequences that cross a border
    value_heads: int
    key_dim: int
    value_dim: int
    delta: bool
    keeps: bool  # a prefill goes on with what the maps prepared

    @property
    def state_bytes(self) -> int:
        return 4 * self.lanes * self.value_heads * self.value_dim * self.key_dim

    @property
    def map_rows(self) -> int:
        return self.key_dim if self.delta else 1

    @property
    def map_bytes(self) -> int:
        return 4 * self.lanes * self.value_heads * (self.value_dim + self.map_rows) * self.key_dim

    @property
    def wide_tokens(self) -> float:
        """In units of 128 keys."""
        return self.tokens * self.key_dim / 128

    @property
    def token_heads(self) -> float:
        return self.wide_tokens * self.value_heads


def walk_us(size: Size, channels: int, machine: Machine) -> float:
    """Whole sequences: heads and channels go side by side, until they fill the device."""
    return max(machine.walk * size.wide_tokens, machine.cut * size.token_heads * channels / 128)


def carry_us(size: Size, machine: Machine) -> float:
    """Whole, or cut into pieces that fill the device, which need their maps."""
    pieces = machine.cut * size.token_heads * size.value_dim / 128
    return min(walk_us(size, size.value_dim, machine), 2 * pieces)


def prefill_us(size: Size, machine: Machine) -> float:
    return machine.call + machine.prepare * size.token_heads + carry_us(size, machine)


def segment_us(size: Size, machine: Machine) -> float:
    """Never cut. The rows of M go the way of those of B; the diagonal of an additive rule is a product of
    decays."""
    channels = size.value_dim + (size.key_dim if size.delta else 0)
    return machine.call + machine.prepare * size.token_heads + walk_us(size, channels, machine)


def exchange_us(size: Size, machine: Machine) -> float:
    """The last rank's, which needs the state of the first and the maps of those between; an all-gather brings
    a little more."""
    received = size.state_bytes + (size.ranks - 2) * size.map_bytes
    return machine.message + machine.megabyte * received / 1e6 + (size.ranks - 1) * machine.product


def ring_us(size: Size, machine: Machine) -> float:
    hop = machine.message + machine.megabyte * size.state_bytes / 1e6
    return size.ranks * prefill_us(size, machine) + (size.ranks - 1) * hop


def scan_us(size: Size, machine: Machine) -> float:
    if size.keeps:
        pieces = machine.call + size.token_heads * machine.cut * size.value_dim / 128
        return size.token_heads * machine.prepare + pieces + exchange_us(size, machine) + pieces
    prefill = prefill_us(size, machine)
    first = prefill if size.ranks == 2 else max(prefill, segment_us(size, machine))
    return first + exchange_us(size, machine) + prefill


def choose(size: Size, machine: Machine | None = None) -> str:
    """The method that takes less; one rank has nothing to exchange."""
    machine = machine or Machine()
    return "scan" if size.ranks > 1 and scan_us(size, machine) < ring_us(size, machine) else "ring"
