# Needs Python 3.11 or newer with venv, and make. Everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TEST_PROCESSES ?= 4

# Processes share the cores of the machine; libraries that take all of them slow one another down. What one process has
# compiled of the sources is kept for the others: a run has hundreds, and half a minute of a core is spent on the tests.
TEST_ENVIRONMENT := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=$${MKL_NUM_THREADS:-1} \
	OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS:-1} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=

STAMP := $(VENV)/.sparseps-installed
QUICKSTART_STAMP := $(VENV)/.quickstart-installed
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
SOURCES := pscore psservice psclient tests examples benchmarks verify tools

# An environment stays with the interpreter that made it, so a choice that differs is refused and not ignored.
ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
ifneq ($(wildcard $(VENV)/bin/python),)
BUILD := -c 'import sys; print(sys.base_prefix, *sys.version_info[:2])'
ifneq ($(shell $(PYTHON) $(BUILD) 2>&1),$(shell $(VENV)/bin/python $(BUILD) 2>&1))
$(error $(VENV) was made by another interpreter than PYTHON=$(PYTHON): remove it, or add VENV=.venv-other)
endif
endif
endif

.DEFAULT_GOAL := help
.PHONY: help venv quickstart examples test container-test fuzz fuzz-service simulate chaos soak lint format smoke docs stubs references bench gpu scale compare evidence rivals wheel release-check clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'ARGS="..." goes to the program behind quickstart, examples, test, fuzz, simulate, chaos, soak, bench, scale, compare, evidence, rivals, wheel and release-check; PYTHON=python3.12 picks the interpreter.'

venv: $(STAMP) ## Set up .venv with the tested versions of everything

$(QUICKSTART_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo '$(PYTHON) is missing or older than Python 3.11; choose another: make PYTHON=python3.12' >&2; exit 1; }
	@echo '[1/4] creating $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@echo '[2/4] installing PyTorch (the largest part: minutes on a slow line)'
	@$(PIP) install -c constraints.txt torch
	@echo '[3/4] installing sparseps and what the quickstart needs'
	@$(PIP) install -c constraints.txt -e '.[quickstart]'
	@echo '[4/4] compiling loops for this machine (up to a minute)'
	@$(VENV)/bin/psservice compile && $(VENV)/bin/psclient compile
	@touch $@

$(STAMP): $(QUICKSTART_STAMP) tools/generate_stubs.py
	@echo '[1/2] installing what tests and all examples need (gigabytes: DALI and torchvision are the largest)'
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@echo '[2/2] fetching the generator of the gRPC stubs'
	@$(VENV)/bin/python tools/generate_stubs.py --prepare
	@touch $@

quickstart: $(QUICKSTART_STAMP) ## Train a small model with a server and workers on this machine
	@$(VENV)/bin/python examples/quickstart.py $(ARGS)

examples: venv ## Run every example on small data, kill and resume the long ones; QUICK=1 takes under ten minutes
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m tools.run_examples $(if $(QUICK),--quick) $(ARGS)

test: venv ## Run the tests but the long ones, in about nine minutes on two cores; LONG=1 runs all of them
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal $(if $(LONG),--long) $(ARGS)

container-test: venv ## Build the image and train in its containers, from the manifests; as root, with podman (status 77: cannot be run here)
	@$(VENV)/bin/python -m tools.container_test $(ARGS)

fuzz: venv ## Look for hostile chunks that no test has; ARGS="--seconds 600 --codec rice"
	@$(PIP) install --quiet -c constraints.txt -e '.[fuzz]'
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m tools.fuzz_codecs $(ARGS)

simulate: venv ## Live through whole runs in virtual time, with disks and connections that fail; half an hour, ARGS="--histories N --seed S"
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m tests.simulator $(ARGS)

chaos: venv ## Break real servers, workers and connections, cut the power of disks, and account for every push, reply and publication; about twenty minutes
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m verify $(ARGS)

soak: venv ## Train for ten minutes and see that nothing grows; ARGS="--minutes 60"
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m verify.soak $(ARGS)

lint: venv ## Check style, types and the protocol file
	$(VENV)/bin/ruff check $(wildcard $(SOURCES))
	$(VENV)/bin/ruff format --check $(wildcard $(SOURCES))
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/generate_stubs.py --check
	tools/lint_proto.sh

format: venv ## Rewrite the sources in the house style
	$(VENV)/bin/ruff check --fix $(wildcard $(SOURCES))
	$(VENV)/bin/ruff format $(wildcard $(SOURCES))

docs: venv ## Build the documentation's site into site/, with the API from the docstrings; fails if a link leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo 'site/index.html'

stubs: venv ## Regenerate the gRPC stubs from proto/
	@$(VENV)/bin/python tools/generate_stubs.py

references: venv ## Write what is generated from the code: settings and metrics in docs/reference, settings and alert rules for Kubernetes
	@for name in settings_reference metrics_reference configmap prometheus_rule; do \
		$(VENV)/bin/python -m tools.generate_$$name || exit 1; done

bench: venv ## Run the benchmarks and write runs/bench/report.md; QUICK=1 takes two minutes; ARGS="--base DIR" compares with another checkout
	@$(VENV)/bin/python -m benchmarks.bench $(if $(QUICK),--quick) $(ARGS)

gpu: ## On a machine with a GPU: kernels, figures, tests, quickstart, in 20 minutes, into runs/gpu; ARGS=--plan says what it does
	@$(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

scale: venv ## Simulate up to 1,000 workers and 64 shards from costs measured here, into runs/scale; twelve minutes, QUICK=1 a few
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m benchmarks.scale $(if $(QUICK),--quick) $(ARGS)

compare: venv ## Compare the training methods into runs/compare; an hour, QUICK=1 takes five minutes; goes on where it was
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m benchmarks.compare $(if $(QUICK),--quick) $(ARGS)

evidence: venv ## Does sparse both ways cost accuracy? Into runs/evidence; days in all, the main question first; QUICK=1 takes ten minutes; goes on where it was
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m benchmarks.evidence $(if $(QUICK),--quick) $(ARGS)

rivals: venv ## Time to the same loss against torch's DDP, PowerSGD and local SGD on slow networks made here, into runs/rivals; hours, as root; QUICK=1 takes minutes; goes on where it was
	@$(TEST_ENVIRONMENT) $(VENV)/bin/python -m benchmarks.rivals $(if $(QUICK),--quick) $(ARGS)

fuzz-service: venv ## Call the whole service with nearly right messages; ARGS="--inputs N"
	@$(VENV)/bin/python -m tests.hostile.service $(ARGS)

smoke: venv ## Run the smallest form of every target, seconds each; ARGS="compare scale" runs some
	@$(TEST_ENVIRONMENT) VENV=$(VENV) $(VENV)/bin/python -m tools.smoke $(ARGS)

wheel: venv ## Build the source distribution, and a wheel of it, into dist/, and look into them
	@$(VENV)/bin/python -m tools.release_check --contents $(ARGS)

release-check: venv ## The same, and install the wheel in a bare environment for each Python that is here, 3.11 to 3.14, and train there; minutes
	@$(VENV)/bin/python -m tools.release_check $(ARGS)

clean: ## Remove what was built; keep .venv and runs/
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find $(wildcard $(SOURCES)) -type d -name __pycache__ -prune -exec rm -rf {} +
