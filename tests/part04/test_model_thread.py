"""`LockedBackend._sample` alone: where a step runs, and what the reader is given. The model is a script."""

import asyncio
import threading
from contextlib import aclosing

import pytest
import torch

from engine.decoding.greedy import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.models.config import ModelConfig
from engine.server.backend import LockedBackend
from tests.part04.serving import ends

CONFIG = ModelConfig(
    model_type="mock", vocab_size=4096, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
    intermediate_size=1, max_positions=64, norm_eps=1.0, activation="none", tie_word_embeddings=True,
)  # fmt: skip
PROMPT = [5, 6]
SECONDS = 20.0  # after which what we wait for will never come
PATIENCE = 10.0  # seconds that a step stands still for the event loop, which needs none


class Script:
    """A forward that says the tokens of a text, and notes in which thread; `before` runs at each step."""

    def __init__(self, tokenizer, text="one two three four", before=lambda step: None):
        self.ids, self.before, self.threads, self.steps = tokenizer.encode(text), before, [], 0

    def __call__(self, token_ids):
        self.threads.append(threading.get_ident())
        self.before(self.steps)
        self.steps += 1
        logits = torch.zeros(CONFIG.vocab_size)
        logits[self.ids[(len(token_ids) - len(PROMPT)) % len(self.ids)]] = 1.0
        return logits


def params(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, **more)


def backend_of(tokenizer, script):
    return LockedBackend("m", tokenizer, CONFIG, lambda: script, supports=SUPPORTS | {"n"})


def outputs_of(backend, asked, pause=None) -> list:
    """Every output that a reader gets; `pause` is awaited after each."""

    async def run():
        async with asyncio.timeout(SECONDS), aclosing(await backend.generate(PROMPT, asked, "r")) as stream:
            seen = []
            async for output in stream:
                seen.append(output)
                if pause:
                    await pause(output)
            return seen

    return asyncio.run(run())


def test_a_step_runs_in_another_thread_than_the_event_loop(tokenizer):
    script = Script(tokenizer)
    outputs_of(backend_of(tokenizer, script), params(2))
    assert script.threads, "the loop of Part 3 is stepped"
    assert threading.get_ident() not in script.threads, (
        "the event loop never computes: a step runs in a thread"
    )


def test_the_event_loop_goes_on_while_a_step_runs(tokenizer):
    ticked = threading.Event()
    script = Script(tokenizer, before=lambda step: waited.append(ticked.wait(PATIENCE)))
    waited = []

    async def run():
        stream = await backend_of(tokenizer, script).generate(PROMPT, params(1), "r")
        async with aclosing(stream):
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            ticked.set()
            await reading

    asyncio.run(run())
    assert waited == [True], "the event loop stood still until the step was over"


def test_a_state_is_there_before_the_next_step_begins(tokenizer):
    read, late = threading.Event(), []

    def before(step):
        if step == 2 and not read.wait(PATIENCE):
            late.append(step)

    async def pause(output):
        read.set()

    outputs_of(backend_of(tokenizer, Script(tokenizer, before=before)), params(3), pause)
    assert not late, "each step's state is put before the next step begins: an answer streams"


def test_the_last_output_has_the_whole_answer(tokenizer):
    final = outputs_of(backend_of(tokenizer, Script(tokenizer)), params(4))[-1]
    sample = final.outputs[0]
    text = tokenizer.decode(tokenizer.encode("one two three four")[:4])
    assert (sample.text, sample.finish_reason) == (text, "length"), (
        "the last state has all text and the reason"
    )
    assert final.finished, "the last sample's last token finishes the output"


def test_an_output_does_not_change_after_it_was_handed_out(tokenizer):
    async def pause(output):
        counts.append(len(output.outputs[0].token_ids))
        await asyncio.sleep(0.01)

    counts = []
    kept = outputs_of(backend_of(tokenizer, Script(tokenizer)), params(6), pause)
    now = [len(output.outputs[0].token_ids) for output in kept]
    assert now == counts, "each state is a record of its own: a reader still holds the one before"
    assert [output.finished for output in kept[:-1]] == [False] * (len(kept) - 1), "a record of its own"


def test_text_that_may_still_become_a_stop_string_is_not_shown(tokenizer):
    gate = threading.Semaphore(0)  # a step at a time, so that the reader sees every state

    async def pause(output):
        gate.release()

    script = Script(
        tokenizer, "one two three", before=lambda step: step == 0 or gate.acquire(timeout=SECONDS)
    )
    states = outputs_of(backend_of(tokenizer, script), params(8, stop=("e t",)), pause)
    text = tokenizer.decode(tokenizer.encode("one two three"))
    assert states[-1].outputs[0].text == text[: text.index("e t")], (
        "a complete stop string is cut off: a state has the visible text, not all that was decoded"
    )
    shown = [state.outputs[0].text for state in states]
    assert all(states[-1].outputs[0].text.startswith(text) for text in shown), (
        "a state's text is what is visible: text that a stop string may take back is not shown"
    )


def test_only_the_last_samples_end_finishes_the_output(tokenizer):
    states = outputs_of(backend_of(tokenizer, Script(tokenizer)), params(2, n=2))
    last = states[-1]
    assert last.outputs[-1].index == 1, (
        "with n=2 the output is finished by the second sample's end, not by the first's"
    )
    assert [sample.index for sample in last.outputs] == [0, 1], (
        "an output has all samples so far: the first stays in it when the second begins"
    )
    counts = [len(sample.token_ids) for sample in last.outputs]
    assert counts == [2, 2], "with n=2 the output is finished by the second sample's end, not by the first's"
    assert [sample.finish_reason for sample in last.outputs] == ["length", "length"]


@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_ends_the_output_with_the_step_under_way(tokenizer, n):
    started, go_on = threading.Event(), threading.Event()

    def before(step):
        if step == 1:
            started.set()
            go_on.wait(SECONDS)

    script = Script(tokenizer, before=before)
    backend = backend_of(tokenizer, script)

    async def read(stream):
        return [output async for output in stream]

    async def run():
        async with aclosing(await backend.generate(PROMPT, params(20, n=n), "r")) as stream:
            await anext(stream)
            await asyncio.to_thread(started.wait, SECONDS)
            await backend.abort("r")
            go_on.set()
            reading = asyncio.ensure_future(read(stream))
            if not await ends(reading):
                pytest.fail(
                    "the aborted sample's last state, with the reason abort, is put: its reader waits", False
                )
            return reading.result()

    final = asyncio.run(run())[-1]
    assert len(final.outputs) == 1, "after an abort the output is finished: no further sample is begun"
    assert (final.finished, final.outputs[0].finish_reason) == (True, "abort"), (
        "an aborted request ends with the reason abort"
    )
    assert script.steps == 2, "after an abort the step under way is the last one"


def test_an_error_in_the_model_is_the_readers_to_know(tokenizer):
    def before(step):
        if step:
            raise OSError("out of paper")

    with pytest.raises(OSError, match="out of paper"):
        outputs_of(backend_of(tokenizer, Script(tokenizer, before=before)), params(3))


def test_why_it_stopped_is_told_with_the_last_token(tokenizer):
    (*_, last) = outputs_of(backend_of(tokenizer, Script(tokenizer)), params(9, stop=("three",)))
    (sample,) = last.outputs
    assert sample.finish_reason == "stop", f"the stop string came, yet the reason is {sample.finish_reason!r}"
    assert sample.stop_reason == "three", f"stop_reason names the stop string, not {sample.stop_reason!r}"


def test_a_step_that_ends_the_sample_itself_keeps_its_reason_though_aborted(tokenizer):
    started, go_on = threading.Event(), threading.Event()

    def before(step):
        if step == 1:  # the last of two
            started.set()
            go_on.wait(SECONDS)

    backend = backend_of(tokenizer, Script(tokenizer, before=before))

    async def run():
        async with (
            asyncio.timeout(SECONDS),
            aclosing(await backend.generate(PROMPT, params(2), "r")) as stream,
        ):
            await anext(stream)
            await asyncio.to_thread(started.wait, SECONDS)
            await backend.abort("r")
            go_on.set()
            return [output async for output in stream][-1]

    final = asyncio.run(run())
    assert (final.finished, final.outputs[0].finish_reason) == (True, "length"), (
        "the step under way has a finish reason of its own: it stands, also after an abort"
    )
