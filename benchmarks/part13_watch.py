"""An executor that notes when a step is launched, and when its tokens are read: one step ahead, as demo and
notebook show it.
"""

from engine.cache.memory import PageMemory
from engine.core.llm_engine import LLMEngine
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.requests.batch import Batch
from engine.requests.step import Pending, StepResult
from engine.scheduling.continuous import ContinuousScheduler
from engine.text.tokenizer import Tokenizer

Event = tuple[str, int]  # ("launch" or "read", step)
SEATS = 4


class Noted:
    """A step under way."""

    def __init__(self, pending: Pending, number: int, events: list[Event]) -> None:
        self.pending, self.number, self.events = pending, number, events

    def result(self) -> StepResult:
        self.events.append(("read", self.number))
        return self.pending.result()


class Watched:
    """An executor: a runner, and what it was given."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.events: list[Event] = []
        self.batches: list[Batch] = []

    def submit(self, batch: Batch) -> Pending:
        self.batches.append(batch)
        number = len(self.batches)
        self.events.append(("launch", number))
        return Noted(self.runner.submit(batch), number, self.events)


def watched(kind: type[LLMEngine], tokenizer: Tokenizer, model) -> LLMEngine:
    """An engine over pages, with PyTorch's operations: who waits for whom does not depend on the kernel."""
    device = next(model.parameters()).device
    memory, last = PageMemory(model.config, 64, device=device), LastTokens(SEATS, device)
    executor = Watched(ModelRunner([EagerWay(model, memory, upload=last.upload)], memory, last_tokens=last))
    scheduler = ContinuousScheduler(memory.plan(), SEATS, 256)
    return kind(tokenizer, model.config, scheduler, executor, max_model_len=256)
