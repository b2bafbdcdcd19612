# Each target sets up what it needs by itself: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: two processes with a thread pool each crawl on two cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
CORES ?= 4
GPUS ?= 4

.PHONY: demo test quick lint format clean

demo: .venv/ready ## the main job on a real target and real prompts, any machine, minutes
	$(BIN)/draftmill fetch demo
	$(BIN)/snakemake --cores $(CORES) --resources gpu=$(GPUS)
	@$(BIN)/draftmill summary

test: .venv/ready-dev ## the whole test suite
	$(BIN)/python -m pytest

quick: .venv/ready-dev ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow"

lint: .venv/ready-dev ## ruff, mypy, snakefmt, snakemake --lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/python tests/lint_workflow.py

format: .venv/ready-dev ## bring all code into form
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile rules

reference: .venv/ready ## write config/README.md and config/schema.json from the typed configuration
	$(BIN)/draftmill reference --write

clean: ## remove the environment and the demo's inputs and outputs
	rm -rf .venv build demo logs .draftmill .snakemake

.venv/ready: envs/cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement envs/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

.venv/ready-dev: .venv/ready envs/dev.txt envs/dflash.txt
	$(BIN)/python -m pip install --quiet --requirement envs/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement envs/dflash.txt
	touch $@
