# `make demo` and `make test` are all a new user needs: each sets up .venv first. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# For example PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" where PyPI's torch is the CUDA build.
PIP_FLAGS ?=
BIN := $(VENV)/bin
# pip's arguments; uv installs where it can be had, in a tenth of the time.
INSTALL := $(PYTHON) .ci/install.py
# Tests and benchmarks start hundreds of processes, each of which would compile all of Zico's Python again.
export PYTHONDONTWRITEBYTECODE :=
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
DOCS_STAMP := $(VENV)/.installed-docs

# What needs a GPU runs from the checkout, with no installer and no network, where there is no .venv and PYTHON has torch.
# OFFLINE=1 asks for that, OFFLINE= for .venv. PYTHONSAFEPATH: else `python -m` finds zico/ here, without its adapters.
HAS_TORCH := import importlib.util as util; print(1 if util.find_spec("torch") else "")
OFFLINE := $(if $(wildcard $(STAMP)),,$(shell $(PYTHON) -c '$(HAS_TORCH)'))
# Behind it, what `make gpu-cache` made for the version of PYTHON.
MINOR := import sys; print("{}.{}".format(*sys.version_info))
CARRIED := build/gpu-carry
CHECKOUT = $(CURDIR)/build/inplace:$(CURDIR)/benchmarks:$(CURDIR)/$(CARRIED)/$(shell $(PYTHON) -c '$(MINOR)')/site
ifeq ($(OFFLINE),)
GPU_SETUP := setup
GPU_PYTHON := $(BIN)/python
else
GPU_SETUP := inplace
GPU_PYTHON = PYTHONSAFEPATH=1 PYTHONPATH="$(CHECKOUT)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
endif

# What the site of `make docs` is made of: pages, and the files that they link to.
DOCUMENTS := README.md CONTRIBUTING.md CHANGELOG.md docs benchmarks deploy

.DEFAULT_GOAL := help

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv with everything, at the tested versions

# Zico compiles while the frameworks are fetched and unpacked, of which it needs nothing.
$(DEMO_STAMP): setup.cfg setup.py pyproject.toml constraints.txt
	@echo "$(VENV): what Zico needs"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(BIN)/python $(PIP_FLAGS) --constraint constraints.txt --editable .
	@echo "$(VENV): PyTorch and TensorFlow (2 GB), while Zico compiles in the background (a minute or two)"
	@$(BIN)/python -m zico.base.warming host & compiles=$$!; \
	trap 'exit 1' INT TERM; trap "kill $$compiles 2> /dev/null" EXIT; \
	$(INSTALL) $(BIN)/python $(PIP_FLAGS) --constraint constraints.txt --editable '.[demo]' || exit 1; \
	echo "$(VENV): the packages are there; waiting until Zico is compiled"; \
	wait $$compiles || { echo "$(VENV): Zico could not be compiled: see above" >&2; exit 1; }
	touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "$(VENV): what the tests need (1.5 GB)"
	$(INSTALL) $(BIN)/python $(PIP_FLAGS) --constraint constraints.txt --editable '.[all]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) $(BIN)/python $(PIP_FLAGS) --constraint constraints.txt --editable '.[docs]'
	touch $@

demo: $(DEMO_STAMP) ## Train a PyTorch and a TensorFlow job in three quarters of the sum of their peaks (about two minutes, once set up)
	$(BIN)/python benchmarks/demo.py

# By file, so that what the tests of a file share is made once; in the order of tests/conftest.py.
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder --benchmark-disable

test: setup ## Run every test that needs no GPU
	$(BIN)/python -m zico.base.warming # compile once, before tests with deadlines start brokers
	$(BIN)/python -m pytest tests/framework tests/process tests/cpu tests/lab $(WORKERS)

test-benchmarks: setup ## Run every benchmark for a moment, and rehearse the run on a GPU (seven minutes)
	$(BIN)/python -m zico.base.warming
	$(BIN)/python -m pytest tests/benchmark $(WORKERS)

test-cpu: setup ## Run the tests that take seconds and start no processes
	$(BIN)/python -m pytest tests/cpu tests/lab $(WORKERS)

test-gpu: $(GPU_SETUP) ## Run the tests that need a GPU; fails where there is none (OFFLINE=1: with PYTHON as it is)
	$(GPU_PYTHON) -m zico.base.warming # compile once: tests have deadlines
	$(GPU_PYTHON) -m pytest tests/gpu --verbose

# PyTorch's build for CUDA takes 5 GB: it has an environment of its own. The versions are those of constraints.txt, but
# for what this build brings itself.
WHEEL ?= build/torch-cuda
WHEEL_TORCH ?= torch==2.11.0
WHEEL_STAMP := $(WHEEL)/.installed

$(WHEEL_STAMP): setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(WHEEL)
	sed -e '/^torch==/d; /^cuda-bindings==/d; /^nvidia-/d; s/^tensorflow-cpu==/tensorflow==/' constraints.txt > $(WHEEL)/constraints.txt
	$(INSTALL) $(WHEEL)/bin/python $(PIP_FLAGS) --constraint $(WHEEL)/constraints.txt \
		$(WHEEL_TORCH) pytest pytest-timeout --editable .
	touch $@

test-cuda-wheel: $(WHEEL_STAMP) ## Run PyTorch's build for CUDA over a driver of software (WHEEL=DIR: where it is, 5 GB)
	$(WHEEL)/bin/python -m pytest tests/wheel/test_torch_wheel.py

# What the adapters look up is in the wheels that the index has, also those for aarch64. Each is removed again.
SYMBOLS_TORCH ?= 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
SYMBOLS_PLATFORM ?=

test-symbols: setup ## Look for the functions that adapters need in PyTorch's wheels (downloads 8 GB; SYMBOLS_PLATFORM=manylinux_2_28_aarch64)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pyelftools
	$(BIN)/python tests/wheel/torch_symbols.py $(if $(SYMBOLS_PLATFORM),--platform $(SYMBOLS_PLATFORM)) $(SYMBOLS_TORCH)

# TensorFlow's build for CUDA stands beside it: it requires none of NVIDIA's packages, so the two agree.
WHEEL_TF_STAMP := $(WHEEL)/.installed-tensorflow

$(WHEEL_TF_STAMP): $(WHEEL_STAMP)
	$(INSTALL) $(WHEEL)/bin/python $(PIP_FLAGS) --constraint $(WHEEL)/constraints.txt tensorflow
	touch $@

test-cuda-tf: $(WHEEL_TF_STAMP) ## Run TensorFlow's build for CUDA over that driver, alone and beside PyTorch's (WHEEL=DIR, 7 GB)
	$(WHEEL)/bin/python -m pytest tests/wheel/test_tensorflow_wheel.py

bench-cuda-wheel: $(WHEEL_STAMP) ## Time PyTorch's calls for device memory over a driver of software (3 minutes)
	$(WHEEL)/bin/python tests/process/support/software_cuda.py $(WHEEL)/bin/python benchmarks/torch_calls.py --device cuda --name torch_calls-cuda-software $(INTO)

# Sets of other versions, each with a Python; what a set does not name is as in constraints.txt. PyPI's PyTorch is the
# CUDA build (5 GB each): see PIP_FLAGS. `gpu` is what the machines have on which Zico has run.
VERSIONS ?= build/versions
SETS ?= oldest gpu before newest
SET_oldest ?= python3.11 torch==2.8.0 numba==0.62.1 llvmlite==0.45.1 numpy==1.26.4 jax==0.6.0 jaxlib==0.6.0
SET_gpu ?= python3.12 numpy==2.5.5 torch==2.11.0 jax==0.11.2 jaxlib==0.11.2
SET_before ?= $(PYTHON) torch==2.14.1
SET_newest ?= python3.13 torch==2.15.0 jax==0.12.0.1 jaxlib==0.12.0.1
VERSIONS_TESTS ?= tests/framework/test_torch*.py tests/framework/test_jax.py tests/framework/test_exactness.py \
	tests/framework/test_xla_cuda.py tests/process/test_software_cuda.py tests/process/test_cuda_twin*.py tests/cpu tests/lab
name_of = $(firstword $(subst ==, ,$(1)))

$(VERSIONS)/%/.installed: setup.cfg setup.py constraints.txt
	$(firstword $(SET_$*)) -m venv $(@D)
	grep -v $(foreach one,$(wordlist 2,99,$(SET_$*)),-e '^$(call name_of,$(one))==') constraints.txt > $(@D)/constraints.txt
	$(INSTALL) $(@D)/bin/python $(PIP_FLAGS) --constraint $(@D)/constraints.txt \
		$(wordlist 2,99,$(SET_$*)) --editable '.[plot,swap,metrics,optuna,test]'
	touch $@

test-versions: $(SETS:%=test-versions-%) ## Run tests with the oldest and the newest two PyTorches, and a GPU machine's (VERSIONS=DIR, SETS)

$(SETS:%=test-versions-%): test-versions-%: $(VERSIONS)/%/.installed
	$(VERSIONS)/$*/bin/python -m zico.base.warming
	$(VERSIONS)/$*/bin/python -m pytest $(VERSIONS_TESTS) $(WORKERS) -k "not mypy" # types are those of constraints.txt

# Ray has an environment of its own: `make test` has what it has without Ray.
RAY ?= build/ray
RAY_STAMP := $(RAY)/.installed

$(RAY_STAMP): setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(INSTALL) $(RAY)/bin/python $(PIP_FLAGS) --constraint constraints.txt --editable '.[all,ray]'
	touch $@

test-ray: $(RAY_STAMP) ## Run the tests of Ray on a cluster of two nodes (two minutes; into build/ray)
	$(RAY)/bin/python -m zico.base.warming
	$(RAY)/bin/python -m pytest tests/framework/test_ray.py

# DeepSpeed compiles for the processor at its first use.
DEEPSPEED ?= build/deepspeed
DEEPSPEED_STAMP := $(DEEPSPEED)/.installed

$(DEEPSPEED_STAMP): setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(DEEPSPEED)
	$(INSTALL) $(DEEPSPEED)/bin/python $(PIP_FLAGS) --constraint constraints.txt deepspeed ninja setuptools --editable '.[all]'
	touch $@

test-deepspeed: $(DEEPSPEED_STAMP) ## Run the tests of DeepSpeed's offloading with the real one (it compiles; build/deepspeed)
	$(DEEPSPEED)/bin/python -m zico.base.warming
	PATH="$(CURDIR)/$(DEEPSPEED)/bin:$$PATH" $(DEEPSPEED)/bin/python -m pytest tests/framework/test_torch_offload_libraries.py

bench-ray: $(RAY_STAMP) ## Time eight trials on a Ray cluster, one at a time, by halves, and with Zico (eleven minutes)
	$(RAY)/bin/python -m zico.base.warming
	$(RAY)/bin/python benchmarks/ray_trials.py $(INTO)

# Triton takes a gigabyte: it has an environment of its own.
TRITON ?= build/triton
TRITON_PACKAGE ?= triton==3.9.0
TRITON_STAMP := $(TRITON)/.installed

$(TRITON_STAMP): setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(TRITON)
	$(INSTALL) $(TRITON)/bin/python $(PIP_FLAGS) --constraint constraints.txt $(TRITON_PACKAGE) --editable '.[all]'
	touch $@

test-triton: $(TRITON_STAMP) ## Run the tests of kernels' forms in Triton, without a GPU (into build/triton)
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest tests/cpu/test_kernels_meaning.py
	$(TRITON)/bin/python -m pytest tests/cpu/test_kernels_triton.py

test-slurm: setup ## Run deploy/slurm under Slurm's own daemons on this machine (as root; Debian: slurm-wlm, munge; two minutes)
	$(BIN)/python -m zico.base.warming
	$(BIN)/python -m pytest tests/deploy/test_slurm_daemons.py

# Where no registry is in reach: IMAGE_BASE is an image of yours with Python and pip. IMAGE takes one that is built.
test-image: export IMAGE_BASE ?= docker.io/library/python:3.12-slim
test-image: export IMAGE_FRAMEWORK ?= numpy
test-image: export IMAGE_FLAGS ?=
test-image: setup ## Build deploy/Containerfile and share a pool between containers of it (as root; Debian: buildah; minutes)
	$(BIN)/python -m pytest tests/deploy/test_image.py

lint: setup ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## Check types
	$(BIN)/mypy

# Results go below build/, and with KEEP=1 over the committed ones.
RESULTS := $(if $(KEEP),benchmarks/results,build/benchmarks)
INTO := -o $(RESULTS)

# pytest-benchmark times these; each module of benchmarks/micro writes one file of results.
MICRO := heap pool remapping scheduler planners startup
MICROBENCHMARK = $(BIN)/python -m pytest -p no:randomly --quiet --benchmark-quiet

bench: setup $(MICRO:%=bench-micro-%) ## Run the microbenchmarks and one pair of jobs (at most 15 minutes)
	$(BIN)/python benchmarks/torch_calls.py --rounds 9 $(INTO)
	$(BIN)/python benchmarks/colocation.py --name colocation-pair --pair resnet+resnet --share 70 --policy zico --repeat 1 --seconds 20 $(INTO)

bench-micro-%: setup
	$(MICROBENCHMARK) benchmarks/micro/test_$*.py -m "not long" --benchmark-json=$(RESULTS)/$*.json

bench-compare: setup ## Time the hot path of OLD=COMMIT and of this checkout in turns (about ten minutes)
	$(BIN)/python benchmarks/compare_commits.py $(OLD) $(INTO)

bench-compare-pairs: setup ## Train pairs of jobs by OLD=COMMIT and by this checkout in turns (about 50 minutes)
	$(BIN)/python benchmarks/compare_pairs.py $(OLD) $(INTO)

# The longer benchmarks, and all of them: `make bench-all`.
LONG := planners plan-time zoo regions following pairs pairs-saving idle remembered frozen threads short-waits agreement budget tiers gist swap swap-host save-planners save-nets rounding batch-factors \
	paging paging-rivals page-host page-host-rivals saving held marks greedy cluster forecast

bench-all: bench $(LONG:%=bench-%) $(if $(KEEP),evaluation) ## Run every benchmark that needs no GPU (about eight hours)

bench-planners: setup ## Compare planners on every model of the zoo (5 minutes)
	$(MICROBENCHMARK) benchmarks/micro/test_planners.py --benchmark-json=$(RESULTS)/planners-zoo.json

bench-plan-time: setup ## Time swap plans of thousands of tensors (6 minutes)
	$(MICROBENCHMARK) benchmarks/micro/test_plan_time.py --benchmark-json=$(RESULTS)/plan_time.json

bench-zoo: setup ## Count what training steps of known models need (4 minutes)
	$(BIN)/python benchmarks/zoo.py $(INTO)

bench-regions: setup ## Count the regions that planned iterations hold (6 minutes)
	$(BIN)/python benchmarks/regions.py $(INTO)

bench-following: setup ## Time planned allocations and recording (7 minutes)
	$(BIN)/python benchmarks/following.py $(INTO)

bench-pairs: setup ## Train pairs under every policy and budget (110 minutes)
	$(BIN)/python benchmarks/colocation.py $(INTO)

bench-pairs-saving: setup ## Train pairs that save memory in half of the sum of their peaks (60 minutes)
	$(BIN)/python benchmarks/auto_turns.py $(INTO)
	$(BIN)/python benchmarks/colocation.py --name colocation-saving --share 50 --policy zico --policy serial --save auto --save swap --save page --repeat 1 --seconds 75 --warm-up 5 $(INTO)

bench-idle: setup ## Train jobs that leave the device idle together, and one after the other (50 minutes)
	$(BIN)/python benchmarks/idle_jobs.py $(INTO)

bench-threads: setup ## Train jobs whose threads allocate, with the pool's one lock and without (6 minutes)
	$(BIN)/python benchmarks/threads.py $(INTO)

bench-short-waits: setup ## Measure what a short rest in each iteration costs plain processes besides its length (4 minutes)
	$(BIN)/python benchmarks/short_waits.py $(INTO)

bench-remembered: setup ## Measure what jobs save that begin with what they did in their last runs (25 minutes)
	$(BIN)/python benchmarks/remembered.py $(INTO)

bench-frozen: setup ## Train eight fine-tunings that hold their frozen base once (15 minutes)
	$(BIN)/python benchmarks/frozen.py $(INTO)

bench-agreement: setup ## Compare the simulator with real runs, trained and paced (85 minutes)
	$(BIN)/python benchmarks/agreement.py $(INTO)
	$(BIN)/python benchmarks/agreement.py --form paced $(INTO)

bench-budget: setup ## Change a budget while jobs train (5 minutes)
	$(BIN)/python benchmarks/budget_change.py $(INTO)

bench-tiers: setup ## Time copies to each tier and back (2 minutes)
	$(BIN)/python benchmarks/tiers.py $(INTO)

bench-gist: setup ## Encode what networks save for their backward passes (1 minute)
	$(BIN)/python benchmarks/gist.py $(INTO)

bench-swap: setup ## Compare swap planners (15 minutes)
	$(BIN)/python benchmarks/swap.py $(INTO)

bench-swap-host: setup ## Train a job that swaps (8 minutes)
	$(BIN)/python benchmarks/swap_host.py $(INTO)

bench-save-planners: setup ## Train jobs with less memory by each planner (half an hour a round)
	$(BIN)/python benchmarks/save_planners.py $(INTO)

bench-save-nets: setup ## Plan published nets with less memory by each planner (40 minutes)
	$(BIN)/python benchmarks/save_nets.py $(INTO)

bench-job-planner: setup ## Compare the planner of jobs with the portfolio (10 minutes)
	$(BIN)/python benchmarks/job_planner.py $(INTO)

bench-rounding: setup ## Compare rounded schedules with the best ones on ten nets (20 minutes)
	$(BIN)/python benchmarks/rounding.py $(INTO)

bench-batch-factors: setup ## Find the largest batches on papers' cards by their planners (15 minutes)
	$(BIN)/python benchmarks/batch_factors.py $(INTO)

bench-paging: setup ## Simulate learned paging on a GPU beside published figures (half an hour)
	$(BIN)/python benchmarks/paging.py $(INTO)

bench-paging-rivals: setup ## Simulate DeepUM's rivals beside learned paging (half an hour)
	$(BIN)/python benchmarks/paging.py --only rivals $(INTO)

bench-page-host: setup ## Train jobs that page (half an hour)
	$(BIN)/python benchmarks/page_host.py $(INTO)
	$(BIN)/python benchmarks/page_host.py --example lm $(INTO)

bench-page-host-rivals: setup ## Train a job that pages as published systems do (half an hour)
	$(BIN)/python benchmarks/page_host.py --rivals $(INTO)

bench-saving: setup ## Simulate pairs that save memory on a GPU (10 minutes)
	$(BIN)/python benchmarks/saving.py $(INTO)

bench-held: setup ## Count the regions that a job on a GPU holds (3 minutes)
	$(BIN)/python benchmarks/held.py $(INTO)

bench-marks: setup ## Count marks on a GPU's stream (6 minutes)
	$(BIN)/python benchmarks/marks.py $(INTO)

bench-greedy: setup ## Compare policies with the best greedy one on random jobs (15 minutes)
	$(BIN)/python benchmarks/greedy_comparison.py $(INTO)

bench-cluster: setup ## Simulate clusters that share memory (ten minutes; TRACE=openb_pod_list_default.csv of alibaba/clusterdata)
	$(BIN)/python benchmarks/cluster.py $(if $(TRACE),--trace $(TRACE)) $(INTO)

bench-forecast: setup ## Compare forecasts of what jobs hold with the jobs (half an hour to an hour; less with MODEL=NAME)
	$(BIN)/python benchmarks/forecast.py $(if $(MODEL),--model "$(MODEL)") $(INTO)

SMOKE := torch_calls threads short_waits zoo regions following colocation idle_jobs remembered frozen auto_turns agreement budget_change tiers gist swap swap_host paging page_host \
	saving save_planners save_nets job_planner rounding batch_factors marks evaluation cluster forecast

bench-smoke: setup ## Run each benchmark as briefly as it can be run
	$(MICROBENCHMARK) benchmarks/micro -m "not long" --benchmark-disable
	for script in $(SMOKE); do $(BIN)/python benchmarks/$$script.py --smoke || exit 1; done
	$(BIN)/python benchmarks/agreement.py --form paced --smoke
	$(BIN)/python benchmarks/page_host.py --example lm --smoke
	$(BIN)/python benchmarks/page_host.py --rivals --smoke
	$(BIN)/python benchmarks/paging.py --only rivals --smoke
	$(BIN)/python benchmarks/compare_commits.py --smoke
	$(BIN)/python benchmarks/compare_pairs.py --smoke

.PHONY: bench-compare bench-compare-pairs bench-all $(LONG:%=bench-%)

evaluation: setup ## Simulate the published evaluation and write docs/evaluation.md (about ten minutes)
	$(BIN)/python benchmarks/evaluation.py -o benchmarks/results

docs: setup $(DOCS_STAMP) ## Build the documentation's site into build/docs; a warning is an error
	rm -rf build/docs-source
	mkdir -p build/docs-source
	for entry in $(DOCUMENTS); do ln -s "$(CURDIR)/$$entry" build/docs-source/; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python tests/site_check.py build/docs

bench-gpu: $(GPU_SETUP) ## Measure what needs a GPU (about eight minutes; OFFLINE=1: with PYTHON as it is)
	$(GPU_PYTHON) -m zico.base.warming
	$(GPU_PYTHON) benchmarks/gpu/progress.py $(INTO)
	$(GPU_PYTHON) benchmarks/gpu/alone.py $(INTO)
	$(GPU_PYTHON) benchmarks/gpu/pairs.py $(INTO)

# For a machine with a GPU that is there for minutes. EARLIER=FILE goes on from results of an earlier call elsewhere.
OUT ?= build/gpu-run
GPU_SECONDS ?= 560

gpu-run: $(GPU_SETUP) ## Find out what sharing a GPU is worth, by value, into OUT=DIR (GPU_SECONDS=560; again: goes on)
	$(GPU_PYTHON) benchmarks/gpu/gpu_run.py -o "$(OUT)" --seconds $(GPU_SECONDS) $(if $(EARLIER),--earlier "$(EARLIER)")

# What such a machine lacks and cannot fetch: packages, and machine code for its versions of Python and Numba.
CARRY_PYTHON ?= $(VERSIONS_PYTHON)
CARRY_VERSIONS ?= numba==0.68.0 llvmlite==0.50.0 numpy==2.5.2
CARRY_PACKAGES ?= msgspec platformdirs zstandard
CARRY := build/gpu-python
CARRY_STAMP := $(CARRY)/.installed
CARRY_PIP := $(CARRY)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint $(CARRY)/constraints.txt

$(CARRY_STAMP): constraints.txt
	$(CARRY_PYTHON) -m venv $(CARRY)
	grep -v -e '^numba==' -e '^llvmlite==' -e '^numpy==' constraints.txt > $(CARRY)/constraints.txt
	$(CARRY_PIP) $(CARRY_VERSIONS) $(CARRY_PACKAGES) cuda-bindings psutil pytest pytest-timeout
	touch $@

gpu-cache: $(CARRY_STAMP) inplace ## Make what a machine with a GPU and no network lacks, into build/gpu-carry (four minutes)
	set -e; to=$(CARRIED)/$$($(CARRY)/bin/python -c '$(MINOR)'); mkdir -p $$to; mkdir -m 700 -p $(CARRY)/cache; rm -rf $$to/site; \
	$(CARRY_PIP) --no-deps --target $$to/site $(CARRY_PACKAGES); \
	ZICO_CACHE_DIR=$(CARRY)/cache PYTHONSAFEPATH=1 PYTHONPATH=build/inplace:benchmarks $(CARRY)/bin/python benchmarks/gpu/carry.py $$to

dist: setup ## Build what a release uploads into build/dist, and check it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/python -m twine check --strict build/dist/*

size: setup ## Print lines per file and the longest functions
	$(BIN)/python tests/size.py

inplace: ## Make the checkout importable without installing (PYTHONSAFEPATH=1 PYTHONPATH=build/inplace)
	rm -rf build/inplace
	mkdir -p build/inplace/zico
	for entry in zico/*; do ln -s "$(CURDIR)/$$entry" build/inplace/zico/; done
	ln -s "$(CURDIR)/adapters" "$(CURDIR)/kernels" "$(CURDIR)/lab" build/inplace/zico/

clean: ## Remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache demo-report

.PHONY: help setup demo test test-cpu test-gpu test-cuda-wheel test-cuda-tf bench-cuda-wheel test-symbols test-versions $(SETS:%=test-versions-%) test-ray test-deepspeed bench-ray test-triton test-slurm test-image lint types bench bench-smoke evaluation docs bench-gpu gpu-run gpu-cache size inplace clean
