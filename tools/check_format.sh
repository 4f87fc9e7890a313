#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_format.sh [--fix]: the sources are as clang-format and ruff write them, and ruff has nothing to say.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

mapfile -t cpp < <(find include src bindings tests examples \
    -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu' | sort)
if [ "${1:-}" = --fix ]; then
    clang-format -i "${cpp[@]}"
    ruff check --quiet --fix .
    ruff format --quiet .
else
    clang-format --dry-run -Werror "${cpp[@]}"
    ruff check --quiet .
    ruff format --quiet --check .
fi
echo "format: ${#cpp[@]} C++ and CUDA files, and Python"
