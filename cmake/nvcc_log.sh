#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nvcc_log.sh COMPILER ARGUMENT...: compiles. What the compiler says goes into OBJECT.log, and is shown but
# for ptxas's report on every kernel. This stands before ccache, which repeats what was said when it has the
# object already.
set -uo pipefail

# Preprocessed, a source shows one of its architectures: ccache would miss a change that others see.
export CCACHE_DEPEND=1

object=
for ((i = 1; i < $#; ++i)); do
    if [ "${!i}" = -o ]; then
        next=$((i + 1))
        object=${!next}
    fi
done
[ -n "$object" ] || exec "$@"

rm -f "$object.log"
log=$("$@" 2>&1)
status=$?
grep -vE '^(ptxas info .*| +[0-9]+ bytes (stack frame|cumulative stack).*|)$' >&2 <<<"$log"
[ "$status" -ne 0 ] || printf '%s\n' "$log" >"$object.log"
exit "$status"
