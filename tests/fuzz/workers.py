# SPDX-License-Identifier: Apache-2.0
"""A run in processes of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from fuzz.run import Options, Tally, run, seeds_of

HANGS = 120.0  # seconds without another case; one takes less than two


def work(
    seed: int, count: int, seconds: float, worker: int, workers: int, options: Options, results, current
) -> None:
    """A worker's share of a run."""
    torch.set_num_threads(1)  # a case says with how many its calls run
    results.send(run(seed, -(-count // workers), seconds, options, worker, workers, current))
    results.close()


@dataclass
class Worker:
    process: torch.multiprocessing.Process
    receiver: Connection
    current: object  # shared memory for the seed of the case that is running
    seen: int = -1
    since: float = 0.0

    def hangs(self, limit: float) -> bool:
        """Whether the same case has been running for too long."""
        if self.current.value != self.seen:
            self.seen, self.since = self.current.value, time.monotonic()
        return time.monotonic() - self.since > limit


def shared(
    seed: int, count: int, seconds: float, workers: int, options: Options, limit: float = HANGS
) -> Tally:
    """The work of several processes, so that a crash or a hang is a failure with the seed of its case and no
    more."""
    processes, tally, running = torch.multiprocessing.get_context("spawn"), Tally(), []
    for n in range(workers):
        receiver, sender = processes.Pipe(duplex=False)
        current = processes.Value("q", next(seeds_of(seed, n, workers)))
        arguments = (seed, count, seconds, n, workers, options, sender, current)
        process = processes.Process(target=work, args=arguments, daemon=True)
        process.start()
        sender.close()
        running.append(Worker(process, receiver, current))
    while running:
        ready = wait([worker.receiver for worker in running], timeout=min(1.0, limit))
        for worker in list(running):
            if worker.receiver in ready:
                try:
                    tally.add(worker.receiver.recv())
                    worker.process.join()
                except EOFError:
                    worker.process.join()
                    _lost(tally, worker, options, f"the process ended with {worker.process.exitcode}")
            elif worker.hangs(limit):
                worker.process.kill()
                worker.process.join()
                _lost(tally, worker, options, f"no end within {limit:g} seconds")
            else:
                continue
            running.remove(worker)
    return tally


def _lost(tally: Tally, worker: Worker, options: Options, sentence: str) -> None:
    seed = worker.current.value
    line = options.reproduce(seed, options.backend or None).replace(" --backend auto", "")
    print(f"{line}\n    {sentence}", flush=True)
    tally.failures.append({"seed": seed, "backend": "", "reproduce": line, "wrong": [sentence]})
