# kvzap-sglang: `make` alone lists the targets. PYTHON=/path/to/python3.11 and VENV=folder are read by `make setup`.
VENV ?= .venv
PY := $(VENV)/bin/python
MODELS ?= models
PORT ?= 30000
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup models demo serve test test-fast bench lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv and install everything (a second run takes a second)
	@bash scripts/setup.sh

# cpu/ is on the path here because on a GPU machine its distribution is not installed, only its converter is used.
models: setup ## SmolLM2-135M-Instruct and the tiny test models, written to models/ without a network
	@PYTHONPATH=cpu $(PY) -m kvzap_sglang_cpu.smollm2 --out $(MODELS)
	@PYTHONPATH=cpu $(PY) -m kvzap_sglang_cpu.tiny --out $(MODELS)

demo: models ## start a pruned server, hold two conversations over one cached system prompt, stop it
	@$(PY) scripts/demo.py --models $(MODELS)

serve: models ## the demo's server in the foreground on port 30000 (PORT=...)
	@$(PY) scripts/demo.py --models $(MODELS) --serve --port $(PORT)

test: setup models ## every test; those that need a GPU are skipped where there is none
	$(PY) -m pytest -n 2 --dist loadfile

test-fast: setup models ## unit tests only: no server, no GPU
	$(PY) -m pytest -m "not server and not gpu"

bench: setup models ## benchmarks on this machine
	$(PY) -m benchmarks

lint: setup ## ruff check, ruff format --check, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup ## let ruff fix and format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove caches and build outputs; .venv and models/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
