"""Metrics as a scraper sees them."""

from prometheus_client import CollectorRegistry


class Reading:
    """reading("vllm:generation_tokens_total") -> its value now; more labels by name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "fake", "engine": "0", **labels})

    def observed(self, name: str) -> tuple[int, float]:
        """Of a histogram: how many observations, and their sum."""
        return self(f"{name}_count"), self(f"{name}_sum")

    def buckets(self, name: str) -> dict[str, float]:
        """Of a histogram: upper bound -> cumulative count."""
        (family,) = [family for family in self.registry.collect() if family.name == name]
        return {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
