# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the operators: what PyTorch runs in place of one where something requires gradients.

The default overloads of prefill and decode have a backward pass, `torch.ops.cula.backward`; everything else
refuses before it runs, with the name of the argument. A call saves its inputs and nothing besides: the
backward pass computes what it needs of the forward pass again. Where `options` says "save", and a kernel does
it, a prefill also keeps what the backward pass would compute again (`Saver`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from . import _ops
from ._library import ops

Name = TypeVar("Name")

TRAINED = ("prefill.default", "decode.default")  # the overloads that have a backward pass


def differentiable(op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(keys, *arguments)`, which is `op` below its derivatives, with them."""
    names = [argument.name for argument in op._schema.arguments]
    places = [names.index(each) for each in _gradients()] if op.__name__ in TRAINED else []

    class Derivatives(Function):
        @staticmethod
        def forward(
            ctx: _Context,
            keys: torch._C.DispatchKeySet,
            named: str | None,
            saver: Saver | None,
            *arguments: Any,
        ) -> object:
            given = dict(zip(names, arguments, strict=False))
            saved = None if saver is None else saver.room(given)
            if saver is None or saved is None:
                result = run(keys, *arguments)
            else:
                result = saver.prefill(given, saved)
                given["saved"], named = saved, saver.target
            ctx.tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
            ctx.others = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
            ctx.others["backend"] = named
            ctx.save_for_backward(*(given[name] for name in ctx.tensors))
            ctx.set_materialize_grads(False)
            return result

        @staticmethod
        def backward(ctx: _Context, d_o: Tensor | None, d_final_state: Tensor | None = None) -> object:
            given = {**ctx.others, **dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))}
            _, _, _, *needed = ctx.needs_input_grad
            wanted = [at < len(needed) and needed[at] for at in places]
            with torch.no_grad():
                made = dict(zip(_gradients(), gradients(given, wanted, d_o, d_final_state), strict=True))
            if torch.is_grad_enabled():
                inputs = [given[name] for name in ctx.tensors if name != "saved"]
                made = differentiated_once(made, [*inputs, d_o, d_final_state])
            return None, None, None, *(made.get(each) for each in names[: len(needed)])

    def call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> object:
        if forward_ad._current_level >= 0:
            refuse_tangents(op, args, kwargs)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args, *kwargs.values())):
            return run(keys, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        refuse_gradients(op, given)
        named = backend(_ops.op_name(op), given)
        last = max(names.index(each) for each in given)
        return Derivatives.apply(
            keys, named, saver_of(given), *(given.get(each) for each in names[: last + 1])
        )

    return call


class _Context(Protocol):
    """What autograd hands to both directions of a call, and what a call keeps there: the names of the saved
    tensors, and the other arguments; in _Once the names of the gradients."""

    names: tuple[object, ...]
    tensors: list[str]
    others: dict[str, Any]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _gradients() -> tuple[str, ...]:
    return _ops.GRADIENTS


def gradients(
    given: Mapping[str, Any], wanted: list[bool], d_o: Tensor | None, d_final_state: Tensor | None
) -> list[Tensor | None]:
    """The wanted gradients of a call of those arguments, each like what it is the gradient of; `wanted` in
    the order of `GRADIENTS`."""
    bit = _ops.bit
    k_first = given["options"] & bit("k_first")
    options = given["options"] & ~bit("make_final_state") & ~bit("save")
    if k_first and d_final_state is not None:
        d_final_state = d_final_state.transpose(-1, -2)
    names = ("q", "k", "v", "g", "beta", "decay", "A_log", "dt_bias", "lower_bound", "cu_seqlens", "scale",
             "initial_state", "has_initial_state", "backend", "saved", "erase", "a_key", "b_key")  # fmt: skip
    operands = {name: given[name] for name in names if given.get(name) is not None}
    operands |= {"d_o": d_o, "d_final_state": d_final_state}
    made: list[Tensor | None]
    if given["v"].shape[3] > VALUE_CHANNELS:
        asked = [name for name, each in zip(_gradients(), wanted, strict=True) if each]
        parts = _in_parts(operands, options - k_first, asked)
        made = [parts.get(name) for name in _gradients()]
    else:
        options |= sum(bit("gradients") << row for row, each in enumerate(wanted) if each)
        run = ops.backward.default if _mode_is_on() else _ops.backward.make
        made = list(run(options=options, **operands))
        row = _gradients().index("initial_state")
        if k_first and (of_states := made[row]) is not None:
            made[row] = of_states.transpose(-1, -2)
    return [None if x is None else _like(x, given[name]) for name, x in zip(_gradients(), made, strict=True)]


def _like(gradient: Tensor, of: Tensor) -> Tensor:
    if gradient.shape != of.shape:
        gradient = gradient.reshape(of.shape)
    return gradient if gradient.dtype is of.dtype else gradient.to(of.dtype)


KEY_CHANNELS = 256  # that all passes take

# The value channels that the operator takes, and the dimensions of tensors that have them; a beta per value
# channel has them in the last of its four.
VALUE_CHANNELS = 256
_OF_VALUES = {"v": 3, "d_o": 3, "initial_state": 2, "d_final_state": 2}


def _in_parts(operands: Mapping[str, Any], options: int, asked: list[str]) -> dict[str, Tensor]:
    """The gradients of a call with more value channels than the operator takes. They do not interact: what
    has value channels of its own gets their gradients, and what they share gets the sum of the parts'
    gradients, in float32."""
    q, v, g = operands["q"], operands["v"], operands.get("g")
    at = {**_OF_VALUES, **({"beta": 3} if "beta" in operands and operands["beta"].dim() == 4 else {})}

    def room(name: str) -> Tensor:
        x = operands[name]
        exact = q.dtype == x.dtype == torch.float64
        dtype = v.dtype if name == "v" else torch.float64 if exact else torch.float32
        if name not in ("A_log", "dt_bias"):
            return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        per_channel = name == "dt_bias" and g is not None and g.dim() == 4
        return q.new_empty((v.shape[2], q.shape[3]) if per_channel else (v.shape[2],), dtype=dtype)

    made = {name: room(name) for name in asked}
    for first in range(0, v.shape[3], VALUE_CHANNELS):
        count = min(VALUE_CHANNELS, v.shape[3] - first)
        part = {
            name: x.narrow(at[name], first, count) if name in at and x is not None else x
            for name, x in operands.items()
        }
        outputs = {
            name: x.narrow(at[name], first, count) if name in at else torch.empty_like(x) if first else x
            for name, x in made.items()
        }
        ops.backward.out(options=options, **part, **{f"d_{name}": x for name, x in outputs.items()})
        if first:
            for name in made.keys() - at.keys():
                made[name] += outputs[name]
    return made


class _Once(Function):
    """Hands gradients on as functions of everything that they depend on, and says what is missing where
    somebody differentiates them."""

    @staticmethod
    def forward(ctx: _Context, names: tuple[object, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.names = names
        ctx.set_materialize_grads(False)
        found = tensors[: len(names)]
        return tuple(gradient.view_as(gradient) for gradient in found if gradient is not None)

    @staticmethod
    def backward(ctx: _Context, *given: Tensor | None) -> object:
        asked = [name for name, of in zip(ctx.names, given, strict=True) if of is not None]
        words = ", ".join(name for name in asked if isinstance(name, str))
        what = f"the gradient of {words}" if words else "a gradient"
        raise NotImplementedError(
            f"cula: second derivatives are not built: {what} can be computed with create_graph, but not be "
            "differentiated"
        )


def differentiated_once(
    made: Mapping[Name, Tensor | None], of: Iterable[Tensor | None]
) -> dict[Name, Tensor | None]:
    """The same gradients, which say that second derivatives are not built where somebody asks for them;
    by the names that are words. `of`: all that they depend on."""
    found = {name: gradient for name, gradient in made.items() if gradient is not None}
    if not found:
        return {**made}
    once = _Once.apply((*found,), *found.values(), *of)
    return {**made, **dict(zip(found, once, strict=True))}


def refuse_tangents(
    op: torch._ops.OpOverload,
    arguments: Iterable[object],
    others: Mapping[str, object] | None = None,
    by_package: bool = False,
) -> None:
    """`by_package`: arguments are named as the functions of the package name them."""
    names = (argument.name for argument in op._schema.arguments)
    given = {**dict(zip(names, arguments, strict=False)), **(others or {})}
    for name, value in given.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if forward_ad.unpack_dual(value).tangent is not None:
            name = _called(op, name, given) if by_package else name
            raise NotImplementedError(
                f"{_ops.op_name(op)}: {name} has a tangent, and forward-mode derivatives are not built; "
                f"call with {name}.detach(), which has none"
            )


def refuse_gradients(op: torch._ops.OpOverload, given: Mapping[str, Any], by_package: bool = False) -> None:
    """NotImplementedError for the first argument whose gradient would be lost, or what stands in its way.
    `by_package` as above."""
    who = _ops.op_name(op)
    wanted = [
        _called(op, name, given) if by_package else name
        for name, value in given.items()
        if isinstance(value, Tensor) and value.requires_grad
    ]
    state = given.get("initial_state")
    if state is not None and state.dtype == torch.float8_e4m3fn:
        raise NotImplementedError(
            f"{who}: {wanted[0]} requires gradients, and a call with a state of float8_e4m3fn has none: "
            "dequantize it, or call under torch.no_grad() or torch.inference_mode()"
        )
    if op.__name__ in TRAINED:
        refuse_untrained(who, wanted)
        return
    refuse_transforms(who, wanted)
    without = "or call under torch.no_grad() or torch.inference_mode()"
    slots = [name for name in ("initial_state_indices", "final_state_indices") if given.get(name) is not None]
    if who in ("prefill", "decode") and slots:
        raise NotImplementedError(
            f"{who}: {wanted[0]} requires gradients, and states in slots have none: give a state for each "
            f"sequence and no {slots[0]}, {without}"
        )
    if given.get("kept") is not None:
        raise NotImplementedError(
            f"{who}: {wanted[0]} requires gradients, and a call that is given kept has none: call without, "
            f"{without}"
        )
    if who in ("prefill", "decode"):
        written = [
            _WRITTEN[argument.name]
            for argument in op._schema.arguments
            if argument.is_write and given.get(argument.name) is not None
        ]
        raise NotImplementedError(
            f"{who}: {wanted[0]} requires gradients, and a call that writes into {' and '.join(written)} has "
            f"none: call without, {without}"
        )
    raise NotImplementedError(
        f"{who}: {wanted[0]} requires gradients, and {who} has none: detach it, {without}"
    )


def _called(op: torch._ops.OpOverload, name: str, given: Mapping[str, Any]) -> str:
    """What the functions of the package call an argument of an operator."""
    who = _ops.op_name(op)
    if name == "o":
        return "out"
    if name in ("initial_scales", "final_scales"):
        return "state_scales"
    if name == "final_state" and given["options"] & _ops.bit("in_place"):
        return "state_pool" if who == "prefill" else "state"
    return "state" if name == "initial_state" and who == "verify" else name


def refuse_untrained(who: str, wanted: list[str]) -> None:
    """NotImplementedError for the first of the arguments that require gradients and have none."""
    refuse_transforms(who, wanted)
    for name in wanted:
        if name not in _gradients():
            raise NotImplementedError(
                f"{who}: {name} requires gradients, which are not built; call with {name}.detach()"
            )


def refuse_transforms(who: str, wanted: list[str]) -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{who}: {wanted[0]} requires gradients within torch.func, which are not built; use "
            "torch.autograd"
        )


# What a caller of the package calls what an overload `out` writes.
_WRITTEN = {
    "o": "out",
    "final_state": "a state or pool",
    "final_scales": "state_scales",
    "checkpoints": "checkpoints",
    "chunk_states": "the states of return_intermediate_states",
}


def with_gradients(op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """What the package calls in place of an operator where something requires gradients: the operator with
    its derivatives, or what refuses the call in the words of the package. run: the operator without checks
    and derivatives."""
    if op.__name__ in TRAINED:
        derived = differentiable(op, lambda _, *arguments: run(*arguments))

        def call(*arguments: Any) -> object:
            return op(*arguments) if _mode_is_on() else derived(None, *arguments)

        return call
    names = [argument.name for argument in op._schema.arguments]

    def refuse(*arguments: Any) -> None:
        refuse_gradients(op, dict(zip(names, arguments, strict=False)), by_package=True)

    return refuse


def _mode_is_on() -> bool:
    """Whether something watches the operators that run: a tracer, a policy of selective checkpointing. It
    knows them as `torch.ops.cula`."""
    return torch._C._len_torch_dispatch_stack() > 0


def backend(who: str, given: Mapping[str, Any]) -> str | None:
    """The backend of the backward pass of a call of those arguments: the one that the caller named, where it
    takes the call; None for the best. NotImplementedError where no kernel takes it."""
    rows = _rows_of(given)
    if rows is None:
        return None
    named: str | None = given.get("backend")
    takers = [row.target for row in rows if row.runs]
    if any(target == named or target.startswith(f"{named}:") for target in takers):
        return named
    if takers:
        return None
    wanted = next(name for name in _gradients() if getattr(given.get(name), "requires_grad", False))
    reasons = "; ".join(f"{row.target}: {row.reason}" for row in rows)
    raise NotImplementedError(
        f"{who}: {wanted} requires gradients, and no backend computes them here "
        f"({reasons}); call under torch.no_grad() or torch.inference_mode()"
    )


class Saver(NamedTuple):
    """A kernel that keeps, in a prefill, what the backward pass would compute again: `words` int32 of each
    chunk of `chunk_tokens` tokens and each value head, of at most `most_chunks` chunks."""

    target: str
    chunk_tokens: int
    words: int
    most_chunks: int

    def room(self, given: Mapping[str, Any]) -> Tensor | None:
        """Memory for what a call of those arguments keeps; None where that is too much, and where there is
        nothing."""
        q, v, cu_seqlens = given["q"], given["v"], given.get("cu_seqlens")
        rows = given["k"].shape[1]  # tokens, or their writes
        if cu_seqlens is None:
            chunks = (rows + self.chunk_tokens - 1) // self.chunk_tokens * q.shape[0]
        else:
            chunks = rows // self.chunk_tokens + cu_seqlens.shape[0] - 1
        if q.shape[1] == 0 or chunks == 0 or chunks > self.most_chunks:
            return None
        room: Tensor = q.new_empty((chunks, v.shape[2], self.words), dtype=torch.int32)
        return room

    def prefill(self, given: Mapping[str, Any], saved: Tensor) -> tuple[Tensor, Tensor | None]:
        """The prefill of those arguments, which writes into `saved`."""
        arguments = {name: value for name, value in given.items() if value is not None}
        arguments["options"] &= ~_ops.bit("save")
        o, final_state = ops.prefill.out(**(arguments | {"saved": saved, "backend": self.target}))
        return o, final_state


def saver_of(given: Mapping[str, Any]) -> Saver | None:
    """What keeps something for the backward pass of a call of those arguments, where it asks for that; None
    if nothing does, and the backward pass computes all again."""
    if not given["options"] & _ops.bit("save"):
        return None
    named = given.get("backend")
    for row in _rows_of(given, saves=True) or ():
        if row.runs and (named is None or row.target == named):
            return Saver(row.target, *row.saving)
    return None


def has_backend(given: Mapping[str, Any]) -> bool:
    """Whether some kernel takes the backward pass of a call of those arguments."""
    return any(row.runs for row in _rows_of(given) or ())


def _rows_of(given: Mapping[str, Any], saves: bool = False) -> list[_Row] | None:
    """The kernels of the backward pass, or with `saves` those of a prefill that keeps something for it; None
    for what is no problem at all, which the call itself refuses, or never runs."""
    q, v, beta, state = given["q"], given["v"], given.get("beta"), given.get("initial_state")
    if q.dim() != 4 or v.dim() != 4 or q.device.type not in ("cpu", "cuda"):
        return None
    if not 0 < q.shape[3] <= KEY_CHANNELS:
        return None
    try:
        return _rows(
            given["options"] & 0xFF, given["options"] >> 8 & 3,
            q.device,
            int(q.shape[3]), int(v.shape[3]) if saves else min(int(v.shape[3]), VALUE_CHANNELS),
            q.dtype, torch.float32 if state is None else state.dtype,
            isinstance(beta, Tensor) and beta.dim() == 4, given.get("lower_bound") or -1.0,
            (int(q.shape[2]), int(v.shape[2])) if saves else None,
            int(_ops.writes_per_token(given["options"], q, v)),
        )  # fmt: skip
    except (ValueError, IndexError):
        return None


class _Row(NamedTuple):
    """A kernel, whether it takes a call, and why not. saving: the numbers of `Saver`, if it does."""

    target: str
    runs: bool
    reason: str
    saving: tuple[int, int, int] = (0, 0, 0)


@functools.lru_cache(maxsize=256)
def _rows(
    row: int,
    gate: int,
    device: torch.device,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    beta_per_value: bool,
    lower_bound: float,
    saving_heads: tuple[int, int] | None,
    writes: int,
) -> list[_Row]:
    """saving_heads: H and HV of a prefill that saves; None: of a backward pass, which they do not matter
    to."""
    algorithm = _ops.algorithms().splitlines()[row].partition("\t")[0]
    heads, value_heads = saving_heads or (1, 1)
    with _disable_current_modes():
        text = _ops.explain(
            "backward" if saving_heads is None else "prefill", algorithm, str(device), batch=1, tokens=64,
            sequences=1, heads=heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim,
            dtype=str(dtype).removeprefix("torch."), state_dtype=str(state_dtype).removeprefix("torch."),
            gate=("log_decay", "softplus", "bounded")[gate], lower_bound=lower_bound, varlen=False,
            beta_per_value=beta_per_value, checkpoints=False, chunk_states=False, tree=False,
            chunk_tokens=64, batch_invariant=False, costs="", saves=saving_heads is not None, writes=writes,
        )  # fmt: skip
    lines = (line.split("\t") for line in text.splitlines())
    rows = []
    for target, verdict, reason, _, saving in lines:
        chunk_tokens, words, most_chunks = map(int, saving.split() or (0, 0, 0))
        rows.append(_Row(target, verdict != "no", reason, (chunk_tokens, words, most_chunks)))
    return rows
