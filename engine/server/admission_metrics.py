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
        admission, scheduler, model_name = self.admission, self.scheduler, self.model_name
        yield families.counter_by(
            "reason",
            "ruvon:requests_refused",
            "Requests not served, by the error's code.",
            model_name,
            dict(admission.refused),
        )
        yield families.counter_by(
            "reason",
            "ruvon:requests_cut_short",
            "Requests that ended with the tokens they had, by the reason.",
            model_name,
            dict(admission.cut_short),
        )
        yield families.counter(
            "ruvon:out_of_memory_steps",
            "Steps for which there was not enough memory.",
            model_name,
            scheduler.num_out_of_memory,
        )

        def gauge(name: str, documentation: str, value: int) -> Metric:
            return families.gauge(name, documentation, model_name, value)

        capacity, limits = admission.capacity, admission.capacity.limits
        yield gauge("ruvon:admitted_sequences", "Sequences admitted, waiting or running.", capacity.sequences)
        yield gauge(
            "ruvon:admitted_tokens",
            "Tokens of admitted sequences: prompts and longest outputs.",
            capacity.tokens,
        )
        yield gauge(
            "ruvon:max_num_queued_reqs", "Bound on ruvon:admitted_sequences.", limits.max_num_queued_reqs
        )
        yield gauge(
            "ruvon:max_num_queued_tokens", "Bound on ruvon:admitted_tokens.", limits.max_num_queued_tokens
        )
        yield gauge("ruvon:step_token_limit", "Tokens a step may have now.", scheduler.max_num_batched_tokens)
