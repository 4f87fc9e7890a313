# SPDX-License-Identifier: Apache-2.0
"""What stands in for FLA's Triton on machines without an accelerator, against PyTorch's own functions and
definitions token by token."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from cula import _layers
from cula.integrations import _fla_cpu as parts

pytestmark = pytest.mark.cpu_only("they take CPU tensors alone")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def convolution(x, weight, bias, before, activation):
    """Token by token: the sum of the last W tokens of a channel, each with its weight. `[T, D]`."""
    seen = torch.cat([before.T, x])
    width = weight.shape[1]
    y = torch.stack([(seen[t + 1 : t + 1 + width] * weight.T).sum(0) for t in range(len(x))]) + bias
    return (functional.silu(y) if activation else y), seen[len(x) :].T


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution(width, activation, packed):
    x = torch.randn(1 if packed else 3, 11, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(5, width, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    before = torch.randn(3, 5, width, dtype=torch.float64)
    residual = torch.randn_like(x)
    ends = [0, 2, 2, 11]  # the second is empty, the first shorter than the widest kernel
    rows = [x[0, begin:end] for begin, end in pairwise(ends)] if packed else list(x)
    made = [
        convolution(row, weight, bias, state, activation) if len(row) else (row, state)
        for row, state in zip(rows, before, strict=True)
    ]
    expected = torch.cat([y for y, _ in made]).view(x.shape) + residual
    cu_seqlens = torch.tensor(ends) if packed else None
    y, state = parts.causal_conv1d(x, weight, bias, residual, before, True, activation, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state, torch.stack([each for _, each in made]))
    upstream = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, upstream), torch.autograd.grad(expected, x, upstream)
    )
    assert parts.causal_conv1d(x, weight, cu_seqlens=cu_seqlens)[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_convolutions_run_on_kernels(dtype, monkeypatch):
    """With what FLA's layers give them, and gradients; a residual joins before the result is rounded."""
    ran = []
    run = _layers.convolve
    monkeypatch.setattr(_layers, "convolve", lambda *given: ran.append(given[0].dtype) or run(*given))
    x, residual = (torch.randn(2, 11, 4, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, before = torch.randn(32, 4, dtype=dtype), torch.randn(2, 32, 4, dtype=dtype)
    y, state = parts.causal_conv1d(x, weight, None, residual, before, True, "silu")
    assert ran == [torch.float32]
    wide, _ = parts.causal_conv1d(
        x.double(), weight.double(), None, residual.double(), before.double(), False, "silu"
    )
    torch.testing.assert_close(y, wide.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert (y.dtype, state.dtype) == (dtype, dtype)
    y.float().sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))
    assert x.grad.isfinite().all()
    parts.causal_conv1d(x, weight)
    assert ran[1:] == [dtype]


def test_a_token_with_a_gradient():
    """Decoding while something requires gradients, as FLA allows it."""
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    cache = torch.randn(3, 6, 4)
    other = cache.clone()
    y, _ = parts.causal_conv1d_update(x, cache, None, weight, None, "silu")
    with torch.no_grad():
        wanted, _ = parts.causal_conv1d_update(x, other, None, weight, None, "silu")
    torch.testing.assert_close(y, wanted)
    assert torch.equal(cache, other)
    y.sum().backward()
    assert weight.grad.any()
    assert not cache.requires_grad  # so the next token goes back through itself alone
    y, _ = parts.causal_conv1d_update(x.detach(), cache, None, weight, None, "silu")
    y.sum().backward()


@pytest.mark.parametrize("shape", ["rows", "one token", "packed", "heads"])
def test_convolution_of_one_token(shape):
    """The cache is updated in place, and the results are those of the whole text."""
    x, weight, bias = torch.randn(3, 7, 6), torch.randn(6, 4), torch.randn(6)
    residual = torch.randn_like(x)
    whole, final = parts.causal_conv1d(x, weight, bias, residual, None, True, "silu")
    cache = torch.zeros(3, 6, 4)
    for t in range(7):
        view = {"rows": (3, 6), "one token": (3, 1, 6), "packed": (1, 3, 6), "heads": (3, 1, 2, 3)}[shape]
        y, same = parts.causal_conv1d_update(
            x[:, t].reshape(view), cache, residual[:, t].reshape(view), weight, bias, "silu"
        )
        assert same is cache
        torch.testing.assert_close(y.reshape(3, 6), whole[:, t])
    torch.testing.assert_close(cache, final)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(affine, dtype):
    x, residual = torch.randn(2, 5, 12, dtype=dtype), torch.randn(2, 5, 12)
    weight, bias = (torch.randn(12), torch.randn(12)) if affine else (None, None)
    total = x.float() + residual
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}

    rms = functional.rms_norm(total, (12,), weight, 1e-5)
    y, carried = parts.rms_norm(x, weight, None, residual, prenorm=True)
    torch.testing.assert_close(y, rms.to(dtype), **close)
    torch.testing.assert_close(carried, total)
    layer = functional.layer_norm(total, (12,), weight, bias, 1e-5)
    torch.testing.assert_close(parts.layer_norm(x, weight, bias, residual), layer.to(dtype), **close)
    groups = functional.group_norm(total.flatten(0, 1), 3, weight, bias, 1e-5).view(2, 5, 12)
    y = parts.group_norm(x, weight, bias, residual, num_groups=3)
    torch.testing.assert_close(y, groups.to(dtype), **close)

    g = torch.randn(2, 5, 12, dtype=dtype)
    for activation, gate in (
        ("swish", functional.silu),
        ("silu", functional.silu),
        ("sigmoid", torch.sigmoid),
    ):
        y = parts.rms_norm_gated(x, g, weight, None, activation, residual, eps=1e-5)
        torch.testing.assert_close(y, (rms * gate(g.float())).to(dtype), **close)
        y, _ = parts.layer_norm_gated(x, g, weight, bias, activation, residual, prenorm=True, eps=1e-5)
        torch.testing.assert_close(y, (layer * gate(g.float())).to(dtype), **close)


@pytest.mark.parametrize("residual_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_sums_that_norms_hand_on(residual_dtype, in_fp32):
    """In the residual's dtype, else in float32 if asked for, else in x's."""
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    residual = None if residual_dtype is None else torch.randn(2, 8, dtype=residual_dtype)
    _, carried = parts.rms_norm(x, None, None, residual, prenorm=True, residual_in_fp32=in_fp32)
    wanted = residual_dtype or (torch.float32 if in_fp32 else torch.bfloat16)
    assert carried.dtype == wanted
    total = x.float() if residual is None else x.float() + residual.float()
    torch.testing.assert_close(carried, total.to(wanted))


def test_l2norm():
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    expected = functional.normalize(x.float(), dim=-1)
    y = parts.l2norm(x, output_dtype=torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(parts.l2norm(x), y.bfloat16())


def turned(x, position, angles, interleaved):
    """Pairs of channels as complex numbers, multiplied by that of their angle."""
    half = angles.shape[1]
    pairs = x[..., : 2 * half]
    pairs = (
        pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    )
    by = torch.polar(torch.ones(len(position), half), angles[position]).unsqueeze(1)
    made = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * by)
    made = made if interleaved else made.transpose(-1, -2)
    return torch.cat([made.flatten(-2), x[..., 2 * half :]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, "each"])
def test_rotary(interleaved, inplace, offsets):
    angles = torch.rand(20, 4) * 6
    x = torch.randn(3, 7, 2, 10)
    by_row = [1, 0, 5] if offsets == "each" else [offsets] * 3
    given = torch.tensor(by_row) if offsets == "each" else offsets
    expected = torch.stack(
        [
            turned(row, torch.arange(7) + offset, angles, interleaved)
            for row, offset in zip(x, by_row, strict=True)
        ]
    )
    options = {"seqlen_offsets": given, "interleaved": interleaved, "inplace": inplace}
    copy = x.clone()
    y = parts.rotary_embedding_fwdbwd(copy, angles.cos(), angles.sin(), **options)
    torch.testing.assert_close(y, expected)
    assert (y is copy) == inplace
    back = parts.rotary_embedding_fwdbwd(y.clone(), angles.cos(), angles.sin(), conjugate=True, **options)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("offsets", [0, 2, "each"])
def test_rotary_of_packed_sequences(offsets):
    angles = torch.rand(20, 4) * 6
    x = torch.randn(1, 12, 2, 8)
    ends, by_sequence = [0, 5, 5, 11], [1, 7, 4] if offsets == "each" else [offsets] * 3
    y = parts.rotary_embedding_fwdbwd(
        x, angles.cos(), angles.sin(), torch.tensor(by_sequence) if offsets == "each" else offsets,
        torch.tensor(ends),
    )  # fmt: skip
    for (begin, end), offset in zip(pairwise(ends), by_sequence, strict=True):
        if end > begin:
            expected = turned(x[0, begin:end], torch.arange(end - begin) + offset, angles, False)
            torch.testing.assert_close(y[0, begin:end], expected)
    assert (y[0, 11:] == 0).all()


@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_outside_of_the_table(inplace):
    """Left-padded rows have tokens before the first position."""
    angles, x = torch.rand(4, 4), torch.randn(1, 6, 1, 8)
    y = parts.rotary_embedding_fwdbwd(
        x.clone(), angles.cos(), angles.sin(), torch.tensor([-1]), inplace=inplace
    )
    for t in (0, 5):
        assert torch.equal(y[:, t], x[:, t] if inplace else torch.zeros(1, 1, 8))
    torch.testing.assert_close(y[0, 1:5], turned(x[0, 1:5], torch.arange(4), angles, False))


def test_activations():
    x, y, upstream = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected = functional.silu(x)
    torch.testing.assert_close(parts.swish_fwd(x), expected)
    torch.testing.assert_close(parts.swish_bwd(x, upstream), torch.autograd.grad(expected, x, upstream)[0])
    expected = functional.silu(x) * y
    torch.testing.assert_close(parts.swiglu_fwd(x, y), expected)
    gradients = torch.autograd.grad(expected, (x, y), upstream, retain_graph=True)
    torch.testing.assert_close(parts.swiglu_fwdbwd(x, y, upstream), gradients)
    torch.testing.assert_close(parts.swiglu_fwdbwd(x, y, upstream, True), (*gradients, expected))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: parts.causal_conv1d(x), "without weight"),
        (lambda x: parts.causal_conv1d(x, x[0], activation="gelu"), "activation must be swish, silu or None"),
        (lambda x: parts.causal_conv1d(x, x[0], cp_context=object()), "cp_context of a short convolution"),
        (
            lambda x: parts.rms_norm_gated(x, x, None, None, "gelu"),
            "activation must be swish, silu or sigmoid",
        ),
        (lambda x: parts.rms_norm(x, None, None, x[:1]), "residual must have x's shape"),
        (lambda x: parts.group_norm(x, None, None, num_groups=3), "num_groups must divide the channels"),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises((NotImplementedError, ValueError), match=sentence):
        call(torch.randn(2, 4, 4))


@pytest.mark.parametrize("function", parts.FUNCTIONS.values(), ids=lambda each: each.__name__)
def test_other_devices(function):
    required = [
        name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty
    ]
    given = dict.fromkeys(required, torch.empty(2, 4, 4, device="meta"))
    with pytest.raises(NotImplementedError, match="on CPU tensors alone, this one is on meta"):
        function(**given)
