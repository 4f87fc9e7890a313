# SPDX-License-Identifier: Apache-2.0
# Every target starts from a fresh Debian or Ubuntu machine: tools/setup.sh installs what is missing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/python
# What one clone compiled serves another.
export CCACHE_BASEDIR := $(CURDIR)
JOBS ?= $(shell nproc)

# cmake/CulaCuda.cmake decides whether CUDA kernels are built, unless CULA_CUDA says it. `make cuda` builds
# them anyway. What was asked for once holds for the build directory from then on.
cuda = $(if $(CULA_CUDA),-DCULA_CUDA=$(CULA_CUDA))
configure = cmake --preset release --log-level=WARNING -DCULA_TORCH=ON $(cuda) $(1) $(CMAKE_ARGS) >/dev/null
has_gpu = nvidia-smi -L >/dev/null 2>&1

.PHONY: help build demo test bench cuda gpu gpu-test gpu-sanitize gpu-bench format lint wheel site clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## the library and the PyTorch operators
	@tools/setup.sh build
	@$(call configure)
	@cmake --build build --target cula_torch --parallel $(JOBS)

demo: build  ## linear attention reads real text, then trains on it: tables and plots
	@python examples/demo.py
	@echo
	@python examples/train.py --steps 60

test:  ## every test: C++, then Python
	@tools/setup.sh test
	@$(call configure,-DCULA_TESTS=ON -DCULA_WERROR=ON)
	@cmake --build build --parallel $(JOBS)
	@ctest --test-dir build --output-on-failure --parallel $(JOBS)
	@python -m pytest -n $(JOBS) $(PYTEST_ARGS)

bench: build  ## the CPU benchmark
	@python -m bench $(BENCH_ARGS)

cuda:  ## build with the CUDA kernels, which needs nvcc but no GPU
	@tools/setup.sh cuda
	@$(call configure,-DCULA_CUDA=ON)
	@cmake --build build --target cula_torch --parallel $(JOBS)

gpu:
	@$(has_gpu) || { echo 'cula: no NVIDIA GPU here: nvidia-smi -L lists none' >&2; exit 1; }
	@$(MAKE) --no-print-directory cuda
	@tools/setup.sh test

gpu-test: gpu  ## every test on the GPU; the figures go into bench/results
	@python tests/gpu/run.py test

gpu-sanitize: gpu  ## small cases under compute-sanitizer; likewise
	@python tests/gpu/run.py sanitize

gpu-bench: gpu  ## the GPU benchmark, with every peer that can be imported; likewise
	@python -m bench --suite gpu $(BENCH_ARGS)

format:  ## rewrite the sources in the project's style
	@tools/setup.sh test
	@tools/check_format.sh --fix

lint:  ## the checks of .ci/run that need no build of their own
	@tools/setup.sh test
	@$(call configure,-DCULA_TESTS=ON)
	@tools/check_format.sh
	@mypy
	@tools/check_tidy.sh

wheel:  ## what is released: a manylinux wheel with CPU and CUDA kernels, and an sdist, in dist
	@tools/setup.sh wheel
	@CULA_CUDA=$${CULA_CUDA:-ON} tools/make_wheel.sh dist

site: build  ## the documentation as a site, build-site/html/index.html; its links are checked
	@tools/setup.sh site
	@python tools/make_site.py

clean:  ## remove what was built (.venv stays)
	@rm -rf build build-* dist python/cula/lib
