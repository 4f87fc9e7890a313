# SPDX-License-Identifier: Apache-2.0
"""The operators of the short convolution and the gated RMSNorm as PyTorch sees them: opcheck, torch.compile,
versions of what is written, transforms that are refused."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from cula import conv, norm

pytestmark = pytest.mark.cpu_only("the kernels are those of CPUs")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def test_opcheck_of_the_convolution():
    x, weight, bias, state = tensors((2, 9, 16), (16, 4), (16,), (2, 16, 4))
    lengths, numbers = torch.tensor([0, 4, 9]), torch.arange(18).reshape(2, 9) // 4
    for each in (x, weight, bias, state):
        each.requires_grad_()
    op = torch.ops.cula.causal_conv1d.default
    torch.library.opcheck(op, (x, weight, bias, state), {"silu": True, "final_state_len": 3})
    torch.library.opcheck(op, (x, weight, None, None, None, numbers))
    torch.library.opcheck(op, (x[:1], weight, bias, state, lengths), {"final_state_len": 5})
    first = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(op, (first, weight))


def test_opcheck_of_its_gradients():
    x, weight, bias, state, d_y, d_state = tensors(
        (2, 9, 16), (16, 4), (16,), (2, 16, 4), (2, 9, 16), (2, 16, 3)
    )
    op = torch.ops.cula.causal_conv1d_backward.default
    torch.library.opcheck(op, (x, weight, bias, state, None, None, True, d_y, d_state, 15))
    torch.library.opcheck(op, (x, weight, None, None, None, None, False, d_y, None, 2))


def test_opcheck_of_the_next_token():
    x, weight, state = tensors((2, 1, 16), (16, 4), (5, 16, 4))
    slots, before = torch.tensor([3, 1]), torch.tensor([7, 2])
    op = torch.ops.cula.causal_conv1d_update.default
    torch.library.opcheck(op, (x, state, weight), {"silu": True, "conv_state_indices": slots})
    torch.library.opcheck(op, (x, state, weight), {"cache_seqlens": before})


def test_opcheck_of_the_norm():
    x, gate, weight, bias = (each.requires_grad_() for each in tensors((2, 9, 16), (2, 9, 16), (16,), (16,)))
    op = torch.ops.cula.rms_norm_gated.default
    torch.library.opcheck(op, (x, gate, weight, bias, 1e-5, True))
    torch.library.opcheck(
        op, (x, gate, weight), {"norm_before_gate": False, "group_size": 8, "zero_centered": True}
    )
    torch.library.opcheck(op, (x,))
    backward = torch.ops.cula.rms_norm_gated_backward.default
    given = [each.detach() for each in (x, gate, weight, bias)]
    torch.library.opcheck(backward, (*given, 1e-5, False, True, 0, False, given[0], 15))


def test_compiled_forward_and_backward_are_one_graph():
    x, weight, scale = tensors((2, 9, 16), (16, 4), (16,), dtype=torch.bfloat16)

    def layer(x, weight, scale):
        y = conv.causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)
        return norm.rms_norm_gated(y, x, scale)

    made = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        own = [each.clone().requires_grad_() for each in (x, weight, scale)]
        y = function(*own)
        y.float().square().sum().backward()
        made.append([y.detach(), *(each.grad for each in own)])
    for eager, compiled in zip(*made, strict=True):
        assert torch.equal(eager, compiled)


def test_compiled_tokens_are_written_in_place():
    x, weight, state = tensors((2, 16), (16, 4), (2, 16, 4))
    other = state.clone()

    def step(x, state, weight):
        return conv.causal_conv1d_update(x, state, weight, activation="silu") * 2

    wanted = step(x, state, weight)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(x, other, weight)
    assert torch.equal(found, wanted)
    assert torch.equal(state, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_pools_are_written_in_place(dtype):
    """In float64 by plain PyTorch, which has no host read either; null rows write nothing, be slot 0 free or
    taken."""
    x, weight, pool, token = tensors((1, 16, 9), (16, 4), (6, 16, 4), (3, 16), dtype=dtype)
    lengths = torch.tensor([0, 2, 2, 9], dtype=torch.int32)

    def both(pool, slots):
        y = conv.causal_conv1d_fn(
            x, weight, activation="silu", query_start_loc=lengths, conv_states=pool, cache_indices=slots
        )
        return y, conv.causal_conv1d_update(token, pool, weight, conv_state_indices=slots)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for given in ([4, -1, 0], [-1, 2, 5], [-1, -1, -1], [0, -1, -1]):
        slots, made = torch.tensor(given), []
        for function in (both, compiled):
            own = pool.clone()
            made.append([*function(own, slots), own])
        for eager, other in zip(*made, strict=True):
            torch.testing.assert_close(eager, other, rtol=1e-6, atol=1e-6)
        untouched = [n for n in range(6) if n not in given]
        assert torch.equal(made[1][2][untouched], pool[untouched])


def test_a_written_state_is_a_new_version():
    """So autograd finds that what it saved has changed."""
    x, weight, state = tensors((2, 16), (16, 4), (2, 16, 4))
    factor = torch.ones((), requires_grad=True)
    product = factor * state
    conv.causal_conv1d_update(x, state, weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    for op in (torch.ops.cula, torch.ops.cula_unchecked):
        assert op.causal_conv1d_update(x[:, None], state, weight).shape == (2, 1, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the kernel, and plain PyTorch
@pytest.mark.parametrize("of", ["x", "conv_state", "weight", "bias"])
def test_the_next_token_has_no_gradient(of, dtype):
    shapes = {"x": (2, 16), "conv_state": (2, 16, 4), "weight": (16, 4), "bias": (16,)}
    given = dict(zip(shapes, tensors(*shapes.values(), dtype=dtype), strict=True))
    before = given["conv_state"].clone()
    given[of].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{of} requires gradients"):
        conv.causal_conv1d_update(**given)
    assert torch.equal(given["conv_state"], before)
    with torch.no_grad():
        conv.causal_conv1d_update(**given)
    assert not torch.equal(given["conv_state"], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("null", [0, 1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_a_null_row_without_indices_leaves_its_state(packed, null, dtype):
    x, weight, state = tensors((3, 16), (16, 4), (4, 16, 4), dtype=dtype)
    lengths = {"query_start_loc": torch.arange(4)} if packed else {}
    whole, own = state.clone(), state.clone()
    wanted = conv.causal_conv1d_update(x, whole, weight, **lengths)
    y = conv.causal_conv1d_update(x, own, weight, **lengths, pad_slot_id=null)
    others = [n for n in range(3) if n != null]
    assert not y[null].any()
    assert torch.equal(y[others], wanted[others])
    assert torch.equal(own[[null, 3]], state[[null, 3]])
    assert torch.equal(own[others], whole[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slots", [None, torch.zeros(0, dtype=torch.int32)])
def test_no_rows_have_no_next_token(slots, dtype):
    x, weight, state = tensors((0, 16), (16, 4), (4, 16, 4), dtype=dtype)
    before = state.clone()
    assert conv.causal_conv1d_update(x, state, weight, conv_state_indices=slots).shape == (0, 16)
    assert torch.equal(state, before)


OF_BOTH = {
    **dict.fromkeys(("x", "weight"), ([1.0], "must be a tensor, got list")),
    **dict.fromkeys(("bias", "query_start_loc"), ([1], "must be a tensor or None, got list")),
    "pad_slot_id": ("a", "must be of type int, got str"),
    "activation": (True, "must be of type str or None, got bool"),
}
OF_PROMPTS = {
    **OF_BOTH,
    **dict.fromkeys(
        ("seq_idx", "initial_states", "final_states_out", "conv_states", "cache_indices",
         "has_initial_state"), ([1], "must be a tensor or None, got list"),
    ),
    "return_final_states": ("no", "must be of type bool, got str"),
}  # fmt: skip
OF_STEPS = {
    **OF_BOTH,
    "conv_state": ([1.0], "must be a tensor, got list"),
    **dict.fromkeys(
        ("cache_seqlens", "conv_state_indices", "num_accepted_tokens"),
        (3, "must be a tensor or None, got int"),
    ),
}
OF_NORMS = {
    "x": ([1.0], "must be a tensor, got list"),
    **dict.fromkeys(("g", "weight", "bias", "residual"), ([1.0], "must be a tensor or None, got list")),
    **dict.fromkeys(
        ("prenorm", "residual_in_fp32", "norm_before_gate", "zero_centered"),
        ("no", "must be of type bool, got str"),
    ),
    "eps": (None, "must be of type float, got NoneType"),
    "group_size": (True, "must be of type int, got bool"),
    "activation": (["swish"], "must be of type str, got list"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of", ["prompts", "steps", "norms"])
def test_arguments_of_other_types_are_named(of, dtype):
    x, row, weight, state = tensors((2, 16, 9), (2, 16), (16, 4), (2, 16, 4), dtype=dtype)
    function, given, wrong = {
        "prompts": (conv.causal_conv1d_fn, {"x": x, "weight": weight}, OF_PROMPTS),
        "steps": (conv.causal_conv1d_update, {"x": row, "conv_state": state, "weight": weight}, OF_STEPS),
        "norms": (norm.rms_norm_gated, {"x": row, "g": row, "weight": weight[:, 0]}, OF_NORMS),
    }[of]
    before = state.clone()
    for name, (value, words) in wrong.items():
        with pytest.raises(TypeError, match=f"^{name} {words}$"):
            function(**{**given, name: value})
    assert torch.equal(state, before)
    function(**given)


def test_a_norm_of_another_type_of_activation():
    with pytest.raises(TypeError, match="activation must be of type str, got NoneType"):
        norm.RMSNormGated(8, activation=None)


@pytest.mark.parametrize("of", ["x", "weight"])
def test_tangents_are_refused(of):
    """By the operators and by what the package calls; a tangent would be lost."""
    given = dict(zip(("x", "weight", "conv_state"), tensors((2, 1, 16), (16, 4), (2, 16, 4)), strict=True))
    with forward_ad.dual_level():
        given[of] = forward_ad.make_dual(given[of], torch.ones_like(given[of]))
        x, weight, state = given.values()
        calls = (
            lambda: torch.ops.cula.causal_conv1d(x, weight),
            lambda: torch.ops.cula.causal_conv1d(x=x, weight=weight),
            lambda: torch.ops.cula.causal_conv1d_update(x, state, weight),
            lambda: torch.ops.cula.rms_norm_gated(x, weight=weight[:, 0]),
            lambda: conv.causal_conv1d_fn(x.transpose(1, 2), weight),
            lambda: conv.causal_conv1d_update(x[:, 0], state, weight),
            lambda: norm.rms_norm_gated(x, None, weight[:, 0]),
        )
        for call in calls:
            with pytest.raises(NotImplementedError, match=f"{of} has a tangent"):
                call()


def test_transforms_of_gradients_are_refused():
    x, weight = tensors((2, 9, 16), (16, 4))
    with pytest.raises(NotImplementedError, match=r"x requires gradients within torch\.func"):
        torch.func.grad(lambda x: torch.ops.cula.causal_conv1d(x, weight)[0].sum())(x)


def test_arguments_by_name_have_gradients():
    x, weight, bias = (each.requires_grad_() for each in tensors((2, 9, 16), (16, 4), (16,)))
    made = []
    for given in (
        {"weight": weight, "bias": bias, "silu": True},
        {"silu": True, "bias": bias, "weight": weight},
    ):
        y, _ = torch.ops.cula.causal_conv1d(x, **given)
        made.append(torch.autograd.grad(y.sum(), (x, weight, bias)))
    y, _ = torch.ops.cula.causal_conv1d(x, weight, bias, None, None, None, True)
    made.append(torch.autograd.grad(y.sum(), (x, weight, bias)))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


def test_vmap_is_refused():
    x, weight = tensors((3, 2, 9, 16), (16, 4))
    with pytest.raises(NotImplementedError, match=r"torch\.vmap is not built"):
        torch.vmap(lambda x: torch.ops.cula.causal_conv1d(x, weight)[0])(x)


def test_gradients_of_what_is_not_given_are_refused():
    x, weight = tensors((2, 9, 16), (16, 4))
    with pytest.raises(ValueError, match="gradients must ask for none of what is not given"):
        torch.ops.cula.causal_conv1d_backward(x, weight, None, None, None, None, False, x, None, 4)


@pytest.mark.parametrize("backend", ["sm90", "cpu:neon"])
def test_another_backend_is_refused(backend):
    x, weight = tensors((2, 9, 16), (16, 4))
    with pytest.raises(ValueError, match=r"backend must be one of .*cpu:portable, got"):
        torch.ops.cula.causal_conv1d(x, weight, backend=backend)
