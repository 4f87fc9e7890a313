# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level language model on the sources of the Python standard library, twice.

One model computes its linear attention with cula, the other in plain PyTorch (examples/eager.py). Both start
from the same weights and read the same batches, in turns. The program draws both losses, checks that they
agree and fall, and exits with 1 where a check fails.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import eager
import matplotlib
import torch
from common import PICTURES, Clock, distance, print_checks, print_table, source_files
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, rms_norm
from tqdm import tqdm

import cula

BYTES = 256
HEAD_DIM = 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TAPS = 4  # of the convolution before q, k and v
LOWER_BOUND = -5.0  # of a token's log decay
WRITES = 2  # of a token, where the algorithm takes several
LEARNING_RATE, WARM_UP = 3e-3, 20  # steps
# Two ways of computing one thing differ by some roundings of the dtype. Those of float32 are so small that
# their number counts, which sums over thousands of tokens make.
AGREEING = {torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps, torch.float32: 128 * torch.finfo().eps}
MARGIN = 0.02  # nats per byte, between losses that are means over the last tenth of the steps
LEARNED = 0.8  # of the entropy of the bytes
matplotlib.use("Agg")  # the picture is a file: no display is needed


@dataclass
class Inputs:
    """What a layer hands to its attention, the gate and the write strength raw."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # as q; with several writes a token k, v and strength have so many rows for each of q's
    v: Tensor  # [B, T, H, V]
    gate: Tensor | None  # [B, T, H, K] or [B, T, H]
    A_log: Tensor | None  # [H]
    dt_bias: Tensor | None  # [H, K] or [H]
    strength: Tensor | None  # [B, T, H], or beside erase [B, T, H, V], a logit
    erase: Tensor | None  # [B, T, H, K], a logit
    low_rank: tuple[Tensor, Tensor] | None  # a_key and b_key, [B, T, H, K]
    decay: Tensor | None  # [H], a constant log decay

    def log_decay(self) -> Tensor:
        rate = self.A_log.exp().view(-1, *[1] * (self.gate.dim() - 3))
        return LOWER_BOUND * torch.sigmoid(rate * (self.gate + self.dt_bias))


def with_cula(algorithm: str, x: Inputs) -> Tensor:
    """One call: q and k are normalised in it, and the gate and the write strength made where it can."""
    family = cula.algorithms()[algorithm]
    options = {"use_qk_l2norm_in_kernel": True}
    if x.strength is not None:
        options |= {"beta": x.strength, "use_beta_sigmoid_in_kernel": True}
    if x.erase is not None:
        options["erase"] = x.erase
    if x.low_rank is not None:
        options["a_key"], options["b_key"] = x.low_rank
    if x.decay is not None:
        options["decay"] = x.decay
    if family.takes_several_writes:
        options["g"] = None
    if x.gate is not None and (family.takes_beta or family.takes_low_rank):
        options |= {"g": x.gate, "A_log": x.A_log, "dt_bias": x.dt_bias}
        options |= {"use_gate_in_kernel": True, "lower_bound": LOWER_BOUND}
    elif x.gate is not None:
        options["g"] = x.log_decay()
    o, _ = getattr(cula, f"cula_{family.mode}")(x.q, x.k, x.v, **options)
    return o


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def by_write(x: Tensor, writes: int, at: int) -> Tensor:
    """What tokens have, in one row for each write: row `at` of a token has it, and the others zeros."""
    rows = [torch.zeros_like(x)] * writes
    rows[at] = x
    return torch.stack(rows, 2).flatten(1, 2)


def with_pytorch(_: str, x: Inputs) -> Tensor:
    """The same, operation by operation."""
    q, k = (unit(each.float()) for each in (x.q, x.k))
    if x.gate is not None:
        g = x.log_decay()
    else:
        g = q.new_zeros(q.shape[:3]) if x.decay is None else x.decay.expand(q.shape[:3])
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    if (writes := k.shape[1] // q.shape[1]) > 1:  # a token decays with its first row and reads with its last
        q, g = by_write(q, writes, -1), by_write(g, writes, 0)
        o = eager.attention(q, k, x.v, g, x.strength.sigmoid().unsqueeze(-1))
        return o[:, writes - 1 :: writes]
    if x.low_rank is not None:
        return eager.low_rank(q, k, x.v, g, *x.low_rank)
    if x.strength is None:
        return eager.attention(q, k, x.v, g, None)
    beta = x.strength.sigmoid()
    if x.erase is None:
        return eager.attention(q, k, x.v, g, beta.unsqueeze(-1))
    return eager.attention(q, k, x.v, g, beta, x.erase.sigmoid())


FORMS: dict[str, Callable[[str, Inputs], Tensor]] = {"cula": with_cula, "PyTorch": with_pytorch}


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    dtype: torch.dtype  # of q, k and v

    @property
    def heads(self) -> int:
        return self.width // HEAD_DIM


class Layer(nn.Module):
    """A convolution, linear attention and a perceptron."""

    def __init__(self, algorithm: str, shape: Shape) -> None:
        super().__init__()
        family, width, heads = cula.algorithms()[algorithm], shape.width, shape.heads
        self.algorithm, self.shape = algorithm, shape
        self.attend = with_cula
        self.mix = nn.Conv1d(width, width, TAPS, groups=width, padding=TAPS - 1)
        self.writes = WRITES if family.takes_several_writes else 1
        self.qkv = nn.Linear(width, (1 + 2 * self.writes) * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        # Heads forget at different speeds: half-lives from about 16 to 4096 bytes.
        rate = 2.0 ** -torch.linspace(4.5, 12.5, heads)
        self.gate = self.strength = self.erase = self.A_log = self.dt_bias = None
        if family.decay in ("channel", "token"):
            bias = torch.logit(-rate / LOWER_BOUND)
            if family.decay == "channel":
                bias = bias[:, None].repeat(1, HEAD_DIM)
            self.gate = nn.Linear(width, bias.numel(), bias=False)
            self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(bias)
        self.decay = nn.Buffer(-rate) if family.decay == "head" else None
        if family.takes_beta:
            self.strength = nn.Linear(width, width if family.takes_erase else heads * self.writes)
        if family.takes_erase:
            self.erase = nn.Linear(width, width)
        # RWKV-7 removes what lies along a direction, by a share of its own of each channel.
        removes = family.takes_low_rank
        self.removed = nn.Linear(width, width, bias=False) if removes else None
        self.share = nn.Linear(width, width) if removes else None

    def inputs(self, x: Tensor) -> Inputs:
        heads = self.shape.heads
        mixed = self.mix(x.mT)[..., : x.shape[1]].mT
        widths = [count * heads * HEAD_DIM for count in (1, self.writes, self.writes)]
        q, k, v = (
            part.unflatten(-1, (-1, heads, HEAD_DIM)).flatten(1, 2).to(self.shape.dtype)
            for part in self.qkv(mixed).split(widths, -1)
        )
        gate = None if self.gate is None else self.gate(x)
        if gate is not None and self.dt_bias.dim() == 2:
            gate = gate.unflatten(-1, (heads, -1))
        strength, erase = (None if each is None else each(x) for each in (self.strength, self.erase))
        if erase is not None:
            strength, erase = (each.unflatten(-1, (heads, -1)) for each in (strength, erase))
        elif strength is not None:
            strength = strength.unflatten(-1, (-1, heads)).flatten(1, 2)
        low_rank = None
        if self.removed is not None:
            along, share = (each(x).unflatten(-1, (heads, -1)) for each in (self.removed, self.share))
            along = unit(along)
            low_rank = -along, along * share.sigmoid()
        return Inputs(q, k, v, gate, self.A_log, self.dt_bias, strength, erase, low_rank, self.decay)

    def forward(self, x: Tensor) -> Tensor:
        o = self.attend(self.algorithm, self.inputs(rms_norm(x, x.shape[-1:])))
        x = x + self.output(rms_norm(o.float(), o.shape[-1:]).flatten(-2))
        return x + self.down(gelu(self.up(rms_norm(x, x.shape[-1:]))))


class Model(nn.Module):
    """Logits of the next byte, [B, T, 256], of text [B, T]."""

    def __init__(self, algorithm: str, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.layers = nn.Sequential(*(Layer(algorithm, shape) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.layers(self.embedding(text))
        return self.head(rms_norm(x, x.shape[-1:]))


@dataclass
class Run:
    """A model in training, and what was seen of it."""

    model: Model
    steps: int
    attend: Callable[[str, Inputs], Tensor]
    losses: list[float] = field(default_factory=list)  # nats per byte
    seconds: list[float] = field(default_factory=list)  # since the first step, of this model alone
    first_gradients: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.model.layers:
            layer.attend = self.attend
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step: int) -> float:
        """Up in a line, then down along a cosine to a tenth."""
        fall = 0.55 + 0.45 * math.cos(math.pi * min(1, step / self.steps))
        return fall * min(1, (step + 1) / WARM_UP)

    def step(self, batch: Tensor) -> None:
        with Clock(batch.device) as clock:
            logits = self.model(batch[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            if not self.losses:
                self.first_gradients = [each.grad.clone() for each in self.model.parameters()]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        self.seconds.append(clock.seconds + (self.seconds[-1] if self.seconds else 0))

    def last_loss(self) -> float:
        last = self.losses[-max(1, self.steps // 10) :]
        return sum(last) / len(last)

    def tokens_per_second(self, batch: Tensor) -> float:
        """Of whole steps: both directions and the optimizer; without the first, which warms up."""
        tokens = batch.shape[0] * (batch.shape[1] - 1)
        return tokens * (self.steps - 1) / (self.seconds[-1] - self.seconds[0])


def batches(steps: int, batch: int, length: int, random: torch.Generator) -> Tensor:
    """[steps, batch, length + 1]: pieces of the sources in any order, each once while there are enough."""
    text = b"".join(path.read_bytes() for path in sorted(source_files()))
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    pieces = pieces[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
    order = torch.randperm(len(pieces), generator=random, device="cpu")
    chosen = order[torch.arange(steps * batch, device="cpu") % len(order)]
    return pieces[chosen].view(steps, batch, length + 1).long()


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte that are left to a model which knows nothing but how frequent each byte is."""
    share = torch.bincount(text.flatten(), minlength=BYTES) / text.numel()
    return float(torch.special.entr(share).sum())


def train(runs: dict[str, Run], text: Tensor) -> None:
    """All in turns, so that whatever else the machine does slows all alike."""
    with tqdm(total=len(text), unit="step", leave=False) as bar:
        for batch in text:
            for run in runs.values():
                run.step(batch)
            bar.set_postfix({name: f"{run.losses[-1]:.3f}" for name, run in runs.items()})
            bar.update()


def checks(runs: dict[str, Run], shape: Shape, entropy: float) -> dict[str, list[tuple[float, float]]]:
    ours, plain = runs["cula"], runs["PyTorch"]
    # As one vector: gradients of biases and of A_log are sums over all tokens that may cancel, and then show
    # the rounding of their terms alone.
    apart = distance(*(torch.cat([x.flatten() for x in run.first_gradients]) for run in (ours, plain)))
    return {
        "first gradients agree, relative root mean square": [(apart, AGREEING[shape.dtype])],
        "last losses agree": [(abs(ours.last_loss() - plain.last_loss()), MARGIN)],
        "last losses are well below the entropy of the bytes": [
            (run.last_loss(), LEARNED * entropy) for run in runs.values()
        ],
    }


def smooth(values: list[float], over: int) -> list[float]:
    return [sum(values[max(0, i - over + 1) : i + 1]) / min(over, i + 1) for i in range(len(values))]


def draw(runs: dict[str, Run], text: Tensor, entropy: float, title: str, output: Path) -> None:
    """Losses against steps, where the curves lie on each other, and against time."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    looks = {"cula": {"color": "C0", "zorder": 3}, "PyTorch": {"color": "C1", "linewidth": 4, "alpha": 0.6}}
    for name, run in runs.items():
        label = f"{name}, {run.tokens_per_second(text[0]):,.0f} tokens/s"
        losses = smooth(run.losses, max(1, run.steps // 20))
        by_step.plot(losses, label=label, **looks[name])
        by_time.plot(run.seconds, losses, label=label, **looks[name])
    for axes, name in ((by_step, "step"), (by_time, "seconds")):
        axes.axhline(entropy, color="grey", linestyle=":", label="entropy of the bytes")
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    by_step.set_ylabel("loss (nats per byte)")
    by_time.legend()
    figure.suptitle(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def chosen_kernel(algorithm: str, pass_name: str, shape: Shape, device: torch.device) -> str | None:
    return cula.explain(
        algorithm, pass_name, device=device, dtype=shape.dtype, heads=shape.heads, key_dim=HEAD_DIM
    ).chosen


def pick_device(algorithm: str, shape: Shape) -> torch.device:
    """The GPU where there is one and the library has backward kernels for it."""
    gpu = torch.device("cuda")
    ready = torch.cuda.is_available() and chosen_kernel(algorithm, "backward", shape, gpu)
    return gpu if ready else torch.device("cpu")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--algorithm", choices=cula.algorithms(), default="kda", help="a member of the family (%(default)s)")
    add("--steps", type=int, default=350, help="of each model (%(default)s)")
    add("--batch", type=int, default=4, help="sequences of a step (%(default)s)")
    add("--length", type=int, default=512, help="bytes of a sequence (%(default)s)")
    add("--layers", type=int, default=2, help="of the model (%(default)s)")
    add("--width", type=int, default=128, help=f"of the model, a multiple of {HEAD_DIM} (%(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of q, k and v, others are float32 (%(default)s)")
    add("--output", type=Path, default=PICTURES / "train.png", help="the picture (%(default)s)")
    given = parser.parse_args()
    if given.steps < 2 or min(given.batch, given.length, given.layers, given.width) < 1:
        parser.error("--steps must be at least 2, and the other numbers at least 1")
    if given.width % HEAD_DIM:
        parser.error(f"--width must be a multiple of {HEAD_DIM}, got {given.width}")
    return given


def main() -> int:
    given = arguments()
    shape = Shape(given.layers, given.width, DTYPES[given.dtype])
    device = pick_device(given.algorithm, shape)
    torch.manual_seed(0)
    text = batches(given.steps, given.batch, given.length, torch.default_generator).to(device)
    entropy = unigram_entropy(text)
    first = Model(given.algorithm, shape).to(device)
    runs = {name: Run(deepcopy(first), given.steps, attend) for name, attend in FORMS.items()}
    size = sum(each.numel() for each in first.parameters())
    print(
        f"{given.algorithm}: {size:,} weights, {given.steps} steps of {given.batch} sequences of "
        f"{given.length} bytes, {given.dtype}, on {device}"
    )
    train(runs, text)

    title = f"Training {given.algorithm}: {shape.layers} layers of {shape.width}, {given.dtype} q, k and v"
    draw(runs, text, entropy, title, given.output)
    kernels = [chosen_kernel(given.algorithm, each, shape, device) for each in ("prefill", "backward")]
    names = {"cula": map(str, kernels), "PyTorch": ("operations", "autograd")}
    print_table(
        ("attention", "forward", "backward", "first loss", "last loss", "tokens/s", "seconds"),
        [
            (
                name,
                *names[name],
                f"{run.losses[0]:.4f}",
                f"{run.last_loss():.4f}",
                f"{run.tokens_per_second(text[0]):,.0f}",
                f"{run.seconds[-1]:.1f}",
            )
            for name, run in runs.items()
        ],
    )
    print("checks (found of allowed):")
    good = print_checks(checks(runs, shape, entropy))
    print(f"losses against steps and time: {given.output}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
