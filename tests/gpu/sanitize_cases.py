# SPDX-License-Identifier: Apache-2.0
"""Few small calls that reach every kernel, for compute-sanitizer: python tests/gpu/run.py sanitize.

Inputs reach the device by plain copies and outputs are fresh memory, so that whatever is read before it was
written is the library's doing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from itertools import islice
from unittest import mock

import torch

import cula
from cula_testing import device, gradients, level1, passes
from cula_testing.cases import ALGORITHMS, DELTA, FAMILY, PRODUCT, Case, Inputs, make, state_like
from cula_testing.kinds import DRAFTS, KINDS, Call, Kind, ready

WIDTHS = (64, 128, 256)
HALVES = (torch.bfloat16, torch.float16)
PORTABLE = ("sm80",)  # also where a newer target would take the call


def _prefill_of_kept(inputs: Inputs) -> passes.Result:
    stateless = inputs.but(initial_state=None, initial_state_indices=None)
    # Level 1 takes the log decay by a kernel of torch's: nobody watches those, and what they write counts as
    # never written.
    with mock.patch("cula._decays.log_decay", lambda decay: decay):
        m, b, kept = level1.segment(stateless, scale=inputs.case.scale, keep=True)
        o, final_state = level1.prefill(inputs, kept=kept)
    return passes.Result(o=o, final_state=final_state, m=m, b=b)


def _prefill_from_zero(inputs: Inputs) -> passes.Result:
    stateless = inputs.but(initial_state=None, initial_state_indices=None)
    b = inputs.q.new_empty(
        (inputs.case.sequences, 1, inputs.v.shape[3], inputs.q.shape[3]), dtype=torch.float32
    )
    with mock.patch("cula._decays.log_decay", lambda decay: decay):
        kept = level1.segment(stateless, scale=inputs.case.scale, keep=True, out=(None, b))[2]
        o, final_state = level1.prefill(stateless, kept=kept)
    return passes.Result(o=o, final_state=final_state, b=b)


# Cases are drawn on the CPU, torch's default device here, and run on the GPU.
able = functools.partial(device.able, on="cuda")

# The tool that watches, where run.py names it. initcheck reports what the walks of sm90 hand to gradient
# kernels as never written, and the rows of o of low-rank keys, seemingly since it does not see bulk stores
# and those of TMA. It watches sm80 instead.
TOOL = os.environ.get("CULA_SANITIZER_TOOL", "")
# Which of how many processes this is, where run.py starts several: each makes every so manieth call.
SHARE, SHARES = map(int, os.environ.get("CULA_SANITIZER_SHARE", "0/1").split("/"))


def _backward(inputs: Inputs, **upstream) -> passes.Result:
    """Into fresh memory, which nobody reads afterwards."""
    named = {**inputs.tensors(), **inputs.case.options, **upstream, "initial_state": inputs.initial_state}
    made = {f"d_{name}": torch.empty_like(getattr(inputs, name)) for name in gradients.names(inputs)}
    backend = inputs.case.backend
    if TOOL == "initcheck" and "sm80" in able(inputs.q.dtype, "backward", key_dim=inputs.q.shape[3]):
        backend = backend.replace("sm90", "sm80") or "sm80"
    passes.call("backward", backend, made, **named)
    return passes.Result()


def _backward_of_saved(inputs: Inputs, **upstream) -> passes.Result:
    """Both halves of a call that keeps what the second needs."""
    case = inputs.case
    rows = cula.explain(
        case.algorithm, heads=case.heads, value_heads=case.value_heads, key_dim=case.key_dim,
        value_dim=case.value_dim, dtype=case.dtype, device="cuda", disable_recompute=True, writes=case.writes,
    )  # fmt: skip
    saving = next(each.saving for each in rows if each.target == case.backend)
    rows = case.tokens * case.writes
    chunks = (
        rows // saving.chunk_tokens + case.sequences
        if case.packed
        else -(-rows // saving.chunk_tokens) * case.batch
    )
    saved = torch.empty((chunks, case.value_heads, saving.bytes // 4), dtype=torch.int32, device="cuda")
    prefill = {**inputs.tensors(), **case.options, "initial_state": inputs.initial_state}
    passes.call("prefill", case.backend, {"o": passes.empty_o(inputs)}, **prefill, saved=saved)
    return _backward(inputs, **upstream, saved=saved)


BACKWARD = Kind(_backward, ((130,),), lambda _: {}, {})
OF_SAVED = Kind(_backward_of_saved, ((130,),), lambda _: {}, {})

# Sequences that have segments inside the call.
KEPT = Kind(_prefill_of_kept, ((1100, 0, 70),), lambda _: {}, {"packed": True, "heads": 1, "value_heads": 1})
FROM_ZERO = Kind(_prefill_from_zero, ((1100, 1100),), lambda _: {}, {"heads": 1, "value_heads": 1})


def on_gpu(call: Call) -> Call:
    """The call with the memory under its tensors copied whole, strides and gaps as they are; outputs
    fresh."""
    copies: dict[int, torch.Tensor] = {}

    def move(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in passes.Result.__dataclass_fields__:
            return torch.empty_like(tensor, device="cuda")
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in copies:
            copies[memory.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(memory).cuda()
        storage = copies[memory.data_ptr()].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    moved = {name: move(name, tensor) for name, tensor in call.tensors.items() if tensor.numel()}
    inputs = call.inputs.but(**{name: moved[name] for name in moved if hasattr(call.inputs, name)})
    return Call(
        call.kind, inputs, {**call.named, **{name: moved[name] for name in moved if name in call.named}}
    )


def calls() -> Iterator[Call]:
    one = {"heads": 1, "value_heads": 1}
    declined = device.declined_algorithms("cuda")
    for algorithm in (name for name in ALGORITHMS if name not in declined):
        for K in WIDTHS:
            wide = {"key_dim": K, "value_dim": K}
            for dtype in HALVES:
                yield ready("prefill", algorithm, dtype=dtype, lengths=(130,), **one, **wide)
                yield ready("varlen", algorithm, dtype=dtype, lengths=(65, 0, 5), **one, **wide)
            for state_dtype in (torch.float32, *HALVES):
                for name in ("decode", "verify"):
                    yield ready(name, algorithm, state_dtype=state_dtype, **one, **wide)
            yield ready("recurrent", algorithm, dtype=torch.float32, lengths=(3, 0, 9), **one, **wide)
            yield ready("segment", algorithm, lengths=(70, 0, 3), **one, **wide)
            for backend in PORTABLE:
                yield ready("prefill", algorithm, lengths=(130,), backend=backend, **one, **wide)
                yield ready("varlen", algorithm, lengths=(65, 0, 5), backend=backend, **one, **wide)
            yield ready("states on the way", algorithm, lengths=(130,), **one, **wide)
        for backend in ("", *PORTABLE):
            yield ready(
                "prefill", algorithm, lengths=(2048,), key_dim=128, value_dim=128, backend=backend, **one
            )
            if algorithm == "gdn":  # cut in two where Hopper's kernels run
                many = {"heads": 8, "value_heads": 16, "key_dim": 128, "value_dim": 128}
                yield ready("prefill", algorithm, lengths=(4096,), backend=backend, **many)
            if algorithm == "kda" and not backend:  # in four, of which the first walks beside maps
                many = {"heads": 22, "value_heads": 22, "key_dim": 128, "value_dim": 128}
                yield ready("prefill", algorithm, lengths=(64 * 128 - 3,), **many)
            scheduled = (65, *[0, 5] * 16)
            yield ready(
                "varlen", algorithm, lengths=scheduled, key_dim=128, value_dim=128, backend=backend, **one
            )
            for kind in (KEPT, FROM_ZERO):
                yield Call(kind, make(kind.case(algorithm, key_dim=128, value_dim=128, backend=backend)), {})
        yield ready("prefill", algorithm, dtype=torch.float32, lengths=(70,), key_dim=128, value_dim=128)
        yield ready(
            "varlen", algorithm, lengths=(33, 64), key_dim=60, value_dim=100, value_heads=4, fused=True
        )
        yield ready(
            "decode", algorithm, lengths=(1, 1), key_dim=60, value_dim=100, value_heads=4, k_first=True
        )
        yield ready("pool", algorithm, lengths=(70, 1), key_dim=100, value_dim=40, state_dtype=torch.bfloat16)
        yield ready("tree", algorithm)
        if algorithm in ("kda", "gdn2"):  # so many rows that a CTA has two tiles
            many = {"lengths": (4,) * 150, "heads": 4, "value_heads": 4, "key_dim": 64, "value_dim": 128}
            for dtype in HALVES:
                yield ready("verify", algorithm, state_dtype=dtype, **many)
        yield from forks(algorithm)
        if algorithm in DELTA:
            yield ready("prefill", algorithm, lengths=(70,), beta_per_value=True)
            # Maps by two warpgroups a CTA.
            yield ready(
                "prefill", algorithm, lengths=(1600,), heads=22, value_heads=22, key_dim=128, value_dim=128
            )
        if algorithm in PRODUCT:
            for K in (64, 128):  # stores of Hopper's carry read far behind their tiles
                wide = {"key_dim": K, "value_dim": K, "householders": 16}
                yield ready("prefill", algorithm, lengths=(13,), **one, **wide)
                yield ready("varlen", algorithm, lengths=(13, 0, 4), **one, **wide)
        if FAMILY[algorithm][0] == "channel":
            for K in (64, 72, 128):  # gates of the inputs' type, which tensor copies can bring
                narrow = {"dtype": torch.bfloat16, "gate_dtype": torch.bfloat16, "key_dim": K, "value_dim": K}
                yield ready("prefill", algorithm, lengths=(150,), **one, **narrow)
                yield ready("varlen", algorithm, lengths=(79, 0, 16, 3), **one, **narrow)
        if FAMILY[algorithm][0] in ("channel", "token"):
            for gate in ("softplus", "bounded"):
                gated = {"gate": gate, "decay": "mixed", "qk_l2norm": True}
                yield ready("prefill", algorithm, lengths=(70,), key_dim=128, value_dim=128, **gated)
                yield ready("decode", algorithm, lengths=(1, 1), key_dim=128, value_dim=128, **gated)
        yield from malformed(algorithm)
        yield from backward(algorithm)
    yield from by_full_ctas()
    yield from by_ctas_of_two_pairs()
    if "sm90" in able(torch.bfloat16):
        yield from by_one_kernel()


def backward(algorithm: str) -> Iterator[Call]:
    """Chunks and tokens, whole and with tails, of sequences that are batched and packed; all gradients."""

    def call(kind: Kind = BACKWARD, **fields) -> Call:
        inputs = make(kind.case(algorithm, **fields))
        d_o, d_final_state = gradients.upstream(inputs)
        return Call(kind, inputs, {"d_o": d_o, "d_final_state": d_final_state})

    for K in WIDTHS:
        for dtype in HALVES:
            yield call(key_dim=K, value_dim=K, dtype=dtype, heads=1, value_heads=2, qk_l2norm=True)
        packed = {"lengths": (65, 0, 5), "packed": True, "tail": 3}
        yield call(key_dim=K - 4, value_dim=K // 2 + 1, heads=1, value_heads=1, **packed)
    writes = Case(algorithm).writes
    for target in able(torch.bfloat16, "backward", algorithm=algorithm):
        if ":" in target:
            continue
        for strategy in ("whole", "segments"):
            sizes = {"heads": 1, "value_heads": 1, "key_dim": 128, "value_dim": 72}
            yield call(lengths=(200,), backend=f"{target}:{strategy}", **sizes)
            yield call(lengths=(65, 0, 193), packed=True, backend=f"{target}:{strategy}", **sizes)
        for K in WIDTHS:
            saving = cula.explain(algorithm, key_dim=K, device="cuda", disable_recompute=True, writes=writes)
            if all(row.target != target or row.verdict == "no" for row in saving):
                continue
            sizes = {"heads": 1, "value_heads": 2, "key_dim": K, "value_dim": K, "backend": target}
            for dtype in HALVES:
                yield call(OF_SAVED, lengths=(130, 130), dtype=dtype, **sizes)
                yield call(OF_SAVED, lengths=(65, 0, 5), packed=True, tail=3, dtype=dtype, **sizes)
            yield call(OF_SAVED, lengths=(2047,), **sizes)  # in segments
    yield call(lengths=(33, 0, 2), packed=True, key_dim=20, value_dim=12, dtype=torch.float32)
    yield call(lengths=(0, *[5, 0] * 17), packed=True, key_dim=64, value_dim=32)  # scheduled
    if FAMILY[algorithm][0] in ("channel", "token"):
        for gate in ("softplus", "bounded"):
            yield call(gate=gate, decay="mixed", key_dim=64, value_dim=64)
    for row in cula.explain(algorithm, "backward", device="cuda"):
        if not row.target.endswith(":three_walks") or row.verdict == "no":
            continue
        one = {"heads": 1, "value_heads": 1, "backend": row.target}
        wide = {"key_dim": 128, "value_dim": 128}
        for dtype in HALVES:
            for K, V in ((64, 64), (128, 128), (64, 128), (128, 64), (100, 40)):
                yield call(lengths=(450,), key_dim=K, value_dim=V, dtype=dtype, **one)
                yield call(
                    lengths=(65, 0, 130), packed=True, tail=3, key_dim=K, value_dim=V, dtype=dtype, **one
                )
            yield call(lengths=(65, *[0, 5] * 16), packed=True, dtype=dtype, **wide, **one)
            yield call(lengths=(2047,), dtype=dtype, **wide, **one)  # in segments
            yield call(lengths=(1100, 0, 70), packed=True, dtype=dtype, **wide, **one)


def by_full_ctas() -> Iterator[Call]:
    """So many chunks of heads that a CTA of prepare_token has several (prepare_share)."""
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    fields = {"dtype": torch.bfloat16, "key_dim": 64, "value_dim": 16, "qk_l2norm": True}
    for heads, value_heads in ((16, 64), (32, 64), (63, 63)):
        tokens = 64 * (6 * multiprocessors * 4 // value_heads // 2 * 2 + 3)
        sizes = {"heads": heads, "value_heads": value_heads, "lengths": (tokens - 5,), **fields}
        yield ready("prefill", "gdn", backend="sm80:whole", **sizes)
    # Chunks of 32 tokens that are compensated: equal keys.
    call = ready("prefill", "delta", lengths=(70,), **{**fields, "key_dim": 256})
    call.inputs.k[:] = call.inputs.k[:, :1]
    yield call


def by_ctas_of_two_pairs() -> Iterator[Call]:
    """Backward passes with more pairs of a chunk and a head than gradient_anchored has CTAs."""
    chunks = 4
    heads = torch.cuda.get_device_properties("cuda").multi_processor_count * 3 // 2 // chunks + 1
    sizes = {"heads": heads, "value_heads": heads, "lengths": (64 * chunks - 6,)}
    for algorithm, gate in (("kda", "bounded"), ("kda", "softplus"), ("gla", None), ("gdn2", None)):
        fields = {**sizes, **({"gate": gate} if gate else {})}
        for K, V in ((128, 128), (100, 48)):
            wide = {"key_dim": K, "value_dim": V, "qk_l2norm": algorithm != "gla"}
            inputs = make(BACKWARD.case(algorithm, **wide, **fields))
            d_o, d_final_state = gradients.upstream(inputs)
            yield Call(BACKWARD, inputs, {"d_o": d_o, "d_final_state": d_final_state})


def by_one_kernel() -> Iterator[Call]:
    """KDA by one kernel, in pairs of CTAs and, bounded gates of many heads, in CTAs alone: where sequences
    end, and what states ask for."""
    fields = {"gate_dtype": torch.bfloat16, "dtype": torch.bfloat16, "qk_l2norm": True}
    fields |= {"key_dim": 128, "value_dim": 128, "backend": "sm90:fused"}
    for heads, gate in ((1, "bounded"), (70, "bounded"), (1, "softplus"), (70, "softplus")):
        sizes = {"heads": heads, "value_heads": heads, **fields, "gate": gate, "decay": "mixed"}
        yield ready("prefill", "kda", lengths=(230 if heads == 1 else 70,), **sizes)
        yield ready("varlen", "kda", lengths=(33, 0, 64, 7), **sizes)
        yield ready("states on the way", "kda", lengths=(130,), **sizes)
    # In segments that join: heads that forget, and others.
    fields |= {"backend": "sm90:joined", "beta_is_logit": True}
    for gate in ("bounded", "softplus"):
        sizes = {"heads": 2, "value_heads": 2, **fields, "gate": gate}
        for decay in ("forgetting", "lasting"):
            yield ready("prefill", "kda", lengths=(530,), decay=decay, **sizes)
            yield ready("varlen", "kda", lengths=(530, 0, 130), decay=decay, **sizes)


def forks(algorithm: str) -> Iterator[Call]:
    """Slots that one row reads and another writes, also in chains, and trees whose base lies in their own
    slots."""
    for name in ("forks", "forked decode"):
        yield ready(name, algorithm)
        yield ready(name, algorithm, key_dim=60, value_dim=100, k_first=True, state_dtype=torch.bfloat16)
        call = ready(name, algorithm)
        call.inputs.initial_state_indices = call.named["final_state_indices"].roll(1)
        yield call
    inputs = make(Case(algorithm, (DRAFTS,) * 2))
    table = torch.arange(2 * DRAFTS, dtype=torch.int64).view(2, DRAFTS)
    for base in (None, torch.tensor([0, 0], dtype=torch.int64)):
        rows = inputs.but(
            initial_state=state_like(inputs.case, 2 * DRAFTS, fill=1.0), initial_state_indices=base
        )
        named = {"o": passes.empty_o(rows), "in_place": True, "state_indices": table}
        for parents in (None, torch.tensor([[-1, 0, -1, 2]] * 2)):
            tree = {} if parents is None else {"parents": parents}
            yield Call(KINDS["verify"], rows, {**named, **tree})


def malformed(algorithm: str) -> Iterator[Call]:
    """Values that would lead outside every tensor if they were believed."""
    for name in ("varlen", "recurrent", "segment"):
        call = ready(name, algorithm)
        call.inputs.cu_seqlens = torch.tensor([0, 2**31 - 1, -(2**31), 10**6, 200], dtype=torch.int32)
        yield call
        for sequences in (9, 33):  # found by every warp; scheduled
            call = ready(name, algorithm, lengths=(200, *[0] * (sequences - 1)))
            call.inputs.cu_seqlens = torch.tensor([0, 200] * ((sequences + 1) // 2), dtype=torch.int32)
            yield call
    for name in ("pool", "decode"):
        call = ready(name, algorithm)
        call.inputs.initial_state_indices[1], call.inputs.initial_state_indices[2] = 2**31 - 1, -(2**31)
        yield call


def watched(call: Call) -> Call:
    """The call as the tool can watch it."""
    case = call.inputs.case
    if TOOL == "initcheck" and cula.algorithms()[case.algorithm].takes_low_rank and not case.backend:
        return Call(call.kind, call.inputs.but(case=case.but(backend="sm80")), call.named)
    return call


def compose_maps() -> int:
    """Maps as ranks send them; the number of calls."""
    print("call of compose", flush=True)
    shapes = [(rows, K) for K in (36, *WIDTHS) for rows in (K, 1)]
    for rows, K in shapes:
        m, b = (torch.randn(3, 1, 2, size, K).cuda() for size in (rows, 20))
        joins = torch.tensor([True, False, True]).cuda()
        torch.ops.cula.compose(m, b, torch.empty(1, 2, 20, K, device="cuda"), joins)
        torch.ops.cula.compose(m, b, torch.empty(1, 2, 20, K, device="cuda"))
        torch.cuda.synchronize()
    return 2 * len(shapes)


def main() -> None:
    count = compose_maps() if SHARE == 0 else 0
    for call in map(watched, islice(calls(), SHARE, None, SHARES)):
        print(f"call of {call.kind.run.__name__}: {call.inputs.case}", flush=True)
        on_gpu(call)()
        torch.cuda.synchronize()
        count += 1
    print(f"calls: {count}")


if __name__ == "__main__":
    main()
