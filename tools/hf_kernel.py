#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""hf_kernel.py FOLDER: writes a source repository for Hugging Face's kernel-builder.

kernel-builder (huggingface/kernels, build.toml of edition 5) takes explicit lists of sources and knows
neither the CMake of this project nor its instances.txt. So the folder gets the sources, one file for each
instance, build.toml, and in torch-ext/ the package `cula` with layers for transformers (hub/).
`kernel-builder build` makes the variants of it; docs/releasing.md says how they are published.

What the lists hold is read from cmake/CulaCpu.cmake, cmake/CulaCuda.cmake and instances.txt: a new target or
instance needs no line here. kernel-builder hands flags to CMake as they are, so those of an instruction set
are a generator expression, which is empty on aarch64. (A pragma in the source would do without, and makes
GCC's code take up to 2.8 times as long.)
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.10"  # the stable ABI that bindings/torch/handles.h asks for
LEFT_OUT = ("lib", "integrations", "__main__.py", "py.typed", "__pycache__", "_library.py")
CXX_FLAGS = ("-std=c++20", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
# As cula_add_cpu_target has them, less the instruction set.
CPU_FLAGS = (*CXX_FLAGS, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions")
CUDA_FLAGS = ("-std=c++20", "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden")


def cpu_targets() -> dict[str, list[str]]:
    """The names of the CPU targets, and the flags of their instruction sets."""
    text = (ROOT / "cmake" / "CulaCpu.cmake").read_text()
    variables = {
        name: words.split() for name, words in re.findall(r"^ *set\((\w+) (-m[^)]*|\$[^)]*)\)", text, re.M)
    }

    def flags(words: Iterable[str]) -> list[str]:
        found = []
        for word in words:
            found += flags(variables[word[2:-1]]) if word.startswith("${") else [word]
        return found

    return {
        name: flags(words.split())
        for name, words in re.findall(r"^ *cula_add_cpu_target\((\w+) ?([^)]*)\)$", text, re.M)
    }


def cuda_targets() -> dict[str, list[str]]:
    """The folders of src/cuda that have instances, and the capabilities of each as build.toml writes them."""
    text = (ROOT / "cmake" / "CulaCuda.cmake").read_text()
    (portable,) = re.findall(r'set\(CULA_CUDA_ARCHITECTURES "([^"]+)"', text)
    (folders,) = re.findall(r"foreach\(folder IN ITEMS ([\w ]+)\)", text)
    own = dict(re.findall(r'cula_add_cuda_target\((\w+) "([^"$]+)"\)', text))
    return {
        folder: [capability(each) for each in own.get(folder, portable).split(";")]
        for folder in [*folders.split(), *own]
    }


def capability(architecture: str) -> str:
    """Of an architecture as CMake writes it: one without -real has PTX too."""
    number, major, letter, real = re.fullmatch(r"((\d+)\d)([af]?)(-real)?", architecture).groups()
    return f"{major}.{number[len(major) :]}{letter}{'' if real else '+PTX'}"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def sources(folder: Path) -> dict[str, list[str]]:
    """Copies the C++ and CUDA sources, writes one for each instance, and returns lists of them by section."""
    for name in ("include", "src", "bindings"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("instances.txt", "CMakeLists.txt")
        )
    # Included by a source for each target, and compiled nowhere else.
    (folder / "src/cpu/isa.cc").rename(folder / "src/cpu/isa.h")
    registry = folder / "src/registry.cc"
    reason = '#if defined(CPU_KERNEL)\n#define CULA_WITHOUT_CUDA "it is the variant for CPUs"\n#endif\n'
    registry.write_text(reason + registry.read_text())

    def found(*patterns: str) -> list[str]:
        paths = {path for pattern in patterns for path in folder.glob(pattern)}
        return sorted(str(path.relative_to(folder)) for path in paths)

    headers = found("include/cula/*.h", "src/core/*.h", "src/cpu/*.h", "src/reference/*.h")
    lists = {
        "torch": ["torch-ext/torch_binding.cpp", *found("bindings/torch/*"), *headers],
        "core": [
            *found("src/registry.cc", "src/core/*.cc", "src/reference/*.cc", "src/cpu/*entry.cc"),
            *headers,
        ],
        "cuda": [*found("src/cuda/*.cc", "src/cuda/*/*.cc", "src/cuda/**/*.h"), *headers],
    }
    for name, flags in cpu_targets().items():
        path = f"instances/cpu/{name}.cc"
        write(folder / path, cpu_source(name, flags))
        lists[f"cpu_{name}"] = [path, *headers]
    device = found("src/cuda/**/*.cuh", "src/cuda/**/*.h", "include/cula/*.h", "src/core/*.h")
    for name in cuda_targets():
        lists[name] = list(device)
        for line in (ROOT / f"src/cuda/{name}/instances.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                kernel, kind, key = line.split()
                path = f"instances/{name}/{kernel}_{kind}_{key}.cu"
                text = f'#include "cuda/{name}/{kernel}_instance.cuh"\nCULA_INSTANTIATE({kind}, {key})\n'
                write(folder / path, text)
                lists[name] = [path, *lists[name]]
    return lists


def cpu_source(name: str, flags: list[str]) -> str:
    """isa.cc for a target. Those of x86-64 are empty elsewhere."""
    body = f'#define CULA_CPU_TARGET {name}\n#include "cpu/isa.h"\n'
    return f"#if defined(__x86_64__)\n{body}#endif\n" if flags else body


def on_x86_64(flags: list[str]) -> list[str]:
    return [f"$<$<STREQUAL:${{CMAKE_SYSTEM_PROCESSOR}},x86_64>:{flag}>" for flag in flags]


def build_toml(
    name: str, version: int, repo_id: str | None, source: str | None, lists: dict[str, list[str]]
) -> str:
    """Strings and lists of them are written in TOML as in JSON."""

    def table(title: str, **entries: object) -> str:
        lines = [f"{key.replace('_', '-')} = {json.dumps(value, indent=2)}" for key, value in entries.items()]
        return "\n".join([f"[{title}]", *lines, ""])

    def kernel(title: str, backend: str, section: str, **entries: object) -> str:
        return table(
            f"kernel.{title}",
            backend=backend,
            depends=["torch"],
            include=["include", "src"],
            src=lists[section],
            **entries,
        )

    general: dict[str, object] = {"name": name, "version": version, "edition": 5, "license": "Apache-2.0"}
    general |= {"source": source} if source else {}
    tables = [table("general", **general, backends=["cpu", "cuda"])]
    tables += [table("general.hub", repo_id=repo_id)] if repo_id else []
    tables += [
        table("general.cuda", minver="12.8"),
        table(
            "torch", include=["include", "src"], src=lists["torch"],
            cxx_flags=[*CXX_FLAGS, "-DCULA_NAMESPACE=TORCH_EXTENSION_NAME"],
        ),
        table("torch.stable-abi", cpu=TORCH, cuda=TORCH),
        kernel("host_cuda", "cuda", "cuda", cxx_flags=[*CXX_FLAGS, "-DCULA_WITH_CUDA=1"]),
    ]  # fmt: skip
    for backend, definitions in (("cpu", []), ("cuda", ["-DCULA_WITH_CUDA=1"])):
        tables.append(kernel(f"core_{backend}", backend, "core", cxx_flags=[*CXX_FLAGS, *definitions]))
        for each, flags in cpu_targets().items():
            cxx_flags = [*CPU_FLAGS, *on_x86_64(flags)]
            tables.append(kernel(f"{each}_{backend}", backend, f"cpu_{each}", cxx_flags=cxx_flags))
    tables += [
        kernel(f"{each}_cuda", "cuda", each, cuda_capabilities=capabilities, cuda_flags=CUDA_FLAGS)
        for each, capabilities in cuda_targets().items()
    ]
    return "\n".join(tables)


def version() -> str:
    return re.search(r"project\(cula VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def commit() -> str:
    """The commit that is written, with + behind it where files differ; empty outside a clone."""
    git = ["git", "-C", str(ROOT)]
    if not (ROOT / ".git").exists():
        return ""
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run([*git, "diff-index", "--quiet", "HEAD", "--"], check=False).returncode
    return head + ("+" if changed else "")


def package(folder: Path, name: str) -> None:
    """torch-ext: the package, with what stands in hub/ around it."""
    extension = folder / "torch-ext"
    python = extension / name.replace("-", "_")
    shutil.copytree(ROOT / "python/cula", python / "_package", ignore=shutil.ignore_patterns(*LEFT_OUT))
    for source, target in {
        "__init__.py": python,
        "layers.py": python,
        "_library.py": python / "_package",
        "torch_binding.cpp": extension,
        "flake.nix": folder,
        "CARD.md": folder,
    }.items():
        shutil.copy(ROOT / "hub" / source, target)
    known = {"version": version(), "source": commit(), "torch_target": TORCH}
    text = '# SPDX-License-Identifier: Apache-2.0\n"""What this repository was written from."""\n\n'
    (python / "_package/_source.py").write_text(
        f"{text}SOURCE: dict[str, str] = {json.dumps(known, indent=4)}\n"
    )


def write_tests(folder: Path, repo_id: str, version: int) -> None:
    """What kernel-builder runs: they load the kernel by its name on the Hub."""
    text, count = re.subn(
        "^REPOSITORY, VERSION = .*$",
        f'REPOSITORY, VERSION = "{repo_id}", {version}',
        (ROOT / "hub/test_layers.py").read_text(),
        flags=re.MULTILINE,
    )
    if count != 1:
        sys.exit("hf_kernel: hub/test_layers.py has no line REPOSITORY, VERSION = ..")
    write(folder / "tests/test_layers.py", text)
    write(folder / "tests/__init__.py", "")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="is made; must not exist")
    parser.add_argument("--name", default="cula", help="the kernel's name, in letters, digits and dashes")
    parser.add_argument("--version", type=int, default=0, help="of its API on the Hub; 0 promises nothing")
    parser.add_argument(
        "--repo-id", help="owner/name of the repository that `kernel-builder upload` writes to"
    )
    parser.add_argument("--source", help="an address that `git clone` takes, of what this writes")
    given = parser.parse_args(arguments)
    if not re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", given.name):
        parser.error(f"--name must be small letters, digits and dashes, got {given.name}")
    if given.version < 0:
        parser.error(f"--version must be 0 or more, got {given.version}")
    if given.folder.exists():
        parser.error(f"{given.folder} is there already")
    given.folder.mkdir(parents=True)
    lists = sources(given.folder)
    write(
        given.folder / "build.toml", build_toml(given.name, given.version, given.repo_id, given.source, lists)
    )
    package(given.folder, given.name)
    write_tests(given.folder, given.repo_id or f"owner/{given.name}", given.version)
    for name in ("LICENSE", "licenses"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, given.folder / name)
    count = sum(len([path for path in each if path.startswith("instances/")]) for each in lists.values())
    print(f"hf_kernel: {given.folder} has {count} instances; `kernel-builder build` there builds it")


if __name__ == "__main__":
    main(sys.argv[1:])
