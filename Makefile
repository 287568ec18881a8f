# Two commands: `make train` trains a small GPT here and now, `make test` proves everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev

# Bytecode is written once, or every command would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

# Without an NVIDIA GPU, take the CPU build of torch instead of gigabytes of CUDA.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)

# $(call install,WHAT,OPTIONS OF PIP): by uv where there is one. It does not read pip's configuration, so pip tries
# again where it fails.
UV := $(shell command -v uv 2>/dev/null)
define install
$(if $(UV),$(UV) pip install --quiet --python $(BIN)/python $(if $(GPU),,--torch-backend cpu) $(CONSTRAINTS) -e "$(1)" || )\
	$(BIN)/python -m pip install --quiet $(2) $(CONSTRAINTS) -e "$(1)"
endef

.PHONY: train test test-gpu lint docs site system clean

train: $(RUNTIME)
	$(BIN)/weft train demo
	@echo
	$(BIN)/weft generate demo --prompt "The " --tokens 400

# Two workers more than cores: many tests wait for processes.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 2, 8))')

# `make test ORDER=7` runs the files in a random order and draws random examples, both determined by the number.
ORDER :=

# Compiled first, or in a new checkout each worker would compile all of weft.
test: $(DEV) system
	@$(BIN)/python -m compileall -q weft
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(if $(ORDER),--shuffle-files $(ORDER) --hypothesis-seed $(ORDER))

# Needs an NVIDIA GPU; without one it says so and exits 4.
test-gpu: $(DEV)
	$(BIN)/python -m pytest tests/gpu

lint: $(DEV)
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports

docs: $(DEV)
	for script in docs/make_*.py; do $(BIN)/python $$script || exit 1; done

# The pages of docs/ as a site: open build/site/index.html.
site: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

system:
	@sh tests/system.sh

$(BIN)/activate:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Weft needs Python 3.11 or newer; name one with make PYTHON=python3.12"; exit 4; }
	$(PYTHON) -m venv $(VENV)

# What training needs. Only what is imported is compiled, when it is.
$(RUNTIME): pyproject.toml constraints-cpu.txt | $(BIN)/activate
	$(call install,.,--no-compile)
	@touch $@

# What the tests and `make lint` need too, in the same environment.
$(DEV): pyproject.toml constraints-cpu.txt | $(BIN)/activate
	$(call install,.[dev])
	@touch $(RUNTIME) $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
