# SPDX-License-Identifier: Apache-2.0
"""The gate on a wheel's list of what it contains."""

from __future__ import annotations

import copy

import pytest

from check_sbom import problems


def component(name: str, linkage: str, files: str = "") -> dict:
    properties = [{"name": "cula:linkage", "value": linkage}, {"name": "cula:files", "value": files}]
    return {"name": name, "properties": properties}


COMPONENTS = [component("pytorch-headers", "headers"), component("glibc", "dynamic", "libc.so.6 libm.so.6")]
CUDA = [component("cudart_static", "static"), component("cuda-headers", "headers")]


def document(components: list[dict]) -> dict:
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": {"version": "1.0"}},
        "components": components,
        "dependencies": [{"dependsOn": [each["name"] for each in components]}],
    }


def test_a_whole_list_is_accepted():
    assert problems(document(COMPONENTS), "1.0", {"libc.so.6"}, cuda=False) == []
    assert problems(document(COMPONENTS + CUDA), "1.0", {"libc.so.6"}, cuda=True) == []
    parts = [component("libstdc++-static", "static")]
    assert problems(document(COMPONENTS + parts), "1.0", set(), cuda=False, parts_of_libstdcxx=True) == []


@pytest.mark.parametrize(
    ("version", "files", "cuda", "words"),
    [
        ("1.1", set(), False, "about version 1.0, not 1.1"),
        ("1.0", {"libcudart.so.13"}, False, "does not list libcudart.so.13"),
        ("1.0", set(), True, "contains ['pytorch-headers'], and not"),
    ],
)
def test_what_is_missing_is_named(version, files, cuda, words):
    found = problems(document(COMPONENTS), version, files, cuda)
    assert len(found) == 1
    assert words in found[0]


def test_what_is_too_much_is_named():
    assert "contains" in problems(document(COMPONENTS + CUDA), "1.0", set(), cuda=False)[0]
    assert "libstdc++-static" in problems(document(COMPONENTS), "1.0", set(), False, True)[0]
    lost = copy.deepcopy(document(COMPONENTS))
    lost["dependencies"][0]["dependsOn"].pop()
    assert "no dependency" in problems(lost, "1.0", set(), cuda=False)[0]
