"""`LLM.get_metrics`: the engine's metrics as records, with vLLM's classes and names. Part 20."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family

PREFIXES = ("vllm:", "ruvon:")  # of the engine's own metrics; the others are those of the process


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int | float


@dataclass
class Gauge(Metric):
    """A number at this moment."""

    value: float


@dataclass
class Histogram(Metric):
    """How often a value was at most each bound. The counts include those of all smaller bounds."""

    count: int
    sum: float
    buckets: dict[str, int]  # bound, as text -> count; the last bound is "+Inf"


def read_metrics(registry: CollectorRegistry) -> list[Metric]:
    """The metrics of the registry whose names begin with one of PREFIXES, in the registry's order."""
    metrics: list[Metric] = []
    for family in registry.collect():
        if family.name.startswith(PREFIXES):
            metrics += _metrics_of(family)
    return metrics


def _metrics_of(family: Family) -> Iterator[Metric]:
    """The metrics of one family: one for each set of labels. There are none if the family is no histogram,
    counter or gauge.
    """
    if family.type == "histogram":
        yield from _histograms_of(family)
    elif family.type == "counter":
        for sample in family.samples:
            if sample.name == f"{family.name}_total":  # the other sample is the time of its creation
                is_whole = sample.value == int(sample.value)
                value = int(sample.value) if is_whole else sample.value
                yield Counter(family.name, dict(sample.labels), value)
    elif family.type == "gauge":
        for sample in family.samples:
            yield Gauge(family.name, dict(sample.labels), sample.value)


def _histograms_of(family: Family) -> Iterator[Histogram]:
    """The histograms of one family. Prometheus has a sample for each bucket, whose label `le` is the bound,
    and two more for count and sum.
    """
    histograms: dict[tuple, Histogram] = {}  # by labels, without `le`
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        empty = Histogram(family.name, labels, count=0, sum=0.0, buckets={})
        histogram = histograms.setdefault(tuple(labels.items()), empty)
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    yield from histograms.values()
