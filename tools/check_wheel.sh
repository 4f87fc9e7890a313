#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheel builds with and without build isolation, holds what it should, and works in a clean environment. It is built
# for CPUs alone: with CUDA kernels it holds the library that check_symbols.py looks at.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
build=(wheel --no-deps --config-settings=cmake.define.CULA_CUDA=OFF)

# Isolation hides the installed PyTorch from the build; it must be found all the same, and no other be downloaded.
"${pip[@]}" "${build[@]}" --wheel-dir "$work/isolated" .
"${pip[@]}" "${build[@]}" --wheel-dir "$work" --no-build-isolation .
wheel=("$work"/cula-*.whl)

python=.venv/bin/python
expected='cula/([a-z_]+/)*[a-z_]+\.py|cula/py\.typed|cula/lib/libcula_torch\.so|cula-[0-9.]+\.dist-info/.*'
for each in "${wheel[0]}" "$work"/isolated/cula-*.whl; do
    [[ $each == *-py3-none-* ]] || { echo "check_wheel: not for every Python: $each" >&2 && exit 1; }
    files=$("$python" -c 'import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' "$each")
    unexpected=$(grep -vxE "$expected" <<<"$files" || true)
    [ -z "$unexpected" ] || { echo "check_wheel: $each should not hold $unexpected" >&2 && exit 1; }
    grep -qx 'cula/lib/libcula_torch\.so' <<<"$files" || { echo "check_wheel: no operators in $each" >&2 && exit 1; }
done

# PyTorch is lent by .venv through its site-packages; cula comes from the wheel.
"$python" -m venv "$work/venv"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" >"$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
"$work/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps "${wheel[0]}"
PYTHONPATH='' "$work/venv/bin/python" tools/smoke.py "$work/venv"
echo "wheel: $(basename "${wheel[0]}"), $(du -k "${wheel[0]}" | cut -f1) KiB"
