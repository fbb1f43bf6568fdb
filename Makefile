# `make search` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
# one thread a process: two torch jobs with two threads each on two cores are many times slower
export OMP_NUM_THREADS ?= 1

.PHONY: search test prove check docs browser format clean

# find, train and judge a network on the embedded digits
search: .venv/ready
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python examples/digits.py

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal

# the same tests with large numbers: thousands of mutations, dozens of kills, many seeds
prove: check
	AUTONL_PROVE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the documentation as a site, in build/docs
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/docs

# what the tests of the report in a real browser need
browser: .venv/ready
	$(BIN)/pip install --quiet --editable ".[browser]" --constraint constraints.txt
	command -v chromium || apt-get install --yes --no-install-recommends chromium

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[dev,demo]" --constraint constraints.txt
	touch $@

.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --editable ".[docs]" --constraint constraints.txt
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
