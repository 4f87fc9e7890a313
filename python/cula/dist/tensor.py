# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: heads over several ranks. They are independent, so nothing is exchanged unless asked
for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import Checkpoints, _passes
from . import gradients
from .calls import Call
from .groups import Group, GroupLike, resolve
from .shards import take_heads, take_parameter, take_query_heads
from .transport import ProcessGroupTransport
from .words import TensorWords, words_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def local_call(call: Call, group: Group, full_inputs: bool, full_qk: bool) -> Call:
    """The call on the rank's heads. Parameters and states may have its heads or all, which their sizes
    tell."""
    _passes.check_flags(full_inputs=full_inputs, full_qk=full_qk)
    call.check()
    q, k, v = call.q, call.k, call.v
    heads = v.shape[2]
    if full_inputs:
        if heads % group.size:
            raise ValueError(f"{call.name}: v must have heads for tp_size {group.size}, got {list(v.shape)}")
        heads //= group.size
        v = v.narrow(2, group.rank * heads, heads)
    if full_inputs or full_qk:
        q, k = (take_query_heads(name, x, heads * group.size, group) for name, x in (("q", q), ("k", k)))
    gates = {name: getattr(call, name) for name in ("g", "beta", "erase", "a_key", "b_key")}
    gates = {name: x if x is None else take_heads(name, x, 2, heads, group) for name, x in gates.items()}
    decay = None if call.decay is None else take_parameter("decay", call.decay, heads, (1,), group)
    return call.but(q=q, k=k, v=v, **gates, decay=decay, options=_local_options(call, heads, group))


def _local_options(call: Call, heads: int, group: Group) -> dict[str, Any]:
    options = dict(call.options)
    bias_widths = (call.q.shape[3],) if call.g is not None and call.g.dim() == 4 else (1, call.q.shape[3])
    for name, widths in (("A_log", (1,)), ("dt_bias", bias_widths)):
        if isinstance(options.get(name), Tensor):
            options[name] = take_parameter(name, options[name], heads, widths, group)
    for name in ("initial_state", "state_pool", "state_scales"):
        if isinstance(options.get(name), Tensor):
            options[name] = take_heads(name, options[name], 1, heads, group)
    if options.get("checkpoints") is not None:
        states, plan = _passes.checkpoints_of(options["checkpoints"])
        options["checkpoints"] = Checkpoints(take_heads("checkpoints.states", states, 1, heads, group), plan)
    return options


def check_gather(call: Call, group: Group, gather_output: bool) -> None:
    _passes.check_flags(gather_output=gather_output)
    if not gather_output:
        return
    if group.process_group is None and group.size > 1:
        raise ValueError(f"{call.name}: tp_group must be given with gather_output, got None")
    if call.options.get("out") is not None:
        raise ValueError(f"{call.name}: out must be left out with gather_output, whose o has all heads")


def gather(call: Call, group: Group, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """All heads of o, of new final states and of the states on the way. A pool stays where it is."""
    if group.size == 1:
        return results
    transport = ProcessGroupTransport(group)
    o, final, *on_the_way = results
    in_place = call.options.get("state_pool") is not None
    gathered, states = gradients.all_gather_heads(call, transport, o, None if in_place else final)
    others = (gradients.along(transport.all_gather(h), 2) for h in on_the_way)
    return gathered, final if in_place else states, *others


def tensor_parallel(
    call: Call,
    /,
    *,
    tp_group: GroupLike | None = None,
    tp_size: int | None = None,
    tp_rank: int | None = None,
    gather_output: bool = False,
    full_inputs: bool = False,
    full_qk: bool = False,
    **kwargs: object,
) -> tuple[Any, ...]:
    """`call`, with the options `kwargs` of Level 1, on the rank's heads."""
    call = call.but(options=kwargs)
    group = resolve("tp", tp_group, tp_size, tp_rank, required=False)
    check_gather(call, group, gather_output)
    results = local_call(call, group, full_inputs, full_qk).run()
    return gather(call, group, results) if gather_output else results


@words_of(tensor_parallel)
def cula_kda_tp(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **words: Unpack[TensorWords]
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_kda` on the rank's heads: of P ranks, rank r has the value heads from `r HV / P` to
    `(r + 1) HV / P`.

    q, k, v, g, beta: the rank's heads.
    full_inputs: they are all ranks' heads instead, and the rank takes its own. Where there are fewer query
        and key heads than ranks, several ranks take the same one.
    full_qk: q and k alone are all heads' (replicated); v, g and beta are the rank's.
    tp_group, tp_size, tp_rank: each defaults to what the others say, without any to one rank. A group is
        needed for `gather_output` only.
    gather_output: return all heads of o, of a new final state and of h; a `state_pool` stays cut.
    kwargs: the options of `cula.cula_kda`. A_log, dt_bias, initial_state, state_pool, state_scales and
        checkpoints may have the rank's heads or all heads, whatever the inputs have; a rank reads and writes
        its own heads of them in place.

    Returns what `cula.cula_kda` does, for the rank's heads unless gathered.

    Gradients are those of the rank's heads; of q and k that ranks share each has its own part. With
    `gather_output` they are those of the sum of what all ranks differentiate, and all ranks go backward
    through their results, or none does.
    """
    return tensor_parallel(Call("cula_kda_tp", "kda", q, k, v, g, beta), **words)


@words_of(tensor_parallel)
def cula_gdn_tp(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **words: Unpack[TensorWords]
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_gdn` on the rank's heads; everything else as in `cula_kda_tp`."""
    return tensor_parallel(Call("cula_gdn_tp", "gdn", q, k, v, g, beta), **words)


@words_of(tensor_parallel)
def cula_gdn2_tp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    erase: Tensor,
    **words: Unpack[TensorWords],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_gdn2` on the rank's heads; everything else as in `cula_kda_tp`."""
    return tensor_parallel(Call("cula_gdn2_tp", "gdn2", q, k, v, g, beta, erase=erase), **words)


@words_of(tensor_parallel)
def cula_gdp_tp(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, **words: Unpack[TensorWords]
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_gdp` on the rank's heads; everything else as in `cula_kda_tp`."""
    return tensor_parallel(Call("cula_gdp_tp", "gdp", q, k, v, g, beta), **words)


@words_of(tensor_parallel)
def cula_rwkv7_tp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    a_key: Tensor,
    b_key: Tensor,
    **words: Unpack[TensorWords],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_rwkv7` on the rank's heads; everything else as in `cula_kda_tp`."""
    call = Call("cula_rwkv7_tp", "rwkv7", q, k, v, g, a_key=a_key, b_key=b_key)
    return tensor_parallel(call, **words)


@words_of(tensor_parallel)
def cula_gla_tp(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, **words: Unpack[TensorWords]
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_gla` on the rank's heads; everything else as in `cula_kda_tp`."""
    return tensor_parallel(Call("cula_gla_tp", "gla", q, k, v, g), **words)


@words_of(tensor_parallel)
def cula_simple_gla_tp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    **words: Unpack[TensorWords],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_simple_gla` on the rank's heads; everything else as in `cula_kda_tp`."""
    return tensor_parallel(Call("cula_simple_gla_tp", "simple_gla", q, k, v, g, decay=decay), **words)


@words_of(tensor_parallel)
def cula_lightning_tp(
    Q: Tensor, K: Tensor, V: Tensor, decay: Tensor, **words: Unpack[TensorWords]
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_lightning` on the rank's heads; everything else as in `cula_kda_tp`."""
    return tensor_parallel(Call("cula_lightning_tp", "lightning", Q, K, V, decay=decay), **words)


@words_of(tensor_parallel)
def cula_delta_tp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    decay: Tensor | None = None,
    **words: Unpack[TensorWords],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`cula.cula_delta` on the rank's heads; everything else as in `cula_kda_tp`."""
    return tensor_parallel(Call("cula_delta_tp", "delta", q, k, v, beta=beta, decay=decay), **words)
