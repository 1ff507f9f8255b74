"""A model that Hugging Face's code computes is served as any other."""

import json

import httpx
import pytest

from engine import LLM, SamplingParams
from engine.demo.server import served
from tests.partC.families import make

ASK = {"prompt": "Once upon a time there was a dog", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("granite")
    make("Granite", folder)
    return folder


def test_completions_streams_and_models_over_http(granite, tmp_path, forked):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM(granite, device="cpu", max_num_seqs=4, kv_cache_memory_bytes=2**22)
    wanted = llm.generate([ASK["prompt"]], params, use_tqdm=False)[0].outputs[0].text
    log = tmp_path / "server.log"
    arguments = ("--model", str(granite), "--served-model-name", "granite", "--max-num-seqs", "4")
    with served(log, *arguments) as (url, _), httpx.Client(base_url=url, timeout=240) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["granite"]
        whole = client.post("/v1/completions", json=ASK | {"model": "granite"}).json()
        assert whole["choices"][0]["text"] == wanted
        lines = client.post("/v1/completions", json=ASK | {"stream": True}).text.split("\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == wanted
        fits = client.post("/v1/completions", json=ASK | {"structured_outputs": {"choice": ["yes", "no"]}})
        assert fits.json()["choices"][0]["text"] in ("yes", "no"), "with what else a server does"
        assert client.get("/health").status_code == 200
    assert "Traceback" not in log.read_text()
