# Everything runs in .venv, made on first use from pyproject.toml and constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PROTOS := $(wildcard protos/outrider/v1/*.proto)
# Nothing is ever fetched from a model hub.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow check lint protos protos-check baseline filelist model clean
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	touch $@

model: $(STAMP)
	$(BIN)/outrider models fetch smollm2-135m-instruct

demo: model
	@$(BIN)/python -m outrider.cli.demo

test: model
	$(BIN)/python -m pytest

test-slow: model
	$(BIN)/python -m pytest -m slow

check: lint protos-check

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/buf lint && $(BIN)/buf breaking --against protos/baseline.binpb

protos: $(STAMP)
	$(BIN)/python tools/stubs.py write

protos-check: $(STAMP)
	$(BIN)/python tools/stubs.py check

# Only when the contract is meant to break: what `buf breaking` compares with.
baseline: $(STAMP)
	$(BIN)/buf build -o protos/baseline.binpb

filelist: $(STAMP)
	$(BIN)/python tools/filelist.py

clean:
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
