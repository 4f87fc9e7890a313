# SPDX-License-Identifier: Apache-2.0
"""A call of a Level 1 function as a value: what tensor and context parallelism cut and run."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _autograd, _decays, _ops, _passes, api
from .._family import FAMILY, MODES

FUNCTIONS: dict[str, Callable[..., tuple[Any, ...]]] = {mode: getattr(api, f"cula_{mode}") for mode in MODES}
_DIAGONAL = {row.mode: row.has_diagonal_map for row in FAMILY.values()}
_SEVERAL_WRITES = {row.mode: row.takes_several_writes for row in FAMILY.values()}

# Options that a segment's map depends on, or what it keeps, besides the tensors. The others concern o or the
# states.
_SEGMENT_OPTIONS = (
    "A_log", "dt_bias", "lower_bound", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "device", "backend", "deterministic", "scale",
)  # fmt: skip

# The tensors that a call reads besides its states, by what they are: its own, or options.
_OPERANDS = ("q", "k", "v", "g", "beta", "erase", "a_key", "b_key", "decay")
_PARAMETERS = ("A_log", "dt_bias")

# Those with a row for each write of a token.
_OF_WRITES = ("k", "v", "beta", "erase")


@dataclass(frozen=True)
class Call:
    name: str  # of the function that the user called, for messages
    mode: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    decay: Tensor | None = None
    erase: Tensor | None = None
    a_key: Tensor | None = None
    b_key: Tensor | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def but(self, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """Those with tokens, by name."""
        named = {name: getattr(self, name) for name in _OPERANDS if name != "decay"}
        return {name: x for name, x in named.items() if x is not None}

    def read(self) -> dict[str, Tensor]:
        """All tensors that it reads, but states, by name."""
        own = {name: getattr(self, name) for name in _OPERANDS}
        named = {**own, **{name: self.options.get(name) for name in _PARAMETERS}}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def reading(self, tensors: Mapping[str, Tensor]) -> Call:
        """The same call of those tensors instead."""
        options = {**self.options, **{name: tensors[name] for name in _PARAMETERS if name in tensors}}
        return self.but(**{name: tensors.get(name) for name in _OPERANDS}, options=options)

    def run(self, **more: object) -> tuple[Any, ...]:
        names, required = _OPERANDS[3:], _required_by(self.mode)
        gates = {name: x for name in names if (x := getattr(self, name)) is not None or name in required}
        return FUNCTIONS[self.mode](self.q, self.k, self.v, **gates, **{**self.options, **more})

    def segment(
        self,
        cu_seqlens: Tensor | None,
        keep: bool = False,
        out: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """(M, B) of every sequence, B V-first, in `out` if given; and with `keep` what `run` takes as
        `kept`."""
        named = {name: self.options[name] for name in _SEGMENT_OPTIONS if name in self.options}
        return api.cula_segment(
            self.q, self.k, self.v, mode=self.mode, g=self.g, beta=self.beta, erase=self.erase,
            a_key=self.a_key, b_key=self.b_key, decay=self.decay, cu_seqlens=cu_seqlens,
            use_gate_in_kernel=bool(self.options.get("use_gate_in_kernel", False)),
            keep=keep, out=out, **named,
        )  # fmt: skip

    def operands(self) -> dict[str, Any]:
        """What the operators take for it, by name, but states and lengths."""
        algorithm, g, dt_bias, decay = _decays.decay_of(
            self.mode, self.q, self.g, self.options.get("dt_bias"), self.decay
        )
        named = {name: self.options.get(name) for name in ("A_log", "lower_bound", "scale", "backend")}
        flags = {
            to: bool(self.options.get(name, False))
            for to, name in (
                ("qk_l2norm", "use_qk_l2norm_in_kernel"),
                ("beta_is_logit", "use_beta_sigmoid_in_kernel"),
                ("allow_neg_eigval", "allow_neg_eigval"),
            )
        }
        options = _passes.pack(
            algorithm, _passes.gate_of(self.options.get("use_gate_in_kernel", False), named["lower_bound"]),
            **flags, scale=named["scale"], lower_bound=named["lower_bound"], null_index=-1,
            backend=named["backend"], deterministic=self.options.get("deterministic"),
        )  # fmt: skip
        return {
            "q": self.q, "k": self.k, "v": self.v, "options": options, "g": g, "beta": self.beta,
            "erase": self.erase, "a_key": self.a_key, "b_key": self.b_key, "decay": decay,
            "dt_bias": dt_bias, **named,
        }  # fmt: skip

    def gradients(
        self,
        wanted: Set[str],
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        d_o: Tensor | None,
        d_final_state: Tensor | None,
    ) -> dict[str, Tensor]:
        """The wanted gradients by name, each like what it is the gradient of. Of the call `run` of that
        initial state and those lengths: `d_o` and `d_final_state` are zero where None. States V-first."""
        if not wanted:
            return {}
        given = {**self.operands(), "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        given["backend"] = _autograd.backend(self.name, given)
        asked = [name in wanted for name in _ops.GRADIENTS]
        made = _autograd.gradients(given, asked, d_o, d_final_state)
        found = {name: x for name, x in zip(_ops.GRADIENTS, made, strict=True) if x is not None}
        if self.g is not None and "g" in found and found["g"].dim() > self.g.dim():
            found["g"] = found["g"].sum(-1)  # one for all channels
        return found

    @property
    def delta(self) -> bool:
        """Whether M of a map is a matrix, and not a diagonal."""
        return not _DIAGONAL[self.mode]

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def states(self, count: int) -> Tensor:
        """So many zero states."""
        return self.q.new_zeros(
            (count, self.v.shape[2], self.v.shape[3], self.q.shape[3]), dtype=self.state_dtype
        )

    def check(self) -> None:
        """What can be said of the arguments before they are cut."""
        for argument, x, shape in (("q", self.q, "[B, T, H, K]"), ("v", self.v, "[B, T, HV, V]")):
            if not isinstance(x, Tensor):
                raise TypeError(f"{self.name}: {argument} must be a tensor, got {type(x).__name__}")
            if x.dim() != 4:
                raise ValueError(f"{self.name}: {argument} must have shape {shape}, got {list(x.shape)}")
        for option in self.options:
            if option not in _options_of(self.mode):
                raise TypeError(f"{self.name}() got an unexpected keyword argument {option!r}")

    def check_all(self, initial_state: Tensor | None) -> None:
        """Everything that Level 1 checks, by a call on none of the tokens, which writes nothing: a rank that
        waits for another before its own call must refuse what the other refuses, or it waits in vain."""
        tokens = self.q.shape[1]
        writes = self._writes()
        for argument, x in self.tensors().items():
            rows = tokens * writes if argument in _OF_WRITES else tokens
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] != rows:
                each = "" if rows == tokens else f" with {writes} rows each"
                raise ValueError(
                    f"{self.name}: {argument} must have q's {tokens} tokens{each}, got {list(x.shape)}"
                )
        out, wanted = self.options.get("out"), [*self.q.shape[:2], *self.v.shape[2:]]
        if isinstance(out, Tensor) and list(out.shape) != wanted:
            what = "v's shape," if writes == 1 else "shape"
            raise ValueError(f"{self.name}: out must have {what} {wanted}, got {list(out.shape)}")
        if initial_state is not None:  # checked; of packed tokens any row stands for all
            batch = self.q.shape[0]
            initial_state = initial_state[:batch] if len(initial_state) >= batch else None
        with torch.no_grad():
            self.without_tokens().run(initial_state=initial_state, output_final_state=False)

    def _writes(self) -> int:
        """Of a token; 1 also where k's rows are no multiple of q's."""
        if not _SEVERAL_WRITES[self.mode] or not isinstance(self.k, Tensor) or self.k.dim() < 2:
            return 1
        tokens, rows = self.q.shape[1], self.k.shape[1]
        return rows // tokens if 0 < tokens <= rows and rows % tokens == 0 else 1

    def without_tokens(self) -> Call:
        none = {name: x[:, :0] for name, x in self.tensors().items() if isinstance(x, Tensor) and x.dim() > 1}
        out = self.options.get("out")
        return self.but(
            **none, options={**self.options, "out": out[:, :0]} if isinstance(out, Tensor) else self.options
        )


@functools.cache
def _options_of(mode: str) -> frozenset[str]:
    parameters = inspect.signature(FUNCTIONS[mode]).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY) | {"chunk_size"}


@functools.cache
def _required_by(mode: str) -> frozenset[str]:
    parameters = inspect.signature(FUNCTIONS[mode]).parameters.values()
    return frozenset(p.name for p in parameters if p.default is p.empty)
