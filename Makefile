# RingPrune's commands. `make` alone lists them; each that needs the environment sets it up first.

PYTHON ?= python3
SEEDS ?= 1
WORKERS ?= 2
ARGS ?=

RUN = mpi_scripts/environment/run
# The most telling first: on a busy machine the time may end before the rest.
EXCHANGES = ringprune:iwp,gloo-fp32,horovod-fp32-ring,horovod-fp32,gloo-fp16,horovod-fp16-ring,ringprune:random_k,ringprune:dgc
SOURCES = setup.py ringprune tests examples mpi_scripts
CLANG_FORMAT = find csrc tests \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -exec $(RUN) clang-format

.DEFAULT_GOAL := help
.PHONY: help environment demo test frameworks fuzz tsan lint format bench docs clean distclean

help: ## List these commands
	@awk -F ' ## ' '/^[a-z]+:.* ## / { sub(/:.*/, "", $$1); printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "Variables: SEEDS=3 (demo)  ARGS='-k iwp' (test, bench, fuzz, tsan)  WORKERS=0 (test: one after another)  MPI=system  TORCH=cpu  TORCH_INDEX=URL  PYTHON=python3.12"
	@echo "           RINGPRUNE_BUILD=auto|cpu|cuda|none; mpi_scripts/environment/set_up.py says what they do."

environment: ## Set up .venv: torch, MPI, Horovod, the native library; seconds when nothing changed
	@$(PYTHON) mpi_scripts/environment/set_up.py

demo: environment ## Train with plain Horovod and with RingPrune side by side; results in build/demo
	$(RUN) python examples/demo.py --seeds $(SEEDS) --out build/demo

test: environment ## Run all tests; ARGS goes to pytest
	$(RUN) python -m pytest --numprocesses $(WORKERS) $(ARGS)

frameworks: environment ## Add Accelerate, Lightning and transformers to .venv, and test with them
	$(RUN) python -m pip install --quiet --no-deps --requirement mpi_scripts/environment/frameworks.txt
	$(RUN) python -c "import accelerate, lightning, transformers"
	$(RUN) python -m pytest tests/examples/test_frameworks.py

fuzz: environment ## Call the native kernels with random arguments under AddressSanitizer and UBSan, 60 s
	$(RUN) python -m tests.sanitizers address $(ARGS)

tsan: environment ## The same with several threads under ThreadSanitizer, 60 s
	$(RUN) python -m tests.sanitizers thread $(ARGS)

lint: environment ## Check style, types and formatting, and that CUDA sources compile
	$(RUN) ruff check $(SOURCES)
	$(RUN) ruff format --check $(SOURCES)
	$(RUN) mypy
	$(CLANG_FORMAT) --dry-run --Werror {} +
	$(RUN) python mpi_scripts/environment/compile_cuda.py

format: environment ## Format Python and C++ sources
	$(RUN) ruff check --fix $(SOURCES)
	$(RUN) ruff format $(SOURCES)
	$(CLANG_FORMAT) -i {} +

bench: environment ## Measure selection (4 minutes; ARGS goes there), then exchanges (5 at most); rows in build/bench
	@mkdir -p build/bench
	$(RUN) ringprune bench select --json build/bench/select.json $(ARGS)
	$(RUN) python mpi_scripts/bench_exchange.py --steps 3 --warmup 1 --within 280 --methods $(EXCHANGES) \
		--json build/bench/exchange.json --plot build/bench/exchange.png || [ $$? -eq 3 ]
	@echo "More models, rates and ranks: $(RUN) python mpi_scripts/bench_exchange.py --help"

docs: ## Documentation
	@echo "The documentation is plain Markdown: start at README.md, then docs/."

clean: ## Delete what was built and logged; .venv and the Horovod wheel stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis ringprune/_native*.so

distclean: clean ## Delete .venv and .cache too: the next set-up starts from nothing
	rm -rf .venv .cache
