# SPDX-License-Identifier: Apache-2.0
"""The one error rule, for every result of every kernel.

A kernel's accuracy is judged by this rule alone. Tests that compare two forms of one call, look at composed
maps, or ask whether a name leads to the right call, state a distance of their own: on a GPU test_compose.py,
test_verify.py, test_decays_that_forget.py, test_fused_prefill.py, test_large_addresses.py,
test_prefill_beyond_the_workspace.py, test_prefill_of_kept.py, test_sequences_in_segments.py and
test_steep_decays.py.

Against the float64 oracle, in units of the oracle's size, a result may be wrong by at most twice as much as
the naive recurrence run in the low precision of the inputs, plus a floor; relative root mean square and
maximum both. Where the oracle is finite, so is the result. Gradients may be wrong by three times as much
(gradients.py).

The floor is one rounding in the dtype of the result or of the inputs, whichever is coarser, and sixteen in
float32, which states are kept in. Without the first a problem of few numbers, where the naive recurrence can
be exact by luck, would have no budget at all. The second is what a chunk form cannot avoid: the recurrence
forgets an error as it overwrites a key, but a chunk of 64 tokens adds up the errors of 64 writes, each of
which can be twice as large as the state: 2 sqrt(64).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BUDGET = 2.0


@dataclass
class Errors:
    rms: float  # |x - oracle| / |oracle|, root mean squares
    max: float  # max |x - oracle| / max |oracle|


def errors(x: torch.Tensor, oracle: torch.Tensor, beside: torch.Tensor | None = None) -> Errors:
    """beside: something whose size counts too, where x is only ever used together with it."""
    if not oracle.numel():
        return Errors(0.0, 0.0)
    tiny, difference = torch.finfo(x.dtype).tiny, x.double() - oracle
    sizes = [oracle] if beside is None else [oracle, beside.double().expand_as(oracle)]
    return Errors(
        rms=float(
            difference.square().mean().sqrt() / max(size.square().mean().sqrt() + tiny for size in sizes)
        ),
        max=float(difference.abs().max() / max(size.abs().max() + tiny for size in sizes)),
    )


def floor(result: torch.dtype, inputs: torch.dtype) -> float:
    return max(torch.finfo(result).eps, torch.finfo(inputs).eps) / 2 + 16 * torch.finfo(torch.float32).eps / 2


def assert_accurate(
    what: str,
    x: torch.Tensor,
    oracle: torch.Tensor,
    naive: torch.Tensor,
    inputs: torch.dtype,
    beside: torch.Tensor | None = None,
    budget: float = BUDGET,
) -> None:
    """x and naive in the dtype of the call, oracle in float64."""
    assert oracle.dtype == torch.float64
    assert x.shape == oracle.shape == naive.shape
    assert oracle.isfinite().all(), f"{what}: the oracle is not finite, the case is ill-posed"
    assert x.isfinite().all(), f"{what}: {int((~x.isfinite()).sum())} of {x.numel()} values are not finite"
    found, allowed = errors(x, oracle, beside), errors(naive, oracle, beside)
    for measure in ("rms", "max"):
        error, limit = getattr(found, measure), budget * getattr(allowed, measure) + floor(x.dtype, inputs)
        assert error <= limit, f"{what}: relative {measure} error {error:.3e} is above the budget {limit:.3e}"


def assert_exact(what: str, x: torch.Tensor, oracle: torch.Tensor, limit: float = 1e-12) -> None:
    """Two float64 evaluations of one recurrence: equal up to the order of their sums."""
    found = errors(x, oracle)
    assert x.dtype == oracle.dtype == torch.float64
    assert max(found.rms, found.max) <= limit, f"{what}: {found}"


def bits(x: torch.Tensor) -> torch.Tensor:
    """The raw bits, so that NaN equals itself and -0 differs from 0."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return x.contiguous().view(integers[x.element_size()])


def assert_same_chain(x: torch.Tensor, y: torch.Tensor) -> None:
    """Drafts by two kernels: equal bits on a CPU; on a GPU, where a chain of few tokens goes through tensor
    cores, equal to one rounding, or to what a column's words leave out (docs/design/verify.md)."""
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    if x.is_cuda:
        words = 2**-16 if x.dtype == torch.bfloat16 else 2**-17  # of up to four tokens, one after the other
        assert errors(x, y.double()).max <= torch.finfo(x.dtype).eps + words
    else:
        assert_same_bits("a chain", x, y)


def assert_same_bits(what: str, x: torch.Tensor, y: torch.Tensor) -> None:
    assert (x.dtype, x.shape) == (y.dtype, y.shape), what
    differ = bits(x) != bits(y)
    assert not differ.any(), f"{what}: {int(differ.sum())} of {x.numel()} values differ in their bits"
