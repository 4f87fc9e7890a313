# SPDX-License-Identifier: Apache-2.0
# Every target starts from a fresh Debian or Ubuntu machine: tools/setup.sh installs what is missing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONPATH := $(CURDIR)/python
JOBS ?= $(shell nproc)

configure = cmake --preset release --log-level=WARNING -DCULA_TORCH=ON $(1) >/dev/null

.PHONY: help build demo test bench format lint wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## the library and the PyTorch operators
	@tools/setup.sh build
	@$(call configure)
	@cmake --build build --target cula_torch --parallel $(JOBS)

demo: build  ## linear attention on real text, with a table and a plot
	@python examples/demo.py

test:  ## every test: C++, then Python
	@tools/setup.sh test
	@$(call configure,-DCULA_TESTS=ON -DCULA_WERROR=ON)
	@cmake --build build --parallel $(JOBS)
	@ctest --test-dir build --output-on-failure --parallel $(JOBS)
	@python -m pytest -n $(JOBS) $(PYTEST_ARGS)

bench: build  ## the CPU benchmark
	@python -m bench $(BENCH_ARGS)

format:  ## rewrite the sources in the project's style
	@tools/setup.sh test
	@tools/check_format.sh --fix

lint:  ## the checks of .ci/run that need no build of their own
	@tools/setup.sh test
	@$(call configure,-DCULA_TESTS=ON)
	@tools/check_format.sh
	@tools/check_tidy.sh

wheel:  ## dist/cula-*.whl
	@tools/setup.sh test
	@python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean:  ## remove what was built (.venv stays)
	@rm -rf build dist python/cula/lib
