# Everything sets itself up: a bare machine with Python >= 3.11 and make is enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench clean

demo: $(VENV)/ready  ## a master, two servers, four engine instances, an agentic workload
	$(BIN)/kvpool replay --workload codex --servers 2 --clients 4 --picture demo.svg

test: $(VENV)/ready  ## the whole suite
	$(BIN)/pytest

check: $(VENV)/ready  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready  ## speed, as ratios to limits measured in the same run
	$(BIN)/python -m benchmarks.run

$(VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) demo.svg
