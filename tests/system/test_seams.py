"""Seams that later parts use, each held open by a small fake of the part, until the part itself lands.

parts/SEAMS.md says which seam is whose.
"""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engine import EngineArgs, SamplingParams
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import ParameterError
from engine.execution.runner import ModelRunner
from engine.lora.adapter import read_adapter
from engine.requests.request import PLACEHOLDER, State
from engine.scheduling.continuous import ContinuousScheduler
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.wiring.compose import build_engine
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward, read
from tests.system.ready import ROOT

V = 4096  # of the storyteller


def allowed_after(token_id: int) -> np.ndarray:
    """A grammar of two tokens: [V], after each token two thirds of all may come."""
    return (np.arange(V) + token_id) % 3 != 0


class Grammar:
    """A fake of Extension B, handed in: output that must fit, for requests whose names begin with "fits"."""

    def before_submit(self, step):
        """Each row's mask, by the token before: with drafts, the draft before."""
        batch, rows, row = step.batch, [], 0
        for name, count in zip(batch.ids, batch.rows.chosen_counts, strict=True):
            for _ in range(count):
                draw, before = batch.draws.rows[row], batch.token_ids[batch.rows.chosen[row]]
                if name.startswith("fits"):
                    assert before != PLACEHOLDER, "the token before was needed, and is not there"
                    mask = np.packbits(allowed_after(before), bitorder="little").view(np.int32)
                    draw = replace(draw, mask=mask, is_adjusted=True)
                rows.append(draw)
                row += 1
        return replace(batch, draws=replace(batch.draws, rows=tuple(rows)))

    def must_land_first(self, step):
        return any(name.startswith("fits") for name in step.batch.ids)

    def after_result(self, step, result):
        return result


ALWAYS = {
    "num_speculative_tokens": 3,
    "step_times": ALWAYS_DRAFT.as_dict(),
}  # drafts cost nothing: some in every step
NGRAM = {"method": "ngram", "prompt_lookup_min": 1} | ALWAYS
DRAFT = {"model": "storyteller-draft"} | ALWAYS
ASKED = {
    "fits greedy": ({"temperature": 0, "logprobs": 2}, None),
    "fits drawn": ({"temperature": 0.9, "seed": 3}, None),
    "fits poetry": ({"temperature": 0, "prompt_logprobs": 1}, "poetry"),
    "free": ({"temperature": 0, "logprobs": 1}, None),
    "free business": ({"temperature": 0.8, "seed": 4, "repetition_penalty": 1.2}, "business"),
}


def told(ahead: bool, speculative: dict | None) -> dict:
    """Each request's last output, of an engine made of a list entry more."""
    args = EngineArgs(
        model="storyteller", device="cpu", max_num_seqs=8, max_num_batched_tokens=16, enable_lora=True,
        async_scheduling=ahead, speculative_config=speculative,
    )  # fmt: skip
    engine = build_engine(args)
    engine.capabilities.append(Grammar())
    for name in ("poetry", "business"):
        engine.adapters.load(name, read_adapter(ROOT / "adapters" / name, engine.config))
    for name, (params, adapter) in ASKED.items():
        asked = SamplingParams(max_tokens=30, ignore_eos=True, **params)
        engine.add_request(name, "Once upon a time, there was a dog and a dog", asked, adapter=adapter)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


@pytest.fixture(scope="module")
def plain() -> dict:
    return told(ahead=False, speculative=None)


def test_a_fifth_capability_is_an_entry_in_a_list(plain):
    """What has to fit fits; what is free says what it would say, whoever has to fit beside it."""
    for name, output in plain.items():
        assert output.error is None
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        fits = [bool(allowed_after(a)[b]) for a, b in pairwise(ids)][-30:]
        assert all(fits) == name.startswith("fits"), f"{name}: {fits}"


@pytest.mark.parametrize("ahead", [False, True], ids=["one at a time", "one ahead"])
@pytest.mark.parametrize("speculative", [None, NGRAM, DRAFT], ids=["plain", "n-grams", "draft model"])
def test_it_composes_with_steps_ahead_drafts_scores_and_adapters(plain, ahead, speculative):
    for name, output in told(ahead, speculative).items():
        want = plain[name]
        assert output.outputs[0].token_ids == want.outputs[0].token_ids, name
        scores, wanted = output.outputs[0].logprobs, want.outputs[0].logprobs
        assert (scores is None) == (wanted is None)
        for score, other in zip(scores or (), wanted or (), strict=True):
            assert score.token_id == other.token_id
            assert score.logprob == pytest.approx(other.logprob, abs=1e-4), (
                "raw, whatever a mask lets through"
            )
        assert (output.prompt_logprobs is None) == (want.prompt_logprobs is None)


class Admission:
    """A fake of Part 15: so many requests at once, counted from `generate` until their stream is closed."""

    def __init__(self, backend, places: int):
        self.backend, self.places = backend, places

    async def generate(self, *asked, **options):
        if not self.places:
            raise ParameterError("request", "too many requests")
        stream = await self.backend.generate(*asked, **options)
        self.places -= 1
        return self.Admitted(self, stream)

    class Admitted:
        def __init__(self, admission, stream):
            self.admission, self.stream, self.closed = admission, stream, False

        def __aiter__(self):
            return self

        async def __anext__(self):
            return await anext(self.stream)

        async def aclose(self):
            if not self.closed:
                self.closed = True
                self.admission.places += 1
                await self.stream.aclose()


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0 if seed % 2 else 0.9, seed=seed, max_tokens=5 + seed % 17)


def fake_engine() -> LLMEngine:
    cache = BlockCache(60, 8)
    scheduler = ContinuousScheduler(cache, 3, 64)
    return LLMEngine(TOKENIZER, CONFIG, scheduler, ModelRunner([FakeForward(cache)]))


def test_a_place_taken_by_a_request_that_was_never_read_comes_back():
    async def run():
        async with EngineThread(fake_engine(), "fake") as running:
            backend = Admission(running, places=2)
            streams = [await backend.generate("hello", params(1), name) for name in "ab"]
            with pytest.raises(ParameterError, match="too many"):
                await backend.generate("hello", params(1), "c")
            for stream in streams:
                await stream.aclose()
            assert backend.places == 2
            stream = await backend.generate("hello", params(1), "d")
            assert (await read(stream))[-1].finished

    asyncio.run(run())


def test_placeholders_are_added_replaced_and_dropped():
    (request,) = fake_engine().make_requests("a", "hello", params(1))
    before = list(request.token_ids)
    request.drop_placeholders()
    assert request.token_ids == before
    request.add_placeholder(), request.add_placeholder()
    assert request.token_ids == [*before, PLACEHOLDER, PLACEHOLDER]
    request.confirm(65, 0.0)
    assert request.token_ids == [*before, 65, PLACEHOLDER]
    request.drop_placeholders()
    assert request.token_ids == [*before, 65]
    assert request.state is State.WAITING
    assert request.output.token_ids == [65]
