# SPDX-License-Identifier: Apache-2.0
"""States of float8_e4m3fn with a scale for each row: a call reads scale * code, computes what it would of
that state in float32, and stores the state by the rule of `cula_testing.float8`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cula
from cula_testing import device, level1, passes
from cula_testing.cases import DELTA, Case, Inputs, make
from cula_testing.compare import assert_accurate, assert_same_bits, assert_same_chain
from cula_testing.float8 import FLOAT8, assert_stored, at, dequantised, pool_of, quantised
from cula_testing.pools import assert_only_changed, whole
from cula_testing.strategies import cases

NAN = float("nan")


def public(algorithm: str) -> dict:
    """What the functions of `cula.api` take."""
    fixed = {"state": True, "state_dtype": torch.float32, "A_log": True, "head_decay": False}
    return fixed | ({} if algorithm in DELTA else {"gate": "log_decay"})


def drawn(data: st.DataObject, algorithm: str, **fixed: object) -> Inputs:
    """Inputs with a pool in float32 that float8 holds."""
    inputs = make(data.draw(cases(algorithm, pool=True, **public(algorithm), **fixed)))
    inputs.initial_state.copy_(dequantised(*quantised(inputs.initial_state)))
    return inputs


def layout(inputs: Inputs, pool: torch.Tensor) -> dict:
    """A pool `[slots, HV, V, K]` as the functions take it."""
    k_first = inputs.case.k_first
    return {"state_pool": pool.transpose(-1, -2) if k_first else pool, "state_v_first": not k_first}


def prefill(inputs: Inputs, pool: torch.Tensor, **options: object) -> torch.Tensor:
    indices = {"initial_state_indices": inputs.initial_state_indices}
    named = {"initial_state": None, "output_final_state": False, **indices, **layout(inputs, pool), **options}
    o, _ = level1.prefill(inputs, **named)
    return o


def decode(inputs: Inputs, pool: torch.Tensor, **options: object) -> torch.Tensor:
    named = {**layout(inputs, pool), "state_indices": inputs.initial_state_indices, **options}
    if "initial_state_indices" in named:
        named["state_indices"] = named.pop("initial_state_indices")
    o, _ = level1.decode(inputs, named.pop("state_pool"), **named)
    return o


def assert_is_the_float32_call(inputs: Inputs, call, **options: object) -> None:
    """The same outputs as with a pool in float32, and its states, stored."""
    pool, scales = pool_of(inputs.initial_state)
    before, slots = whole(pool.view(torch.uint8)), inputs.initial_state_indices.tolist()
    scales_before, wide = scales.clone(), inputs.initial_state.clone()
    expected = call(inputs, wide, **options)
    found = call(inputs, pool, state_scales=scales, **options)
    assert_same_bits("o", expected, found)
    written = options.get("final_state_indices")
    slots = slots if written is None else written.tolist()
    assert_stored(at(pool, slots), scales[slots], wide[slots])
    assert_only_changed(before, pool.view(torch.uint8), slots)
    assert_only_changed(whole(scales_before), scales, slots)


@given(data=st.data())
def test_a_prefill_is_that_of_the_float32_state(algorithm, data):
    assert_is_the_float32_call(drawn(data, algorithm), prefill)


@pytest.mark.parametrize("key_dim", [5, 64, 128, 256])
@given(data=st.data())
def test_a_decode_is_that_of_the_float32_state(algorithm, key_dim, data):
    lengths = (1,) * data.draw(st.sampled_from([1, 3, 70]))
    inputs = drawn(data, algorithm, packed=False, key_dim=key_dim)
    inputs = make(inputs.case.but(lengths=lengths, backend=""))
    inputs.initial_state.copy_(dequantised(*quantised(inputs.initial_state)))
    assert_is_the_float32_call(inputs, decode)


@pytest.mark.parametrize("call", [prefill, decode])
def test_other_slots_may_be_written_than_read(algorithm, call):
    inputs = make(Case(algorithm, (1,) * 3, pool=True, key_dim=64, value_dim=40))
    inputs.initial_state.copy_(dequantised(*quantised(inputs.initial_state)))
    read = inputs.initial_state_indices.tolist()
    free = [slot for slot in range(len(inputs.initial_state)) if slot not in read]
    assert_is_the_float32_call(
        inputs, call, final_state_indices=torch.tensor(free[:3], dtype=inputs.initial_state_indices.dtype)
    )


@pytest.mark.parametrize("call", [prefill, decode])
def test_forks_copy_scales_too(algorithm, call):
    """Two sequences start from one slot, and one of them writes it."""
    inputs = make(Case(algorithm, (1,) * 2, pool=True, value_dim=40))
    inputs.initial_state.copy_(dequantised(*quantised(inputs.initial_state)))
    free = next(
        slot for slot in range(len(inputs.initial_state)) if slot not in inputs.initial_state_indices.tolist()
    )
    slots = inputs.initial_state_indices.clone()
    slots[1] = slots[0]
    written = slots.clone()
    written[1] = free
    assert_is_the_float32_call(
        inputs.but(initial_state_indices=slots),
        call,
        initial_state_indices=slots,
        final_state_indices=written,
    )


def test_a_pool_that_is_only_written(algorithm):
    """Sequences start from zero, and end in the slots that initial_state_indices name."""
    inputs = make(Case(algorithm, (70, 5), packed=True, value_dim=40))
    dense = passes.prefill(inputs.but(initial_state=None, initial_state_indices=None)).final_state
    pool, scales = pool_of(torch.zeros(8, *dense.shape[1:]))
    before, scales_before = whole(pool.view(torch.uint8)), scales.clone()
    slots = torch.tensor([5, 7])
    outputs = {"o": passes.empty_o(inputs), "final_state": pool, "final_scales": scales}
    passes.call(
        "prefill", "", outputs, **inputs.tensors(), **inputs.case.options, initial_state_indices=slots,
        in_place=False,
    )  # fmt: skip
    assert_stored(at(pool, [5, 7]), scales[[5, 7]], dense)
    assert_only_changed(before, pool.view(torch.uint8), [5, 7])
    assert_only_changed(whole(scales_before), scales, [5, 7])


@pytest.mark.parametrize("null_index", [-1, 0, 1])
@pytest.mark.parametrize("call", [prefill, decode])
def test_null_rows_touch_neither_states_nor_scales(algorithm, call, null_index):
    inputs = make(Case(algorithm, (1,) * 4, pool=True))
    pool, scales = pool_of(torch.empty(6, *inputs.initial_state.shape[1:]).normal_())
    indices = torch.tensor([slot for slot in range(6) if slot != null_index][:4], dtype=torch.int32)
    indices[2] = null_index
    before, scales_before = whole(pool.view(torch.uint8)), scales.clone()
    o = call(inputs, pool, state_scales=scales, initial_state_indices=indices, null_index=null_index)
    used = [slot for slot in indices.tolist() if slot != null_index]
    assert not o[2].any()
    assert o[[0, 1, 3]].isfinite().all()
    assert_only_changed(before, pool.view(torch.uint8), used)
    assert_only_changed(whole(scales_before), scales, used)


def test_a_pool_may_only_be_read(algorithm):
    """initial_state with indices, and with a state for each sequence; the final state is float32."""
    inputs = make(Case(algorithm, (70, 70), pool=True))
    inputs.initial_state.copy_(dequantised(*quantised(inputs.initial_state)))
    pool, scales = pool_of(inputs.initial_state)
    before, scales_before = whole(pool.view(torch.uint8)), scales.clone()
    o, state = level1.prefill(inputs)
    o8, state8 = level1.prefill(inputs, initial_state=pool, state_scales=scales)
    assert state8.dtype == torch.float32
    assert_same_bits("o", o, o8)
    assert_same_bits("final_state", state, state8)
    slots = inputs.initial_state_indices.long()
    dense = {"initial_state": at(pool, slots), "initial_state_indices": None}
    o8, state8 = level1.prefill(inputs, **dense, state_scales=scales[slots])
    assert_same_bits("o", o, o8)
    assert_same_bits("final_state", state, state8)
    assert_same_bits("pool", before, whole(pool.view(torch.uint8)))
    assert_same_bits("scales", scales_before, scales)


@given(data=st.data())
def test_drafts_are_those_of_the_float32_state(algorithm, data):
    case = data.draw(cases(algorithm, packed=False, pool=False, **public(algorithm)))
    case = case.but(lengths=(data.draw(st.integers(1, 5)),) * 2, backend="")
    inputs, S = make(case), case.lengths[0]
    slots = data.draw(st.permutations(range(2 * S + 2)))[: 2 * S]
    indices = torch.tensor(slots, dtype=torch.int32).view(2, S)
    accepted = torch.tensor([1, S], dtype=torch.int32)
    states = torch.empty(2 * S + 2, *inputs.initial_state.shape[1:]).normal_()
    wide = dequantised(*quantised(states))
    if case.k_first:
        wide = wide.transpose(-1, -2).contiguous().transpose(-1, -2)
    pool, scales = pool_of(wide)

    def call(states: torch.Tensor, **options: object) -> torch.Tensor:
        named = layout(inputs, states)
        return level1.verify(
            inputs, named.pop("state_pool"), state_indices=indices, num_accepted=accepted, **named, **options
        )[0]

    read = call(pool, state_scales=scales, disable_state_update=True)
    expected, found = call(wide), call(pool, state_scales=scales)
    assert_same_bits("o", read, found)
    assert_same_chain(expected, found)
    if not pool.is_cuda:
        assert_stored(at(pool, slots), scales[slots], wide[slots])
    else:  # there a chain in float32 goes through tensor cores
        off = (dequantised(pool, scales) - wide)[slots].abs()
        allowed = (2**-4 + 2**-15) * wide[slots].abs() + 2**-9 * scales[slots][..., None]
        assert (off <= allowed).all()


def test_a_tree_of_drafts_stores_each_state(algorithm):
    inputs = make(Case(algorithm, (4,) * 2, state=True))
    parents = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32)
    wide = dequantised(*quantised(torch.empty(8, *inputs.initial_state.shape[1:]).normal_()))
    pool, scales = pool_of(wide)
    indices = torch.arange(8, dtype=torch.int32).view(2, 4)
    expected, _ = level1.verify(inputs, wide, state_indices=indices, parents=parents)
    found, _ = level1.verify(inputs, pool, state_indices=indices, parents=parents, state_scales=scales)
    assert_same_bits("o", expected, found)
    assert_stored(pool, scales, wide)


def test_snapshots_of_a_float8_base_are_float32(algorithm):
    inputs = make(Case(algorithm, (3,) * 2, state=True))
    wide = dequantised(*quantised(inputs.initial_state))
    pool, scales = pool_of(wide)
    made = []
    for state, options in ((wide, {}), (pool, {"state_scales": scales})):
        made.append(torch.full((2, 3, *wide.shape[1:]), NAN))
        level1.verify(inputs, state, snapshots=made[-1], **options)
    assert_same_chain(*made)


def test_outputs_obey_the_error_rule(algorithm, target):
    inputs = make(Case(algorithm, (130, 130), backend=target))
    codes, scales = quantised(inputs.initial_state)
    wide = inputs.but(initial_state=dequantised(codes, scales))
    named = {"initial_state": codes, "state_scales": scales}
    o, final_state = level1.prefill(inputs, **named)
    _, oracle, naive = passes.three(lambda inputs, backend: passes.prefill(inputs, backend=backend), wide)
    assert_accurate("o", o, oracle.o, naive.o, inputs.q.dtype)
    assert_accurate("final_state", final_state, oracle.final_state, naive.final_state, inputs.q.dtype)


# The format.


def backends(pass_name: str) -> list[str]:
    """The targets that take float32 inputs on the device."""
    references = [] if device.kind() == "cuda" else ["reference", "reference:naive"]
    return [*references, *device.able(torch.float32, pass_name)]


@pytest.mark.parametrize("k_first", [False, True])
def test_every_code_is_read_as_pytorch_reads_it(k_first):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 2, 128).view(FLOAT8)
    scales = torch.tensor([[[1.0, 0.37]]])
    given_codes = codes
    if k_first:
        given_codes = codes.view(torch.uint8).transpose(-1, -2).contiguous().view(FLOAT8)
    for backend in backends("prefill"):
        options = {"initial_state": given_codes, "state_v_first": not k_first, "output_final_state": True}
        shape = codes.view(torch.uint8)
        N, HV, V, K = shape.shape
        q = torch.empty(N, 0, HV, K)
        _, state = cula.cula_lightning(
            q, q, torch.empty(N, 0, HV, V), torch.zeros(HV), state_scales=scales, backend=backend, **options
        )
        state = state.transpose(-1, -2) if k_first else state
        expected = dequantised(codes, scales)
        assert torch.equal(state.isnan(), expected.isnan()), backend
        assert_same_bits(backend, state.nan_to_num(0.0), expected.nan_to_num(0.0))


def borders() -> torch.Tensor:
    """Every number of the format, the middles of neighbours, and the floats beside both; 448 among them."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FLOAT8).float()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    high, low = torch.full((1,), float("inf")), torch.full((1,), 0.0)
    points = torch.cat([points, points.nextafter(high), points.nextafter(low)])
    points = points[points <= 448]
    return torch.cat([points, -points])


@pytest.mark.parametrize("k_first", [False, True])
@pytest.mark.parametrize("key_dim", [60, 64, 128, 256])
def test_numbers_are_stored_as_pytorch_rounds_them(key_dim, k_first):
    """A token writes one of its values times its key into a state of zeros; the rows' largest number is 448,
    so that scales are 1 and codes are the rounded numbers."""
    points = borders()
    rows = -(-len(points) // (key_dim - 1))
    keys = torch.zeros(rows, key_dim)
    keys[:, 0] = 448
    flat = torch.zeros(rows * (key_dim - 1))
    flat[: len(points)] = points
    keys[:, 1:] = flat.view(rows, -1)
    for backend in backends("decode"):
        pool = torch.zeros(rows, 1, *((key_dim, 2) if k_first else (2, key_dim)), dtype=torch.uint8)
        pool, scales = pool.view(FLOAT8), torch.zeros(rows, 1, 2)
        k = keys.view(rows, 1, 1, key_dim)
        v = torch.tensor([1.0, -2.0]).expand(rows, 1, 1, 2)
        cula.cula_decode(
            k, k, v, pool, mode="lightning", decay=torch.zeros(1), state_scales=scales,
            state_v_first=not k_first, backend=backend,
        )  # fmt: skip
        stored = pool.transpose(-1, -2) if k_first else pool
        assert torch.equal(scales, torch.tensor([1.0, 2.0]).expand(rows, 1, 2)), backend
        exact = keys.to(FLOAT8).float()
        assert torch.equal(stored[:, 0, 0].float(), exact), backend
        assert torch.equal(stored[:, 0, 1].float(), -exact), backend


def stored_rows(values: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rows values[j] * keys, by a decode and by a prefill, which agree."""
    K, V = len(keys), len(values)
    k, v = keys.view(1, 1, 1, K), values.view(1, 1, 1, V)
    made = []
    for call in (
        lambda pool, scales: cula.cula_decode(
            k, k, v, pool, mode="lightning", decay=torch.zeros(1), state_scales=scales
        ),
        lambda pool, scales: cula.cula_lightning(
            k, k, v, torch.zeros(1), state_pool=pool, state_scales=scales
        ),
    ):
        pool, scales = torch.zeros(1, 1, V, K, dtype=torch.uint8).view(FLOAT8), torch.zeros(1, 1, V)
        call(pool, scales)
        made.append((pool[0, 0], scales[0, 0]))
    (codes, scales), (codes_of_prefill, scales_of_prefill) = made
    assert torch.equal(scales.nan_to_num(7.0), scales_of_prefill.nan_to_num(7.0))
    assert torch.equal(codes.float().nan_to_num(7.0), codes_of_prefill.float().nan_to_num(7.0))
    return codes, scales


def test_rows_of_zeros_have_scale_zero():
    codes, scales = stored_rows(torch.tensor([0.0, 1.0, 1e-37]), torch.ones(64))
    assert scales.tolist()[0::2] == [0.0, 0.0]
    assert not dequantised(codes, scales)[0::2].any()
    assert (dequantised(codes, scales)[1] == 1.0).all()


@pytest.mark.parametrize("broken", [NAN, float("inf"), -float("inf")])
def test_rows_that_are_not_finite_read_as_nan(broken):
    keys = torch.ones(64)
    codes, scales = stored_rows(torch.tensor([1.0, broken, 2.0]), keys)
    states = dequantised(codes, scales)
    assert states[1].isnan().all()
    assert states[[0, 2]].isfinite().all()
    keys[5] = broken
    codes, scales = stored_rows(torch.tensor([1.0, 2.0]), keys)
    assert dequantised(codes, scales).isnan().all()


def test_the_error_of_a_row_is_half_a_step():
    values, keys = torch.tensor([3e37, 1.0, 1e-30]), torch.linspace(-1, 1, 128)
    codes, scales = stored_rows(values, keys)
    exact = values.double()[:, None] * keys.double()
    off = (codes.double() * scales.double()[:, None] - exact).abs()
    assert (off <= (2**-4 + 2**-20) * exact.abs() + 2**-10 * scales.double()[:, None]).all()


def test_a_sequence_without_tokens_is_stored_again():
    """Codes of rows that the library stored stay as they are."""
    codes, scales = quantised(torch.randn(3, 1, 8, 64))
    pool, own = codes.view(torch.uint8).clone().view(FLOAT8), scales.clone()
    q = torch.empty(3, 0, 1, 64)
    cula.cula_lightning(q, q, torch.empty(3, 0, 1, 8), torch.zeros(1), state_pool=pool, state_scales=own)
    assert torch.equal(pool.view(torch.uint8), codes.view(torch.uint8))
    assert ((own - scales).abs() <= 2**-23 * scales).all()
