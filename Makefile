# Everything a fresh clone needs. PYTHON may name any Python from 3.11 on: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: help install test lint format quickstart docs lock clean

help:            ## what can be made
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

install: $(READY)  ## a .venv with every extra and the development tools, as pinned in requirements.lock

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adlm needs Python 3.11 or newer; try make install PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)

test: $(READY)  ## the tests (those that need a GPU or the golden folder skip, and say so); SLOW=1 adds the exhaustive ones
	$(VENV)/bin/python -m pytest -n $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )) --dist worksteal $(if $(SLOW),-m "slow or not slow")

lint: $(READY)  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)  ## rewrite the code in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

quickstart: $(READY)  ## train an anchored model and its baseline on speeches, compare them, and leave runs/quickstart/report.html
	$(VENV)/bin/adlm quickstart --out runs/quickstart

docs: $(READY)  ## the documentation site: open site/index.html in a browser, no server needed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo 'open site/index.html in a browser'

lock: $(READY)  ## pin what the .venv holds now
	@{ grep '^#' requirements.lock; $(VENV)/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:           ## forget the .venv and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
