# `make bench` measures, calibrates and reports. `make test` checks all but what is slow, `make test-all` everything,
# `make coverage` every op against a committed table, `make gpu` measures what one GPU can show in nine minutes. All
# install first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(shell date -u +%Y%m%dT%H%M%SZ)
RUN := results/bench-$(STAMP)
PAGE := reports/bench-$(STAMP).html

.PHONY: pictures bench plan gpu rehearse-gpu wheels test test-all faults coverage docs size install checks lint types imports fast slow clean

bench: install
	@mkdir -p results reports
	$(BIN)/dtbench run --budget 150s -o $(RUN).jsonl
	$(BIN)/dtbench calibrate $(RUN).jsonl -o $(RUN).topology.json
	$(BIN)/dtbench report $(RUN).jsonl --topology $(RUN).topology.json -o $(PAGE)
	@echo
	@echo "results:  $(RUN).jsonl"
	@echo "topology: $(RUN).topology.json"
	@echo "report:   $(CURDIR)/$(PAGE)"

# What one GPU can show, by worth; what results/gpu.zip holds already is not done again. Then: the same commands on this
# CPU, with a fake GPU; no figure counts. Without `make` the script needs python3 and .wheels alone, see `wheels`.
gpu: install
	$(BIN)/python -m dtbench.tests.gpu --within 9m -o results/gpu.zip

rehearse-gpu: install
	$(BIN)/python -m dtbench.tests.gpu --rehearse -o results/gpu-rehearsal-$(STAMP).zip

# For a machine without network that has torch, numpy, scipy, pandas and matplotlib for Python 3.12: the rest of what
# the script needs, 4 MiB. NCCL_LIB=PATH adds an NCCL of 2.30 or newer, built for the card, which lets two ranks share it.
WHEELS := click hypothesis iniconfig jinja2 markdown-it-py markupsafe mdurl msgspec nvidia-ml-py packaging pluggy \
	py-cpuinfo2 pygments pytest pytest-benchmark rich sortedcontainers

wheels: install
	rm -f .wheels/*.whl
	$(subst install,download,$(PIP)) --no-deps --only-binary=:all: --python-version=3.12 --implementation=cp \
		$(foreach n,2_17 2_27 2_28 2014,--platform=manylinux$(if $(filter 2014,$n),,_)$n_x86_64) \
		-c .ci/constraints.txt -d .wheels $(WHEELS)
	$(if $(NCCL_LIB),cp $(NCCL_LIB) .wheels/libnccl.so.2)

# The checks first: the tests keep two cores busy.
test: install
	@$(MAKE) --no-print-directory checks
	@$(MAKE) --no-print-directory fast

checks: install
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory imports

test-all: test slow

# Ranks that die, full disks, hostile files, Ctrl-C: starts every fault of dtbench/tests/faults and writes what was seen
# to results/faults.md.
faults: install
	OMP_NUM_THREADS=1 DTBENCH_FAULTS_TABLE=results/faults.md $(BIN)/pytest -q dtbench/tests/faults

# Is every op that was right still right? Judges the core as results/coverage-core.json was made (four ranks in a process,
# all modes) and exits with an error and their names if an op became worse.
coverage: install
	$(BIN)/python -m core.tests.coverage --base results/coverage-core.json

# Published steps and collectives beside what `dtbench plan` predicts: results/plan, a minute.
STEPS := results/reference/step-times
PREDICT := a100-one-node@a100-8x a100-64-gpus@a100-8x a100-256-gpus@a100-8x llm-foundry-h100@h100-8x torchtitan-h100@h100-8x \
	playbook-h100@h100-8x-nanotron playbook-h100@h100-8x megatron-bridge-older@h100-8x $(foreach m,h100-8x gb200 gb300 b200-8x b300-8x,megatron-bridge-newest@$(m))
LINKS := several-nodes-h100@h100-8x-nanotron $(foreach m,a100-8x h100-8x h200-8x b300-8x gb200 rtx-pro-6000-8x b60-4x,single-node@$(m))

plan: install
	@mkdir -p results/plan
	for one in $(PREDICT); do $(BIN)/dtbench plan --validate $(STEPS)/$${one%@*}.csv --machine $${one#*@} > results/plan/$$one.txt; done
	for one in $(LINKS); do $(BIN)/dtbench plan --validate results/reference/nccl-perf/$${one%@*}.csv --machine $${one#*@} > results/plan/$$one.txt; done
	for one in playbook-h100@h100-8x llm-foundry-h100@h100-8x; do rm -f results/plan/machine.json; $(BIN)/dtbench plan --fit $(STEPS)/$${one%@*}.csv \
		--machine $${one#*@} -o results/plan/machine.json > results/plan/$$one-held-out.txt; rm results/plan/machine.json; done

# The pages of docs/, strictly: a link that leads nowhere or a name that is not there fails.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f docs/mkdocs.yml
	@echo "docs/site/index.html"

# The picture of the README's first screen and those of the pages, of what the commands write from committed files; the
# latter need a chromium.
pictures: install
	$(BIN)/python -m dtbench.tests.answers docs/pages/answers.png
	$(BIN)/python -m dtbench.tests.pictures

install: $(VENV)/installed

# Only files whose hash is known, but torch's, of which each index has its own build; the last line finds all there.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(VENV)/installed: pyproject.toml .ci/constraints.txt .ci/hashes.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps -r .ci/hashes.txt
	$(PIP) -c .ci/constraints.txt torch
	$(PIP) --no-index --no-build-isolation -e '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

# One thread per rank: the worlds of the tests hold more ranks than small machines have cores. A worker that is done
# takes tests from the other. Which test is of which tier stands in dtbench/tests/tiers.py.
fast slow: install
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m $@

# Statements (docstrings left out) and lines of Python per room: `make size` as checked out, `make size AT=v0.1` at that revision.
size:
	@.ci/size $(AT)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .benchmarks
