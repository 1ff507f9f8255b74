"""`usage.cost` in completions, whole and streamed."""

import json

import pytest

from engine.decoding.outputs import RequestStats
from engine.server.protocol import Completions
from engine.server.scored import ScoredCompletions
from engine.server.usage_cost import usage_cost
from engine.telemetry.bill import ApiPrice, Price
from engine.telemetry.cost import Account
from tests.part04.serving import ScriptedBackend, client_of
from tests.part06.fakes import TOKENIZER

PRICE, API = Price.parse("3.60"), ApiPrice.parse("1,10,100")
ASK = {"model": "script", "prompt": "hello"}
THREE = {
    "currency": "USD",
    "device_ns": 6_000_000,
    "cached_cost": 0.000001,
    "input_cost": 0.000002,
    "output_cost": 0.000003,
    "api_cost": 0.00321,
}


class Metered(ScriptedBackend):
    """Each output has an account, whoever asks; `account` None: nothing is metered."""

    def __init__(self, account: Account | None) -> None:
        super().__init__()
        self.account = account

    async def _outputs(self, prompt, request_id):
        async for output in super()._outputs(prompt, request_id):
            output.stats, output.num_cached_tokens = RequestStats(0.0, account=self.account), 1
            yield output


def completions(*prices, api: Completions | None = None) -> Completions:
    """A api whose usage says the cost at these prices."""
    api = api or Completions()
    api.more_usage.append(usage_cost(*prices))
    return api


@pytest.fixture
def account() -> Account:
    ns = {"cached": 1_000_000, "input": 2_000_000, "output": 3_000_000}
    return Account("a", ns, {"cached": 10, "input": 20, "output": 30})


def test_usage_says_what_the_answer_has_cost(account):
    with client_of(Metered(account), api=completions(PRICE, API)) as client:
        usage = client.post("/v1/completions", json=ASK).json()["usage"]
    assert usage["cost"] == 0.000006
    assert usage["cost_details"] == THREE
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 3), "the rest is as ever"


def test_a_streams_last_chunk_says_it_and_no_other_does(account):
    ask = ASK | {"stream": True, "stream_options": {"include_usage": True}}
    with client_of(Metered(account), api=completions(PRICE, API)) as client:
        lines = client.post("/v1/completions", json=ask).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["usage"]["cost_details"] == THREE
    assert {chunk["usage"] and "cost" for chunk in chunks[:-1]} == {None}


def test_the_cost_of_several_prompts_is_their_sum(account):
    with client_of(Metered(account), api=completions(PRICE)) as client:
        usage = client.post("/v1/completions", json=ASK | {"prompt": ["one", "two"]}).json()["usage"]
    assert usage["cost"] == 0.000012
    assert usage["cost_details"]["device_ns"] == 12_000_000
    assert "api_cost" not in usage["cost_details"], "nobody gave a price to compare with"


def test_without_an_account_usage_is_as_ever():
    with client_of(Metered(None), api=completions(PRICE)) as client:
        usage = client.post("/v1/completions", json=ASK).json()["usage"]
    assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


def test_it_goes_with_any_api(account):
    with client_of(Metered(account), api=completions(PRICE, api=ScoredCompletions(TOKENIZER))) as client:
        usage = client.post("/v1/completions", json=ASK).json()["usage"]
    assert usage["cost"] == 0.000006
