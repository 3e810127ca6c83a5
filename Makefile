# Needs Python 3.11 or newer and make. `make demo` and `make test` set up .venv by themselves, and again only when
# pyproject.toml or constraints/dev.txt change.
#
#   make demo ARGS="--quick"         the demo, with its options
#   make test                        everything that CI checks
#   make test ARGS="-k region"       the same with pytest options
#   make test WORKERS=0              all tests one after the other; else two files at once, three of those with jobs
#   make bench                       all benchmarks, and their tables in docs/performance.md; ARGS="peer loss": those
#   make check                       lint, types, imports: no tests
#   make format                      mend what ruff can mend
#   make clean                       remove caches and outputs; distclean: .venv too
#
# Settings, on the command line or in the environment:
#   PYTHON       the interpreter that .venv is made from
#   TORCH_INDEX  one more package index, for torch. On Linux the standard torch wheel brings gigabytes of CUDA libraries
#                that neither demo nor tests use; with TORCH_INDEX=https://download.pytorch.org/whl/cpu pip takes the
#                CPU build of the same version instead.

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench check lint types imports format clean distclean

ARGS ?=
WORKERS ?= 2
# Processes of a job wait for one another: on two cores a third file beside them finds the time that they leave.
JOB_WORKERS ?= $(if $(filter 0,$(WORKERS)),0,3)
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

# A second megatron-core beside the one in .venv, for tests/megatron/test_versions.py alone: a process of the test puts
# this folder first on its PYTHONPATH. Not in constraints/dev.txt, which has one version of each package.
OLDER_MEGATRON := 0.15.3
OLDER := $(VENV)/megatron-core-$(OLDER_MEGATRON)

# torchtitan and its packages, for examples/torchtitan and its test alone, which put this folder first on PYTHONPATH: one
# of them is older than the one in .venv.
TORCHTITAN := $(VENV)/torchtitan-$(shell sed -n 's/^torchtitan==//p' constraints/torchtitan.txt)

# Some names on PATH do not run (pyenv's shims of versions that are not chosen) and some interpreters lack venv
# (Debian without python3-venv): take the first that does all that is needed.
USABLE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	"$$name" -c '$(USABLE)' >/dev/null 2>&1 && { echo "$$name"; break; }; done)

PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip

PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(STAMP) $(OLDER) $(TORCHTITAN)

# The stamp comes last: a set-up that was interrupted or failed is done again. -qq keeps errors only.
# megatron-core's own metadata asks for torch>=2.6, numpy and packaging>=24.2 without upper bounds or CUDA packages
# (those are in its extras, unused here), so it is installed like any other package, with no need of --no-deps.
$(STAMP): pyproject.toml constraints/dev.txt
	@if ! $(BIN)/python -c '$(USABLE)' >/dev/null 2>&1; then \
		python='$(PYTHON)'; \
		if ! "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
			echo "No usable Python ($${python:-none of python3.11, 3.12, 3.13, python3}):" \
				"shardshift needs 3.11 or newer with the venv module." >&2; \
			echo "Name one that will do: make PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Setting up $(VENV) with $$python (once, a minute or two)" >&2; \
		"$$python" -m venv --clear $(VENV); \
	fi
	@$(PIP) install -qq $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') \
		--constraint constraints/dev.txt --editable '.[demo,dev,megatron,trace]'
	@touch $@

# Into a folder of another name first, so that what was interrupted is done again. No --upgrade: the folder is new.
$(OLDER): | $(STAMP)
	@rm -rf $@.part
	@$(PIP) install -qq --no-deps --target $@.part megatron-core==$(OLDER_MEGATRON)
	@mv $@.part $@

# --no-deps: the list is whole, and what .venv has is not to be had twice.
$(TORCHTITAN): constraints/torchtitan.txt | $(STAMP)
	@rm -rf $@ $@.part
	@$(PIP) install -qq --no-deps --target $@.part --requirement constraints/torchtitan.txt
	@mv $@.part $@
	@touch $@

demo: $(STAMP)
	@$(BIN)/shardshift demo $(ARGS)

test: check $(OLDER) $(TORCHTITAN)
# Three parts (tests/conftest.py): tests of one process; jobs of several that bear others beside them; and those that
# wait for short limits to pass, and bear only one another. Status 5 is no tests: ARGS may choose some of one part.
# Each worker of each part imports all test files: bytecode is kept, even where the environment says not to, or pytest
# would compile them eight times over. conftest.py says which file comes first, xdist does not.
	$(PYTEST) -n $(WORKERS) -m 'not alone and not patient' $(ARGS) || [ $$? -eq 5 ]
	$(PYTEST) -n $(JOB_WORKERS) -m patient $(ARGS) || [ $$? -eq 5 ]
	$(PYTEST) -n $(JOB_WORKERS) -m alone $(ARGS) || [ $$? -eq 5 ]

# One process each, so that none inherits another's memory. Neither a missed goal nor a benchmark that fails ends the run:
# what was measured is what the documentation says, and where nothing was, the table stays.
bench: $(STAMP)
	@missed= began=$$(date +%s); \
	for name in $(or $(ARGS),$$($(BIN)/shardshift bench list --json 2>/dev/null \
		| $(BIN)/python -c 'import json, sys; print(*json.load(sys.stdin))')); do \
		since=$$(date +%s); \
		OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 RES_OPTIONS=timeout:1 $(BIN)/shardshift bench $$name \
			|| missed="$$missed $$name"; \
		$(BIN)/shardshift bench $$name --docs || missed="$$missed $$name(table)"; \
		echo "$$name took $$(($$(date +%s) - since)) s" >&2; \
	done; \
	echo "all took $$(($$(date +%s) - began)) s" >&2; \
	if [ -n "$$missed" ]; then echo "goals missed or not run:$$missed" >&2; exit 1; fi

check: lint types imports

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist out .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
