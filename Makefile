# make demo | table | test | lint | install | clean; PYTHON chooses the interpreter of .venv, and VENV
# another place for it.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: install demo table test lint clean

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python experiments/table.py --workdir runs/demo --methods zero_shot grpo agon --seeds 0

table: $(VENV)/.installed
	$(BIN)/python experiments/table.py --workdir runs/table --seeds 0 1 2

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find agon_jax experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing agon_jax in $(VENV) (a few minutes the first time)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.installed
	@$(PIP) --editable '.[$*]'
	@touch $@

.PRECIOUS: $(VENV)/.installed-%
