# SPDX-License-Identifier: Apache-2.0
"""Linear attention reads the Python standard library: `make demo`.

For each algorithm a small byte-level model with random layers (examples/model.py) reads 16,384 bytes of
source code in pieces, goes on byte by byte from the state alone, and then reads a packed batch of files of
very different lengths. The demo checks what it shows and exits with 1 where a check fails. It writes a plot
to build/demo/.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import matplotlib
import torch
from common import PICTURES, Clock, distance, print_checks, print_table, source_files
from matplotlib import pyplot as plt
from model import PREFILL, Model, Shape
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention
from tqdm import tqdm

import cula

CONTEXT, PIECE, STREAM, PREFIX = 16384, 2048, 256, 1024  # bytes
FILES, LARGEST_FILE = 16, 8192
PLOT = PICTURES / "time.png"
matplotlib.use("Agg")  # the plot is a file: no display is needed
PLOT_LENGTHS = [1024 << i for i in range(6)]

SOFTMAX = "softmax (scaled_dot_product_attention)"

# Two ways of computing one thing in bfloat16 differ by some of its roundings, added up over the layers.
SAME = 2 * torch.finfo(torch.bfloat16).eps


@dataclass
class Report:
    algorithm: str
    kernel: str = ""
    prefill_rate: float = 0.0  # bytes per second, whole model
    decode_rate: float = 0.0
    error: float = 0.0  # of the attention output against the float64 oracle, relative root mean square
    naive_error: float = 0.0  # the same of the recurrence computed in bfloat16
    state_bytes: int = 0
    guessed: float = 0.0  # share of bytes of unseen files
    checks: dict[str, tuple[float, float]] = field(default_factory=dict)  # name: (found, allowed)


def corpus() -> tuple[Tensor, Tensor, list[Tensor]]:
    """The context, what follows it, and files for the packed batch, an empty one among them where there is
    one."""
    paths = source_files()
    small = sorted(
        (path for path in paths if path.stat().st_size <= LARGEST_FILE), key=lambda p: (p.stat().st_size, p)
    )
    packed = small[:: max(1, len(small) // (FILES - 1))][:FILES]
    text = b""
    for path in sorted(set(paths) - set(packed)):
        text += path.read_bytes()
        if len(text) >= CONTEXT + STREAM:
            break
    everything = torch.tensor(list(text[: CONTEXT + STREAM]))
    return (
        everything[:CONTEXT],
        everything[CONTEXT:],
        [torch.tensor(list(p.read_bytes()), dtype=torch.long) for p in packed],
    )


def read_context(model: Model, context: Tensor, report: Report, bar: tqdm) -> tuple[Tensor, list]:
    """Prefill piece by piece; the state carries what was read."""
    model.prefill(context[None, :PIECE], model.empty_memory())  # warm up
    memory, features = model.empty_memory(), []
    with Clock(context.device) as clock:
        for piece in context.split(PIECE):
            features.append(model.prefill(piece[None], memory)[0])
            bar.update(len(piece))
    report.prefill_rate = len(context) / clock.seconds
    report.state_bytes = sum(layer.state.numel() * layer.state.element_size() for layer in memory)
    features = torch.cat(features)
    at_once = model.prefill(context[None], model.empty_memory())[0]
    bar.update(len(context))
    report.checks["prefill in pieces = prefill at once"] = distance(features, at_once), SAME
    return features, memory


def stream(model: Model, text: Tensor, memory: list, report: Report, bar: tqdm) -> None:
    """Decode byte by byte from the state that the context left."""
    continuation = model.prefill(text[None], deepcopy(memory))[0]
    features = []
    with Clock(text.device) as clock:
        for byte in text.split(1):
            features.append(model.decode(byte, memory))
            bar.update()
    report.decode_rate = len(text) / clock.seconds
    report.checks["streaming decode = prefill continued"] = distance(torch.cat(features), continuation), SAME


def read_packed(model: Model, files: list[Tensor], report: Report, bar: tqdm) -> None:
    """All files in one call, no padding; then each alone."""
    lengths = torch.tensor([len(file) for file in files], device=files[0].device)
    cu_seqlens = pad(lengths.cumsum(0), (1, 0)).int()
    features = model.prefill(torch.cat(files)[None], model.empty_memory(len(files)), cu_seqlens)[0].split(
        lengths.tolist()
    )
    bar.update(int(lengths.sum()))
    worst = 0.0
    for file, own in zip(files, features, strict=True):
        if len(file):
            worst = max(worst, distance(own, model.prefill(file[None], model.empty_memory())[0]))
            bar.update(len(file))
    report.checks["packed = one by one"] = worst, SAME
    right = sum(
        int((model.next_byte(own[:-1]) == file[1:]).sum())
        for file, own in zip(files, features, strict=True)
        if len(file)
    )
    report.guessed = right / sum(len(file) - 1 for file in files if len(file))


def compare_with_oracle(model: Model, text: Tensor, report: Report) -> None:
    """Each layer's attention on its real inputs, against the recurrence in float64 and in bfloat16."""
    x = model.embedding[text[None]]
    for layer, memory in zip(model.layers, model.empty_memory(), strict=True):
        normed = rms_norm(x, x.shape[-1:])
        qkv, gates = layer.attention_inputs(normed, layer.previous(normed, memory, None))
        attention = PREFILL[layer.algorithm]
        exact_gates = {
            name: gate.double() if isinstance(gate, Tensor) else gate for name, gate in gates.items()
        }
        exact, _ = attention(*(tensor.double() for tensor in qkv), **exact_gates, backend="reference")
        report.error = max(report.error, distance(attention(*qkv, **gates)[0], exact))
        naive, _ = attention(*qkv, **gates, backend="reference:naive")
        report.naive_error = max(report.naive_error, distance(naive, exact))
        x = x + layer.prefill(x, memory)
    allowed = 2 * report.naive_error + torch.finfo(torch.bfloat16).eps
    report.checks["error at most twice the naive recurrence's"] = report.error, allowed


def run(
    algorithm: str, shape: Shape, context: Tensor, following: Tensor, files: list[Tensor], bar: tqdm
) -> Report:
    bar.set_description(f"{algorithm:>9}")
    model, report = (
        Model(algorithm, shape, context.device),
        Report(algorithm, kernel=chosen_kernel(algorithm, context.device)),
    )
    features, memory = read_context(model, context, report, bar)
    model.fit_readout(features[:-1], context[1:])
    stream(model, following, memory, report, bar)
    read_packed(model, files, report, bar)
    compare_with_oracle(model, context[:PREFIX], report)
    return report


def chosen_kernel(algorithm: str, device: torch.device) -> str:
    return cula.explain(algorithm=algorithm, device=device).chosen or "none"


def pick_device() -> torch.device:
    """The GPU where there is one and the library has kernels for it."""
    gpu = torch.device("cuda")
    ready = torch.cuda.is_available() and all(
        chosen_kernel(algorithm, gpu) != "none" for algorithm in PREFILL
    )
    return gpu if ready else torch.device("cpu")


def print_reports(reports: list[Report], shape: Shape) -> None:
    kv_cache = 2 * CONTEXT * shape.layers * shape.heads * shape.head_dim * torch.bfloat16.itemsize
    head = (
        "algorithm",
        "kernel",
        "prefill tokens/s",
        "decode tokens/s",
        "error",
        "naive error",
        "state",
        "KV cache",
        "next byte",
    )
    rows = [
        (
            report.algorithm,
            report.kernel,
            f"{report.prefill_rate:,.0f}",
            f"{report.decode_rate:,.0f}",
            f"{report.error:.1e}",
            f"{report.naive_error:.1e}",
            f"{report.state_bytes / 2**20:.2f} MiB",
            f"{kv_cache / 2**20:.0f} MiB",
            f"{report.guessed:.0%}",
        )
        for report in reports
    ]
    print_table(head, rows)


def attention_times(shape: Shape, device: torch.device, bar: tqdm) -> dict[str, list[float]]:
    """Milliseconds of one layer's attention at PLOT_LENGTHS."""
    bar.set_description("     plot")
    layers = {algorithm: Model(algorithm, shape, device).layers[0] for algorithm in PREFILL}
    times: dict[str, list[float]] = {name: [] for name in (*PREFILL, SOFTMAX)}
    for length in PLOT_LENGTHS:
        x = torch.randn(1, length, shape.width, device=device)
        for algorithm, layer in layers.items():
            qkv, gates = layer.attention_inputs(x, x.roll(1, 1))
            times[algorithm].append(milliseconds(partial(PREFILL[algorithm], *qkv, **gates), device))
        heads_first = (tensor.transpose(1, 2).contiguous() for tensor in qkv)
        times[SOFTMAX].append(
            milliseconds(partial(scaled_dot_product_attention, *heads_first, is_causal=True), device)
        )
        bar.update(length * (1 + len(PREFILL)))
    return times


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    samples = []
    for _ in range(3):
        with Clock(device) as clock:
            call()
        samples.append(clock.seconds)
    return 1e3 * statistics.median(samples)


def draw(times: dict[str, list[float]], shape: Shape) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, values in times.items():
        axes.plot(PLOT_LENGTHS, values, "k--s" if name == SOFTMAX else "-o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="length (tokens)", ylabel="ms per layer")
    axes.set_xticks(PLOT_LENGTHS, [f"{length // 1024}K" for length in PLOT_LENGTHS])
    axes.set_title(f"Prefill of one attention layer, {shape.heads} heads of {shape.head_dim}, bfloat16")
    axes.grid(alpha=0.3)
    axes.legend()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=150)


@torch.inference_mode()
def main() -> int:
    shape, device = Shape(), pick_device()
    context, following, files = corpus()
    context, following, files = context.to(device), following.to(device), [file.to(device) for file in files]
    packed = sum(map(len, files))
    print(
        f"{CONTEXT:,} bytes of the Python standard library, then {STREAM} one by one, "
        f"then {len(files)} files of",
        end=" ",
    )
    print(f"{min(map(len, files)):,} to {max(map(len, files)):,} bytes; {shape.layers} layers, on {device}")

    total = len(PREFILL) * (2 * CONTEXT + STREAM + 2 * packed) + sum(PLOT_LENGTHS) * (1 + len(PREFILL))
    with tqdm(total=total, unit="B", unit_scale=True, leave=False) as bar:
        reports = [run(algorithm, shape, context, following, files, bar) for algorithm in PREFILL]
        draw(attention_times(shape, device, bar), shape)

    print_reports(reports, shape)
    print("checks (relative root mean square, found of allowed):")
    good = print_checks({name: [report.checks[name] for report in reports] for name in reports[0].checks})
    print(f"time against length, beside softmax attention: {PLOT}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
