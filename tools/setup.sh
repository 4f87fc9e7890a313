#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh build|test|ci: makes this machine ready for it. Installs the missing system packages (where it may; else says
# which) and keeps .venv in step with the pinned requirements. Quick when there is nothing to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

purpose=${1:?usage: setup.sh build|test|ci}
python=${PYTHON:-python3}

have() { command -v "$1" >/dev/null 2>&1; }

# The Debian and Ubuntu packages that provide what is not here yet.
missing_packages() {
    have "${CXX:-g++}" || echo g++
    have "$python" || echo python3
    "$python" -c 'import ensurepip, venv' 2>/dev/null || [ -x .venv/bin/pip ] || echo python3-venv
    [ "$purpose" = build ] && return
    have ccache || echo ccache
    echo '#include <gtest/gtest.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1 || echo libgtest-dev
    [ "$purpose" = test ] && return
    have aarch64-linux-gnu-g++ || echo g++-aarch64-linux-gnu
    have git || echo git
}

install_packages() {
    local root=()
    if [ "$(id -u)" -ne 0 ]; then
        if have sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
            root=(sudo)
        else
            root=(false)
        fi
    fi
    if ! have apt-get || [ "${root[*]}" = false ]; then
        echo "cula: these system packages are missing, and this user may not install them: $*" >&2
        echo "cula: ask an administrator to run: apt-get install $* (or your distribution's packages of that name)" >&2
        exit 1
    fi
    echo "cula: installing system packages: $*"
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Pins are installed once per content of their file.
install_requirements() {
    local file=$1 stamp
    stamp=.venv/$(basename "$file" .txt).sha256
    sha256sum --check --quiet "$stamp" 2>/dev/null && return
    echo "cula: installing $file into .venv"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --requirement "$file"
    sha256sum "$file" >"$stamp"
}

mapfile -t packages < <(missing_packages)
[ "${#packages[@]}" -eq 0 ] || install_packages "${packages[@]}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "cula: the pinned requirements need Python 3.11 or newer, and $python is $("$python" --version)." >&2
    echo "cula: set PYTHON to a newer one." >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# A plain `torch` elsewhere in a dependency tree would fetch the newest one, so the pinned one comes before all others.
.venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$(grep '^torch==' requirements.txt)"
install_requirements requirements.txt
[ "$purpose" = build ] || install_requirements requirements-dev.txt
