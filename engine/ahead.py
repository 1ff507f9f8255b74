"""One step ahead: the next step is on the device before the last one's tokens have been read. Part 13.

A GPU that waits while the host reads tokens, checks stops and schedules is idle for as long. Here the tokens
of a step stay where they were chosen, the next step finds them there, and the host works while the device
does. Promises the tokens of one step at a time. A request that ends by a stop token is found out one step
late, and costs one wasted token; one that ends by its length costs none.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.cache.manager import KVCacheManager
from engine.decoding.outputs import RequestOutput
from engine.device import on_device
from engine.executor import ModelForward, Pending
from engine.llm_engine import Flight, LLMEngine
from engine.scheduling.request import PLACEHOLDER, Request
from engine.scoring import ScoredPending, ScoringExecutor


class LastTokens:
    """The tokens chosen last, on the device."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.chosen = torch.zeros(max_rows, dtype=torch.long, device=device)  # its address never changes
        self._row: dict[str, int] = {}  # by request

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """token_ids[R]: one for each row of logits of the batch."""
        if token_ids.data_ptr() != self.chosen.data_ptr():
            self.chosen[: len(token_ids)] = token_ids
        self._row, row = {}, -1
        for request, rows in zip(batch.requests, batch.logit_rows, strict=True):
            row += len(rows)
            if rows:
                self._row[request.id] = row

    def sources(self, batch: Batch) -> list[int]:
        """[T]: the place in `chosen` of each token that is still a placeholder, and -1 for the others."""
        sources = [-1] * batch.num_tokens
        for request, end in zip(batch.requests, batch.query_start[1:], strict=True):
            if batch.token_ids[end - 1] == PLACEHOLDER:  # the last token alone can be unknown
                sources[end - 1] = self._row[request.id]
        return sources


class AheadForward(ModelForward):
    """A batch with placeholders -> logits[R, V]."""

    def __init__(self, model: nn.Module, cache: KVCacheManager, last: LastTokens) -> None:
        super().__init__(model, cache)
        self.last = last

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """As ever, but placeholders become the tokens they stand for; the host waits for nobody."""
        token_ids, positions, wanted = super().inputs(batch)
        sources = [(t, source) for t, source in enumerate(self.last.sources(batch)) if source >= 0]
        if sources:
            places, rows = on_device(self.device, *zip(*sources, strict=True))
            # A row that chose no token (NO_TOKEN) fails when its step lands; until then it reads token 0.
            token_ids[places] = self.last.chosen[rows].clamp(min=0)
        return token_ids, positions, wanted


class OnItsWay:
    """A tensor whose copy to the host has begun. Who asks for its numbers waits for this copy alone, not for
    what the device was given to do since.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def cpu(self) -> Tensor:
        self._arrived.synchronize()
        return self._host

    def tolist(self) -> list:
        return self.cpu().tolist()


class AheadExecutor(ScoringExecutor):
    """Remembers what was chosen, and sends it to the host at once."""

    def __init__(self, forward, tokenizer, last: LastTokens, **options) -> None:
        super().__init__(forward, tokenizer, **options)
        self.last = last

    def submit(self, batch: Batch) -> Pending:
        pending = super().submit(batch)
        self.last.remember(pending.batch, pending.token_ids)
        if not pending.token_ids.is_cuda:  # a copy: the next step chooses its tokens in the same place
            return replace(pending, token_ids=pending.token_ids.clone())
        if isinstance(pending, ScoredPending):
            return replace(pending, packed=OnItsWay(pending.packed))
        return replace(pending, token_ids=OnItsWay(pending.token_ids))


class AheadEngine(LLMEngine):
    """An engine that launches a step before it lands the last one."""

    _flight: Flight | None = None

    def has_unfinished_requests(self) -> bool:
        return self._flight is not None or super().has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Launch a step, and land the one before it, if any: an output for each request that was in that one.

        Whoever gets a token from a launched step (`choosing` of `flight.pending.batch`; nobody, if `pending`
        is not a `Pending` but `Failed`) has to `expect` it. Penalties count the output on the host: if a
        running request has any (`sampling.is_adjusted`), the last step lands and none is launched. `land`
        alone asks for a step's result. If that step failed, `_recover` takes back what is in `_flight`: the
        next step must be there by then. With nothing in flight and nobody to launch: `_stuck`.
        """
        landing = self._flight
        # 1. Whoever has penalties waits for the last token.
        if landing and any(request.sampling.is_adjusted for request in self.scheduler.running):
            self._flight = None
            return self.land(landing)
        # 2. The next step, in which a placeholder stands for each token that is still on the device.
        self._flight = ahead = self.launch()
        if ahead and isinstance(ahead.pending, Pending):
            for request in choosing(ahead.pending.batch):
                request.expect()
        # 3. What the last one found.
        if landing:
            return self.land(landing)
        return [] if ahead else self._stuck()

    def _recover(self, flight: Flight, error: Exception) -> list[RequestOutput]:
        """What was launched on top of a step that failed is worth nothing. It is taken back first."""
        if self._flight:
            self.scheduler.rollback(self._flight.batch)
            self._flight = None
        return super()._recover(flight, error)


def choosing(batch: Batch) -> list[Request]:
    """Who gets a token from this step. A batch as it was scheduled may also want rows of tokens that are
    known (Part 10); that of a pending step does not.
    """
    return [request for request, rows in zip(batch.requests, batch.logit_rows, strict=True) if rows]
