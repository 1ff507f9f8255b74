# Everything runs in .venv, made on first use from constraints.txt. `make demo` and `make test` are all you need.
PYTHON ?= $(shell for v in python3.11 python3.12 python3.13 python3; do command -v $$v && break; done)
VENV := .venv
# Without compiling all there is, which takes longer than to fetch it: Python compiles what it imports.
PIP = -m pip install --quiet --no-compile -c constraints.txt
EXTRAS := dev
RUN := $(VENV)/bin/python

.PHONY: demo serve test cluster-test quick lab site lint form clean

demo: $(VENV)/.demo
	$(VENV)/bin/ruvon demo

# The same server, until Ctrl-C: chat at http://localhost:8000/, numbers at /dashboard.
serve: $(VENV)/.demo
	$(VENV)/bin/ruvon serve --speculative-config '{"model": "storyteller-draft", "num_speculative_tokens": 4}'

# Everything, once. tests/series cuts every part out of the engine and runs the part's tests there, in its solved
# tree, where no later part is; tests/partNN are therefore not run from here as well. The same folder makes each
# known mistake, sees that a start tree waits for its exercises, and asks mypy beside all that. tests/system is for
# what no part owns.
test: $(VENV)/.dev form
	$(RUN) tools/render_tables.py --check
	$(RUN) tools/render_road.py --check
	$(RUN) tools/draw_rooms.py --check
	$(RUN) -m pytest tests/series tests/system -q $(WORKERS) --dist worksteal
	$(RUN) -m pytest -p nbval -p tests.system.kernels --nbval notebooks -q $(WORKERS) --dist loadfile

# `ruvon cluster` on a Ray of its own, in an environment of its own: about five minutes. CI does it every night.
cluster-test: $(VENV)/.cluster
	$(VENV)/cluster/bin/python -m pytest tests/partA/test_cluster.py tests/partA/test_cluster_parts.py -q

# While you work: the parts' tests from here, without cutting anything, and without the files that take longest
# (kernels in the interpreter, Hugging Face's texts, servers in processes of their own).
quick: $(VENV)/.dev lint
	$(RUN) -m pytest tests -q $(WORKERS) --dist worksteal $(patsubst %,--ignore=tests/%,series system $(LONG))

LONG := $(foreach file,01/test_tokenizer 01/test_tokenizer_kinds 02/test_greedy 03/test_cache \
  03/test_packed_linear 04/test_server_process 04/test_server_completions 05/test_sampled_text \
  08/test_continuous_batching 08/test_many_clients 09/test_kernels 09/test_selectable 12/test_paged_engine \
  12/test_paged_machine 13/test_ahead_crowd 13/test_append_attend 13/test_compiled 13/test_graphs \
  13/test_many_rows 14/test_client 14/test_streamlit_page 16/test_speculative_engine \
  16/test_speculative_graphs 16/test_verify_attend 17/test_compiled 17/test_model 17/test_quantized_row \
  18/test_compiled_kernels 18/test_tiles 20/test_llama_row 20/test_llama_rows 20/test_speculative_graphs,part$(file).py)

# Three workers for two cores, each on one thread: many tests wait, for a deadline or a server's start. Compiled
# test files are kept: pytest would compile hypothesis again in every process, which takes 3 seconds.
WORKERS := -n $(shell $(PYTHON) -c "from os import cpu_count as n; print(min(8, 3 * (n() or 1) // 2))")
test quick: export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE

lab: $(VENV)/.dev
	$(RUN) -m parts lab

# The articles and notebooks as a site, in out/site.
site: $(VENV)/.site
	$(RUN) tools/build_site.py out/site

# mypy reads the types of torch once, which takes most of a minute; then .mypy_cache has them.
lint: $(VENV)/.dev form
	$(VENV)/bin/mypy

form: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# What running the engine and its server needs. Python 3.11's own pip takes three times as long to choose versions.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(PIP) --upgrade pip
	$(RUN) $(PIP) -e ".[server]"
	touch $@

# With notebooks, tests and Hugging Face to compare with. EXTRAS=dev,ui adds Streamlit, 80 MB, and its page's tests.
$(VENV)/.dev: $(VENV)/.demo
	$(RUN) $(PIP) -e ".[$(EXTRAS)]"
	touch $@

$(VENV)/.site: $(VENV)/.demo
	$(RUN) $(PIP) -e ".[site]"
	touch $@

# Ray, apart from the other packages: it brings 38 of its own.
$(VENV)/.cluster: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/cluster
	$(VENV)/cluster/bin/python $(PIP) -e ".[cluster]" \
	  openai pytest pytest-timeout hypothesis psutil
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache out build *.egg-info
