# All that a newcomer needs: `make demo` and `make test`. Each sets up what it needs first (about a minute and 6 GB, once).
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON_IN_VENV := .venv/bin/python
INSTALLED := .venv/.installed
COMPILE := .tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links --no-annotate

.PHONY: help set-up demo test lint types lock bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

set-up: $(INSTALLED) ## the virtual environment, from the lock files

$(INSTALLED): requirements.lock build.lock compiler.lock pyproject.toml .ci/set-up
	@PYTHON="$(PYTHON)" .ci/set-up
	@touch $@

demo: $(INSTALLED) ## the whole path on real Kafka; LOG=PATH for your own log, ARGS=... for more
	@$(PYTHON_IN_VENV) -m solaris demo $(if $(LOG),--log "$(LOG)") $(ARGS)

test: $(INSTALLED) ## the tests; ARGS='-m "not kafka"' for those without a broker
	@$(PYTHON_IN_VENV) -m pytest $(ARGS)

lint: $(INSTALLED) ## style
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .

types: $(INSTALLED) ## strict types
	@$(PYTHON_IN_VENV) -m mypy

bench: $(INSTALLED) ## one benchmark: NAME=transport, its last line is JSON
	@test -n "$(NAME)" || { echo "make bench NAME=...; there are: $$(cd benches && ls *.py | sed 's/\.py//' | grep -v '^_' | xargs)" >&2; exit 2; }
	@$(PYTHON_IN_VENV) -m benches.$(NAME) $(ARGS)

lock: $(INSTALLED) ## the lock files afresh, from pyproject.toml and the registries that the environment names
	$(COMPILE) --upgrade --extra broker --extra dev -o requirements.lock pyproject.toml
	$(COMPILE) --upgrade --group build -o build.lock
	$(COMPILE) --upgrade --group compiler -o compiler.lock
	$(PYTHON_IN_VENV) -m solaris.broker.jars lock

clean: ## remove what was built and installed here; data under .solaris stays
	rm -rf .venv .tools out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
