"""generation_config.json over HTTP as offline: defaults for what a request leaves out, a bound, and ends."""

import json
import shutil
from contextlib import contextmanager

import httpx
import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.cli.serving import Service, fingerprint
from engine.demo.server import served
from engine.models.checkpoint import CheckpointError, resolve
from engine.wiring.generation_config import defaults_line, recommended_values
from engine.wiring.replay import recording_header
from tests.part04.serving import http, serve

CONFIG = {"temperature": 0.7, "top_k": 1, "max_new_tokens": 33, "eos_token_id": [0, 16]}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with these wishes of its maker."""
    folder = tmp_path_factory.mktemp("wishes") / "storyteller"
    shutil.copytree(resolve("storyteller"), folder)
    (folder / "generation_config.json").write_text(json.dumps(CONFIG))
    return folder


@contextmanager
def client_of(**options):
    """A client of `ruvon serve`'s app."""
    service = Service(EngineArgs(max_model_len=256, max_num_seqs=4, **options))
    try:
        with serve(service.app([], None, False, None)) as url, http(url) as client:
            yield client
    finally:
        service.engine.shutdown()


def asked(client, path="/v1/completions", **fields) -> dict:
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.fixture(scope="module")
def client(folder):
    with client_of(model=folder) as client:
        yield client


@pytest.fixture(scope="module")
def greedy() -> str:
    """What temperature 0 says, to 40 tokens, whichever token ends a text."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return LLM("storyteller", max_model_len=256).generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def test_a_request_that_gives_nothing_has_the_models_own_values(client, greedy):
    """top_k=1 makes any temperature greedy: without the file two texts would differ."""
    first, second = (asked(client, prompt=PROMPT)["text"] for _ in range(2))
    assert first == second
    assert greedy.startswith(first)


def test_a_request_that_gives_a_value_has_that(client):
    texts = {asked(client, prompt=PROMPT, top_k=-1, temperature=3, seed=seed)["text"] for seed in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("fields", "length"),
    [({}, 16), ({"max_tokens": 5}, 5), ({"max_tokens": 40}, 33), ({"max_tokens": None}, 16)],
)
def test_max_new_tokens_bounds_a_completion(client, fields, length):
    choice = asked(client, prompt=PROMPT, ignore_eos=True, return_token_ids=True, **fields)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (length, "length")


def test_max_new_tokens_is_a_chats_length_and_its_bound(client):
    ask = {"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True}
    for fields in ({}, {"max_tokens": 200}, {"max_completion_tokens": 200}):
        choice = asked(client, "/v1/chat/completions", return_token_ids=True, **ask, **fields)
        assert len(choice["token_ids"]) == 33


def test_the_simplest_route_has_the_defaults_too(client):
    def said(**fields) -> tuple[str, int]:
        """The text of all events, and the number of its tokens."""
        events = client.post("/generate", json=fields).text.split("\n\n")[:-2]
        data = [json.loads(event.removeprefix("data: ")) for event in events]
        return "".join(event["text"] for event in data), data[-1]["completion_tokens"]

    assert said(prompt=PROMPT, max_tokens=40) == said(prompt=PROMPT, max_tokens=40)
    assert said(prompt=PROMPT, max_tokens=2)[1] == 2
    assert said(prompt="1 2 3", max_tokens=200)[1] <= 33


def test_a_second_token_that_ends_a_text_is_the_stop_reason(client):
    choice = asked(client, prompt=PROMPT, max_tokens=33)
    assert choice["finish_reason"] == "stop"
    assert not choice["text"].endswith("."), "token 16 is the full stop"


def test_min_tokens_above_the_bound_is_refused(client):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 60, "min_tokens": 40})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


def test_vllm_means_none_of_the_defaults_but_the_models_ends(folder):
    assert recommended_values(EngineArgs(model=folder, generation_config="vllm")) == {}
    with client_of(model=folder, generation_config="vllm") as client:
        texts = {asked(client, prompt=PROMPT, temperature=3, seed=seed)["text"] for seed in range(4)}
        choice = asked(client, prompt=PROMPT, temperature=0, max_tokens=33)
    assert len(texts) > 1
    assert choice["finish_reason"] == "stop"


def test_a_folder_replaces_the_models_file_and_its_ends(folder, greedy):
    llm = LLM("storyteller", max_model_len=256, generation_config=folder)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=1, max_tokens=33)
    text = llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].text
    assert greedy.startswith(text)
    assert len(text) < len(greedy[: greedy.index(".") + 1]), "it ends before the full stop, token 16"


@pytest.mark.parametrize("value", ["nowhere", "", "auto "])
def test_no_such_folder_is_refused_saying_what_is_accepted(value):
    with pytest.raises(
        ValueError, match=f"generation_config='{value}': accepted are auto, vllm, and a folder"
    ):
        EngineArgs(generation_config=value)


def test_a_recording_does_not_need_the_folder_again(folder):
    assert "generation_config" not in recording_header(EngineArgs(generation_config=folder))["args"]


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"max_new_tokens": "5"}, {"top_p": 7}, "[", "[]"])
def test_a_file_that_cannot_be_meant_is_refused_by_name(tmp_path, wrong):
    text = wrong if isinstance(wrong, str) else json.dumps(wrong)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(
        (ValueError, CheckpointError), match=r"temperature|max_tokens|top_p|generation_config"
    ):
        recommended_values(EngineArgs(generation_config=tmp_path))


def test_the_start_says_which_defaults_there_are(folder, tmp_path):
    log = tmp_path / "log"
    with served(log, "--model", str(folder), "--max-model-len", "64") as (url, _):
        card = httpx.get(f"{url}/v1/models", trust_env=False, timeout=240).json()["data"][0]
    line = (
        "Sampling defaults, from generation_config.json: temperature=0.7, top_k=1, max_tokens=33 (which also"
    )
    assert line in log.read_text()
    assert (card["max_model_len"], card["root"], card["parent"]) == (64, "storyteller", None)
    assert "vLLM's own" in defaults_line(EngineArgs(model=folder, generation_config="vllm"))


def test_the_fingerprint_changes_with_what_determines_an_answer(client, folder):
    bodies = [client.post("/v1/completions", json={"prompt": "a"}).json() for _ in range(2)]
    ours = fingerprint(EngineArgs(model=folder))
    assert {body["system_fingerprint"] for body in bodies} == {ours}
    assert ours != fingerprint(EngineArgs(model=folder, quantization="int8"))
    assert ours != fingerprint(EngineArgs(model=folder, dtype="float16"))
    assert ours != fingerprint(EngineArgs(model="storyteller-draft"))
    assert ours == fingerprint(EngineArgs(model=folder, max_num_seqs=2))


def test_usage_says_how_many_tokens_were_cached(client):
    prompt = "The little dog went to the park with a big red ball and a small blue boat. " * 3
    ask = {"prompt": prompt, "max_tokens": 2}
    first, again = (client.post("/v1/completions", json=ask).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert 16 <= cached < again["prompt_tokens"]
    chunks = client.post(
        "/v1/completions", json=ask | {"stream": True, "stream_options": {"include_usage": True}}
    ).text
    assert json.loads(chunks.split("data: ")[-2])["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_a_prompt_without_parameters_beside_one_that_has_them_gets_the_recommended_ones(folder):
    llm = LLM("storyteller-draft", generation_config=folder)
    outputs = llm.generate([PROMPT, PROMPT], [None, SamplingParams(max_tokens=2, ignore_eos=True)], False)
    assert outputs[0].outputs[0].token_ids == llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids
    assert len(outputs[1].outputs[0].token_ids) == 2
