# Every target sets itself up: nothing but Python >= 3.11 (with pip and venv) and make is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

# Files with long timeouts come first (tests/conftest.py), so that none is left to one core at the end.
SPREAD := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Tests of `make test` and harnesses wait for much of their time, so two share a core.
SHARED := -n $(shell $(PYTHON) -c "import os; print(min(8, 2 * os.cpu_count()))") --dist loadfile

# CORE=1 runs the core of a long suite: without the tests that are marked nightly, and what they need.
ONLY_CORE := $(if $(CORE),--core)
SUITES := test test-properties test-browser test-sandboxes test-chaos test-slow test-harnesses test-engines test-experiment

# Every process of every test would compile the package anew where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test checks lint format types layers dependencies budgets unit e2e test-all test-properties test-chaos test-slow test-harnesses test-engines test-experiment test-browser test-sandboxes test-cluster docs bench console lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "make %-14s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt tools/setup.py
	@$(PYTHON) tools/setup.py
	@touch $@

setup: $(STAMP) ## make .venv ready (the other targets do this themselves)

demo: $(STAMP) ## train a tiny model on a real agent harness; options with ARGS="..."
	@$(BIN)/tugline demo $(ARGS)

test: $(STAMP) ## every check, then every test that is not marked slow, harness, engines, experiment, browser, podman or cluster
	@$(MAKE) --no-print-directory -j2 lint types layers dependencies
	@$(BIN)/python tools/bubblewrap.py
	@$(BIN)/pytest $(SHARED) -m "not slow and not harness and not engines and not experiment and not browser and not podman and not cluster" $(ARGS)

checks: lint types layers dependencies budgets ## every check, no other tests

lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## mypy --strict
	@$(BIN)/mypy

layers: $(STAMP) ## import-linter: who may import whom
	@$(BIN)/lint-imports --no-logo

dependencies: $(STAMP) ## deptry: declared and used are the same
	@$(BIN)/deptry src

budgets: $(STAMP) ## size budgets and whether the docs are complete
	@$(BIN)/pytest -q tests/test_house.py

unit: $(STAMP) ## tests without a real harness
	@$(BIN)/pytest $(SPREAD) -m "not pi and not slow and not harness and not engines and not experiment and not browser and not podman and not cluster" $(ARGS)

e2e: $(STAMP) ## tests with the real pi harness
	@$(BIN)/pytest -m "pi and not slow and not harness" $(ARGS)

test-all: $(STAMP) ## every suite, whole, one after the other: one and a half to two hours
	@$(MAKE) --no-print-directory --keep-going $(SUITES)

test-properties: $(STAMP) ## tool calls of every template, and mutated requests, with 2,000 and 10,000 examples: half an hour
	@$(BIN)/python tools/gpt_oss_vocabulary.py .cache/gpt-oss
	@TUGLINE_GPT_OSS=$(CURDIR)/.cache/gpt-oss TUGLINE_CALL_EXAMPLES=2000 TUGLINE_MUTATIONS=10000 $(BIN)/pytest -n auto --timeout 1800 tests/chat/calls tests/gateway/test_mutations.py $(ARGS)

test-chaos: $(STAMP) ## everything killed with kill -9, frozen or without disk, on both stores
	@$(BIN)/pytest -m slow tests/chaos $(ONLY_CORE) $(ARGS)

test-slow: $(STAMP) ## the other long tests: small benchmarks, several processes, the built package, SLURM, Maven
	@[ "$(CORE)" ] || $(BIN)/python tools/slurm.py
	@[ "$(CORE)" ] || $(BIN)/python tools/builds.py
	@$(BIN)/pytest $(SPREAD) -m "slow or cluster" --ignore=tests/chaos --timeout 300 $(ONLY_CORE) $(ARGS)

test-harnesses: $(STAMP) ## every real harness and many agent frameworks against the gateway and a scripted model, without internet
	@[ "$(CORE)" ] || $(BIN)/python tools/podman.py
	@$(BIN)/pytest $(SHARED) --dist worksteal -m harness --timeout 300 $(ONLY_CORE) $(ARGS)

test-engines: $(STAMP) ## real vLLM and SGLang servers, verl and Tinker on CPU (6 GB on first use)
	@$(BIN)/python tools/engines.py $(if $(CORE),vllm)
	@$(BIN)/pytest $(SPREAD) -m engines --timeout 300 $(ONLY_CORE) $(ARGS)

test-experiment: $(STAMP) ## examples/swe_gym at toy size: a tiny Qwen3.5 is trained with each real harness (CORE=1: with one)
	@$(BIN)/python tools/bubblewrap.py
	@$(BIN)/pytest -m experiment $(ONLY_CORE) $(ARGS)

test-browser: $(STAMP) ## the console and the page of a session in a real Chromium (root on Debian gets one installed)
	@$(BIN)/python tools/browser.py
	@[ -d console/node_modules ] || PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix console ci --silent
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -m browser tests/browser --timeout 300 $(ARGS)

test-sandboxes: $(STAMP) ## the tests that run containers, with a real Podman (root on Debian gets one installed)
	@$(BIN)/python tools/podman.py
	@$(BIN)/python tools/builds.py
	@$(BIN)/pytest $(SPREAD) -m "podman and not harness" --timeout 300 $(ONLY_CORE) $(ARGS)

test-cluster: $(STAMP) ## a real SLURM of three nodes (root on Debian gets one installed), and a real Ray of four
	@$(BIN)/python tools/slurm.py
	@$(BIN)/python tools/engines.py verl
	@$(BIN)/pytest -m "cluster or engines" tests/cluster tests/engines/test_ray.py $(ARGS)

docs: $(STAMP) ## the documentation as a site in site/ (170 MB on first use), with every link checked
	@$(BIN)/python tools/docs/build_site.py $(ARGS)

bench: $(STAMP) ## the gateway against a bare proxy, the embedded engine against transformers
	@$(BIN)/tugline bench gateway $(ARGS)
	@$(BIN)/python benchmarks/engine/load.py

console: $(STAMP) ## rebuild the console and the pages of `tugline view --html` (needs Node; the files are committed)
	@cd console && npm ci --silent
	@cd console && npm run --silent types >/dev/null && npm run --silent check && npm run --silent build

lock: $(STAMP) ## constraints.txt with the newest versions; run every suite before you commit it
	@$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager --editable ".[train,demo,dev]"
	@($(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; grep '^ray==' constraints.txt) | sort -f > .venv/lock
	@mv .venv/lock constraints.txt

clean: ## remove the environment and every cache in this folder
	@rm -rf .venv dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
