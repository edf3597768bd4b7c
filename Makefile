# make test | make compare: each builds .venv when it is missing or setup.py has changed.
#   TORCH="torch==X"   another PyTorch        ACTIVE_ENV=1   use the environment that is active now, install nothing
#   ARGS="..."         further arguments for the command
PYTHON ?= python3
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)

ifdef ACTIVE_ENV
BIN :=
READY :=
else
BIN := .venv/bin/
READY := .venv/ready
endif

.PHONY: compare test clean

compare: $(READY)
	$(BIN)python -m benchmarks.compare $(ARGS)

test: $(READY)
	$(BIN)python -m ruff check .
	$(BIN)python -m pytest -n auto $(ARGS)
	TRITON_INTERPRET=1 $(BIN)python -m pytest -n auto tests/ops/test_kdn_kernels.py $(ARGS)

.venv/ready: setup.py
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet $(TORCH)
	.venv/bin/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf .venv
