# SPDX-License-Identifier: Apache-2.0
"""One sequence over several processes: torchrun --nproc-per-node 4 examples/context_parallel.py

On a machine with as many GPUs as processes each takes one and they speak NCCL, else all run on the CPU and
speak gloo. Shown, each beside the same call on one rank: context parallelism by every method, packed
sequences that cross ranks, heads and tokens over a mesh of two dimensions, and a pipeline of layers, which
needs nothing of `cula.dist`. The program exits with 1 where a result differs by more than the roundings of
bfloat16.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import logsigmoid, normalize

import cula
from cula.dist import cula_kda_cp, cula_kda_tp_cp, even_splits

# Two ways of computing one thing in bfloat16 differ by some of its roundings.
SAME = 2 * torch.finfo(torch.bfloat16).eps

Tensors = dict[str, Tensor]


def draw(tokens: int, heads: int, dim: int, device: torch.device) -> Tensors:
    """The arguments of `cula_kda`, the same on every rank."""
    torch.manual_seed(0)

    def normal(*last: int) -> Tensor:
        return torch.randn(1, tokens, heads, *last)

    q, k = (normalize(normal(dim), dim=-1) for _ in range(2))
    drawn = {"q": q, "k": k, "v": normal(dim), "g": logsigmoid(normal(dim)) / 16, "beta": normal().sigmoid()}
    half = ("q", "k", "v")
    return {
        name: x.to(device, torch.bfloat16 if name in half else torch.float32) for name, x in drawn.items()
    }


def part(tensors: Tensors, begin: int, end: int) -> Tensors:
    return {name: x[:, begin:end] for name, x in tensors.items()}


def gathered(o: Tensor, splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' tokens, for the comparison only: a model goes on with its own."""
    parts = [o.new_empty((o.shape[0], b - a, *o.shape[2:])) for a, b in pairwise(splits)]
    for rank, one in enumerate(parts):
        if rank == dist.get_rank(group):
            one.copy_(o)
        dist.broadcast(one, group=group, group_src=rank)
    return torch.cat(parts, dim=1)


def error(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def timed(call: Callable[[], tuple[Tensor, Tensor | None]], device: torch.device) -> tuple[tuple, float]:
    """The result of the second call and what it took, in milliseconds."""
    call()
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, 1e3 * (time.perf_counter() - begin)


def pipeline(layers: int, rank: int, whole: Tensors, pieces: int) -> Tensor:
    """Layer r on rank r; the sequence comes in pieces, so that all layers work at once.

    A layer here is the attention alone, its output the values of the next. Its state stays on its rank from
    piece to piece; what travels is what a model's layers exchange in any case.
    """
    splits, state, outputs, sent = even_splits(whole["q"].shape[1], pieces), None, [], []
    for begin, end in pairwise(splits):
        piece = part(whole, begin, end)
        if rank > 0:
            piece["v"] = torch.empty_like(piece["v"], memory_format=torch.contiguous_format)
            dist.recv(piece["v"], src=rank - 1)
        o, state = cula.cula_kda(**piece, initial_state=state, output_final_state=True)
        if rank < layers - 1:
            sent.append((dist.isend(o, dst=rank + 1), o))
        outputs.append(o)
    for work, _ in sent:
        work.wait()
    return torch.cat(outputs, dim=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help="of keys and values")
    options = parser.parse_args()
    local, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    failed = False

    def report(what: str, o: Tensor, reference: Tensor, milliseconds: float | None = None) -> None:
        nonlocal failed
        found = error(o, reference)
        failed |= not found <= SAME
        if rank == 0:
            took = "" if milliseconds is None else f"{milliseconds:10.2f} ms"
            print(
                f"{what:52} {took:14} error {found:.1e}{'' if found <= SAME else '  TOO LARGE'}", flush=True
            )

    whole = draw(options.tokens, options.heads, options.dim, device)
    splits = even_splits(options.tokens, size)
    own = part(whole, splits[rank], splits[rank + 1])
    world = dist.group.WORLD
    if rank == 0:
        print(
            f"KDA, {options.tokens} tokens, {options.heads} heads of {options.dim}, "
            f"{size} ranks on {device.type}"
        )

    (expected, _), took = timed(lambda: cula.cula_kda(**whole), device)
    report("every rank alone, all tokens", expected, expected, took)
    for method in ("scan", "ring"):
        more = {"sp_group": world, "sp_splits": splits, "method": method, "output_final_state": False}
        (o, _), took = timed(lambda more=more: cula_kda_cp(**own, **more), device)
        report(f"context parallel, {method}", gathered(o, splits, world), expected, took)

    third = options.tokens // 3
    cu_seqlens = torch.tensor(
        [0, third // 2, third // 2, options.tokens - third, options.tokens], device=device
    )
    packed, _ = cula.cula_kda(**whole, cu_seqlens=cu_seqlens)
    o, _ = cula_kda_cp(
        **own, sp_group=world, sp_splits=splits, cu_seqlens=cu_seqlens, output_final_state=False
    )
    report("context parallel, packed sequences", gathered(o, splits, world), packed)

    if size % 2 == 0 and options.heads % 2 == 0:
        mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("tp", "cp"))
        splits = even_splits(options.tokens, size // 2)
        place = mesh.get_local_rank("cp")
        o, _ = cula_kda_tp_cp(
            **part(whole, splits[place], splits[place + 1]), tp_group=mesh["tp"], sp_group=mesh["cp"],
            sp_splits=splits, full_inputs=True, gather_output=True, output_final_state=False,
        )  # fmt: skip
        report("half the heads, some of the tokens", gathered(o, splits, mesh["cp"].get_group()), expected)

    o = pipeline(size, rank, whole, pieces=8)
    values = whole["v"]
    for _ in range(rank + 1):
        values, _ = cula.cula_kda(**{**whole, "v": values})
    wrong = torch.tensor([error(o, values)], device=device)
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    # Each layer hands its roundings on to the next.
    report(f"pipeline of {size} layers, in 8 pieces (worst rank)", 1 + wrong / size, torch.ones_like(wrong))
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
