"""The tokens chosen last, on the device: the next step finds them there before anybody has read them.
Part 13.

The field calls it a future map. A placeholder in a step's record stands for such a token.
"""

import torch
from torch import Tensor

from engine.execution.runner import Inputs, upload
from engine.machine.device import on_device
from engine.requests.batch import PLACEHOLDER, Batch


class LastTokens:
    """Of the last step; of one with drafts nothing, since none is launched on top of it."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.chosen = torch.zeros(max_rows, dtype=torch.long, device=device)  # [max_rows], at one address
        self._row: dict[str, int] = {}  # by sequence

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """token_ids[R]: one for each row that chooses."""
        if batch.has_drafts:
            self._row = {}
            return
        self.chosen[: len(token_ids)].copy_(token_ids)
        choosing = (name for name, count in zip(batch.ids, batch.rows.counts, strict=True) if count)
        self._row = {name: row for row, name in enumerate(choosing)}

    def sources(self, batch: Batch) -> list[int]:
        """[T]: the place in `chosen` of each token that is a placeholder, and -1 for the others."""
        sources = [-1] * batch.num_tokens
        for name, end in zip(batch.ids, batch.query_start[1:], strict=True):
            if batch.token_ids[end - 1] == PLACEHOLDER:  # the last token alone can be unknown
                sources[end - 1] = self._row[name]
        return sources

    def upload(self, batch: Batch, device: torch.device) -> Inputs:
        """As ever, but placeholders become the tokens they stand for; the host waits for nobody."""
        inputs = upload(batch, device)
        sources = [(t, source) for t, source in enumerate(self.sources(batch)) if source >= 0]
        if sources:
            places, rows = on_device(device, *zip(*sources, strict=True))
            # A row that chose no token (NO_TOKEN) fails when its step lands; until then it reads token 0.
            inputs.token_ids[places] = self.chosen[rows].clamp(min=0)
        return inputs
