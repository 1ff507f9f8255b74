"""Many prompts in one forward pass: packed end to end, without padding. Part 7.

Promises each prompt the logits that it has in a forward pass alone. Padding would make every prompt as long
as the longest prompt. Packing computes each token once, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention.dense import dense_attention
from engine.attention.interface import Spans, VarlenKernel
from engine.models.language_model import LanguageModel


@dataclass(frozen=True)
class PackedPrompts:
    """S prompts on one flat token axis."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]: position of each token in its prompt, from 0
    query_start: tuple[int, ...]  # [S+1]: prompt s is token_ids[query_start[s]:query_start[s+1]]

    @property
    def last_rows(self) -> list[int]:
        """[S]: the row of each prompt's last token. The token after each other row is already known."""
        return [end - 1 for end in self.query_start[1:]]


def pack(prompts: Sequence[Sequence[int]]) -> PackedPrompts:
    """Lay prompts, each a sequence of token ids, end to end. There is at least one.

    Raises ValueError, which names the prompt's index, if a prompt is empty.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
    token_ids = torch.tensor([token_id for prompt in prompts for token_id in prompt])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    return PackedPrompts(token_ids, positions, (0, *accumulate(map(len, prompts))))


@torch.inference_mode()
def run_prefill(
    model: LanguageModel, batch_of_prompts: Sequence[Sequence[int]], kernel: VarlenKernel = dense_attention
) -> Tensor:
    """The logits [S, V] of the token after each of S prompts, from one forward pass.

    Each prompt is a sequence of token ids. `kernel` computes the attention of every layer; all layers share
    one `Spans`. Only the last token of each prompt goes through the output layer. Raises ValueError if a
    prompt is empty.
    """
    packed = pack(batch_of_prompts)
    device = next(model.parameters()).device
    spans = Spans(packed.query_start, packed.query_start)  # each prompt sees only its own tokens

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, spans)

    hidden = model(packed.token_ids.to(device), packed.positions.to(device), attend)  # [T, D]
    return model.logits(hidden[packed.last_rows])  # [S, V]
