# Each target does all of its own set-up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all emulate bench gpu gpu-triage gpu-tests gpu-bench gpu-install gpu-carry kernels-report lint clean

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/cdt-fast reproduce video demo --seeds 0 --out runs/demo

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

# All tests of the kernels that need no GPU, compiled for a card and emulated.
CARD ?= RTX 3090
emulate: .venv/installed
	$(PYTEST) --emulate "$(CARD)" tests/kernels

bench: .venv/installed
	$(BIN)/cdt-fast bench --out bench/results
	$(BIN)/python -m cdt_fast.bench.document

# Compiles every kernel for every card, without a GPU, and then counts what the steps launch (docs/ledger.md); the status
# is that of the compilation's checks. The summary is docs/kernels.md, every figure is in build/kernels.csv. What is in build/kernels.json, from an earlier run of the same
# kernels, is not compiled again.
kernels-report: .venv/installed
	mkdir -p build
	$(BIN)/python -m cdt_fast.kernels.aot --without-divisibility --json build/kernels.json --csv build/kernels.csv \
		--markdown docs/kernels.md
	$(BIN)/python -m cdt_fast.bench.ledger --json build/ledger.json --markdown docs/ledger.md

# On a machine with an NVIDIA GPU, with the torch and Triton that are there and without network: docs/gpu.md. Besides
# these pytest is needed; what else is missing is left out, with the reason. Three calls, none longer than ten minutes,
# which may be made one by one; what each finds goes into the folder that OUT names (bench/results).
GPU := PYTHONPATH="$(CURDIR)/build/site$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
gpu:
	status=0; for target in gpu-triage gpu-tests gpu-bench; do $(MAKE) $$target || status=$$?; done; exit $$status

# Is it right, how fast is it, what bounds it, which blocks are the fastest: what has been found is saved at once.
gpu-triage: gpu-install
	$(GPU) -m cdt_fast.bench.triage

# The tests of the kernels, compiled: some 1,800 specializations, which take one core a quarter of an hour or more. With
# pytest-xdist they are compiled side by side, a worker for every two cores; none of pyproject's options, which need
# pytest-benchmark.
gpu-tests: gpu-install
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest -o addopts= -ra -p no:cacheprovider --confcutdir=tests/kernels \
		$$($(PYTHON) -c 'import importlib.util as u; print("--numprocesses=auto" if u.find_spec("xdist") else "")') \
		tests/kernels

# Less than nine minutes: each suite for so many seconds at most. A case's figures are added to its suite's results file
# as soon as they are there, first those of the ways that need no compiler; cases that were not reached keep what an
# earlier run found. They are measured in GPU_CASE alone, a part of a case's name: then `make gpu-bench
# GPU_CASE=float32`.
GPU_CASE ?= bfloat16
GPU_SECONDS ?= step:180 attention:110 cross_entropy:90 ops:60
gpu-bench: gpu-install
	status=0; \
	for part in $(GPU_SECONDS); do \
		timeout --signal=INT --kill-after=15 $${part#*:} env $(GPU) -m cdt_fast.bench --device cuda --case '$(GPU_CASE)' \
			--out "$${OUT:-bench/results}" --suite $${part%:*} || case $$? in 124|130) ;; *) status=1 ;; esac; \
	done; \
	exit $$status

gpu-install:
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	rm -rf build/site
	set -- build/carry/*.whl; [ ! -e "$$1" ] || \
		$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target build/site "$$@"

# Peers for such a machine (Python 3.12, x86-64), in a folder that git ignores: taken along, the targets above find them.
# No Triton cache: its keys hash Triton's own library and its files hold absolute paths, so none made elsewhere is sure
# to be found.
CARRY_MIB := 60
gpu-carry:
	rm -rf build/carry
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--dest build/carry liger-kernel==0.8.5 cut-cross-entropy==25.1.1
	du -sm build/carry | { read -r size folder; echo "$$folder: $$size of $(CARRY_MIB) MiB"; [ $$size -le $(CARRY_MIB) ]; }

lint: .venv/linters
	$(BIN)/ruff check
	$(BIN)/ruff format --check
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

