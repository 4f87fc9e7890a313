# SPDX-License-Identifier: Apache-2.0
"""Tensor and context parallelism at once, over a mesh of two dimensions: the exchange carries the rank's
heads only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from . import context, tensor
from .calls import Call
from .context import Options
from .groups import GroupLike, resolve
from .shards import take_heads
from .words import HybridWords, words_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def hybrid_parallel(
    call: Call,
    tp_group: GroupLike,
    sp_group: GroupLike,
    /,
    *,
    tp_size: int | None = None,
    sp_size: int | None = None,
    tp_rank: int | None = None,
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
    gather_output: bool = False,
    full_inputs: bool = False,
    full_qk: bool = False,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """`call`, with the options `kwargs` of Level 1, on the rank's tokens of the rank's heads."""
    call = call.but(options=kwargs)
    tp = resolve("tp", tp_group, tp_size, tp_rank, required=True)
    sp = resolve("sp", sp_group, sp_size, sp_rank, required=True)
    tensor.check_gather(call, tp, gather_output)
    local = tensor.local_call(call, tp, full_inputs, full_qk)
    if isinstance(initial_state, Tensor):
        initial_state = take_heads("initial_state", initial_state, 1, local.v.shape[2], tp)
    options = Options(
        initial_state, output_final_state, cu_seqlens, sp_mode, sp_splits, method, final_state_on,
        state_v_first, nvshmem_backend,
    )  # fmt: skip
    results = context.run(local, sp, options)
    return tensor.gather(local, tp, results) if gather_output else results


@words_of(hybrid_parallel)
def cula_kda_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_kda_cp` on the rank's heads, cut as in `cula_kda_tp`: the rank has some tokens of some heads.

    With a mesh of both, `tp_group=mesh["tp"], sp_group=mesh["cp"]`. `full_inputs` concerns heads, never
    tokens. Gradients are those of both.
    """
    return hybrid_parallel(Call("cula_kda_tp_cp", "kda", q, k, v, g, beta), tp_group, sp_group, **words)


@words_of(hybrid_parallel)
def cula_gdn_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_gdn_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    return hybrid_parallel(Call("cula_gdn_tp_cp", "gdn", q, k, v, g, beta), tp_group, sp_group, **words)


@words_of(hybrid_parallel)
def cula_gdn2_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    erase: Tensor,
    *,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_gdn2_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    call = Call("cula_gdn2_tp_cp", "gdn2", q, k, v, g, beta, erase=erase)
    return hybrid_parallel(call, tp_group, sp_group, **words)


@words_of(hybrid_parallel)
def cula_gdp_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_gdp_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    return hybrid_parallel(Call("cula_gdp_tp_cp", "gdp", q, k, v, g, beta), tp_group, sp_group, **words)


@words_of(hybrid_parallel)
def cula_rwkv7_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    a_key: Tensor,
    b_key: Tensor,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_rwkv7_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    call = Call("cula_rwkv7_tp_cp", "rwkv7", q, k, v, g, a_key=a_key, b_key=b_key)
    return hybrid_parallel(call, tp_group, sp_group, **words)


@words_of(hybrid_parallel)
def cula_gla_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_gla_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    return hybrid_parallel(Call("cula_gla_tp_cp", "gla", q, k, v, g), tp_group, sp_group, **words)


@words_of(hybrid_parallel)
def cula_simple_gla_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_simple_gla_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    return hybrid_parallel(
        Call("cula_simple_gla_tp_cp", "simple_gla", q, k, v, g, decay=decay), tp_group, sp_group, **words
    )


@words_of(hybrid_parallel)
def cula_lightning_tp_cp(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    *,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_lightning_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    return hybrid_parallel(
        Call("cula_lightning_tp_cp", "lightning", Q, K, V, decay=decay), tp_group, sp_group, **words
    )


@words_of(hybrid_parallel)
def cula_delta_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    decay: Tensor | None = None,
    tp_group: GroupLike,
    sp_group: GroupLike,
    **words: Unpack[HybridWords],
) -> tuple[Tensor, Tensor | None]:
    """`cula_delta_cp` on the rank's heads; everything else as in `cula_kda_tp_cp`."""
    return hybrid_parallel(
        Call("cula_delta_tp_cp", "delta", q, k, v, beta=beta, decay=decay), tp_group, sp_group, **words
    )
