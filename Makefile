# Two commands: `make demo` shows what this is, `make test` proves it works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow fuzz audit results clean

demo: $(VENV)/installed
	$(BIN)/fedsc run --config examples/demo.toml --out runs/demo --overwrite

# The tables of measured numbers, from the run folders in results/.
results: $(VENV)/installed
	for page in README.md docs/results.md docs/results-fashion-mnist.md; do \
		$(BIN)/fedsc results --fill $$page || exit; done

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow" -n auto --maxprocesses 4 --dist loadfile --durations=5 -rs

test-slow: $(VENV)/installed-dev
	$(BIN)/pytest -m slow --durations=10
	FEDSC_FUZZ=1000 $(BIN)/pytest tests/fuzz

# Broken and hostile files, other ones each time: 10,000 for each reader.
fuzz: $(VENV)/installed-dev
	FEDSC_FUZZ=10000 $(BIN)/pytest tests/fuzz --durations=0

# Known faults of what is installed. Needs the advisory database at pypi.org.
audit: $(VENV)/installed-dev
	$(BIN)/python tests/audit.py constraints.txt

clean:
	rm -rf $(VENV) build dist src/*.egg-info

# torch first and alone: asked for by a range it may come with gigabytes of CUDA.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedsc needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[report]' -c constraints.txt
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[report,track,flower,export,privacy,dev]' -c constraints.txt
	touch $@
