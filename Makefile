# Two commands: `make train` trains a small GPT here and now, `make test` proves everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Without an NVIDIA GPU, take the CPU build of torch instead of gigabytes of CUDA.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)

.PHONY: train test test-gpu lint docs system clean

train: $(READY)
	$(BIN)/weft train demo
	@echo
	$(BIN)/weft generate demo --prompt "The " --tokens 400

# Two workers more than cores: many tests wait for processes.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 2, 8))')

# `make test ORDER=7` runs the files in a random order and draws random examples, both determined by the number.
ORDER :=

# Compiled first, or in a new checkout each worker would compile all of weft.
test: $(READY) system
	@$(BIN)/python -m compileall -q weft
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(if $(ORDER),--shuffle-files $(ORDER) --hypothesis-seed $(ORDER))

# Needs an NVIDIA GPU; without one it says so and exits 4.
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu

lint: $(READY)
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports

docs: $(READY)
	for script in docs/make_*.py; do $(BIN)/python $$script || exit 1; done

system:
	@sh tests/system.sh

$(READY): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Weft needs Python 3.11 or newer; name one with make PYTHON=python3.12"; exit 4; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
