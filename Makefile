# make run    chat with the embedded demo model        make test   lint and all tests
# Everything happens in .venv; variables: PYTHON (the interpreter to begin with), ARGS (passed on).

SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input

# Test processes run side by side: one thread each for matrix products.
TEST_ENV := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

.PHONY: help run test lint format oracle clients agents endurance sanitize clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18
	@echo '  PYTHON=python3.12 chooses the interpreter; ARGS="..." is passed to quire or pytest.'

run: .venv/.run  ## chat with the embedded demo model (ARGS="MODEL" for another one)
	@exec $(BIN)/quire run $(ARGS)

test: lint  ## lint, then every test that can run here
	$(PYTEST) -n auto $(ARGS)

lint: .venv/.test  ## ruff check, ruff format --check, clang-format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*.* csrc/*/*.*)
	$(BIN)/mypy

format: .venv/.test  ## write every file in the one format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard csrc/*.* csrc/*/*.*)

oracle: .venv/.oracle  ## compare with PyTorch and transformers (installs them)
	$(PYTEST) -n auto tests/oracle $(ARGS)

# They have an environment of their own: older lines than .venv has, and much that the server never needs.
clients: .clients/.done .venv/.test  ## call the server with more clients (installs them)
	QUIRE_TEST_PYTHON=$(CURDIR)/$(BIN)/python .clients/bin/python -m pytest --confcutdir=tests/clients \
	  -p no:cacheprovider -W ignore tests/clients $(ARGS)

agents: .agents/.done .venv/.test  ## run coding agents against the server (installs them; needs npm)
	$(BIN)/python -m pytest -o faulthandler_timeout=1500 tests/agents $(ARGS)

endurance: .venv/.test  ## load, kill and drain servers for an hour (ARGS="faults --parts drains"; docs/soak.md)
	$(BIN)/python tests/endurance $(ARGS)

# The sanitizer must be there before Python is, and the C++ library, whose exceptions it watches, with it; leaks are
# Python's own, it never frees all.
SANITIZE ?= address,undefined
sanitize: .venv/.test  ## native tests with sanitizers in the core (SANITIZE=thread for races)
	@$(PIP) install nanobind cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/sanitize-$(SANITIZE) -G Ninja -DQUIRE_SANITIZE=$(SANITIZE) \
	  -DQUIRE_WERROR=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python >/dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/sanitize-$(SANITIZE)
	LD_PRELOAD="$$($(CXX) -print-file-name=lib$(if $(findstring thread,$(SANITIZE)),tsan,asan).so) \
	  $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 TSAN_OPTIONS=halt_on_error=1 \
	QUIRE_TEST_CORE=$$(echo build/sanitize-$(SANITIZE)/_core.*.so) $(PYTEST) -n auto -p no:cacheprovider tests/native $(ARGS)

clean:  ## remove the environment, caches and builds
	rm -rf .venv .clients .agents build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find quire tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what is installed stays so until pyproject.toml or the native core changes.
NATIVE := CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)

.venv/.run: pyproject.toml $(NATIVE) | .venv/bin/python
	@echo 'quire: building and installing into .venv (once; two to three minutes) ...' >&2
	@$(PIP) install --editable .
	@touch $@

.venv/.test: pyproject.toml $(NATIVE) | .venv/bin/python
	@echo 'quire: building and installing with the tools for tests into .venv (once; two to three minutes) ...' >&2
	@$(PIP) install --editable '.[test]' --config-settings=cmake.define.QUIRE_TWIN=ON
	@touch $@ .venv/.run

.venv/.oracle: .venv/.test
	@echo 'quire: installing PyTorch and transformers into .venv (once; about 1 GB) ...' >&2
	@$(PIP) install --editable '.[test,oracle]' --config-settings=cmake.define.QUIRE_TWIN=ON
	@touch $@

.clients/.done: tests/clients/requirements.txt | .venv/bin/python
	@echo 'quire: installing clients of the server into .clients (once; about 600 MB) ...' >&2
	@rm -rf .clients && $(BIN)/python -m venv .clients
	@.clients/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile -r $<
	@.clients/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-compile --no-deps \
	  'lm_eval==0.4.13'
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

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "quire: $(PYTHON) is missing or older than Python 3.11." >&2; \
	  echo "hint: sudo apt install python3 python3-venv, or name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "quire: this Python cannot make environments: its venv package is not installed." >&2; \
	  echo "hint: sudo apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@rm -rf .venv && $(PYTHON) -m venv .venv
