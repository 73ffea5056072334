# The two main commands are `make train` and `make test`.
VENV    ?= .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
DATA    ?= data/python-stdlib
# Processes that share the files of make test; each starts four ranks where a file needs them. 0: one process, tests in order
TEST_WORKERS ?= 2
# Another release of megatron-core than the installed one, for make test: MCORE=0.19.2. Then only the tests that use it run
MCORE ?=
# The share of those test files that make test-releases runs, drawn at random, on the newest or oldest release
SAMPLE ?= 0.15
USE_MCORE := tests/mcore tests/optimizer tests/training tests/bench tests/job
# Releases of Transformer Engine whose Python runs on the CPU in tests: make test takes the newest, make test-te both
TE_OLDEST := 2.8.0
TE_NEWEST := 2.20.2
USE_TE := tests/wgrad/test_deferring.py tests/mcore/model/test_engine.py
# Faults that make test-faults and make test-hosts draw
FAULTS ?= 30
HOSTS_FAULTS ?= 60
# For make playground: PLAYGROUND="--port 9000 --open"
PLAYGROUND ?=
SOURCES := megatron tools tests pretrain_gpt.py

# Files begin in the order of tests/conftest.py, the longest first, and not those with the most tests
PYTEST  := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
QUICK   := not gpu and not slow

.DEFAULT_GOAL := help
.PHONY: te-python resiliency test-frameworks help setup data train lint format type test test-slow test-te test-faults test-hosts test-releases gpu-hour gpu-rehearsal bench playground check-upstream docs dist wheels clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv and install the pinned requirements
$(STAMP): requirements/base.txt requirements/dev.txt pyproject.toml setup.py $(wildcard megatron/zerobubble/plan/search/*pp)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, megatron-core and what the tests need into $(VENV): two minutes or more"
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

data: $(DATA).idx  ## build the training text: the Python standard library's own source
$(DATA).idx: $(STAMP) tools/preprocess_data.py
	$(BIN)/python tools/preprocess_data.py --python-stdlib --tokenizer-type ByteLevelTokenizer --output-prefix $(DATA)

train: setup data  ## train a small GPT on real text through a zero-bubble pipeline
	PATH="$(abspath $(BIN)):$$PATH" DATA_PATH=$(DATA) bash examples/pretrain_zero_bubble.sh
	@echo
	@echo "A small GPT trained through ZBV. On a CPU its times are no measure: passes of a few ms wait for messages and for the host."
	@echo "Faster than 1F1B on this machine?    bash examples/benchmark.sh --quick"
	@echo "What ran, and when:                  make playground, and drop runs/zbv/trace/report.json on the page"

lint: setup  ## ruff, import-linter and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: setup  ## fix and format the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup  ## only mypy --strict
	$(BIN)/mypy

test: setup te-python resiliency  ## all tests that need no GPU; with MCORE=0.19.2 those that use megatron-core, on that release
ifeq ($(MCORE),)
	$(PYTEST) -m "$(QUICK)"
else
	folder="$$($(BIN)/python -m tools.releases path $(MCORE))" && PYTHONPATH="$$folder" $(PYTEST) $(USE_MCORE) -m "$(QUICK)"
endif

test-slow: setup  ## the tests that take minutes, and those that use megatron-core on the other end of the supported releases
	$(BIN)/python -m pytest -m "slow"
	$(MAKE) test MCORE=$$($(BIN)/python -m tools.releases other)

# Without a network the tests that need it are skipped; in CI they fail
te-python: setup
	-@$(BIN)/python -m tools.releases te $(TE_NEWEST) >/dev/null

# Apart from the environment: it brings pynvml, of which torch then warns at every import
resiliency: setup
	-@test -d .nvidia-resiliency-ext || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target .nvidia-resiliency-ext nvidia-resiliency-ext==0.4.1 defusedxml==0.7.1

test-te: setup  ## all tests of Transformer Engine's layers, with its Python of 2.8 and of 2.20.2
	for version in $(TE_OLDEST) $(TE_NEWEST); do \
	  $(BIN)/python -m tools.releases te $$version || exit 1; \
	  ZB_TEST_TRANSFORMER_ENGINE=$$version $(PYTEST) $(USE_TE) -m "not gpu" || exit 1; \
	done

# In a folder of their own, without what they depend on: that asks for CUDA, and one of them for another Python
FRAMEWORKS := .frameworks/.installed
$(FRAMEWORKS): requirements/frameworks.txt
	rm -rf .frameworks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --target .frameworks -r $<
	touch $@

test-frameworks: setup te-python $(FRAMEWORKS)  ## Megatron-Bridge from PyPI, unedited, under stock and zero-bubble schedules; slow
	folder="$$($(BIN)/python -m tools.releases path $(or $(MCORE),0.19.2))" && PYTHONPATH="$$folder" $(BIN)/python -m pytest tests/frameworks -m ""

test-faults: setup  ## the fault laboratory: FAULTS=30 faults at random moments of real jobs, and a table of what became of them
	rm -f fault-trials.jsonl
	ZB_TEST_FAULTS=$(abspath fault-trials.jsonl) ZB_TEST_FAULTS_NUM=$(FAULTS) $(BIN)/python -m pytest -n 0 -v tests/faults -m "not gpu"
	$(BIN)/python -m tests.faults.report fault-trials.jsonl

test-hosts: setup  ## the laboratory of hosts: HOSTS_FAULTS=60 faults of hosts in real jobs, and a table; needs root and ip netns
	rm -f host-trials.jsonl
	folder="$$($(BIN)/python -m tools.releases path $(or $(MCORE),0.19.2))" && PYTHONPATH="$$folder" \
	  ZB_TEST_FAULTS=$(abspath host-trials.jsonl) ZB_TEST_HOSTS_NUM=$(HOSTS_FAULTS) $(BIN)/python -m pytest -n 0 -v tests/hosts -m ""
	$(BIN)/python -m tests.faults.report host-trials.jsonl

test-releases: setup te-python resiliency  ## a smoke test on each supported release of megatron-core, and a sample of all tests on the other end
	$(BIN)/python -m tools.releases smoke --workers $(TEST_WORKERS)
	folder="$$($(BIN)/python -m tools.releases path other)" && PYTHONPATH="$$folder" $(PYTEST) $(USE_MCORE) -m "$(QUICK)" --sample-files $(SAMPLE)

check-upstream: setup  ## whether PyPI's newest megatron-core works: what it lacks, and a smoke test
	$(BIN)/python -m tools.releases check-upstream --workers $(TEST_WORKERS)

gpu-hour:  ## the first hour on GPUs: tests, jobs and benchmarks in the environment of PYTHON (default python3), and one report
	$(PYTHON) -m tools.gpu hour

gpu-rehearsal: setup  ## every step of gpu-hour with tiny sizes on the CPU
	$(BIN)/python -m tools.gpu hour --rehearse --out gpu-report/rehearsal

bench: setup  ## benchmark the executor's overhead per op
	$(BIN)/python -m tools.benchmarks.executor

playground: setup  ## plan schedules in the browser, on this machine only
	$(BIN)/zerobubble playground $(PLAYGROUND)

docs: setup  ## build the documentation site with the playground into site/, with npm and node; warnings are errors
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	$(BIN)/python -m tools.docs.flags --check
	$(BIN)/python -m tools.docs.tested --check
	$(BIN)/python -m tools.docs.wrap --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m tools.docs.playground_app site/playground-app

dist: setup  ## build the sdist and this Python's wheel into dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/release.txt
	$(BIN)/python -m build --outdir dist

# Linux before 2014 (glibc 2.17) is enough for both; zig is a compiler for any of them
wheels: setup  ## build the wheels for Linux on x86-64 and aarch64 into dist/, each for every Python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/release.txt
	for machine in x86_64 aarch64; do rm -rf build && \
	  CXX="$(abspath $(BIN))/python -m ziglang c++ -target $$machine-linux-gnu.2.17" \
	    $(BIN)/python -m build --wheel --outdir dist -C--build-option=--plat-name=manylinux_2_17_$$machine || exit 1; done

clean:  ## remove what make train, make docs and make dist wrote; the environment stays
	rm -rf data runs site dist gpu-report fault-trials.jsonl host-trials.jsonl
