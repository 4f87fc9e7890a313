# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution that hybrid layers have in front of linear attention, in the signatures of the
package causal-conv1d, with vLLM's arguments for packed batches.

On CPUs a kernel of this library computes it, forward and backward. On GPUs the package causal-conv1d does
where it is installed and takes the call, then FLA; the step, `causal_conv1d_update`, asks causal-conv1d
alone. What is left, and float64, is plain PyTorch. Sums are taken in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _autograd, _conv_gpu, _layer_checks, _layers, _ops, _passes, _plain
from ._library import ops

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def _check_types(needed: Mapping[str, object], optional: Mapping[str, object], pad_slot_id: object) -> None:
    _layer_checks.check_tensors(needed, optional)
    if not isinstance(pad_slot_id, int | torch.SymInt) or isinstance(pad_slot_id, bool):
        raise TypeError(f"pad_slot_id must be of type int, got {_ops.type_name(pad_slot_id)}")


def _silu(activation: str | None) -> bool:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation must be of type str or None, got {_ops.type_name(activation)}")
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation must be None, silu or swish, got {activation!r}")
    return activation is not None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    query_start_loc: Tensor | None = None,
    conv_states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor | tuple[Tensor, Tensor]:
    """`y[t] = act(bias + sum over j < W of weight[j] * x[t - (W - 1) + j])` of each channel, like x.

    x: `[B, D, T]`, any strides; fastest with contiguous channels, `x.stride(1) == 1`, as models have them.
    weight: `[D, W]`, W from 1 to 16. bias: `[D]`. activation: None, "silu" or "swish".
    seq_idx: `[B, T]` integers; neighbours with the same number are one sequence, and a negative number is
        padding, whose y is 0. It goes without states.
    initial_states: `[B, D, S]`, S >= W - 1, the tokens before the first, the latest last.
    return_final_states: returns `(y, final_states)` too, the last W - 1 tokens `[B, D, W - 1]` in x's dtype;
        final_states_out: of that shape, is written instead of made.
    query_start_loc: `[N + 1]`, where the sequences of a packed batch begin and end; x is `[1, D, T]` or
        `[D, T]`, and states have a row for each of the N sequences. Tokens behind the last have y = 0.
    conv_states: `[slots, D, S]`, a pool in place of initial_states; its slots `cache_indices` `[N]` get the
        last S tokens, in place. Sequences without has_initial_state `[N]` (bool; absent: all have one) start
        from zero. Slots that are negative or pad_slot_id are neither read nor written, and their tokens have
        y = 0.

    The first eight parameters are causal-conv1d's (1.6), the others vLLM's. ValueError names an argument that
    does not fit, before anything is written. What writes into a pool has no gradient.
    """
    optional = {
        "bias": bias, "seq_idx": seq_idx, "initial_states": initial_states,
        "final_states_out": final_states_out, "query_start_loc": query_start_loc, "conv_states": conv_states,
        "cache_indices": cache_indices, "has_initial_state": has_initial_state,
    }  # fmt: skip
    _check_types({"x": x, "weight": weight}, optional, pad_slot_id)
    _passes.check_flags(return_final_states=return_final_states)
    silu = _silu(activation)
    packed = x.dim() == 2 and query_start_loc is not None
    rows = x.unsqueeze(0) if packed else x
    if rows.dim() != 3:
        raise ValueError(f"x must have shape [B, D, T], got {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(f"weight must have shape [D, W], got {list(weight.shape)}")
    width, sequences = weight.shape[1], rows.shape[0]
    if query_start_loc is not None:
        if query_start_loc.dim() != 1 or not len(query_start_loc):
            raise ValueError(f"query_start_loc must have shape [N + 1], got {list(query_start_loc.shape)}")
        sequences = len(query_start_loc) - 1
    tokens = rows.transpose(1, 2)
    if conv_states is None:
        if cache_indices is not None or has_initial_state is not None:
            name = "cache_indices" if cache_indices is not None else "has_initial_state"
            raise ValueError(f"{name} must be left out without conv_states")
        columns = width - 1 if return_final_states else 0
        if final_states_out is not None:
            if not return_final_states:
                raise ValueError("final_states_out must be left out without return_final_states")
            wanted = (sequences, rows.shape[1], width - 1)
            if tuple(final_states_out.shape) != wanted:
                raise ValueError(
                    f"final_states_out must have shape {list(wanted)}, got {list(final_states_out.shape)}"
                )
            _layer_checks.check_floats({"final_states_out": final_states_out})
            _layer_checks.check_written("final_states_out", final_states_out)
        y, final = convolve_tokens(
            tokens, weight, bias, initial_states, query_start_loc, seq_idx, silu, columns
        )
    else:
        if initial_states is not None or return_final_states or seq_idx is not None:
            raise ValueError(
                "conv_states must be left out with initial_states, return_final_states or seq_idx"
            )
        _layer_checks.check_integers({"cache_indices": cache_indices})
        slots = torch.arange(sequences, device=x.device) if cache_indices is None else cache_indices.long()
        real = (slots >= 0) & (slots != pad_slot_id)
        _check_pool(rows, slots, real, conv_states, sequences, width, has_initial_state)
        columns = conv_states.shape[2]
        if conv_states.shape[0]:
            initial = conv_states[torch.where(real, slots, 0)].detach()
        else:  # all slots are null
            initial = conv_states.new_zeros(sequences, *conv_states.shape[1:])
        known = real if has_initial_state is None else real & has_initial_state.bool()
        initial = torch.where(known[:, None, None], initial, 0)
        y, final = convolve_tokens(tokens, weight, bias, initial, query_start_loc, seq_idx, silu, columns)
        assert final is not None
        y = _without_null_rows(y, real, query_start_loc)
        if sequences and conv_states.shape[0]:
            _plain.write_slots(conv_states, slots, real, final.detach())
        final = None
    y = y.transpose(1, 2)
    y = y.squeeze(0) if packed else y
    if not return_final_states:
        return y
    if final is None:  # of W = 1
        final = rows.new_zeros(sequences, rows.shape[1], 0)
    if final_states_out is not None:
        final = final_states_out.copy_(final)
    return y, final


def _check_pool(
    x: Tensor,
    slots: Tensor,
    real: Tensor,
    conv_states: Tensor,
    sequences: int,
    width: int,
    has_initial_state: Tensor | None,
) -> None:
    if (
        conv_states.dim() != 3
        or conv_states.shape[1] != x.shape[1]
        or conv_states.shape[2] < max(width - 1, 1)
    ):
        raise ValueError(
            f"conv_states must have shape [slots, D, S] of D = {x.shape[1]}, S at least {max(width - 1, 1)}, "
            f"got {list(conv_states.shape)}"
        )
    _layer_checks.check_floats({"conv_states": conv_states})
    _layer_checks.check_written("conv_states", conv_states)
    for name, each in (("cache_indices", slots), ("has_initial_state", has_initial_state)):
        if each is not None and tuple(each.shape) != (sequences,):
            raise ValueError(f"{name} must have shape [{sequences}], got {list(each.shape)}")
    if has_initial_state is not None and has_initial_state.dtype.is_floating_point:
        raise ValueError(f"has_initial_state must have dtype bool, got {has_initial_state.dtype}")
    if not _layer_checks.reads_values(x):
        return
    named = slots[real]
    if named.numel() and int(named.max()) >= conv_states.shape[0]:
        raise ValueError(
            f"cache_indices must name slots below {conv_states.shape[0]}, got {int(named.max())}"
        )
    if len(named.unique()) < len(named):
        raise ValueError("cache_indices must name each slot once")


def _without_null_rows(y: Tensor, real: Tensor, query_start_loc: Tensor | None) -> Tensor:
    if not len(real):
        return torch.zeros_like(y)
    if query_start_loc is None:
        return torch.where(real[:, None, None], y, 0)
    begins = query_start_loc.long()
    token = torch.arange(y.shape[1], device=y.device)
    sequence = torch.searchsorted(begins[1:].contiguous(), token, right=True).clamp(max=len(real) - 1)
    return torch.where(real[sequence][None, :, None], y, 0)


def convolve_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
    columns: int,
) -> tuple[Tensor, Tensor | None]:
    """What both functions here and adapters call: x and y are `[B, T, D]`, and the final state, of so many
    columns, is none with 0."""
    given = (x, weight, bias, initial_states, cu_seqlens, seq_idx, silu, columns)
    if _layers.takes(x, weight, bias, initial_states):
        return _layers.convolve(*given)
    _check_shapes(*given[:6])
    if x.is_cuda and not is_compiling() and (made := _conv_gpu.convolve(*given)) is not None:
        return made
    return _plain.convolve(*given)


def _check_shapes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
) -> None:
    """What the kernel of CPUs checks itself."""
    _layer_checks.check_floats({"x": x, "weight": weight, "bias": bias, "initial_states": state})
    _layer_checks.check_integers({"query_start_loc": cu_seqlens, "seq_idx": seq_idx})
    channels = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != channels or not 1 <= weight.shape[1] <= 16:
        raise ValueError(
            f"weight must have shape [D, W] of D = {channels}, W from 1 to 16, got {list(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"bias must have shape [{channels}], got {list(bias.shape)}")
    if cu_seqlens is not None:
        if seq_idx is not None:
            raise ValueError("seq_idx must be left out with query_start_loc")
        if x.shape[0] != 1 or cu_seqlens.dim() != 1 or not len(cu_seqlens):
            raise ValueError(f"query_start_loc must have shape [N + 1] with B = 1, got B = {x.shape[0]}")
        _layer_checks.check_lengths(x, cu_seqlens)
    if seq_idx is not None:
        if state is not None:
            raise ValueError("seq_idx must be left out with states")
        if seq_idx.shape != x.shape[:2]:
            raise ValueError(f"seq_idx must have shape {list(x.shape[:2])}, got {list(seq_idx.shape)}")
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if state is not None and (
        state.dim() != 3
        or tuple(state.shape[:2]) != (sequences, channels)
        or state.shape[2] < weight.shape[1] - 1
    ):
        raise ValueError(
            f"initial_states must have shape [{sequences}, {channels}, S], S at least {weight.shape[1] - 1}, "
            f"got {list(state.shape)}"
        )


def _check_step_shapes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    slots: Tensor | None,
    cache_seqlens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    null_index: int,
) -> None:
    """What the kernel of CPUs checks itself."""
    _check_shapes(x, weight, bias, None, cu_seqlens, None)
    _layer_checks.check_floats({"conv_state": state})
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    channels, width = weight.shape
    if state.dim() != 3 or state.shape[1] != channels or state.shape[2] < max(width - 1, 1):
        raise ValueError(
            f"conv_state must have shape [slots, D, S] of D = {channels}, S at least {max(width - 1, 1)}, "
            f"got {list(state.shape)}"
        )
    _layer_checks.check_written("conv_state", state)
    named = {"conv_state_indices": slots, "cache_seqlens": cache_seqlens,
             "num_accepted_tokens": num_accepted_tokens}  # fmt: skip
    for name, each in named.items():
        if each is None:
            continue
        if tuple(each.shape) != (sequences,):
            raise ValueError(f"{name} must have shape [{sequences}], got {list(each.shape)}")
    _layer_checks.check_integers(named)
    if slots is None and state.shape[0] < sequences:
        raise ValueError(
            f"conv_state must have a slot for each of {sequences} sequences, got {state.shape[0]}"
        )
    if num_accepted_tokens is not None:
        if cache_seqlens is not None:
            raise ValueError("num_accepted_tokens must be left out with cache_seqlens, got both")
        columns = max(width - 2, 0) + x.shape[1]
        if cu_seqlens is None and columns > state.shape[2]:
            raise ValueError(
                f"conv_state must have W - 2 + T = {columns} columns at least with num_accepted_tokens, "
                f"got {state.shape[2]}"
            )
    _layer_checks.check_step_values(x, width, state, cu_seqlens, slots, cache_seqlens, num_accepted_tokens,
                                    null_index)  # fmt: skip


def _refuse_gradients(**given: Tensor | None) -> None:
    """As the operator of CPUs does."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given.values()):
        _autograd.refuse_gradients(ops.causal_conv1d_update.default, given)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int = -1,
) -> Tensor:
    """The next tokens of every sequence, like x; `conv_state`, their last tokens, is updated in place.

    x: `[B, D]`, `[B, D, T]`, or `[tokens, D]` with query_start_loc `[B + 1]`.
    conv_state: `[slots, D, S]`, S >= W - 1, the latest token last. weight `[D, W]`, bias `[D]`, activation:
        as in `causal_conv1d_fn`.
    conv_state_indices: `[B]`, the slot of each row; absent: row n is slot n. A slot may be named once. Rows
        whose slot is negative or pad_slot_id have y = 0 and touch no state.
    cache_seqlens: `[B]`, how many tokens came before: the state is a ring, in which token p is in column
        p mod S.
    num_accepted_tokens: `[B]`, of speculative decoding: how many tokens of the call before were accepted,
        from 1 on. The state then holds W - 2 tokens and, behind them, all T of this call; W - 2 + T <= S.

    The first seven parameters are causal-conv1d's (1.6), the others vLLM's. ValueError names an argument that
    does not fit, before anything is written. It has no gradients.
    """
    optional = {
        "bias": bias, "cache_seqlens": cache_seqlens, "conv_state_indices": conv_state_indices,
        "query_start_loc": query_start_loc, "num_accepted_tokens": num_accepted_tokens,
    }  # fmt: skip
    _check_types({"x": x, "conv_state": conv_state, "weight": weight}, optional, pad_slot_id)
    silu = _silu(activation)
    if query_start_loc is not None:
        if x.dim() != 2:
            raise ValueError(f"x must have shape [tokens, D] with query_start_loc, got {list(x.shape)}")
        rows = x.unsqueeze(0)
    elif x.dim() == 2:
        rows = x.unsqueeze(1)
    elif x.dim() == 3:
        rows = x.transpose(1, 2)
    else:
        raise ValueError(f"x must have shape [B, D] or [B, D, T], got {list(x.shape)}")
    given = (
        rows, conv_state, weight, bias, silu, conv_state_indices, query_start_loc, cache_seqlens,
        num_accepted_tokens, pad_slot_id,
    )  # fmt: skip
    if _layers.takes(rows, conv_state, weight, bias):
        y = _layers.convolve_step(*given)
    else:
        _refuse_gradients(x=x, conv_state=conv_state, weight=weight, bias=bias)
        _check_step_shapes(rows, weight, bias, conv_state, query_start_loc, conv_state_indices, cache_seqlens,
                           num_accepted_tokens, pad_slot_id)  # fmt: skip
        found = _conv_gpu.convolve_step(*given) if x.is_cuda and not is_compiling() else None
        y = _plain.convolve_step(*given) if found is None else found
    if query_start_loc is not None:
        return y.squeeze(0)
    return y.squeeze(1) if x.dim() == 2 else y.transpose(1, 2)
