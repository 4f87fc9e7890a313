#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# make_wheel.sh FOLDER [OPTION...]: what is released. A source distribution, and a wheel for this CPU's
# architecture: for any Python, any PyTorch from 2.10 on, and any distribution with glibc 2.28 or later. On a
# machine with a newer glibc tools/old_runtime.py sees to the latter. OPTIONs are pip's, for the wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:?usage: make_wheel.sh FOLDER [OPTION...]}
platform=manylinux_2_28_$(uname -m)
most=$((100 * 1000 * 1000)) # bytes; what an index takes of a project that has not asked for more

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$PWD/.venv/bin/python
# On a wheel: auditwheel and twine with what they need (requirements-wheel.txt).
look() { PATH="$PWD/.venv/wheel/bin:$PATH" PYTHONPATH="$PWD/.venv/wheel" "$python" -m "$@"; }

"$python" -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' \
    "$work/dist" >"$work/log" || { cat "$work/log" >&2 && exit 1; }
"$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation \
    --config-settings=cmake.define.CULA_GLIBC=2.28 "${@:2}" --wheel-dir "$work" .
# PyTorch's library is that of the PyTorch it is used with.
look auditwheel repair --plat "$platform" --exclude libtorch.so --exclude libtorch_cpu.so \
    --wheel-dir "$work/dist" "$work"/cula-*.whl >"$work/log" 2>&1 || { cat "$work/log" >&2 && exit 1; }

wheel=$(echo "$work"/dist/cula-*.whl)
[[ $wheel == *-py3-none-*"$platform"* ]] || {
    echo "make_wheel: $(basename "$wheel") is not for any Python and $platform" >&2
    exit 1
}
bytes=$(stat --format=%s "$wheel")
((bytes <= most)) || {
    echo "make_wheel: $(basename "$wheel") has $bytes bytes, and may have $most" >&2
    exit 1
}
"$python" tools/check_sbom.py "$wheel"
look twine check --strict "$work"/dist/* >"$work/log" 2>&1 || { cat "$work/log" >&2 && exit 1; }

mkdir -p "$folder"
cp "$work"/dist/* "$folder"
echo "wheel: $(basename "$wheel"), $((bytes / 1024)) KiB, and a source distribution"
