# The same commands that CI runs. `make demo` and `make test` need nothing but Python 3.11+ and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check lint types layers sim proto up compose-test clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/manylora demo

test: $(STAMP)
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

check: lint types layers

sim: $(STAMP)
	$(BIN)/python -m pytest -q tests/sim

proto: $(STAMP)
	$(BIN)/python protos/generate.py

up: $(STAMP)
	$(BIN)/manylora up --model $(MODEL)

compose-test: $(STAMP)
	$(BIN)/python -m pytest -q -m compose tests/compose

clean:
	rm -rf $(VENV) build dist
