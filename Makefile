# `make demo` and `make test` do everything that a fresh machine needs; only python3 (>= 3.11) and make must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/set-up.stamp
MODEL ?= demo
ARGS ?=

.PHONY: setup demo test serve check stubs sim bench-scheduler bench-executor-host bench bench-gateway \
	bench-page clean

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/set_up.sh
	@PYTHON="$(PYTHON)" scripts/set_up.sh $(VENV)

# Starts the whole server, streams one answer, stops everything.
demo: setup
	@$(BIN)/gapless demo

# The whole test suite.
test: setup
	$(BIN)/python -m pytest -q $(ARGS)

# Leaves the server running. make serve MODEL=PATH ARGS="--gateways 2"
serve: setup
	@exec $(BIN)/gapless serve --model $(MODEL) $(ARGS)

# Lint, format, types, import contracts.
check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

# Regenerates the committed stubs from protos/*.proto.
stubs: setup
	PATH="$(abspath $(BIN)):$$PATH" scripts/generate_stubs.sh

# The seeded simulation of the scheduler's core alone.
sim: setup
	$(BIN)/python -m pytest -q tests/simulation $(ARGS)

# Microseconds a step of core and frame writing.
bench-scheduler: setup
	$(BIN)/python -m benchmarks.bench_scheduler $(ARGS)

# Microseconds a step between a word and the driver; with a GPU, the driver's too.
bench-executor-host: setup
	$(BIN)/python -m benchmarks.bench_executor_host $(ARGS)

# Both depths on this machine, through the real processes. make bench ARGS="--model preset:llama-8b --new 8192"
bench: setup
	$(BIN)/gapless bench $(if $(ARGS),$(ARGS),--model preset:tiny)

# What one gateway process carries; needs h2load (Debian: nghttp2-client).
bench-gateway: setup
	$(BIN)/python -m benchmarks.gateway_capacity $(ARGS)

# benchmarks/README.md and its plots, from benchmarks/results.
bench-page: setup
	$(BIN)/python -m benchmarks.plot

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
