"""Admission control's counters and gauges for Prometheus. Part 15.

Register `AdmissionMetrics` with the registry of Part 11's `EngineMetrics`. No metric holds a request's text.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric

from engine.scheduling.elastic import ElasticScheduler
from engine.server.admission import Admission
from engine.telemetry import families


class AdmissionMetrics:
    """A collector that reads `admission` and `scheduler` whenever the registry is read."""

    def __init__(self, admission: Admission, scheduler: ElasticScheduler, model_name: str) -> None:
        """`model_name`: the value of the label `model_name`."""
        self.admission, self.scheduler, self.model_name = admission, scheduler, model_name

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry.

        Counters: refusals by error code, requests cut short by reason, steps that ran out of memory. Gauges:
        admitted sequences and tokens, the bounds on both, and the largest number of tokens in a step.
        """
        admission, scheduler = self.admission, self.scheduler
        cut_short = "Requests that ended with the tokens they had, by the reason."
        for name, documentation, counts in (
            ("ruvon:requests_refused", "Requests not served, by the error's code.", admission.refused),
            ("ruvon:requests_cut_short", cut_short, admission.cut_short),
        ):
            yield families.counter_by("reason", name, documentation, self.model_name, dict(counts))
        yield families.counter(
            "ruvon:out_of_memory_steps",
            "Steps for which there was not enough memory.",
            self.model_name,
            scheduler.num_out_of_memory,
        )
        capacity, limits = admission.capacity, admission.capacity.limits
        admitted_tokens = "Tokens of admitted sequences: prompts and longest outputs."
        reqs_bound, tokens_bound = limits.max_num_queued_reqs, limits.max_num_queued_tokens
        for name, documentation, value in (
            ("ruvon:admitted_sequences", "Sequences admitted, waiting or running.", capacity.sequences),
            ("ruvon:admitted_tokens", admitted_tokens, capacity.tokens),
            ("ruvon:max_num_queued_reqs", "Bound on ruvon:admitted_sequences.", reqs_bound),
            ("ruvon:max_num_queued_tokens", "Bound on ruvon:admitted_tokens.", tokens_bound),
            ("ruvon:step_token_limit", "Tokens a step may have now.", scheduler.max_num_batched_tokens),
        ):
            yield families.gauge(name, documentation, self.model_name, value)
