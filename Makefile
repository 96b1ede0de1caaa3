# Everything runs in .venv, which the first target makes: nothing is needed but Python ≥ 3.11 with venv, and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
CODE := nbtools tests benchmarks notebooks setup.py

.DEFAULT_GOAL := help
.PHONY: help demo quick test full gpu gpu-bench bench notebooks wheel check

help:  ## this list
	@sed -n '/^[a-z%-]*:.*  ## /{s/:.*  ## /|/;s/%/STACK/;s/^/  make /;p;}' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s%s\n", $$1, $$2}'

TASK ?= captcha

demo: .venv/ready  ## a task's notebooks from top to bottom on generated data, TASK=captcha, hwdb, sign or segment; pages under demo/
	@$(BIN)/python -m notebooks.execute $(TASK)

# Some containers set it, and each of the dozens of processes that tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# One test more at once than there are cores (tests/conftest.py). By itself xdist begins with the files that have the most tests; the longest
# tests are in files of few, and would leave a core idle at the end.
PARALLEL = OMP_NUM_THREADS=1 $1/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder \
    -m 'not alone and not full'
FILES = $(wildcard $(foreach name,$1,tests/test_$(name).py tests/*/test_$(name).py tests/$(name)))
QUICK := layers project plan augment history loop task guard requests pack captcha

quick: .venv/ready  ## in less than a minute: whether a change broke something
	@$(BIN)/ruff check -q $(CODE)
	@$(call PARALLEL,.venv) $(call FILES,$(QUICK))

# Those that read a clock come last, one at a time; pytest would import all others too before it leaves them out.
test: .venv/ready .venv-colab/ready .venv-ipykernel-7.3/ready  ## every test but the longest
	@result=0; \
	$(call PARALLEL,.venv) || result=$$?; \
	$(BIN)/python -m pytest -q -m 'alone and not full' $$(grep -rl mark.alone tests --include='test_*.py') || result=$$?; \
	exit $$result

full: test  ## make test, and what takes too long for every change
	@$(BIN)/python -m pytest -q -m full

# Where versions differ most: what is fetched, tabled, drawn and saved, and notebooks from top to bottom.
STACKED := $(QUICK) stage terminal plot panel resume notebooks

.PRECIOUS: .venv-%/ready .venv-own-%/ready  # else make removes what only a pattern asks for

quick-%: .venv-%/ready  ## the same and notebooks with the packages of tests/stacks/STACK.txt over .venv: colab
	@$(call PARALLEL,.venv-$*) $(call FILES,$(STACKED))

test-%: .venv-own-%/ready  ## all but clocks on a Python and torch of its own: colab, 3.12 or oldest
	@result=0; \
	$(call PARALLEL,.venv-own-$*) || result=$$?; \
	.venv-own-$*/bin/python -m pytest -q -m full tests/test_install.py || result=$$?; \
	exit $$result

gpu: .venv/ready  ## what only a GPU can show, made for four minutes of one
	@$(BIN)/python -m pytest -q -m cuda tests/cuda

# With a Python that has torch and the rest already: make gpu-bench BIN=$(dirname $(which python)) -o .venv/ready-bench
gpu-bench: export NBTOOLS_RESULTS = benchmarks/results/gpu
gpu-bench: .venv/ready-bench  ## on a GPU: those checks, receipts of real sizes, PyTorch beside captchas and signs, and their knobs
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu-bench needs a CUDA GPU")'
	@# What matters most comes first, since a lent GPU may not last for all. What fails does not keep the rest from running. Sizes are such
	@# that each part should end in two thirds of its limit, by an H200's rates: a receipt measures for as long as its run took, up to 36 s,
	@# and the comparisons write theirs at the end. captcha_5000's history has the seconds of an epoch of 5,000 and of its evaluation. Of all
	@# knobs only captchas' include the compiler.
	@result=0; limit=300; part() { timeout $$limit $(BIN)/python -m "$$@" || result=1; }; mkdir -p $(NBTOOLS_RESULTS); \
	trained() { name=$$1; task=$$2; count=$$3; epochs=$$4; shift 4; \
	    part nbtools demo $$task build/$$name --count $$count "$$@"; \
	    part nbtools train $$task --data build/$$name --run build/runs/$$name --epochs $$epochs --measured; \
	    for file in receipt.json history.csv; do cp build/runs/$$name/$$file $(NBTOOLS_RESULTS)/run_$$name.$$file || result=1; done; }; \
	part pytest -q -m cuda tests/cuda; \
	trained captcha captcha 50000 24; \
	trained sign sign 4000 30; \
	trained captcha_lines captcha 20000 30 --length=4,8; \
	trained captcha_5000 captcha 6250 40; \
	limit=400; \
	part benchmarks.tasks --task captcha --count 8000 --rounds 1 --peer pytorch; \
	part benchmarks.tasks --task sign --count 2000 --rounds 1 --peer pytorch; \
	part benchmarks.knobs --task captcha --count 12000 --most 12; \
	part benchmarks.knobs --task sign --count 2000 --most 8; \
	trained hwdb hwdb 4000 4; \
	trained segment segment 2000 5; exit $$result

bench: .venv/ready-bench  ## benchmarks one after another; receipts under benchmarks/results/
	@for name in $$(grep -l __main__ benchmarks/*.py | xargs -n1 basename -s .py); do \
	    echo "== $$name"; NBTOOLS_DEVICE=cpu $(BIN)/python -m benchmarks.$$name || exit 1; done

notebooks: .venv/ready  ## write notebooks/**/*.ipynb and the README's tables; REPOSITORY=https://… sets a fork's address
	@$(BIN)/python -m notebooks.build $(if $(REPOSITORY),--repository '$(REPOSITORY)')

# setuptools would pack what an earlier build left in build/, removed modules too.
wheel: .venv/ready  ## dist/nbtools-….whl, which needs no repository: put it on Drive, SOURCE = "drive:nbtools-….whl"
	@rm -rf build dist
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

check: .venv/ready  ## format, lint, types, layers, notebooks up to date, and the size of each room
	@$(BIN)/ruff format --check -q $(CODE) || { echo "to format: $(BIN)/ruff format $(CODE)"; exit 1; }
	@$(BIN)/ruff check -q $(CODE)
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -q tests/test_layers.py
	@$(BIN)/python -m notebooks.build --check
	@$(BIN)/python tests/budget.py

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

# Other stacks, each a list in tests/stacks/, in two forms. Over .venv, which CI can afford: the list's packages come
# first on the path, then all of .venv, so Python and torch are its own (torch lies on the disk once).
.venv-%/ready: tests/stacks/%.txt .venv/ready
	@echo "Installing $< into .venv-$* …"
	@rm -rf .venv-$*
	@$(BIN)/python -m venv --without-pip .venv-$*
	@grep -v '^torch==' $< > .venv-$*/list.txt
	@$(BIN)/python -m pip --python .venv-$*/bin/python install -q --disable-pip-version-check --no-deps -r .venv-$*/list.txt
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/after.pth
	@touch $@

# By itself: the Python that the list's first line names, the list's versions, and for the rest those in constraints.txt.
# PyPI's torch for Linux is a CUDA build of several GB, which runs on a CPU too; for PyTorch's own CPU build set
# PIP_EXTRA_INDEX_URL to its index.
.venv-own-%/ready: tests/stacks/%.txt requirements.txt constraints.txt pyproject.toml
	@echo "Installing $< into .venv-own-$* (several GB) …"
	@rm -rf .venv-own-$*
	@version=$$(sed -n '1s/^# Python \([0-9]*\.[0-9]*\):.*/\1/p' $<); \
	for python in python$$version "$$HOME"/.pyenv/versions/$$version.*/bin/python; do \
	    "$$python" -m venv .venv-own-$* 2>/dev/null && exit; done; \
	echo "$< needs Python $$version: neither python$$version nor pyenv has one" >&2; exit 1
	@awk -F== 'NR == FNR { own[tolower($$1)]; next } !(tolower($$1) in own)' $< constraints.txt > .venv-own-$*/rest.txt
	@.venv-own-$*/bin/python -m pip install -q --disable-pip-version-check -r $< -c .venv-own-$*/rest.txt -e '.[test]'
	@touch $@
