# Everything a reader or a contributor runs. Each target installs what is missing first; a second run is quick.
# Another Python or PyTorch than the course's, in an environment of its own: make test VENV=another PYTHON=python3.13 TORCH=2.15.0
export PYTHON TORCH TORCH_INDEX
export VENV ?= .venv
WORKERS ?= 3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
ROOT   := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.PHONY: lab venv test test-all test-strict test-gpu labs lint types pyodide notebooks exercises gallery bench address packs site site-test wheel clean

FIRST := notebooks/00_start_here.ipynb
lab: $(VENV)/.installed ## opens JupyterLab on chapter 00; LAB has more of JupyterLab's options
	JUPYTER_CONFIG_PATH="$(CURDIR)/docs/jupyter" $(BIN)/jupyter lab $(ROOT) --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/$(FIRST) $(LAB)

venv: $(VENV)/.installed-test ## the virtual environment, with what the tests need

# A lesson has a lab of its name; a chapter that has none yet counts as a lab.
LESSONS := $(patsubst notebooks/lab/%,notebooks/%,$(wildcard notebooks/lab/*.ipynb))
LABS    := $(filter-out $(LESSONS),$(wildcard notebooks/[0-9]*.ipynb)) $(wildcard notebooks/lab/*.ipynb) notebooks/your_own_model.ipynb
# Tests of one file stay together and in order, for a notebook's cells share a kernel; the longest begin first.
# Those of tests/cluster have the machine to themselves: Ray gives up where its own processes take longer than 15 s to start.
TESTS    = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint ## lint, then the tests, with every lesson executed and compared: eight minutes on two cores
	$(TESTS) $(LESSONS) tests --ignore tests/cluster

test-all: lint types test-strict ## the labs as well, all numbers of ranks, all pairs of axes, every wrong answer, every solution judged apart
	$(TESTS) -m '' $(LABS) $(LESSONS) tests --ignore tests/cluster
	$(BIN)/python -m pytest -m '' tests/cluster

STRICT := collectives clipping context data_parallel expert few_ranks fsdp inside mesh nd offload pipeline precision recomputed sharded tensor trainer zero

test-strict: $(VENV)/.installed-test ## every technique, and the trainer with every plan, by NCCL's rules: see tests/strict.py
	MANYRANKS_STRICT=1 $(TESTS) -m '' $(foreach name,$(STRICT),$(wildcard tests/ranks/test_$(name)*.py))

test-gpu: $(VENV)/.installed-test ## what needs a GPU; says what it skips
	$(BIN)/python -m pytest -m gpu -rs tests/unit tests/ranks

labs: $(VENV)/.installed-test ## every lab executed and compared
	$(TESTS) $(LABS) tests/notebooks/test_notebooks.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.installed-test ## what a type checker says of the library to its readers; half a minute the first time
	$(BIN)/mypy

pyodide: ## Python for browsers, in which a test and the site's planner run theory; needs npm, and Node 18 or later to run
	npm install --no-save --no-audit --no-fund --loglevel error --prefix $(VENV) pyodide@314.0.7

notebooks: $(VENV)/.installed-test ## executes lessons and labs in place and removes volatile metadata
	MANYRANKS_SETTINGS=off $(BIN)/python -m tests.notebooks.execute notebooks/*.ipynb $(wildcard notebooks/lab/*.ipynb)

exercises: $(VENV)/.installed-test ## generates exercises/ and the data of checks from solutions/
	$(BIN)/python -m tests.grading.release
	$(BIN)/python -m tests.grading.records

gallery: $(VENV)/.installed-test ## pictures of the explorers, for the README, and what the site plays; needs Chromium
	$(BIN)/python docs/record.py
	$(BIN)/python -m tests.browser.gallery

bench: $(VENV)/.installed-bench ## speed, side by side with what a reader would use instead
	$(PIP) install --no-deps --target $(VENV)/peers --upgrade jupyter-distributed==0.1.1 # apart: it'd restart every kernel here
	$(BIN)/python -m benchmarks

address: ## writes the repository's address, which pyproject.toml has, wherever it belongs
	python3 docs/address.py

SITE := .venv-site
site: $(SITE)/.installed ## chapters, exercises, guides and the library's reference as static pages, in site/; after make pyodide with a planner
	$(SITE)/bin/python docs/build.py

packs: $(VENV)/.installed-test ## the explorers' states, for `make site` to take: with them, explorers move without Python
	$(BIN)/python docs/packs.py

site-test: $(VENV)/.installed-test $(SITE)/.installed ## builds the site, opens every page, plays every explorer, and plans; needs Chromium
	$(BIN)/python docs/packs.py 1 # the fewest states, unless there are more
	$(SITE)/bin/python docs/build.py
	$(BIN)/python -m tests.browser.pages
	$(BIN)/python -m tests.browser.explorers
	$(BIN)/python -m pytest tests/browser/plan.py

wheel: $(VENV)/.installed-test ## dist/manyranks-….whl, the library without the course
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(SITE)

$(VENV)/.installed: pyproject.toml constraints.txt
	sh install.sh grade
	touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt
	sh install.sh $*
	touch $@

$(SITE)/.installed: docs/requirements.txt
	VENV=$(SITE) sh install.sh docs/requirements.txt
	touch $@
