# Set up, train, check. `make help` lists the targets; everything lives in .venv and runs/.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
LOG := .venv/install.log

# Large downloads and the last phase are shown as they come; the whole of pip's words are kept in $(LOG).
define pip_install
@$(BIN)/python -m pip install --no-compile --disable-pip-version-check --progress-bar off -c constraints.txt $(1) 2>&1 \
  | tee -a $(LOG) \
  | awk '/^ *(Downloading|Using cached) .*[0-9][0-9][.0-9]* MB/ {print; fflush()} /^Installing/ {print "  installing"; fflush()}' \
  || { grep -v '^WARNING' $(LOG) | tail -n 30; echo "set-up failed; the whole log is in $(LOG)"; exit 1; }
endef

.PHONY: help venv train test lint format bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/.installed  ## set up .venv with the tested versions (a minute or two, about 2 GB)

# torch goes first, by itself and pinned: so that pip takes the build that this machine offers and resolves no other later.
# Byte code is made here, on all cores: a process of a run imports 2,000 files, and would otherwise read each as source
# (4 s) the first time, or every time where PYTHONDONTWRITEBYTECODE is set, as in many containers.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ray_diloco needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make venv PYTHON=python3.12"; exit 1; }
	@echo "[1/4] virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@: > $(LOG)
	@echo "[2/4] torch"
	$(call pip_install,torch)
	@echo "[3/4] ray, deepspeed, transformers and the rest"
	$(call pip_install,-e '.[dev]')
	@echo "[4/4] byte code"
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' .venv/lib ray_diloco >> $(LOG) 2>&1 || true
	@touch $@

train: venv  ## train a small model on two islands (runs/demo; about four minutes on two cores)
	@$(BIN)/ray-diloco train experiment=demo $(ARGS)

lint: venv  ## style, format and types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

test: lint  ## style, format, types and all tests; ARGS="tests/outer -k name" for some of them
	@$(BIN)/python -m pytest -n 2 --dist loadfile --durations 20 $(ARGS)

format: venv  ## put the code into ruff's format
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

bench: venv  ## run the benchmarks of tests/bench one after the other
	@set -e; for file in tests/bench/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

clean:  ## remove .venv, builds and caches; never runs/
	@rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
