# Everything runs in .venv, which is made on demand: a fresh clone needs python3.11 or later, g++ and make.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$name; break; fi; done)
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet -c constraints.txt

# A torch with CUDA: 6 GB, for checks that need no GPU.
CUDA_VENV ?= .venv-cuda
CUDA_RUN := $(CUDA_VENV)/bin/python
# The benchmarks' peers, beside the torch and jax of .venv.
BENCH_VENV ?= .venv-bench
BENCH_RUN := $(BENCH_VENV)/bin/python
# An interpreter that somebody names has its own torch.
NAMED_PYTHON := $(filter command environment,$(firstword $(origin PYTHON)))

# What the native module is made of; pip runs ninja, which compiles only what has changed.
NATIVE_INPUTS := setup.py pyproject.toml $(addprefix torch_ext/,build.py build_jobs.py build_tools.py cuda_toolkit.py \
	ninja_build.py recipe.py) $(shell find csrc -type f)
CPP_FILES = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
PYTHON_DIRS := setup.py torch_ext jax_bridge tests examples benchmarks

CMAKE ?= cmake
CTEST ?= ctest
JOBS = $(shell $(RUN) tests/cpp/settings.py jobs)
TEST_ARGS ?=
NATIVE_TEST_ARGS ?=
TRAIN_ARGS ?= train
SOAK_ARGS ?= --minutes 30
FAULTS_ARGS ?=
BENCH_ARGS ?=

.PHONY: help build test asan-build asan-test lint format native-test native-test-asan native-test-tsan train train-4proc soak faults weekly clean
.PHONY: bench bench-quick docs cuda-check cuda-check-all gpu-test wheel sdist package-test first-use-test

help: ## Show the targets
	@sed -n -E 's/^([a-z0-9.-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r target text; do \
		printf '  make %-18s %s\n' "$$target" "$$text"; done
	@echo
	@echo '  TEST_ARGS="-k layers"  more arguments for pytest     NATIVE_TEST_ARGS="-R arena"  for ctest'
	@echo '  TRAIN_ARGS="train --help"  for the example           PYTHON=python3.12  for .venv, and for gpu-test'

$(VENV): $(VENV)/.ready ## Make .venv with the tested versions of torch and jax

$(VENV)/.ready: constraints.txt
	@[[ -n '$(PYTHON)' ]] || { echo 'no Python 3.11 or later found: name one with PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools ninja
	$(PIP) torch==2.13.0
	$(PIP) jax==0.10.2
	@touch $@

build: $(VENV)/.built ## Build the native module and install the package, editable

$(VENV)/.built: $(VENV)/.ready $(NATIVE_INPUTS)
	$(PIP) --no-build-isolation -e '.[test,train]'
	@touch $@

# MovieLens-100K comes with RecBole, whose own requirements neither the example nor its tests need.
$(VENV)/.movielens: $(VENV)/.ready
	$(PIP) --no-deps recbole==1.2.1
	@touch $@

wheel: build ## Build a wheel for CPUs into dist/
	rm -rf build/lib.* build/bdist.* dist/*.whl
	ASYNC_EMB_CUDA=0 $(RUN) -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps -w dist .
	@ls dist/*.whl

sdist: build ## Build a source distribution into dist/
	rm -f dist/*.tar.gz
	$(RUN) setup.py --quiet sdist
	@ls dist/*.tar.gz

package-test: wheel sdist ## Install both in fresh environments, without a compiler where none is needed, and use them
	$(RUN) tests/packaging/check.py dist

first-use-test: build ## Build the native module at first use, in a fresh process with an empty cache; takes minutes
	ASYNC_EMB_WHOLE_BUILD=1 $(RUN) -m pytest -q tests/torch_ext/test_whole_build.py

test: build $(VENV)/.movielens ## Run the Python tests
	$(RUN) -m pytest -q $(TEST_ARGS)

asan-build: build
	$(RUN) tests/sanitized_build.py build/asan address

asan-test: asan-build ## Run the tests of failing steps on a module built with the address sanitizer
	PYTHON=$(RUN) tests/asan.sh $(TEST_ARGS)

lint: build ## Check style and types of Python, style of C++
	$(RUN) -m ruff check $(wildcard $(PYTHON_DIRS))
	$(RUN) -m ruff format --check $(wildcard $(PYTHON_DIRS))
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES)

format: build ## Format Python and C++
	$(RUN) -m ruff check --fix-only $(wildcard $(PYTHON_DIRS))
	$(RUN) -m ruff format $(wildcard $(PYTHON_DIRS))
	$(VENV)/bin/clang-format -i $(CPP_FILES)

native-test: build/native-test/run ## Run the C++ tests
native-test-asan: build/native-test-asan/run ## Run the C++ tests under the address and undefined-behaviour sanitizers
native-test-tsan: build/native-test-tsan/run ## Run the C++ tests under the thread sanitizer

NATIVE_TESTS := build/native-test build/native-test-asan build/native-test-tsan
build/native-test-asan/built: SANITIZE := address,undefined
build/native-test-tsan/built: SANITIZE := thread

# Always looked at: CMake knows what has changed.
.PHONY: $(NATIVE_TESTS:=/built) $(NATIVE_TESTS:=/run)
$(NATIVE_TESTS:=/built): $(VENV)/.ready
	$(RUN) tests/cpp/settings.py dlpack $(@D)/include
	$(CMAKE) -S tests/cpp -B $(@D) -DDLPACK_INCLUDE_DIR='$(abspath $(@D)/include)' \
		-DASYNC_EMB_CXX_FLAGS="$$($(RUN) tests/cpp/settings.py flags)" -DASYNC_EMB_SANITIZE='$(SANITIZE)'
	$(CMAKE) --build $(@D) --parallel $(JOBS)

$(NATIVE_TESTS:=/run): %/run: %/built
	$(CTEST) --test-dir $(@D) --output-on-failure --no-tests=error $(NATIVE_TEST_ARGS)

# The compiled versions stay apart from those of .venv: nothing here touches torch_ext/_C.*.so.
$(CUDA_VENV)/.ready: constraints.txt
	@[[ -n '$(PYTHON)' ]] || { echo 'no Python 3.11 or later found: name one with PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(CUDA_VENV)
	sed 's/^torch==.*/torch==2.14.1/' constraints.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_RUN) -m pip --disable-pip-version-check install --quiet --no-cache-dir --no-compile \
		-c $(CUDA_VENV)/constraints.txt torch jax numpy setuptools ninja
	@touch $@

cuda-check: $(CUDA_VENV)/.ready ## Compile with CUDA for one architecture and read the machine code; needs no GPU
	PYTHON=$(CUDA_RUN) tests/cuda/check.sh 9.0

cuda-check-all: $(CUDA_VENV)/.ready ## The same for all architectures of the default list
	PYTHON=$(CUDA_RUN) tests/cuda/check.sh

gpu-test: $(if $(NAMED_PYTHON),,build) ## Run the GPU suite; PYTHON=python3 uses the torch and jax of that interpreter
	PYTHON=$(if $(NAMED_PYTHON),$(PYTHON),$(RUN)) tests/gpu/run.sh $(TEST_ARGS)

$(VENV)/.docs: $(VENV)/.ready
	$(PIP) 'mkdocs-material>=9.8,<10' 'mkdocstrings[python]>=1.0'
	@touch $@

docs: $(VENV)/.docs ## Build the documentation into build/docs; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

train: build $(VENV)/.movielens ## Train the two-tower example
	$(RUN) -m examples.two_tower $(TRAIN_ARGS)

train-4proc: build $(VENV)/.movielens ## Train it over 4 processes of 2 devices each on this machine
	$(RUN) -m examples.multi_process --processes 4 --devices 2 $(TRAIN_ARGS)

soak: build ## Train random shapes over 4 processes for 30 minutes; memory and open files must stay flat
	$(RUN) -m tests.multiprocess.soak $(SOAK_ARGS)

faults: build ## Hurt processes in every way at every point, 20 times each, and write docs/faults.md; takes hours
	$(RUN) -m tests.multiprocess.faults --write docs/faults.md $(FAULTS_ARGS)

weekly: soak faults $(VENV)/.movielens ## What is too long for every change: soak, faults, and the tests that take minutes each
	ASYNC_EMB_ALL_TESTS=1 $(RUN) -m pytest -q $(TEST_ARGS)

# It sees .venv's packages through a path file, so that both sides use the same torch and the same jax.
$(BENCH_VENV)/.ready: $(VENV)/.built
	$(RUN) -m venv $(BENCH_VENV)
	$(BENCH_RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(BENCH_VENV)/place
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(cat $(BENCH_VENV)/place)/tested.pth"
	$(BENCH_RUN) -m pip --disable-pip-version-check install --quiet --no-deps fbgemm-gpu-cpu==1.8.0 wrap-torch2jax==0.9.0
	@touch $@

bench: build $(BENCH_VENV)/.ready $(VENV)/.movielens ## Measure lookups, updates, calls and training beside their peers; needs a quiet machine
	$(BENCH_RUN) -m benchmarks $(BENCH_ARGS)

bench-quick: build $(BENCH_VENV)/.ready $(VENV)/.movielens ## The same, a few lines and iterations: shows that all of it runs
	$(BENCH_RUN) -m benchmarks --quick $(BENCH_ARGS)

clean: ## Remove .venv and everything that was built
	rm -rf $(VENV) $(CUDA_VENV) $(BENCH_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis torch_ext/_C.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
