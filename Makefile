# make run    chat with the embedded demo model        make test   lint and tests
# Everything happens in .venv; variables: PYTHON (the interpreter to begin with), ARGS (passed on), SETS (the instruction
# sets with kernels: best, here or all; by default the best of this machine to run, and what runs here to test).

SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
# With tools of .venv: in an environment of its own, pip would compile everything again each time.
EDITABLE := $(PIP) install --no-build-isolation --editable
TESTED := --config-settings=cmake.define.QUIRE_TWIN=ON --config-settings=cmake.define.QUIRE_SETS=$(or $(SETS),here)

# Test processes run side by side: one thread each for matrix products.
TEST_ENV := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
CMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python

# Tests start hundreds of processes, which would each compile every module where the environment sets this.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run test servers lint format kernels oracle clients ray cuda cubins browser chromium agents endurance exact sanitize sanitized deployment arm sdist wheel clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18
	@echo '  PYTHON=python3.12 chooses the interpreter; ARGS="..." is passed to quire or pytest.'

run: .venv/.run  ## chat with the embedded demo model (ARGS="MODEL" for another one)
	@exec $(BIN)/quire run $(ARGS)

test: lint  ## lint, then the tests that start no server
	$(PYTEST) -n auto --ignore=tests/serve --ignore=tests/clients $(ARGS)

servers: .venv/.test  ## start servers and other processes, and call them
	$(PYTEST) -n auto tests/serve $(ARGS)

lint: .venv/.test  ## ruff check, ruff format --check, clang-format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*.* csrc/*/*.*)
	$(BIN)/mypy

format: .venv/.test  ## write every file in the one format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard csrc/*.* csrc/*/*.*)

kernels: .venv/.tools  ## compile the kernels for every instruction set (ARGS="--target quire_avx512_amx" for one)
	$(CMAKE) -B build/kernels -DQUIRE_WERROR=ON -DQUIRE_TWIN=ON >/dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/kernels $(ARGS)

oracle: .venv/.oracle  ## compare with PyTorch and transformers (installs them)
	$(PYTEST) -n auto tests/oracle $(ARGS)

# They have an environment of their own: older lines than .venv has, and much that the server never needs.
clients: .clients/.done .venv/.test  ## call the server with more clients (installs them)
	QUIRE_TEST_PYTHON=$(CURDIR)/$(BIN)/python .clients/bin/python -m pytest --confcutdir=tests/clients \
	  -p no:cacheprovider -W ignore tests/clients $(ARGS)

ray: .ray/.done .venv/.test  ## run the server on a local Ray cluster (installs Ray)
	QUIRE_TEST_PYTHON=$(CURDIR)/$(BIN)/python .ray/bin/python -m pytest --confcutdir=tests/ray \
	  -p no:cacheprovider -W ignore -o faulthandler_timeout=900 tests/ray $(ARGS)

# Triton is needed for building kernels and for these tests, and by nobody who runs Quire.
cuda: .cuda/.done .venv/.test  ## run the kernels for GPUs in Triton's interpreter, on the CPU (installs Triton)
	QUIRE_TEST_CUDA=1 $(TEST_ENV) .cuda/bin/python -m pytest -n auto -p no:cacheprovider tests/cuda $(ARGS)

cubins: .cuda/.done .venv/.test  ## compile the kernels that changed for all GPUs (ARGS="--targets 90" for one kind)
	.cuda/bin/python scripts/cubins.py $(ARGS)

browser: .browser/.done .venv/.test chromium  ## drive the server's page in Chromium (installs both)
	QUIRE_TEST_PYTHON=$(CURDIR)/$(BIN)/python QUIRE_TEST_CHROMIUM=$(CHROMIUM) .browser/bin/python -m pytest \
	  --confcutdir=tests/browser -p no:cacheprovider -W ignore tests/browser $(ARGS)

CHROMIUM ?= chromium
chromium:
	@command -v $(CHROMIUM) >/dev/null || { [[ $(CHROMIUM) == chromium && $$(id -u) == 0 ]] && apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium fonts-liberation >/dev/null; } || { \
	  echo "quire: $(CHROMIUM) is missing: sudo apt install chromium, or name a browser: make CHROMIUM=google-chrome" >&2; \
	  exit 1; }

agents: .agents/.done .venv/.test  ## run coding agents against the server (installs them; needs npm)
	$(BIN)/python -m pytest -o faulthandler_timeout=1500 tests/agents $(ARGS)

endurance: .venv/.test  ## load, kill and drain servers for an hour (ARGS="faults --parts drains"; docs/soak.md)
	$(BIN)/python tests/endurance $(ARGS)

exact: .venv/.test  ## compare 10,000 random requests with and without drafts (ARGS="--requests 500 --seed 1")
	$(TEST_ENV) $(BIN)/python tests/exactness $(ARGS)

# The sanitizer must be there before Python is, and the C++ library, whose exceptions it watches, with it; leaks are
# Python's own, it never frees all.
SANITIZE ?= address,undefined
sanitize: sanitized  ## native tests with sanitizers in the core (SANITIZE=thread for races, SETS=best for one instruction set)
	LD_PRELOAD="$$($(CXX) -print-file-name=lib$(if $(findstring thread,$(SANITIZE)),tsan,asan).so) \
	  $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 TSAN_OPTIONS=halt_on_error=1 \
	QUIRE_TEST_CORE=$$(echo build/sanitize-$(SANITIZE)/_core.*.so) $(PYTEST) -n auto -p no:cacheprovider tests/native $(ARGS)

# Beside tests that mostly wait it takes what they leave of the processors.
sanitized: .venv/.test
	$(CMAKE) -B build/sanitize-$(SANITIZE) -DQUIRE_SANITIZE=$(SANITIZE) -DQUIRE_WERROR=ON -DQUIRE_SETS=$(or $(SETS),here) >/dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" nice cmake --build build/sanitize-$(SANITIZE)

# The unit is checked with the command of this folder, as systemd wants one that exists.
deployment: .venv/.test  ## check the files for systemd and Kubernetes in examples/ (needs systemd-analyze)
	@command -v systemd-analyze >/dev/null || { echo "quire: systemd-analyze is missing: sudo apt install systemd" >&2; exit 1; }
	@mkdir -p build && sed 's#/opt/quire/bin/quire#$(CURDIR)/$(BIN)/quire#' examples/quire.service > build/quire.service
	@! systemd-analyze verify build/quire.service 2>&1 | grep .  # it only warns of most mistakes
	@$(PIP) install 'kubernetes-validate==1.37.*'
	$(BIN)/kubernetes-validate --strict --quiet examples/kubernetes/*.yaml

# Of each kind of kernel and every instruction set that qemu knows, what takes minutes there and not hours.
ARM_TESTS := tests/native/test_ops.py tests/native/test_native_exactness.py tests/native/test_coded.py \
  tests/native/test_attend.py tests/native/test_sampling.py tests/native/test_native_state.py \
  tests/native/test_packing.py tests/native/test_families.py tests/native/test_probe.py \
  tests/model/test_goldens.py tests/model/test_exactness.py
arm: .wheels/.done  ## build for ARM and test it under qemu (needs root and an hour; ARGS="TESTS" for others than it chooses)
	@command -v mmdebstrap qemu-aarch64-static >/dev/null || { apt-get -qq update && \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends mmdebstrap qemu-user-static >/dev/null; }
	.wheels/bin/python scripts/arm.py -o faulthandler_timeout=1800 $(or $(ARGS),-n 2 $(ARM_TESTS))

sdist: .wheels/.done  ## build the source package in dist/, and check which files are in it
	@rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) .wheels/bin/python -m build --sdist --outdir dist .
	.wheels/bin/python scripts/check_package.py dist/*.tar.gz

wheel: sdist  ## build the wheels for Linux, and try them in chroots (root, debootstrap, half an hour; ARGS="--architecture aarch64")
	PATH="$(CURDIR)/.wheels/bin:$$PATH" .wheels/bin/python scripts/wheels.py $(ARGS)
	.wheels/bin/python scripts/check_package.py dist/*.whl

clean:  ## remove the environment, caches and builds
	rm -rf .venv .clients .ray .cuda .browser .agents .wheels build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find quire tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what is installed stays so until pyproject.toml or the native core changes.
NATIVE := CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)

.venv/.tools: pyproject.toml | .venv/bin/python
	@$(PIP) install cmake ninja $$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	@touch $@

.venv/.run: .venv/.tools pyproject.toml $(NATIVE)
	@echo 'quire: building and installing into .venv (once; some minutes) ...' >&2
	@$(EDITABLE) . --config-settings=cmake.define.QUIRE_SETS=$(or $(SETS),best)
	@touch $@

.venv/.test: .venv/.tools pyproject.toml $(NATIVE)
	@echo 'quire: building and installing with the tools for tests into .venv (once; some minutes) ...' >&2
	@$(EDITABLE) '.[test]' $(TESTED)
	@touch $@ .venv/.run

.venv/.oracle: .venv/.test
	@echo 'quire: installing PyTorch and transformers into .venv (once; about 1 GB) ...' >&2
	@$(EDITABLE) '.[test,oracle]' $(TESTED)
	@touch $@

.clients/.done: tests/clients/requirements.txt | .venv/bin/python
	@echo 'quire: installing clients of the server into .clients (once; about 600 MB) ...' >&2
	@rm -rf .clients && $(BIN)/python -m venv .clients
	@.clients/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile -r $<
	@.clients/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile --no-deps \
	  'lm_eval==0.4.13'
	@touch $@

# Ray beside what .venv has: where both have a package, Ray's line of it goes first.
.ray/.done: pyproject.toml | .venv/bin/python
	@echo 'quire: installing Ray into .ray (once; about 500 MB) ...' >&2
	@rm -rf .ray && $(BIN)/python -m venv .ray
	@.ray/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile 'ray[serve]>=2.60,<3'
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  >"$$(.ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/quire-venv.pth"
	@touch $@

.cuda/.done: pyproject.toml | .venv/bin/python
	@echo 'quire: installing Triton, cuda-core and nvmath-python into .cuda (once; about 1 GB) ...' >&2
	@rm -rf .cuda && $(BIN)/python -m venv .cuda
	@.cuda/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile 'triton==3.9.*' \
	  'cuda-core>=1.2,<2' 'cuda-bindings>=13.0,<14' 'nvmath-python>=1.0,<2' ml_dtypes
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  >"$$(.cuda/bin/python -c 'import site; print(site.getsitepackages()[0])')/quire-venv.pth"
	@touch $@

.browser/.done: tests/browser/requirements.txt | .venv/bin/python
	@echo 'quire: installing what drives Chromium into .browser (once; about 200 MB) ...' >&2
	@rm -rf .browser && $(BIN)/python -m venv .browser
	@.browser/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile -r $<
	@touch $@

.agents/.done: tests/agents/package.json tests/agents/requirements.txt | .venv/bin/python
	@command -v npm >/dev/null || { echo "quire: npm is missing; the agents need Node.js 20 or newer." >&2; exit 1; }
	@echo 'quire: installing coding agents into .agents (once; about 1.5 GB) ...' >&2
	@rm -rf .agents && mkdir .agents && cp tests/agents/package.json .agents
	@npm install --prefix .agents --no-audit --no-fund --no-update-notifier --loglevel=error
	@$(BIN)/python -m venv .agents/aider
	@.agents/aider/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile \
	  -r tests/agents/requirements.txt
	@touch $@

.wheels/.done: | .venv/bin/python
	@echo 'quire: installing what builds and checks packages into .wheels (once) ...' >&2
	@rm -rf .wheels && $(BIN)/python -m venv .wheels
	@.wheels/bin/python -m pip -qq --disable-pip-version-check --no-input install 'build>=1.3' \
	  'abi3audit>=0.0.26' uv
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "quire: $(PYTHON) is missing or older than Python 3.11." >&2; \
	  echo "hint: sudo apt install python3 python3-venv, or name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "quire: this Python cannot make environments: its venv package is not installed." >&2; \
	  echo "hint: sudo apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@rm -rf .venv && $(PYTHON) -m venv .venv
