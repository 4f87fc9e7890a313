# SPDX-License-Identifier: Apache-2.0
"""The gated RMSNorm and its gradients: every option, layout, size and target by the error rule."""

from __future__ import annotations

import itertools

import pytest
import torch

from cula import norm
from cula_testing import layers
from cula_testing.compare import assert_accurate, assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
kernels = pytest.mark.cpu_only("the kernels are those of CPUs")
EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw, device="cpu").to(torch.get_default_device(), dtype)


def check(found, oracle, inputs: list[torch.Tensor | None], dtype: torch.dtype) -> None:
    """Results by twice, and gradients by three times the budget."""
    made = []
    for function, of in ((found, None), (oracle, torch.float64), (oracle, None)):
        own = [None if x is None else x.to(of or x.dtype).detach().clone().requires_grad_() for x in inputs]
        y = function(*own)
        y.backward(drawn(*y.shape, seed=9).to(dtype).to(y.dtype))
        made.append([y.detach(), *(None if x is None else x.grad for x in own)])
    for at, (ours, exact, naive) in enumerate(zip(*made, strict=True)):
        if ours is not None:
            what = f"gradient {at - 1}" if at else "y"
            assert_accurate(what, ours, exact, naive.to(ours.dtype), dtype, budget=3.0 if at else 2.0)


@kernels
@pytest.mark.parametrize("isa", layers.TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_any_channels(isa, dtype, activation, norm_before_gate):
    for channels, group in ((7, 0), (48, 24), (200, 50), (257, 0)):
        inputs = [
            drawn(3, 5, channels, dtype=dtype),
            drawn(3, 5, channels, dtype=dtype, seed=1),
            drawn(channels, dtype=dtype),
            drawn(channels, dtype=dtype, seed=2),
        ]

        def ours(*given, group=group):
            return torch.ops.cula.rms_norm_gated(
                *given, EPS, activation == "sigmoid", norm_before_gate, group, False, isa
            )

        def oracle(*given, group=group):
            return layers.gated_norm(*given, EPS, activation, norm_before_gate, group or None)

        check(ours, oracle, inputs, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_the_function(dtype, activation):
    """On any device, with each optional argument and without."""
    x, g, w, b = (drawn(*s, dtype=dtype, seed=n) for n, s in enumerate(((2, 9, 3, 64),) * 2 + ((64,),) * 2))
    for gate, weight, bias in itertools.product((None, g), (None, w), (None, b)):
        check(
            lambda x, gate, weight, bias: norm.rms_norm_gated(x, gate, weight, bias, activation, eps=EPS),
            lambda x, gate, weight, bias: layers.gated_norm(x, gate, weight, bias, EPS, activation),
            [x, gate, weight, bias], dtype,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_weights_around_zero(dtype):
    x, weight = drawn(40, 64, dtype=dtype), drawn(64, dtype=dtype) / 8
    check(
        lambda x, weight: norm.rms_norm_gated(x, None, weight, eps=EPS, zero_centered=True),
        lambda x, weight: layers.gated_norm(x, None, 1 + weight, None, EPS),
        [x, weight], dtype,
    )  # fmt: skip


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    """Slices of wider rows, transposed leading dimensions, expanded gates, channels with gaps."""
    wide = drawn(4, 6, 5, 200, dtype=dtype)
    given = {
        "a slice": (wide[..., 40:104], wide[..., 100:164]),
        "transposed": (wide[..., :64].transpose(0, 2), drawn(5, 6, 4, 64, dtype=dtype)),
        "expanded": (wide[..., :64], wide[:1, :, :1, 70:134].expand(4, 6, 5, 64)),
        "channels apart": (wide[..., ::4], wide[..., 1::4]),
        "one row": (wide[0, 0, 0, :64], wide[1, 1, 1, :64]),
        "no row": (wide[:0, ..., :64], wide[:0, ..., 64:128]),
    }
    for what, (x, gate) in given.items():
        weight = drawn(2 * x.shape[-1], dtype=dtype)[::2]
        y = norm.rms_norm_gated(x, gate, weight, eps=EPS)
        exact = layers.gated_norm(x.double(), gate.double(), weight.double(), None, EPS)
        assert_accurate(what, y, exact, layers.gated_norm(x, gate, weight, None, EPS), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_may_differ(dtype):
    """Weights in float32 beside inputs of 16 bits, and the other way round."""
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    x, gate, weight = drawn(40, 64, dtype=dtype), drawn(40, 64, dtype=other, seed=3), drawn(64, dtype=other)
    check(
        lambda x, gate, weight: norm.rms_norm_gated(x, gate, weight, eps=EPS),
        lambda x, gate, weight: layers.gated_norm(x, gate, weight, None, EPS).to(x.dtype),
        [x, gate, weight], torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("in_fp32", [False, True])
def test_a_residual_is_added_first(in_fp32):
    x, residual, gate, weight = (drawn(40, 64, dtype=torch.bfloat16, seed=n) for n in range(4))
    weight = weight[0]
    total = x.float() + residual
    y, carried = norm.rms_norm_gated(
        x, gate, weight, residual=residual, prenorm=True, residual_in_fp32=in_fp32, eps=EPS
    )
    assert (y.dtype, carried.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(carried, total.bfloat16())
    exact = layers.gated_norm(total.double(), gate.double(), weight.double(), None, EPS)
    naive = layers.gated_norm(x + residual, gate, weight, None, EPS)
    assert_accurate("y", y, exact, naive, torch.bfloat16)
    _, carried = norm.rms_norm_gated(x, gate, weight, prenorm=True, residual_in_fp32=in_fp32)
    assert carried.dtype == (torch.float32 if in_fp32 else torch.bfloat16)


def test_the_module_is_the_function():
    module = norm.RMSNormGated(64, eps=1e-4, activation="sigmoid", group_size=16, dtype=torch.bfloat16)
    torch.nn.init.normal_(module.weight)
    x, gate = drawn(40, 64, dtype=torch.bfloat16), drawn(40, 64, dtype=torch.bfloat16, seed=1)
    wanted = norm.rms_norm_gated(x, gate, module.weight, activation="sigmoid", eps=1e-4, group_size=16)
    assert_same_bits("y", module(x, gate), wanted)
    assert list(norm.RMSNormGated(8, elementwise_affine=False).state_dict()) == []


@kernels
def test_threads_change_no_bit():
    x, gate, weight = drawn(3000, 96), drawn(3000, 96, seed=1), drawn(96)
    made, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        own = [each.clone().requires_grad_() for each in (x, gate, weight)]
        y = norm.rms_norm_gated(*own)
        y.backward(x)
        made.append([y.detach(), *(each.grad for each in own)])
    torch.set_num_threads(before)
    for other in made[1:]:
        for first, second in zip(made[0], other, strict=True):
            assert_same_bits("result", first, second)


@kernels
def test_extreme_numbers():
    """A row of zeros is zeros; a gate that saturates passes 0 or the gate itself; NaN stays in its row."""
    x = drawn(6, 64)
    x[0], x[1], x[2, 5] = 0, x[1] * 1e15, torch.nan
    gate = torch.full((6, 64), 1e4)
    gate[:, ::2] = -1e4
    y = norm.rms_norm_gated(x, gate, None, activation="sigmoid")
    assert not y[0].any()
    assert y[1].isfinite().all()
    assert not y[1, ::2].any()
    assert y[2].isnan().all()
    assert y[3:].isfinite().all()
