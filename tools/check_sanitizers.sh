#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The C++ tests under the address and undefined-behaviour sanitizers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

cmake --preset sanitize --log-level=WARNING >/dev/null
cmake --build --preset sanitize >/dev/null
log=build-sanitize/ctest.log
ctest --preset sanitize --parallel "$(nproc)" >"$log" 2>&1 || {
    cat "$log" >&2
    exit 1
}
echo "sanitizers: $(grep 'tests passed' "$log")"
