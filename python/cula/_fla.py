# SPDX-License-Identifier: Apache-2.0
"""What the operators of flash-linear-attention check before they run, in its order and words.

Checks that state a limit of FLA's kernels, and not of ours, are left out.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from . import _names, _ops
from ._passes import LOG_DECAY, Gate, check_flags, gate_of

# The kinds of arguments by their annotations, and how many dimensions have those tensors whose shapes are
# read first.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "tuple[Tensor, Tensor]": tuple,
    "bool": bool,
    "int": int,
    "float": (float, int),
    "str": str,
    "None": type(None),
}
_RANKS: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k", "v", "Q", "K", "V", "initial_state"), (4,))
_RANKS |= {"g": (3, 4), "gk": (4,), "beta": (3, 4), "cu_seqlens": (1,)}


# FLA's layers hand these on as None.
_MAY_BE_NONE = ("output_final_state", "reverse")


class ArgumentError(ValueError, AssertionError):
    """FLA asserts where this library raises ValueError: an `except` clause written for either holds."""


def refuse_types(
    function: Callable[..., object],
    given: Mapping[str, object],
    error: Exception,
    *more_ranks: int,
    names: Mapping[str, str] | None = None,
) -> None:
    """Raises in place of an error that comes from an argument of a wrong type and does not say which, or that
    has an operator's name of an argument which `names` says the function's name of.

    `given` holds the parameters by name. It is called once something has failed: a valid call pays for no
    check. An error that names a parameter already, or that has nothing to do with them, stays what it is.
    """
    parameters = inspect.signature(function).parameters
    if names is not None and (own := _names.named(error, names)) is not error:
        raise own from None
    if _names.is_of(error, "state_scales") and "state_scales" not in parameters:
        raise ValueError(
            f"{function.__name__}: initial_state must have dtype float32 or bfloat16 or float16, got "
            "float8_e4m3fn"
        ) from None
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _names_one(error, parameters):
        return
    first = next((given[name] for name in ("q", "Q", "r") if name in given), None)
    for name, parameter in parameters.items():
        kinds = parameter.annotation.split(" | ")
        if not all(kind in _KINDS for kind in kinds) or name not in given:
            continue
        value = given[name]
        if value is None and name in _MAY_BE_NONE:
            continue
        named = f"{function.__name__}: {name}"
        if not isinstance(value, tuple(_KINDS[kind] for kind in kinds)) or (
            isinstance(value, bool) and "bool" not in kinds
        ):
            wanted = " or ".join("a tensor" if kind == "Tensor" else kind for kind in kinds)
            raise TypeError(f"{named} must be {wanted}, got {_ops.type_name(value)}") from None
        if not isinstance(value, Tensor):
            continue
        if not _ops.is_dense(value):
            raise ValueError(f"{named} must be a dense tensor, got {_ops.described(value)}") from None
        if isinstance(first, Tensor) and value.device != first.device and name != "cu_seqlens_cpu":
            raise ValueError(f"{named} must be on q's device, {first.device}, got {value.device}") from None
        if name in _RANKS and value.dim() not in (*_RANKS[name], *more_ranks):
            ranks = " or ".join(map(str, _RANKS[name]))
            raise ValueError(f"{named} must have {ranks} dimensions, got {list(value.shape)}") from None


def _names_one(error: Exception, parameters: Mapping[str, object]) -> bool:
    """Whether the error is one of a wrong argument and names a parameter. `a` is an article too, and Python
    and PyTorch write "operand type(s)" and "argument 'out'", which may be those of another function."""
    if not isinstance(error, ValueError | TypeError | NotImplementedError | AssertionError):
        return False
    names = ("a(?= must)" if name == "a" else re.escape(name) for name in parameters)
    return re.search(rf"(?<![\w('])({'|'.join(names)})(?![\w'])", str(error)) is not None


def check_sizes(function: str, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be of type int, got {_ops.type_name(value)}")
        if not 0 <= value < 2**63:
            raise ValueError(f"{function}: {name} must be from 0 to 2^63 - 1, got {value}")


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the widest of their dtypes: FLA's recurrent operators take each in its own, and give o in
    that of q or of v. Where one of them is none that a call takes they stay as they are."""
    if q.dtype == k.dtype == v.dtype or not all(x.dtype in _DTYPES for x in (q, k, v)):
        return q, k, v
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def require(condition: bool, message: str, *given: object) -> None:
    """`given` fills the message, once it is needed: putting words together takes longer than a call."""
    if not condition:
        raise ArgumentError(message.format(*given))


def options(name: str, kwargs: dict[str, object], accepted: tuple[str, ...] = ()) -> None:
    """FLA drops an unknown keyword silently; here it is an error, so that a misspelt option does not go
    unnoticed."""
    for key in kwargs:
        if key == "head_first":
            raise DeprecationWarning(
                "head_first has been removed. Inputs must be in `[B, T, H, ...]` format."
            )
        if key not in accepted:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")


def state_layout(kwargs: dict[str, object], state_v_first: bool) -> bool:
    """`state_v_first` under its old name."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`.")
    v_first = kwargs.pop("transpose_state_layout")
    check_flags(transpose_state_layout=v_first)
    message = "`transpose_state_layout` is deprecated and renamed to `state_v_first`."
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return v_first is True


def chunk_size(function: str, kwargs: Mapping[str, object]) -> None:
    """FLA's check of an option that changes nothing here; left out, or None, FLA chooses."""
    size = kwargs.get("chunk_size")
    if size is None:
        return
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{function}: chunk_size must be of type int, got {_ops.type_name(size)}")
    if size <= 0 or size & (size - 1):
        raise ValueError(f"`chunk_size` must be a power of 2, got {size}.")


def sequences(q: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        raise ValueError(
            f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`."
            "Please flatten variable-length inputs before processing."
        )
    count = cu_seqlens.shape[0] - 1
    if initial_state is not None and initial_state.shape[0] != count:
        raise ValueError(
            "The number of initial states is expected to be equal to the number of input sequences, "
            f"i.e., {count} rather than {initial_state.shape[0]}."
        )


def cu_seqlens_of(
    cp_context: object, initial_state: Tensor | None, output_final_state: bool | None
) -> Tensor | None:
    """What a context of several ranks says in place of the argument."""
    require(initial_state is None, "Initial state is not supported for CP")
    require(not output_final_state, "Output final state is not supported for CP")
    cu_seqlens: Tensor | None = getattr(cp_context, "cu_seqlens", None)
    require(cu_seqlens is not None, "cu_seqlens is required for CP: cp_context must have it")
    return cu_seqlens


def along(
    name: str,
    mode: str,
    cp_context: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gate: Gate,
    scale: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    erase: Tensor | None = None,
    a_key: Tensor | None = None,
    b_key: Tensor | None = None,
) -> tuple[Tensor, None]:
    """The function `name` on the tokens that a rank of a context of several has."""
    from .dist import calls, context  # here, since the others need no process groups

    named: dict[str, object] = {"scale": scale, "use_qk_l2norm_in_kernel": qk_l2norm}
    if beta is not None:
        named |= {"use_beta_sigmoid_in_kernel": beta_is_logit, "allow_neg_eigval": allow_neg_eigval}
    if gate is not LOG_DECAY:
        named |= {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "lower_bound": gate.lower_bound}
        named["use_gate_in_kernel"] = True
    call = calls.Call(name, mode, q, k, v, g, beta, erase=erase, a_key=a_key, b_key=b_key, options=named)
    return context.along(call, cp_context), None


def float32_state(initial_state: Tensor | None) -> None:
    require(
        initial_state is None or initial_state.dtype == torch.float32, "initial_state must be in float32."
    )


def gate(
    use_gate_in_kernel: bool, A_log: Tensor | None, lower_bound: float | None, safe_gate: bool = False
) -> None:
    if not use_gate_in_kernel:
        return
    if A_log is None and lower_bound is None:
        raise ValueError(
            "`A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is not set."
        )
    if not safe_gate:
        return
    if lower_bound is None:
        raise ValueError(
            "`lower_bound` must be specified when `safe_gate=True` and `use_gate_in_kernel=True`."
        )
    if not -5 <= lower_bound < 0:
        raise ValueError(f"`lower_bound` must be in the safe range [-5, 0), got {lower_bound}.")


def given_gate(
    use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Gate:
    """FLA ignores the gate's parameters where g is the log decay already."""
    if use_gate_in_kernel is False:
        return LOG_DECAY
    return Gate(gate_of(use_gate_in_kernel, lower_bound), A_log, dt_bias, lower_bound)


def beta(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`.")


def forward_only(reverse: bool, gv: Tensor | None) -> None:
    if reverse is not False and reverse is not None:
        raise NotImplementedError("reverse=True is not built: flip the tensors along T")
    if gv is not None:
        raise NotImplementedError(
            "gv, a decay along the value dimension, is outside the family of these kernels"
        )


def no_grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    require(q.shape == k.shape, "q and k must have the same shape, got q={} vs k={}", q.shape, k.shape)
    require(
        v.shape == (*q.shape[:3], v.shape[-1]),
        "v must be of shape (batch size, seq len, num of head, head dim).",
    )
