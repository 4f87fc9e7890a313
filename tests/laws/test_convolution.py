# SPDX-License-Identifier: Apache-2.0
"""The short convolution: every option, layout, width and target by the error rule, and the same bits however
a call is divided."""

from __future__ import annotations

import itertools

import pytest
import torch

from cula import conv
from cula_testing import layers
from cula_testing.compare import assert_accurate, assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
kernels = pytest.mark.cpu_only("the kernels are those of CPUs")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw, device="cpu").to(torch.get_default_device(), dtype)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The numbers of x `[B, D, T]` in another order in memory."""
    if layout == "channels last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice of channels":
        wide = torch.full((*x.transpose(1, 2).shape[:2], x.shape[1] + 24), torch.nan, dtype=x.dtype)
        wide[..., 8 : 8 + x.shape[1]] = x.transpose(1, 2)
        return wide[..., 8 : 8 + x.shape[1]].transpose(1, 2)
    if layout == "every other":
        wide = torch.full((*x.shape[:2], 2 * x.shape[2]), torch.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x.contiguous()


LAYOUTS = ["channels first", "channels last", "slice of channels", "every other"]


def operator(
    x: torch.Tensor, weight: torch.Tensor, *given: object, target: str | None = None, silu=True, columns=0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(bias, state, cu_seqlens, seq_idx) in `given`; y as `[B, D, T]`."""
    four = (*given, *[None] * (4 - len(given)))
    y, final = torch.ops.cula.causal_conv1d(x.transpose(1, 2), weight, *four, silu, columns, target)
    return y.transpose(1, 2), final


def check(what, found, inputs, **options) -> None:
    """`found` (y, final state) against the oracle; final states are copies, exactly."""
    exact = [None if x is None else x.double() for x in inputs]
    y, final = layers.convolve(*exact, **options)
    naive, _ = layers.convolve(*inputs, **options)
    assert_accurate(what, found[0], y, naive, inputs[0].dtype)
    if found[1] is not None:
        assert torch.equal(found[1].double(), final), what


@kernels
@pytest.mark.parametrize("isa", layers.TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 16])
def test_any_shape(isa, dtype, width):
    for channels, tokens in itertools.product((5, 144), (0, 2, 33, 70)):
        x, weight = drawn(2, channels, tokens, dtype=dtype), drawn(channels, width, dtype=dtype, seed=1)
        bias, state = drawn(channels, dtype=dtype), drawn(2, channels, width + 1, dtype=dtype)
        for layout in LAYOUTS[:2]:
            found = operator(laid_out(x, layout), weight, bias, state, target=isa, columns=width + 2)
            check(f"{channels} x {tokens}, {layout}", found, (x, weight, bias, state), columns=width + 2)


@kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout(layout, dtype):
    x, weight = drawn(3, 80, 300, dtype=dtype), drawn(80, 8, dtype=dtype)[:, ::2]
    bias, state = (
        drawn(160, dtype=dtype)[::2],
        drawn(5, 80, 3, dtype=dtype).transpose(0, 1)[:, :3].transpose(0, 1),
    )
    y, final = operator(laid_out(x, layout), weight, bias, state, columns=3)
    check(layout, (y, final), (x, weight, bias, state), columns=3)
    last = 2 if layout == "channels first" else 1
    assert y.stride(last) == 1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("width", [2, 4, 5])
def test_the_function(dtype, activation, width):
    """On any device: kernels, other libraries, or plain PyTorch."""
    x, weight = drawn(2, 48, 37, dtype=dtype), drawn(48, width, dtype=dtype)
    bias, state = drawn(48, dtype=dtype), drawn(2, 48, width - 1, dtype=dtype)
    for given in itertools.product((None, bias), (None, state)):
        found = conv.causal_conv1d_fn(
            laid_out(x, "channels last"), weight, given[0], initial_states=given[1], activation=activation,
            return_final_states=True,
        )  # fmt: skip
        check(str(given), found, (x, weight, *given), act=activation is not None, columns=width - 1)
        alone = conv.causal_conv1d_fn(x, weight, given[0], None, given[1], activation=activation)
        check(str(given), (alone, None), (x, weight, *given), act=activation is not None)
    out = torch.empty_like(state)
    _, final = conv.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=out)
    assert final is out
    assert torch.equal(out, x[..., x.shape[2] - (width - 1) :])


LENGTHS = (1, 0, 2, 40, 3, 300, 0, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS[:3])
class TestPacked:
    def cu_seqlens(self, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=kind)

    def test_sequences_do_not_mix(self, dtype, layout):
        x, weight, bias = (
            drawn(*shape, dtype=dtype) for shape in ((1, 48, sum(LENGTHS) + 9), (48, 4), (48,))
        )
        state = drawn(len(LENGTHS), 48, 3, dtype=dtype)
        for kind in (torch.int32, torch.int64):
            found = conv.causal_conv1d_fn(
                laid_out(x, layout), weight, bias, initial_states=state, return_final_states=True,
                activation="silu", query_start_loc=self.cu_seqlens(kind),
            )  # fmt: skip
            check(str(kind), found, (x, weight, bias, state), lengths=LENGTHS, columns=3)
            assert not found[0][..., sum(LENGTHS) :].any()

    def test_numbers_of_tokens_are_lengths(self, dtype, layout):
        """And a negative number is padding, wherever it is."""
        lengths = (4, 9, 1, 30, 6)
        x, weight = drawn(2, 48, 50, dtype=dtype), drawn(48, 4, dtype=dtype)
        numbers = torch.repeat_interleave(torch.tensor([3, 1, -1, 8, 3]), torch.tensor(lengths)).expand(2, -1)
        y = conv.causal_conv1d_fn(laid_out(x, layout), weight, seq_idx=numbers, activation="silu")
        for row in range(2):
            exact = [each.double() for each in (x[row : row + 1], weight)]
            oracle, _ = layers.convolve(*exact, lengths=lengths)
            naive, _ = layers.convolve(x[row : row + 1], weight, lengths=lengths)
            oracle[..., 13:14] = 0
            assert_accurate("y", y[row : row + 1], oracle, naive, dtype)
        assert not y[..., 13].any()

    def test_states_in_a_pool(self, dtype, layout):
        x, weight = drawn(1, 48, sum(LENGTHS), dtype=dtype), drawn(48, 4, dtype=dtype)
        pool = drawn(20, 48, 4, dtype=dtype)
        slots = torch.tensor([7, 2, -1, 11, 0, 5, 9, 19], dtype=torch.int32)  # 5 is null
        known = torch.tensor([True, False, True, False, True, True, True, False])
        before = pool.clone()
        y = conv.causal_conv1d_fn(
            laid_out(x, layout).squeeze(0), weight, activation="silu", query_start_loc=self.cu_seqlens(),
            conv_states=pool, cache_indices=slots, has_initial_state=known, pad_slot_id=5,
        )  # fmt: skip
        state = torch.where(known[:, None, None], before[slots.clamp(min=0).long()], 0)
        oracle, final = layers.convolve(x.double(), weight.double(), None, state.double(), LENGTHS, columns=4)
        naive, _ = layers.convolve(x, weight, None, state, LENGTHS)
        null = [2, 5]
        ends = self.cu_seqlens().tolist()
        for n in null:
            oracle[..., ends[n] : ends[n + 1]] = 0
        assert_accurate("y", y[None], oracle, naive, dtype)
        expected = before.clone()
        real = [n for n in range(len(LENGTHS)) if n not in null]
        expected[slots[real].long()] = final[real].to(dtype)
        assert_same_bits("pool", pool, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
class TestTheNextTokens:
    def by_prompt(self, x, weight, bias, state, columns) -> tuple[torch.Tensor, ...]:
        exact = [None if each is None else each.double() for each in (x, weight, bias, state)]
        oracle, final = layers.convolve(*exact, columns=columns)
        return oracle, layers.convolve(x, weight, bias, state)[0], final

    @pytest.mark.parametrize("width", [2, 3, 4, 6])
    @pytest.mark.parametrize("order", ["columns", "channels"])
    def test_of_one_and_several_tokens(self, dtype, width, order):
        for tokens, columns, channels in itertools.product((1, 2, 9), (4, 7), (144, 9)):
            if columns < width - 1:
                continue
            x, weight, bias = (
                drawn(*s, dtype=dtype) for s in ((3, channels, tokens), (channels, width), (channels,))
            )
            state = drawn(3, channels, columns, dtype=dtype)
            if order == "channels":
                state = laid_out(state, "channels last")
            oracle, naive, final = self.by_prompt(x, weight, bias, state, columns)
            version = state._version
            y = conv.causal_conv1d_update(x, state, weight, bias, "silu")
            assert_accurate(f"{tokens} {columns}", y, oracle, naive, dtype)
            assert torch.equal(state.double(), final)
            assert state._version > version

    def test_of_rows_without_a_token_dimension(self, dtype):
        x, weight, state = (drawn(*s, dtype=dtype) for s in ((3, 64), (64, 4), (3, 64, 4)))
        other = state.clone()
        y = conv.causal_conv1d_update(x, state, weight)
        assert y.shape == x.shape
        assert_same_bits("y", y, conv.causal_conv1d_update(x[..., None], other, weight)[..., 0])
        assert_same_bits("state", state, other)

    @pytest.mark.parametrize("kind", [torch.int32, torch.int64])
    def test_of_slots_of_a_pool(self, dtype, kind):
        """Null rows have no result, and the other slots stay as they are."""
        x, weight, pool = (drawn(*s, dtype=dtype) for s in ((5, 64, 2), (64, 4), (9, 64, 4)))
        slots = torch.tensor([8, -1, 3, 6, 0], dtype=kind)
        real, before = [0, 2, 4], pool.clone()
        y = conv.causal_conv1d_update(x, pool, weight, None, "silu", conv_state_indices=slots, pad_slot_id=6)
        oracle, naive, final = self.by_prompt(x[real], weight, None, before[slots[real].long()], 4)
        assert_accurate("y", y[real], oracle, naive, dtype)
        assert not y[[1, 3]].any()
        before[slots[real].long()] = final.to(dtype)
        assert_same_bits("pool", pool, before)

    @pytest.mark.parametrize("columns", [3, 4, 7])
    @pytest.mark.parametrize("tokens", [1, 3, 8])
    def test_of_a_ring(self, dtype, columns, tokens):
        """Token p is in column p mod S."""
        weight, rows = drawn(64, 4, dtype=dtype), 3
        past, x = drawn(rows, 64, 30, dtype=dtype), drawn(rows, 64, tokens, dtype=dtype)
        seen = torch.tensor([30, 17, 2], dtype=torch.int32)
        ring = torch.zeros(rows, 64, columns, dtype=dtype)
        expected = ring.clone()
        for n, count in enumerate(seen.tolist()):
            everything = torch.cat([past[n, :, :count], x[n]], 1)
            for p in range(max(0, count - columns), count):
                ring[n, :, p % columns] = past[n, :, p]
            for p in range(max(0, count + tokens - columns), count + tokens):
                expected[n, :, p % columns] = everything[:, p]
        wanted = [
            self.by_prompt(x[n : n + 1], weight, None, past[n : n + 1, :, :count], 3)[:2]
            for n, count in enumerate(seen.tolist())
        ]
        y = conv.causal_conv1d_update(x, ring, weight, None, "silu", cache_seqlens=seen)
        for n, (oracle, naive) in enumerate(wanted):
            assert_accurate("y", y[n : n + 1], oracle, naive, dtype)
        assert_same_bits("ring", ring, expected)

    def test_of_packed_rows(self, dtype):
        lengths = (1, 3, 0, 6)
        x, weight, pool = (drawn(*s, dtype=dtype) for s in ((12, 64), (64, 4), (6, 64, 4)))
        slots, before = torch.tensor([4, 0, 2, 5], dtype=torch.int32), pool.clone()
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        y = conv.causal_conv1d_update(
            x, pool, weight, None, "silu", conv_state_indices=slots, query_start_loc=cu_seqlens
        )
        state = before[slots.long()]
        oracle, final = layers.convolve(
            x.T[None].double(), weight.double(), None, state.double(), lengths, columns=4
        )
        naive, _ = layers.convolve(x.T[None], weight, None, state, lengths)
        assert_accurate("y", y.T[None], oracle, naive, dtype)
        before[slots.long()] = final.to(dtype)
        assert_same_bits("pool", pool, before)
        assert not y[10:].any()

    def test_of_drafts(self, dtype):
        """After each verification the window ends with the last accepted token, whichever that is."""
        width, drafts, rows = 4, 3, 4
        weight = drawn(64, width, dtype=dtype)
        state = drawn(rows, 64, width - 1 + drafts - 1, dtype=dtype)
        history = state[..., : width - 1].clone()
        accepted = torch.ones(rows, dtype=torch.int32)
        for step in range(4):
            x = drawn(rows, 64, drafts, dtype=dtype, seed=step)
            oracle, naive, _ = self.by_prompt(x, weight, None, history, 3)
            y = conv.causal_conv1d_update(x, state, weight, None, "silu", num_accepted_tokens=accepted)
            assert_accurate("y", y, oracle, naive, dtype)
            accepted = torch.tensor([1 + (step + n) % drafts for n in range(rows)], dtype=torch.int32)
            everything = torch.cat([history, x], 2)
            history = torch.stack(
                [everything[n, :, a : a + width - 1] for n, a in enumerate(accepted.tolist())]
            )


class TestGradients:
    def both(self, found, oracle, inputs, budget=3.0) -> None:
        """Of functions of the inputs that return (y, final state); weights of the sum are drawn."""
        made = []
        for function, dtype in ((found, None), (oracle, torch.float64), (oracle, None)):
            own = [each if each is None else each.to(dtype or each.dtype) for each in inputs]
            own = [each if each is None else each.detach().clone().requires_grad_() for each in own]
            outputs = [each for each in function(*own) if each is not None]
            upstream = [drawn(*each.shape).to(inputs[0].dtype).to(each.dtype) for each in outputs]
            torch.autograd.backward(outputs, upstream)
            made.append([None if each is None else each.grad for each in own])
        for at, (ours, exact, naive) in enumerate(zip(*made, strict=True)):
            if ours is not None:
                assert_accurate(f"input {at}", ours, exact, naive, inputs[0].dtype, budget=budget)

    @kernels
    @pytest.mark.parametrize("isa", layers.TARGETS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
    def test_of_every_input(self, isa, dtype, width):
        for channels, tokens, silu in ((5, 3, True), (144, 300, True), (33, 70, False), (16, 1, True)):
            inputs = [
                drawn(*shape, dtype=dtype)
                for shape in ((2, channels, tokens), (channels, width), (channels,), (2, channels, width + 1))
            ]
            self.both(
                lambda *given, silu=silu: operator(*given, target=isa, silu=silu, columns=width + 2),
                lambda *given, silu=silu: layers.convolve(*given, act=silu, columns=width + 2),
                inputs,
            )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("layout", LAYOUTS[:2])
    def test_of_packed_sequences(self, dtype, layout):
        inputs = [
            drawn(*shape, dtype=dtype) for shape in ((1, 40, sum(LENGTHS) + 3), (40, 4), (40,), (8, 40, 3))
        ]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)])

        def ours(x, weight, bias, state):
            return conv.causal_conv1d_fn(
                laid_out(x, layout), weight, bias, None, state, True, activation="silu",
                query_start_loc=cu_seqlens,
            )  # fmt: skip

        self.both(ours, lambda *given: layers.convolve(*given, lengths=LENGTHS, columns=3), inputs)

    def test_of_numbered_tokens(self):
        """Padding has none, and gives none."""
        lengths = (6, 2, 20)
        numbers = torch.repeat_interleave(torch.tensor([1, -5, 2]), torch.tensor(lengths))[None]
        inputs = [drawn(1, 40, 28), drawn(40, 4)]
        y_mask = (numbers >= 0).float()

        def oracle(x, weight):
            return (layers.convolve(x, weight, lengths=lengths)[0] * y_mask,)

        self.both(
            lambda x, weight: (conv.causal_conv1d_fn(x, weight, seq_idx=numbers, activation="silu"),),
            oracle, inputs,
        )  # fmt: skip

    @kernels
    def test_only_the_wanted_ones_are_made(self):
        x, weight = drawn(1, 40, 50), drawn(40, 4).requires_grad_()
        y = conv.causal_conv1d_fn(x, weight, activation="silu")
        (alone,) = torch.autograd.grad(y.sum(), weight)
        x.requires_grad_()
        _, beside = torch.autograd.grad(
            conv.causal_conv1d_fn(x, weight, activation="silu").sum(), (x, weight)
        )
        assert_same_bits("weight", alone, beside)

    @kernels
    def test_second_derivatives_are_refused(self):
        x, weight = drawn(1, 40, 50).requires_grad_(), drawn(40, 4)
        (slope,) = torch.autograd.grad(
            conv.causal_conv1d_fn(x, weight, activation="silu").sum(), x, create_graph=True
        )
        with pytest.raises(NotImplementedError, match="second derivatives"):
            slope.sum().backward()


@kernels
def test_threads_change_no_bit():
    x, weight = laid_out(drawn(2, 700, 900), "channels last"), drawn(700, 4)
    made = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        own = [x.detach().requires_grad_(), weight.clone().requires_grad_()]
        y = conv.causal_conv1d_fn(*own, activation="silu")
        y.backward(x)
        made.append([y.detach(), own[0].grad, own[1].grad])
    torch.set_num_threads(before)
    for other in made[1:]:
        for first, second in zip(made[0], other, strict=True):
            assert_same_bits("result", first, second)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_numbers(dtype):
    """What saturates the activation is 0 or the number itself, and what is no number stays in its window."""
    large = 1e4 if dtype == torch.float16 else 1e30
    x = torch.full((1, 32, 40), large, dtype=dtype)
    x[:, ::2] = -large
    y = conv.causal_conv1d_fn(x, torch.ones(32, 4, dtype=dtype), activation="silu")
    assert not y[:, ::2].any()
    assert torch.equal(y[:, 1::2, 0], x[:, 1::2, 0])
    x = torch.zeros(1, 32, 40, dtype=dtype)
    x[0, 3, 10] = torch.nan
    x[0, 4, 10] = torch.inf
    y = conv.causal_conv1d_fn(x, torch.ones(32, 4, dtype=dtype), activation="silu")
    bad = ~y.isfinite()
    assert bad[0, 3:5, 10:14].all()
    assert int(bad.sum()) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the kernel, and plain PyTorch
def test_packed_calls_without_sequences(dtype):
    x, weight, none = drawn(8, 3, dtype=dtype), drawn(8, 4, dtype=dtype), torch.tensor([0])
    x.requires_grad_()
    y, final = conv.causal_conv1d_fn(
        x,
        weight,
        initial_states=drawn(0, 8, 3, dtype=dtype),
        query_start_loc=none,
        return_final_states=True,
    )
    assert final.shape == (0, 8, 3)
    assert not y.any()
    y.sum().backward()
    assert not x.grad.any()
    pool = drawn(2, 8, 3, dtype=dtype)
    before = pool.clone()
    assert not conv.causal_conv1d_fn(x.detach(), weight, conv_states=pool, query_start_loc=none).any()
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_null_rows_of_drafts_hold_any_numbers(dtype):
    """What a captured graph pads its rows with: no slot, and no count of tokens."""
    x, weight = drawn(2, 8, 2, dtype=dtype), drawn(8, 4, dtype=dtype)
    pool = drawn(2, 8, 6, dtype=dtype)
    alone, before = pool[1:].clone(), pool.clone()
    y = conv.causal_conv1d_update(
        x,
        pool,
        weight,
        conv_state_indices=torch.tensor([-1, 1]),
        num_accepted_tokens=torch.tensor([0, 2]),
    )
    expected = conv.causal_conv1d_update(x[1:], alone, weight, num_accepted_tokens=torch.tensor([2]))
    assert not y[0].any()
    assert torch.equal(y[1:], expected)
    assert torch.equal(pool[1:], alone)
    assert torch.equal(pool[0], before[0])
    empty = torch.zeros(0, 8, 3, dtype=dtype)
    assert not conv.causal_conv1d_update(x, empty, weight, conv_state_indices=torch.tensor([-1, -1])).any()
