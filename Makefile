# Everything runs in .venv, which the first target makes: nothing is needed but Python ≥ 3.11 with venv, and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
CODE := nbtools tests benchmarks notebooks

.DEFAULT_GOAL := help
.PHONY: help demo quick test full bench notebooks check

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s%s\n", $$1, $$2}'

TASK ?= captcha

demo: .venv/ready  ## a task's notebooks from top to bottom on generated data, TASK=captcha, hwdb, sign or segment; pages under demo/
	@$(BIN)/python -m notebooks.execute $(TASK)

# As many tests at once as there are cores. By itself xdist begins with the files that have the most tests; the longest
# tests are in files of few, and would leave a core idle at the end.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder \
    -m 'not alone and not full'
QUICK := layers project plan draws history old loop task memory rollback requests pack captcha

quick: .venv/ready  ## in less than a minute: whether a change broke something
	@$(BIN)/ruff check -q $(CODE)
	@$(PARALLEL) $(wildcard $(QUICK:%=tests/test_%.py))

# Those that read a clock or drive a browser come last, one at a time.
test: .venv/ready .venv-colab/ready .venv-ipykernel-7.3/ready  ## every test but the longest
	@result=0; \
	$(PARALLEL) || result=$$?; \
	$(BIN)/python -m pytest -q -m 'alone and not full' || result=$$?; \
	exit $$result

full: test  ## make test, and what takes too long for every change
	@$(BIN)/python -m pytest -q -m full

bench: .venv/ready-bench  ## benchmarks one after another; receipts under benchmarks/results/
	@for name in $$(grep -l __main__ benchmarks/*.py | xargs -n1 basename -s .py); do \
	    echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

notebooks: .venv/ready  ## write notebooks/**/*.ipynb and the README's tables; REPOSITORY=https://… sets a fork's address
	@$(BIN)/python -m notebooks.build $(if $(REPOSITORY),--repository '$(REPOSITORY)')

check: .venv/ready  ## format, lint, types, layers, notebooks up to date
	@$(BIN)/ruff format --check -q $(CODE) || { echo "to format: $(BIN)/ruff format $(CODE)"; exit 1; }
	@$(BIN)/ruff check -q $(CODE)
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -q tests/test_layers.py
	@$(BIN)/python -m notebooks.build --check

.venv/ready: requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"nbtools needs Python 3.11 or newer; $(PYTHON) is {v}. Say another: make PYTHON=python3.12 …")'
	@echo "Installing into .venv (a few minutes the first time) …"
	@$(PYTHON) -m venv .venv
	@$(PIP) -r requirements.txt
	@$(PIP) -e '.[dev]'
	@touch $@

.venv/ready-bench: .venv/ready
	@echo "Installing the peers that the benchmarks compare with …"
	@$(PIP) -e '.[bench]'
	@touch $@

# Older notebook stacks for the tests: their own packages first on the path, then all of .venv (torch once on the disk).
.venv-%/ready: tests/stacks/%.txt .venv/ready
	@echo "Installing $< into .venv-$* …"
	@rm -rf .venv-$*
	@$(BIN)/python -m venv --without-pip .venv-$*
	@$(BIN)/python -m pip --python .venv-$*/bin/python install -q --disable-pip-version-check --no-deps -r $<
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/after.pth
	@touch $@
