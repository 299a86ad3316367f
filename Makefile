# Two commands are enough: `make demo` and `make test`. Each sets up what it needs; the second time is quick.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SKIPPED := .cache/not-tested
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test federation check docs bench clean help

help:
	@echo "make demo    eights in handwriting: each form alone, all together; a table and report.html (under 2 minutes)"
	@echo "make test    lint, types, import contracts, every test"
	@echo "make federation   tests of a real federation, sites killed and delayed; on an idle machine"
	@echo "make check   lint, types and import contracts only"
	@echo "make docs    the documentation site, into site/"
	@echo "make bench   benchmarks; prints ratios measured in one run"
	@echo "make clean   remove what the above made"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python pyproject.toml experiments/pyproject.toml constraints.txt
	@echo "installing fedtail into $(VENV) (once) ..."
	$(PIP) -e . -e experiments
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing development tools into $(VENV) (once) ..."
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.core
	$(BIN)/fedtail demo

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	@mkdir -p .cache && rm -f $(SKIPPED)
	OMP_NUM_THREADS=1 FEDTAIL_NOT_TESTED=$(SKIPPED) $(BIN)/pytest -n 2 --dist loadgroup -m "not flower"
	OMP_NUM_THREADS=1 FEDTAIL_NOT_TESTED=$(SKIPPED) $(BIN)/pytest -m "flower and not faults"  # alone on the machine
	@echo "not tested here:"
	@sed 's/^/  /' $(SKIPPED)
	@echo "  sites killed, delayed and cut off in a real federation: make federation"

federation: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m flower

bench: $(VENV)/.dev
	@mkdir -p results
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/simulator.py --peers --out results/simulator.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/growth.py --folder results/growth
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py --check --out results/scale.json
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/python benchmarks/gpu.py --out results/gpu.json; else echo "no CUDA device: GPU benchmark left out"; fi

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet: it would swallow what --strict counts
	@echo "site/index.html"

clean:
	rm -rf $(VENV) runs site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
