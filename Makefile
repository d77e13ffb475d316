# `make train` and `make test` work on a fresh machine: each sets up the environment it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One rank per GPU, at most 2; 2 ranks without a GPU.
NPROC ?= auto:2

PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

KILLS ?= 1000
SEED ?= 0
JOBS ?= 2

.PHONY: train test test-all test-versions check bench bench-peers campaign oracle gpu-check dist clean

train: $(VENV)/.train data/digits/train.csv  ## train the digits on NPROC processes
	$(BIN)/harness launch -c configs/digits.yaml --nproc $(NPROC)

# Many tests wait for processes to start and exit, so four workers keep two cores busy; five take a quarter more processor time.
test: $(VENV)/.test  ## all tests that need no daemon and no browser, or those of TESTS
	$(PYTEST) -m "not slow" $(TESTS)

test-all: $(VENV)/.test  ## the whole suite: also clusters, launchers, browser and kill campaigns
	$(PYTEST)

test-versions:  ## the quick start and the fast tests on the oldest, a middle and the newest Python and torch; several GB each
	$(PYTHON) -m benchmarks.versions

check: $(VENV)/.dev  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test  ## benchmarks; results go to benchmarks/results
	$(BIN)/python -m benchmarks.open_shard --rows 10000000 --world 8
	$(BIN)/python -m benchmarks.start

bench-peers: $(VENV)/.peers  ## time per step against hand-written loops and other libraries, with the goals
	$(BIN)/python -m benchmarks.peers

campaign: $(VENV)/.test  ## kill runs at random moments, resume and compare them; CHAIN=NAME repeats one; LOGICAL=1: on other numbers of ranks
	$(BIN)/python -m benchmarks.campaign $(if $(CHAIN),--chain $(CHAIN),--kills $(KILLS) --seed $(SEED) --jobs $(JOBS) $(if $(LOGICAL),--logical-ranks))

oracle: $(VENV)/.test  ## compare with NVIDIA's own Apex, bit for bit; APEX_CHECKOUT is a checkout of it, at a tag up to 25.05
	$(BIN)/python -m benchmarks.oracle $(or $(APEX_CHECKOUT),$(error type: make oracle APEX_CHECKOUT=DIR))

# Without .venv it uses PYTHON with the packages that it has, so that it works without a network.
gpu-check:  ## needs a CUDA device, takes at most 25 minutes: the most telling checks first; writes a table as it goes
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_check

data/digits/train.csv: | $(VENV)/.train
	$(BIN)/harness data digits data/digits

# Each level of the environment is installed once, and again when setup.cfg changes.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: setup.cfg | $(VENV)/bin/python
	@echo 'Installing PyTorch and the harness into $(VENV): several GB, a few minutes.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[digits]'
	@touch $@

$(VENV)/.test: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.train

$(VENV)/.peers: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[digits,peers]'
	@touch $@ $(VENV)/.train

$(VENV)/.dev: setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.test $(VENV)/.train

dist:  ## build wheel and sdist, install each in an empty environment and train there; several GB; OFFLINE=1: with the packages of .venv
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.release $(if $(OFFLINE),--offline)

clean:
	rm -rf $(VENV) build dist *.egg-info
