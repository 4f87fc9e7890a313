# SPDX-License-Identifier: Apache-2.0
"""compose on a GPU: maps that were gathered, against the CPU's float64."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("joins", [None, (True, False, True, True), (True, True, True, False)])
@pytest.mark.parametrize("additive", [False, True], ids=["delta", "additive"])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 128), (64, 72), (100, 40), (30, 8), (1, 1), (256, 300)]
)
def test_maps_compose_as_in_float64(key_dim, value_dim, additive, joins):
    torch.manual_seed(0)
    on_cpu = {"device": "cpu"}
    m = torch.randn(4, 2, 3, 1 if additive else key_dim, key_dim, **on_cpu) / key_dim**0.5
    b = torch.randn(4, 2, 3, value_dim, key_dim, **on_cpu)
    joined = None if joins is None else torch.tensor(joins, **on_cpu)
    expected = torch.empty(2, 3, value_dim, key_dim, dtype=torch.float64, **on_cpu)
    torch.ops.cula.compose(m.double(), b.double(), expected, joined)

    def in_pieces(x: torch.Tensor) -> torch.Tensor:
        pieces = torch.full((*x.shape[:-1], -(-key_dim // 4) * 4), float("nan"), device="cuda")
        return pieces[..., :key_dim].copy_(x)

    # A state that lies between others and has its channels as rows.
    room = torch.full((2, 3, key_dim, value_dim + 3), -1.0, device="cuda")
    found = room[..., :value_dim].mT
    torch.ops.cula.compose(in_pieces(m), in_pieces(b), found, None if joined is None else joined.cuda())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert (room[..., value_dim:] == -1).all()


@pytest.mark.parametrize("rows", [64, 1], ids=["delta", "additive"])
def test_no_map_one_map_and_one_for_all(rows):
    m, b = torch.randn(1, 2, 3, rows, 64, device="cuda") / 8, torch.randn(1, 2, 3, 8, 64, device="cuda")
    state = torch.full((2, 3, 8, 64), float("nan"), device="cuda")
    torch.ops.cula.compose(m, b, state)
    assert torch.equal(state, b[0])
    torch.ops.cula.compose(m.expand(2, -1, -1, -1, -1), b.expand(2, -1, -1, -1, -1), state)
    after = b[0].double() @ m[0].double() if rows > 1 else b[0].double() * m[0].double()
    torch.testing.assert_close(state.double(), after + b[0], rtol=1e-5, atol=1e-5)
    torch.ops.cula.compose(m[:0], b[:0], state)
    assert not state.any()
    torch.ops.cula.compose(m[:, :0], b[:, :0], state[:0])


@pytest.mark.parametrize("offset", [1, 2])
def test_rows_that_are_not_whole_pieces_are_refused(offset):
    b = torch.zeros(2 * 4 * 8 + offset, device="cuda")[offset:].view(2, 1, 1, 4, 8)
    m = torch.zeros(2, 1, 1, 8, 8, device="cuda")
    with pytest.raises(ValueError, match="compose: b must have rows that start at multiples of 16 bytes"):
        torch.ops.cula.compose(m, b, torch.zeros(1, 1, 4, 8, device="cuda"))


def test_tensors_of_two_devices_are_refused():
    m, b = (torch.zeros(2, 1, 1, rows, 8, device="cuda") for rows in (8, 4))
    with pytest.raises(ValueError, match="compose: state must be on m's device, cuda:0, got cpu"):
        torch.ops.cula.compose(m, b, torch.zeros(1, 1, 4, 8, device="cpu"))
