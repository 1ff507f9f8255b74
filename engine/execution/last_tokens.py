"""The tokens of the last step, kept on the device: the next step reads them there. Part 13.

So it can be launched before the host has read them: in its record, a placeholder stands for such a token.
SGLang calls this a future map.
"""

import torch
from torch import Tensor

from engine.execution.runner import Inputs, upload
from engine.machine.device import on_device
from engine.requests.batch import PLACEHOLDER, Batch


class LastTokens:
    """Keeps the tokens of the last step; none of a step with drafts, which lands before the next is
    launched.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.chosen = torch.zeros(max_rows, dtype=torch.long, device=device)  # [max_rows], at one address
        self._row: dict[str, int] = {}  # of `chosen`, by sequence

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """Keep token_ids[R] of this step, at most one of each sequence, in place of the last step's."""
        if batch.has_drafts:
            self._row = {}
            return
        self.chosen[: len(token_ids)].copy_(token_ids)
        seq_ids = (seq_id for seq_id, count in zip(batch.ids, batch.rows.counts, strict=True) if count)  # [R]
        self._row = {seq_id: row for row, seq_id in enumerate(seq_ids)}

    def sources(self, batch: Batch) -> list[int]:
        """[T]: the index in `chosen` of each token that is a placeholder, and -1 for the others."""
        sources = [-1] * batch.num_tokens
        if PLACEHOLDER not in batch.token_ids:
            return sources
        for seq_id, end in zip(batch.ids, batch.query_start[1:], strict=True):
            if batch.token_ids[end - 1] == PLACEHOLDER:  # only the last token can be unknown
                sources[end - 1] = self._row[seq_id]
        return sources

    def upload(self, batch: Batch, device: torch.device) -> Inputs:
        """The record's numbers on the device, with placeholders replaced by the tokens they stand for. Does
        not wait for the device.
        """
        inputs = upload(batch, device)
        sources = [(t, source) for t, source in enumerate(self.sources(batch)) if source >= 0]
        if sources:
            placeholders, rows = on_device(device, *zip(*sources, strict=True))
            # A row that chose no token (NO_TOKEN) fails when its step lands; until then it reads token 0.
            inputs.token_ids[placeholders] = self.chosen[rows].clamp(min=0)
        return inputs
