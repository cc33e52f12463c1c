# specdec. On a machine with Python >= 3.11 and make, every target here sets up what it needs.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test test-fast check format protos clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## Make .venv with everything in it

# torch first, so that it may come from an index of its own: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
# spares a machine without a GPU the gigabytes of CUDA packages that the default build wants on Linux.
$(READY): pyproject.toml constraints.txt $(wildcard specdec/backends/avx512/*.[ch])
	@echo "Setting up $(VENV) (once; some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-deps $(TORCH_INDEX:%=--index-url %) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## Serve the bundled pair and generate with and without speculation
	@$(BIN)/specdec demo

# By files, whose fixtures start services once for all their tests; in the order of tests/conftest.py, slow ones first.
# Many tests wait for processes more than they compute.
test: setup ## Run every test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10

test-fast: setup ## Run the tests that start no process and take no time
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow"

check: setup ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Format the code
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

protos: setup ## Generate specdec/v1 from protos/
	$(BIN)/python -m protos.generate

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
