# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `ranks.Ranks` do: each makes the same case, takes its part of it and calls
`cula.dist`."""

from __future__ import annotations

import functools
import sys
from itertools import accumulate, pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import cula
from cula import dist as level2
from cula.dist.lanes import BatchLanes
from cula.dist.transport import ProcessGroupTransport
from cula.integrations import fla
from cula_testing import fla_stand_in, level1
from cula_testing.cases import Case, Inputs, make
from cula_testing.trainers import TRAINERS

NAN = float("nan")


def function(case: Case, suffix: str):
    return getattr(level2, f"cula_{cula.algorithms()[case.algorithm].mode}_{suffix}")


def drawn(case: Case, exact: bool) -> Inputs:
    """exact: in float64, for the reference."""
    return make(case).double() if exact else make(case)


def tokens(inputs: Inputs, begin: int, end: int) -> dict[str, torch.Tensor]:
    return inputs.rows(begin, end)


def named(inputs: Inputs, exact: bool) -> dict:
    more = {"cu_seqlens": inputs.cu_seqlens, **level1.common(inputs, "prefill")}
    return {**more, "backend": "reference"} if exact else more


def begins_here(case: Case, splits: tuple[int, ...], rank: int) -> torch.Tensor:
    """[N]: which sequences start on the rank; the empty ones where the token before them lies."""
    if not case.packed:
        return torch.full((case.sequences,), rank == 0)
    here, begin = [], 0
    for length in case.lengths:
        owners = [r for r in range(len(splits) - 1) if splits[r] <= begin < splits[r + 1]]
        if length == 0:
            owners = [r for r in range(len(splits) - 1) if splits[r + 1] >= begin][:1]
        here.append(rank in owners)
        begin += length
    return torch.tensor(here)


def initial_of(inputs: Inputs, here: torch.Tensor) -> torch.Tensor | None:
    """The initial states of sequences that start elsewhere are not to be read."""
    if inputs.initial_state is None:
        return None
    return torch.where(here[:, None, None, None], inputs.initial_state, NAN)


@functools.cache
def _mesh(tp: int) -> DeviceMesh:
    return init_device_mesh(
        torch.get_default_device().type, (tp, dist.get_world_size() // tp), mesh_dim_names=("tp", "cp")
    )


def split_arguments(case: Case, splits: tuple[int, ...], exact: bool, options: dict) -> dict:
    inputs, rank = drawn(case, exact), dist.get_rank()
    return {
        **named(inputs, exact),
        **tokens(inputs, splits[rank], splits[rank + 1]),
        "initial_state": initial_of(inputs, begins_here(case, splits, rank)),
        "sp_group": dist.group.WORLD,
        "sp_splits": splits,
        **options,
    }


def _call(target, arguments: dict):
    arguments = dict(arguments)
    q, k, v = (arguments.pop(name) for name in "qkv")
    return target(q, k, v, **arguments)


def split(case: Case, splits: tuple[int, ...], exact: bool, options: dict, call=_call):
    """(o of the rank's tokens, final states)."""
    return call(function(case, "cp"), split_arguments(case, splits, exact, options))


def split_by_all_gather(case: Case, splits: tuple[int, ...], exact: bool, options: dict, call=_call):
    """As more ranks would than send to each other."""
    with mock.patch("cula.dist.transport.MOST_DIRECT", 1):
        return split(case, splits, exact, options, call)


def split_as_on_gpus(case: Case, splits: tuple[int, ...], exact: bool, options: dict, call=_call):
    """As `split`, where every rank of a batch makes maps and prefills go on with what those keep: here,
    nothing."""
    with mock.patch.object(BatchLanes, "keeps", True):
        return split(case, splits, exact, options, call)


def differentiated(name: str, ds: list[tuple], wanted: list[set[str]], *arguments):
    """The function `name` of this file on inputs of which those in `wanted`, by rank, require gradients, and
    what a loss hands back to them that says `ds`, by rank, of the results, None for nothing. Of each result
    whether it requires gradients, and the gradients by name."""
    rank = dist.get_rank()

    def call(target, given: dict):
        leaves = {
            each: given[each].detach().clone().requires_grad_()
            for each in wanted[rank]
            if given.get(each) is not None
        }
        results = _call(target, {**given, **leaves})
        pairs = [(x, d.to(x.dtype)) for x, d in zip(results, ds[rank], strict=True) if d is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        required = [x is not None and x.requires_grad for x in results]
        return required, {each: leaf.grad for each, leaf in leaves.items()}

    return globals()[name](*arguments, call=call)


def into(case: Case, splits: tuple[int, ...], dtype: torch.dtype, options: dict):
    """`out`, a slice of wider rows, after the call."""
    held = splits[dist.get_rank() + 1] - splits[dist.get_rank()]
    wide = torch.full((case.batch, held, 3, 64), NAN, dtype=dtype)
    out = wide[:, :, :2, : case.value_dim]
    o, _ = split(case, splits, False, {**options, "out": out})
    assert o.data_ptr() == out.data_ptr()
    assert wide[:, :, 2].isnan().all()
    return out


def without_rows(q, k, v, g, beta, method: str) -> torch.Tensor:
    return level2.cula_kda_cp(q, k, v, g, beta, sp_group=dist.group.WORLD, method=method)[0]


def split_without_waiting(case: Case, splits: tuple[int, ...], options: dict):
    """As `split`; after a first call has made its connections, none may wait for the GPU."""
    split(case, splits, False, options)
    arguments = split_arguments(case, splits, False, options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():  # else it asks the others whether they want gradients
            return _call(function(case, "cp"), arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def complete(case: Case, splits: tuple[int, ...], exact: bool, options: dict, call=_call):
    """Sequences splits[r] to splits[r + 1] on rank r."""
    inputs, rank = drawn(case, exact), dist.get_rank()
    begin, end = (sum(case.lengths[: splits[r]]) for r in (rank, rank + 1))
    arguments = {
        **named(inputs, exact),
        **tokens(inputs, begin, end),
        "initial_state": inputs.initial_state,
        "sp_group": dist.group.WORLD,
        "sp_mode": "complete",
        "sp_splits": splits,
        **options,
    }
    return call(function(case, "cp"), arguments)


def heads(case: Case, exact: bool, given: str, options: dict, call=_call):
    """given: what the rank passes, "local" shards, "full" tensors or local ones beside "replicated" q and
    k."""
    inputs, rank, size = drawn(case, exact), dist.get_rank(), dist.get_world_size()
    arguments = {
        **named(inputs, exact),
        **tokens(inputs, 0, case.tokens),
        "initial_state": inputs.initial_state,
    }
    if given != "full":
        dims = dict.fromkeys(("q", "k", "v", "g", "beta", "erase", "a_key", "b_key"), 2)
        dims |= {"decay": 0, "A_log": 0, "initial_state": 1}
        for name, dim in dims.items():
            if arguments.get(name) is not None and not (given == "replicated" and name in ("q", "k")):
                arguments[name] = arguments[name].chunk(size, dim)[rank]
    more = {"full_inputs": given == "full", "full_qk": given == "replicated", "tp_group": dist.group.WORLD}
    return call(function(case, "tp"), {**arguments, **more, "output_final_state": True, **options})


def heads_in_pool(case: Case, exact: bool):
    """A full pool of which the rank's heads are updated: the pool."""
    inputs = drawn(case, exact)
    arguments = {
        **named(inputs, exact),
        **tokens(inputs, 0, case.tokens),
        "state_pool": inputs.initial_state,
        "initial_state_indices": inputs.initial_state_indices,
        "full_inputs": True,
        "tp_size": dist.get_world_size(),
        "tp_rank": dist.get_rank(),
    }
    _call(function(case, "tp"), arguments)
    return inputs.initial_state


def mesh(case: Case, tp: int, splits: tuple[int, ...], exact: bool, options: dict, call=_call):
    inputs = drawn(case, exact)
    grid = _mesh(tp)
    rank = grid.get_local_rank("cp")
    arguments = {
        **named(inputs, exact),
        **tokens(inputs, splits[rank], splits[rank + 1]),
        "initial_state": initial_of(inputs, begins_here(case, splits, rank)),
        "tp_group": (grid, "tp"),
        "sp_group": grid["cp"],
        "sp_splits": splits,
        "full_inputs": True,
        "gather_output": True,
        "final_state_on": "all",
        **options,
    }
    return call(function(case, "tp_cp"), arguments)


def verbs(case: Case, splits: tuple[int, ...], options: dict) -> list[list[str]]:
    """What the rank asks of its transport: without gradients, and with, forward and backward."""
    called: list[str] = []

    def noted(name: str):
        verb = getattr(ProcessGroupTransport, name)

        def note(*given):
            called.append(name)
            return verb(*given)

        return note

    every = [name for name, x in vars(ProcessGroupTransport).items() if name[0] != "_" and callable(x)]
    with mock.patch.multiple(ProcessGroupTransport, **{name: noted(name) for name in every}):
        arguments = split_arguments(case, splits, False, options)
        with torch.no_grad():
            _call(function(case, "cp"), arguments)
        without, called = called, []
        o, _ = _call(function(case, "cp"), {**arguments, "v": arguments["v"].clone().requires_grad_()})
        forward, called = called, []
        o.sum().backward()
    return [without, forward, called]


def in_context(case: Case, changes: dict, call=_call):
    """The drop-in of FLA under a context as FLA's `build_cp_context` makes it, but for `changes`: (o,
    None)."""
    inputs, rank, size = drawn(case, False), dist.get_rank(), dist.get_world_size()
    share = case.tokens // size
    begin, end = rank * share, (rank + 1) * share
    context = _context(case.lengths, begin, end, share)
    vars(context).update(changes)
    drop_in = {
        "kda": cula.kda.chunk_kda,
        "gdn": cula.gdn.chunk_gated_delta_rule,
        "gdn2": _chunk_gdn2,
        "gdp": functools.partial(_product, case),
        "delta_product": functools.partial(_product, case),
        "rwkv7": _rwkv7,
    }[case.algorithm]
    words = {name: x for name, x in named(inputs, False).items() if name not in ("cu_seqlens", "backend")}
    return call(drop_in, {**words, **tokens(inputs, begin, end), "cp_context": context})


def _chunk_gdn2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **more) -> tuple:
    """The drop-in, in the words of the other two."""
    for option in ("use_beta_sigmoid_in_kernel", "allow_neg_eigval"):
        assert not more.pop(option)
    return cula.gdn2.chunk_gdn2(q, k, v, g, b=more.pop("erase"), w=more.pop("beta"), **more)


def _product(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named) -> tuple:
    """FLA's DeltaProduct, whose beta is no logit, and whose gate has no parameter."""
    accepted = ("beta", "use_qk_l2norm_in_kernel", "cp_context")
    given = {name: named[name] for name in accepted if name in named}
    return cula.gated_delta_product.chunk_gated_delta_product(
        q, k, v, named.get("g"), num_householder=case.writes, **given
    )


def _rwkv7(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **named) -> tuple:
    """FLA's, which normalises nothing."""
    assert not named.pop("use_qk_l2norm_in_kernel")
    a, b = named.pop("a_key"), named.pop("b_key")
    return cula.rwkv7.chunk_rwkv7(q, g, k, v, a, b, **named)


def of_megatron(case: Case, call=_call):
    """Megatron's call of KDA under a context, through FLA's registry: (o, None). It hands the bounds of the
    whole sequences along, which the context replaces."""
    trainer = TRAINERS["Megatron KDA, safe gate"]
    whole, rank, share = trainer.prepare(make(case)), dist.get_rank(), case.tokens // dist.get_world_size()
    begin, end = rank * share, (rank + 1) * share

    def target(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: torch.Tensor) -> tuple:
        context = _context(case.lengths, begin, end, share)
        given = whole.but(q=q, k=k, v=v, **more)
        return trainer.call(sys.modules["fla.ops.kda"].chunk_kda, given, context)

    with pytest.MonkeyPatch.context() as patch:
        fla_stand_in.install(patch, "0.6")
        fla.register()
        fla.calls.clear()
        try:
            parameters = {"A_log": whole.A_log, "dt_bias": whole.dt_bias}
            made = call(target, {**tokens(whole, begin, end), **parameters})
        finally:
            fla.unregister()
    assert dict(fla.calls) == {("chunk_kda", "cula"): 1}
    return made


def _context(lengths: tuple[int, ...], begin: int, end: int, share: int) -> SimpleNamespace:
    ends = list(accumulate(lengths))
    here = [(b, e) for b, e in pairwise([0, *ends]) if b < end and e > begin and b < e]
    local = [0, *(min(e, end) - begin for _, e in here)]
    (first, _), (_, last) = here[0], here[-1]
    return SimpleNamespace(
        group=dist.group.WORLD,
        cu_seqlens=torch.tensor(local, dtype=torch.int32),
        pre_num_ranks=begin // share - first // share,
        post_num_ranks=(last - 1) // share - begin // share,
    )


def refused(case: Case, suffix: str, change: str) -> None:
    """A call that has no gradients."""
    inputs = make(case)
    given = {**named(inputs, False), **tokens(inputs, 0, case.tokens)}
    given["tp_group" if suffix == "tp" else "sp_group"] = dist.group.WORLD
    if change == "decay":
        given["decay"] = given["decay"].requires_grad_()
    else:
        given["v"] = given["v"].requires_grad_(change != "out of another rank" or dist.get_rank() == 1)
    if change.startswith("out"):
        given["out"] = torch.empty_like(given["v"], requires_grad=False)
    o, _ = _call(function(case, suffix), given)
    if change == "twice":
        (once,) = torch.autograd.grad(o.sum(), given["v"], create_graph=True)
        once.sum().backward()


def of_recomputed(case: Case, splits: tuple[int, ...], options: dict) -> bool:
    """Whether activation checkpointing gives the same bits."""
    arguments = split_arguments(case, splits, False, options)
    found = []
    for how in (lambda run, x: run(x), functools.partial(checkpoint, use_reentrant=False)):
        v = arguments["v"].clone().requires_grad_()
        o = how(lambda v: _call(function(case, "cp"), {**arguments, "v": v})[0], v)
        o.square().sum().backward()
        found.append(v.grad)
    return torch.equal(*found)


def boundary_gradient(x: torch.Tensor, d: torch.Tensor, splits: tuple[int, ...], width: int) -> torch.Tensor:
    """Of the rank's tokens, where `d`, by rank, is that of the boundary."""
    own = x[:, splits[dist.get_rank()] : splits[dist.get_rank() + 1]].clone().requires_grad_()
    before = level2.conv_boundary_tokens(own, sp_group=dist.group.WORLD, sp_splits=splits, width=width)
    before.backward(d[dist.get_rank()])
    return own.grad


def boundary(x: torch.Tensor, cu_seqlens: torch.Tensor | None, splits: tuple[int, ...], width: int):
    """What the rank gets from before its first token."""
    own = x[:, splits[dist.get_rank()] : splits[dist.get_rank() + 1]]
    more = {"width": width, "cu_seqlens": cu_seqlens, "sp_splits": splits}
    return level2.conv_boundary_tokens(own, sp_group=dist.group.WORLD, **more)


def arguments(case: Case, suffix: str, changes: dict, _then: str = ""):
    """A call with some arguments replaced; `only` restricts the change to one rank. Results are dropped."""
    inputs = make(case)
    given = {**named(inputs, False), **tokens(inputs, 0, case.tokens)}
    group = {"tp": "tp_group", "cp": "sp_group"}
    changes = dict(changes)
    only = changes.pop("only", None)
    if suffix in group:
        given[group[suffix]] = dist.group.WORLD
    if only in (None, dist.get_rank()):
        given |= {name: _special(value) for name, value in changes.items()}
    _call(function(case, suffix), given)


def _special(value: object):
    """Values that only a process of the group can make."""
    if value == "a mesh of two dimensions":
        return _mesh(1)
    if value == "a group of others":
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        return groups[dist.get_rank() - 1]
    return value


def grouped(kind: str) -> list[int]:
    """Resolves one group given in several ways: (size, rank)."""
    from cula.dist.groups import resolve

    grid = _mesh(1)
    given = {"group": dist.group.WORLD, "mesh": grid["cp"], "name": (grid, "cp"), "number": (grid, 1)}[kind]
    group = resolve("sp", given, None, None, required=True)
    return [group.size, group.rank]
