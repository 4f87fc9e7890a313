#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lock.sh: writes requirements*.lock from requirements*.txt: every package that the pinned ones need, with the
# hash of each file that the index has of it. To be run where a pin changes; it takes minutes.
#
# PyTorch is left out. It comes with and without CUDA, from the index or from a file of the machine's, and its
# content is another each time, so tools/setup.sh installs it by its version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check pip-tools==7.6.2

# lock NAME CONSTRAINT...: what is pinned in a lock already keeps its version.
lock() {
    local name=$1 each
    shift
    for each in "$@"; do echo "-c $PWD/$each.lock"; done >"$work/$name.in"
    grep -v '^torch==' "$name.txt" >>"$work/$name.in"
    "$work/venv/bin/pip-compile" --quiet --generate-hashes --no-header --no-annotate --strip-extras \
        --allow-unsafe --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
        --output-file "$work/$name.lock" "$work/$name.in"
    {
        echo "# What $name.txt needs, with hashes: made by tools/lock.sh, installed by tools/setup.sh."
        cat "$work/$name.lock"
    } >"$name.lock"
    echo "lock: $(grep -c '==' "$name.lock") packages in $name.lock"
}

# without NAME OTHER...: leaves out of a lock what others have, for a folder that is read behind theirs.
without() {
    local each others=()
    for each in "${@:2}"; do others+=("$each.lock"); done
    awk -v own="$1.lock" '
        FNR == 1 { keep = 1 }
        /^[^ #]/ { split($1, part, "=="); keep = !(part[1] in locked) }
        FILENAME != own { locked[part[1]] }
        FILENAME == own && keep
    ' "${others[@]}" "$1.lock" >"$work/$1.lock"
    cp "$work/$1.lock" "$1.lock"
    echo "lock: $(grep -c '==' "$1.lock") packages stay in $1.lock"
}

lock requirements
lock requirements-dev requirements
lock requirements-fla requirements requirements-dev
without requirements-fla requirements requirements-dev
lock requirements-site requirements requirements-dev
lock requirements-cuda
lock requirements-wheel requirements requirements-dev requirements-site
