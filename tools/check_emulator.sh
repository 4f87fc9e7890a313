#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The CUDA kernels are right on a CPU (tests/emulator): several hundred random calls, the same on every day.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

tests/emulator/run.sh build/emulator "${1:-1}" | grep -v '^\['
