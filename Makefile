# Each target does all of its own set-up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all compile-check emulate bench kernels-report gpu gpu-smoke gpu-quick gpu-races gpu-tests gpu-bench lint clean

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/cdt-fast demo $(if $(CLIP),"$(CLIP)") --out runs/demo

# `make test` is what a change must pass, in minutes; `make test-all` is what is marked `slow`. A worker for each
# processor, and one thread a worker. The kernels' arithmetic runs in Triton's interpreter, which is chosen when Triton is
# imported: in its own process. What the compiler makes of them is emulated for a card, and for a second one by
# `make test-all`.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=loadgroup
test: .venv/installed
	$(PYTEST) -m "not slow" --ignore=tests/kernels
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels
	$(PYTEST) -m "emulated and not slow" --emulate "RTX 3090" tests/kernels

test-all: .venv/installed
	$(PYTEST) -m slow --ignore=tests/kernels
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/kernels
	$(PYTEST) -m emulated --emulate H200 tests/kernels

# Compiles the kernels of a default training for every card, without a GPU, with the Triton of constraints.txt and with an
# older one: a kernel that does not compile, does not fit or spills is a failure.
OLDER_TRITON := .venv/triton-3.5
compile-check: .venv/installed $(OLDER_TRITON)
	$(BIN)/python -m cdt_fast.bench.tools.compile_kernels --mode bfloat16 --default
	PYTHONPATH=$(OLDER_TRITON) $(BIN)/python -m cdt_fast.bench.tools.compile_kernels --mode bfloat16 --default

$(OLDER_TRITON): | .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.5.1

# All tests of the kernels, compiled for a card and emulated.
CARD ?= RTX 3090
emulate: .venv/installed
	$(PYTEST) --emulate "$(CARD)" tests/kernels

bench: .venv/installed
	$(BIN)/cdt-fast bench --out bench/results
	$(BIN)/python -m cdt_fast.bench.document

# Compiles the kernels for every card, without a GPU: the table of docs/gpus.md.
kernels-report: .venv/installed
	$(BIN)/python -m cdt_fast.bench.tools.compile_kernels --write

# On a machine with an NVIDIA GPU: docs/gpus.md. Nothing is installed; .venv is used if it is there, else PYTHON with the
# torch, Triton and pytest that it has. The calls take less than ten minutes each, and may be made one by one.
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(MAKE) --keep-going gpu-smoke gpu-quick gpu-races gpu-tests gpu-bench

GPU_SMOKE := $(GPU_PYTHON) -m pytest -o addopts= -q -p no:cacheprovider --confcutdir=tests/kernels \
	-m "emulated and not slow" tests/kernels
gpu-smoke:
	timeout 300 $(GPU_SMOKE)

gpu-quick:
	timeout --signal=INT 240 $(GPU_PYTHON) -m cdt_fast bench --device cuda --quick --out "$${OUT:-bench/results}"

gpu-races:
	PATH="$$PATH:/usr/local/cuda/bin" PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 200 compute-sanitizer --tool racecheck \
		--target-processes all --error-exitcode 99 $(GPU_SMOKE) -k "unrolled_layer and bfloat16"

gpu-tests:
	OMP_NUM_THREADS=2 timeout 590 $(GPU_PYTHON) -m pytest -o addopts= -ra -p no:cacheprovider --confcutdir=tests/kernels \
		$$($(GPU_PYTHON) -c 'import importlib.util as u; print("--numprocesses=auto" * bool(u.find_spec("xdist")))') \
		tests/kernels

# Every case is saved as soon as it is measured. Another part of the cases' names: `make gpu-bench GPU_CASE=float32`.
GPU_CASE ?= bfloat16
gpu-bench:
	timeout --signal=INT 590 $(GPU_PYTHON) -m cdt_fast bench --device cuda --case '$(GPU_CASE)' \
		--suite step cross_entropy attention ops --out "$${OUT:-bench/results}" || [ $$? = 130 ] || [ $$? = 124 ]

lint: .venv/linters
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv build cdt_fast.egg-info

# torch first and by its exact version: on a machine without a GPU a range would bring several GB of CUDA packages.
.venv/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cdt_fast needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

.venv/linters: .venv/installed
	$(PIP) --no-build-isolation --editable '.[lint]'
	touch $@

