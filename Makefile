# Everything runs in .venv, which the first target that needs it makes: see `make help`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Unit tests compute, a file at a time; integration tests wait for processes, so more of them fit at a time.
PYTEST := $(BIN)/python -m pytest --no-loadscope-reorder
UNIT := --numprocesses 3 --dist loadfile
INTEGRATION := --numprocesses 5 --dist loadgroup
# uv's progress is for people.
QUIET := $(shell test -t 2 || echo --quiet)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv train lint format schema test test-integration test-all check long nightly hypothesis nightly-chaos
.PHONY: nightly-mutants chaos mutants bench docs docs-test wheel release release-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target what; do printf '%-24s%s\n' "$$target" "$$what"; done

venv: $(INSTALLED) ## make .venv with everything that development needs

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("ddptrain needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another as in: make PYTHON=python3.12")'
	@echo "installing into $(VENV) (the first time torch is downloaded: 3 GB)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check uv
	@$(BIN)/uv pip install $(QUIET) --python $(BIN)/python --compile-bytecode --editable '.[dev]'
	@touch $@

train: $(INSTALLED) ## train configs/petnames.yaml; options go into ARGS
	$(BIN)/ddptrain train configs/petnames.yaml $(ARGS)

lint: $(INSTALLED) ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## format the code, and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: $(INSTALLED) ## write the schema of the configuration, its page and the man page anew
	$(BIN)/ddptrain init --schema > configs/ddptrain.schema.json
	$(BIN)/python -m tests.docs.reference
	$(BIN)/python -m tests.docs.python_reference
	$(BIN)/python -m tests.docs.output_schema
	$(BIN)/python -m tests.docs.man_page

test: $(INSTALLED) ## run the tests for every change (2.5 minutes on 2 cores): unit, commands, end-to-end; options go into ARGS
	$(PYTEST) $(UNIT) tests/unit tests/commands tests/end_to_end $(ARGS)

test-integration: $(INSTALLED) ## run the contract tests, and those with real servers and faults (7 minutes on 2 cores); options go into ARGS
	$(PYTEST) $(INTEGRATION) tests/contract tests/integration $(ARGS)

test-all: test test-integration ## run all tests but those that only `make nightly` runs (10 minutes on 2 cores)

long: $(INSTALLED) ## run the tests that only `make nightly` runs (an hour); options go into ARGS
	$(PYTEST) $(INTEGRATION) -m long $(ARGS)

# Each part runs, whichever fails.
nightly: ## what takes hours: long tests, other examples of hypothesis, chaos for 20 minutes, docs-test, 60 mutants
	@$(MAKE) --keep-going long hypothesis docs-test nightly-chaos nightly-mutants

hypothesis: $(INSTALLED) ## run the unit tests with other examples each time
	$(PYTEST) $(UNIT) --hypothesis-profile nightly tests/unit $(ARGS)

nightly-chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --minutes 20

nightly-mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants --count 60 --survivors

check: lint test ## lint and test

chaos: $(INSTALLED) ## break runs in every way, some minutes long; options go into ARGS
	$(BIN)/python -m tests.chaos $(ARGS)

mutants: $(INSTALLED) ## make small wrong changes that tests must catch; options go into ARGS
	$(BIN)/python -m tests.mutants $(ARGS)

bench: $(INSTALLED) ## measure against torchrun; options go into ARGS
	$(BIN)/python -m tests.bench $(ARGS)

docs: $(INSTALLED) ## build the docs site into site/; a dead link or a missing page fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-test: $(INSTALLED) ## run the console blocks of README and tutorial pages, compare their output; files go into ARGS
	$(BIN)/python -m tests.docs.console $(ARGS)

wheel: $(INSTALLED) ## build the source archive and the wheel into dist/
	$(BIN)/python -m build --no-isolation --outdir dist

release: $(INSTALLED) ## a dry run of a release: all checks, in empty environments of each Python; TAG=v0.2.0 names it
	$(BIN)/python -m tests.support.release --tag $(TAG)

release-check: $(INSTALLED) ## the same without these environments
	$(BIN)/python -m tests.support.release --tag $(TAG) --quick

clean: ## remove .venv, dist and caches; runs/ stays
	rm -rf $(VENV) dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
