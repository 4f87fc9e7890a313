# SPDX-License-Identifier: Apache-2.0
"""The operators of `torch.ops.cula`, written in C++ (bindings/torch/ops.cc): one per pass, `compose`,
`explain` and `algorithms`.

The package calls the overload `packed` of each, with its options in one integer (`pack`) and what is seldom
given last, because PyTorch spends as much time on each number and on each None as on a tensor; the default
overload spells everything out. `fresh` also makes o, `dense` o and a dense final state, and `into` that state
alone, in half the time that Python takes; `alone` makes o and writes nothing else. A bad argument raises
`ValueError` from C++ with the name of the argument, what was expected and what was given.

`torch.ops.cula_unchecked` holds the passes once more, for `_passes.call` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

import cula


def library() -> Path:
    """The file of the operators. An editable install has it apart from the sources, in the package's second
    folder."""
    folders = [Path(folder, "lib") for folder in cula.__path__]
    for folder in reversed(folders):
        if (path := folder / "libcula_torch.so").exists():
            return path
    raise ImportError(
        f"cula is not built: there is no libcula_torch.so in {' or '.join(map(str, folders))}; install "
        "torch, then run `pip install .` or `make build` in its source tree"
    )


torch.ops.load_library(library())

prefill = torch.ops.cula.prefill
decode = torch.ops.cula.decode
verify = torch.ops.cula.verify
segment = torch.ops.cula.segment
compose = torch.ops.cula.compose.default
explain = torch.ops.cula.explain.default
algorithms = torch.ops.cula.algorithms.default

# The bits of `options` (bindings/torch/schema.h): algorithm, gate, flags, and from bit 16 on the chunk size.
_ALGORITHM = {line.partition("\t")[0]: row for row, line in enumerate(algorithms().splitlines())}
_GATE = {"log_decay": 0 << 8, "softplus": 1 << 8, "bounded": 2 << 8}


def pack(
    algorithm: str,
    gate: str,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    batch_invariant: bool,
    in_place: bool,
    chunk_size: int,
    k_first: bool = False,
) -> int:
    """`k_first`: the state that `dense` makes is `[N, HV, K, V]`."""
    options = _ALGORITHM[algorithm] + _GATE[gate] + (chunk_size << 16)
    # One by one: shifting each flag to its place takes more than twice as long.
    if qk_l2norm:
        options += 1 << 10
    if beta_is_logit:
        options += 1 << 11
    if allow_neg_eigval:
        options += 1 << 12
    if batch_invariant:
        options += 1 << 13
    if in_place:
        options += 1 << 14
    if k_first:
        options += 1 << 15
    return options


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
        if outputs and "kept" not in outputs:
            check_dims(op, given["q"], given["v"])
        made = tuple(_MAKE[name](**given) for name in outputs)
        return made[0] if len(made) == 1 else made or None

    return fake


def op_name(op: torch._ops.OpOverloadPacket | torch._ops.OpOverload) -> str:
    return op.__name__.partition(".")[0]


def check_dims(op: torch._ops.OpOverloadPacket | torch._ops.OpOverload, q: Tensor, v: Tensor) -> None:
    """What must hold before the shapes of the outputs can be told."""
    for argument, tensor, shape in (("q", q, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if tensor.dim() != 4:
            raise ValueError(f"{op_name(op)}: {argument} must have shape {shape}, got {described(tensor)}")


def _make_o(v: Tensor, **_: object) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _make_final_state(
    q: Tensor, v: Tensor, options: int, cu_seqlens: Tensor | None = None, **_: object
) -> Tensor:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, columns = v.shape[3], q.shape[3]
    matrix = (columns, rows) if options >> 15 & 1 else (rows, columns)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((sequences, v.shape[2], *matrix), dtype=dtype)


def _make_kept(q: Tensor, **_: object) -> Tensor:
    return q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)


_MAKE: dict[str, Callable[..., Tensor]] = {"o": _make_o, "final_state": _make_final_state, "kept": _make_kept}


def refuse_derivatives(
    op: torch._ops.OpOverload, arguments: Iterable[object], others: Mapping[str, object] | None = None
) -> None:
    """NotImplementedError for the first tensor whose derivative would be lost: there is no backward pass
    yet."""
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not (backward or forward):
        return
    names = (argument.name for argument in op._schema.arguments)
    for name, value in (*zip(names, arguments, strict=False), *(others or {}).items()):
        if not isinstance(value, Tensor):
            continue
        if backward and value.requires_grad:
            raise NotImplementedError(
                f"{op_name(op)}: {name} requires gradients, and the backward pass is not built yet; call "
                "under torch.no_grad() or torch.inference_mode()"
            )
        if forward and value.is_floating_point() and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"{op_name(op)}: {name} has a tangent, and forward-mode derivatives are not built; call with "
                f"{name}.detach(), which has none"
            )


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
    outside."""
    names, written = [argument.name for argument in op._schema.arguments], _written(op)

    def refuse_or_run(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> object:
        refuse_derivatives(op, args, kwargs)
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

    return refuse_or_run


# What the package calls: by the `id` of an operator, the same without `_checked`, and the positions that it
# writes.
unchecked: dict[int, tuple[Callable[..., Any], tuple[int, ...]]] = {}
_libraries = [torch.library.Library(name, "FRAGMENT") for name in ("cula", "cula_unchecked")]


def _register(packet: str, overload: str, fake: Callable[..., object] | None = None) -> None:
    op = getattr(getattr(torch.ops.cula, packet), overload)
    name = op.name().removeprefix("cula::")
    for key in ("Autograd", "ADInplaceOrView"):
        _libraries[0].impl(name, _checked(op), key, with_keyset=True)
    torch.library.register_fake(op.name(), fake or _fake(op))
    if fake is None:
        twin = getattr(getattr(torch.ops.cula_unchecked, packet), overload)
        _libraries[1].impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(twin.name(), _fake(op))
        unchecked[id(op)] = twin._op, _written(op)


_register("compose", "default", lambda *_: None)
for _packet in (prefill, decode, verify, segment):
    for _overload in _packet.overloads():
        _register(_packet.__name__, _overload)
