# SPDX-License-Identifier: Apache-2.0
"""Functions that are written at import, from what the library says of itself.

The operators take their arguments by position and their options in one integer, because PyTorch spends as
much time on every keyword, number and None as on a tensor. The order of the arguments is that of an
operator's schema, and the bits of the options are those of `torch.ops.cula.option_bits()`; both come from the
tables of bindings/torch/schema.cc. Python writes down neither: callers go by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def compile_function(name: str, source: list[str], known: Mapping[str, object]) -> Callable[..., Any]:
    """The function `name` of the source, whose free names are `known`. They are cells of a closure, which
    torch.compile follows."""
    lines = [f"def make({', '.join(known)}):", *(f"    {line}" for line in source), f"    return {name}"]
    made: dict[str, Any] = {}
    exec(compile("\n".join(lines), f"<cula: {name}>", "exec"), made)
    return made["make"](**known)


def by_position(op: torch._ops.OpOverload, known: Mapping[str, object]) -> Callable[..., Any]:
    """A function that takes the arguments of an operator by name, and calls it by position up to the last one
    that is given.

    known: `run`, which is the operator without its checks and derivatives; `is_compiling`, `is_grad_enabled`,
        `forward_ad`, `any_requires_grad` and `increment_version` of PyTorch; `with_gradients`, which is
        called where an argument requires any; `refuse_tangents` and `refuse_types`.
    """
    schema = op._schema.arguments
    names = [argument.name for argument in schema]
    needed = sum(not each.has_default_value() for each in schema)
    written = [each for each in schema if each.is_write]
    name = op.name().partition("::")[2].replace(".", "_")
    parameters = ", ".join(names[:needed] + [f"{each}=None" for each in names[needed:]])
    source = [f"def {name}({parameters}):"]
    word = "if"
    for count in range(len(names), needed, -1):
        source += [
            f"    {word} {names[count - 1]} is not None:",
            f"        arguments = ({', '.join(names[:count])},)",
        ]
        word = "elif"
    source += [
        "    else:",
        f"        arguments = ({', '.join(names[:needed])},)",
        "    if is_compiling():",
        "        return op(*arguments)",
        "    if forward_ad._current_level >= 0:",
        "        refuse_tangents(op, arguments)",
        "    try:",
        "        if is_grad_enabled() and any_requires_grad(*arguments):",
        "            return with_gradients(*arguments)",
        "        made = run(*arguments)",
        "    except Exception:",
        # PyTorch says it less well, and turns a number into a tensor first.
        "        refuse_types(op, arguments)",
        "        raise",
    ]
    for each in written:
        given = "" if str(each.type) == "Tensor" else f"if {each.name} is not None: "
        source.append(f"    {given}increment_version({each.name})")
    return compile_function(name, [*source, "    return made"], {"op": op, **known})


def packer(option_bits: str) -> Callable[..., int]:
    """The function that makes `options` of options by name."""
    values: dict[str, dict[str, int]] = {}
    parameters, terms, flags = [], [], []
    fixed = 0
    for line in option_bits.splitlines():
        name, shift, names = line.split("\t")
        if names.startswith("!"):
            fixed |= int(names[1:]) << int(shift)
        elif names.startswith("="):
            parameters.append(f"{name}{names}")
            if names == "=0":
                flags += [f"    if {name}:", f"        options += {name} << {shift}"]
            else:
                terms.append(f"({name} << {shift})")
        elif names:
            values[name] = {each: row << int(shift) for row, each in enumerate(names.split())}
            parameters.append(name if name == "algorithm" else f"{name}={next(iter(values[name]))!r}")
            terms.append(f"values_{name}[{name}]")
        else:
            parameters.append(f"{name}=False")
            # One by one: shifting each flag to its place takes more than twice as long.
            flags += [f"    if {name}:", f"        options += {1 << int(shift)}"]

    def refuse(**given: str) -> None:
        for name, value in given.items():
            if value not in values[name]:
                raise ValueError(f'{name} must be one of {", ".join(values[name])}, got "{value}"')

    source = [
        f"def pack({', '.join(parameters)}):",
        "    try:",
        f"        options = {' + '.join([str(fixed), *terms])}",
        "    except KeyError:",
        f"        refuse({', '.join(f'{name}={name}' for name in values)})",
        "        raise",
        *flags,
        "    return options",
    ]
    known = {"refuse": refuse, **{f"values_{name}": rows for name, rows in values.items()}}
    made = compile_function("pack", source, known)
    made.__doc__ = "The `options` of an operator of `torch.ops.cula`, from options by name."
    return made
