# Each target sets up what it needs by itself: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: two processes with a thread pool each crawl on two cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
CORES ?= 4
GPUS ?= 4
WORKERS ?= 2

.PHONY: demo demo-s3 serve-s3 test quick browser lint format clean chaos

demo: .venv/ready ## the main job on a real target and real prompts, any machine, minutes
	$(BIN)/draftmill fetch demo
	$(BIN)/snakemake --cores $(CORES) --resources gpu=$(GPUS)
	@$(BIN)/draftmill summary

demo-s3: .venv/ready-dev ## the demo with its store on a real S3 service (SeaweedFS, in the folder build-s3)
	$(BIN)/draftmill fetch demo
	mkdir -p build-s3
	sed 's|^store: .*|store: s3://draftmill/demo|' config/config.yaml > build-s3/config.yaml
	$(BIN)/draftmill serve-s3 build-s3 --port 0 -- sh -c '$(BIN)/snakemake --configfile build-s3/config.yaml \
	    --workflow-profile profiles/s3 --cores $(CORES) --resources gpu=$(GPUS) \
	    && $(BIN)/draftmill summary --configfile build-s3/config.yaml'

serve-s3: .venv/ready-dev ## an S3 service on this machine until Ctrl-C; says what to export
	$(BIN)/draftmill serve-s3 build-s3

test: quick ## the whole test suite: what takes seconds first, side by side, and then what takes longer, one after another
	$(BIN)/python -m pytest -m "slow and not chaos"

quick: .venv/ready-dev ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow and not chaos" -n $(WORKERS) --dist loadfile

chaos: .venv/ready-dev ## a build through kills and outages on SeaweedFS, held against an undisturbed one; half an hour
	$(BIN)/python -m pytest -m chaos
	$(BIN)/python -m tests.chaos.chaos $(if $(SEED),--seed $(SEED))

browser: .venv/ready-browser ## the pages in Debian's Chromium: every view, hostile texts, keyboard, phone, accessibility
	test -x /usr/bin/chromium || { apt-get update && apt-get install --yes --no-install-recommends chromium; }
	$(BIN)/python -m pytest tests/browser

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
	rm -rf .venv build build-s3 demo logs .draftmill .snakemake

.venv/ready: envs/cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement envs/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

.venv/ready-dev: .venv/ready envs/dev.txt envs/dflash.txt
	$(BIN)/python -m pip install --quiet --requirement envs/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement envs/dflash.txt
	touch $@

.venv/ready-browser: .venv/ready-dev envs/browser.txt
	$(BIN)/python -m pip install --quiet --requirement envs/browser.txt
	touch $@
