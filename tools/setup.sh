#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh build|cuda|wheel|test|site|ci: makes this machine ready for it. Installs missing system packages
# (where it may; else says which) and keeps .venv in step with the pinned requirements. Quick when there is
# nothing to do.
# CULA_INSTALL says whether system packages may be installed: yes, no, or ask. Left out, it is yes in CI
# (CI=true) and in containers, which are there for that, and ask elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

purpose=${1:?usage: setup.sh build|cuda|wheel|test|site|ci}
python=${PYTHON:-python3}

have() { command -v "$1" >/dev/null 2>&1; }

# The Debian and Ubuntu packages that provide what is not here yet.
missing_packages() {
    have "${CXX:-g++}" || echo g++
    have "$python" || echo python3
    "$python" -c 'import ensurepip, venv' 2>/dev/null || [ -x .venv/bin/pip ] || echo python3-venv
    case $purpose in build | wheel | site) return ;; esac
    have ccache || echo ccache
    [ "$purpose" = cuda ] && return
    echo '#include <gtest/gtest.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1 || echo libgtest-dev
    [ "$purpose" = test ] && return
    have aarch64-linux-gnu-g++ || echo g++-aarch64-linux-gnu
    have git || echo git
}

# A machine whose first process is no init system was started for one task.
in_container() {
    [ -e /.dockerenv ] || [ -e /run/.containerenv ] ||
        [ -n "${container:-}${KUBERNETES_SERVICE_HOST:-}" ] && return
    case $(cat /proc/1/comm 2>/dev/null) in
        '' | systemd | init | runit | openrc-init | dinit | s6-svscan | busybox) return 1 ;;
    esac
}

# Whether system packages may be installed, from CULA_INSTALL or by a question on the terminal.
may_install() {
    local mode=ask answer=
    if [ "${CI:-}" = true ] || in_container; then mode=yes; fi
    mode=${CULA_INSTALL:-$mode}
    case $mode in
        yes) return 0 ;;
        no) return 1 ;;
        ask) ;;
        *) echo "cula: CULA_INSTALL must be yes, no or ask, got $mode" >&2 && exit 1 ;;
    esac
    if [ ! -t 0 ] || [ ! -t 2 ]; then
        echo "cula: nobody can be asked here; CULA_INSTALL=yes lets it install them" >&2
        return 1
    fi
    read -r -p "cula: install the system packages $* with apt-get? [y/N] " answer
    [[ $answer == [yY]* ]]
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
        echo "cula: ask an administrator to run: apt-get install $*" \
            "(or your distribution's packages of that name)" >&2
        exit 1
    fi
    may_install "$@" || {
        echo "cula: these system packages are missing: run apt-get install $* first," \
            "or set CULA_INSTALL=yes" >&2
        exit 1
    }
    echo "cula: installing system packages: $*"
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "$@" >/dev/null
}

# install_requirements NAME OPTION...: what NAME.lock names, each file held to its hash; once per content of
# the lock.
install_requirements() {
    local lock=$1.lock stamp=.venv/$1.sha256
    sha256sum --check --quiet "$stamp" 2>/dev/null && return
    echo "cula: installing $lock into .venv"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps "${@:2}" \
        --requirement "$lock" && sha256sum "$lock" >"$stamp"
}

# An nvcc that knows the newest architectures, as cmake/CulaCuda.cmake looks for it.
have_nvcc() {
    local nvcc version
    for nvcc in "${CUDACXX:-}" nvcc /usr/local/cuda/bin/nvcc; do
        version=$("$nvcc" --version 2>/dev/null | grep -o 'release [0-9.]*') || continue
        printf '%s\n' 'release 12.8' "$version" | sort --check=quiet --version-sort && return
    done
    return 1
}

# Apart from the packages of a CUDA build of PyTorch, which pins its own versions of some.
install_nvcc() {
    local root=.venv/cuda
    install_requirements requirements-cuda --upgrade --target "$root" || {
        echo "cula: the CUDA kernels need nvcc >= 12.8; requirements-cuda.lock," \
            "which has it, cannot be installed" >&2
        exit 1
    }
    # The packages hold no links, and nvcc and CMake look for these names.
    ln -sfn lib "$root/nvidia/cu13/lib64"
    ln -sfn libcudart.so.13 "$root/nvidia/cu13/lib/libcudart.so"
}

mapfile -t packages < <(missing_packages)
[ "${#packages[@]}" -eq 0 ] || install_packages "${packages[@]}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "cula: the pinned requirements need Python 3.11 or newer, and $python is $("$python" --version)." >&2
    echo "cula: set PYTHON to a newer one." >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# PyTorch has no hash: a machine may have a build of its own, for its GPU or for none. Its packages come
# before the locks, which have the last word on those in both.
.venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$(grep '^torch==' requirements.txt)"
install_requirements requirements
case $purpose in wheel | test | ci) install_requirements requirements-dev ;; esac
case $purpose in test | ci) install_requirements requirements-fla --upgrade --target .venv/fla ;; esac
case $purpose in site | ci) install_requirements requirements-site ;; esac
case $purpose in wheel | ci) install_requirements requirements-wheel --upgrade --target .venv/wheel ;; esac
case $purpose in cuda | wheel | ci) have_nvcc || install_nvcc ;; esac
