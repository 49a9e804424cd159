# One command for each job; `make` lists them. Needs Python 3.11 or newer and nothing else. The first
# use makes the environment in $(VENV), and a change of pyproject.toml or the constraints updates it.

PYTHON ?= python3
VENV   ?= .venv
ENGINE ?= jax
ARGS   ?=
JOBS   ?= 3

CONSTRAINTS := requirements/constraints.txt
BIN         := $(VENV)/bin
INSTALL     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
INPUTS      := pyproject.toml $(CONSTRAINTS)

# A stamp stands for one set of extras, installed into $(VENV).
DEMO := $(VENV)/.stamp-demo-$(ENGINE)
TEST := $(VENV)/.stamp-test
DEV  := $(VENV)/.stamp-dev

EXTRAS_jax   := jax,demo
EXTRAS_torch := torch,demo

BENCHES := $(subst _,-,$(patsubst benchmarks/bench_%.py,bench-%,$(wildcard benchmarks/bench_*.py)))
PROOFS  := $(subst _,-,$(patsubst proofs/proof_%.py,proof-%,$(wildcard proofs/proof_*.py)))
# A benchmark or a proof with its own requirements file (frameworks to compare with) has its own
# environment, so that its requirements never decide which versions the tests run on.
PEERED  := $(filter $(patsubst requirements/%.txt,%,$(wildcard requirements/bench-*.txt)),$(BENCHES))
APART   := $(patsubst requirements/%.txt,%,$(wildcard requirements/proof-*.txt))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo recording test check format format-check lint types contracts freeze bench docs docs-serve release compat clean FORCE

help:  ## list the targets
	@echo "Targets (ARGS='...' is passed to the program):"
	@sed -n 's/^\($$(.*): \)\{0,1\}\([a-z%-]*\):.*  ## \(.*\)/  \2|\3/p' $(firstword $(MAKEFILE_LIST)) \
	  | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

setup: $(DEV)  ## make the environment for development

demo: $(DEMO)  ## train, kill, resume elsewhere, compare the bits (ENGINE=jax or torch)
	$(BIN)/perdure demo --engine $(ENGINE) $(ARGS)

recording: $(VENV)/.stamp-demo-jax  ## record the demo in a terminal, as docs/demo.svg
	$(BIN)/python docs/drawings/recording.py

test: $(TEST)  ## run the tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: format-check lint types contracts test  ## format, lint, types, import contracts, tests

format: $(DEV)  ## rewrite the code in the project's format
	$(BIN)/ruff format
	$(BIN)/ruff check --select I --fix

format-check: $(DEV)  ## is the code in the project's format?
	$(BIN)/ruff format --check

lint: $(DEV)  ## ruff
	$(BIN)/ruff check

types: $(DEV)  ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(DEV)  ## layers import only downward
	$(BIN)/lint-imports

freeze: $(TEST)  ## accept a change of the public names or of the command line
	$(BIN)/python tests/test_public_names.py

bench: $(BENCHES)  ## every benchmark, one after another

# Static rules: as patterns they would also match requirements/bench-%.txt and proof-%.txt.
$(filter-out $(PEERED),$(BENCHES)): bench-%: $(TEST) FORCE  ## benchmarks/bench_%.py, figures to build/bench-%.json and .svg
	@mkdir -p build
	$(BIN)/python benchmarks/bench_$(subst -,_,$*).py --out build/$@.json $(ARGS)

$(PEERED): bench-%: .venv-bench-%/.stamp FORCE
	@mkdir -p build
	.venv-bench-$*/bin/python benchmarks/bench_$(subst -,_,$*).py --out build/$@.json $(ARGS)

$(APART): proof-%: .venv-proof-%/.stamp FORCE
	.venv-proof-$*/bin/python proofs/proof_$(subst -,_,$*).py $(ARGS)

$(filter-out $(APART),$(PROOFS)): proof-%: $(TEST) FORCE  ## proofs/proof_%.py
	$(BIN)/python proofs/proof_$(subst -,_,$*).py $(ARGS)

release: .venv-releasing/.stamp  ## build the sdist and the wheel, check and try them; uploads nothing
	.venv-releasing/bin/python releasing/release.py $(ARGS)

compat: .venv-releasing/.stamp  ## the lowest and the newest releases of the dependencies, each Python
	@mkdir -p build
	.venv-releasing/bin/python releasing/compat.py $(ARGS)

docs: .venv-docs/.stamp  ## build the site into build/site; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	.venv-docs/bin/python docs/site/check.py build/site

docs-serve: .venv-docs/.stamp  ## show the site at http://127.0.0.1:8000, and rebuild it after each change
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --no-strict

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) .venv-bench-* .venv-proof-* .venv-docs .venv-releasing build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- the environment

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("perdure needs Python 3.11 or \
	newer, and $(PYTHON) is " + sys.version.split()[0] + "; use: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# Editable, so that one environment serves the demo and the tests, in either order.
$(VENV)/.stamp-demo-%: $(INPUTS) | $(BIN)/python
	$(if $(EXTRAS_$*),,$(error ENGINE is jax or torch, not '$*'))
	@echo "Installing perdure with its $* engine into $(VENV) (once)"
	$(INSTALL) -e '.[$(EXTRAS_$*)]'
	@touch $@

.venv-%/.stamp: requirements/%.txt $(INPUTS)
	@echo "Installing perdure and what is in $< into $(@D) (once)"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e . -r $<
	@touch $@

$(TEST): $(INPUTS) | $(BIN)/python
	@echo "Installing perdure and its test dependencies into $(VENV) (once)"
	$(INSTALL) -e '.[test]'
	@touch $@

# `dev` holds all that `test` holds.
$(DEV): $(INPUTS) | $(BIN)/python
	@echo "Installing perdure and its development tools into $(VENV) (once)"
	$(INSTALL) -e '.[dev]'
	@touch $(TEST) $@
