# SPDX-License-Identifier: Apache-2.0
"""smoke.py PREFIX README: the cula installed under PREFIX runs a prefill, and a decode that goes on from its
state; the README's Python; and the adapters of cula.integrations, where their project is."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import torch

import cula


def recurrence() -> None:
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


def adapters() -> None:
    """Each registers, or says which project it is for."""
    for name in sorted({*cula.integrations.__all__} - {"on_import"}):
        adapter = importlib.import_module(f"cula.integrations.{name}")
        if importlib.util.find_spec(name):
            adapter.register()
            adapter.unregister()
            continue
        try:
            adapter.register()
        except ImportError as error:
            if name not in str(error):
                raise
        else:
            raise AssertionError(f"cula.integrations.{name} registers with what is not here")


def main(prefix: Path, readme: Path) -> None:
    assert Path(cula.__file__).is_relative_to(prefix), f"cula was imported from {cula.__file__}"
    assert importlib.metadata.version("cula") == cula.__version__ == cula.build_info().version
    recurrence()
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{readme} shows no Python"
    for block in blocks:
        exec(block, {})
    adapters()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
