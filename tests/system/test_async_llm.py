"""`AsyncLLMEngine` as vLLM's: made from arguments, asked in an event loop."""

import asyncio
from pathlib import Path

import pytest

from engine import LLM, AsyncEngineArgs, AsyncLLMEngine, CheckpointError, LoRARequest, SamplingParams
from engine.core.engine_thread import EngineError
from engine.decoding.params import ParameterError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
PROMPTS = ["Once upon a time", "One day, a little bird"]
ADAPTERS = Path(__file__).parents[2] / "adapters"
POETRY = LoRARequest("poetry", 1, ADAPTERS / "poetry")
BUSINESS = LoRARequest("business", 2, ADAPTERS / "business")
SONNETS = LoRARequest("sonnets", 3, ADAPTERS / "poetry")


@pytest.fixture
def engine():
    made = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="storyteller", enable_lora=True))
    yield made
    made.shutdown()


async def last(engine, prompt, params=GREEDY, request_id="1", **options):
    seen = [output async for output in engine.generate(prompt, params, request_id, **options)]
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    return seen[-1]


async def both(engine, **options):
    return await asyncio.gather(*(last(engine, p, request_id=p, **options) for p in PROMPTS))


def test_two_at_once_get_what_each_gets_from_LLM(engine):
    expected = LLM("storyteller").generate(PROMPTS, GREEDY)
    found = asyncio.run(both(engine))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert [o.prompt for o in found] == PROMPTS


def test_an_adapter_speaks(engine):
    expected = LLM("storyteller", enable_lora=True).generate(PROMPTS, GREEDY, lora_request=POETRY)
    found = asyncio.run(both(engine, lora_request=POETRY))
    assert [o.lora_request for o in (*found, *expected)] == [POETRY] * 4, "as the user named it"
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize(("max_loras", "wanted"), [(1, [POETRY, BUSINESS]), (2, [POETRY, BUSINESS, SONNETS])])
def test_requests_whose_adapter_has_no_slot_wait_and_all_are_answered(max_loras, wanted):
    """Ten of each at once, more adapters than slots: no adapter is pushed out before its request runs."""
    args = AsyncEngineArgs(model="storyteller", enable_lora=True, max_loras=max_loras)
    engine = AsyncLLMEngine.from_engine_args(args)

    async def run():
        alone = {}
        for lora in wanted:
            alone[lora] = (
                (await last(engine, PROMPTS[0], request_id="alone", lora_request=lora)).outputs[0].text
            )
        asked = [(i, lora) for i in range(10) for lora in wanted]
        found = await asyncio.gather(
            *(
                last(engine, PROMPTS[0], request_id=f"{lora.lora_name} {i}", lora_request=lora)
                for i, lora in asked
            ),
            return_exceptions=True,
        )
        told = [output if isinstance(output, Exception) else output.outputs[0].text for output in found]
        assert told == [alone[lora] for _, lora in asked]
        leaver = engine.generate(PROMPTS[0], LONG, "runs", lora_request=wanted[0])
        await anext(leaver)
        waiting = [
            asyncio.create_task(last(engine, PROMPTS[0], request_id=lora.lora_name, lora_request=lora))
            for lora in wanted[1:]
        ]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await leaver.aclose()
        await last(engine, PROMPTS[0])  # behind all of them in the engine's queue of commands
        assert not engine.engine.has_unfinished_requests()
        assert engine.engine.scheduler.waiting == []

    try:
        asyncio.run(run())
        assert len(engine.engine.adapters.manager.slots.adapters) <= len(wanted)
    finally:
        engine.shutdown()


def test_prompts_have_the_forms_that_LLM_takes(engine):
    ids = asyncio.run(engine.get_tokenizer()).encode(PROMPTS[0])
    for prompt, shown in (
        (ids, None),
        ({"prompt_token_ids": ids, "prompt": "so it is called"}, "so it is called"),
        ({"prompt": PROMPTS[0], "cache_salt": "mine"}, PROMPTS[0]),
    ):
        output = asyncio.run(last(engine, prompt))
        assert (output.prompt, output.prompt_token_ids) == (shown, ids)


def test_a_salt_keeps_a_prefix_to_those_who_have_it(engine):
    prompt = "The bird and the fish went to the sea, where the sun was warm and the sand was soft and white. "
    asked = {"prompt": prompt}, {"prompt": prompt, "cache_salt": "mine"}, {"prompt": prompt}
    found = [asyncio.run(last(engine, one)).num_cached_tokens for one in asked]
    assert found[:2] == [0, 0], "a salted prompt found what came without its salt"
    assert found[2] > 0


def test_who_leaves_early_and_who_is_aborted(engine):
    async def run():
        left = engine.generate(PROMPTS[0], LONG, "left")
        assert not (await anext(left)).finished
        await left.aclose()
        told = engine.generate(PROMPTS[1], LONG, "told")
        await anext(told)
        await engine.abort("told")
        *_, end = [output async for output in told]
        assert end.outputs[0].finish_reason == "abort"
        await last(engine, PROMPTS[0])  # behind both in the engine's queue of commands
        assert not engine.engine.has_unfinished_requests()

    asyncio.run(run())


def test_what_is_wrong_is_named(engine):
    for prompt, options, name in (
        ([], {}, "prompt"),
        (5, {}, "prompt"),
        (PROMPTS[0], {"priority": 10**9}, "priority"),
        (PROMPTS[0], {"lora_request": LoRARequest("poetry", 1, "/nowhere")}, "/nowhere"),
    ):
        with pytest.raises((ParameterError, CheckpointError), match=name):
            asyncio.run(last(engine, prompt, **options))


def test_an_engine_without_adapters_and_one_that_was_shut_down_say_so():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="storyteller-draft"))
    assert engine.is_running
    asyncio.run(engine.check_health())
    with pytest.raises(ParameterError, match="enable_lora"):
        asyncio.run(last(engine, PROMPTS[0], lora_request=POETRY))
    engine.shutdown()
    assert not engine.is_running
    with pytest.raises(EngineError, match="not running"):
        asyncio.run(engine.check_health())
    with pytest.raises(EngineError, match="not running"):
        asyncio.run(last(engine, PROMPTS[0]))
