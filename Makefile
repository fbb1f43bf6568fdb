# `make search` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
# one thread a process: two torch jobs with two threads each on two cores are many times slower
export OMP_NUM_THREADS ?= 1

.PHONY: test prove check format clean

test: check
	$(BIN)/python -m pytest

# the same tests with large numbers: thousands of mutations, dozens of kills, many seeds
prove: check
	AUTONL_PROVE=1 $(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[dev,demo]" --constraint constraints.txt
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
