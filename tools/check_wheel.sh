#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheel builds with and without build isolation, holds what it should, and works in a clean environment.
# It is built for CPUs alone: with CUDA kernels it holds the library that check_symbols.py looks at.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
build=(wheel --no-deps --config-settings=cmake.define.CULA_CUDA=OFF)

# Isolation hides the installed PyTorch from the build; it must be found all the same, and no other be
# downloaded.
"${pip[@]}" "${build[@]}" --wheel-dir "$work/isolated" .
"${pip[@]}" "${build[@]}" --wheel-dir "$work" --no-build-isolation .
wheel=("$work"/cula-*.whl)

python=.venv/bin/python
expected='cula/([a-z_]+/)*[a-z_]+\.py|cula/py\.typed|cula/lib/(libcula_torch\.so|build_info\.json)'
expected+='|cula-[0-9.]+\.dist-info/.*'
for each in "${wheel[0]}" "$work"/isolated/cula-*.whl; do
    [[ $each == *-py3-none-* ]] || { echo "check_wheel: not for every Python: $each" >&2 && exit 1; }
    files=$("$python" -c 'import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' \
        "$each")
    unexpected=$(grep -vxE "$expected" <<<"$files" || true)
    [ -z "$unexpected" ] || { echo "check_wheel: $each should not hold $unexpected" >&2 && exit 1; }
    for file in libcula_torch.so build_info.json; do
        grep -qx "cula/lib/$file" <<<"$files" || { echo "check_wheel: no $file in $each" >&2 && exit 1; }
    done
    "$python" tools/check_sbom.py "$each"
done

# PyTorch is lent by .venv through its site-packages; cula comes from the wheel.
"$python" -m venv "$work/venv"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site" \
    >"$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
"$work/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps "${wheel[0]}"
PYTHONPATH='' "$work/venv/bin/python" tools/smoke.py "$work/venv"
(cd / && PYTHONPATH='' "$work/venv/bin/python" -m cula.bench --device cpu --quick --seconds 5 >/dev/null)

# An editable install's library lies apart from its sources, which this tree's own library may not stand in
# for. This one has its operators in a namespace of its own.
tree=$work/tree
mkdir "$tree"
git ls-files -z | xargs -0 cp --parents --target-directory="$tree"
"$work/venv/bin/python" -m pip --quiet --disable-pip-version-check uninstall --yes cula
(
    cd "$tree"
    "$work/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps \
        --no-build-isolation --config-settings=cmake.define.CULA_CUDA=OFF \
        --config-settings=cmake.define.CULA_NAMESPACE=cula_editable --editable .
)
(cd / && PYTHONPATH='' "$work/venv/bin/python" "$tree/tools/smoke.py" "$tree")
loaded=$(cd / && PYTHONPATH='' "$work/venv/bin/python" -m cula | grep '^loaded ')
[[ $loaded == *" $work/venv/"* ]] || { echo "check_wheel: an editable install has $loaded" >&2 && exit 1; }
(cd / && PYTHONPATH='' "$work/venv/bin/python" -c '
import cula, torch
assert cula.build_info().namespace == "cula_editable", cula.build_info().namespace
assert not hasattr(torch.ops.cula, "prefill") and hasattr(torch.ops.cula_editable, "prefill")')
echo "wheel: $(basename "${wheel[0]}"), $(du -k "${wheel[0]}" | cut -f1) KiB"
