# Everything that a contributor types. Each target makes the environment that it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
ENV := .venv/.ready
ARGS ?=

##@ The two commands

.PHONY: demo
demo: $(ENV)  ## a real cluster on this machine, one VLMService, one true answer (ARGS=--once ends after it)
	@$(BIN)/vlm demo $(ARGS)

.PHONY: test
test: static $(ENV)  ## static checks and every test, end to end included
	@tools/test.sh

##@ While working

.PHONY: check
check: test  ## format, lint, types, layers, sizes, generated files, tests

.PHONY: static
static: $(ENV)  ## all of check but the tests
	@tools/step.sh "format"          $(BIN)/ruff format --check --quiet .
	@tools/step.sh "lint"            $(BIN)/ruff check --quiet .
	@tools/step.sh "types"           $(BIN)/mypy --no-error-summary
	@tools/step.sh "layers"          $(BIN)/lint-imports --no-logo
	@tools/step.sh "sizes"           $(BIN)/python tools/sizes.py
	@tools/step.sh "structure"       $(BIN)/python tools/structure.py
	@tools/step.sh "terms"           $(BIN)/python tools/terms.py
	@tools/step.sh "generated files" tools/generated.sh --check

.PHONY: test-fast
test-fast: $(ENV)  ## the pure suites in parallel, 3 minutes; prints what it leaves out
	@$(BIN)/python tools/test_fast.py

.PHONY: test-full
test-full: $(ENV)  ## the long form of every law (hours)
	@tools/test.sh --full

.PHONY: clients
clients: $(ENV)  ## clients of OpenAI's API, installed and run unmodified (ARGS=--write updates docs/openai.md)
	@PYTHONPATH=operator:e2e:bench $(BIN)/python -m openai_clients.run $(ARGS)

.PHONY: e2e-nodes
e2e-nodes: $(ENV)  ## both images, install.yaml and the chart on real kubelets, as root (ARGS=--install runs apt-get first)
	@e2e/nodes/run.sh $(ARGS)

.PHONY: sanitize
sanitize: $(ENV)  ## tests of the kernels in C++ with checks of every address and integer (needs libasan)
	@tools/sanitize.sh $(ARGS)

.PHONY: bench
bench: $(ENV)  ## ratios against the limits of this machine and the table of goals, 12 minutes (ARGS="decode", all, --table)
	@$(BIN)/python bench/run.py $(ARGS)

.PHONY: bench-peers
bench-peers: $(ENV)  ## ours against transformers, OpenVINO GenAI, llama.cpp and vLLM, each in an environment of its own (ARGS="openvino")
	@$(BIN)/python bench/peers/run.py $(ARGS)

.PHONY: docs docs-serve
docs: $(ENV)  ## the site of the documentation, in build/site; a broken link or a page outside the index fails
	@$(BIN)/sphinx-build -q -W --keep-going -b dirhtml -c tools/docs_site -d build/site.doctrees . build/site
	@echo "build/site/index.html"
docs-serve: docs  ## the site at http://127.0.0.1:8001
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8001

.PHONY: docs-outputs
docs-outputs: $(ENV)  ## the outputs of offline commands that pages show, written again
	@$(BIN)/python tools/docs_outputs.py $(ARGS)

.PHONY: fmt
fmt: $(ENV)  ## format and sort imports
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix --select I .

.PHONY: crds proto boards generate
crds: $(ENV)  ## crds/, the chart's copy, install.yaml and docs/api.md from the Python models
	@tools/generated.sh crds
proto: $(ENV)  ## worker/vlm_worker/pb from worker/proto
	@tools/generated.sh proto
boards: $(ENV)  ## helm/triptych/boards from tools/boards
	@tools/generated.sh boards
generate: $(ENV)  ## all generated files
	@tools/generated.sh

.PHONY: env
env: $(ENV)  ## .venv from requirements/dev.txt, hashes checked (about 6 GB on disk: torch from PyPI is the CUDA build)
$(ENV): requirements/dev.txt pyproject.toml
	@tools/env.sh "$(PYTHON)"

.PHONY: lock
lock:  ## requirements/*.txt from pyproject.toml (needs uv)
	@tools/lock.sh

.PHONY: clean
clean:  ## remove the environment and caches of this checkout (the control plane's build stays cached)
	@rm -rf .venv .tools .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.PHONY: help
help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
