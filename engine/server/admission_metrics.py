"""What admission control does, as numbers for Prometheus. Part 15.

A collector beside Part 11's: register it with that registry. Nothing here is a text of a request.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.scheduling.elastic import ElasticScheduler
from engine.server.admission import Admission
from engine.telemetry.metrics import ENGINE, LABELS


class AdmissionMetrics:
    """Reads `admission` and `scheduler` when somebody asks."""

    def __init__(self, admission: Admission, scheduler: ElasticScheduler, model_name: str) -> None:
        self.admission, self.scheduler, self.model_name = admission, scheduler, model_name

    def collect(self) -> Iterator[Metric]:
        own, admission, scheduler = (self.model_name, ENGINE), self.admission, self.scheduler
        for name, about, counts in (
            (
                "ruvon:requests_refused",
                "Requests not served, by the error's code.",
                admission.refused,
            ),
            (
                "ruvon:requests_cut_short",
                "Requests that ended with what they had, by what ended them.",
                admission.cut_short,
            ),
        ):
            family = CounterMetricFamily(name, about, labels=(*LABELS, "reason"))
            for reason, count in dict(counts).items():
                family.add_metric((*own, reason), count)
            yield family
        family = CounterMetricFamily(
            "ruvon:out_of_memory_steps", "Steps for which there was not enough memory.", labels=LABELS
        )
        family.add_metric(own, scheduler.num_out_of_memory)
        yield family
        room = admission.room
        for name, about, value in (
            ("ruvon:admitted_sequences", "Sequences admitted, waiting or running.", room.sequences),
            ("ruvon:admitted_tokens", "Their prompts and longest outputs, in tokens.", room.tokens),
            ("ruvon:max_num_queued_reqs", "Bound on the sequences.", room.limits.max_num_queued_reqs),
            ("ruvon:max_num_queued_tokens", "Bound on the tokens.", room.limits.max_num_queued_tokens),
            ("ruvon:step_token_limit", "Tokens a step may have now.", scheduler.max_num_batched_tokens),
        ):
            family = GaugeMetricFamily(name, about, labels=LABELS)
            family.add_metric(own, value)
            yield family
