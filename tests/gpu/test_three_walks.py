# SPDX-License-Identifier: Apache-2.0
"""The backward pass of rules that add values and whose decay is constant, as three walks of a carry
(docs/design/three-walks.md), of every target that has them: the error rule, every strategy, and what is left
to others."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import cula
from cula_testing import device, gradients
from cula_testing.cases import FAMILY, Case, Inputs, make
from cula_testing.compare import assert_same_bits

WALKED = [name for name, row in FAMILY.items() if row in (("head", "additive"), ("none", "additive"))]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIZES = [(64, 64), (128, 128), (64, 128), (128, 64), (96, 80), (80, 96), (20, 128), (100, 17), (16, 16)]
WIDE = {"key_dim": 128, "value_dim": 128}
ONE = {"heads": 1, "value_heads": 1, **WIDE}

# Their carries, and what each walk launches: whole, and cut into segments.
CARRIES = {"sm90:three_walks": "sm90::carry", "sm80:three_walks": "sm80::carry"}
KERNELS = {"sm90:three_walks": (1, 3), "sm80:three_walks": (2, 4)}  # sm80 prepares chunks first

pytestmark = pytest.mark.parametrize("algorithm", WALKED)


def able() -> list[str]:
    """Those that run on this device, the one that is chosen first."""
    rows = cula.explain("lightning", "backward", device="cuda")
    return [row.target for row in rows if row.target in CARRIES and row.verdict != "no"]


@pytest.fixture(params=CARRIES)
def backend(request) -> str:
    if request.param not in able():
        pytest.skip(f"{request.param} does not run here")
    return request.param


def run(inputs: Inputs, backend: str, d_o=None, d_final_state=None, **options) -> gradients.Gradients:
    if d_o is None and d_final_state is None:
        d_o, d_final_state = gradients.upstream(inputs)
    return gradients.backward(inputs, d_o, d_final_state, backend=backend, **options)


def check(case: Case, backend: str) -> None:
    gradients.assert_rule(make(case), backend)


def assert_same(one: gradients.Gradients, two: gradients.Gradients) -> None:
    for name, gradient in one.items():
        assert_same_bits(f"d_{name}", gradient, two[name])


def kernels(inputs: Inputs, **options) -> list[str]:
    return device.kernels_of(lambda: gradients.backward(inputs, *gradients.upstream(inputs), **options))


@HALVES
@pytest.mark.parametrize(("K", "V"), SIZES)
def test_dimensions(backend, algorithm, dtype, K, V):
    wide = {"key_dim": K, "value_dim": V, "dtype": dtype}
    check(Case(algorithm, (150, 0, 65), packed=True, tail=3, heads=4, value_heads=4, **wide), backend)
    check(Case(algorithm, (150, 150), heads=3, value_heads=3, **wide), backend)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("length", [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 449])
def test_lengths_around_the_chunk(backend, algorithm, length, packed):
    """Walks that begin with a chunk of any number of tokens, and go around the ring of stages or do not."""
    lengths = (length, 70, length) if packed else (length, length)
    check(Case(algorithm, lengths, packed=packed, heads=2, value_heads=2, **WIDE), backend)


@pytest.mark.parametrize("decay", ["slow", "zero", "strong", "extreme", "mixed"])
def test_decays(backend, algorithm, decay):
    check(Case(algorithm, (300,), heads=4, value_heads=4, decay=decay, **WIDE), backend)


@HALVES
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0, 3.0])
def test_scales(backend, algorithm, scale, dtype):
    """The gradient of the final state has no scale on its way back, those of outputs have it once."""
    case = Case(algorithm, (130, 20), packed=True, heads=4, value_heads=4, scale=scale, dtype=dtype, **WIDE)
    if scale != 0.0:
        check(case, backend)
        return
    found = run(make(case), backend)
    assert not found["q"].any()
    for name in ("k", "v", "initial_state"):
        assert found[name].any(), name


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1025])
def test_many_short_sequences(backend, algorithm, count):
    """Scheduled by warps, and by a kernel."""
    lengths = tuple((7 * n) % 79 for n in range(count))
    check(Case(algorithm, lengths, packed=True, heads=2, value_heads=2, key_dim=64, value_dim=64), backend)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("has_initial", [None, (True, False, True, False)], ids=["all", "some"])
@pytest.mark.parametrize("k_first", [False, True], ids=["v first", "k first"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states(backend, algorithm, packed, has_initial, k_first, state_dtype):
    states = {"state": True, "state_dtype": state_dtype, "k_first": k_first}
    lengths = (70, 0, 64, 0) if packed else (70,) * 4
    inputs = make(Case(algorithm, lengths, packed=packed, key_dim=64, value_dim=128, **states))
    if has_initial is not None:
        inputs.has_initial_state = torch.tensor(has_initial)
    found = gradients.assert_rule(inputs, backend)
    if has_initial is not None:
        assert not found["initial_state"][1].any()
        assert not found["initial_state"][3].any()


def test_without_a_state(backend, algorithm):
    check(Case(algorithm, (300,), heads=4, value_heads=4, state=False, **WIDE), backend)


SHAPES = {
    "few heads": {"lengths": (64 * 70 - 3,), **ONE},
    "few heads, whole chunks": {"lengths": (64 * 48,), **ONE},
    "few heads of many sequences": {
        "lengths": (64 * 40, 0, 5, 64 * 33 + 7),
        "packed": True,
        "tail": 9,
        **ONE,
    },
    "few heads, narrow": {
        "lengths": (64 * 70,),
        "heads": 2,
        "value_heads": 2,
        "key_dim": 40,
        "value_dim": 72,
    },
    "many heads": {"lengths": (700,), "heads": 70, "value_heads": 70, **WIDE},
    "scheduled": {"lengths": (64 * 40 + 1, *[0, 5] * 17), "packed": True, **ONE},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_strategies(backend, algorithm, shape):
    check(Case(algorithm, **SHAPES[shape]), backend)


def test_cut_sequences_that_start_from_nothing(backend, algorithm):
    """The gradients of states that are not read are zero, also where the walk is cut."""
    inputs = make(Case(algorithm, (64 * 70 - 3,) * 2, **ONE))
    inputs.has_initial_state = torch.tensor([False, True])
    found = gradients.assert_rule(inputs, backend)
    assert not found["initial_state"][0].any()


def test_a_call_is_cut_only_where_it_has_few_heads(backend, algorithm):
    whole, cut = KERNELS[backend]
    few = kernels(make(Case(algorithm, **SHAPES["few heads"])), backend=backend)
    many = kernels(make(Case(algorithm, **SHAPES["many heads"])), backend=backend)
    assert sum("compose" in name for name in few) == 3, few
    assert len(few) == 3 * cut, few
    assert sum(CARRIES[backend] in name for name in many) == 3, many
    assert len(many) == 3 * whole, many


def test_it_is_taken_where_it_can_be(backend, algorithm):
    case = Case(algorithm, (700,), heads=4, value_heads=4, **WIDE)
    by_itself = kernels(make(case.but(lengths=(70,))))
    assert sum(CARRIES[able()[0]] in name for name in by_itself) == 3, by_itself
    assert len(by_itself) == 3 * KERNELS[able()[0]][0], by_itself
    for other in ({"heads": 2}, {"qk_l2norm": True}, {"key_dim": 130}, {"value_dim": 130}, {"value_dim": 15}):
        inputs = make(case.but(**other))
        assert any("gradient_token" in name for name in kernels(inputs)), other
        with pytest.raises(ValueError, match=f'backend "{backend}" does not take this call'):
            run(inputs, backend)


def test_a_wide_gradient_of_o_is_left_to_others(backend, algorithm):
    inputs = make(Case(algorithm, (70,), heads=4, value_heads=4, **WIDE))
    d_o, d_final_state = gradients.upstream(inputs)
    with pytest.raises(ValueError, match="takes a d_o of the inputs' dtype"):
        run(inputs, backend, d_o.float(), d_final_state)
    for name, gradient in gradients.backward(inputs, d_o.float(), d_final_state).items():
        assert gradient.isfinite().all(), name


# What of it is wanted, and where it lies.


@pytest.mark.parametrize("shape", ["few heads", "packed"])
def test_a_subset_has_the_bits_of_all(backend, algorithm, shape):
    packed = {"lengths": (150, 0, 65), "packed": True, "tail": 70, **ONE}
    inputs = make(Case(algorithm, **SHAPES.get(shape, packed)))
    everything = run(inputs, backend)
    for count in range(len(everything)):
        for wanted in combinations(everything, count):
            some = run(inputs, backend, wanted=wanted)
            assert sorted(some) == sorted(wanted)
            assert_same(some, everything)


def test_absent_is_zero(backend, algorithm):
    inputs = make(Case(algorithm, (150, 0, 65), packed=True, tail=3, heads=4, value_heads=4, **WIDE))
    d_o, d_final_state = gradients.upstream(inputs)
    assert_same(run(inputs, backend, d_o, None), run(inputs, backend, d_o, torch.zeros_like(d_final_state)))
    assert_same(
        run(inputs, backend, None, d_final_state), run(inputs, backend, torch.zeros_like(d_o), d_final_state)
    )


@HALVES
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_layouts_have_the_same_bits(backend, algorithm, dtype, packed):
    """Slices of wider rows, memory at odd elements, one row for all tokens, and gradients in float32."""
    lengths = (150, 0, 65) if packed else (150, 150)
    case = Case(
        algorithm, lengths, packed=packed, heads=4, value_heads=4, key_dim=72, value_dim=40, dtype=dtype
    )
    inputs = make(case)
    d_o, d_final_state = gradients.upstream(inputs)
    wanted = run(inputs, backend, d_o, d_final_state)
    assert_same(wanted, run(make(case.but(fused=True)), backend, d_o, d_final_state))

    odd = {name: torch.zeros(d_o.numel() + 1, dtype=dtype)[1:].view_as(d_o) for name in ("d_o", "v")}
    odd["d_o"].copy_(d_o), odd["v"].copy_(inputs.v)
    assert_same(wanted, run(inputs.but(v=odd["v"]), backend, odd["d_o"], d_final_state))

    row = torch.ones(case.value_dim, dtype=dtype).expand(inputs.v.shape)
    assert_same(
        run(inputs, backend, row.contiguous(), d_final_state), run(inputs, backend, row, d_final_state)
    )

    made = {f"d_{name}": torch.full(getattr(inputs, name).shape, float("nan")) for name in wanted}
    gradients.call(
        "backward", backend, made, **inputs.tensors(), **case.options,
        initial_state=inputs.initial_state, d_o=d_o, d_final_state=d_final_state,
    )  # fmt: skip
    for name, gradient in wanted.items():
        assert_same_bits(f"d_{name}", gradient, made[f"d_{name}"].to(gradient.dtype))


def test_packed_is_a_batch(backend, algorithm):
    inputs = make(Case(algorithm, (100, 100), heads=4, value_heads=4, **WIDE))
    flat = inputs.map(lambda tensor: tensor)
    for name in ("q", "k", "v"):
        setattr(flat, name, getattr(inputs, name).flatten(0, 1)[None])
    flat.cu_seqlens = torch.tensor([0, 100, 200], dtype=torch.int32)
    d_o, d_final_state = gradients.upstream(inputs)
    one = run(inputs, backend, d_o, d_final_state)
    two = run(flat, backend, d_o.flatten(0, 1)[None], d_final_state)
    assert_same({name: gradient.view_as(two[name]) for name, gradient in one.items()}, two)


def test_batch_invariant(backend, algorithm):
    """A sequence has the same bits alone and beside others."""
    case = Case(algorithm, (2000, 70), packed=True, heads=2, value_heads=2, **WIDE)
    inputs = make(case)
    d_o, d_final_state = gradients.upstream(inputs)
    both = run(inputs, backend, d_o, d_final_state, batch_invariant=True)
    alone = inputs.map(lambda tensor: tensor)
    for name in ("q", "k", "v"):
        setattr(alone, name, getattr(inputs, name)[:, :2000])
    alone.cu_seqlens, alone.initial_state = (
        torch.tensor([0, 2000], dtype=torch.int32),
        inputs.initial_state[:1],
    )
    found = run(
        alone.but(case=case.but(lengths=(2000,))),
        backend,
        d_o[:, :2000],
        d_final_state[:1],
        batch_invariant=True,
    )
    for name in ("q", "k", "v"):
        assert_same_bits(f"d_{name}", found[name], both[name][:, :2000])
    assert_same_bits("d_initial_state", found["initial_state"], both["initial_state"][:1])


@pytest.mark.large
@pytest.mark.parametrize(
    ("lengths", "packed"), [((8192, 8192), False), ((5000, 0, 4000, 64, 100), True)], ids=["batch", "packed"]
)
def test_slabs_change_no_bits(backend, algorithm, lengths, packed):
    """Chunks of few heads are one slab, those of many are several where chunks are prepared."""
    few, many = 16, 1024
    sizes = {"heads": many, "value_heads": many, "key_dim": 32, "value_dim": 48}
    inputs = make(Case(algorithm, lengths, packed=packed, **sizes), draw_on="cuda")
    d_o, d_final_state = gradients.upstream(inputs)
    whole = run(inputs, backend, d_o, d_final_state, batch_invariant=True)
    given = d_o[:, :, :few], d_final_state[:, :few]
    alone = run(inputs.first_heads(few), backend, *given, batch_invariant=True)
    for name, gradient in alone.items():
        heads = 1 if name == "initial_state" else 2
        assert_same_bits(f"d_{name}", gradient, whole[name].narrow(heads, 0, few))


def test_runs_and_streams_give_the_same_bits(backend, algorithm):
    """Walks follow each other closely, and share a workspace."""
    for shape in ("few heads", "many heads"):
        inputs = make(Case(algorithm, **SHAPES[shape]))
        given = gradients.upstream(inputs)
        first = run(inputs, backend, *given)
        torch.cuda.synchronize()
        found = []
        for stream in [torch.cuda.Stream() for _ in range(3)]:
            with torch.cuda.stream(stream):
                found += [run(inputs, backend, *given) for _ in range(2)]
        torch.cuda.synchronize()
        for each in found:
            assert_same(first, each)


def test_not_a_number_stays_in_its_sequence(backend, algorithm):
    inputs = make(Case(algorithm, (70, 20, 70), packed=True, heads=4, value_heads=4, **WIDE))
    d_o, d_final_state = gradients.upstream(inputs)
    clean = run(inputs, backend, d_o, d_final_state)
    d_o[:, 80] = float("nan")
    found = run(inputs, backend, d_o, d_final_state)
    for name in ("q", "k", "v"):
        assert_same_bits(name, found[name][:, :70], clean[name][:, :70])
        assert_same_bits(name, found[name][:, 90:], clean[name][:, 90:])
    # Those of k at later tokens do not depend on it, nor do those of q at other tokens.
    assert found["q"][:, 70:80].isfinite().all()
    assert found["k"][:, 81:90].isfinite().all()
