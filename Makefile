# make demo   trains a small GPT out of core and prints a table of what happened
# make test   runs the tests
# make conformance   compares everything in torch's databases of operators, modules and optimizers with plain PyTorch
# make stress asks more of a simulated accelerator: 1,000 seeds of delays, memory of every step (nothing else may run)
# make simulate   runs 10,000 seeds of orders in which a store's events may come; SEED=n runs one again
# make faults fails every operation of a small training in turn (hours; ARGS="--minutes 20" ends it early)
# make bigger-than-memory   trains 1.3 billion parameters in 4 GiB of memory (Linux, root, 40 GB free)
# make bench  runs every benchmark that this machine can run (about an hour), rebuilds docs/results.md
# make bench-quick   the same with tiny models, to see that it runs
# make compatibility   runs the tests with the oldest and the newest versions of what is required
# make module-map   writes docs/module_map.md
# make docs   builds the documentation site into build/site; a broken link or a missing docstring fails it
# make lint   checks style, format, types and the direction of imports
# Each sets up .venv first, once; it is renewed when pyproject.toml or constraints.txt change.

PYTHON ?= python3
WORKERS ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo bigger-than-memory bench bench-quick test conformance stress simulate faults compatibility module-map docs lint style format-check types imports format clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -p faulthandler --timeout=300
# The simulated accelerator is a process's only one, so its tests have processes of their own, beside
# those of the others; what they print comes at the end.
ACCELERATOR_TESTS = tests/simulated_accelerator tests/accelerator
ACCELERATOR_OUTPUT = build/accelerator-tests.txt

demo: $(READY)
	$(BIN)/python examples/lightning_gpt.py $(ARGS)

bigger-than-memory: $(READY)
	$(BIN)/python -m benchmarks.parameters --lines train $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks.suite $(ARGS)

bench-quick: $(READY)
	$(BIN)/python -m benchmarks.suite --quick $(ARGS)

test: $(READY)
ifdef ARGS
	$(PYTEST) $(ARGS)
else
	@mkdir -p $(dir $(ACCELERATOR_OUTPUT))
	TEST_ACCELERATOR=sim $(PYTEST) $(ACCELERATOR_TESTS) > $(ACCELERATOR_OUTPUT) 2>&1 & \
	$(PYTEST); status=$$?; wait $$! || status=1; cat $(ACCELERATOR_OUTPUT); exit $$status
endif

conformance: $(READY)
	CONFORMANCE_PART=1/1 $(PYTEST) tests/conformance $(ARGS)

STRESS = TEST_ACCELERATOR=sim STRESS_SEEDS=1000
stress: $(READY)
	$(STRESS) $(BIN)/python -m pytest -rP tests/accelerator/test_pace.py -k behind $(ARGS)
	$(STRESS) $(PYTEST) tests/accelerator/test_stress.py -k threads $(ARGS)

SEEDS ?= 10000
simulate: $(READY)
	$(if $(SEED),SEED=$(SEED),SEEDS=$(SEEDS)) $(BIN)/python -m pytest --timeout=1800 tests/simulation -k seed $(ARGS)

faults: $(READY)
	$(BIN)/python -m benchmarks.faults.every_operation $(ARGS)

# Environments of their own, of 8 GB each: those versions of torch come with CUDA.
COMPATIBILITY_TESTS = tests/activations tests/callbacks tests/checkpoints tests/distributed tests/engine \
	tests/integrations tests/optimizer tests/weights
compatibility: $(READY)
	@for versions in lowest-direct highest; do \
		python=build/compatibility/$$versions/bin/python; \
		$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/compatibility/$$versions && \
		$(BIN)/uv pip install --quiet --python $$python setuptools && \
		$(BIN)/uv pip install --quiet --python $$python --resolution $$versions \
			--no-build-isolation --editable '.[dev]' && \
		$(BIN)/uv pip freeze --python $$python | grep -E '^(torch|lightning|accelerate|transformers|trl|peft|pydantic)=' && \
		$$python -m pytest -n $(WORKERS) --dist worksteal --timeout=300 $(COMPATIBILITY_TESTS) $(ARGS) || exit 1; \
	done

module-map: $(READY)
	$(BIN)/python -m tests.module_map

# The notice is about the successors of MkDocs.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: style format-check types imports

style: $(READY)
	$(BIN)/ruff check .

format-check: $(READY)
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		     "Name another one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@# Built against the torch that is installed by now; its extensions are for NVMe alone.
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --constraint constraints.txt deepspeed || \
		echo "DeepSpeed cannot be installed here: its tests will be skipped." >&2
	@touch $@
