# SPDX-License-Identifier: Apache-2.0
"""Processes that call `cula.dist` together, started once and shared by all tests of one world size."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# That a rank waits for another: NCCL also makes its connections in that time.
SECONDS = {"cpu": 10, "cuda": 60}


def need_gpus(kind: str, size: int) -> None:
    if kind == "cuda" and size > (found := torch.cuda.device_count()):
        pytest.skip(f"{size} ranks over NCCL need a GPU each, found {found}")


class RankError(Exception):
    """What a rank raised, the name of the type and the message; "exit" where its process ended instead."""

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(rank, kind, message)
        self.rank, self.kind, self.message = rank, kind, message


def _serve(
    path: list[str], device: str, rank: int, size: int, store: str, seconds: float, ours: Connection
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    from cula_testing import rank_calls

    named = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size}
    if device == "cuda":
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # which would wait for ranks that are gone
        # Aborting what waits for such a rank may take for ever; then this ends the process, by default after
        # minutes.
        os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = "15"
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
        named["device_id"] = torch.device("cuda", rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, **named, timeout=timedelta(seconds=seconds))
    while (request := ours.recv()) is not None:
        name, arguments = request
        try:
            answer = _on("cpu", getattr(rank_calls, name)(*_on(device, arguments)))
            if device == "cuda":
                torch.cuda.synchronize()  # what goes wrong on the device shows here
        except Exception as error:
            answer = RankError(rank, type(error).__name__, str(error))
        # Not by way of torch's own reducers, which would hand over file descriptors.
        ours.send_bytes(pickle.dumps(answer, protocol=5))
        if isinstance(answer, RankError) and arguments and arguments[-1] == "then leave":
            break
    ours.close()
    os._exit(0)  # whatever state an error has left the group in


def _on(device: str, value: object) -> object:
    """The value with its tensors, inside of tuples, lists and dictionaries too, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: _on(device, each) for name, each in value.items()}
    return type(value)(_on(device, each) for each in value) if type(value) in (tuple, list) else value


class Ranks:
    """`size` processes, one group: gloo on CPUs, NCCL on a GPU each."""

    def __init__(self, size: int, folder: Path, device: str = "cpu", seconds: float | None = None) -> None:
        self.size = size
        self.broken = False  # by an error that left the ranks in different places
        self._seconds = SECONDS[device] if seconds is None else seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self._processes, self._connections = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (list(sys.path), device, rank, size, str(folder / "store"), self._seconds, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def answers(self, name: str, *arguments: object) -> list[object]:
        """What the function of `rank_calls` returns on each rank, or the error that it raised there."""
        for connection in self._connections:
            connection.send((name, arguments))
        found: dict[int, object] = {}
        while len(found) < self.size:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in found}
            ready = wait(list(waiting), timeout=4 * self._seconds)
            if not ready:
                self.close()
                raise TimeoutError(f"{name}: ranks {sorted(waiting.values())} do not answer")
            for connection in ready:
                rank = waiting[connection]
                try:
                    found[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    found[rank] = RankError(rank, "exit", "its process ended")
        return [found[rank] for rank in range(self.size)]

    def call(self, name: str, *arguments: object) -> list[object]:
        answers = self.answers(name, *arguments)
        for answer in answers:
            if isinstance(answer, RankError):
                self.broken = True
                raise answer
        return answers

    def close(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()
