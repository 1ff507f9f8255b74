# Everything runs in .venv, made on first use from constraints.txt. `make demo` and `make test` are all you need.
PYTHON ?= $(shell for v in python3.11 python3.12 python3.13 python3; do command -v $$v && break; done)
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test quick lab lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/ruvon demo

test: $(VENV)/.dev lint
	$(RUN) tools/render_tables.py --check
	$(RUN) -m pytest tests -q
	$(RUN) -m pytest --nbval notebooks -q

quick: $(VENV)/.dev lint
	$(RUN) -m pytest tests -q -n auto --dist worksteal --ignore=tests/series --ignore=tests/system

lab: $(VENV)/.dev
	$(VENV)/bin/jupyter lab --notebook-dir=notebooks

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# The core only: what running the engine needs.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt -e .
	touch $@

# With notebooks, tests and Hugging Face to compare with.
$(VENV)/.dev: $(VENV)/.demo
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
