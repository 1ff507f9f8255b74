"""The names of the engine's metrics, with their documentation, labels and buckets. Part 11.

They are those of vLLM's V1 engine, so that dashboards made for vLLM show this engine, too. A metric that vLLM
does not have has a name that begins with `ruvon:`. metrics.py does the counting. Source:
vllm/v1/metrics/loggers.py, https://github.com/vllm-project/vllm.
"""

LABEL_NAMES = ("model_name", "engine")
ENGINE = "0"  # the value of the label `engine`: vLLM numbers its replicas; a server here has one

COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens, counted with the first output token.",
    "vllm:generation_tokens": "Output tokens.",
    "vllm:num_preemptions": "Running requests whose memory was taken for others.",
    "vllm:prompt_tokens_cached": "Prompt tokens that the cache had (Part 12), counted with the first output.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the cache when their request first ran.",
    "vllm:prefix_cache_hits": "Prompt tokens whose keys and values the cache had (Part 12).",
    "ruvon:steps": "Steps of the engine.",
    "ruvon:failed_steps": "Steps that ended with an error, so that their work was for nothing.",
    "ruvon:step_sequences": "Requests in all steps together; divided by the steps: the batch size.",
    "ruvon:step_tokens": "Tokens computed in all steps together, prompts and outputs.",
}
# Counters with one more label: name -> (the label, documentation).
LABELLED_COUNTERS = {
    "vllm:prompt_tokens_by_source": ("source", "Prompt tokens, by where they come from."),
    "vllm:request_success": ("finished_reason", "Requests that have ended, by the reason."),
    "ruvon:requests_ended_early": (
        "reason",
        "Requests that were aborted, failed, or were refused by the engine.",
    ),
    "ruvon:executor": ("counter", "Counters that the executor reports per step."),
}
SUCCESS_REASONS = ("stop", "length")
EARLY_REASONS = ("abort", "error", "reject")  # vLLM leaves such requests out of its request metrics
# The reasons of vllm:request_success, all of which are shown from the start. No request here ends for
# "repetition"; vLLM's do.
FINISHED_REASONS = (*SUCCESS_REASONS, "abort", "error", "repetition")

# The upper bounds of the histograms' buckets. Times are in seconds.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # not from vLLM
TOKENS_PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

# The two latencies that people wait for; the dashboards show them, too.
TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"


def one_two_five(maximum: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `maximum`: vLLM's bucket bounds for counts up to the model's length."""
    bounds, power = [], 1
    while power <= maximum:
        bounds += [factor * power for factor in (1, 2, 5) if factor * power <= maximum]
        power *= 10
    return tuple(bounds)


def histograms(max_model_len: int) -> dict[str, tuple[str, tuple[float, ...]]]:
    """name -> (documentation, upper bounds of the buckets). `max_model_len` is in tokens."""
    lengths = one_two_five(max_model_len)
    return {
        "vllm:iteration_tokens_total": (
            "Output tokens of a step, and prompts whose first output token is among them.",
            TOKENS_PER_STEP,
        ),
        TTFT: ("Seconds from arrival to the first output token.", FIRST_TOKEN),
        "vllm:inter_token_latency_seconds": (
            "Seconds between two steps that brought a request tokens, however many each brought.",
            BETWEEN_TOKENS,
        ),
        TPOT: ("Decode seconds of a finished request by its output tokens but one.", BETWEEN_TOKENS),
        "vllm:e2e_request_latency_seconds": ("Seconds from arrival to the last output token.", LATENCY),
        "vllm:request_queue_time_seconds": ("Seconds from arrival to the request's first step.", LATENCY),
        "vllm:request_prefill_time_seconds": ("Seconds from first step to first output token.", LATENCY),
        "vllm:request_decode_time_seconds": ("Seconds from the first output token to the last.", LATENCY),
        "vllm:request_inference_time_seconds": ("Seconds from first step to last output token.", LATENCY),
        "vllm:request_prompt_tokens": ("Prompt tokens of a finished request.", lengths),
        "vllm:request_generation_tokens": ("Output tokens of a finished request.", lengths),
        "vllm:request_max_num_generation_tokens": ("Output tokens of the longest of n samples.", lengths),
        "vllm:request_params_max_tokens": ("Most output tokens that a finished request could have.", lengths),
        "vllm:request_params_n": ("n of a request, once for all its samples.", (1, 2, 5, 10, 20)),
        "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens that the cache did not have.", lengths),
        "vllm:request_num_preemptions": ("How often a finished request was preempted.", PREEMPTIONS),
        "ruvon:step_seconds": ("Seconds that a step took.", STEP),
    }
