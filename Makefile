# `make demo` and `make test` work on a fresh clone; nothing but Python 3.11+ is needed before.
# The first of these that runs and is new enough; `make PYTHON=/path/to/python setup` names another.
CANDIDATES := python3 python3.13 python3.12 python3.11
IS_NEW := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for name in $(CANDIDATES); do $$name $(IS_NEW) 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin

.PHONY: help setup setup-dev demo test lint types format clean

help:
	@echo "make setup    the environment: .venv/bin/finback"
	@echo "make demo     start every service, answer over HTTP and NATS, show a trace, stop"
	@echo "make test     all tests"
	@echo "make lint     ruff and mypy"
	@echo "make clean    remove the environment and caches"

setup:
	@test -n "$(PYTHON)" || { echo "setup: Python 3.11 or newer is needed; none was found" >&2; exit 2; }
	@$(PYTHON) deploy/setup_env.py

setup-dev:
	@test -n "$(PYTHON)" || { echo "setup: Python 3.11 or newer is needed; none was found" >&2; exit 2; }
	@$(PYTHON) deploy/setup_env.py --dev

demo: setup
	@$(BIN)/python -m finback.services.supervisor.demo

test: setup-dev
	$(BIN)/pytest -n 2 --dist loadfile -m 'not stack'
	$(BIN)/pytest -m stack

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
