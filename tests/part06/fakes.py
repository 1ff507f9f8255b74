"""A model without weights and a cache without tensors, which know exactly when they are used wrongly.

The fake model's logits are a hash of all tokens so far, read from what the cache was given: a token computed
twice, left out, or computed at another's place changes everything that follows.
"""

import asyncio
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

import numpy as np
import torch
from torch import Tensor

from engine.cache.manager import DraftProgress, Locations, Usage
from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.decoding.greedy import decode_steps
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS, sampler
from engine.execution.runner import Logits
from engine.models.config import ModelConfig
from engine.requests.batch import Batch
from engine.requests.listeners import Listener
from engine.text.tokenizer import AddedToken, Tokenizer
from engine.text.vocabulary import byte_alphabet
from tests.part04.serving import DEADLINE, wait_until

EOS = 256
TOKENIZER = Tokenizer(
    {char: byte for byte, char in byte_alphabet().items()}, [], [AddedToken(EOS, "<end>")], eos_token="<end>"
)
CONFIG = ModelConfig(
    model_type="fake", vocab_size=257, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
    intermediate_size=1, max_positions=200, norm_eps=0.0, activation="none", tie_word_embeddings=True,
    eos_token_ids=(EOS,),
)  # fmt: skip


def fake_logits(token_ids: Sequence[int]) -> Tensor:
    """[V]: any change in the tokens so far changes all of it. About one output in 25 tokens ends."""
    code = zlib.crc32(b"".join(id.to_bytes(2) for id in token_ids))
    logits = torch.randn(CONFIG.vocab_size, generator=torch.Generator().manual_seed(code)) * 3
    logits[EOS] = 50 if code % 25 == 0 else -50
    return logits


def told_alone(prompt: str, params: SamplingParams, index: int = 0):
    """The fake model's output for one request with nobody beside it: Part 2's loop."""
    ids = TOKENIZER.encode(prompt)
    steps = decode_steps(fake_logits, TOKENIZER, CONFIG, ids, params, sampler(params, ids, index), SUPPORTS)
    return list(steps)[-1].output


class BlockCache:
    """Blocks of `block_tokens` tokens, taken as a sequence grows; `reserve` says no when none is left."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.blocks: dict[str, int] = {}  # sequence -> how many it holds
        self.tokens: dict[str, list[int]] = {}  # sequence -> what was computed for it
        self.draft_progress: dict[str, DraftProgress] = {}

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - sum(self.blocks.values())

    def admit(self, seq) -> int | None:
        assert seq.id not in self.blocks, f"{seq.id} was admitted twice"
        if not self.free_blocks:
            return None
        self.blocks[seq.id], self.tokens[seq.id], self.draft_progress[seq.id] = 0, [], DraftProgress(0)
        return 0

    def reserve(self, seq, num_tokens: int) -> bool:
        more = -(-num_tokens // self.block_tokens) - self.blocks[seq.id]
        if more > self.free_blocks:
            return False
        self.blocks[seq.id] += max(more, 0)
        return True

    def commit(self, seq, num_tokens: int) -> None:
        assert num_tokens <= seq.num_computed_tokens, (
            f"{seq.id}: {num_tokens} committed, {seq.num_computed_tokens} computed"
        )
        held = self.tokens[seq.id]  # nothing, where a test plays the steps without a model
        assert not held or held[:num_tokens] == seq.token_ids[:num_tokens], (
            f"{seq.id}: committed what was not computed"
        )

    def trim(self, seq, num_tokens: int) -> None:
        self.blocks[seq.id] = min(self.blocks[seq.id], -(-num_tokens // self.block_tokens))

    def release(self, seq) -> None:
        self.blocks.pop(seq.id, None)
        self.tokens.pop(seq.id, None)
        self.draft_progress.pop(seq.id, None)

    def preempt(self, seq) -> None:
        assert seq.id in self.blocks, f"{seq.id} was preempted but never admitted"
        self.release(seq)

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self.num_blocks * self.block_tokens

    def locate(self, ids, query_start, positions) -> Locations:
        """Nowhere: the fake model finds its tokens by name."""
        return Locations(np.zeros((len(ids), 1), dtype=np.int64), np.zeros(len(positions), dtype=np.int64))

    def take_copies(self):
        return ()

    def replan(self, copies) -> None:
        assert not copies, "nobody planned a copy"

    def usage(self) -> Usage:
        held = sum(self.blocks.values()) * self.block_tokens
        return Usage(len(self.blocks), held, self.num_blocks * self.block_tokens)


class FakeForward:
    """A runner's way: batch -> logits[R, V], over what the cache holds. Fails at the steps it is told to."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self.steps = 0
        self.fail_at: dict[int, Exception] = {}  # step -> what it raises

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        self.steps += 1
        if self.steps in self.fail_at:
            raise self.fail_at[self.steps]
        logits, chosen = [], set(batch.rows.chosen)
        for s, name in enumerate(batch.ids):
            a, b = batch.query_start[s : s + 2]
            held = self.cache.tokens[name]
            start = batch.positions[a]
            assert start <= len(held), f"{name}: tokens {len(held)} to {start} were never computed"
            assert batch.positions[a:b] == tuple(range(start, start + b - a))
            assert batch.context_lens[s] == start + b - a
            assert batch.context_lens[s] <= self.cache.blocks[name] * self.cache.block_tokens, "no room"
            held[start:] = batch.token_ids[a:b]
            logits += [fake_logits(held[: batch.positions[row] + 1]) for row in range(a, b) if row in chosen]
        return Logits(torch.stack(logits) if logits else torch.empty(0, CONFIG.vocab_size))


class Recorder(Listener):
    """Writes down all it hears, as (event, what it is about)."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []
        self.records = []

    def on_arrival(self, request):
        self.heard.append(("arrival", request.id))

    def on_schedule(self, batch):
        self.heard.append(("schedule", batch.ids))

    def on_preempt(self, request):
        self.heard.append(("preempt", request.id))

    def on_step(self, record):
        self.heard.append(("step", record.request_ids))
        self.records.append(record)

    def on_finish(self, request):
        self.heard.append(("finish", request.id))

    def on_reject(self, request_id, error):
        self.heard.append(("reject", request_id))


def recorder_of(engine: EngineThread) -> Recorder:
    """The one that the fixture `engine` has."""
    return engine.engine.listeners._listeners[0]


def steps_of(engine: EngineThread, request_id: str) -> int:
    """In how many steps the request was."""
    return sum(event == "schedule" and f"{request_id}/0" in ids for event, ids in recorder_of(engine).heard)


def assert_idle(engine: LLMEngine) -> None:
    """Nothing is left of the requests it had: no queue, no memory, no record."""
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.waiting == []
    assert engine.scheduler.running == []
    assert engine.scheduler.cache.usage().num_sequences == 0
    assert engine.scheduler.cache.usage().tokens_held == 0


def run_to_end(engine: LLMEngine) -> dict:
    """request id -> its last output, in the order in which they finished."""
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return done


class Gate:
    """A way that waits for a permit: a test decides how many steps happen."""

    def __init__(self, forward, permits: int = 0) -> None:
        self.forward, self.entered = forward, 0  # entered: passes begun, the one that waits included
        self._permits, self._is_open = threading.Semaphore(permits), False

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        """From now on every step is allowed."""
        self._is_open = True
        self.allow(1)

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        self.entered += 1
        assert self._permits.acquire(timeout=DEADLINE), "nobody allowed this step"
        if self._is_open:  # one permit is passed on from step to step
            self.allow(1)
        return self.forward(batch)


@contextmanager
def at_rest(engine: EngineThread, passed: Callable[[], bool] = lambda: True) -> Iterator[EngineThread]:
    """On leaving: the engine comes to rest by itself, and when it is stopped nothing of it is left."""
    try:
        yield engine
        if passed() and engine.health():
            wait_until(
                lambda: (
                    not engine.engine.has_unfinished_requests()
                    and engine._commands.empty()
                    and not engine._mailboxes
                )
            )
    finally:
        engine.stop()
    if passed():
        assert not engine.health()
        assert engine._mailboxes == {}
        assert_idle(engine.engine)


@contextmanager
def held(engine: EngineThread) -> Iterator[None]:
    """The engine's thread stands still meanwhile; what is asked of it waits, to be taken in its order."""
    stands, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go_on.wait(DEADLINE)

    engine._command(stand)
    try:
        wait_until(stands.is_set)
        yield
    finally:
        go_on.set()


async def until(condition: Callable[[], bool], *tasks: asyncio.Task) -> None:
    """Return once `condition` holds; raises what a task raised that ended before that."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            if any(task.done() for task in tasks):
                done = await asyncio.gather(*tasks, return_exceptions=True)
                raise next(
                    (one for one in done if isinstance(one, Exception)), AssertionError("done too soon")
                )
            await asyncio.sleep(0.001)


async def read(outputs) -> list:
    """All outputs of an iterator."""
    return [output async for output in outputs]


async def ask(backend, *asked, **options) -> list:
    """All outputs of one request to a `Backend`."""
    async with aclosing(await backend.generate(*asked, **options)) as outputs:
        return await read(outputs)


def leave_in_the_third_step(client, ask: dict, gate: Gate, backend: EngineThread) -> None:
    """A client reads how a stream begins, and hangs up. `gate` allows two steps, and is open in the end."""
    with client.stream("POST", "/v1/completions", json=ask | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the connection closes with the iterator
        first = next(lines)
        assert "error" not in first, first
        wait_until(lambda: gate.entered == 3)  # the third step is under way, and waits
    wait_until(lambda: not backend._commands.empty())  # word of the departure has reached the engine
    gate.open()
