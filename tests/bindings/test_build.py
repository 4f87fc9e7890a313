# SPDX-License-Identifier: Apache-2.0
"""What a build decides, what it says of itself, and where it is told."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cula
from cula import _explain, _ops
from cula_testing.process import run_python

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cpu_only("about the build")


def test_build_info():
    info = cula.build_info()
    assert (
        info.version
        == re.search(r"project\(cula VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    )
    assert info.torch_target == "2.10"
    assert "cpu:portable" in info.targets
    assert re.fullmatch(r"\w+ [0-9.]+", info.compiler)
    assert info.source is None or re.fullmatch(r"[0-9a-f]{40}\+?", info.source)
    on_gpus = any(target.startswith("sm") for target in info.targets)
    assert info.cuda == on_gpus == bool(info.cuda_architectures) == bool(info.cuda_compiler)
    assert (info.without_cuda is None) == on_gpus
    assert cula.build_info() is info


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "sm_90"])
def test_explain_says_that_a_build_has_no_cuda_kernels(monkeypatch, device):
    without = dataclasses.replace(cula.build_info(), without_cuda="no GPU was found where it was built")
    if cula.build_info().cuda:  # such a library asks the driver for the device, which may not be here
        rows = _ops.explain
        monkeypatch.setattr(
            _ops,
            "explain",
            lambda *names, **sizes: rows(*names[:2], "cpu" if names[2] == "cpu" else "sm_90", **sizes),
        )
    monkeypatch.setattr(_explain, "build_info", lambda: without)
    text = str(cula.explain(device=device))
    for words in ("no CUDA kernels (no GPU was found where it was built)", "CULA_CUDA=ON", "make cuda"):
        assert words in text
    assert "no CUDA kernels" in str(without)
    assert cula.explain(device="cpu").note == ""
    monkeypatch.setattr(_explain, "build_info", lambda: dataclasses.replace(without, without_cuda=None))
    assert "no CUDA kernels" not in str(cula.explain(device="sm_90"))


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError(
        "cula: device count: CUDA driver version is insufficient for CUDA runtime version\nmore"
    )


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_explain_of_a_device_without_a_driver(monkeypatch, device):
    """Where a build has CUDA kernels and the machine no driver, as the library says it; other errors stay."""
    monkeypatch.setattr(_ops, "explain", refuse)
    words = (
        r"device must be .* or an architecture such as sm_90.* "
        r"got cuda:\d \(CUDA driver version is insufficient"
    )
    with pytest.raises(ValueError, match=words):
        cula.explain(device=device)


def test_explain_of_no_device_of_this_machine():
    """A build with CUDA kernels and no GPU or driver names the argument; a build without them needs no
    device."""
    if not cula.build_info().cuda:
        assert "no CUDA kernels" in str(cula.explain(device="cuda:99"))
        return
    with pytest.raises((ValueError, RuntimeError), match="device"):
        cula.explain(device="cuda:99")


def test_python_m_cula():
    text = run_python("-m", "cula")
    for line in (
        "version",
        "source",
        "compiler",
        "CUDA",
        "targets",
        "loaded",
        "python",
        "PyTorch",
        "GPU",
        "on cpu",
    ):
        assert re.search(rf"^{line}\s", text, re.MULTILINE), text


def test_the_modules_of_other_projects_are_imported_with_the_package():
    run_python("-c", "import cula\nfor name in ('flash_kda', 'sglang', 'vllm'): getattr(cula.compat, name)")


def test_dist_is_imported_where_it_is_named():
    run_python(
        "-c",
        "import sys, cula\n"
        "assert 'cula.dist' not in sys.modules and 'dist' in dir(cula)\n"
        "assert cula.dist.cula_kda_cp is sys.modules['cula.dist'].cula_kda_cp\n",
    )
    with pytest.raises(AttributeError, match="module 'cula' has no attribute 'dits'"):
        cula.dits  # noqa: B018
    assert not {"version", "PackageNotFoundError"} & set(dir(cula))


def test_a_tree_without_a_library_says_what_to_do(tmp_path):
    (tmp_path / "cula").mkdir()
    for file in (ROOT / "python" / "cula").glob("*.py"):
        (tmp_path / "cula" / file.name).write_text(file.read_text())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import cula"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"there is no libcula_torch.so in {tmp_path / 'cula' / 'lib'}; install torch" in done.stderr


def configure(
    tmp_path: Path, *options: str, gpus: str = "", **environment: str
) -> subprocess.CompletedProcess:
    """CMake's configuration on a machine with these GPUs and, unless CUDACXX is named, no nvcc."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{f'echo {gpus!r}' if gpus else 'exit 9'}\n")
    tool.chmod(0o755)
    path = os.pathsep.join([str(tool.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "CUDACXX": "/nowhere/nvcc", "CULA_CUDA": "", **environment, "PATH": path}
    command = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(tmp_path / "build"),
        "-G",
        "Ninja",
        "-DCULA_TESTS=OFF",
        *options,
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("gpus", "environment", "words"),
    [
        ("", {}, "no GPU was found where it was built"),
        ("GPU 0: One", {}, "no nvcc >= 12.8 that works was found where it was built"),
        ("GPU 0: One", {"CULA_CUDA": "OFF"}, "it was built with CULA_CUDA=OFF"),
    ],
    ids=["no GPU", "no nvcc", "off"],
)
def test_a_build_for_cpus_alone_says_why(tmp_path, gpus, environment, words):
    done = configure(tmp_path, "-DCULA_TORCH=OFF", gpus=gpus, **environment)
    assert done.returncode == 0, done.stderr
    assert f"The CUDA kernels are not built: {words}" in done.stdout
    told = "This machine has a GPU, but no nvcc" in " ".join(done.stderr.split())
    assert told == ("nvcc" in words)


def test_cuda_that_was_asked_for_is_not_left_out(tmp_path):
    done = configure(tmp_path, "-DCULA_TORCH=OFF", CULA_CUDA="ON")
    assert done.returncode != 0
    assert "CULA_CUDA=ON needs nvcc >= 12.8" in done.stderr


def test_a_build_without_torch_says_what_to_do(tmp_path):
    done = configure(tmp_path, "-DCULA_TORCH=ON", "-DPython3_EXECUTABLE=/bin/false", VIRTUAL_ENV="/nowhere")
    assert done.returncode != 0
    assert "none was found: run 'pip install torch', then 'pip install .' again" in " ".join(
        done.stderr.split()
    )
