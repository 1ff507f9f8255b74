"""How many proposed tokens the model accepted, for Prometheus, under vLLM's names. Part 16.

A collector beside Part 11's: register it with that registry.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from engine.speculation.capability import Tally
from engine.telemetry.metrics import ENGINE, LABEL_NAMES


class SpeculationMetrics:
    """Reads `tally` when the registry is read."""

    def __init__(self, tally: Tally, model_name: str) -> None:
        self.tally, self._label_values = tally, (model_name, ENGINE)

    def collect(self) -> Iterator[Metric]:
        """For the registry: counters of drafts, of the tokens in them, and of those that were accepted, also
        by their position in the draft.
        """
        accepted = "Accepted tokens; 1 + this / num_drafts: tokens of a step with drafts."
        for name, documentation, count in (
            ("num_drafts", "Times that tokens were proposed for a request.", self.tally.drafts),
            ("num_draft_tokens", "Proposed tokens.", self.tally.proposed),
            ("num_accepted_tokens", accepted, self.tally.accepted),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", documentation, labels=LABEL_NAMES)
            counter.add_metric(self._label_values, count)
            yield counter
        counter = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens, by their position in the draft.",
            labels=(*LABEL_NAMES, "position"),
        )
        for position, count in enumerate(self.tally.accepted_at):
            counter.add_metric((*self._label_values, str(position)), count)
        yield counter
