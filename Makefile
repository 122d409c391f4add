# Two commands matter: `make chat` and `make test`. Both make the environment first if it isn't there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled when nanochat is installed; here again after their sources change.
NATIVE := nanochat/kernels/native
# Tests run side by side (tests/conftest.py says how), one thread each: OpenMP loses far more than it gains on
# contended cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.PHONY: chat test check long soak lint format screens clean

chat: $(VENV)/installed $(VENV)/native
	@$(BIN)/nanochat

test: lint
	$(PYTEST)

check: lint ## everyday: without the slow tests
	$(PYTEST) -m "not slow"

long: $(VENV)/installed-dev ## the whole of what the tests try a share of: a quarter of an hour
	$(PYTEST) -m long
	$(BIN)/python -m benchmarks.fuzz --workers 2

soak: $(VENV)/installed-dev ## disorder for five minutes; docs/reliability.md has the long runs
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak requests --count 10000
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak threads --threads 64 --minutes 1
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak bridge --count 200 --cases 80

lint: $(VENV)/installed-dev $(VENV)/native
	$(BIN)/ruff format --check nanochat tests benchmarks
	$(BIN)/ruff check nanochat tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff format nanochat tests benchmarks
	$(BIN)/ruff check --fix nanochat tests benchmarks

screens: $(VENV)/installed ## the pictures of docs/screens, anew; figures mean something on a quiet machine only
	$(BIN)/python -m benchmarks.screens

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanochat needs Python 3.11 or newer; name one: make chat PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): PyTorch is large, so this takes a minute or more."
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

$(VENV)/native: $(VENV)/installed $(wildcard $(NATIVE)/*.c $(NATIVE)/*.h $(NATIVE)/build.py)
	@$(BIN)/python $(NATIVE)/build.py --if-changed
	@touch $@

clean:
	rm -rf $(NATIVE)/kernels.bin $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
