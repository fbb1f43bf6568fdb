# `make search` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
# one thread a process: two torch jobs with two threads each on two cores are many times slower
export OMP_NUM_THREADS ?= 1

.PHONY: search test prove check format clean

# find, train and judge a network on the embedded digits
search: .venv/ready
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python examples/digits.py

test: check
	$(BIN)/python -m pytest -n 2

# the same tests with large numbers: thousands of mutations, dozens of kills, many seeds
prove: check
	AUTONL_PROVE=1 $(BIN)/python -m pytest -n 2

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
