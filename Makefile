# Everything runs in the project's own virtual environment, .venv, made on first use.
#   make demo    train small models, eager beside compiled
#   make test    all tests; of sweeps (many arguments, or slow) a tenth, of static and
#                dynamic shapes one, of dtypes and layouts the first and a fifth of the others;
#                another part every eight hours
#   make test-all  all tests whole, on every target: hours     make unit    the internal ones only
#   make ascend  operator and model tests on ascendgraph's simulator: those of what changed, and one
#                of twenty parts of the others, another one every eight hours
#   make acceptance  how many of the sources that these tests generate each public set of CANN's
#                operator headers accepts: a table; one of ACCEPTANCE_PARTS parts of the tests (all)
#   make maca    the same on macagraph's emulation, one of forty parts of the operator tests
#   make nvidia  operator tests on macagraph's emulation, whose kernels NVRTC compiles for a GPU, too;
#                one of NVIDIA_PARTS parts of the tests (all)
#   make tops    the same on topsgraph's simulator, one of forty parts of the operator tests
#   make conformance  every operator case and every recorded model on every target, with reports,
#                coverage and the table of families in conformance_results: a night's work
#   make docs    draw the pictures and list the settings from the code, write what the tools print,
#                take a picture of a report (needs chromium)
#   make sanitize  the operator tests on cpugraph with the sanitizers of g++ in generated code
#   make lint    style and types    make format  fix the style

PYTHON ?= python3
ASCEND_PARTS ?= 20
ACCEPTANCE_PARTS ?= 1
MACA_PARTS ?= 40
NVIDIA_PARTS ?= 1
TOPS_PARTS ?= 40
BACKENDS ?= cpugraph ascendgraph macagraph tritongraph topsgraph
EXAMPLES := test/unit/test_examples.py
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
VENV := .venv
RUN := $(VENV)/bin/python
# Named after this folder: an environment that was moved or copied here is installed again.
READY := $(VENV)/ready$(subst /,-,$(CURDIR))

.PHONY: demo test test-all unit ascend acceptance maca nvidia tops conformance sanitize docs lint format env clean

demo: $(READY)
	$(RUN) -m demo

test: $(READY)
	$(PYTEST) --sweeps 10 test

test-all: $(READY)
	$(PYTEST) test
	$(MAKE) ascend ASCEND_PARTS=1
	$(MAKE) maca MACA_PARTS=1
	$(MAKE) tops TOPS_PARTS=1
	$(MAKE) sanitize

unit: $(READY)
	$(PYTEST) test/unit

ascend: $(READY)
	$(PYTEST) --backend ascendgraph --sample $(ASCEND_PARTS) test/op test/model $(EXAMPLES)

acceptance: $(READY)
	PYTHONPATH=test $(PYTEST) -p stand_in.acceptance --backend ascendgraph \
	    --sample $(ACCEPTANCE_PARTS) test/op test/model

maca: $(READY)
	$(PYTEST) --backend macagraph --sample $(MACA_PARTS) test/op

nvidia: $(READY)
	PYTHONPATH=test $(PYTEST) -p stand_in.nvidia --backend macagraph --sample $(NVIDIA_PARTS) test/op

tops: $(READY)
	$(PYTEST) --backend topsgraph --dynamic false --sample $(TOPS_PARTS) test/op $(EXAMPLES)

CASES := $(RUN) -m dicp.conformance
MODELS := $(notdir $(basename $(wildcard dicp/conformance/suite/models/*.json)))
conformance: $(READY)
	@failed=0; results=conformance_results; \
	$(CASES) gen_data --jobs $(JOBS) || failed=1; \
	for model in $(MODELS); do $(CASES) gen_data --model_name $$model || failed=1; done; \
	for backend in $(BACKENDS); do \
	    $(CASES) run_test --backend $$backend --jobs $(JOBS) --html_report --use_db \
	        --test_result_path $$results/$$backend/report.xlsx || failed=1; \
	    $(CASES) coverage --backend $$backend --report $$results/$$backend/report.json \
	        --out $$results/$$backend || failed=1; \
	    for model in $(MODELS); do \
	        $(CASES) run_test --backend $$backend --model_name $$model --use_db \
	            --test_result_path $$results/$$backend/$$model/report.xlsx || failed=1; \
	    done; \
	    $(CASES) models --backends $$backend --train --out $$results/$$backend || failed=1; \
	done; exit $$failed

docs: $(READY)
	$(RUN) docs/rooms.py
	$(RUN) docs/environment.py
	$(RUN) docs/operator_library.py
	$(RUN) docs/op_tools_output.py
	$(RUN) docs/report_picture.py

SANITIZE := -O1 -g1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr \
    -fno-sanitize-recover=all
sanitize: $(READY)
	env LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 DICP_CXX=g++ \
	    DICP_CXX_FLAGS="$(SANITIZE)" OMP_NUM_THREADS=1 \
	    $(RUN) -m pytest -n $(JOBS) -p no:cacheprovider test/op

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

env: $(READY)

clean:
	rm -rf $(VENV)

# One thread per worker: the workers together fill the machine. The programs that tests start read
# compiled modules: importing dicp from its sources takes two seconds.
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS)

# torch first and alone, so that nothing else pulls a larger build of it. Of 15,000 modules most are
# never imported: each is compiled when it is.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "dicp needs Python 3.11 or newer; give one with: make PYTHON=python3.12"; exit 1; }
	@$(RUN) -c '' 2>/dev/null || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) \
	    || { echo "the Python module venv does not work (Debian: apt install python3-venv)"; exit 1; }
	$(RUN) -m pip install --quiet --no-compile $(TORCH)
	$(RUN) -m pip install --quiet --no-compile -e '.[test,demo,lint]'
	$(RUN) -m pip install --quiet --no-compile --no-deps $(TORCHVISION)
	@touch $@
