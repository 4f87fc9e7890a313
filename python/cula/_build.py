# SPDX-License-Identifier: Apache-2.0
"""What the loaded library was built from, with and for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ._library import INFO

_PASSES = ("prefill", "decode", "verify", "segment", "backward")


@dataclass(frozen=True, repr=False)
class BuildInfo:
    """What the loaded library was built from, with and for. Prints as a table.

    version: the sources' version; source: their commit, with a + behind it where files differed, or None
        outside a clone.
    namespace: where its operators are, `torch.ops.<namespace>`.
    torch_target: the oldest PyTorch whose stable ABI the library needs; torch_headers: the one it was built
        with.
    compiler, cuda_compiler: name and version; the second is None in a build for CPUs alone.
    cuda_architectures: those with machine code, as CMake writes them; empty in a build for CPUs alone.
    without_cuda: why there are no CUDA kernels, or None where there are.
    targets: the kernels' names, in order of preference; whether this machine runs one, `cula.explain` says.
    """

    version: str
    source: str | None
    namespace: str
    build_type: str | None
    processor: str | None
    compiler: str | None
    torch_target: str | None
    torch_headers: str | None
    cuda_compiler: str | None
    cuda_architectures: tuple[str, ...]
    without_cuda: str | None
    targets: tuple[str, ...]

    @property
    def cuda(self) -> bool:
        """Whether the library has CUDA kernels."""
        return self.without_cuda is None

    def __repr__(self) -> str:
        rows = {
            "version": self.version,
            "source": self.source or "not in a clone",
            "built for": self.processor,
            "compiler": f"{self.compiler}, {self.build_type}",
            "torch": f"any from {self.torch_target} on; headers of {self.torch_headers}",
            "CUDA": f"{', '.join(self.cuda_architectures)} by {self.cuda_compiler}"
            if self.cuda
            else self.note(),
            "targets": ", ".join(self.targets),
        }
        return "\n".join(f"{name:9} {value}" for name, value in rows.items())

    def note(self) -> str:
        """What a build without CUDA kernels says to whom asks it for one."""
        return (
            f"this build of cula has no CUDA kernels ({self.without_cuda}); to get them, build it "
            "where nvcc >= 12.8 is with CULA_CUDA=ON in the environment: `pip install .`, or `make cuda`, "
            "which brings an nvcc"
        )


@functools.cache
def build_info() -> BuildInfo:
    """What the loaded library was built from, with and for: with CUDA kernels or not, for which
    architectures, by which compilers; and the names of its targets."""
    from ._explain import explain  # which imports this module

    words = dict(INFO)
    version, namespace = words.pop("version"), words.pop("namespace")
    architectures = tuple(words.pop("cuda_architectures").split())
    rows = [row for name in _PASSES for row in explain(pass_name=name, device="cpu")]
    targets = tuple(dict.fromkeys(row.target for row in rows))
    return BuildInfo(
        version=version,
        namespace=namespace,
        cuda_architectures=architectures,
        targets=targets,
        **{name: text or None for name, text in words.items()},
    )
