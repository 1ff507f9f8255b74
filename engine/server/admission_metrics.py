"""Admission control's counters and gauges for Prometheus. Part 15.

Register `AdmissionMetrics` with the registry of Part 11's `EngineMetrics`. No metric holds a request's text.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.scheduling.elastic import ElasticScheduler
from engine.server.admission import Admission
from engine.telemetry.metric_names import ENGINE, LABEL_NAMES


class AdmissionMetrics:
    """A collector that reads `admission` and `scheduler` whenever the registry is read."""

    def __init__(self, admission: Admission, scheduler: ElasticScheduler, model_name: str) -> None:
        self.admission, self.scheduler, self.model_name = admission, scheduler, model_name

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry.

        Counters: refusals by error code, requests cut short by reason, steps that ran out of memory. Gauges:
        admitted sequences and tokens, the bounds on both, and the largest number of tokens in a step.
        """
        label_values = (self.model_name, ENGINE)
        admission, scheduler = self.admission, self.scheduler
        cut_short = "Requests that ended with the tokens they had, by the reason."
        for name, documentation, counts in (
            ("ruvon:requests_refused", "Requests not served, by the error's code.", admission.refused),
            ("ruvon:requests_cut_short", cut_short, admission.cut_short),
        ):
            counter = CounterMetricFamily(name, documentation, labels=(*LABEL_NAMES, "reason"))
            for reason, count in dict(counts).items():
                counter.add_metric((*label_values, reason), count)
            yield counter
        counter = CounterMetricFamily(
            "ruvon:out_of_memory_steps", "Steps for which there was not enough memory.", labels=LABEL_NAMES
        )
        counter.add_metric(label_values, scheduler.num_out_of_memory)
        yield counter
        capacity = admission.capacity
        for name, documentation, value in (
            ("ruvon:admitted_sequences", "Sequences admitted, waiting or running.", capacity.sequences),
            (
                "ruvon:admitted_tokens",
                "Tokens of admitted sequences: prompts and longest outputs.",
                capacity.tokens,
            ),
            (
                "ruvon:max_num_queued_reqs",
                "Bound on ruvon:admitted_sequences.",
                capacity.limits.max_num_queued_reqs,
            ),
            (
                "ruvon:max_num_queued_tokens",
                "Bound on ruvon:admitted_tokens.",
                capacity.limits.max_num_queued_tokens,
            ),
            ("ruvon:step_token_limit", "Tokens a step may have now.", scheduler.max_num_batched_tokens),
        ):
            gauge = GaugeMetricFamily(name, documentation, labels=LABEL_NAMES)
            gauge.add_metric(label_values, value)
            yield gauge
