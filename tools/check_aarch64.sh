#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The C++ library compiles for aarch64 (nothing is run).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

cmake --preset aarch64 --log-level=WARNING -DCULA_WERROR=ON >/dev/null
cmake --build --preset aarch64 >/dev/null
functions=$(aarch64-linux-gnu-nm --defined-only --demangle build-aarch64/libcula.a | grep -c ' T cula::')
echo "aarch64: $functions functions"
