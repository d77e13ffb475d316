# Two commands do everything on a fresh machine: `make train` and `make test`. Both set up the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2

.PHONY: train test check bench gpu-check clean

train: $(VENV)/.train data/digits/train.csv  ## train the digits on NPROC processes
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore::FutureWarning -m torch.distributed.launch --standalone --nproc_per_node=$(NPROC) driver.py -c configs/digits.yaml

# Much of the suite waits for processes to start and to end, so four files at a time keep two cores busy.
test: $(VENV)/.test  ## the whole test suite
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

check: $(VENV)/.dev  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test  ## measure; results go to benchmarks/results
	$(BIN)/python -m benchmarks.loop_overhead
	$(BIN)/python -m benchmarks.ddp
	$(BIN)/python -m benchmarks.open_shard --rows 10000000 --world 8
	$(BIN)/python -m benchmarks.apex_amp_step
	$(BIN)/python -m benchmarks.apex_o1_engine

gpu-check: $(VENV)/.test  ## on a machine with a CUDA device: amp's tests there, and amp on models of real size
	$(BIN)/python -m pytest tests/apex --device cuda
	$(BIN)/python -m benchmarks.apex_models --device cuda

data/digits/train.csv: | $(VENV)/.train
	$(BIN)/harness data digits data/digits

# Each level of the environment is installed once, and again when the dependencies change.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[digits]'
	@touch $@

$(VENV)/.test: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.train

$(VENV)/.dev: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.train

clean:
	rm -rf $(VENV) build dist *.egg-info
