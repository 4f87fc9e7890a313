# SPDX-License-Identifier: Apache-2.0
"""The backward pass of `torch.ops.cula` on a case's inputs, and the error rule for what it returns. Gradients
are filled with NaN first, so what is not written shows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cula import _ops
from cula_testing import judges, level1
from cula_testing.cases import Inputs, state_like
from cula_testing.compare import assert_accurate
from cula_testing.passes import NAN, backend_of, call

# Against the error of the naive recurrence. A forward may have twice as much.
BUDGET = 3.0

Gradients = dict[str, torch.Tensor]


def upstream(inputs: Inputs, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss hands back: the gradients of o, in the dtype of q, and of the final states, as the case's
    states are."""
    draw = torch.Generator("cpu").manual_seed(seed)
    d_o = torch.randn(inputs.o_shape, generator=draw, device="cpu").to(inputs.v)
    states = state_like(inputs.case, inputs.case.sequences, device=inputs.v.device)
    return d_o, states.copy_(torch.randn(states.shape, generator=draw, device="cpu") / 4)


def names(inputs: Inputs) -> list[str]:
    """What has a gradient in this call."""
    return [name for name in _ops.GRADIENTS if getattr(inputs, name) is not None]


def empty(inputs: Inputs, name: str) -> torch.Tensor:
    """Room for a gradient: of rows, a slice of wider rows."""
    value = getattr(inputs, name)
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    if name == "initial_state":
        return state_like(inputs.case.but(state_dtype=wide), len(value), device=value.device)
    if name in ("A_log", "dt_bias"):
        return torch.full(value.shape, NAN, dtype=wide, device=value.device)
    wider = (*value.shape[:-1], value.shape[-1] + 24)
    return torch.full(wider, NAN, dtype=value.dtype, device=value.device)[..., 8:-16]


def assert_nothing_beside(name: str, gradient: torch.Tensor) -> None:
    """What lies around the slice is as it was."""
    if gradient._base is None:
        return
    around = gradient._base.numel() - gradient.numel()
    untouched = int(gradient._base.isnan().sum() - gradient.isnan().sum())
    assert untouched == around, f"something is written beside d_{name}"


def backward(
    inputs: Inputs,
    d_o: torch.Tensor | None,
    d_final_state: torch.Tensor | None,
    *,
    backend: str = "",
    wanted: Iterable[str] | None = None,
    batch_invariant: bool = False,
    saved: torch.Tensor | None = None,
) -> Gradients:
    """The gradients of dense calls: a pool of `inputs` is none of its states. saved: what a prefill of the
    same inputs has kept."""
    assert inputs.initial_state_indices is None
    found = {name: empty(inputs, name) for name in (names(inputs) if wanted is None else wanted)}
    call(
        "backward",
        backend or backend_of(inputs, "backward"),
        {f"d_{name}": gradient for name, gradient in found.items()},
        **inputs.tensors(),
        **inputs.case.options,
        initial_state=inputs.initial_state,
        has_initial_state=inputs.has_initial_state,
        d_o=d_o,
        d_final_state=d_final_state,
        batch_invariant=batch_invariant,
        saved=saved,
    )
    for name, gradient in found.items():
        assert_nothing_beside(name, gradient)
    return found


def through_autograd(
    inputs: Inputs, d_o: torch.Tensor | None, d_final_state: torch.Tensor | None, **options
) -> Gradients:
    """Through the function of the algorithm, which takes any number of value channels."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names(inputs)}
    results = zip(level1.prefill(inputs.but(**leaves), **options), (d_o, d_final_state), strict=True)
    outputs, given = zip(*(each for each in results if each[1] is not None), strict=True)
    found = torch.autograd.grad(outputs, leaves.values(), given)
    return dict(zip(leaves, found, strict=True))


# Of an algorithm with a gate per token, the one of the same update with a gate per channel.
BY_CHANNEL = {"gdn": "kda", "simple_gla": "gla"}


def gate_terms(
    inputs: Inputs, d_o: torch.Tensor | None, d_final_state: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradients of a gate per token are sums over key channels, those of a gate per channel of the same
    value: the roots of the sums of their squares, in the shape of g. None without such a gate."""
    if inputs.case.algorithm not in BY_CHANNEL or inputs.g is None or inputs.decay is not None:
        return None
    channels = inputs.q.shape[-1]

    def expanded(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[..., None].expand(*x.shape, channels)

    by_channel = inputs.but(
        case=inputs.case.but(algorithm=BY_CHANNEL[inputs.case.algorithm]),
        g=expanded(inputs.g),
        dt_bias=expanded(inputs.dt_bias),
    )
    return exact(by_channel, d_o, d_final_state)["g"].square().sum(-1).sqrt()


# Subnormal float32 numbers may count as zero, and a gradient may be a sum of many of them.
VANISHING = 1e-30


def beside(inputs: Inputs, oracle: Gradients, name: str, terms: torch.Tensor | None = None) -> torch.Tensor:
    """What else counts as the size of a gradient, at least VANISHING. A gradient of a parameter is a sum over
    tokens that may cancel: so does the root of the sum of their squares. One of a gate per token is a sum
    over channels: so does, if given, that of its terms (`gate_terms`)."""
    if name == "g" and terms is not None:
        size = terms
    elif name not in ("A_log", "dt_bias"):
        size = torch.zeros((), device=inputs.q.device)
    else:
        terms = oracle["g"] if terms is None else torch.maximum(oracle["g"].abs(), terms)
        if name == "A_log":
            x = inputs.g.double()
            if inputs.dt_bias is not None:
                x = x + inputs.dt_bias.double().view(x.shape[2:])
            softplus = torch.nn.functional.softplus(x, threshold=100) / x.sigmoid()
            terms = terms * (softplus if inputs.case.gate == "softplus" else x).nan_to_num(0.0, 0.0, 0.0)
        size = terms.square().sum((0, 1))
        if name == "A_log" and size.ndim == 2:
            size = size.sum(-1)
        size = size.sqrt().view(oracle[name].shape)
    return size.clamp(min=VANISHING)


def exact(inputs: Inputs, d_o: torch.Tensor | None, d_final_state: torch.Tensor | None) -> Gradients:
    """The oracle's, of the same numbers."""
    wide = [None if given is None else given.double() for given in (d_o, d_final_state)]
    return backward(inputs.double(), *wide, backend="reference")


def assert_rule(inputs: Inputs, backend: str = "", seed: int = 1) -> Gradients:
    """The error rule on every gradient."""
    d_o, d_final_state = upstream(inputs, seed)
    found = backward(inputs, d_o, d_final_state, backend=backend)
    with judges.judging():
        oracle = exact(inputs, d_o, d_final_state)
        naive = backward(inputs, d_o, d_final_state, backend="reference:naive")
        terms = gate_terms(inputs, d_o, d_final_state)
    assert_near(inputs, found, oracle, naive, terms)
    return found


def assert_near(
    inputs: Inputs, found: Gradients, oracle: Gradients, naive: Gradients, terms: torch.Tensor | None = None
) -> None:
    for name, gradient in found.items():
        assert_accurate(
            f"d_{name}", gradient, oracle[name], naive[name], inputs.q.dtype,
            beside(inputs, oracle, name, terms), BUDGET,
        )  # fmt: skip
