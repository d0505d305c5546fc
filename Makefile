# Two commands on a fresh machine: `make demo` and `make test`. Each sets up all it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Three workers for two cores: many tests wait for a process.
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

ROUNDS ?= 100
SEED ?= $(shell date +%s)

.PHONY: demo test test-all torture check bench gpu docs venv clean

demo: $(STAMP)  ## the main job, on this machine
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

test: $(STAMP)  ## all tests, one real case of each kind: under 15 minutes on two quiet cores
	$(PYTEST)

test-all: $(STAMP)  ## every round of every test, then every version of Python and packages that is supported
	BATCHWRIGHT_EXAMPLES=all $(PYTEST) -m 'rounds or not rounds'
	PYTHON=$(PYTHON) bash tests/versions.sh

torture: $(STAMP)  ## random kills, damaged files, flipped bits, broken disks and command lines: ROUNDS=100 takes two hours
	$(BIN)/python -m tests.cli.fuzz --lines $$(($(ROUNDS) * 100)) --seed $(SEED)
	$(BIN)/python -m tests.torture --rounds $(ROUNDS) --seed $(SEED)

check: $(STAMP)  ## lint, types, and the tests that need no torch: under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	BATCHWRIGHT_EXAMPLES=few $(BIN)/pytest -x -n 2 -m 'not torch and not rounds' tests/core tests/dialects tests/cli tests/report tests/boundaries src/batchwright/core --ignore tests/report/test_browser.py

bench: $(STAMP)  ## benchmarks, as ratios against peers
	$(BIN)/python benchmarks/run.py

gpu: $(STAMP)  ## device tests, demo and benchmark on this machine's accelerator, or on a simulated one: gpu-report.md
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/gpu.py gpu-report.md

docs: $(STAMP)  ## write the real output into the README's and docs' code blocks, and draw their pictures
	$(BIN)/python docs/render.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/api.py

venv: $(STAMP)

# torch first and by its exact pin: an open-ended torch would pull gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q src  # an editable install is not compiled by pip, and may be read-only later
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-versions .pytest_cache .ruff_cache .hypothesis
