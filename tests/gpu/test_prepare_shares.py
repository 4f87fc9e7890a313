# SPDX-License-Identifier: Apache-2.0
"""Chunk operands of rules with one decay per token: a CTA of prepare_token has one value head of a chunk
where CTAs are few, else up to four that share keys, or two that do not (docs/design/prepare.md). No bit of a
head depends on it."""

from __future__ import annotations

import math

import pytest
import torch

from cula_testing import device, passes
from cula_testing.cases import Case, Inputs, make
from cula_testing.compare import assert_same_bits

pytestmark = pytest.mark.skipif("sm80" not in device.able(torch.bfloat16), reason="no GPU, or an older one")

# Heads of q and k, value heads: four and two of them share keys; a head has its own, and with 49 of them and
# an odd number of chunks the last CTA has one.
SHARES = {"four": (16, 64), "two": (32, 64), "one": (64, 64), "odd": (49, 49), "three": (16, 48)}


def tokens_of_many_ctas() -> int:
    """So many that a CTA has as many value heads as it can; of an odd number of chunks."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return 64 * (math.ceil(6 * multiprocessors * 4 / 48) // 2 * 2 + 1)


def run(inputs: Inputs, backend: str) -> passes.Result:
    return passes.prefill(inputs, backend=backend)


def takes(inputs: Inputs, backend: str) -> bool:
    try:
        run(inputs, backend)
    except ValueError:
        return False
    return True


def of_first_heads(inputs: Inputs, count: int) -> Inputs:
    """The call of the first `count` heads of q and k alone."""
    case = inputs.case
    few = case.but(heads=count, value_heads=case.value_heads // case.heads * count)

    def part(x: torch.Tensor | None, dim: int, heads: int) -> torch.Tensor | None:
        return None if x is None else x.narrow(dim, 0, heads).contiguous()

    values = few.value_heads
    return inputs.but(
        case=few, q=part(inputs.q, 2, count), k=part(inputs.k, 2, count), v=part(inputs.v, 2, values),
        g=part(inputs.g, 2, values), beta=part(inputs.beta, 2, values), A_log=part(inputs.A_log, 0, values),
        dt_bias=part(inputs.dt_bias, 0, values), decay=part(inputs.decay, 0, values),
        initial_state=part(inputs.initial_state, 1, values),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["sm90:whole", "sm80:whole"])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": "gdn"},
        {"algorithm": "gdn", "dtype": torch.float16, "key_dim": 64},
        {"algorithm": "gdn", "key_dim": 256, "value_dim": 40},
        {"algorithm": "gdn", "gate": "softplus", "gate_dtype": torch.float64},
        {"algorithm": "gdn", "packed": True},
        {"algorithm": "delta", "key_dim": 100},
        {"algorithm": "gdp"},
        {"algorithm": "simple_gla"},
    ],
    ids=str,
)
def test_a_head_does_not_depend_on_those_of_its_cta(backend, shares, fields):
    heads, value_heads = SHARES[shares]
    tokens = tokens_of_many_ctas() - 27
    lengths = (tokens - 1307, 0, 7, 1300) if fields.get("packed") else (tokens,)
    sizes = {"lengths": lengths, "heads": heads, "value_heads": value_heads, "key_dim": 128, "value_dim": 64}
    inputs = make(Case(**{**sizes, "dtype": torch.bfloat16, "qk_l2norm": True, **fields}))
    few = of_first_heads(inputs, 1)
    if backend.startswith("sm90") and not takes(few, backend):
        pytest.skip("left to sm80")
    many, few = run(inputs, backend), run(few, backend)
    values = few.o.shape[2]
    assert_same_bits("o", many.o[:, :, :values], few.o)
    assert_same_bits("states", many.final_state[:, :values], few.final_state)
