PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests for people at work: the shape of the package, the arithmetic, and one fit.
QUICK := $(addprefix tests/, \
	test_house.py datasets backend/test_cache.py inference/test_pareto.py \
	inference/test_progress.py::test_it_stops_at_the_maximum_and_says_after_how_many_steps \
	$(addprefix engine/test_, $(addsuffix .py, \
	em factor linalg loo partition resampling segments student weights)))

.PHONY: setup demo test check lint types docs dist clean

setup: $(STAMP)

$(VENV): $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch "$@"

demo: $(STAMP)
	"$(BIN)/python" examples/demo.py

# ArviZ 0.22 and 0.23 leave a stamp in the user's cache on the day's first import, which
# can fail when two workers do it at once: import it before the workers start. Each takes one
# half of the tests, so that those of a file share compiled programs, and then what is left.
test: $(STAMP)
	"$(BIN)/python" -W ignore -c "import arviz"
	"$(BIN)/python" -m pytest -n 2 --dist worksteal --durations 40 $(TESTS)

# The programs that it compiles are kept for the next time.
check: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/python" -W ignore -c "import arviz"
	NUMPYRO_JALA_TEST_CACHE=.pytest_cache/programs \
		"$(BIN)/python" -m pytest -q -n 2 --dist loadfile -m "not slow" $(QUICK)

lint: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: $(STAMP)
	"$(BIN)/mypy"

# Warnings are errors, and so is a cell that fails. Only compiled programs are kept.
docs: $(VENV)/.installed-docs
	"$(BIN)/python" -m sphinx -W --keep-going -d docs/_build/doctrees docs docs/_build/html

$(VENV)/.installed-docs: $(STAMP)
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch "$@"

# The links of the published README lead to NUMPYRO_JALA_REPOSITORY: see hatch_build.py.
dist: $(STAMP)
	"$(BIN)/python" -m hatchling build

clean:
	rm -rf docs/_build .venv .venv-new "$(VENV)" build dist demo_output paper_output
	rm -rf .pytest_cache .ruff_cache .mypy_cache
	find numpyro_jala tests examples -name __pycache__ -prune -exec rm -rf {} +
