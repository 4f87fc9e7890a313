# SPDX-License-Identifier: Apache-2.0
"""What a rank says of its tokens in a scan: their map of each lane's state, or in a backward pass of its
gradient, in one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .. import _ops
from .calls import Call


@dataclass(frozen=True)
class Message:
    """M transposed, or the diagonal of an additive rule's, and behind it B. Of the first rank's message B
    alone counts.

    Of a gradient the map is that of M transposed, so a message has M itself, and as B the gradient that the
    rank's own tokens give; of the last rank's B alone counts.

    K' is K or the next multiple of four: GPUs read rows in pieces of 16 bytes.
    """

    whole: Tensor  # [numbers of both]
    m_shape: tuple[int, int, int, int]  # lanes, HV, K or 1, K'
    b_shape: tuple[int, int, int, int]  # lanes, HV, V, K'
    key_dim: int
    delta: bool

    @staticmethod
    def empty(call: Call, lanes: int) -> Message:
        (heads, value_dim), key_dim = call.v.shape[2:], call.q.shape[3]
        pitch = -(-key_dim // 4) * 4
        m_shape, b_shape = (
            (lanes, heads, key_dim if call.delta else 1, pitch),
            (lanes, heads, value_dim, pitch),
        )
        whole = call.q.new_empty(prod(m_shape) + prod(b_shape), dtype=call.state_dtype)
        return Message(whole, m_shape, b_shape, key_dim, call.delta)

    @property
    def m(self) -> Tensor:
        return self.ms_of(self.whole[None])[0]

    @property
    def written_m(self) -> Tensor:
        """m as `cula_segment` writes it."""
        return self.m.mT if self.delta else self.m[:, :, 0]

    @property
    def turned_m(self) -> Tensor:
        """m of the message in the other direction."""
        return self.m.mT if self.delta else self.m

    @property
    def b(self) -> Tensor:
        return self.bs_of(self.whole[None])[0]

    @property
    def b_count(self) -> int:
        """How many numbers B has in `whole`, at its end."""
        return prod(self.b_shape)

    def ms_of(self, messages: Tensor) -> Tensor:
        """m of each: `messages` is `[P, numbers of both]`."""
        return messages[:, : prod(self.m_shape)].view(len(messages), *self.m_shape)[..., : self.key_dim]

    def bs_of(self, messages: Tensor) -> Tensor:
        return messages[:, prod(self.m_shape) :].view(len(messages), *self.b_shape)[..., : self.key_dim]

    def start_from(self, state: Tensor) -> None:
        """The state that the tokens start from, `[lanes, HV, V, K]`, goes into B: then all start from
        zero."""
        both = self.whole.new_empty((2, *self.whole.shape))
        self.bs_of(both)[0] = state
        both[1] = self.whole
        self.b.copy_(self.compose(both, None))

    def compose(self, messages: Tensor, joins: Tensor | None) -> Tensor:
        """What the B of the first message becomes under the maps of the others, in order; `messages` as in
        `ms_of`.

        A rank where a sequence begins has put the state that it starts from into its B, so all start from
        zero. Where `joins`, `[P]`, is False, the map belongs to another sequence, as those before it do.
        """
        if len(messages) == 1 and joins is None:
            return self.bs_of(messages)[0]
        state = torch.empty_like(self.b, memory_format=torch.contiguous_format)
        _ops.compose(self.ms_of(messages), self.bs_of(messages), state, joins)
        return state
