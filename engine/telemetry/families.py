"""Prometheus' metric families with an engine's labels, for `collect` methods. Part 11.

Each function makes one family. Every sample has the labels `model_name` and `engine`; with `label`, one more.
Knows no engine: the caller passes the values.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from engine.telemetry.metric_names import ENGINE, LABEL_NAMES

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


def counter(name: str, documentation: str, model_name: str, value: float) -> CounterMetricFamily:
    """A counter with one sample."""
    return _with_one_sample(CounterMetricFamily, name, documentation, model_name, value)


def counter_by(
    label: str, name: str, documentation: str, model_name: str, values: Mapping[str, float]
) -> CounterMetricFamily:
    """A counter with a sample for each entry of `values`: value of the label `label` -> value."""
    return _with_samples(CounterMetricFamily, label, name, documentation, model_name, values)


def gauge(name: str, documentation: str, model_name: str, value: float) -> GaugeMetricFamily:
    """A gauge with one sample."""
    return _with_one_sample(GaugeMetricFamily, name, documentation, model_name, value)


def gauge_by(
    label: str, name: str, documentation: str, model_name: str, values: Mapping[str, float]
) -> GaugeMetricFamily:
    """A gauge with a sample for each entry of `values`: value of the label `label` -> value."""
    return _with_samples(GaugeMetricFamily, label, name, documentation, model_name, values)


def histogram(
    name: str, documentation: str, model_name: str, buckets: Sequence[tuple[str, float]], total: float
) -> HistogramMetricFamily:
    """A histogram. `buckets`: as `Histogram.prometheus_buckets` returns them. `total`: the sum of the
    observations.
    """
    family = HistogramMetricFamily(name, documentation, labels=LABEL_NAMES)
    family.add_metric((model_name, ENGINE), buckets, total)
    return family


def _with_one_sample(
    kind: type[Family], name: str, documentation: str, model_name: str, value: float
) -> Family:
    """A family of the class `kind` with one sample."""
    family = kind(name, documentation, labels=LABEL_NAMES)
    family.add_metric((model_name, ENGINE), value)
    return family


def _with_samples(
    kind: type[Family],
    label: str,
    name: str,
    documentation: str,
    model_name: str,
    values: Mapping[str, float],
) -> Family:
    """A family of the class `kind` with a sample for each value of the label `label`."""
    family = kind(name, documentation, labels=(*LABEL_NAMES, label))
    for label_value, value in values.items():
        family.add_metric((model_name, ENGINE, label_value), value)
    return family
