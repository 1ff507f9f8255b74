"""Adapters through `LLM` and `ruvon serve`, with speculation, slots and logprobs beside them."""

import shutil
from pathlib import Path

import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.decoding.params import ParameterError
from engine.models.checkpoint import CheckpointError
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.wiring import devices
from tests.system.attack import Process

ADAPTERS = Path(__file__).parents[2] / "adapters"
POETRY = LoRARequest("poetry", 1, ADAPTERS / "poetry")
BUSINESS = LoRARequest("business", 2, ADAPTERS / "business")
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["When I", "Dear Mr.", "Once upon a time"]
DRAFTS = {"num_speculative_tokens": 3, "step_times": ALWAYS_DRAFT.as_dict()}  # in every step
MIXED = [POETRY, BUSINESS, None]


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """Each by itself."""
    llm = LLM("storyteller", enable_lora=True)
    pairs = zip(PROMPTS, MIXED, strict=True)
    return [texts(llm.generate(prompt, GREEDY, lora_request=one))[0] for prompt, one in pairs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache": "slots"},
        {"async_scheduling": True},
        {"speculative_config": DRAFTS | {"model": "storyteller-draft"}},
        {"speculative_config": DRAFTS | {"method": "ngram"}},
    ],
    ids=["paged", "slots", "one step ahead", "draft", "ngram"],
)
def test_a_mixed_batch_gives_what_each_gets_alone(alone, options):
    llm = LLM("storyteller", enable_lora=True, **options)
    assert texts(llm.generate(PROMPTS, GREEDY, lora_request=MIXED)) == alone
    if "speculative_config" in options:
        assert llm.engine.capabilities[0].tally.proposed > 0
    stream = list(llm.stream(PROMPTS[0], GREEDY, lora_request=POETRY))
    assert stream[-1].outputs[0].text == alone[0]
    assert texts(LLM("storyteller").generate(PROMPTS[2], GREEDY)) == alone[2:], "the base is as without"


def test_adapters_are_loaded_when_they_are_asked_for_and_the_oldest_makes_room():
    llm = LLM("storyteller", enable_lora=True, max_loras=1)
    manager = llm.engine.adapters.manager
    first = texts(llm.generate("When I", GREEDY, lora_request=POETRY))
    key = manager.key_of["poetry"]
    assert texts(llm.generate("When I", GREEDY, lora_request=POETRY)) == first
    assert manager.key_of == {"poetry": key}, "it was there already"
    second = texts(llm.generate("When I", GREEDY, lora_request=BUSINESS))
    assert second != first
    assert list(manager.key_of) == ["business"]
    assert texts(llm.generate("When I", GREEDY, lora_request=POETRY)) == first
    stream = llm.stream("When I", GREEDY, lora_request=POETRY)
    next(stream)
    assert texts(llm.generate("When I", GREEDY, lora_request=BUSINESS)) == second, "it waits for the slot"
    assert list(stream)[-1].outputs[0].text == first[0], "who streams keeps its adapter"


@pytest.mark.parametrize("max_loras", [1, 2])
def test_one_call_may_name_more_adapters_than_there_are_slots(alone, max_loras):
    """Their requests take turns; all thirty are answered as each alone."""
    llm = LLM("storyteller", enable_lora=True, max_loras=max_loras)
    third = LoRARequest("sonnets", 3, ADAPTERS / "poetry")  # another adapter by its name and number
    wanted = [POETRY, BUSINESS, third] * 10
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]] * 10
    expected = [alone[0], alone[1], alone[0]] * 10
    assert texts(llm.generate(prompts, GREEDY, lora_request=wanted)) == expected
    manager = llm.engine.adapters.manager
    llm.generate("When I", GREEDY, lora_request=POETRY)
    assert len(manager.slots.adapters) == len(manager.key_of) == max_loras, "more are not kept in memory"


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (LoRARequest("poetry", 1, ADAPTERS / "nowhere"), ParameterError, "contradicts"),
        (LoRARequest("poetry", 7, ADAPTERS / "poetry"), ParameterError, "contradicts"),
        (LoRARequest("other", 1, ADAPTERS / "poetry"), ParameterError, "contradicts"),
        (LoRARequest("other", 2, ADAPTERS / "nowhere"), CheckpointError, "no such file"),
        ([POETRY], ParameterError, "lora_request has 1 entries for 2 prompts"),
    ],
)
def test_requests_that_contradict_one_another_are_refused(request_, error, words):
    llm = LLM("storyteller", enable_lora=True)
    llm.generate("a", GREEDY, lora_request=POETRY)
    with pytest.raises(error, match=words):
        llm.generate(["a", "b"], GREEDY, lora_request=request_)


def test_adapters_need_to_be_switched_on():
    with pytest.raises(ParameterError, match="enable_lora=True"):
        LLM("storyteller").generate("a", GREEDY, lora_request=POETRY)
    for field in ("max_loras", "max_lora_rank"):
        with pytest.raises(ValueError, match=f"{field}=2 needs enable_lora"):
            LLM("storyteller", **{field: 2})
        with pytest.raises(ValueError, match=f"{field}=0: at least 1"):
            LLM("storyteller", enable_lora=True, **{field: 0})


@pytest.mark.parametrize("field", ["max_loras", "max_lora_rank"])
def test_room_for_more_adapters_than_memory_holds_is_refused_before_it_is_taken(field):
    with pytest.raises(ValueError, match=f"{field}=1000000000 .*need [0-9,]+ bytes; there are"):
        LLM("storyteller", enable_lora=True, **{field: 10**9})


def test_room_for_adapters_is_what_is_still_available_beside_the_model(monkeypatch):
    monkeypatch.setattr(devices, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"max_loras=.*need [0-9,]+ bytes; there are 1,000"):
        LLM("storyteller", enable_lora=True)
    monkeypatch.setattr(devices, "available_memory", lambda: None)
    LLM("storyteller", enable_lora=True)  # the system does not say: an allocation that is too large fails


def test_the_server_chooses_by_model_and_swaps_while_it_runs(alone, tmp_path):
    shutil.copytree(ADAPTERS / "business", tmp_path / "there" / "business")
    modules = ["--lora-modules", f"poetry={ADAPTERS / 'poetry'}", "--lora-dir", str(tmp_path / "there")]
    server = Process(tmp_path, "", "--enable-lora", "--max-loras", "2", *modules)
    try:
        with server.client() as client:
            cards = client.get("/v1/models").json()["data"]
            listed = [(one["id"], one["parent"], one["root"]) for one in cards]
            assert listed == [("storyteller", None, "storyteller"), ("poetry", "storyteller", "poetry")]
            loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "business"})
            assert loaded.status_code == 200, loaded.text

            def ask(prompt, model):
                body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 20}
                answer = client.post("/v1/completions", json=body | {"ignore_eos": True})
                return answer.json()["choices"][0]["text"]

            names = ["poetry", "business", "storyteller"]
            assert [ask(prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)] == alone
            refused = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/etc"})
            assert refused.json()["error"]["param"] == "lora_path"
    finally:
        server.end()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora"),
        (["--lora-dir", "."], "--lora-dir needs --enable-lora"),
        (["--enable-lora", "--lora-dir", "nowhere"], "--lora-dir nowhere: no such folder"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, flags, words):
    server = Process(tmp_path, "", *flags)
    assert server.process.wait(240) == 1
    assert words in server.said()


def test_a_quantized_base_serves_them_side_by_side_as_each_alone():
    llm = LLM("storyteller", enable_lora=True, quantization="int8")
    pairs = list(zip(PROMPTS, MIXED, strict=True))
    each = [texts(llm.generate(prompt, GREEDY, lora_request=one))[0] for prompt, one in pairs]
    assert texts(llm.generate(PROMPTS, GREEDY, lora_request=MIXED)) == each
    assert each[:2] != texts(llm.generate(PROMPTS[:2], GREEDY)), "the adapters say something"
