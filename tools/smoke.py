# SPDX-License-Identifier: Apache-2.0
"""smoke.py PREFIX: the cula installed under PREFIX runs a prefill, and a decode that goes on from its
state."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import cula


def main(prefix: Path) -> None:
    assert Path(cula.__file__).is_relative_to(prefix), f"cula was imported from {cula.__file__}"
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    g, beta = -torch.rand(1, 9, 2, 16), torch.rand(1, 9, 2)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    whole, _ = cula.cula_kda(q, k, v, g, beta, **options)
    head = [x[:, :8].contiguous() for x in (q, k, v, g, beta)]
    _, state = cula.cula_kda(*head, **options)
    tail = [x[:, 8:].contiguous() for x in (q, k, v, g, beta)]
    last, _ = cula.cula_kda(*tail, initial_state=state, **options)
    torch.testing.assert_close(last, whole[:, 8:], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
