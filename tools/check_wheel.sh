#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What is released installs and works: the wheel, and the wheel that pip builds of the source distribution.
# Both are built for CPUs alone: with CUDA kernels they hold the library that check_symbols.py looks at. The
# tools and FLA come from where `tools/setup.sh ci` puts them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$PWD/.venv/bin/python
# Builds of one tree in two places share what was compiled: ccache sees paths from the build folder.
CCACHE_BASEDIR=$(dirname "$work")
export CCACHE_BASEDIR
options=(--config-settings=cmake.define.CULA_CUDA=OFF --config-settings=build-dir=build)
fail() { echo "check_wheel: $*" >&2 && exit 1; }

tools/make_wheel.sh "$work/dist" --config-settings=cmake.define.CULA_CUDA=OFF
wheel=$(echo "$work"/dist/cula-*.whl)

# The source distribution of a project that has an address. Isolation hides the installed PyTorch from the
# build; it must be found all the same, and no other be downloaded.
tree=$work/tree
mkdir "$tree"
git ls-files -z | xargs -0 cp --parents --target-directory="$tree"
echo 'repository-code: "https://example.org/cula"' >>"$tree/CITATION.cff"
(cd "$tree" && "$python" -c 'from scikit_build_core.build import build_sdist; build_sdist("..")' >/dev/null)
VIRTUAL_ENV=$PWD/.venv "$python" -m pip --quiet --disable-pip-version-check wheel --no-deps \
    "${options[@]}" --wheel-dir "$work/isolated" "$work"/cula-*.tar.gz

# Both source distributions hold what is built from, the one from this tree too, where a library was built; of
# the folders that pyproject.toml leaves out, only what the build runs.
kept=(ALGORITHM.md CHANGELOG.md CITATION.cff CMakeLists.txt CMakePresets.json LICENSE README.md bindings cmake
    include licenses pyproject.toml python src tools/old_runtime.py tools/package_metadata.py)
for each in "$work"/dist/cula-*.tar.gz "$work"/cula-*.tar.gz; do
    diff <({ echo PKG-INFO && git ls-files --cached --others --exclude-standard "${kept[@]}"; } | sort) \
        <(tar -tzf "$each" | cut --delimiter=/ --fields=2- | sort) ||
        fail "$each has not the files that it should have: < is missing, > too much"
done

expected='cula/([a-z_]+/)*[a-z0-9_]+\.py|cula/py\.typed|cula/lib/(libcula_torch\.so|build_info\.json)'
expected+='|cula\.pth|_cula_startup\.py|cula-[0-9.]+\.dist-info/.*'
for each in "$wheel" "$work"/isolated/cula-*.whl; do
    [[ $each == *-py3-none-* ]] || fail "not for every Python: $each"
    files=$("$python" -c 'import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' \
        "$each" | grep -v '/$')
    unexpected=$(grep -vxE "$expected" <<<"$files" || true)
    [ -z "$unexpected" ] || fail "$each should not hold $unexpected"
    for file in cula/lib/libcula_torch.so cula/lib/build_info.json cula.pth _cula_startup.py; do
        grep -qx "$file" <<<"$files" || fail "no $file in $each"
    done
    "$python" tools/check_sbom.py "$each"
done
"$python" -m zipfile -e "$work"/isolated/cula-*.whl "$work/unpacked"
metadata=$(cat "$work"/unpacked/cula-*.dist-info/METADATA)
for line in 'Project-URL: Homepage, https://example.org/cula' 'Provides-Extra: transformers' \
    '![prefill fixed, time against length](https://example.org/cula/raw/v'; do
    grep -qF "$line" <<<"$metadata" || fail "the metadata have no line $line"
done
! grep -E '\]\((docs|bench|CONTRIBUTING)' <<<"$metadata" || fail "the description has relative links"

# The Hub's checker judges what auditwheel did, by rules of its own.
"$python" -m zipfile -e "$wheel" "$work/repaired"
PYTHONPATH=.venv/wheel "$python" -c '
import sys, kernel_abi_check
library = kernel_abi_check.ObjectFile(sys.argv[1])
sys.exit([*library.check_manylinux("manylinux_2_28"), *library.check_python_abi("3.9")] or None)
' "$work/repaired/cula/lib/libcula_torch.so"

# An environment that has the wheel, and of .venv what it lends: PyTorch with what that needs, at first.
"$python" -m venv "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" tools/lend.py "$site" torch
"$work/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps "$wheel"
installed() {
    (cd / && PYTHONPATH='' "$work/venv/bin/python" -W 'ignore:Failed to initialize NumPy' "$@")
}
installed -c '
import importlib.util
found = [name for name in ("numpy", "transformers", "fla") if importlib.util.find_spec(name)]
assert not found, f"the environment is to be bare, and has {found}"'
installed "$tree/tools/smoke.py" "$work/venv" "$tree/README.md" >/dev/null
installed -m cula | grep "^loaded .* $work/venv/" >/dev/null ||
    fail "python -m cula loads another library"
installed -m cula.bench --device cpu --quick --seconds 5 >/dev/null
# A program that does not know of cula has it behind transformers and FLA, once they are there.
"$python" tools/lend.py "$site" transformers
echo "$PWD/.venv/fla" >"$site/fla.pth"
by_environment='import sys
import transformers, fla
for each in ("transformers", "fla"):
    assert f"cula.integrations.{each}" in sys.modules, f"CULA_{each.upper()}=1 does not register"
assert "dispatched" in sys.modules["cula.integrations.fla"].register().values()'
CULA_TRANSFORMERS=1 CULA_FLA=1 installed -W ignore -c "$by_environment"
installed -W ignore "$tree/tools/smoke.py" "$work/venv" "$tree/README.md" >/dev/null

# An editable install's library lies apart from its sources, which this tree's own library may not stand in
# for. This one has its operators in a namespace of its own.
"$work/venv/bin/python" -m pip --quiet --disable-pip-version-check uninstall --yes cula
mkdir "$work/backend"
"$python" tools/lend.py "$work/backend" scikit-build-core
(
    cd "$tree"
    PYTHONPATH=$work/backend "$work/venv/bin/python" -m pip --quiet --disable-pip-version-check install \
        --no-deps --no-build-isolation "${options[@]}" \
        --config-settings=cmake.define.CULA_NAMESPACE=cula_editable --editable .
)
installed -W ignore "$tree/tools/smoke.py" "$tree" "$tree/README.md" >/dev/null
installed -m cula | grep "^loaded .* $work/venv/" >/dev/null ||
    fail "an editable install loads another library"
CULA_TRANSFORMERS=1 CULA_FLA=1 installed -W ignore -c "$by_environment"
installed -c '
import cula, torch
assert cula.build_info().namespace == "cula_editable", cula.build_info().namespace
assert not hasattr(torch.ops.cula, "prefill") and hasattr(torch.ops.cula_editable, "prefill")'
echo "wheel: both install and work"
