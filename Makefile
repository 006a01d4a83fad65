# Each target does all of its own set-up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test bench gpu kernels-report lint clean

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/cdt-fast train video --config docs/demo.toml --out runs/demo/tied --no-constrained
	$(BIN)/cdt-fast train video --config docs/demo.toml --out runs/demo/untied --no-constrained --no-tied
	$(BIN)/cdt-fast train video --config docs/demo.toml --out runs/demo/constrained
	$(BIN)/cdt-fast compare runs/demo/tied runs/demo/untied runs/demo/constrained --out runs/demo/comparison

# The kernels' arithmetic runs in Triton's interpreter, which is chosen when Triton is imported: in its own process, and
# with one thread, as the interpreter's tiles are too small for more.
test: .venv/installed
	$(BIN)/python -m pytest
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels

bench: .venv/installed
	$(BIN)/cdt-fast bench --out bench/results
	$(BIN)/python -m cdt_fast.bench.document

# Compiles every kernel for every card, without a GPU; the status is that of the compilation's checks. What is in
# build/kernels.json, from an earlier run of the same kernels, is not compiled again.
kernels-report: .venv/installed
	mkdir -p build
	$(BIN)/python -m cdt_fast.kernels.aot --without-divisibility --json build/kernels.json --csv docs/kernels.csv \
		--markdown docs/kernels.md

# On a machine with an NVIDIA GPU, with the torch and Triton that are there and without network: the tests of the kernels
# compiled, then the bench, whose results file is written even where a test failed. With pytest-xdist,
# `make gpu PYTEST_ADDOPTS='-n 8'` compiles side by side.
gpu:
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	status=0; $(PYTHON) -m pytest --confcutdir=tests/kernels tests/kernels || status=$$?; \
	$(PYTHON) -m cdt_fast.bench --device cuda --out bench/results && exit $$status

# The type checker does not know the folder-to-package mapping of setup.py: it reads a copy laid out as installed.
lint: .venv/linters
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build/as_installed
	mkdir -p build/as_installed
	cp -R cdt_fast tests build/as_installed
	cp -R kernels models bench build/as_installed/cdt_fast
	$(BIN)/basedpyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv build cdt_fast.egg-info

# torch first and by its exact version: on a machine without a GPU a range would bring several GB of CUDA packages.
.venv/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "cdt_fast needs Python 3.10 or newer")'
	$(PYTHON) -m venv .venv
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

.venv/linters: .venv/installed
	$(PIP) --no-build-isolation --editable '.[lint]'
	touch $@
