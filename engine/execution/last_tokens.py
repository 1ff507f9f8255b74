"""Keeps the tokens of the last step on the device, where the next step reads them. Part 13.

So the next step can be launched before the host has read these tokens. In the record of the next step, a
placeholder stands for each of these tokens. SGLang calls this a future map.
"""

import torch
from torch import Tensor

from engine.execution.runner import Inputs, upload_inputs
from engine.machine.device import on_device
from engine.requests.batch import PLACEHOLDER, Batch


class LastTokens:
    """Keeps the tokens of the last step. A step with drafts lands before the next is launched, so none of its
    tokens is kept.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        """`max_rows` is the most tokens that a step chooses."""
        self.chosen = torch.zeros(max_rows, dtype=torch.long, device=device)  # [max_rows], at one address
        self._row: dict[str, int] = {}  # by sequence id: the row of `chosen` with its token

    def remember(self, batch: Batch, token_ids: Tensor) -> None:
        """Keep the chosen token_ids[R] of this step, in place of the last step's. Keeps none if the step has
        drafts.
        """
        if batch.has_drafts:
            self._row = {}
            return
        self.chosen[: len(token_ids)].copy_(token_ids)
        # Without drafts, each sequence has one chosen token, or none inside its prompt.
        counts = batch.rows.chosen_counts  # [S]
        chosen_ids = [seq_id for seq_id, count in zip(batch.ids, counts, strict=True) if count]  # [R]
        self._row = {seq_id: row for row, seq_id in enumerate(chosen_ids)}

    def sources(self, batch: Batch) -> list[int]:
        """[T]: for each placeholder, the row of `chosen` that has its token; -1 for each known token."""
        sources = [-1] * batch.num_tokens
        if PLACEHOLDER not in batch.token_ids:
            return sources
        for seq_id, end in zip(batch.ids, batch.query_start[1:], strict=True):
            if batch.token_ids[end - 1] == PLACEHOLDER:  # only a sequence's last token can be unknown
                sources[end - 1] = self._row[seq_id]
        return sources

    def upload(self, batch: Batch, device: torch.device) -> Inputs:
        """Copy the record's numbers to the device, with tokens in place of their placeholders. Does not wait
        for the device.
        """
        inputs = upload_inputs(batch, device)
        sources = self.sources(batch)
        indices = [t for t, row in enumerate(sources) if row >= 0]  # of the placeholders
        if indices:
            placeholders, rows = on_device(device, indices, [sources[t] for t in indices])
            # NO_TOKEN, below 0, stands where no token could be chosen. The request fails once the host reads
            # it. A step that runs before that gets token 0 in its place, which the model can embed.
            inputs.token_ids[placeholders] = self.chosen[rows].clamp(min=0)
        return inputs
