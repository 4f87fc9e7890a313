#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_tidy.sh [BUILD]: clang-tidy (.clang-tidy) on the host code; on that of src/cuda where BUILD has it.
# The kernels of src/cpu/isa.cc speak GCC's vectors, and the compiler's warnings are the build's business
# (-w).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$PWD/${1:-build}

log=$build/tidy.log
tidy=(.venv/bin/clang-tidy --quiet --warnings-as-errors='*' --extra-arg=-w -p "$build")
skip=(-name isa.cc -o -path '*/consumer/*')
grep -q '/src/cuda/device.cc' "$build/compile_commands.json" || skip+=(-o -path 'src/cuda/*')
mapfile -t sources < <(find src bindings tests/cpp -name '*.cc' -not \( "${skip[@]}" \) | sort)
printf '%s\n' "${sources[@]}" |
    xargs -P "$(nproc)" -I {} "${tidy[@]}" {} >"$log" 2>&1 || {
    grep -E -A 3 'error:|warning:' "$log" >&2
    exit 1
}
without=''
[[ ${skip[*]} != *cuda* ]] || without=', without src/cuda: no CUDA toolkit'
echo "clang-tidy: ${#sources[@]} files$without"
