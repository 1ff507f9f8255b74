"""Proposals from a small model that reads along. Part 16.

Promises one or more forward passes of the draft model per step, each for all sequences together, and keys of
its own for exactly the tokens that stand. Knows nothing of the target.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.decoding.sampling import SamplingState, distribution, draw
from engine.executor import ModelForward
from engine.scheduling.request import Request
from engine.speculation.paired import PairedCache

PROPOSE = 0x2545F4914F6CDD1D  # makes of a request's seed another, whose numbers choose the proposals


class DraftModel:
    """Reads what the target has confirmed, and goes on from there."""

    def __init__(self, model: nn.Module, cache: PairedCache) -> None:
        self.cache, self.forward = cache, ModelForward(model, cache.draft)
        self.max_positions = model.config.max_positions
        self.probs: dict[str, Tensor] = {}  # request id -> [k, V]: what its last proposals were drawn from

    @torch.inference_mode()
    def propose(self, texts: Sequence[tuple[Request, list[int]]], most: Sequence[int]) -> list[list[int]]:
        """For each (request, all its tokens known by now), at most so many tokens: 0 for a prompt that is
        still being read, which the draft model reads, too.
        """
        self.probs.clear()
        drafts: list[list[int]] = [[] for _ in texts]
        probs: list[list[Tensor]] = [[] for _ in texts]
        # 1. What it has not read yet, of everybody: at least the last token, for what comes behind it. Keys
        #    of drafts that did not stand are written over.
        new, reading = [], range(len(texts))
        for request, ids in texts:
            start = self.cache.computed[request.id] = min(self.cache.computed[request.id], len(ids) - 1)
            new.append(ids[start:])
        while reading:
            going = [s for s in reading if most[s] > len(drafts[s])]
            logits = self._read([(texts[s][0], new[s], s in going) for s in reading])
            # 2. A token more for each that may have one. It is read only if another is to follow.
            if going:
                chosen = self._choose(logits, [texts[s] for s in going], [drafts[s] for s in going])
                for s, token_id, row in zip(going, *chosen, strict=True):
                    drafts[s].append(token_id)
                    probs[s].append(row)
                    new[s] = [token_id]
            reading = [s for s in going if most[s] > len(drafts[s])]
        self.probs |= {
            request.id: torch.stack(rows) for (request, _), rows in zip(texts, probs, strict=True) if rows
        }
        return drafts

    def _read(self, work: list[tuple[Request, list[int], bool]]) -> Tensor:
        """logits[R, V] behind the new tokens of each (request, its new tokens, whether they are wanted)."""
        token_ids, positions, query_start, context_lens, rows = [], [], [0], [], []
        for request, new, wanted in work:
            start = self.cache.computed[request.id]
            token_ids += new
            positions += range(start, start + len(new))
            query_start.append(len(token_ids))
            context_lens.append(start + len(new))
            rows.append(range(len(token_ids) - wanted, len(token_ids)))
            self.cache.computed[request.id] = start + len(new)
        requests = tuple(request for request, _, _ in work)
        fields = (token_ids, positions, query_start, context_lens, rows)
        return self.forward(Batch(requests, *map(tuple, fields)))

    def _choose(
        self, logits: Tensor, texts: list[tuple[Request, list[int]]], drafts: list[list[int]]
    ) -> tuple[list[int], Tensor]:
        """token ids[R] and what they were drawn from, [R, V]: by the same parameters as the target's."""
        states, positions = [], []
        for (request, ids), own in zip(texts, drafts, strict=True):
            state = request.sampling
            output_ids = [*ids[request.num_prompt_tokens :], *own]
            positions.append(len(output_ids))
            if state.is_adjusted:
                state = SamplingState(state.params, state.prompt_ids, output_ids, state.seed, state.stop_ids)
            states.append(state)
        probs = distribution(logits, states, positions)
        return draw(probs, [state.seed ^ PROPOSE for state in states], positions).tolist(), probs
