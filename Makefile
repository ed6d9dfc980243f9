# Each target sets up .venv by itself on a fresh machine: only make and a Python with venv are needed.
#
#   make demo      train eight small classifiers and take them all the way
#   make test      the tests             make test ARGS='tests/artifacts/test_store_publish.py -k names' WORKERS=4
#   make test-extended more cases, which `make test` leaves out   make test-slow the longest tests
#   make clients   an environment for tests/serve/test_clients.py: tritonclient   make clients-kserve: kserve's own
#   make check     lint, format, types, import direction
#   make package   a wheel and a source package in dist/, and what a user gets of them
#   make docs      the documentation site, in site/
#   make docs-serve the site on http://127.0.0.1:8000 while you edit it
#   make bench     the suite of reference networks   make bench SIZE=full ARGS='--rows vit --threads 2'
#   make format    mend what ruff can mend alone
#   make clean     remove what these targets made, the environment too

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2
MARK ?= not slow and not extended
ARGS ?=
SIZE ?= cpu

# A test process has one thread, so that the workers do not fight for cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-extended test-slow clients clients-kserve
.PHONY: check package docs docs-serve docs-figures bench format clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

# torch alone first and pinned, so that a CPU build which pip finds at hand is taken. A stamp comes last: a broken setup is done again.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("widepack needs Python 3.10 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	@touch $@

$(STAMP): pyproject.toml $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# What the demo needs and no more: no linters, no transformers.
$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

test-extended:
	@$(MAKE) test MARK='extended and not slow'

test-slow:
	@$(MAKE) test MARK=slow ARGS='--timeout 3600 $(ARGS)'

demo: $(VENV)/.demo
	@$(BIN)/widepack demo

test: $(STAMP)
	@$(BIN)/python -m compileall -q widepack artifacts bench cli serve  # the processes of tests import faster
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(MARK),-m '$(MARK)') $(ARGS)

# Clients of others for the tests of the server. Their pins conflict with those of $(VENV).
$(VENV)-clients/.ready: tests/serve/clients/triton.txt
$(VENV)-clients-kserve/.ready: tests/serve/clients/kserve.txt
$(VENV)-clients/.ready $(VENV)-clients-kserve/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@

clients: $(VENV)-clients/.ready

clients-kserve: $(VENV)-clients-kserve/.ready

check: $(STAMP)
	scripts/check

# The tools of the site. Nothing is read from the network while it is built.
$(VENV)/.docs: $(STAMP)
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

# A wheel and a source package in dist/, each tried in an environment without NumPy.
package: $(STAMP)
	scripts/check_package $(BIN)/python

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# After bench/results changed: the tables and the pictures of the pages.
docs-figures: $(VENV)/.docs
	$(BIN)/python scripts/docs/result_pages.py
	$(BIN)/python scripts/docs/plots.py

# Without ONNX Runtime its baseline is skipped, and says so.
$(VENV)/.onnx: $(STAMP)
	-$(PIP) install -c constraints.txt -e '.[dev,onnx]' && touch $@

bench: $(VENV)/.onnx
	$(BIN)/widepack bench-suite $(SIZE) --pin --json suite-$(SIZE).json $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(VENV)-clients $(VENV)-clients-kserve demo build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
