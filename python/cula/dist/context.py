# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the tokens of a sequence over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import _passes
from . import cost, gradients
from .calls import Call
from .forms import Complete, Form, Split
from .groups import Group, GroupLike, resolve
from .lanes import BatchLanes, Lanes, PackedLane
from .shards import TokenShard, check_cu_seqlens, check_splits
from .transport import ProcessGroupTransport, Transport
from .words import ContextWords, words_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Level 1's ways of keeping states elsewhere or on the way, which say nothing of the rank that holds them.
_ONE_RANK_ONLY = (
    "state_pool", "initial_state_indices", "final_state_indices", "has_initial_state", "null_index",
    "checkpoints", "return_intermediate_states", "cp_context", "kept", "state_scales",
)  # fmt: skip

# What the options are, where they are words.
_WORDS = {
    "sp_mode": ("split", "complete"),
    "method": (None, "scan", "ring"),
    "final_state_on": (None, "last", "all", "end"),
}


@dataclass(frozen=True)
class Options:
    """What the functions of context parallelism take besides Level 1's options."""

    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    sp_mode: str
    sp_splits: Sequence[int] | None
    method: str | None
    final_state_on: str | None
    state_v_first: bool
    nvshmem_backend: bool


def run(call: Call, group: Group, options: Options) -> tuple[Tensor, Tensor | None]:
    _check(call, options)
    transport = ProcessGroupTransport(group)
    form, initial = (_complete if options.sp_mode == "complete" else _split)(call, transport, options)
    call.check_all(initial)
    o, final = gradients.run(form, call, initial)
    return o, final if final is None or options.state_v_first else final.transpose(-1, -2)


def _check(call: Call, options: Options) -> None:
    _passes.check_flags(
        output_final_state=options.output_final_state is not None and options.output_final_state,
        state_v_first=options.state_v_first, nvshmem_backend=options.nvshmem_backend,
    )  # fmt: skip
    if options.nvshmem_backend:
        raise NotImplementedError(
            "nvshmem_backend: the exchange runs over torch.distributed; see docs/distributed.md"
        )
    for name in _ONE_RANK_ONLY:
        if name in call.options:
            raise ValueError(f"{call.name}: {name} is not supported with context parallelism, got it")
    call.check()
    for name, words in _WORDS.items():
        if (value := getattr(options, name)) not in words:
            raise ValueError(f"{call.name}: {name} must be {_one_of(words)}, got {value!r}")
    if options.cu_seqlens is None and options.sp_mode == "complete":
        raise ValueError(f"{call.name}: cu_seqlens must be given with sp_mode complete, got None")
    if options.cu_seqlens is not None and call.q.shape[0] != 1:
        raise ValueError(f"{call.name}: q must have one row with cu_seqlens, got {list(call.q.shape)}")


def _one_of(words: Sequence[str | None]) -> str:
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}"


def _initial_state(call: Call, options: Options, sequences: int) -> Tensor | None:
    """V-first, and checked."""
    initial = options.initial_state
    if initial is None:
        return None
    if not isinstance(initial, Tensor):
        raise TypeError(f"{call.name}: initial_state must be a tensor or None, got {type(initial).__name__}")
    matrix = (call.v.shape[3], call.q.shape[3])
    wanted = [sequences, call.v.shape[2], *(matrix if options.state_v_first else reversed(matrix))]
    if list(initial.shape) != wanted:
        raise ValueError(f"{call.name}: initial_state must have shape {wanted}, got {list(initial.shape)}")
    return initial if options.state_v_first else initial.transpose(-1, -2)


def _complete(call: Call, transport: Transport, options: Options) -> tuple[Form, Tensor | None]:
    cu_seqlens, rank, size = options.cu_seqlens, transport.rank, transport.size
    assert cu_seqlens is not None  # _check refuses a call without
    check_cu_seqlens(cu_seqlens, None)
    sequences = cu_seqlens.shape[0] - 1
    even = [sequences * r // size for r in range(size + 1)]
    splits = check_splits(even if options.sp_splits is None else options.sp_splits, size, rank)
    if splits[-1] != sequences:
        raise ValueError(f"{call.name}: sp_splits must end at the {sequences} sequences, got {list(splits)}")
    begin, end = splits[rank], splits[rank + 1]
    given = options.initial_state
    of_all = isinstance(given, Tensor) and given.dim() > 0 and given.shape[0] == sequences
    initial = _initial_state(call, options, sequences if of_all else end - begin)
    if initial is not None and of_all:
        initial = initial[begin:end]
    own = cu_seqlens[begin : end + 1]
    where = (options.final_state_on or "end") if options.output_final_state else None
    return Complete(transport, own - own[0], begin, sequences, where), initial


def _split(call: Call, transport: Transport, options: Options) -> tuple[Form, Tensor | None]:
    size, rank = transport.size, transport.rank
    splits = check_splits(options.sp_splits, size, rank, call.q.shape[1])
    cu_seqlens, sequences, here = options.cu_seqlens, call.q.shape[0], None
    lanes: Lanes = BatchLanes(call, rank)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, splits[-1])
        shard = TokenShard.of(cu_seqlens, splits, rank)
        assert shard.final_ranks is not None  # of all sequences
        lanes, here = PackedLane(shard, rank), shard.final_ranks == rank
        sequences = cu_seqlens.shape[0] - 1
    initial = _initial_state(call, options, sequences)
    method = _method(call, splits, lanes, options.method)
    where = (options.final_state_on or "last") if options.output_final_state else None
    return Split(transport, lanes, method, where, here), initial


def along(call: Call, given: object) -> Tensor:
    """o of the rank's tokens, cut as an `FLACPContext` of FLA's `build_cp_context` says."""
    names = ("group", "cu_seqlens", "pre_num_ranks", "post_num_ranks")
    found: list[Any] = [getattr(given, name, None) for name in names]
    for name, value in zip(names, found, strict=True):
        if value is None:
            raise ValueError(f"{call.name}: cp_context must have {name}, got {type(given).__name__}")
    group, cu_seqlens, before, after = found
    transport = ProcessGroupTransport(resolve("cp_context", group, None, None, required=True))
    call.check()
    held, rank, size = call.q.shape[1], transport.rank, transport.size
    check_cu_seqlens(cu_seqlens, held)
    if not (0 <= before <= rank and 0 <= after < size - rank):
        raise ValueError(
            f"{call.name}: cp_context must be that of rank {rank} of {size}, got {before} ranks before "
            f"and {after} after"
        )
    lanes = PackedLane(TokenShard.beside(cu_seqlens, rank, size, before, after, held), rank)
    method = _method(call, check_splits(None, size, rank, held), lanes, None)
    call.check_all(None)
    return gradients.run(Split(transport, lanes, method, None, None), call, None)[0]


def _method(call: Call, splits: tuple[int, ...], lanes: Lanes, method: str | None) -> str:
    """Every rank must come to the same answer, so it depends on nothing that differs between them."""
    per_value = isinstance(call.beta, Tensor) and call.beta.dim() == 4 and call.erase is None
    if per_value and method == "scan":
        raise ValueError(
            f"{call.name}: method must be ring, since a write strength per value channel has no map of its "
            f"segments, got {method!r}"
        )
    if method is not None or per_value:
        return method or "ring"
    size = cost.Size(
        ranks=len(splits) - 1, tokens=call.q.shape[0] * max(b - a for a, b in pairwise(splits)),
        lanes=lanes.count, value_heads=call.v.shape[2], key_dim=call.q.shape[3], value_dim=call.v.shape[3],
        delta=call.delta, keeps=lanes.keeps,
    )  # fmt: skip
    return cost.choose(size)


def context_parallel(
    call: Call,
    sp_group: GroupLike,
    /,
    *,
    sp_size: int | None = None,
    sp_rank: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    sp_mode: str = "split",
    sp_splits: Sequence[int] | None = None,
    method: str | None = None,
    final_state_on: str | None = None,
    state_v_first: bool = True,
    nvshmem_backend: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`call`, with the options `kwargs` of Level 1, on the rank's tokens."""
    group = resolve("sp", sp_group, sp_size, sp_rank, required=True)
    options = Options(
        initial_state, output_final_state, cu_seqlens, sp_mode, sp_splits, method, final_state_on,
        state_v_first, nvshmem_backend,
    )  # fmt: skip
    return run(call.but(options=kwargs), group, options)


@words_of(context_parallel)
def cula_kda_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    sp_group: GroupLike,
    **words: Unpack[ContextWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_kda` on the rank's tokens of sequences that lie over the ranks of `sp_group`, in rank order.

    q, k, v, g, beta: the rank's tokens. It may have none.
    sp_size, sp_rank: checked against the group if given.
    initial_state: `[N, HV, V, K]`; a sequence's row is read on the rank where it begins and may be anything
        elsewhere.
    cu_seqlens: of the packed tokens of all ranks, the same on all.
    sp_mode: "split": sequences go on from rank to rank. "complete": each rank has whole sequences.
    sp_splits: `sp_size + 1` borders from 0, the same on all ranks: rank r holds the tokens, or with
        "complete" the sequences, from `sp_splits[r]` to `sp_splits[r + 1]`. Without it all ranks hold as many
        tokens, or rank r the sequences from `r N // sp_size` on.
    method: "scan": each rank makes the affine map of its tokens, all ranks gather all maps, and each runs
        from the state that those before it give. "ring": one message of a state from rank to rank. None: the
        one that `cula.dist.cost` finds faster. The same on all ranks.
    final_state_on: "last": the last rank returns all N final states and the others None (what None means with
        "split"). "all": all ranks do. "end": nothing is sent; each rank returns the states of the sequences
        that end there, with "split" in `[N, HV, V, K]` beside zeros (None from ranks that are not the last of
        a batch), with "complete" its own sequences' alone (what None means there).
    nvshmem_backend: reserved.
    kwargs: the options of `cula.cula_kda`, except those that name slots of a pool or keep states on the way.

    Returns (o of the rank's tokens, final state or None). Arguments that are wrong alike on all ranks raise
    on all of them before anything is sent; a rank that raises alone leaves the others to the timeout of the
    group.

    Gradients are those of the sum of what all ranks differentiate; of `A_log` and `dt_bias` each rank has its
    own part. All ranks go backward through their results, or none does.
    """
    return context_parallel(Call("cula_kda_cp", "kda", q, k, v, g, beta), sp_group, **words)


@words_of(context_parallel)
def cula_gdn_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    sp_group: GroupLike,
    **words: Unpack[ContextWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_gdn` on the rank's tokens; everything else as in `cula_kda_cp`."""
    return context_parallel(Call("cula_gdn_cp", "gdn", q, k, v, g, beta), sp_group, **words)


@words_of(context_parallel)
def cula_gdn2_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    erase: Tensor,
    *,
    sp_group: GroupLike,
    **words: Unpack[ContextWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_gdn2` on the rank's tokens; everything else as in `cula_kda_cp`."""
    return context_parallel(Call("cula_gdn2_cp", "gdn2", q, k, v, g, beta, erase=erase), sp_group, **words)


@words_of(context_parallel)
def cula_gdp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    sp_group: GroupLike,
    **words: Unpack[ContextWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_gdp` on the rank's tokens, with all writes of each; everything else as in `cula_kda_cp`."""
    return context_parallel(Call("cula_gdp_cp", "gdp", q, k, v, g, beta), sp_group, **words)


@words_of(context_parallel)
def cula_rwkv7_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    a_key: Tensor,
    b_key: Tensor,
    sp_group: GroupLike,
    **words: Unpack[ContextWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_rwkv7` on the rank's tokens; everything else as in `cula_kda_cp`."""
    call = Call("cula_rwkv7_cp", "rwkv7", q, k, v, g, a_key=a_key, b_key=b_key)
    return context_parallel(call, sp_group, **words)


@words_of(context_parallel)
def cula_gla_cp(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, sp_group: GroupLike, **words: Unpack[ContextWords]
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_gla` on the rank's tokens; everything else as in `cula_kda_cp`."""
    return context_parallel(Call("cula_gla_cp", "gla", q, k, v, g), sp_group, **words)


@words_of(context_parallel)
def cula_simple_gla_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    sp_group: GroupLike,
    **words: Unpack[ContextWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_simple_gla` on the rank's tokens; everything else as in `cula_kda_cp`."""
    return context_parallel(
        Call("cula_simple_gla_cp", "simple_gla", q, k, v, g, decay=decay), sp_group, **words
    )


@words_of(context_parallel)
def cula_lightning_cp(
    Q: Tensor, K: Tensor, V: Tensor, decay: Tensor, *, sp_group: GroupLike, **words: Unpack[ContextWords]
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_lightning` on the rank's tokens; everything else as in `cula_kda_cp`."""
    return context_parallel(Call("cula_lightning_cp", "lightning", Q, K, V, decay=decay), sp_group, **words)


@words_of(context_parallel)
def cula_delta_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    decay: Tensor | None = None,
    sp_group: GroupLike,
    **words: Unpack[ContextWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula.cula_delta` on the rank's tokens; everything else as in `cula_kda_cp`."""
    return context_parallel(
        Call("cula_delta_cp", "delta", q, k, v, beta=beta, decay=decay), sp_group, **words
    )
