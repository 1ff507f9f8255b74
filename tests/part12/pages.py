"""A cache in pages that is watched, and a fake model that says what it reads in them."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.cache.invariants import Invariants
from engine.cache.memory import PageMemory
from engine.cache.paged import PagedCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS
from engine.decoding.sampling_state import SamplingState
from engine.execution.runner import Logits, ModelRunner
from engine.models.config import ModelConfig
from engine.requests.batch import Batch
from engine.requests.request import Request
from engine.requests.step import Step
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scheduler import Queues
from tests.part06.fakes import CONFIG, TOKENIZER, fake_logits

TWO_LAYERS = replace(CONFIG, num_layers=2)
P = 4  # tokens in a block, wherever a test does not say otherwise
ADAPTERS = SimpleNamespace(slot_of={"poetry": 0})  # those that a sequence may have, and their slots


class WatchedCache(PagedCache):
    """A plan and, beside it, its memory; it can check its invariants, before each step (`check`: an item of
    a runner's `before`) and whenever somebody asks (`invariants`).
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int = 16, *, num_swap_blocks: int = 0,
        enable_prefix_caching: bool = True, preemption_mode=None, **options,
    ) -> None:  # fmt: skip
        """`options`: the memory's."""
        super().__init__(num_blocks, block_size, num_swap_blocks, enable_prefix_caching, preemption_mode)
        self.memory = PageMemory(config, num_blocks, block_size, num_swap_blocks=num_swap_blocks, **options)
        self.invariants = Invariants(self)
        self.sequences: dict[str, Request] = {}  # all that were ever to be admitted

    def admit(self, seq: Request) -> int | None:
        self.sequences[seq.id] = seq
        return super().admit(seq)

    def check(self, batch: Batch) -> None:
        """Before the batch runs."""
        self.invariants.check(Step(batch, tuple(self.sequences[name] for name in batch.ids)))


def sequence(
    name: str, token_ids: Sequence[int] | str = (1, 2, 3), parent: Request | None = None, **fields
) -> Request:
    """A request that waits; a string stands for the numbers of its letters."""
    ids = [ord(x) for x in token_ids] if isinstance(token_ids, str) else list(token_ids)
    params = SamplingParams(prompt_logprobs=1 if fields.pop("every_row", False) else None)
    state = SamplingState(params, ids, [], 0)
    return Request(name, name, ids, len(ids), params, None, state, parent=parent, **fields)


def paged(num_blocks: int, block_size: int = P, config=TWO_LAYERS, **options) -> WatchedCache:
    return WatchedCache(config, num_blocks, block_size, **options)


def take(cache: PagedCache, *work: tuple[Request, int]) -> Step:
    """The step of these (sequence, new tokens), which count as computed from here on."""
    return Queues(cache, ADAPTERS).make_step(work)


def make_copies(cache: WatchedCache) -> None:
    """What was planned since the last step, as the next one makes it."""
    cache.memory.apply(cache.take_copies())


def step(cache: WatchedCache, *work: tuple[Request, int], value: float | None = None) -> Tensor:
    """One step in which all goes well: keys and values are the token ids (or `value`), in layer 1 a thousand
    more. Queries are 0, so each row comes out as the mean of the values it sees, in layer 0.
    """
    for request, n in work:
        assert cache.reserve(request, request.num_computed_tokens + n), f"no room for {request.id}"
    batch, memory = take(cache, *work).batch, cache.memory
    memory.apply(batch.copies)
    attend = memory.attention(batch)
    x = torch.tensor(batch.token_ids, dtype=memory.memory.dtype).view(-1, 1, 1)
    if value is not None:
        x = torch.full_like(x, value)
    out = attend(0, torch.zeros_like(x), x, x)
    attend(1, torch.zeros_like(x), x + 1000, x + 1000)
    for request, _ in work:
        cache.commit(request, min(request.num_computed_tokens, len(request.token_ids)))
    return out.flatten()


def admitted(cache: WatchedCache, seq: Request, compute: bool = True) -> Request:
    """Begun, as the scheduler does it, and all its tokens computed."""
    cached = cache.admit(seq)
    assert cached is not None, f"admit({seq.id}) says: not now"
    seq.num_computed_tokens = cached
    if compute:
        step(cache, (seq, seq.num_tokens_to_compute))
    return seq


def table(cache: PagedCache, seq: Request) -> list[int]:
    return cache.allocations[seq.id].table.blocks.tolist()


def tokens_in_pages(cache: WatchedCache, seq: Request, length: int | None = None) -> list[int]:
    """What is written in a sequence's blocks, read without any help of the code under test; all four tensors
    agree.
    """
    length = seq.num_computed_tokens if length is None else length
    places = [(block, place) for block in table(cache, seq) for place in range(cache.block_size)][:length]
    read = [
        [layers[layer][block, place, 0, 0].item() - 1000 * layer for block, place in places]
        for layers in (cache.memory.keys, cache.memory.values)
        for layer in range(2)
    ]
    assert all(tokens == read[0] for tokens in read), (
        f"layers, or keys and values, of {seq.id} hold different tokens"
    )
    return [int(x) for x in read[0]]


class PageReader:
    """A runner's way: batch -> the fake model's logits[R, V], over the token ids that it reads back from the
    pages. Each step stores its token ids as keys and values; a step told to fail leaves garbage behind.
    """

    def __init__(self, cache: WatchedCache) -> None:
        self.cache = cache
        self.steps = self.computed = 0
        self.fail_next: Exception | None = None

    def fits(self, batch: Batch) -> bool:
        return True

    def __call__(self, batch: Batch) -> Logits:
        self.steps += 1
        attend = self.cache.memory.attention(batch)
        ids = torch.tensor(batch.token_ids, dtype=torch.float32).view(-1, 1, 1)
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            attend(0, ids, ids + 77, ids + 78)
            raise error
        self.computed += batch.num_tokens
        for layer in range(len(self.cache.memory.keys)):
            attend(layer, ids, ids + 1000 * layer, ids + 1000 * layer)
        logits, chosen = [], set(batch.rows.chosen)
        for s, name in enumerate(batch.ids):
            rows = [row for row in range(*batch.query_start[s : s + 2]) if row in chosen]
            if not rows:
                continue
            seq = self.cache.sequences[name]
            read = tokens_in_pages(self.cache, seq, batch.context_lens[s])
            known = [token for token in seq.token_ids if token >= 0][: len(read)]
            assert read[: len(known)] == known, f"the pages of {name} hold other tokens than its own"
            logits += [fake_logits(read[: batch.positions[row] + 1]) for row in rows]
        return Logits(torch.stack(logits) if logits else torch.empty(0, CONFIG.vocab_size))


def fake_engine(cache: WatchedCache, seats: int = 5, budget: int = 24, **options) -> LLMEngine:
    """The fake model over pages, whose plan is checked before each step."""
    scheduler = ContinuousScheduler(cache, seats, budget)
    supports = SUPPORTS | {"cache_salt", "prompt_logprobs"}
    room = min(CONFIG.max_positions, cache.num_blocks * cache.block_size)
    runner = ModelRunner([PageReader(cache)], cache.memory, before=[cache.check])
    return LLMEngine(TOKENIZER, CONFIG, scheduler, runner, supports=supports, max_model_len=room, **options)


def reader_of(engine: LLMEngine) -> PageReader:
    """The one that `fake_engine` has."""
    return engine.executor.ways[0]
