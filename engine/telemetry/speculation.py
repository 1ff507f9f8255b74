"""How many draft tokens the model accepted, for Prometheus, under vLLM's names. Part 16.

Register `SpeculationMetrics` with the registry of Part 11's `EngineMetrics`.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric

from engine.speculation.capability import Tally
from engine.telemetry import families


class SpeculationMetrics:
    """A collector that reads `tally` whenever the registry is read."""

    def __init__(self, tally: Tally, model_name: str) -> None:
        """`tally`: the counts of one engine. `model_name`: the value of the label `model_name`."""
        self.tally, self.model_name = tally, model_name

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry: counters of drafts, of draft tokens, and of accepted draft tokens.

        Accepted tokens are also counted by their position in the draft, from 0.
        """
        tally, model_name = self.tally, self.model_name
        yield families.counter(
            "vllm:spec_decode_num_drafts",
            "Drafts: how often tokens were proposed for a request. One draft has one or more tokens.",
            model_name,
            tally.drafts,
        )
        yield families.counter(
            "vllm:spec_decode_num_draft_tokens", "Proposed tokens.", model_name, tally.proposed
        )
        yield families.counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Accepted tokens. Mean number of tokens that a request gets from a step in which it has a draft: "
            "1 + num_accepted_tokens / num_drafts.",
            model_name,
            tally.accepted,
        )
        accepted_at = {str(position): count for position, count in enumerate(tally.accepted_at)}
        yield families.counter_by(
            "position",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens, by their position in the draft.",
            model_name,
            accepted_at,
        )
