# SPDX-License-Identifier: Apache-2.0
"""The operators of `torch.ops.cula`, written in C++ (bindings/torch/ops.cc): one per pass, `compose`,
`explain`, `algorithms` and `option_bits`. Those of the layers around are in `_layers`.

A pass has two overloads (bindings/torch/schema.h): the default one makes what it returns and writes into
nothing, and `out` writes into tensors of the caller and makes what is left out. The package calls both by
name, through functions that `_shims` writes, and with most of what is no tensor in one integer (`pack`). A
bad argument raises `ValueError` from C++ with the name of the argument, what was expected and what was given.

`torch.ops.cula_unchecked` holds the passes once more, for those functions alone. Derivatives are in
`_autograd`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from . import _autograd, _shims
from ._library import NAMESPACE, ops, unchecked

compose = ops.compose.default
explain = ops.explain.default
algorithms = ops.algorithms.default

# operator_options(algorithm, gate="log_decay", qk_l2norm=False, ..., chunk_tokens=64)
operator_options = pack = _shims.packer(ops.option_bits())

# By the row of the algorithm, which is the lowest eight bits of `options`: whether a token may write several
# times, and whether M of a segment is a diagonal.
_SEVERAL_WRITES, _DIAGONAL = (
    [line.split("\t")[column] == "yes" for line in algorithms().splitlines()] for column in (-2, -1)
)

# What a backward makes the gradients of, in the order of what it returns.
GRADIENTS = tuple(output.name.removeprefix("d_") for output in ops.backward.default._schema.returns)

# What a schema calls a type.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": Tensor,
    "str": str,
    "bool": bool,
    "int": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
}


def _fake(op: torch._ops.OpOverload) -> Callable[..., object]:
    """What tracing runs in place of an operator: it checks the devices and makes what the operator would
    return."""
    names = [argument.name for argument in op._schema.arguments]
    outputs = [output.name for output in op._schema.returns]

    def fake(*args: Any, **kwargs: Any) -> object:
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        device = given["q"].device
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                raise ValueError(f"{op_name(op)}: {name} must be on q's device, {device}, got {value.device}")
        if outputs != ["kept"]:
            check_dims(op, given["q"], given["v"])
        made = tuple(_MAKE[name](**given) for name in outputs)
        return made[0] if len(made) == 1 else made or None

    return fake


def op_name(op: Operator | torch._ops.OpOverload) -> str:
    return op.name if isinstance(op, Operator) else op.__name__.partition(".")[0]


def check_dims(op: Operator | torch._ops.OpOverload, q: Tensor, v: Tensor) -> None:
    """What must hold before the shapes of the outputs can be told."""
    for argument, tensor, shape in (("q", q, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if tensor.dim() != 4:
            raise ValueError(f"{op_name(op)}: {argument} must have shape {shape}, got {described(tensor)}")


def _make_o(q: Tensor, v: Tensor, options: int, o: Tensor | None = None, **_: object) -> Tensor | None:
    if o is not None:
        return None
    if _SEVERAL_WRITES[options & 0xFF]:
        return v.new_empty((*q.shape[:2], *v.shape[2:]))
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def may_have_rows(tokens: int, rows: int) -> bool:
    """Whether v may have so many rows: several for each token, where the algorithm takes that."""
    return rows == tokens or (0 < tokens < rows and rows % tokens == 0)


def writes_per_token(options: int, q: Tensor, v: Tensor) -> int:
    """The rows of v, which are those of k and beta, for each row of q."""
    if not _SEVERAL_WRITES[options & 0xFF] or q.shape[1] == 0:
        return 1
    return v.shape[1] // q.shape[1]


def _states(
    wanted: int, q: Tensor, v: Tensor, options: int, cu_seqlens: Tensor | None = None, **_: object
) -> Tensor | None:
    """One for each sequence, where `options` has the bit."""
    if not options & wanted:
        return None
    rows, columns = v.shape[3], q.shape[3]
    matrix = (columns, rows) if options & bit("k_first") else (rows, columns)
    return q.new_empty((_sequences(q, cu_seqlens), v.shape[2], *matrix), dtype=state_dtype(q))


def _make_m(
    q: Tensor,
    v: Tensor,
    options: int,
    cu_seqlens: Tensor | None = None,
    **_: object,
) -> Tensor | None:
    if not options & bit("make_m"):
        return None
    matrix = q.shape[3:] if _DIAGONAL[options & 0xFF] else (q.shape[3], q.shape[3])
    return q.new_empty((_sequences(q, cu_seqlens), v.shape[2], *matrix), dtype=state_dtype(q))


def _gradient(row: int, of: str) -> Callable[..., Tensor | None]:
    """The gradient of row `row` of what a backward returns, which has the shape and dtype of `of`; that of a
    parameter of the gate is float32, in the shape of the heads."""

    def make(q: Tensor, v: Tensor, options: int, **given: Any) -> Tensor | None:
        wanted = bit("gradients") << row
        if not options & wanted:
            return None
        given |= {"q": q, "v": v}
        if of == "initial_state":
            return _states(wanted, options=options, **given)
        value: Tensor = given[of]
        if of not in ("A_log", "dt_bias"):
            return torch.empty_like(value, memory_format=torch.contiguous_format)
        per_channel = of == "dt_bias" and given["g"].dim() == 4
        shape = (v.shape[2], q.shape[3]) if per_channel else (v.shape[2],)
        exact = q.dtype == torch.float64 and value.dtype == torch.float64
        return q.new_empty(shape, dtype=torch.float64 if exact else torch.float32)

    return make


def _make_kept(q: Tensor, options: int, **_: object) -> Tensor | None:
    if options & bit("keep"):
        return q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)
    return None


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@functools.cache
def bit(option: str) -> int:
    return pack("kda", **{option: True}) - pack("kda")


_MAKE: dict[str, Callable[..., Tensor | None]] = {
    "o": _make_o,
    "final_state": lambda final_state=None, **given: (
        None if final_state is not None else _states(bit("make_final_state"), **given)
    ),
    "m": _make_m,
    "b": lambda **given: _states(bit("make_b"), **given),
    "kept": _make_kept,
    **{f"d_{of}": _gradient(row, of) for row, of in enumerate(GRADIENTS)},
}


def is_dense(value: object) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized)
    )


def type_name(value: object) -> str:
    """With the module of a type that is neither Python's nor PyTorch's: NumPy has a bool of its own."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in ("builtins", "torch"):
        return kind.__name__
    return f"{kind.__module__}.{kind.__name__}"


def described(value: object) -> str:
    """A tensor or what is none, in a few words."""
    if not isinstance(value, Tensor):
        return type_name(value)
    if is_dense(value):
        return str(list(value.shape))
    kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
    return f"a {kind.removeprefix('torch.')} tensor"


def refuse_types(
    op: torch._ops.OpOverload, arguments: Iterable[object], others: Mapping[str, object] | None = None
) -> None:
    """The error for the first argument that is not of the type in the schema, or a tensor of a kind or a
    number of a size that no operator takes."""
    schema = {argument.name: str(argument.type) for argument in op._schema.arguments}
    for name, value in (*zip(schema, arguments, strict=False), *(others or {}).items()):
        kind = schema[name]
        wanted = kind.removeprefix("Optional[").removesuffix("]")
        if value is None and kind != wanted:
            continue
        if not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "bool"):
            words = "a tensor" if wanted == "Tensor" else f"of type {wanted}"
            words += " or None" if kind != wanted else ""
            raise TypeError(f"{op_name(op)}: {name} must be {words}, got {type_name(value)}")
        if isinstance(value, Tensor) and (
            value.is_nested or value.is_quantized or value.layout is not torch.strided
        ):
            raise ValueError(f"{op_name(op)}: {name} must be a dense tensor, got {described(value)}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(
                f"{op_name(op)}: {name} must fit {32 if wanted == 'int' else 64} bits, got {value}"
            )


def _written(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """The positions of the arguments that an operator writes."""
    return tuple(position for position, each in enumerate(op._schema.arguments) if each.is_write)


def _checked(op: torch._ops.OpOverload) -> Callable[..., object]:
    """What PyTorch runs in place of an operator outside of `torch.inference_mode()`, and for tensors from
    outside: it looks for derivatives, which `_autograd` makes, and counts writes."""
    names, written = [argument.name for argument in op._schema.arguments], _written(op)

    def run(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> object:
        try:
            result = op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        except NotImplementedError:
            refuse_types(op, args, kwargs)  # tensors of a kind that PyTorch finds no kernel for
            raise
        for position in written:
            value = args[position] if position < len(args) else kwargs.get(names[position])
            if value is not None:
                increment_version(value)
        return result

    return _autograd.differentiable(op, run)


_libraries = [torch.library.Library(name, "FRAGMENT") for name in (NAMESPACE, f"{NAMESPACE}_unchecked")]


def _register(op: torch._ops.OpOverload, fake: Callable[..., object]) -> None:
    name = op.name().removeprefix(f"{NAMESPACE}::")
    for key in ("Autograd", "ADInplaceOrView"):
        _libraries[0].impl(name, _checked(op), key, with_keyset=True)
    torch.library.register_fake(op.name(), fake)
    _refuse_vmap(_libraries[0], op)


def register_layer(
    op: torch._ops.OpOverload,
    twin: torch._ops.OpOverload,
    fake: Callable[..., object],
    differentiable: Callable[..., object] | None,
) -> None:
    """Registers an operator of `_layers`, and its twin, which is the same without `_checked`.
    `differentiable` is the operator with its derivatives, of the key set and its arguments; None: it has
    none."""
    if differentiable is None:
        _register(op, fake)
    else:
        _libraries[0].impl(op.name().partition("::")[2], differentiable, "Autograd", with_keyset=True)
        torch.library.register_fake(op.name(), fake)
        _refuse_vmap(_libraries[0], op)
    _libraries[1].impl(twin.name().partition("::")[2], torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(twin.name(), fake)
    _refuse_vmap(_libraries[1], twin)


def _refuse_vmap(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """In the place of batching rules: those of torch.vmap, and those of the batched gradients of
    torch.autograd."""

    def refuse(*_: object, **__: object) -> None:
        if (name := op_name(op)) == "backward":
            raise NotImplementedError(
                "backward: batched gradients (torch.vmap, is_grads_batched, vectorize=True) are not built; "
                "ask for one gradient after the other"
            )
        raise NotImplementedError(f"{name}: torch.vmap is not built; inputs have a batch dimension, B")

    for key in ("FuncTorchBatched", "Batched"):
        library.impl(op.name().partition("::")[2], refuse, key)


def _overload(name: str, overload: str) -> Callable[..., Any]:
    """Registers an overload of a pass, and returns what the package calls in its place: the same without
    `_checked`, by name."""
    op = getattr(getattr(ops, name), overload)
    twin = getattr(getattr(unchecked, name), overload)
    _register(op, _fake(op))
    _libraries[1].impl(twin.name().partition("::")[2], torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(twin.name(), _fake(op))
    _refuse_vmap(_libraries[1], twin)
    known = {
        "run": twin._op,
        "is_compiling": is_compiling,
        "is_grad_enabled": is_grad_enabled,
        "forward_ad": forward_ad,
        "any_requires_grad": torch._C._any_requires_grad,
        "increment_version": increment_version,
        "with_gradients": _autograd.with_gradients(op, twin._op),
        "refuse_tangents": functools.partial(_autograd.refuse_tangents, by_package=True),
        "refuse_types": refuse_types,
    }
    return _shims.by_position(op, known)


class Operator(NamedTuple):
    """A pass: `make` calls its default overload, and `write` the one named `out`."""

    name: str
    make: Callable[..., Any]
    write: Callable[..., Any]

    @property
    def default(self) -> torch._ops.OpOverload:
        return getattr(ops, self.name).default


_register(compose, lambda *_: None)
prefill, decode, verify, segment, backward = (
    Operator(name, _overload(name, "default"), _overload(name, "out"))
    for name in ("prefill", "decode", "verify", "segment", "backward")
)
