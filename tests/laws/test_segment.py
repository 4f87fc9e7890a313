# SPDX-License-Identifier: Apache-2.0
"""segment: S -> M S + B of each sequence, and the composition that parallelism over the sequence rests on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cula_testing import level1, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits
from cula_testing.strategies import cases


def apply(m: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """M S, on states [.., V, K]."""
    if m.ndim == 3:
        return m[:, :, None, :] * state
    return torch.einsum("nhij,nhvj->nhvi", m, state)


def multiply(second: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return second * first if second.ndim == 3 else second @ first


def stateless(inputs: Inputs) -> Inputs:
    return inputs.but(initial_state=None, initial_state_indices=None)


@given(data=st.data())
def test_the_map_takes_the_initial_state_to_the_final_state(algorithm, data):
    case = data.draw(
        cases(algorithm, state=True, pool=False, beta_per_value=False, state_dtype=torch.float32)
    )
    inputs = make(case)

    def either(inputs: Inputs, backend: str) -> passes.Result:
        if backend == "reference":
            return passes.Result(b=passes.prefill(inputs, backend=backend).final_state)
        found = passes.segment(stateless(inputs), backend=backend)
        return passes.Result(b=apply(found.m, inputs.initial_state.float()) + found.b)

    passes.assert_rule(either, inputs)


@given(data=st.data())
def test_maps_compose(algorithm, data):
    case = data.draw(cases(algorithm, packed=False, state=False, beta_per_value=False))
    cut = data.draw(st.integers(0, case.tokens))

    def composed(inputs: Inputs, backend: str) -> passes.Result:
        first = passes.segment(inputs.tokens(0, cut), backend=backend)
        second = passes.segment(inputs.tokens(cut, case.tokens), backend=backend)
        return passes.Result(m=multiply(second.m, first.m), b=apply(second.m, first.b) + second.b)

    def either(inputs: Inputs, backend: str) -> passes.Result:
        return (
            passes.segment(inputs, backend=backend) if backend == "reference" else composed(inputs, backend)
        )

    passes.assert_rule(either, make(case))


@given(data=st.data())
def test_poison_and_strides_change_nothing(algorithm, data):
    case = data.draw(cases(algorithm, state=False, beta_per_value=False))
    one, two = passes.segment(make(case.but(fused=False))), passes.segment(make(case.but(fused=True)))
    again = passes.segment(make(case.but(fused=False)))
    for name in ("m", "b"):
        assert_same_bits("strided", getattr(one, name), getattr(two, name))
        assert_same_bits("again", getattr(one, name), getattr(again, name))


def test_a_zero_length_sequence_is_the_identity(algorithm):
    inputs = stateless(make(Case(algorithm, (0, 5), packed=True)))
    found = passes.segment(inputs)
    eye = torch.eye(64) if found.m.ndim == 4 else torch.ones(64)
    assert torch.equal(found.m[0], eye.expand_as(found.m[0]))
    assert not found.b[0].any()


def test_a_write_strength_per_value_has_no_such_map():
    inputs = stateless(make(Case("kda", (5,), beta_per_value=True)))
    with pytest.raises(ValueError, match="write strength per value channel"):
        passes.segment(inputs)


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("keep", [False, True])
def test_maps_go_where_they_are_asked_to(algorithm, keep, state_v_first):
    """Transposed as well, and where the call cuts its tokens and composes what it returns."""
    inputs = stateless(make(Case(algorithm, (2100,), **LONG)))
    named = {"scale": inputs.case.scale, "keep": keep, "state_v_first": state_v_first}
    m, b, *_ = level1.segment(inputs, **named)
    rooms = [torch.full((2, *x.shape), float("nan"), device=x.device)[1] for x in (m, b)]
    for turn in (lambda x: x, lambda x: x.transpose(-1, -2) if x.ndim == 4 else x):
        into = tuple(turn(room) for room in rooms)
        returned = level1.segment(inputs, **named, out=into)
        for name, found, place, wanted in zip("mb", returned, into, (m, b), strict=False):
            assert found is place
            assert_same_bits(name, found, wanted)


# (lengths, other fields): of one piece and of several; packed; token by token; sizes that no tile has.
PARTS = {
    "short": ((70, 70), {}),
    "long": ((2100,), {}),
    "batch": ((2100, 2100), {}),
    "packed": ((1100, 0, 1300), {"packed": True}),
    "heads": ((130,) * 5, {"heads": 16, "value_heads": 16}),
    "float32": ((70,), {"dtype": torch.float32}),
    "odd": ((2100,), {"key_dim": 60, "value_dim": 100}),
    "wide": ((300,), {"key_dim": 256, "value_dim": 64}),
}


def part(algorithm: str, name: str) -> Inputs:
    lengths, fields = PARTS[name]
    return stateless(make(Case(algorithm, lengths, **{**LONG, **fields})))


def spoil(kept: torch.Tensor) -> None:
    """So that memory which the next call gets does not hold what it should make."""
    kept.fill_(0x7F7F7F7F)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_without_m_b_is_the_same(algorithm, name, keep):
    inputs = part(algorithm, name)
    named = {"scale": inputs.case.scale, "keep": keep}
    _, b, *kept = level1.segment(inputs, **named)
    before = level1.prefill(inputs, kept=kept[0]) if keep else ()
    for each in kept:
        spoil(each)
    del kept
    m, alone, *kept = level1.segment(inputs, **named, out=(None, torch.full_like(b, float("nan"))))
    assert m is None
    assert_same_bits("b", alone, b)
    if keep:
        for of, one, two in zip(
            ("o", "final_state"), before, level1.prefill(inputs, kept=kept[0]), strict=True
        ):
            assert_same_bits(of, one, two)


def b_alone(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    b = torch.empty_like(level1.segment(inputs)[1])
    return level1.segment(inputs, scale=inputs.case.scale, keep=True, out=(None, b))[1:]


@pytest.mark.parametrize("lengths", [(1100,), (1100, 1100)], ids=["one", "two"])
def test_from_zero_b_is_the_final_state(algorithm, lengths):
    """So many heads that the device cuts a sequence in two, unequally where no M of the first part is
    needed."""
    heads = 32 // len(lengths)
    inputs = stateless(make(Case(algorithm, lengths, heads=heads, value_heads=heads, dtype=torch.bfloat16)))

    def either(inputs: Inputs, backend: str) -> passes.Result:
        if backend == "reference":
            whole = passes.prefill(inputs, backend=backend)
            return passes.Result(o=whole.o, final_state=whole.final_state, b=whole.final_state)
        b, kept = b_alone(inputs)
        o, final_state = level1.prefill(inputs, kept=kept)
        return passes.Result(o=o, final_state=final_state, b=b)

    passes.assert_rule(either, inputs)


def test_what_is_kept_starts_at_a_whole_line():
    with pytest.raises(ValueError, match="prefill: kept must start at a multiple of 64 bytes, got 4 bytes"):
        level1.prefill(make(Case("kda", (20,))), kept=torch.zeros(65, dtype=torch.int32)[1:])


def test_what_is_kept_without_m_is_for_no_initial_state():
    inputs = make(Case("kda", (2100,), **LONG))
    _, kept = b_alone(stateless(inputs))
    if kept.numel() == 0:
        level1.prefill(inputs, kept=kept)
        return
    with pytest.raises(ValueError, match=r"kept must be .*, got .* made b alone, which has no initial_state"):
        level1.prefill(inputs, kept=kept)


@pytest.mark.parametrize("name", PARTS)
def test_without_m_and_b_what_is_kept_is_the_same(algorithm, name):
    inputs = part(algorithm, name)
    named = {"scale": inputs.case.scale, "keep": True}
    *_, kept = level1.segment(inputs, **named)
    size, before = kept.shape, level1.prefill(inputs, kept=kept)
    spoil(kept)
    del kept
    *nothing, kept = level1.segment(inputs, **named, out=(None, None))
    assert nothing == [None, None]
    assert kept.shape == size
    for of, one, two in zip(("o", "final_state"), before, level1.prefill(inputs, kept=kept), strict=True):
        assert_same_bits(of, one, two)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """A view of its shape that is contiguous nowhere."""
    return x.new_zeros(*x.shape, 2)[..., 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, b: (m[:, :, :3], b), r"m must have shape"),
        (lambda m, b: (m, b.half()), "b must have dtype float32"),
        (lambda m, b: (m, b.mT[..., :5]), "b must have shape"),
        (lambda m, b: (spaced(m), b), "m must be contiguous along K or along V"),
        (lambda m, b: (m, spaced(b)), "b must be contiguous along K or along V"),
        (lambda m, _: (m, m), "m must share no memory with b"),
        (lambda m, _: (m, None), "b must be given as the output"),
        (lambda *_: (None, None), "b must be given as the output"),
    ],
)
def test_room_that_does_not_fit_is_refused(change, message):
    inputs = stateless(make(Case("kda", (5,), heads=1, value_heads=1)))
    m, b = level1.segment(inputs)
    with pytest.raises(ValueError, match=f"segment: {message}"):
        level1.segment(inputs, out=change(m, b))


def test_a_diagonal_map_is_contiguous():
    inputs = stateless(make(Case("gla", (5,), heads=1, value_heads=1)))
    m, b = level1.segment(inputs)
    with pytest.raises(ValueError, match="segment: m must "):
        level1.segment(inputs, out=(spaced(m), b))


@pytest.mark.parametrize("out", [torch.zeros(2, 2), (torch.zeros(1),), 3], ids=str)
def test_room_is_a_pair(out):
    with pytest.raises(TypeError, match=r"segment: out must be a pair \(m, b\), got"):
        level1.segment(stateless(make(Case("kda", (5,), heads=1, value_heads=1))), out=out)


def kept_by(inputs: Inputs, backend: str = "") -> tuple[passes.Result, torch.Tensor]:
    m, b, kept = level1.segment(
        stateless(inputs), scale=inputs.case.scale, keep=True, **({"backend": backend} if backend else {})
    )
    return passes.Result(m=m, b=b), kept


def prefill_of_kept(inputs: Inputs, backend: str = "") -> passes.Result:
    _, kept = kept_by(inputs, backend)
    o, final_state = level1.prefill(inputs, kept=kept, **({"backend": backend} if backend else {}))
    return passes.Result(o=o, final_state=final_state)


def whole(inputs: Inputs, backend: str) -> passes.Result:
    return passes.prefill(inputs, backend=backend) if backend == "reference" else prefill_of_kept(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "fields",
    [
        {"lengths": (130, 130), "qk_l2norm": True, "scale": 0.3},
        {"lengths": (65, 0, 70, 5), "packed": True, "value_heads": 4, "fused": True},
        {"lengths": (70,), "key_dim": 60, "value_dim": 100},
    ],
    ids=["batch", "packed", "odd"],
)
def test_a_prefill_goes_on_with_what_a_segment_kept(algorithm, dtype, fields):
    passes.assert_rule(whole, make(Case(algorithm, dtype=dtype, **fields)))


@pytest.mark.parametrize("algorithm", ["kda", "gdn"])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_gates_of_what_is_kept(algorithm, gate):
    passes.assert_rule(whole, make(Case(algorithm, (130,), gate=gate, decay="mixed", qk_l2norm=True)))


# Long enough for segments inside the call, which its maps are composed of.
LONG = {"heads": 1, "value_heads": 1, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("lengths", "packed"), [((2100,), False), ((1100, 0, 1300), True)], ids=["batch", "packed"]
)
def test_a_long_sequence_is_kept(algorithm, lengths, packed):
    inputs = make(Case(algorithm, lengths, packed=packed, **LONG))
    passes.assert_rule(whole, inputs)

    def maps(inputs: Inputs, backend: str) -> passes.Result:
        inputs = stateless(inputs)
        return passes.segment(inputs, backend=backend) if backend == "reference" else kept_by(inputs)[0]

    passes.assert_rule(maps, inputs)


def test_what_is_kept_serves_any_number_of_times(algorithm):
    inputs = make(Case(algorithm, (1100,), **LONG))
    _, kept = kept_by(inputs)
    as_it_was = kept.clone()
    once, twice = (level1.prefill(inputs, kept=kept) for _ in range(2))
    assert torch.equal(kept, as_it_was)
    for name, first, second in zip(("o", "final_state"), once, twice, strict=True):
        assert_same_bits(name, first, second)


def test_what_another_call_kept_is_refused():
    _, kept = kept_by(make(Case("kda", (200,), **LONG)))
    longer = make(Case("kda", (2100,), **LONG))
    if kept.numel() == 0:
        level1.prefill(longer, kept=kept)
        return
    with pytest.raises(ValueError, match="kept must be what a segment of the same inputs has kept"):
        level1.prefill(longer, kept=kept)


def test_what_is_kept_says_nothing_of_where_memory_is_read():
    inputs = make(Case("kda", (1100, 0, 1300), packed=True, **LONG))
    _, kept = kept_by(inputs)
    if kept.numel() == 0:
        pytest.skip("nothing is kept on this device")
    before = level1.prefill(inputs, kept=kept)
    level1.prefill(inputs, kept=torch.full_like(kept, 0x7F7F7F7F))
    for name, first, second in zip(
        ("o", "final_state"), before, level1.prefill(inputs, kept=kept), strict=True
    ):
        assert_same_bits(name, first, second)


def test_kept_is_an_int32_vector():
    inputs = make(Case("kda", (5,)))
    words = torch.ones(4, device=inputs.q.device)
    with pytest.raises(ValueError, match="kept must"):
        level1.prefill(inputs, kept=words)
    with pytest.raises(ValueError, match="kept must"):
        level1.prefill(inputs, kept=words.to(torch.int32)[None])
    with pytest.raises(ValueError, match="kept must be contiguous"):
        level1.prefill(inputs, kept=words.to(torch.int32)[::2])
