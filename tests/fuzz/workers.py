# SPDX-License-Identifier: Apache-2.0
"""A run in processes of its own."""

from __future__ import annotations

import torch

from fuzz.run import Options, Tally, run


def work(seed: int, count: int, seconds: float, worker: int, workers: int, options: Options, results, current) -> None:
    """A worker's share of a run."""
    torch.set_num_threads(1)  # a case says with how many its calls run
    results.send(run(seed, -(-count // workers), seconds, options, worker, workers, current))
    results.close()


def shared(seed: int, count: int, seconds: float, workers: int, options: Options) -> Tally:
    """The work of several processes, so that a crash is a failure with the seed of its case and no more."""
    processes, tally, started = torch.multiprocessing.get_context("spawn"), Tally(), []
    for n in range(workers):
        receiver, sender = processes.Pipe(duplex=False)
        current = processes.Value("q", 0)
        arguments = (seed, count, seconds, n, workers, options, sender, current)
        worker = processes.Process(target=work, args=arguments, daemon=True)
        worker.start()
        sender.close()
        started.append((worker, receiver, current))
    for worker, receiver, current in started:
        try:
            tally.add(receiver.recv())
        except EOFError:
            worker.join()
            line = options.reproduce(current.value, options.backend or None).replace(" --backend auto", "")
            wrong = [f"the process ended with {worker.exitcode}"]
            print(f"{line}\n    {wrong[0]}", flush=True)
            tally.failures.append({"seed": current.value, "backend": "", "reproduce": line, "wrong": wrong})
        worker.join()
    return tally
