# SPDX-License-Identifier: Apache-2.0
"""`python -m cula`: what is installed here, for a report of a problem."""

from __future__ import annotations

import platform

import torch

from . import build_info, explain
from ._library import library


def _gpus() -> str:
    if not torch.cuda.is_available():
        return f"none that torch {torch.__version__} can use"
    names = [
        f"{properties.name} (sm_{properties.major}{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB)"
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    return ", ".join(names)


def main() -> None:
    print(build_info())
    print(f"loaded    {library()}")
    print(f"python    {platform.python_version()}, {platform.platform()}")
    print(
        f"PyTorch   {torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"GPU       {_gpus()}")
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        chosen = {name: explain(pass_name=name, device=device).chosen for name in ("prefill", "decode")}
        print(
            f"on {device:6} "
            + ", ".join(f"KDA's {name} is {target or 'no kernel'}" for name, target in chosen.items())
        )


if __name__ == "__main__":
    main()
