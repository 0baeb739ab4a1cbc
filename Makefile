# `make demo` and `make test` are all a new user needs: each sets up .venv first. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# For example PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" where PyPI's torch is the CUDA build.
PIP_FLAGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What needs a GPU runs from the checkout, with no installer and no network, where there is no .venv and PYTHON has torch.
# OFFLINE=1 asks for that, OFFLINE= for .venv. PYTHONSAFEPATH: else `python -m` finds zico/ here, without its adapters.
HAS_TORCH := import importlib.util as util; print(1 if util.find_spec("torch") else "")
OFFLINE := $(if $(wildcard $(STAMP)),,$(shell $(PYTHON) -c '$(HAS_TORCH)'))
CHECKOUT := $(CURDIR)/build/inplace:$(CURDIR)/benchmarks
ifeq ($(OFFLINE),)
GPU_SETUP := setup
GPU_PYTHON := $(BIN)/python
else
GPU_SETUP := inplace
GPU_PYTHON := PYTHONSAFEPATH=1 PYTHONPATH="$(CHECKOUT)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
endif

.DEFAULT_GOAL := help

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv with everything, at the tested versions

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt --editable '.[all]'
	touch $@

demo: setup ## Train a PyTorch and a TensorFlow job in three quarters of the sum of their peaks (about two minutes)
	$(BIN)/python benchmarks/demo.py

# By file, so that what the tests of a file share is made once; in the order of tests/conftest.py.
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder --benchmark-disable

test: setup ## Run every test that needs no GPU
	$(BIN)/python -m zico.warming # compile once, before tests with deadlines start brokers
	$(BIN)/python -m pytest tests/framework tests/process tests/cpu $(WORKERS)

test-cpu: setup ## Run the tests that take seconds and start no processes
	$(BIN)/python -m pytest tests/cpu $(WORKERS)

test-gpu: $(GPU_SETUP) ## Run the tests that need a GPU; fails where there is none (OFFLINE=1: with PYTHON as it is)
	$(GPU_PYTHON) -m zico.warming # compile once: tests have deadlines
	$(GPU_PYTHON) -m pytest tests/gpu --verbose

lint: setup ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## Check types
	$(BIN)/mypy

bench: setup ## Measure everything and write benchmarks/results (about eight hours)
	$(BIN)/python benchmarks/heap.py
	$(BIN)/python benchmarks/planners.py
	$(BIN)/python benchmarks/zoo.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/regions.py
	$(BIN)/python benchmarks/following.py
	$(BIN)/python benchmarks/colocation.py
	$(BIN)/python benchmarks/colocation.py --name colocation-saving --share 50 --policy zico --policy serial --save auto --save swap --save page --repeat 1 --seconds 75 --warm-up 5
	$(BIN)/python benchmarks/agreement.py
	$(BIN)/python benchmarks/agreement.py --form paced
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/budget_change.py
	$(BIN)/python benchmarks/tiers.py
	$(BIN)/python benchmarks/swap.py
	$(BIN)/python benchmarks/plan_time.py
	$(BIN)/python benchmarks/swap_host.py
	$(BIN)/python benchmarks/paging.py
	$(BIN)/python benchmarks/page_host.py
	$(BIN)/python benchmarks/page_host.py --example lm
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/marks.py

bench-smoke: setup ## Run each benchmark as briefly as it can be run
	$(BIN)/python benchmarks/heap.py --smoke
	$(BIN)/python benchmarks/planners.py --smoke
	$(BIN)/python benchmarks/zoo.py --smoke
	$(BIN)/python benchmarks/startup.py --smoke
	$(BIN)/python benchmarks/regions.py --smoke
	$(BIN)/python benchmarks/following.py --smoke
	$(BIN)/python benchmarks/colocation.py --smoke
	$(BIN)/python benchmarks/agreement.py --smoke
	$(BIN)/python benchmarks/agreement.py --form paced --smoke
	$(BIN)/python benchmarks/scheduler.py --smoke
	$(BIN)/python benchmarks/budget_change.py --smoke
	$(BIN)/python benchmarks/tiers.py --smoke
	$(BIN)/python benchmarks/swap.py --smoke
	$(BIN)/python benchmarks/plan_time.py --smoke
	$(BIN)/python benchmarks/swap_host.py --smoke
	$(BIN)/python benchmarks/paging.py --smoke
	$(BIN)/python benchmarks/page_host.py --smoke
	$(BIN)/python benchmarks/page_host.py --example lm --smoke
	$(BIN)/python benchmarks/saving.py --smoke
	$(BIN)/python benchmarks/marks.py --smoke
	$(BIN)/python benchmarks/evaluation.py --smoke

evaluation: setup ## Simulate the published evaluation and write docs/evaluation.md (about ten minutes)
	$(BIN)/python benchmarks/evaluation.py

bench-gpu: $(GPU_SETUP) ## Measure what needs a GPU (about eight minutes; OFFLINE=1: with PYTHON as it is)
	$(GPU_PYTHON) -m zico.warming
	$(GPU_PYTHON) benchmarks/gpu/progress.py
	$(GPU_PYTHON) benchmarks/gpu/alone.py
	$(GPU_PYTHON) benchmarks/gpu/pairs.py

first-hour: $(GPU_SETUP) ## Find out on a GPU what the manual leaves open, part by part, into build/first-hour (an hour)
	$(GPU_PYTHON) benchmarks/gpu/first_hour.py --out build/first-hour

size: setup ## Print lines per file and the longest functions
	$(BIN)/python tests/size.py

inplace: ## Make the checkout importable without installing (PYTHONSAFEPATH=1 PYTHONPATH=build/inplace)
	rm -rf build/inplace
	mkdir -p build/inplace/zico
	for entry in zico/*; do ln -s "$(CURDIR)/$$entry" build/inplace/zico/; done
	ln -s "$(CURDIR)/adapters" "$(CURDIR)/kernels" build/inplace/zico/

clean: ## Remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache demo-report

.PHONY: help setup demo test test-cpu test-gpu lint types bench bench-smoke evaluation bench-gpu first-hour size inplace clean
