#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every source names its licence in its first two lines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t sources < <(find CMakeLists.txt Makefile .ci bench bindings cmake examples include python src \
    tests tools -type f \( -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu' -o -name '*.py' \
    -o -name '*.sh' -o -name '*.cmake' -o -name '*.in' -o -name '*.map' -o -name CMakeLists.txt \
    -o -name Makefile -o -name run \) | sort)
bad=0
for file in "${sources[@]}"; do
    head -n 2 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || {
        echo "check_spdx: $file" >&2
        bad=1
    }
done
[ "$bad" -eq 0 ]
echo "spdx: ${#sources[@]} files"
