# Everything runs in .venv, made on first use from pyproject.toml and constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
# What runs, and on top of it what tests and checks need. Compiled is what the services import: that
# is a minute less of waiting than letting pip compile all of torch. It is done here because some
# machines forbid Python to do it on first import, and then every start takes three times as long.
RUN := .venv/.installed
DEV := .venv/.installed-dev
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# Nothing is ever fetched from a model hub.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# What the longest tests ask: JSON lines of {"turns": ["..."]}, such as Spec-Bench's. Not shipped.
PROMPTS ?= $(TEST_PROMPTS_JSONL)
# Options of a bench, as in `make bench-peers BENCH=--quick`.
BENCH ?=
# Overrides of compose/compose.yaml, by name: `make up WITH="apps ui"`. See docs/deploy.md.
WITH ?=
COMPOSE = docker compose -f compose/compose.yaml $(WITH:%=-f compose/compose.%.yaml)

.PHONY: demo kernels-library test test-kernels test-gateway test-slow bench-gateway bench-startup bench-step bench-peers bench-throughput check lint protos protos-check baseline filelist audit model clean up down logs
.DEFAULT_GOAL := demo

$(RUN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[all]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python tools/compile_imports.py
	touch $@

$(DEV): $(RUN)
	$(PIP) -e '.[all,dev]'
	touch $@

model: $(RUN)
	$(BIN)/outrider models fetch smollm2-135m-instruct

demo: model
	@$(BIN)/python -m outrider.cli.demo

# Compiled once for every instruction set that the processor has, before tests that compare them
# within a limit of time; those without a compiler use torch.
kernels-library: $(RUN)
	-@$(BIN)/python -m outrider_kernels.native_build

test: $(DEV) model kernels-library
	$(BIN)/python -m pytest

# The kernels of GPUs: compiled for real chips, and run by Triton's interpreter.
test-kernels: $(DEV)
	$(BIN)/python -m pytest tests/kernels/triton

# All of the gateway's doors: gRPC, HTTP, keys, certificates, and clients that we did not write.
test-gateway: $(DEV) model kernels-library
	$(BIN)/python -m pytest tests/gateway tests/client tests/clients tests/e2e/test_mtls.py \
		tests/serving/test_tls.py $(wildcard tests/faults/*_http.py tests/bench/test_gateway_*.py) \
		tests/cli/test_client.py tests/cli/test_keys.py tests/cli/test_tls_options.py

# What the gateway adds, and what idle streams cost: four minutes on a machine that does nothing else.
bench-gateway: $(RUN) model
	$(BIN)/python -m bench.gateway_overhead --seconds 9 --rounds 3
	$(BIN)/python -m bench.idle_streams --seconds 9

# From `outrider up` to ready and to a token, by service, and what each takes of memory.
bench-startup: $(RUN) model kernels-library
	$(BIN)/python -m bench.startup --starts 5

# A step by precision and rows, beside what memory allows: under three minutes.
bench-step: $(RUN) model kernels-library
	$(BIN)/python -m bench.step $(BENCH)

# One stream, then many, beside other engines, which are installed under out/peers at the first use.
# BENCH=--quick is a form of under four minutes.
bench-peers: $(DEV) model kernels-library
	$(BIN)/python -m bench.single_stream $(BENCH)

bench-throughput: $(DEV) model kernels-library
	$(BIN)/python -m bench.throughput $(BENCH)

test-slow: $(DEV) model kernels-library
	@test -n "$(PROMPTS)" || echo "PROMPTS=file.jsonl is not given: the tests of sixty prompts are skipped"
	TEST_PROMPTS_JSONL="$(PROMPTS)" $(BIN)/python -m pytest -m slow -rs

check: lint protos-check

lint: $(DEV)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/buf lint && $(BIN)/buf breaking --against protos/baseline.binpb
	$(BIN)/hadolint compose/Dockerfile && $(BIN)/docker-compose -f compose/compose.yaml config --quiet
	$(BIN)/compose-lint --skip-suppressed --fail-on low --config compose/lint.yml compose/compose.yaml

# The containers: built where they must be, started, and healthy when this returns.
up:
	$(COMPOSE) up --build --detach --wait

# The volumes stay, and with them the model.
down:
	$(COMPOSE) down

logs:
	$(COMPOSE) logs --follow

protos: $(DEV)
	$(BIN)/python tools/stubs.py write

protos-check: $(DEV)
	$(BIN)/python tools/stubs.py check

# Only when the contract is meant to break: what `buf breaking` compares with.
baseline: $(DEV)
	$(BIN)/buf build -o protos/baseline.binpb

filelist: $(DEV)
	$(BIN)/python tools/filelist.py

# Known weaknesses of what the constraints name; asks PyPI. What cannot be looked up is a failure.
audit: $(DEV)
	test -x out/audit/bin/pip-audit || { $(PYTHON) -m venv out/audit && out/audit/bin/pip install --quiet pip-audit; }
	out/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

clean:
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
