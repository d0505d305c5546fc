# Two commands on a fresh machine: `make demo` and `make test`. Each sets up all it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo test check bench docs venv clean

demo: $(STAMP)  ## the main job, on this machine
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

test: $(STAMP)  ## all tests
	$(BIN)/pytest -n 3 --dist loadfile  # three for two cores: many of them wait

check: $(STAMP)  ## lint, types, and the tests that need no torch: under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	BATCHWRIGHT_QUICK=1 $(BIN)/pytest -x -n 2 -m 'not torch' tests/core tests/dialects tests/cli tests/report tests/boundaries src/batchwright/core

bench: $(STAMP)  ## benchmarks, as ratios against peers
	$(BIN)/python benchmarks/run.py

docs: $(STAMP)  ## write the real output into the README's and docs' code blocks
	$(BIN)/python docs/render.py

venv: $(STAMP)

# torch first and by its exact pin: an open-ended torch would pull gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q src  # an editable install is not compiled by pip, and may be read-only later
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
