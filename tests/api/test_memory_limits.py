# SPDX-License-Identifier: Apache-2.0
"""Calls whose states lie in each other's way, whose tables have no room, or for which memory does not
suffice."""

from __future__ import annotations

import pytest
import torch

import cula
from cula_testing import device, passes
from cula_testing.arguments import BASE, arguments, pooled, refused
from cula_testing.cases import Case, make
from cula_testing.compare import assert_same_bits
from cula_testing.process import run_python


def test_a_table_of_no_drafts_is_refused():
    """Of rows without tokens, which would start from an element that is not there."""
    case = BASE.but(lengths=(0, 0))
    more = pooled(initial_state_indices=None, state_indices=torch.empty(2, 0, dtype=torch.int32))
    sentence = refused("verify", {**arguments("verify", case), **more})
    assert sentence == "verify: state_indices must have a slot that each sequence starts from, got [2, 0]"


def flash_kda_fwd(initial_state: torch.Tensor, final_state: torch.Tensor) -> None:
    from cula.compat import flash_kda

    case = Case("kda", (20, 20), key_dim=16, value_dim=16, gate="bounded", qk_l2norm=True, beta_is_logit=True)
    x = make(case.but(gate_dtype=torch.bfloat16, scale=0.1))
    flash_kda.fwd(
        x.q, x.k, x.v, x.g, x.beta, 0.1, passes.empty_o(x), A_log=x.A_log, dt_bias=x.dt_bias,
        lower_bound=-5.0, initial_state=initial_state, final_state=final_state,
    )  # fmt: skip


def test_buffers_that_overlap_in_other_places_are_refused():
    case = Case("kda", (20, 20), key_dim=16, value_dim=16)
    heads = make(case).v.shape[2]
    states = torch.zeros(3, heads, 16, 16)
    before = states.clone()
    for other in (states[1:], states[:2].mT):
        with pytest.raises(ValueError, match="final_state must have each element where initial_state has it"):
            flash_kda_fwd(states[:2], other)
    assert_same_bits("states", before, states)
    flash_kda_fwd(states[:2], states[:2])  # in place
    pages = torch.zeros(2, 3, heads, 16, 16)  # two states and something else in each page
    flash_kda_fwd(pages[:, 0], pages[:, 2])
    assert_same_bits("states", states[:2], pages[:, 2])
    assert not pages[:, :2].any()


def overlapping(tokens: int = 20):
    """q, k, v and a place for o as columns of one tensor, and what else a call needs."""
    rows = torch.randn(2, tokens, 4, 4, 16)
    q, k, v, out = rows.unbind(2)
    return q, k, v, out, {"g": torch.zeros(2, tokens, 4, 16), "beta": torch.rand(2, tokens, 4)}


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "states"])
@pytest.mark.parametrize(("function", "tokens"), [("prefill", 20), ("decode", 1), ("verify", 2)])
def test_outputs_in_memory_that_is_read_are_refused(name, function, tokens):
    q, k, v, _, gates = overlapping(tokens)
    pool = torch.zeros(2 + tokens, 4, 16, 16)
    read = {"q": q, "k": k, "v": v, "g": gates["g"], "states": pool.flatten()[: q.numel()].view(q.shape)}
    before = {each: x.clone() for each, x in read.items()}
    functions = {"prefill": cula.cula_kda, "decode": cula.cula_decode, "verify": cula.cula_verify}
    states = {"initial_state": pool[:2]} if function == "prefill" else {"state": pool}
    with pytest.raises(ValueError, match=rf"{function}: out must share no memory with "):
        functions[function](q, k, v, **gates, **states, out=read[name])
    for each, x in before.items():
        assert_same_bits(each, x, read[each])


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
@pytest.mark.parametrize("written", ["snapshots", "checkpoints"])
def test_states_in_memory_of_inputs_are_refused(name, written):
    tokens, heads, width = 2, 4, 16
    q, k, v, _, gates = overlapping(tokens)
    memory = torch.randn(2 * tokens * heads * width * width)
    named = {"q": q, "k": k, "v": v, **gates}
    named[name] = memory[: 2 * tokens * heads * width].view(2, tokens, heads, width)
    states, before = memory.view(2, tokens, heads, width, width), memory.clone()
    state = torch.zeros(2, heads, width, width)
    plan = torch.tensor([[0, tokens, 0], [1, tokens, 1]], dtype=torch.int32)
    call = {
        "snapshots": lambda: cula.cula_verify(**named, state=state, snapshots=states),
        "checkpoints": lambda: cula.cula_kda(
            **named, initial_state=state, checkpoints=cula.Checkpoints(states.flatten(0, 1), plan)
        ),
    }[written]
    with pytest.raises(ValueError, match=rf"{written}(.states)? must share no memory with {name}, got"):
        call()
    assert_same_bits("memory", before, memory)


def test_outputs_between_what_is_read_are_taken():
    q, k, v, out, gates = overlapping()
    cula.cula_kda(q, k, v, **gates, out=out)
    assert_same_bits("o", cula.cula_kda(q, k, v, **gates)[0], out)


# A tree of 2,000 tokens takes a gigabyte of workspace, of which there are 64 MiB.
OUT_OF_MEMORY = """
import resource, torch
from cula_testing import operators
N, T, K = 1, 2000, 256
pages = int(open("/proc/self/statm").read().split()[0])
x = torch.ones(N, T, 1, K)
o = torch.full_like(x, 7.0)
beta = torch.ones(N, T, 1)
parents = torch.full((N, T), -1, dtype=torch.int32)
state = torch.ones(N, 1, K, K)
options = {"algorithm": "delta", "scale": 1.0, "gate": "log_decay", "lower_bound": 0.0, "null_index": -1}
options |= dict.fromkeys(
    ("qk_l2norm", "beta_is_logit", "allow_neg_eigval", "batch_invariant", "in_place"), False
)
def verify(tokens, backend):
    cut = {"q": x, "k": x, "v": x, "o": o, "beta": beta, "parents": parents}
    cut = {name: tensor[:, :tokens] for name, tensor in cut.items()}
    operators.call("verify", **options, **cut, initial_state=state, backend=backend)
verify(2, "reference")
o.fill_(7.0)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
for backend in ("reference", ""):
    try:
        verify(T, backend)
    except (RuntimeError, MemoryError) as error:
        assert "memory" in str(error), error
    else:
        raise AssertionError("there was memory")
    assert (o == 7.0).all() and (state == 1.0).all()
verify(2, "reference")
assert (o[:, :2] != 7.0).all()
print("raised")
"""


@pytest.mark.skipif(device.kind() == "cuda", reason="limits the memory of the host")
def test_a_call_without_memory_raises():
    assert run_python("-c", OUT_OF_MEMORY, OMP_NUM_THREADS="1") == "raised\n"


@pytest.mark.cpu_only("a process that is forked has no GPU")
def test_a_forked_process_may_call_with_one_thread():
    """Of PyTorch's threads only the one that forks goes on in the child."""
    code = """
import os, torch, cula
q, k, v = (torch.randn(1, 200, 2, 64) for _ in range(3))
g, beta = -torch.rand(1, 200, 2, 64), torch.rand(1, 200, 2)
parent = cula.cula_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    own = cula.cula_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    os._exit(0 if torch.equal(parent, own) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python("-c", code).strip() == "0"
