# The commands of this project; CI (.ci/run) calls the same ones. They need Python 3.11 or newer, and compose-test a Docker engine.
PYTHON ?= python3
MODEL ?= demo
SEEDS ?= 1000
SCHEDULES ?= 10000
SOAK_SECONDS ?= 600
SHARE_SECONDS ?= 60
FUZZ_SECONDS ?= 600
FUZZ ?=
FUZZ_EXAMPLES ?= 20
CONSOLE_SHOTS ?=
CHAOS ?=

# For targets whose single tests may take longer than pyproject.toml's bound on a test that hangs.
LONG_TESTS := -o faulthandler_timeout=0

# What pytest runs by default (pyproject.toml), and the folders and files of pure modules' tests.
DEFAULT := not gpu and not slow and not compose and not mutants and not kernels and not wide and not clients and not browser
PURE := tests/properties tests/scheduler tests/worker/pure

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled

.DEFAULT_GOAL := help
.PHONY: help install compiled demo up quick test wide test-all house oracle soak chaos sim mutants kernels fairness shares nightly fuzz fuzz-ports check lint types layers format proto schemas test-clients test-console compose-test clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

install: $(COMPILED) ## a virtual environment in .venv with everything that the rest needs

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a minute or two, once)" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

compiled: $(COMPILED) ## the scheduler's decisions as compiled code, where there is a C compiler (make install does it)

$(COMPILED): $(STAMP) deploy/compile.py $(wildcard shared/manylora_shared/fairness/*.py shared/manylora_shared/*.py services/scheduler/manylora_scheduler/core/*.py)
	@echo "compiling the scheduler's decisions (most of a minute)" >&2
	@$(BIN)/python deploy/compile.py --if-possible
	@touch $@

demo: $(STAMP) ## four tenants, four adapters, three services and etcd, on this machine
	@$(BIN)/manylora demo

up: $(COMPILED) ## a local cluster in the foreground: make up MODEL=/path/to/model
	@$(BIN)/manylora up --model $(MODEL)

quick: $(STAMP) ## the pure modules' tests, on all cores: seconds
	@$(BIN)/python -m pytest -q -n logical --dist worksteal -m 'not long and not wide and not slow' $(PURE)

test: $(COMPILED) ## everything that a change can break, in one of its kind: minutes
	@$(BIN)/python -m pytest -q -n logical --dist worksteal -m '$(DEFAULT) and not e2e'
	@$(BIN)/python -m pytest -q -m '$(DEFAULT) and e2e'

wide: $(COMPILED) ## the further ones of each kind: more families, longer histories, clusters of their own
	@$(BIN)/python -m pytest -q -n logical --dist worksteal -m 'wide and not e2e and not gpu'
	@$(BIN)/python -m pytest -q -m 'wide and e2e and not gpu' --ignore=tests/e2e/test_oracle.py

test-all: wide oracle sim mutants kernels test ## all of them: tests, oracle, simulation, planted bugs, kernels

oracle: $(STAMP) ## every model family through a running cluster, against transformers + PEFT
	@$(BIN)/python -m pytest -q -m 'e2e and not slow' tests/e2e/test_oracle.py

soak: $(STAMP) ## 64 streams over gRPC and HTTP, cancels, disconnects and adapter churn for ten minutes: make soak SOAK_SECONDS=600
	@$(BIN)/python -m pytest $(LONG_TESTS) -q -s -m slow tests/e2e/test_soak.py --soak-seconds $(SOAK_SECONDS)

chaos: $(COMPILED) ## kills, freezes, cuts and full disks under load, and what callers saw: make chaos CHAOS="killed,frozen"
	@$(BIN)/python -m bench.chaos --only "$(CHAOS)"

sim: $(COMPILED) ## the whole cluster simulated under faults, on all cores: make sim SEEDS=1000
	@$(BIN)/python -m pytest -q -n logical --dist worksteal tests/sim --sim-seeds $(SEEDS)

mutants: $(STAMP) ## planted bugs: the simulation finds every one of them, on all cores
	@$(BIN)/python -m pytest -q -n logical --dist worksteal -m mutants --show-capture=stdout tests/sim/test_mutants.py tests/sim/test_handover_sim.py tests/sim/test_rollouts_sim.py tests/properties/test_overload_shares.py

kernels: $(STAMP) ## the GPU's kernels on the CPU: Triton's in its interpreter, CUDA's as C++ (installs Triton)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt triton
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n logical --dist worksteal -m "kernels and not gpu and not slow" tests/numerics

fuzz: $(STAMP) ## every parser of bytes from outside, by coverage, for so long together: make fuzz FUZZ_SECONDS=600 FUZZ="policy http"
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	@$(BIN)/python -m tests.fuzz.run $(FUZZ_SECONDS) $(FUZZ)

fuzz-ports: $(STAMP) ## every route and RPC of a running cluster, by their schemas and by bytes: make fuzz-ports FUZZ_EXAMPLES=20
	@$(BIN)/python -m pytest -q -m e2e tests/fuzz/test_ports.py --fuzz-examples $(FUZZ_EXAMPLES)

fairness: $(STAMP) ## random schedules against the fairness bound: make fairness SCHEDULES=10000
	@$(BIN)/python -m pytest $(LONG_TESTS) -q -s tests/properties/test_fair_queue.py tests/properties/test_seam.py --fair-schedules $(SCHEDULES)

shares: $(STAMP) ## shares of backlogged tenants, and overload that touches who causes it, through real services (most of an hour): make shares SHARE_SECONDS=60
	@$(BIN)/python -m pytest $(LONG_TESTS) -q -s -m e2e tests/e2e/test_fairness.py tests/e2e/test_overload_services.py --fairness-seconds $(SHARE_SECONDS)

NIGHTLY := fuzz fuzz-ports fairness mutants soak chaos shares

nightly: ## what takes too long for each change, one after the other, for cron: some two hours
	@broken=; for target in $(NIGHTLY); do echo "== make $$target"; $(MAKE) --no-print-directory $$target || broken="$$broken $$target"; done; echo "== broken:$${broken:- none}"; test -z "$$broken"

check: lint types layers ## lint, types and the layers

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint --ignore DL3008 deploy/Dockerfile deploy/*/Dockerfile; fi

types: $(STAMP)
	@$(BIN)/mypy

layers: $(STAMP)
	@$(BIN)/lint-imports

format: $(STAMP) ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

house: $(STAMP) ## how the house stands: folders, docstrings, longest functions, what has no test of its name
	@$(BIN)/python tests/arch/house.py

proto: $(STAMP) ## generate the stubs from protos/
	@$(BIN)/python protos/generate.py

schemas: $(STAMP) ## 500 generated schemas on a real model, at temperature 1: make schemas MODEL=folder
	@MANYLORA_REAL_MODEL=$(MODEL) $(BIN)/python -m pytest $(LONG_TESTS) -q -s -m slow tests/numerics/test_constrained_output.py

test-clients: $(STAMP) ## other people's clients against the real model: OpenAI's, Anthropic's, litellm, langchain, pydantic-ai, lm-eval, aiperf, vllm bench
	@test -x .venv-clients/bin/lm_eval || { $(PYTHON) -m venv .venv-clients && .venv-clients/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt; }
	@test -x .venv-aiperf/bin/aiperf || { $(PYTHON) -m venv .venv-aiperf && .venv-aiperf/bin/pip install --quiet --disable-pip-version-check aiperf==0.13.0; }
	@test -x .venv-vllm/bin/vllm || { $(BIN)/python -m venv .venv-vllm && $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo .venv-vllm/lib/python3*/site-packages)/ours.pth && .venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/vllm-bench.txt; }
	@$(BIN)/python -m pytest $(LONG_TESTS) -q -m clients tests/clients

test-console: $(STAMP) ## the console in a headless Chromium (apt install chromium): make test-console CONSOLE_SHOTS=folder
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt playwright
	@CONSOLE_SHOTS=$(CONSOLE_SHOTS) $(BIN)/python -m pytest -q -m browser tests/console

compose-test: $(STAMP) ## build the images, run docker-compose.yml and check it from outside
	@$(BIN)/python -m pytest $(LONG_TESTS) -q -m compose tests/compose

clean: ## remove the virtual environment and what tools left
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
