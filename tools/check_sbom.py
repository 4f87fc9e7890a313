#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_sbom.py WHEEL: the wheel lists what its library contains and loads (PEP 770), all of it and nothing
else, and has the licence texts of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBRARY = "cula/lib/libcula_torch.so"
TEXTS = (
    "LICENSE",
    "licenses/GCC.txt",
    "licenses/GCC-exception-3.1.txt",
    "licenses/GPL-3.txt",
    "licenses/NVIDIA-CUDA.txt",
    "licenses/NVIDIA-CUDA-EULA.txt",
    "licenses/PyTorch.txt",
)
# That of manylinux_2_28. The sources need a newer one, so a library that does not load it has parts inside.
OLD_LIBSTDCXX = 3, 4, 24


def read(library: bytes) -> tuple[set[str], bool, bool]:
    """The files that the library loads, and whether it has CUDA kernels, and parts of libstdc++."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(library)
        command = ["readelf", "--wide", "--dynamic", "--sections", "--version-info", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    versions = [tuple(map(int, each.split("."))) for each in re.findall(r"Name: GLIBCXX_([\d.]+)", text)]
    files = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    return files, " .nv_fatbin " in text, max(versions, default=()) <= OLD_LIBSTDCXX


def problems(
    document: dict, version: str, files: set[str], cuda: bool, parts_of_libstdcxx: bool = False
) -> list[str]:
    """Of a document for a library of this version that loads these files and has CUDA kernels, or has none;
    and parts of libstdc++, or none."""
    found = []
    if (document.get("bomFormat"), document.get("specVersion")) != ("CycloneDX", "1.6"):
        found.append("is no CycloneDX 1.6 document")
    if (listed := document["metadata"]["component"]["version"]) != version:
        found.append(f"is about version {listed}, not {version}")
    properties = {
        entry["name"]: {pair["name"].removeprefix("cula:"): pair["value"] for pair in entry["properties"]}
        for entry in document["components"]
    }
    dynamic = {
        file for each in properties.values() if each["linkage"] == "dynamic" for file in each["files"].split()
    }
    found += [f"does not list {file}, which the library loads" for file in sorted(files - dynamic)]
    contained = {name for name, each in properties.items() if each["linkage"] != "dynamic"}
    wanted = {"pytorch-headers"} | ({"cudart_static", "cuda-headers"} if cuda else set())
    wanted |= {"libstdc++-static"} if parts_of_libstdcxx else set()
    if contained != wanted:
        found.append(f"says that the library contains {sorted(contained)}, and not {sorted(wanted)}")
    if set(document["dependencies"][0]["dependsOn"]) != set(properties):
        found.append("has a component that is no dependency, or a dependency that is no component")
    return found


def main(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        folder = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        missing = [text for text in TEXTS if f"{folder}/licenses/{text}" not in names]
        if missing or f"{folder}/sboms/cula.cdx.json" not in names:
            sys.exit(f"check_sbom: {path.name} has no {', '.join(missing) or 'sboms/cula.cdx.json'}")
        document = json.loads(wheel.read(f"{folder}/sboms/cula.cdx.json"))
        library = wheel.read(LIBRARY)
    version = re.match(r"cula-([^-]+)\.dist-info", folder)[1]
    found = problems(document, version, *read(library))
    if found:
        sys.exit(f"check_sbom: {path.name}'s list\n  " + "\n  ".join(found))
    print(f"sbom: {path.name} lists {len(document['components'])} components, and has their licences")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
