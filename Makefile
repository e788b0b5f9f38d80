# Everything happens in .venv in this folder; nothing else on the machine is touched. `make help` lists the commands.

PYTHON        ?= python3
RECIPE        ?= quickstart
TORCH_VERSION ?= 2.13.0
VENV          := .venv
BIN           := $(VENV)/bin
INSTALL       := $(VENV)/bin/python -m pip install --quiet --no-compile

# Which build of PyTorch: "cpu", or "plain" for what `pip install torch` gives (on Linux with gigabytes of CUDA).
# An environment that exists keeps its build. Otherwise a Mac or a working GPU gets "plain", everything else "cpu".
TORCH ?= $(or $(patsubst $(VENV)/.torch-%,%,$(firstword $(wildcard $(VENV)/.torch-*))),$(shell \
	{ [ "$$(uname)" = Darwin ] || nvidia-smi -L; } >/dev/null 2>&1 && echo plain || echo cpu))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test lint format bench clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "  Settings: PYTHON=$(PYTHON)  RECIPE=$(RECIPE)  TORCH=cpu|plain (here: $(TORCH))"

run: $(VENV)/.run ## set up if needed, then run the recipe: make run RECIPE=quickstart
	@$(BIN)/dpfed run $(RECIPE)

test: lint ## everything that has to hold: style, types, tests
	@$(BIN)/pytest -n auto --maxprocesses=4

lint: $(VENV)/.dev ## style and types only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: $(VENV)/.dev ## put the code into house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev ## time dpfed beside its peers
	@$(BIN)/dpfed bench
	@for name in cohort_step round_overhead cost_curves; do echo "== $$name"; $(BIN)/python -m "benchmarks.$$name" || exit 1; done

clean: ## remove the environment and everything that can be made again (never runs/)
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The set-up. Each step leaves a stamp in .venv and is repeated only when the step before it or pyproject.toml changed.
# PyTorch comes first, so that installing dpfed finds it satisfied and leaves it alone.

$(VENV)/.run: pyproject.toml $(VENV)/.torch-$(TORCH)
	@echo "Installing dpfed ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch-$(TORCH)
	@echo "Installing dpfed and its development tools ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $(VENV)/.run $@

# The ordinary package index has no "+cpu" versions. Where pip is configured for PyTorch's CPU builds, the first line
# finds one; otherwise uv does, which knows where they are. Neither may end with CUDA, as the last check makes sure.
$(VENV)/.torch-cpu: $(BIN)/python
	@echo "Installing PyTorch $(TORCH_VERSION) built for CPU (about 200 MB) ..."
	@rm -f $(VENV)/.torch-*
	@$(INSTALL) 'torch==$(TORCH_VERSION)+cpu' >$(VENV)/torch.log 2>&1 \
	|| { $(INSTALL) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend=cpu \
	     --reinstall-package torch 'torch==$(TORCH_VERSION)'; } >>$(VENV)/torch.log 2>&1 \
	|| { cat $(VENV)/torch.log; echo "$$NO_CPU_BUILD"; exit 1; } >&2
	@$(BIN)/python -W ignore -c 'import torch; raise SystemExit(bool(torch.version.cuda))' \
	|| { echo "$$NO_CPU_BUILD" >&2; exit 1; }
	@touch $@

$(VENV)/.torch-plain: $(BIN)/python
	@echo "Installing PyTorch as pip finds it ..."
	@$(if $(wildcard $(VENV)/.torch-cpu),$(BIN)/python -m pip uninstall --quiet --yes torch)
	@rm -f $(VENV)/.torch-*
	@$(INSTALL) 'torch>=2.6'
	@touch $@

$(VENV)/.torch-%:
	@echo 'TORCH=$* is not a choice: it is "cpu" or "plain".' >&2; exit 1

$(BIN)/python:
	@$(PYTHON) -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null \
	|| { echo "$$OLD_PYTHON" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$$NO_VENV" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv --clear $(VENV)

define OLD_PYTHON
dpfed needs Python 3.11 or newer, and "$(PYTHON)" is missing or older.
  Name a newer one, for example: make run PYTHON=python3.12
endef

define NO_VENV
"$(PYTHON)" cannot create environments: its modules venv and ensurepip are missing.
  On Debian and Ubuntu: sudo apt install python3-venv
endef

define NO_CPU_BUILD
PyTorch $(TORCH_VERSION) for CPU could not be installed; the messages above say why. One of these helps:
  - the network failed: repeat the command, it continues where it stopped
  - no such build for this machine or this Python: choose another version, for example make run TORCH_VERSION=2.12.1
  - the network is closed: fetch the wheel torch $(TORCH_VERSION)+cpu from pytorch.org on another machine, install it
    with $(BIN)/python -m pip install FILE.whl, and repeat the command
  - gigabytes of CUDA are welcome: make run TORCH=plain
endef

export OLD_PYTHON NO_VENV NO_CPU_BUILD
export PIP_DISABLE_PIP_VERSION_CHECK = 1
