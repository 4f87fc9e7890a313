#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The C++ tests under the address and undefined-behaviour sanitizers, and what threads do under the thread
# sanitizer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

# CPU targets whose instructions this machine lacks are linked, and never run.
not_run=
for target in avx2:avx2 avx512:avx512bw avx512bf16:avx512_bf16 amx:amx_bf16; do
    grep -qw "${target#*:}" /proc/cpuinfo || not_run+="${target%:*};"
done

cmake --preset sanitize --log-level=WARNING -DCULA_CPU_NOT_RUN="$not_run" >/dev/null
cmake --build --preset sanitize >/dev/null
log=build-sanitize/ctest.log
ctest --preset sanitize --parallel "$(nproc)" >"$log" 2>&1 || {
    cat "$log" >&2
    exit 1
}
echo "sanitizers: $(grep 'tests passed' "$log")"

# The thread sanitizer wants addresses as they are without randomization, which a container may not let it
# turn off.
fixed_addresses=(setarch "$(uname -m)" -R)
"${fixed_addresses[@]}" true 2>/dev/null || fixed_addresses=()
cmake --preset tsan --log-level=WARNING -DCULA_CPU_NOT_RUN="$not_run" >/dev/null
cmake --build --preset tsan --target races_test fuzz >/dev/null
log=build-tsan/races.log
for command in races_test "fuzz 200 2"; do
    read -ra words <<<"$command"
    TSAN_OPTIONS=halt_on_error=1 "${fixed_addresses[@]}" \
        "build-tsan/tests/cpp/${words[0]}" "${words[@]:1}" >"$log" 2>&1 || {
        cat "$log" >&2
        exit 1
    }
done
echo "thread sanitizer: races_test, and $(cat "$log")"
