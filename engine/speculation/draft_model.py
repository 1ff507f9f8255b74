"""Proposals from a small model that reads along. Part 16.

Promises one or more forward passes of the draft model per call, each for all sequences together; that it
reads no token twice, its own guesses included, if they stood; and that what it says it drew a token from is
what it drew it from. Where the forward pass finds tokens that were chosen on the device (Part 13), passes
follow one another without the host, which reads all guesses at the end. Knows nothing of the target.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.ahead import LastTokens
from engine.batch import Batch
from engine.decoding.sampling import adjust, distribution, draw
from engine.executor import ModelForward
from engine.scheduling.request import PLACEHOLDER, Request
from engine.speculation.paired import PairedCache
from engine.speculation.verify import names_a_seed

PROPOSE = 0x2545F4914F6CDD1D  # makes of a request's seed another, whose numbers choose the proposals


class DraftModel:
    """Reads what the target has confirmed, and goes on from there."""

    def __init__(
        self, model: nn.Module, cache: PairedCache, forward: Callable[[Batch], Tensor] | None = None
    ) -> None:
        """`forward`: its passes, over `cache.draft`; default: kernel by kernel."""
        self.cache, self.forward = cache, forward or ModelForward(model, cache.draft)
        self._last: LastTokens | None = getattr(self.forward, "last", None)
        self._likeliest = getattr(self.forward, "likeliest", partial(torch.argmax, dim=-1))
        self.max_positions = model.config.max_positions
        self.probs: dict[str, Tensor] = {}  # id of a sampled request -> [k, V]: its last proposals' origin

    def unread(self, request: Request, ids: Sequence[int]) -> int:
        """How many of its tokens a proposal has to read first: at least the last one, for what comes behind
        it. A guess that stood is read already.
        """
        read, guessed = self.cache.read[request.id], self.cache.guessed[request.id]
        for guess, token_id in zip(guessed, ids[read:], strict=False):
            if guess != token_id:
                break
            read += 1
        return max(1, len(ids) - read)

    @torch.inference_mode()
    def propose(self, texts: Sequence[tuple[Request, list[int]]], most: Sequence[int]) -> list[list[int]]:
        """For each (request, its tokens), at most so many tokens: with 0 they are only read."""
        self._forget(texts)
        drafts: list[list[int]] = [[] for _ in texts]
        probs: list[list[Tensor]] = [[] for _ in texts]
        # 1. What it has not read yet, of everybody. Keys of guesses that did not stand are written over.
        starts = [len(ids) - self.unread(request, ids) for request, ids in texts]
        new = [ids[start:] for (_, ids), start in zip(texts, starts, strict=True)]
        reading = list(range(len(texts)))
        unknown: list[tuple[list[int], Tensor]] = []  # whose tokens are still on the device, and these
        while reading:
            going = [s for s in reading if most[s] > len(drafts[s])]
            work = [(texts[s][0], starts[s], new[s], most[s] > len(drafts[s])) for s in reading]
            logits = self.forward(batch := _batch_of(work))
            for s in reading:
                self._has_read(*texts[s], drafts[s])
            # 2. A token more for each that may have one. It is read only if another is to follow.
            if going:
                chosen, origins = self._choose(logits, [texts[s] for s in going], [drafts[s] for s in going])
                # Penalties count guesses on the host.
                if self._last is None or any(texts[s][0].sampling.is_adjusted for s in going):
                    guesses = chosen.tolist()
                else:
                    self._last.remember(batch, chosen)
                    guesses = [PLACEHOLDER] * len(going)
                    unknown.append((going, chosen.clamp(min=0)))  # a copy: the next pass chooses there, too
                for s, token_id, row in zip(going, guesses, origins, strict=True):
                    starts[s] += len(new[s])
                    drafts[s].append(token_id)
                    new[s] = [token_id]
                    if row is not None:
                        probs[s].append(row)
            reading = [s for s in going if most[s] > len(drafts[s])]
        # 3. What the guesses are, and which of them it has read: all but the last.
        if unknown:
            found = iter(torch.cat([chosen for _, chosen in unknown]).tolist())
            for going, _ in unknown:
                for s in going:
                    drafts[s][drafts[s].index(PLACEHOLDER)] = next(found)
            for (request, ids), own in zip(texts, drafts, strict=True):
                self._has_read(request, ids, own[:-1])
        for (request, _), rows in zip(texts, probs, strict=True):
            if rows:
                self.probs[request.id] = torch.stack(rows)
        return drafts

    def _forget(self, texts: Sequence[tuple[Request, list[int]]]) -> None:
        """What older proposals of these were drawn from, and of those who have left."""
        here = {request.id for request, _ in texts}
        for name in [name for name in self.probs if name in here or name not in self.cache.read]:
            del self.probs[name]

    def _has_read(self, request: Request, ids: list[int], guessed: list[int]) -> None:
        self.cache.read[request.id], self.cache.guessed[request.id] = len(ids), list(guessed)

    def _choose(
        self, logits: Tensor, texts: list[tuple[Request, list[int]]], drafts: list[list[int]]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """token ids[R], by the same parameters as the target's, and what each was drawn from, [V]; None
        where nobody asks: the likeliest is certain, and who names a seed gets the target's own draw. Nobody
        waits for the device.
        """
        states, positions = [], []
        for (request, ids), own in zip(texts, drafts, strict=True):
            state = request.sampling
            positions.append(len(ids) + len(own) - request.num_prompt_tokens)
            if state.is_adjusted:  # what came in the last step is no output yet
                said = request.num_prompt_tokens + len(state.output_ids)
                state = state.behind([*ids[said:], *own])
            states.append(state)
        if all(state.temperature == 0 for state in states):
            adjusted = adjust(logits, states, positions)
            return self._likeliest(adjusted), [None] * len(states)
        probs = distribution(logits, states, positions)  # [R, V]
        seeds: list[int] = []
        origins: list[Tensor | None] = []
        for row, state in zip(probs, states, strict=True):
            own = names_a_seed(state)  # then the target draws by this number, too: so they often agree
            seeds.append(state.seed if own else state.seed ^ PROPOSE)
            origins.append(row if state.temperature and not own else None)
        return draw(probs, seeds, positions), origins


def _batch_of(work: list[tuple[Request, int, list[int], bool]]) -> Batch:
    """The new tokens of each (request, where they begin, its new tokens, whether what follows is wanted)."""
    token_ids, positions, query_start, context_lens, rows = [], [], [0], [], []
    for _, start, new, wanted in work:
        token_ids += new
        positions += range(start, start + len(new))
        query_start.append(len(token_ids))
        context_lens.append(start + len(new))
        rows.append(range(len(token_ids) - wanted, len(token_ids)))
    requests = tuple(request for request, *_ in work)
    fields = (token_ids, positions, query_start, context_lens, rows)
    return Batch(requests, *map(tuple, fields))
