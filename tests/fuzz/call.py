# SPDX-License-Identifier: Apache-2.0
"""A case as a call of `cula.api`, what it returned, and what it must not have touched."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

import cula
from cula import _ops
from cula_testing import operators
from cula_testing.float8 import dequantised
from fuzz.case import FLOAT8, OF_TOKENS, OF_WRITES, Case
from fuzz.memory import changed_outside, fresh, place, place_indices, place_states, poison, whole
from fuzz.values import Values

MODES = {row.name: row.mode for row in cula.algorithms().values()}
FUNCTIONS = {name: getattr(cula, f"cula_{mode}") for name, mode in MODES.items()}


@dataclass
class Found:
    """What a call returned, on the CPU; states by (sequence, tokens done)."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # o, m, b; d_q and other gradients
    states: dict[str, dict[tuple[int, int], torch.Tensor]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # promises other than about numbers


class Call:
    """The tensors of one case, laid out on the CPU; `run` gives a backend copies of them."""

    def __init__(self, case: Case, values: Values, device: str) -> None:
        self.case, self.values, self.device = case, values, device
        layouts = dict(case.layouts)
        inputs = {
            name: place(x, layouts.get(name, "")) if x.ndim >= 3 else x for name, x in values.tensors.items()
        }
        if case.packed:
            bounds = torch.tensor(
                [0, *(end for _, _, end in case.spans())], dtype=getattr(torch, case.cu_dtype)
            )
            inputs["cu_seqlens"] = bounds
        if case.pass_name == "decode" and case.rows_along_tokens:
            for name in OF_TOKENS:
                if name in inputs and case.householders > 1 and name in OF_WRITES:
                    inputs[name] = inputs[name].flatten(0, 1)[None]
                elif name in inputs:
                    inputs[name] = inputs[name].transpose(0, 1)
        if case.algorithm == "kda" and case.flat_bias and "dt_bias" in inputs:
            inputs["dt_bias"] = inputs["dt_bias"].flatten()
        for name in ("initial", "final", "has_initial", "table", "accepted", "parents", "snapshot_indices"):
            given = getattr(case, name)
            if given is not None:
                kind = torch.bool if name == "has_initial" else self._index_dtype(name)
                shape = (case.sequences, -1) if name in ("table", "parents") and case.sequences else (-1,)
                if name in ("table", "parents") and not (case.sequences and len(given[0])):
                    shape = (case.sequences, 0)
                x = torch.tensor(given, dtype=kind).reshape(shape)
                inputs[name] = x if kind == torch.bool else place_indices(x, case.index_strided)
        if case.plan is not None:
            inputs["plan"] = torch.tensor(case.plan, dtype=self._index_dtype("plan")).reshape(-1, 3)
        if values.d_final is not None:
            inputs["d_final"] = place_states(case, (case.sequences,), case.d_final).copy_(values.d_final)
        self.cpu_inputs = inputs
        self.inputs = {name: fresh(x, device) for name, x in inputs.items()}
        self.before = {name: whole(x) for name, x in inputs.items()}
        self.poisoned = self._poisoned()

    def _index_dtype(self, name: str) -> torch.dtype:
        names = ("initial", "final", "table", "accepted", "parents", "snapshot_indices", "plan")
        odd = (self.case.seed >> names.index(name)) & 1
        wide = self.case.index_dtype == "int64" or (self.case.index_dtype == "mixed" and odd)
        return torch.int64 if wide else torch.int32

    def _poisoned(self) -> dict[str, torch.Tensor]:
        """What the call writes, and the states that it starts from, as they are before it."""
        case, made = self.case, {}
        if case.state != "none":
            made["states"] = place_states(case, (case.slots,), case.state_dtype)
            if case.state_dtype == FLOAT8:
                made["scales"] = poison((case.slots, case.value_heads, case.value_dim), torch.float32)
            for n in range(case.sequences):
                masked = case.has_initial is not None and not case.has_initial[n]
                if case.skipped(n) or masked:
                    continue
                if self.values.stored is None:
                    made["states"][case.base(n)] = self.values.base[n]
                else:
                    codes, scales = self.values.stored
                    made["states"].view(torch.uint8)[case.base(n)] = codes[n].view(torch.uint8)
                    made["scales"][case.base(n)] = scales[n]
        if case.plan is not None and not case.plan_in_pool:
            made["checkpoints"] = place_states(case, (case.checkpoint_slots,), case.checkpoint_dtype)
        if case.snapshot_slots is not None:
            made["snapshots"] = place_states(case, case.snapshot_slots, case.snapshot_dtype)
        if case.out and case.pass_name != "segment":
            shape = (*self.inputs["q"].shape[:2], *self.inputs["v"].shape[2:])
            made["o"] = place(poison(shape, getattr(torch, case.out)), dict(case.layouts).get("out", ""))
        if case.pass_name == "segment" and case.segment_out:
            N, HV, K = case.sequences, case.value_heads, case.key_dim
            dtype = "float64" if case.dtype == "float64" else "float32"
            made["m"] = poison((N, HV, K, K) if case.mixes else (N, HV, K), getattr(torch, dtype))
            made["b"] = place_states(case, (N,), dtype)
        if case.through == "out":
            made |= {f"d_{name}": self._room(name) for name in case.wanted}
        return made

    def _room(self, name: str) -> torch.Tensor:
        """For a gradient."""
        case, dtype = self.case, self.case.gradient_dtype(name)
        if name == "initial_state":
            return place_states(case, (case.sequences,), dtype)
        x = poison(self.values.tensors[name].shape, getattr(torch, dtype))
        return place(x, dict(case.layouts).get(f"d_{name}", "")) if x.ndim >= 3 else x

    def _pool(self, made: dict) -> torch.Tensor:
        """The states of a pool after a call, on the CPU."""
        states = made["states"].cpu()
        return dequantised(states, made["scales"].cpu()) if "scales" in made else states

    def _argument(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """States as the call names them, whatever `state_v_first` says."""
        return states if states is None or self.case.v_first else states.mT

    def _common(self, backend: str | None) -> dict:
        case, inputs = self.case, self.inputs
        names = (*OF_TOKENS[3:], "decay", "A_log", "dt_bias")
        named = {name: inputs[name] for name in names if name in inputs}
        if MODES[case.algorithm] == "gdp":
            named.setdefault("g", None)
        if case.gate != "log_decay":
            named["use_gate_in_kernel"] = True
        if case.gate == "bounded":
            named["lower_bound"] = case.lower_bound
        if case.delta:
            named["use_beta_sigmoid_in_kernel"] = case.beta_is_logit
            named["allow_neg_eigval"] = case.allow_neg_eigval
        named |= {"use_qk_l2norm_in_kernel": case.qk_l2norm, "scale": case.scale, "backend": backend}
        named |= {"state_v_first": case.v_first, "deterministic": case.deterministic}
        return named

    def _qkv(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.inputs[name] for name in "qkv")

    def run(self, backend: str | None) -> Found:
        """The call, on fresh copies of all that it writes."""
        made = {name: fresh(x, self.device) for name, x in self.poisoned.items()}
        self.returned = {}  # tensors that the library made
        before = torch.get_num_threads()
        if before != self.case.threads:
            torch.set_num_threads(self.case.threads)
        try:
            found = getattr(self, f"_{self.case.pass_name}")(backend, made)
        finally:
            if before != self.case.threads:
                torch.set_num_threads(before)
        for name, x in self.inputs.items():
            if not torch.equal(_bytes(whole(x)), _bytes(self.before[name])):
                found.broken.append(f"{name}, an input, has changed")
        for name, x in made.items():
            count = changed_outside(
                whole(self.poisoned[name]), whole(x), self.poisoned[name], self._named(name)
            )
            if count:
                found.broken.append(f"{name}: {count} elements that nothing names have changed")
        return found

    def _named(self, name: str) -> list:
        """The places of an output that the call may write."""
        case = self.case
        rows = [n for n in range(case.sequences) if not case.skipped(n)]
        match name:
            case "states" | "scales":
                named = [case.plan[row][2] for row in self._plan_rows()] if case.plan_in_pool else []
                if case.pass_name == "decode" or (case.pass_name == "prefill" and case.state == "pool"):
                    named += [case.end(n) for n in rows]
                if case.pass_name == "verify" and case.table is not None and not case.disable_update:
                    named += [
                        case.table[n][t] for n, t in self._drafts() if not case.is_null(case.table[n][t])
                    ]
                return named
            case "checkpoints":
                return [case.plan[row][2] for row in self._plan_rows()]
            case "snapshots":
                return [(slot, t) for (n, t), slot in self._snapshot_places().items()]
            case "m":
                return [...] if case.segment_out == "both" else []
            case _:
                return [...]

    def _plan_rows(self) -> list[int]:
        skipped = self.case.skipped
        return [row for row, (n, _, slot) in enumerate(self.case.plan) if slot >= 0 and not skipped(n)]

    def _drafts(self) -> list[tuple[int, int]]:
        case = self.case
        rows = [n for n in range(case.sequences) if not case.skipped(n)]
        return [(n, t) for n in rows for t in range(case.lengths[n])]

    def _snapshot_places(self) -> dict[tuple[int, int], int]:
        case, indices = self.case, self.case.snapshot_indices
        slots = {(n, t): n if indices is None else indices[n] for n, t in self._drafts()}
        return {place: slot for place, slot in slots.items() if indices is None or not case.is_null(slot)}

    def _indices(self, **names: str) -> dict:
        return {argument: self.inputs[name] for argument, name in names.items() if name in self.inputs}

    def _prefill(self, backend: str | None, made: dict) -> Found:
        case = self.case
        named = self._common(backend) | self._indices(
            cu_seqlens="cu_seqlens",
            initial_state_indices="initial",
            final_state_indices="final",
            has_initial_state="has_initial",
        )
        states = self._argument(made.get("states"))
        if "scales" in made:
            named["state_scales"] = made["scales"]
        if case.state != "none":
            named["state_pool" if case.state == "pool" else "initial_state"] = states
            named["null_index"] = case.null_index
        named["output_final_state"] = case.output_final
        if case.plan is not None:
            kept = states if case.plan_in_pool else self._argument(made["checkpoints"])
            named["checkpoints"] = cula.Checkpoints(kept, self.inputs["plan"])
        if case.chunk_size:
            named |= {"return_intermediate_states": True, "chunk_size": case.chunk_size}
        result = FUNCTIONS[case.algorithm](*self._qkv(), out=made.get("o"), **named)
        found = self._o(result[0], made)
        rows = [n for n in range(case.sequences) if not case.skipped(n)]
        if case.state == "pool":
            if result[1] is not states:
                found.broken.append("the pool is not what is returned")
            pool = self._pool(made)
            found.states["final"] = {(n, case.lengths[n]): pool[case.end(n)] for n in rows}
        elif case.output_final:
            final = self._argument(result[1]).cpu()
            found.states["final"] = {(n, case.lengths[n]): final[n] for n in rows}
            if any(final[n].any() for n in range(case.sequences) if case.skipped(n)):
                found.broken.append("final_state: the row of a null row is not zero")
        if case.plan is not None:
            kept = made["states" if case.plan_in_pool else "checkpoints"].cpu()
            rows_of_plan = [case.plan[row] for row in self._plan_rows()]
            found.states["checkpoints"] = {(n, t): kept[slot] for n, t, slot in rows_of_plan}
        if case.chunk_size:
            found.states["chunks"] = self._chunks(self._argument(result[2]).cpu())
        return found

    def _chunks(self, h: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
        case, chunks, at = self.case, {}, 0
        for n, length in enumerate(case.lengths):
            count = -(-length // case.chunk_size)
            for i in range(count):
                if not case.skipped(n):
                    chunks[n, i * case.chunk_size] = h[0, at + i] if case.packed else h[n, i]
            at += count
        return chunks

    def _split(self, backend: str | None, made: dict) -> Found:
        case, tokens = self.case, self.case.tokens
        state, parts = self._argument(made.get("states")), []
        for begin, end in ((0, case.cut), (case.cut, tokens)):
            named = self._common(backend)
            rows = {name: case.rows(name, begin, end) for name in OF_TOKENS}
            named |= {
                name: named[name][:, rows[name]] for name in OF_TOKENS[3:] if named.get(name) is not None
            }
            out = None if "o" not in made else made["o"][:, begin:end]
            q, k, v = (x[:, rows[name]] for name, x in zip("qkv", self._qkv(), strict=True))
            o, state = FUNCTIONS[case.algorithm](
                q, k, v, initial_state=state, output_final_state=True, out=out, **named
            )
            parts.append(o)
        found = self._o(torch.cat(parts, dim=1), {})
        final = self._argument(state).cpu()
        found.states["final"] = {(n, tokens): final[n] for n in range(case.sequences)}
        return found

    def _decode(self, backend: str | None, made: dict) -> Found:
        case = self.case
        named = self._common(backend) | self._indices(
            state_indices="initial", final_state_indices="final", has_initial_state="has_initial"
        )
        states = self._argument(made["states"])
        mode = MODES[case.algorithm]
        o, returned = cula.cula_decode(
            *self._qkv(), states, mode=mode, null_index=case.null_index, out=made.get("o"),
            state_scales=made.get("scales"), **named,
        )  # fmt: skip
        found = self._o(o, made)
        if returned is not states:
            found.broken.append("the pool is not what is returned")
        rows, pool = [n for n in range(case.sequences) if not case.skipped(n)], self._pool(made)
        found.states["final"] = {(n, case.lengths[n]): pool[case.end(n)] for n in rows}
        return found

    def _verify(self, backend: str | None, made: dict) -> Found:
        case = self.case
        named = self._common(backend) | self._indices(
            cu_seqlens="cu_seqlens",
            state_indices="table",
            num_accepted="accepted",
            parents="parents",
            snapshot_indices="snapshot_indices",
            initial_state_indices="initial",
            has_initial_state="has_initial",
        )
        snapshots = self._argument(made.get("snapshots"))
        states = self._argument(made.get("states"))
        mode = MODES[case.algorithm]
        o, returned = cula.cula_verify(
            *self._qkv(), states, mode=mode, snapshots=snapshots, disable_state_update=case.disable_update,
            null_index=case.null_index, out=made.get("o"), state_scales=made.get("scales"), **named,
        )  # fmt: skip
        found = self._o(o, made)
        if returned is not states:
            found.broken.append("the pool is not what is returned")
        if case.table is not None and not case.disable_update:
            pool = self._pool(made)
            places = {(n, t): case.table[n][t] for n, t in self._drafts()}
            found.states["table"] = {
                (n, t + 1): pool[slot] for (n, t), slot in places.items() if not case.is_null(slot)
            }
        if snapshots is not None:
            kept = made["snapshots"].cpu()
            found.states["snapshots"] = {
                (n, t + 1): kept[slot, t] for (n, t), slot in self._snapshot_places().items()
            }
        return found

    def _segment(self, backend: str | None, made: dict) -> Found:
        case = self.case
        named = self._common(backend) | self._indices(cu_seqlens="cu_seqlens")
        mode = MODES[case.algorithm]
        out = None
        if case.segment_out:
            out = (made["m"] if case.segment_out == "both" else None, self._argument(made["b"]))
        m, b, *kept = cula.cula_segment(*self._qkv(), mode=mode, out=out, keep=case.keep, **named)
        found = Found()
        if m is not None:
            found.tensors["m"] = m.cpu()
        found.tensors["b"] = self._argument(b).cpu()
        if kept:
            named = self._common(backend) | self._indices(cu_seqlens="cu_seqlens")
            o, final = FUNCTIONS[case.algorithm](*self._qkv(), kept=kept[0], output_final_state=True, **named)
            found.tensors["o"] = o.cpu()
            final = self._argument(final).cpu()
            found.states["final"] = {(n, length): final[n] for n, length in enumerate(case.lengths)}
        return found

    def _backward(self, backend: str | None, made: dict) -> Found:
        case, found = self.case, Found()
        through = {
            "out": self._into,
            "default": self._made,
            "autograd": self._autograd,
            "kept": functools.partial(self._autograd, disable_recompute=True),
        }[case.through]
        for name, gradient in through(backend, made).items():
            dtype = getattr(torch, case.gradient_dtype(name))
            if gradient.dtype != dtype:
                found.broken.append(f"d_{name} has dtype {gradient.dtype}, wanted {dtype}")
            x = gradient.cpu()
            if name in self.values.tensors:
                x = x.reshape(self.values.tensors[name].shape)
                beyond = case.rows(name, sum(case.lengths), case.tokens)
                if x.ndim >= 3 and case.packed and x[0, beyond].count_nonzero():
                    found.broken.append(f"d_{name} is not zero at tokens of no sequence")
            found.tensors[f"d_{name}"] = x
        if missing := [name for name in case.wanted if f"d_{name}" not in found.tensors]:
            found.broken.append(f"gradients of {missing} are not there")
        return found

    def _operator(self, backend: str | None, made: dict) -> dict:
        """The arguments of the operator, by name."""
        case = self.case
        names = (*OF_TOKENS, "A_log", "dt_bias", "cu_seqlens", "d_o")
        named = {name: self.inputs[name] for name in names if name in self.inputs}
        if "decay" in self.inputs:
            named["decay"] = -self.inputs["decay"].abs()
        named |= self._indices(has_initial_state="has_initial", d_final_state="d_final")
        if "states" in made:
            named["initial_state"] = made["states"]
        return named | {
            "algorithm": "gdn" if case.gate_per_head else case.algorithm,
            "gate": case.gate,
            "qk_l2norm": case.qk_l2norm,
            "beta_is_logit": case.beta_is_logit,
            "allow_neg_eigval": case.allow_neg_eigval,
            "batch_invariant": case.deterministic == "batch_invariant",
            "scale": case.scale,
            "lower_bound": case.lower_bound if case.gate == "bounded" else None,
            "backend": backend or "",
        }

    def _into(self, backend: str | None, made: dict) -> dict[str, torch.Tensor]:
        outputs = {f"d_{name}": made[f"d_{name}"] for name in self.case.wanted}
        operators.call("backward", **self._operator(backend, made), **outputs)
        return {name: made[f"d_{name}"] for name in self.case.wanted}

    def _made(self, backend: str | None, made: dict) -> dict[str, torch.Tensor]:
        case = self.case
        named = operators.packed(self._operator(backend, made) | {"k_first": not case.v_first})
        for row, name in enumerate(_ops.GRADIENTS):
            if name in case.wanted:
                named["options"] += _ops.bit("gradients") << row
        returned = zip(_ops.GRADIENTS, torch.ops.cula.backward.default(**named), strict=True)
        found = {name: gradient for name, gradient in returned if gradient is not None}
        if "initial_state" in found:
            found["initial_state"] = self._argument(found["initial_state"])
        return found

    def _autograd(self, backend: str | None, made: dict, **options: bool) -> dict[str, torch.Tensor]:
        case = self.case
        named = self._common(backend) | self._indices(
            cu_seqlens="cu_seqlens", has_initial_state="has_initial"
        )
        if case.state != "none":
            named["initial_state"] = self._argument(made["states"])
        keys = dict(zip("qkv", self._qkv(), strict=True))
        leaves = {name: {**keys, **named}[name].detach().requires_grad_() for name in case.wanted}
        keys, named = ({name: leaves.get(name, x) for name, x in each.items()} for each in (keys, named))
        function = FUNCTIONS[case.algorithm]
        results = function(*keys.values(), **named, **options, output_final_state=bool(case.d_final))
        given = self.inputs.get("d_o"), self._argument(self.inputs.get("d_final"))
        pairs = [(x, d) for x, d in zip(results, given, strict=True) if d is not None]
        found = torch.autograd.grad([x for x, _ in pairs], list(leaves.values()), [d for _, d in pairs])
        gradients = dict(zip(leaves, found, strict=True))
        if "initial_state" in gradients:
            gradients["initial_state"] = self._argument(gradients["initial_state"])
        return gradients

    def _o(self, o: torch.Tensor, made: dict) -> Found:
        """o as [B, T, HV, V], after a look at what is promised about it."""
        case, found = self.case, Found()
        if "o" in made and o.data_ptr() != made["o"].data_ptr():
            found.broken.append("out is not what is returned")
        wanted = case.out or case.dtype
        if o.dtype != getattr(torch, wanted):
            found.broken.append(f"o has dtype {o.dtype}, wanted {wanted}")
        o = (o.transpose(0, 1) if case.rows_along_tokens else o).cpu()
        found.tensors["o"] = o
        idle = torch.ones(o.shape[:2], dtype=torch.bool)
        for n, (b, begin, end) in enumerate(case.spans()):
            if not case.skipped(n):
                idle[b, begin:end] = False
        if o[idle].count_nonzero():
            found.broken.append("o is not zero at null rows or at tokens of no sequence")
        return found


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)
