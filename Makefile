# Every target does its whole set-up on a fresh machine; stamp files make a second call start at once.
#
#   make demo | quick | test | test-portable | mutants | test-gguf | bench | lint | types | clean

PYTHON ?= python3
# Installed before everything else, so that no dependency picks another build. Name the one you want:
#   make demo TORCH='torch==2.9.1'
TORCH ?= torch==2.13.0
OLDEST ?= transformers==5.17.0
# A worker runs neighbours, which share what a file sets up, and takes from the other one when it is done.
PYTEST_FLAGS ?= -n auto --dist worksteal

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

NEWEST_READY := .venv/.ready
OLDEST_READY := .venv-oldest/.ready

# Two editable installs of one tree at once would write the same metadata.
.NOTPARALLEL:

.PHONY: demo quick mutants test test-newest test-oldest test-gguf test-portable bench lint types clean

demo: $(NEWEST_READY)
	.venv/bin/python -P demo.py

# Under a minute on two idle cores: the tests of `QUICK` in tests/which_tests.py, which catch most careless changes.
quick: $(NEWEST_READY)
	OMP_NUM_THREADS=1 .venv/bin/python -P -m pytest -m quick $(PYTEST_FLAGS) \
		$$(PYTHONPATH=tests .venv/bin/python -P -c "from which_tests import QUICK; print(*map('tests/{}'.format, QUICK))")

# Careless one-line changes in a copy of the tree, each run against the tests of its file: nine of ten must be caught.
N ?= 60
SEED ?= 0
mutants: $(NEWEST_READY)
	.venv/bin/python tests/mutants.py -n $(N) --seed $(SEED)

# One suite on both ends of the supported range of transformers, and what llama.cpp makes of our folders.
test: lint test-newest test-oldest test-gguf

# Each pytest worker has a core of its own, so more threads than one a worker only get in each other's way.
test-newest: $(NEWEST_READY)
	.venv/bin/python -c "import torch, transformers as t; print('torch', torch.__version__, 'transformers', t.__version__)"
	OMP_NUM_THREADS=1 .venv/bin/python -P tests/common_suite/run.py $(PYTEST_FLAGS)
	OMP_NUM_THREADS=1 .venv/bin/python -P -m pytest tests $(PYTEST_FLAGS)

# Without the tests marked one_release: kernels, the bytes of conversions, prompts of evaluations, serving, loops of our
# own around the model, and what our caches, optimizers and adapters of experts do by themselves. What these need of
# transformers (loading, forwards, masks, caches, generate, Trainer) other tests run on both releases.
test-oldest: $(OLDEST_READY)
	.venv-oldest/bin/python -c "import torch, transformers as t; print('torch', torch.__version__, 'transformers', t.__version__)"
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -P tests/common_suite/run.py $(PYTEST_FLAGS)
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -P -m pytest tests $(PYTEST_FLAGS) -m 'not one_release'

# Conversion against llama.cpp: its converter, which is in no package but in the source of one (77 MB), and its logits.
# Where that cannot be had the tests say that they are skipped.
LLAMA := $(CURDIR)/build/llama/vendor/llama.cpp
test-gguf: $(NEWEST_READY)
	.venv/bin/python -m pip install -qq -e '.[gguf]'
	mkdir -p build/llama
	-test -d $(LLAMA) || { \
		.venv/bin/python -m pip download -qq --no-deps --no-binary :all: -d build/llama llama-cpp-python \
		&& tar xzf build/llama/llama_cpp_python-*.tar.gz -C build/llama --strip-components 1; }
	test ! -d $(LLAMA) || export KIMI_K3_LLAMA_CPP=$(LLAMA); .venv/bin/python -P -m pytest -rs tests/conversion/test_gguf.py

# Numerical tests under other instruction sets of the processor and numbers of threads, one after the other.
test-portable: $(NEWEST_READY)
	.venv/bin/python -P tests/portable.py

bench: $(NEWEST_READY)
	set -e; for script in benchmarks/*_cpu.py; do .venv/bin/python -P "$$script"; done

lint: $(NEWEST_READY) types
	.venv/bin/ruff check --output-format=concise .
	.venv/bin/ruff format --check .

# mypy takes a module's name from its path: below a link named like the package, the repository root has that name.
types: $(NEWEST_READY)
	mkdir -p build/types
	ln -sfn ../.. build/types/kimi_k3
	.venv/bin/mypy

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info .hypothesis .mypy_cache .ruff_cache
	find . '(' -name __pycache__ -o -name .pytest_cache ')' -type d -prune -exec rm -rf {} +

# Editable, so that new files and folders are there without another install. pip would compile with one core, and Python
# not at all where PYTHONDONTWRITEBYTECODE is set: every process of the suite would then compile what it imports. Some
# packages hold files that are no Python.
PIP_INSTALL := -m pip install -qq --no-compile
COMPILE := -m compileall -qq -j 0

$(NEWEST_READY): setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) '$(TORCH)'
	.venv/bin/python $(PIP_INSTALL) -e '.[test]'
	.venv/bin/python $(COMPILE) .venv/lib || true
	touch $@

# Stands on .venv, whose packages it sees behind its own, as pip does: only what the oldest release needs otherwise is
# installed.
$(OLDEST_READY): $(NEWEST_READY)
	$(PYTHON) -m venv .venv-oldest
	.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
	.venv-oldest/bin/python $(PIP_INSTALL) '$(TORCH)' '$(OLDEST)' -e '.[test]'
	.venv-oldest/bin/python $(COMPILE) .venv-oldest/lib || true
	touch $@
