"""A crowd that asks for everything at once, on an engine with everything switched on: each gets what it gets
alone, and nothing is left. What HTTP adds, and a hundred users of it, is test_storm.py's.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from engine import AsyncEngineArgs, AsyncLLMEngine, LoRARequest, SamplingParams
from engine.cache.invariants import Invariants
from engine.decoding.outputs import CompletionOutput, Logprobs, RequestOutput
from engine.models.config import ModelConfig
from engine.quantization.cpu import max_activation_level
from engine.requests.listeners import Listener
from engine.speculation.measuring import ALWAYS_DRAFT

DEADLINE = 800.0  # seconds after which what we wait for will never come: not a promise about speed
# Between two log probabilities of a token: who is beside a row changes its last digits. With int8 on an x86
# without VNNI, activations have half as many levels.
CLOSE = 2e-3 if max_activation_level() == 127 else 1e-2
TIE = "a tie"
MAX_LEN, SEATS = 160, 12
ASKED, LEAVERS = 60, 20
ADAPTERS = Path(__file__).parents[2] / "adapters"
NAMED = [LoRARequest(name, i, ADAPTERS / name) for i, name in enumerate(("poetry", "business"), 1)]
BEGINNINGS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, ",
    "Tom and his dog went to the forest. They saw a bird, a fox and a bear. The bear gave them honey. ",
    "Ça va? 日本語 😀 ", "",
)  # fmt: skip
ENDS = ("She said", "The dog", "Then a cat came and", "He was very", '"Yes,', "😀")
DRAFTS = {
    "model": "storyteller-draft",
    "num_speculative_tokens": 3,
    "step_times": ALWAYS_DRAFT.as_dict(),
}  # in every step
MEMORY = 2 * MAX_LEN * ModelConfig.from_pretrained("storyteller").kv_bytes_per_token(4)  # the draft's, too
EVERYTHING = {
    "max_model_len": MAX_LEN, "max_num_seqs": SEATS, "max_num_batched_tokens": 48, "swap_space": 0.01,
    "kv_cache_memory_bytes": MEMORY, "speculative_config": DRAFTS,
}  # fmt: skip


class Job:
    """What one user asks for, and from where on: drawn."""

    def __init__(self, random: Random, int8: bool) -> None:
        """In int8 a row's codes may depend on its last digits: so its tokens are the likeliest, with their
        scores, by which a tie is known (`differs`).
        """

        def sometimes(share: float, **fields) -> dict:
            return {name: random.choice(values) for name, values in fields.items() if random.random() < share}

        self.prompt = random.choice(BEGINNINGS) + random.choice(ENDS)
        self.salt = random.choice((None, None, "a", "b"))
        self.adapter = random.choice((None, *NAMED)) if int8 else None
        self.priority = random.randint(-2, 2)
        more = {"temperature": 0, "logprobs": 2}
        if not int8:
            more = {"temperature": random.choice((0, 0.4, 0.8))}
            more |= sometimes(0.2, repetition_penalty=(1.2,), logit_bias=({7: -100.0}, {300: 3.0}))
            more |= sometimes(0.2, top_p=(0.9,))
            more |= sometimes(0.2, bad_words=(["was"], ["Lily", "dog", "ball", " a", " a time"]))
            more |= sometimes(0.1, allowed_token_ids=(list(range(1, 4000)),))
            more |= sometimes(0.1, min_p=(0.05,), top_k=(20,), presence_penalty=(0.5,), prompt_logprobs=(1,))
            more |= sometimes(0.4, logprobs=(0, 2))
        self.params = SamplingParams(
            max_tokens=random.choice((1, 7, 20, 40, 60)),
            seed=random.randrange(10**6),
            n=random.choice((1, 1, 1, 2, 3)),
            **sometimes(0.4, stop=((".",), (" the", "dog"), "\n", ("Lily", "Tom"))),
            **sometimes(0.3, ignore_eos=(True,), include_stop_str_in_output=(True,)),
            **more,
        )

    def outputs(self, engine: AsyncLLMEngine, name: str, salt: str | None) -> AsyncIterator[RequestOutput]:
        prompt = {"prompt": self.prompt} | ({"cache_salt": salt} if salt else {})
        options = {"lora_request": self.adapter, "priority": self.priority}
        return engine.generate(prompt, self.params, name, **options)

    async def answer(self, engine: AsyncLLMEngine, name: str, salt: str | None) -> RequestOutput:
        async for output in self.outputs(engine, name, salt):
            latest = output
        return latest

    async def leave(self, engine: AsyncLLMEngine, name: str, outputs: int) -> None:
        """Ask, and go in the middle of the answer."""
        stream = self.outputs(engine, name, self.salt)
        async for _ in stream:
            outputs -= 1
            if outputs <= 0:
                break
        await stream.aclose()


def differs(mine: CompletionOutput, its: CompletionOutput) -> str:
    """Where an answer differs from the one alone; TIE where two likeliest tokens are as good as equal, so
    that what follows may be another story; "" if nowhere.
    """
    for i, pair in enumerate(zip(mine.token_ids, its.token_ids, strict=False)):
        scores = its.logprobs[i] if its.logprobs else {}
        if pair[0] != pair[1] and all(token in scores for token in pair):
            here, there = (scores[token].logprob for token in pair)
            return TIE if abs(here - there) < CLOSE else f"token {i}: {pair}, scores {here}, {there}"
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "text_offsets"):
        if getattr(mine, name) != getattr(its, name):
            return f"{name}: {getattr(mine, name)!r}, alone {getattr(its, name)!r}"
    return scores_differ(mine.logprobs, its.logprobs)


def scores_differ(mine: Logprobs | None, its: Logprobs | None) -> str:
    for here, there in zip(mine or (), its or (), strict=True):
        for token in (here or {}).keys() & (there or {}).keys():
            if abs(here[token].logprob - there[token].logprob) > CLOSE:
                return f"log probabilities of {token}: {here[token]}, alone {there[token]}"
    return ""


def complaints(output: RequestOutput, alone: RequestOutput) -> list[str]:
    pairs = zip(output.outputs, alone.outputs, strict=True)
    found = [differs(*pair) for pair in pairs]
    return [why for why in (*found, scores_differ(output.prompt_logprobs, alone.prompt_logprobs)) if why]


class Preemptions(Listener):
    count = 0

    def on_preempt(self, request) -> None:
        self.count += 1


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_each_of_a_crowd_gets_what_it_gets_alone(quantization):
    random, int8 = Random(22), quantization == "int8"
    jobs = [Job(random, int8) for _ in range(ASKED)]
    options = EVERYTHING | ({"quantization": "int8", "enable_lora": True, "max_loras": 2} if int8 else {})
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="storyteller", **options))
    cache, preemptions = engine.engine.scheduler.cache, Preemptions()

    async def run() -> tuple[list[RequestOutput], list[RequestOutput]]:
        async with asyncio.timeout(DEADLINE):
            alone = [await job.answer(engine, f"alone{i}", f"of {i}") for i, job in enumerate(jobs)]
            engine.engine.listeners.add(preemptions)
            leaving = [
                random.choice(jobs).leave(engine, f"leaves{i}", random.randint(1, 12)) for i in range(LEAVERS)
            ]
            asking = [job.answer(engine, f"asks{i}", job.salt) for i, job in enumerate(jobs)]
            return alone, (await asyncio.gather(*asking, *leaving))[:ASKED]

    try:
        alone, together = asyncio.run(run())
    finally:
        engine.shutdown()
    found = [(i, why) for i in range(ASKED) for why in complaints(together[i], alone[i])]
    wrong = [(i, why) for i, why in found if why != TIE]
    ties = len(found) - len(wrong)
    tally = engine.engine.capabilities[0].tally
    print(
        f"{ASKED} requests, {LEAVERS} left, wrong {len(wrong)}, ties {ties}; "
        f"{preemptions.count} preemptions, {cache.hit_tokens} cached tokens, {tally.accepted} drafts stood"
    )
    assert not wrong, wrong[:3]
    assert ties < ASKED / 10, "too many to be chance"
    tried = preemptions.count, cache.num_swapped, cache.hit_tokens, tally.accepted
    assert min(tried) > 0, f"what was to be tried did not happen: {tried}"
    assert cache.usage().num_sequences == cache.usage().tokens_held == 0
    Invariants(cache).check()
