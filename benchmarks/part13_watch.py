"""An executor that notes when a step is launched, and when its tokens are read: one step ahead, as demo and
notebook show it.
"""

from dataclasses import dataclass, field

from engine.ahead import AheadExecutor, AheadForward, LastTokens
from engine.batch import Batch
from engine.cache.paged import PagedCache
from engine.executor import Pending, StepResult
from engine.llm_engine import LLMEngine
from engine.scheduling.continuous import ContinuousScheduler
from engine.tokenizer import Tokenizer

Event = tuple[str, int]  # ("launch" or "read", step)
SEATS = 4


@dataclass(frozen=True)
class Noted(Pending):
    """A step under way."""

    number: int = 0
    events: list[Event] = field(default_factory=list)

    def result(self) -> StepResult:
        self.events.append(("read", self.number))
        return super().result()


class Watched(AheadExecutor):
    """For requests without logprobs."""

    def __init__(self, forward: AheadForward, tokenizer: Tokenizer, last: LastTokens) -> None:
        super().__init__(forward, tokenizer, last)
        self.events: list[Event] = []
        self.batches: list[Batch] = []

    def submit(self, batch: Batch) -> Pending:
        self.batches.append(batch)
        number = len(self.batches)
        self.events.append(("launch", number))
        pending = super().submit(batch)
        return Noted(pending.batch, pending.token_ids, number, self.events)


def watched(kind: type[LLMEngine], tokenizer: Tokenizer, model) -> LLMEngine:
    """An engine over pages, with PyTorch's operations: who waits for whom does not depend on the kernel."""
    device = next(model.parameters()).device
    cache, last = PagedCache(model.config, 64, device=device), LastTokens(SEATS, device)
    executor = Watched(AheadForward(model, cache, last), tokenizer, last)
    return kind(tokenizer, model.config, ContinuousScheduler(cache, SEATS, 256), executor, max_model_len=256)
