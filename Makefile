# serve, test, test-long, gpu-check, lint, audit, bench, clean. Everything is installed into .venv; a
# stamp says that it is.
#   make serve ARGS="--port 8001"     flags of tokend serve

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.DELETE_ON_ERROR:
.PHONY: serve test test-long gpu-check lint audit bench clean

# What runs on a GPU is installed where there is one
GPU := $(if $(shell nvidia-smi -L 2>/dev/null),$(VENV)/installed-gpu)

serve: $(VENV)/installed $(GPU)
	@$(BIN)/tokend serve $(ARGS)

# Each process of the quick tests has a core to itself: more threads wait for each other
test: lint
	@echo "tests: the quick ones"
	@OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -m "not slow and not long" -n logical --maxprocesses 8
	@echo "tests: the slow ones"
	@$(BIN)/python -m pytest -q -m "slow and not long"

# Not those that try steps of both kinds themselves, or what comes before and after any step
OVERLAPPED := $(addprefix tests/e2e/test_,agents.py beams.py choices.py gemma.py kv_connector.py \
	parameters.py parity.py sessions.py tenants.py tensor_parallel.py) $(addprefix \
	tests/chaos/test_,deaths.py disconnects.py faults.py pins.py pressure.py ranks.py)

test-long: $(VENV)/installed-test
	@echo "tests: the long ones"
	@$(BIN)/python -m pytest -q -m long
	@echo "tests: the scheduler once more, compiled"
	@$(BIN)/python -m engine_core.build_compiled
	@OMP_NUM_THREADS=1 TOKEND_TEST_COMPILED=1 $(BIN)/python -m pytest -q \
		-m "not slow and not long" -n logical --maxprocesses 8 tests/engine_core
	@echo "tests: parity once more by priority"
	@TOKEND_TEST_FLAGS="--scheduling-policy priority" \
		$(BIN)/python -m pytest -q -m "slow and not long" tests/e2e/test_parity.py
	@echo "tests: those that depend on how steps follow each other once more, with overlapped ones"
	@TOKEND_TEST_FLAGS=--async-scheduling $(BIN)/python -m pytest -q -m "slow or long" $(OVERLAPPED)

# Kernels, models and speed on a GPU, in 25 minutes at most; a table and gpu-check.json after each
# phase. ARGS="--only attention" runs some phases. tests/gpu/first_hour.sh has it in four commands,
# for a host without pip and network.
gpu-check: $(VENV)/installed-test $(GPU)
	@$(BIN)/python -m tests.gpu $(ARGS)

lint: $(VENV)/installed-test
	@echo "lint and types"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# Not part of the tests: what is known of a package changes without us. --strict: a package that
# the database was not asked about is a failure, not a pass.
audit:
	@echo "advisories on what is pinned"
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && \
		.venv-audit/bin/pip --disable-pip-version-check install -qq pip-audit; }
	@.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

bench: $(VENV)/installed
	@$(BIN)/tokend bench processes $(ARGS)

clean:
	rm -rf $(VENV) .venv-audit build dist *.egg-info engine_core/csrc/*.so worker/csrc/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: it is the largest by far, and the rest is resolved around it
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokend needs Python 3.11 or newer")'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (some 200 MB; once)"
	@$(PIP) torch
	@touch $@

KERNELS := engine_core/build_native.py engine_core/build_compiled.py worker/build_kernels.py \
	$(wildcard engine_core/csrc/*.c worker/csrc/*.cpp worker/csrc/*.h)

$(VENV)/installed: $(VENV)/torch pyproject.toml setup.py $(KERNELS)
	@echo "installing tokend and what it needs, building its kernels (once)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-gpu: $(VENV)/installed
	@echo "installing what a GPU needs (large; once)"
	@$(PIP) --editable '.[gpu]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo "installing what the tests need (once)"
	@$(PIP) --editable '.[test]'
	@$(BIN)/python -m worker.build_kernels
	@touch $@
