"""What the metrics know of one request: how far it has come, and at its end its times and sizes. Part 11.

metrics.py fills these records from what the engine tells it.
"""

from dataclasses import dataclass, field

from engine.requests.request import Request
from engine.telemetry.metric_names import TPOT


@dataclass(slots=True)
class SampleGroup:
    """The n samples of one user's request. Each sample is a Request of its own."""

    under_way: int = 0  # samples that have not ended
    max_output_tokens: int = 0  # the most tokens of a sample that has ended well


@dataclass(slots=True)
class RequestProgress:
    """What the metrics have counted of a request that has not ended."""

    request: Request
    scheduled: float | None = None  # when it was first scheduled, by the monotonic clock; None before
    num_counted: int = 0  # output tokens counted so far
    group: SampleGroup = field(default_factory=SampleGroup)


@dataclass(frozen=True)
class Times:
    """The times of a finished request, in seconds. queue + prefill + decode = e2e."""

    queue: float  # from the arrival to the first step
    prefill: float  # from the first step to the first output token
    decode: float  # from the first output token to the last
    inference: float  # prefill + decode
    e2e: float  # from the arrival to the last output token


def observations(request: Request, times: Times) -> dict[str, float]:
    """What the histograms observe of a request that has ended well: name of the histogram -> value. Times are
    in seconds, sizes in tokens.
    """
    return {
        "vllm:e2e_request_latency_seconds": times.e2e,
        "vllm:request_queue_time_seconds": times.queue,
        "vllm:request_prefill_time_seconds": times.prefill,
        "vllm:request_decode_time_seconds": times.decode,
        "vllm:request_inference_time_seconds": times.inference,
        TPOT: request.stats.time_per_output_token,
        "vllm:request_prompt_tokens": request.num_prompt_tokens,
        "vllm:request_generation_tokens": len(request.stats.token_times),
        # `limit` is at most what the model has room for, so that no sum becomes too large for a float. The
        # client's max_tokens has no bound.
        "vllm:request_params_max_tokens": request.output.limit,
        "vllm:request_prefill_kv_computed_tokens": request.num_prompt_tokens - request.num_cached_tokens,
        "vllm:request_num_preemptions": request.num_preemptions,
    }
