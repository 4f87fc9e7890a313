# SPDX-License-Identifier: Apache-2.0
"""examples/train.py: both of its forms train alike, and its checks tell where they do not."""

from __future__ import annotations

import importlib
from copy import deepcopy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--batch", "2", "--length", "100", "--layers", "1", "--width", "64")


@pytest.fixture(scope="module")
def train():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("train")


@pytest.fixture
def main(train, monkeypatch, tmp_path):
    """The program with small sizes: its exit code."""

    def call(*arguments: str) -> int:
        output = tmp_path / "made" / "train.png"
        monkeypatch.setattr("sys.argv", ["train.py", *SMALL, "--output", str(output), *arguments])
        code = train.main()
        assert output.read_bytes().startswith(b"\x89PNG")
        return code

    return call


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_forms_train_alike(train, algorithm, dtype):
    """100 tokens end within a chunk."""
    torch.manual_seed(0)
    shape = train.Shape(layers=2, width=128, dtype=train.DTYPES[dtype])
    text = torch.randint(97, 123, (3, 2, 101))
    first = train.Model(algorithm, shape)
    runs = {name: train.Run(deepcopy(first), len(text), attend) for name, attend in train.FORMS.items()}
    train.train(runs, text)
    gradients, losses, _ = train.checks(runs, shape, entropy=10.0).values()
    assert all(gradient.any() for gradient in runs["cula"].first_gradients)
    for found, allowed in (*gradients, *losses):
        assert found <= allowed


def test_the_program_succeeds_where_its_checks_hold(main, capsys):
    assert main("--steps", "200") == 0
    assert "FAIL" not in capsys.readouterr().out


def test_a_loss_that_does_not_fall_fails(main, capsys):
    assert main("--steps", "2") == 1
    printed = capsys.readouterr().out
    assert "FAIL last losses are well below" in printed
    assert "ok   first gradients agree" in printed


def test_forms_that_differ_fail(main, train, monkeypatch, capsys):
    right = train.eager.attention
    monkeypatch.setattr(train.eager, "attention", lambda q, k, v, g, *more: right(q, k, v, 0.9 * g, *more))
    assert main("--steps", "2") == 1
    assert "FAIL first gradients agree" in capsys.readouterr().out


def test_a_width_that_heads_do_not_divide_is_refused(main, capsys):
    with pytest.raises(SystemExit):
        main("--width", "100")
    assert "--width must be a multiple of 64, got 100" in capsys.readouterr().err
