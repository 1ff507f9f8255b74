"""Constrained and free requests in one crowd, on an engine with everything switched on: each gets what it
gets alone. And on ranks, and in a replay.
"""

import asyncio
import json
import re
from random import Random

import pytest

from engine import LLM, AsyncEngineArgs, AsyncLLMEngine, LoRARequest, SamplingParams
from engine.cache.invariants import Invariants
from engine.decoding.structured import StructuredOutputsParams
from engine.wiring.replay import replay
from tests.system.recordings import batches, lines_of
from tests.system.test_crowd import ADAPTERS, DEADLINE, EVERYTHING, Job, Preemptions, complaints

POETRY = LoRARequest("poetry", 1, ADAPTERS / "poetry")
PATTERN = "( (the|a|my) [a-z]{2,8}){3,9}\\."
PERSON = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [1, 22]}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
CONSTRAINTS = [
    StructuredOutputsParams(regex=PATTERN),
    StructuredOutputsParams(choice=["a dog", "a dog and a cat", "no"]),
    StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    None,
]


def jobs(count: int) -> list[Job]:
    random = Random(25)
    drawn = []
    for _ in range(count):
        job = Job(random, False)
        job.params = SamplingParams(
            temperature=random.choice((0, 0.8)), seed=random.randrange(10**6), n=random.choice((1, 1, 2)),
            max_tokens=random.choice((7, 30, 60)), logprobs=random.choice((None, 2)),
            structured_outputs=random.choice(CONSTRAINTS),
        )  # fmt: skip
        job.adapter = random.choice((None, POETRY))
        drawn.append(job)
    return drawn


@pytest.mark.parametrize("ahead", [False, True], ids=["one at a time", "one ahead"])
def test_each_of_a_crowd_with_constraints_gets_what_it_gets_alone(ahead):
    asked, random = jobs(24), Random(5)
    options = EVERYTHING | {"enable_lora": True, "max_loras": 2, "async_scheduling": ahead}
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="storyteller", device="cpu", **options))
    cache, preemptions = engine.engine.scheduler.cache, Preemptions()

    async def run():
        async with asyncio.timeout(DEADLINE):
            alone = [await job.answer(engine, f"alone{i}", f"of {i}") for i, job in enumerate(asked)]
            engine.engine.listeners.add(preemptions)
            leaving = [
                random.choice(asked).leave(engine, f"leaves{i}", random.randint(1, 9)) for i in range(8)
            ]
            asking = [job.answer(engine, f"asks{i}", job.salt) for i, job in enumerate(asked)]
            return alone, (await asyncio.gather(*asking, *leaving))[: len(asked)]

    try:
        alone, together = asyncio.run(run())
    finally:
        engine.shutdown()
    wrong = [(i, why) for i in range(len(asked)) for why in complaints(together[i], alone[i])]
    assert not wrong, wrong[:3]
    for job, output in zip(asked, together, strict=True):
        structure = job.params.structured_outputs
        for sample in output.outputs:
            if structure is not None and structure.regex and sample.finish_reason == "stop":
                assert re.fullmatch(PATTERN, sample.text), sample.text
    tally = engine.engine.capabilities[0].tally
    tried = preemptions.count, tally.accepted
    assert min(tried) > 0, f"what was to be tried did not happen: {tried}"
    assert cache.usage().num_sequences == cache.usage().tokens_held == 0
    Invariants(cache).check()


PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, structured_outputs=CONSTRAINTS[0]),
    SamplingParams(temperature=1, seed=4, n=2, max_tokens=30, structured_outputs=CONSTRAINTS[2]),
    SamplingParams(temperature=0, max_tokens=12),
]
PROMPTS = ["Once upon a time, there was", "The cat", "Tom and his dog"]


def tokens(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def test_two_ranks_choose_by_the_same_masks(forked):
    """Rank 0 alone chooses, and the others need no mask."""
    wanted = tokens(LLM("storyteller", device="cpu", dtype="float32"))
    two = LLM("storyteller", device="cpu", dtype="float32", tensor_parallel_size=2)
    try:
        assert tokens(two) == wanted
    finally:
        two.shutdown()


@pytest.mark.parametrize("ahead", [False, True], ids=["one at a time", "one ahead"])
def test_a_recording_has_the_masks_and_its_replay_the_same_tokens(tmp_path, ahead):
    file = tmp_path / "run.jsonl"
    said = tokens(LLM("storyteller", device="cpu", record=file, async_scheduling=ahead))
    assert json.dumps(said)
    rows = [row for batch in batches(lines_of(file)) for row in batch["draws"]["rows"]]
    masked = [row for row in rows if row["mask"] is not None]
    assert masked, "a row of the recording has its mask"
    assert len(masked) < len(rows), "and a row of a free request has none"
    again = list(replay(file))
    assert len(again) > 10
    assert all(compared.is_equal and compared.error_now is None for compared in again)
