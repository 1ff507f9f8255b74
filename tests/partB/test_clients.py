"""The clients that people bring, each by its script in examples/, against `ruvon serve`.

A client that is not installed is left out. The extra clients brings those beside OpenAI's, best into an
environment of its own: RUVON_CLIENTS_PYTHON names its interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.demo.server import served

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIENTS = {  # script: (the package that it needs, what it must have printed)
    "with_openai.py": ("openai", ["parsed: name=", "streamed: name=", "response: name=", "text: name="]),
    "with_langchain.py": (
        "langchain_openai",
        ["json_schema: name=", "function_calling: name=", "calls: [{'name': 'add'", "streamed: [{'name'"],
    ),
    "with_litellm.py": ("litellm", ["call: add {", "streamed: add {", "schema: {"]),
    "with_llamaindex.py": ("llama_index", ["structured: a=", "call: add {"]),
    "with_lm_eval.py": ("lm_eval", ["accuracy: 1.0", 'log likelihoods: {" girl": -', 'text: "The dog was']),
}  # fmt: skip
PYTHON = os.environ.get("RUVON_CLIENTS_PYTHON", sys.executable)
FLAGS = ["--enable-auto-tool-choice", "--tool-call-parser", "json"]
COMPACT = ["--structured-outputs-config", '{"disable_any_whitespace": true}']


@pytest.fixture(scope="module")
def base_url(tmp_path_factory, forked):
    log = tmp_path_factory.mktemp("clients") / "server.log"
    with served(log, "--model", "storyteller", *FLAGS, *COMPACT) as (url, _):
        yield f"{url}/v1"


def run(script: Path, *arguments: str) -> str:
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, script, *arguments], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_gets_calls_and_structures_that_fit(base_url, name):
    package, words = CLIENTS[name]
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([PYTHON, "-c", find]).returncode:
        pytest.skip(f"{package} is not installed: it is in the extra clients")
    said = run(EXAMPLES / "clients" / name, base_url)
    for word in words:
        assert word in said


def test_lm_evals_log_likelihoods_are_the_engines(base_url):
    """Those of words that the script prints, against the prompt's log probabilities, offline."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)"
    if subprocess.run([PYTHON, "-c", find]).returncode:
        pytest.skip("lm_eval is not installed: it is in the extra clients")
    said = run(EXAMPLES / "clients" / "with_lm_eval.py", base_url)
    lines = [line for line in said.splitlines() if line.startswith("log likelihoods: ")]
    words = json.loads(lines[1].removeprefix("log likelihoods: "))  # of the second question
    llm = LLM("storyteller", device="cpu")
    begins = llm.tokenizer.encode("The dog was happy. He wagged his")
    for word, likelihood in words.items():
        ids = llm.tokenizer.encode(word)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": [*begins, *ids]}, params, use_tqdm=False)
        scores = output.prompt_logprobs[len(begins) :]
        expected = sum(scores[i][token_id].logprob for i, token_id in enumerate(ids))
        assert likelihood == pytest.approx(expected, abs=0.01), word
    assert len(words) == 2


def test_an_agent_calls_its_tools_and_answers(base_url):
    said = run(EXAMPLES / "agent.py", "What is the weather in Rome?", "--base-url", base_url)
    lines = said.splitlines()
    calls = [line for line in lines if line.startswith(("get_weather(", "add("))]
    assert len(calls) >= 2, "storyteller's first two turns must be calls"
    assert all(" -> " in line for line in calls), "and their arguments fit: the tools could be run"
    assert len(lines) > len(calls), "an answer follows"
