# Everything a person or CI does with this repository. `make` lists the targets; each works alone, on a machine
# that has Python 3.11 or newer, git and make. What is installed goes into .venv, with the versions of
# binder/constraints.txt. A .venv that already exists is kept, and so is a torch in it that fits: to choose a build
# of torch, make the .venv, install that torch into it, and then `make venv`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c binder/constraints.txt

# Where a browser may be found; CHROMIUM=/path/to/one goes first.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

# The two suites are a partition of all tests: none runs twice, none is forgotten. Tests marked `slow` repeat a
# behavior in more combinations; `make test` leaves them out, `make test-all` runs them.
UNIT_TESTS := not (cluster or gpu or notebook or browser)
ENGINE_TESTS := cluster or gpu or notebook or browser

# Each process takes whole files, so that a file's tests share their cluster, in the order in which they are collected.
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# JupyterLab refuses to run as root unless told; this one listens on loopback only and wants a token.
AS_ROOT = $(shell test "$$(id -u)" -ne 0 || echo --allow-root)

.DEFAULT_GOAL := help
.PHONY: help venv demo lab lint check test test-all test-hosts faults soak bench docs chromium hosts clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(INSTALLED)  ## make .venv with the package (editable) and all that its tests need

# The stamp is younger than what it was made from for as long as nothing needs installing. `pip --version` tells a
# whole .venv from one that a failed attempt left behind.
$(INSTALLED): pyproject.toml binder/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "dtkit needs Python 3.11 or newer, and %s is %d.%d. Name another: make venv PYTHON=python3.12" % (sys.executable, v[0], v[1]))'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

demo: venv  ## train a real model on a cluster, in this terminal
	$(BIN)/python -m dtkit.demo

lab: venv  ## open JupyterLab on the notebooks
	$(BIN)/python -m jupyterlab --ip=127.0.0.1 $(AS_ROOT) notebooks

lint: venv  ## format, lint and strict types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint  ## lint, then the unit tests
	$(PYTEST) -m '$(UNIT_TESTS) and not slow'

test: check chromium  ## check, then tests on real clusters, in notebooks and in a real browser (40 minutes to an hour on two cores)
	$(PYTEST) -m '($(ENGINE_TESTS)) and not slow'

test-all: lint chromium  ## every test, also those that `make test` leaves out (an hour)
	$(PYTEST) -m '$(UNIT_TESTS)'
	$(PYTEST) -m '$(ENGINE_TESTS)'
	$(BIN)/python -m tests.tried
	$(BIN)/python -m tests.tried.vision
	$(BIN)/python -m tests.tried.examples $(CLONES)

# In the order of their time, so that no process is left with a long one.
HOST_TESTS := $(addprefix tests/cluster/test_,$(addsuffix .py,ssh_hosts slurm_hosts slurm_job_ends bad_hosts batch_hosts mpi_hosts ssh_cluster)) tests/test_many_hosts_notebook.py $(addprefix tests/cluster/test_,$(addsuffix .py,host_checkpoints start_agents hosts slurm_job network))

test-hosts: venv  ## the tests on several hosts, slow ones too, after `make hosts` (6 minutes)
	$(PYTEST) -n 3 $(HOST_TESTS)

faults: venv  ## break each part of a training in each way, and print what came of it (half an hour or so)
	$(BIN)/python -m tests.faults

soak: venv  ## train for 30 minutes with a fault every 20 s, and look for leaks
	$(BIN)/python -m tests.faults.soak

bench: venv  ## measure speed, memory and start-up next to their references
	$(BIN)/python -m tests.bench

docs: export EXECUTE ?= 1
docs: venv  ## run the notebooks, and build the documentation in docs/_build/html (EXECUTE=0: don't run them)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	@echo 'Serve it, since its search shows no excerpts of files: $(BIN)/python -m http.server -d docs/_build/html'

chromium:  ## have a Chromium for the browser tests (installs Debian's when root)
	@if [ -n "$$CHROMIUM" ] && command -v "$$CHROMIUM"; then exit 0; fi; \
	for name in $(BROWSERS); do command -v "$$name" && exit 0; done; \
	if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; \
	else \
	  echo 'The browser tests need Chromium or Chrome, and none is on PATH. Install one (Debian: apt-get install chromium), or name it: CHROMIUM=/path/to/it make test.' >&2; \
	  exit 1; \
	fi

hosts:  ## have SSH, Slurm and Open MPI for the tests on several hosts (installs Debian's when root)
	@missing=; for name in ip nsenter sshd sbatch slurmctld slurmd munged mpirun qsub; do \
	  PATH="$$PATH:/usr/sbin:/sbin" command -v "$$name" || missing="$$missing $$name"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update && apt-get install --yes --no-install-recommends \
	    iproute2 munge openmpi-bin openssh-client openssh-server slurm-wlm slurm-wlm-torque util-linux; \
	else \
	  echo "Tests on several hosts need$$missing, and are skipped without. Debian has them in iproute2, munge, openmpi-bin, openssh-server, slurm-wlm and slurm-wlm-torque." >&2; \
	  exit 1; \
	fi

clean:  ## remove what these targets made, .venv included
	rm -rf $(VENV) build dist out docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find dtkit tests notebooks -name __pycache__ -prune -exec rm -rf {} +
	find notebooks -name .ipynb_checkpoints -prune -exec rm -rf {} +
