"""A cache in pages that is watched, and a fake model that says what it reads in them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cache.invariants import Invariants
from engine.cache.paged import PagedCache
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SUPPORTS, SamplingState
from engine.executor import Executor
from engine.llm_engine import LLMEngine
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.request import Request
from engine.scheduling.scheduler import take
from tests.part06.fakes import CONFIG, TOKENIZER, fake_logits

TWO_LAYERS = replace(CONFIG, num_layers=2)
P = 4  # tokens in a block, wherever a test does not say otherwise


def sequence(
    name: str, token_ids: Sequence[int] | str = (1, 2, 3), parent: Request | None = None, **fields
) -> Request:
    """A request that waits; a string stands for the numbers of its letters."""
    ids = [ord(x) for x in token_ids] if isinstance(token_ids, str) else list(token_ids)
    params = SamplingParams(prompt_logprobs=1 if fields.pop("every_row", False) else None)
    state = SamplingState(params, ids, [], 0)
    return Request(name, name, ids, len(ids), params, None, state, parent=parent, **fields)


def paged(num_blocks: int, block_size: int = P, config=TWO_LAYERS, **options) -> PagedCache:
    return PagedCache(config, num_blocks, block_size, **options)


def step(cache: PagedCache, *work: tuple[Request, int], value: float | None = None) -> Tensor:
    """One step in which all goes well: keys and values are the token ids (or `value`), in layer 1 a thousand
    more. Queries are 0, so each row comes out as the mean of the values it sees, in layer 0.
    """
    for request, n in work:
        assert cache.reserve(request, request.num_computed_tokens + n), f"no room for {request.id}"
    batch = take(list(work))
    attend = cache.attention(batch)
    x = torch.tensor(batch.token_ids, dtype=cache.memory.dtype).view(-1, 1, 1)
    if value is not None:
        x = torch.full_like(x, value)
    out = attend(0, torch.zeros_like(x), x, x)
    attend(1, torch.zeros_like(x), x + 1000, x + 1000)
    for request, _ in work:
        cache.commit(request, min(request.num_computed_tokens, len(request.token_ids)))
    return out.flatten()


def admitted(cache: PagedCache, seq: Request, compute: bool = True) -> Request:
    """Begun, as the scheduler does it, and all its tokens computed."""
    cached = cache.begin(seq)
    assert cached is not None, f"begin({seq.id}) says: not now"
    seq.num_computed_tokens = cached
    if compute:
        step(cache, (seq, seq.num_tokens_to_compute))
    return seq


def table(cache: PagedCache, seq: Request) -> list[int]:
    return cache.held[seq.id].table.blocks.tolist()


def tokens_in_pages(cache: PagedCache, seq: Request, length: int | None = None) -> list[int]:
    """What is written in a sequence's blocks, read without any help of the code under test; all four tensors
    agree.
    """
    length = seq.num_computed_tokens if length is None else length
    places = [(block, place) for block in table(cache, seq) for place in range(cache.block_size)][:length]
    read = [
        [memory[layer][block, place, 0, 0].item() - 1000 * layer for block, place in places]
        for memory in (cache.keys, cache.values)
        for layer in range(2)
    ]
    assert all(one == read[0] for one in read), (
        f"layers, or keys and values, of {seq.id} hold different tokens"
    )
    return [int(x) for x in read[0]]


class WatchedCache(PagedCache):
    """Its invariants are checked before each step, by itself, and whenever somebody asks."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.invariants = Invariants(self)

    def attention(self, batch: Batch):
        self.invariants.check(batch)
        return super().attention(batch)


class PageReader:
    """Batch -> logits[R, V]: the fake model's, over the token ids that it reads back from the pages. Each
    step stores its token ids as keys and values; a step told to fail leaves garbage behind.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.steps = self.computed = 0
        self.fail_next: Exception | None = None

    def __call__(self, batch: Batch) -> Tensor:
        self.steps += 1
        attend = self.cache.attention(batch)
        ids = torch.tensor(batch.token_ids, dtype=torch.float32).view(-1, 1, 1)
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            attend(0, ids, ids + 77, ids + 78)
            raise error
        self.computed += batch.num_tokens
        for layer in range(self.cache.memory.shape[1]):
            attend(layer, ids, ids + 1000 * layer, ids + 1000 * layer)
        logits = []
        for s, request in enumerate(batch.requests):
            if not batch.logit_rows[s]:
                continue
            read = tokens_in_pages(self.cache, request, batch.context_lens[s])
            known = [token for token in request.token_ids if token >= 0][: len(read)]
            assert read[: len(known)] == known, f"the pages of {request.id} hold other tokens than its own"
            logits += [fake_logits(read[: batch.positions[row] + 1]) for row in batch.logit_rows[s]]
        return torch.stack(logits) if logits else torch.empty(0, CONFIG.vocab_size)


def fake_engine(cache: PagedCache, seats: int = 5, budget: int = 24, **options) -> LLMEngine:
    """The fake model over pages."""
    scheduler = ContinuousScheduler(cache, seats, budget)
    supports = SUPPORTS | {"cache_salt", "prompt_logprobs"}
    room = min(CONFIG.max_positions, cache.num_blocks * cache.block_size)
    return LLMEngine(
        TOKENIZER, CONFIG, scheduler, Executor(PageReader(cache)),
        supports=supports, max_model_len=room, **options,
    )  # fmt: skip
