# SPDX-License-Identifier: Apache-2.0
"""What a prefill keeps for the backward pass of the same call (`disable_recompute`; the operand `saved`): the
gradients have the bits of those that compute all again, on every target and in every layout of a call, and
the memory is what docs/guide/training.md says. What keeps nothing is in tests/api/test_disable_recompute.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cula
from cula._explain import Row
from cula_testing import device, gradients, level1, passes
from cula_testing.cases import DELTA, Case, Inputs, make
from cula_testing.compare import assert_same_bits

WIDE = {"key_dim": 128, "value_dim": 128}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def rows_of(case: Case) -> list[Row]:
    """The targets that keep something of a case."""
    rows = cula.explain(
        case.algorithm, batch=case.batch, tokens=case.tokens, sequences=case.sequences, heads=case.heads,
        value_heads=case.value_heads, key_dim=case.key_dim, value_dim=case.value_dim, dtype=case.dtype,
        varlen=case.packed, gate=case.gate, device=device.kind(), disable_recompute=True, writes=case.writes,
    )  # fmt: skip
    return [row for row in rows if row.verdict != "no"]


SAVERS = pytest.mark.parametrize("saver", [row.target for row in rows_of(Case("kda", (64,), **WIDE))])


def room(case: Case, target: str) -> torch.Tensor:
    """Memory for what the target keeps, full of NaN."""
    row = next((row for row in rows_of(case) if row.target == target), None)
    if row is None:
        pytest.skip(f"{target} does not take this call")
    size = row.saving.chunk_tokens
    rows = case.tokens * case.writes
    of_rows = rows // size + case.sequences if case.packed else -(-rows // size) * case.batch
    shape = (of_rows, case.value_heads, row.saving.bytes // 4)
    return torch.full(shape, 0x7FC07FC0, dtype=torch.int32)


def kept(inputs: Inputs, target: str, **options) -> torch.Tensor:
    """By a prefill whose outputs obey the error rule."""
    saved = room(inputs.case, target)

    def prefill(inputs: Inputs, backend: str) -> passes.Result:
        keeps = {"saved": saved} if backend == target else {}
        return passes.prefill(inputs, backend=backend, **keeps, **options)

    passes.assert_rule(prefill, inputs, target)
    return saved


def assert_same(one: gradients.Gradients, two: gradients.Gradients) -> None:
    for name, gradient in one.items():
        assert_same_bits(f"d_{name}", gradient, two[name])


def check(case: Case, target: str, **options) -> None:
    """Both halves, and the second twice: what was kept is only read."""
    inputs = make(case)
    given = gradients.upstream(inputs)
    saved = kept(inputs, target, **options)
    before = saved.clone()
    wanted = gradients.backward(inputs, *given, backend=target, **options)
    for _ in range(2):
        assert_same(wanted, gradients.backward(inputs, *given, backend=target, saved=saved, **options))
    assert_same_bits("saved", before, saved)


SHAPES = {
    "one": {"lengths": (700,), "heads": 4, "value_heads": 4},
    "batch": {"lengths": (100, 100, 100), "heads": 2, "value_heads": 2},
    "packed": {"lengths": (150, 0, 65, 64), "packed": True, "tail": 70, "heads": 2, "value_heads": 2},
    "scheduled": {"lengths": (7,) * 40 + (300,), "packed": True, "heads": 1, "value_heads": 1},
    "grouped": {"lengths": (200,), "heads": 2, "value_heads": 6},
    "few heads": {"lengths": (3000,), "heads": 1, "value_heads": 1, "decay": "slow"},
    "few heads, packed": {
        "lengths": (64 * 40, 0, 5, 64 * 33 + 7), "packed": True, "heads": 1, "value_heads": 1,
    },
    "many heads": {"lengths": (300,), "heads": 150, "value_heads": 150},
}  # fmt: skip


@SAVERS
@HALVES
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_have_the_same_bits(algorithm, shape, dtype, saver):
    check(Case(algorithm, dtype=dtype, qk_l2norm=True, **WIDE, **SHAPES[shape]), saver)


@SAVERS
@pytest.mark.parametrize(("K", "V"), [(64, 64), (256, 256), (40, 72), (100, 17), (129, 255), (17, 33)])
def test_dimensions(algorithm, K, V, saver):
    like = Case(algorithm, (150, 0, 65), packed=True, value_heads=4, key_dim=K, value_dim=V)
    check(like, saver)


@SAVERS
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("algorithm", ["kda", "gdn"])
def test_raw_gates(algorithm, gate, saver):
    case = Case(algorithm, (300,), gate=gate, gate_dtype=torch.bfloat16, beta_is_logit=True, qk_l2norm=True)
    check(case.but(**WIDE), saver)


@SAVERS
@pytest.mark.parametrize("algorithm", DELTA)
def test_keys_that_nearly_coincide(algorithm, saver):
    """Chunks whose operands have two words."""
    check(Case(algorithm, (300,), keys="collinear", qk_l2norm=True, **WIDE), saver)


@SAVERS
@pytest.mark.parametrize("algorithm", DELTA)
def test_write_strengths_of_zero(algorithm, saver):
    """d_beta of masked tokens is that of chunks, which take 2^-40 for them: in the prefill, too."""
    inputs = make(Case(algorithm, (200,), **WIDE))
    inputs.beta[:, ::3] = 0
    saved = room(inputs.case, saver)
    passes.prefill(inputs, backend=saver, saved=saved)
    given = gradients.upstream(inputs)
    found = gradients.backward(inputs, *given, backend=saver, saved=saved)
    assert_same(gradients.backward(inputs, *given, backend=saver), found)
    assert found["beta"][:, ::3].any()


@SAVERS
def test_batch_invariant(algorithm, saver):
    case = Case(algorithm, (2000, 70), packed=True, heads=2, value_heads=2, **WIDE)
    check(case, saver, batch_invariant=True)


@SAVERS
@pytest.mark.parametrize("wanted", ["v", "v initial_state", "q", "beta g"])
def test_some_gradients(algorithm, wanted, saver):
    inputs = make(Case(algorithm, (400, 90), packed=True, **WIDE))
    given, saved = gradients.upstream(inputs), kept(inputs, saver)
    names = [name for name in wanted.split() if name in gradients.names(inputs)]
    every = gradients.backward(inputs, *given, backend=saver)
    some = gradients.backward(inputs, *given, backend=saver, saved=saved, wanted=names)
    assert sorted(some) == sorted(names)
    assert_same(some, every)


def test_what_one_target_kept_another_reads(algorithm):
    """Within the error rule: targets add up in orders of their own."""
    inputs = make(Case(algorithm, (300, 70), packed=True, **WIDE))
    targets = [row.target for row in rows_of(inputs.case)]
    if len(targets) < 2:
        pytest.skip("one saver runs here")
    given = gradients.upstream(inputs)
    oracle = gradients.exact(inputs, *given)
    naive = gradients.backward(inputs, *given, backend="reference:naive")
    for by, reader in ((targets[0], targets[-1]), (targets[-1], targets[0])):
        saved = kept(inputs, by)
        found = gradients.backward(inputs, *given, backend=reader, saved=saved)
        gradients.assert_near(inputs, found, oracle, naive)


# Refusals of the operators.


@SAVERS
def test_what_does_not_fit_is_refused(saver):
    inputs = make(Case("kda", (130,), **WIDE))
    given, right = gradients.upstream(inputs), room(inputs.case, saver)
    chunks, heads, words = right.shape
    wrong = {
        r"saved must have shape \[3, 2, \d+\] \(chunks, value heads, words\), got \[4,": right.new_empty(
            (chunks + 1, heads, words)
        ),
        r"saved must have shape .*, got \[3, 2, 7\]": right.new_empty((chunks, heads, 7)),
        "saved must have dtype int32": right.float(),
        "saved must be contiguous": right.new_empty((chunks, heads, words + 1))[..., :words],
        "saved must start at a multiple of 128 bytes": right.new_empty(right.numel() + 1)[1:].view_as(right),
    }
    for message, saved in wrong.items():
        with pytest.raises(ValueError, match=message):
            passes.prefill(inputs, backend=saver, saved=saved)
        with pytest.raises(ValueError, match=message):
            gradients.backward(inputs, *given, backend=saver, saved=saved)


def test_a_backward_that_reads_nothing_says_so():
    inputs = make(Case("kda", (130,), **WIDE))
    saved = room(inputs.case, "sm80")
    with pytest.raises(ValueError, match="sm80:step: computes all itself, and takes no saved"):
        gradients.backward(inputs, *gradients.upstream(inputs), backend="sm80:step", saved=saved)


# Through the function, and what autograd keeps.


def leaves_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: getattr(inputs, name).detach().requires_grad_() for name in gradients.names(inputs)}


def trained(inputs: Inputs, disable_recompute: bool, function=level1.prefill) -> gradients.Gradients:
    leaves = leaves_of(inputs)
    made = function(inputs.but(**leaves), disable_recompute=disable_recompute)
    found = torch.autograd.grad(made, leaves.values(), gradients.upstream(inputs))
    return dict(zip(leaves, found, strict=True))


LAYER = Case("kda", (300, 70), packed=True, gate="softplus", qk_l2norm=True, **WIDE)
LAYERS = {
    "kda": LAYER,
    "gdn": LAYER.but(algorithm="gdn"),
    "gdn2": LAYER.but(algorithm="gdn2"),
    "gdp": LAYER.but(algorithm="gdp"),
    "gla": LAYER.but(algorithm="gla", gate="log_decay"),
    "delta": LAYER.but(algorithm="delta", gate="log_decay"),
}


def kept_bytes(inputs: Inputs, **options) -> int:
    """Of what a call saves besides its inputs."""
    leaves, saved = leaves_of(inputs), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        level1.prefill(inputs.but(**leaves), disable_recompute=True, **options)
    return sum(x.nbytes for x in saved if x.dtype == torch.int32 and x.dim() == 3)


@pytest.mark.parametrize("algorithm", LAYERS)
def test_the_function_has_the_same_gradients(algorithm):
    inputs = make(LAYERS[algorithm])
    assert kept_bytes(inputs) > 0
    assert_same(trained(inputs, False), trained(inputs, True))
    assert_same(
        trained(inputs, False, lambda *a, **named: level1.prefill(*a, **named, backend="sm80")),
        trained(inputs, True, lambda *a, **named: level1.prefill(*a, **named, backend="sm80")),
    )


@pytest.mark.parametrize("algorithm", LAYERS)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (100, 40), (256, 256)])
def test_what_is_kept_is_what_the_guide_says(K, V, algorithm):
    case = LAYERS[algorithm].but(lengths=(640,), packed=False, key_dim=K, value_dim=V)
    C, channels, values = (
        (64 if K <= 128 else 32),
        (64 if K <= 64 else 128 if K <= 128 else 256),
        -(-V // 16) * 16,
    )
    of_chunk = 4 * C * (C + 16) + 2 * values * (channels + C)
    per_channel = algorithm in ("kda", "gdn2", "gla")
    of_chunk += 6 * C * channels + 4 * (channels + 1) if per_channel else 16 * C + 4
    assert kept_bytes(make(case)) == 640 * case.writes // C * case.value_heads * of_chunk


@pytest.mark.parametrize(
    "case",
    [
        LAYER.but(dtype=torch.float32),
        LAYER.but(value_dim=300),
        LAYER.but(gate="log_decay", beta_per_value=True),
        LAYER.but(key_dim=8),
    ],
    ids=["float32", "wide", "beta per value", "narrow"],
)
def test_what_no_kernel_keeps_is_computed_again(case):
    inputs = make(case)
    assert kept_bytes(inputs) == 0
    assert_same(trained(inputs, False), trained(inputs, True))


def test_more_than_a_slab_is_computed_again():
    case = Case("kda", (64 * 4000,), heads=64, value_heads=64, **WIDE)
    assert rows_of(case) == []
    rows = cula.explain("kda", tokens=case.tokens, heads=64, device=device.kind(), disable_recompute=True)
    assert any("saves from 1 to" in row.reason for row in rows)
    assert "nothing is kept" in rows.note


def test_a_backend_that_keeps_nothing_runs():
    inputs = make(LAYER)
    assert kept_bytes(inputs, backend="sm80:whole") == 0
    assert kept_bytes(inputs, backend="sm80") > 0


def test_checkpointing():
    inputs = make(LAYER)

    def function(inputs: Inputs, **options):
        return checkpoint(lambda: level1.prefill(inputs, **options), use_reentrant=False)

    assert_same(trained(inputs, False), trained(inputs, True, function))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """One graph in both directions, for all lengths."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def function(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens):
        return cula.cula_kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=True, initial_state=initial_state, output_final_state=True,
            disable_recompute=True,
        )  # fmt: skip

    def compiled(inputs: Inputs, **_):
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
        return function(*(getattr(inputs, name) for name in names))

    for lengths in ((300, 70), (40, 500), (90, 91)):
        inputs = make(LAYER.but(lengths=lengths))
        assert_same(trained(inputs, False), trained(inputs, True, compiled))


def test_one_graph_of_both_directions():
    """Captured once, replayed with other values and other lengths of the same total."""
    case = LAYER.but(lengths=(70, 9, 121))
    inputs = make(case)
    leaves, factors = leaves_of(inputs), torch.randn_like(inputs.v)

    def both_directions(leaves: dict[str, torch.Tensor]) -> None:
        o, final_state = level1.prefill(inputs.but(**leaves), disable_recompute=True)
        ((o * factors).float().sum() + final_state.sum()).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both_directions(leaves)
        for leaf in leaves.values():
            leaf.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both_directions(leaves)
    for seed, ends in ((1, (0, 70, 79, 200)), (2, (0, 0, 190, 200)), (3, (0, 64, 128, 192))):
        fresh = make(case.but(seed=seed))
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(getattr(fresh, name))
            inputs.cu_seqlens.copy_(torch.tensor(ends))
        graph.replay()
        again = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
        both_directions(again)
        for name, leaf in leaves.items():
            assert_same_bits(f"{name} of {ends}", again[name].grad, leaf.grad)


def test_the_backward_pass_makes_nothing_again():
    inputs = make(LAYER)
    leaves = leaves_of(inputs)
    made = level1.prefill(inputs.but(**leaves), disable_recompute=True)
    given = gradients.upstream(inputs)

    def backward() -> None:
        torch.autograd.grad(made, leaves.values(), given, retain_graph=True)

    names = device.kernels_of(backward)
    assert any("gradient_anchored" in name for name in names), names
    assert not any("prepare" in name for name in names), names


def test_no_sequences_at_all():
    """Outputs that belong to no sequence are zeros, whatever the memory held."""
    tokens = 130
    q, k, v, g = (torch.randn(1, tokens, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    beta = torch.rand(1, tokens, 2, dtype=torch.bfloat16, device="cuda")
    torch.full((4 * q.numel(),), float("nan"), dtype=torch.bfloat16, device="cuda")  # freed at once
    o, _ = cula.cula_kda(
        q.requires_grad_(), k, v, -g.abs(), beta, cu_seqlens=torch.zeros(1, dtype=torch.int32, device="cuda"),
        disable_recompute=True,
    )  # fmt: skip
    assert not o.any()
