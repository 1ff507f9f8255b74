"""What speculation proposes and what stands, for Prometheus, under vLLM's names. Part 16.

A collector beside Part 11's: register it with that registry.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from engine.speculation.capability import Tally
from engine.telemetry.metrics import ENGINE, LABELS

STOOD = "Proposed tokens that stood; 1 + this / num_drafts: tokens of a step with drafts."


class SpeculationMetrics:
    """Reads `tally` when the registry is read."""

    def __init__(self, tally: Tally, model_name: str) -> None:
        self.tally, self._labels = tally, (model_name, ENGINE)

    def collect(self) -> Iterator[Metric]:
        """For the registry: counters of proposals, of the tokens proposed, and of those that stood, also by
        their place.
        """
        for name, about, count in (
            ("num_drafts", "Times that tokens were proposed for a request.", self.tally.drafts),
            ("num_draft_tokens", "Proposed tokens.", self.tally.proposed),
            ("num_accepted_tokens", STOOD, self.tally.accepted),
        ):
            family = CounterMetricFamily(f"vllm:spec_decode_{name}", about, labels=LABELS)
            family.add_metric(self._labels, count)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens that stood, by their place among the proposed.",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(self.tally.accepted_at):
            family.add_metric((*self._labels, str(position)), count)
        yield family
