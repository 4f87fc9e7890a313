#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_hub.py: what tools/hf_kernel.py writes is a kernel for the Hugging Face Hub.

The packages of the Hub (`kernels`, `kernel_abi_check`; requirements-wheel.txt) read its build.toml, import
its variant for CPUs beside the ordinary `cula`, put its layers in the place of transformers' functions, and
look at what its library needs of Python. kernel-builder itself needs Nix. In its place CMake compiles the
variant from what build.toml lists, with the definitions that kernel-builder adds, and PyTorch loads the
library, so that no headers of Python are needed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import tomllib

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build-hub"
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
sys.path.append(str(ROOT / ".venv" / "wheel"))  # behind the packages of the tests

NAME, REPOSITORY, ID = "other-name", "nobody/other-name", "_other_name_cpu_0123abc"

PROJECT = """\
cmake_minimum_required(VERSION 3.24)
project(variant LANGUAGES CXX)
add_library({ID} MODULE {sources})
set_target_properties({ID} PROPERTIES CXX_STANDARD 17 PREFIX "" SUFFIX .abi3.so)
target_compile_options({ID} PRIVATE -fno-gnu-unique)
target_compile_definitions({ID} PRIVATE CPU_KERNEL TORCH_EXTENSION_NAME={ID}
                           TORCH_TARGET_VERSION=0x020a000000000000)
target_include_directories({ID} SYSTEM PRIVATE "{torch}/include")
target_link_libraries({ID} PRIVATE "{torch}/lib/libtorch_cpu.so")
"""
SECTION = """
set_property(SOURCE {sources} PROPERTY INCLUDE_DIRECTORIES {include})
set_property(SOURCE {sources} APPEND PROPERTY COMPILE_OPTIONS "$<$<COMPILE_LANGUAGE:CXX>:{flags}>")
"""

OPS = """\
from pathlib import Path

import torch

torch.ops.load_library(Path(__file__).with_name("{ID}.abi3.so"))
ops = torch.ops.{ID}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{ID}::{{op_name}}"
"""


def write_project(build: dict) -> None:
    """A CMake project of the variant for CPUs."""
    import torch

    torch_dir = Path(torch.__file__).parent
    sections = [build["torch"], *(each for each in build["kernel"].values() if each["backend"] == "cpu")]
    lists = [" ".join(path for path in each["src"] if not path.endswith(".h")) for each in sections]
    text = PROJECT.format(ID=ID, sources=" ".join(lists), torch=torch_dir)
    for section, names in zip(sections, lists, strict=True):
        include = " ".join(f'"${{CMAKE_SOURCE_DIR}}/{each}"' for each in section["include"])
        text += SECTION.format(sources=names, include=include, flags=";".join(section["cxx-flags"]))
    (WORK / "CMakeLists.txt").write_text(text)
    (WORK / "torch-ext/registration.h").write_text("#define REGISTER_EXTENSION(name)\n")


def make_variant() -> Path:
    """Builds the variant, and returns its folder."""
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    configure = [
        "cmake",
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
        *launcher,
        "-S",
        WORK,
        "-B",
        WORK / "_build",
    ]
    environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT)}
    for command in (configure, ["cmake", "--build", WORK / "_build"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"check_hub: {done.stdout}{done.stderr}")
    variant = WORK / "build" / f"torch-stable-abi210-cpu-{platform.machine()}-linux"
    shutil.copytree(WORK / "torch-ext" / NAME.replace("-", "_"), variant)
    shutil.copy(WORK / "_build" / f"{ID}.abi3.so", variant)
    (variant / "_ops.py").write_text(OPS.format(ID=ID))
    metadata = {
        "name": NAME, "id": ID, "version": 1, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cpu"},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return variant


def check_library(library: Path) -> None:
    from kernel_abi_check import ObjectFile

    if found := ObjectFile(library).check_python_abi("3.9"):
        sys.exit(f"check_hub: {library.name} uses of Python {found}")


def inputs(name: str, dtype: object) -> tuple[list, dict]:
    """Of a layer: what has gradients, and the rest."""
    import torch

    heads, gate = (4, (4, 32)) if "kimi" in name else (2, (4,))
    q, k = (torch.randn(2, 70, heads, 32, dtype=dtype) for _ in range(2))
    g, beta = -torch.rand(2, 70, *gate), torch.rand(2, 70, 4)
    tensors = [q, k, torch.randn(2, 70, 4, 48, dtype=dtype), g, beta, torch.randn(2, 4, 32, 48)]
    return [x.requires_grad_() for x in tensors], {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def results(function: object, tensors: list, named: dict) -> list:
    """o, the final state, and the gradients of both with fixed weights."""
    import torch

    q, k, v, g, beta, state = tensors
    o, final_state = function(q, k, v, g=g, beta=beta, initial_state=state, **named)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in (o, final_state)]
    return [o, final_state, *torch.autograd.grad((o, final_state), tensors, weights)]


def check_layers(kernel: ModuleType) -> None:
    """Each layer gives, bit for bit, what the ordinary package gives, and so it does in the place of
    transformers' function, compiled."""
    import kernels
    import torch
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    import cula.gdn
    import cula.kda

    layers = {
        "chunk_gated_delta_rule": (cula.gdn.chunk_gated_delta_rule, qwen.torch_chunk_gated_delta_rule),
        "recurrent_gated_delta_rule": (
            cula.gdn.fused_recurrent_gated_delta_rule,
            qwen.torch_recurrent_gated_delta_rule,
        ),
        "chunk_kimi_delta_attention": (cula.kda.chunk_kda, kimi.chunk_kimi_delta_attention),
        "recurrent_kimi_delta_attention": (cula.kda.fused_recurrent_kda, kimi.recurrent_kimi_delta_attention),
    }
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    for name, (ours, theirs) in layers.items():
        repository = kernels.LocalLayerRepository(WORK / "build", layer_name=name)
        replaced = kernels.use_kernel_forward_from_hub(name)(theirs)
        with kernels.use_kernel_mapping({name: {"cpu": repository}}, inherit_mapping=False):
            kernels.kernelize(replaced, mode=mode, device="cpu", use_fallback=False)
        compiled = torch.compile(replaced, fullgraph=True, backend="aot_eager")
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            tensors, named = inputs(name, dtype)
            expected = results(ours, tensors, named)
            for function in (getattr(kernel.layers, name)(), replaced, compiled):
                for got, wanted in zip(results(function, tensors, named), expected, strict=True):
                    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def run_tests() -> None:
    """The repository's own, as kernel-builder's shells run them."""
    (WORK / "pytest.ini").write_text("[pytest]\nmarkers =\n    kernels_ci: of the Hub's\n")
    path = os.pathsep.join([str(ROOT / ".venv" / "wheel"), os.environ.get("PYTHONPATH", "")])
    # A kernel registers with no project, whatever an installed cula is told.
    switches = {"CULA_FLA": "1", "CULA_TRANSFORMERS": "1"}
    local = {"LOCAL_KERNELS": f"{REPOSITORY}={WORK / 'build'}", "PYTHONPATH": path}
    environment = {**os.environ, **switches, **local}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", WORK / "tests"]
    done = subprocess.run(command, cwd=WORK, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"check_hub: {done.stdout}{done.stderr}")


def main() -> None:
    import kernels

    import cula
    import hf_kernel

    shutil.rmtree(WORK, ignore_errors=True)
    hf_kernel.main([str(WORK), "--name", NAME, "--version", "1", "--repo-id", REPOSITORY])
    kernels._rust.Build.open(WORK)  # raises where it is not as the Hub's schema says
    write_project(tomllib.loads((WORK / "build.toml").read_text()))
    variant = make_variant()
    check_library(variant / f"{ID}.abi3.so")
    kernel = kernels.get_local_kernel(WORK / "build", backend="cpu")
    if (info := kernel.build_info()).namespace != ID or cula.build_info().namespace == ID:
        sys.exit(f"check_hub: {info.namespace} and {cula.build_info().namespace}")
    check_layers(kernel)
    run_tests()
    print(
        f"hub: {len(kernel.layers.__all__)} layers of a kernel for the Hub, forward and backward, beside cula"
    )


if __name__ == "__main__":
    main()
