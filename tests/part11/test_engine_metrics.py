"""What an engine's metrics say of what it did."""

from dataclasses import replace
from functools import partial

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.decoding.params import ParameterError, SamplingParams
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.metric_names import one_two_five
from engine.telemetry.metrics import EngineMetrics
from tests.part06.fakes import BlockCache, FakeForward, Recorder, run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEVERAL = partial(ContinuousScheduler, max_num_seqs=4, max_num_batched_tokens=16)

# As vLLM's loggers.py has them; the parser gives counters without their _total.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:request_success": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_num_preemptions": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
}
BUCKETS = {
    "vllm:time_to_first_token_seconds": """0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0
        7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0 +Inf""",
    "vllm:inter_token_latency_seconds": """0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5
        10.0 20.0 40.0 80.0 +Inf""",
    "vllm:e2e_request_latency_seconds": """0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0
        120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf""",
    "vllm:iteration_tokens_total": """1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0
        16384.0 +Inf""",
    "vllm:request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 +Inf",  # the fake model sees 200
    "vllm:request_num_preemptions": "1.0 2.0 3.0 4.0 5.0 10.0 20.0 +Inf",
}


def families(metrics: EngineMetrics) -> dict:
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_names_types_labels_and_buckets_are_vllms(measured):
    _, metrics, read = measured()
    found = families(metrics)
    assert {name: found[name].type for name in VLLM if name in found} == VLLM
    for name in VLLM:
        for sample in found[name].samples:
            assert sample.labels["model_name"] == "fake"
            assert sample.labels["engine"] == "0"
    for name, bounds in BUCKETS.items():
        assert list(read.buckets(name)) == bounds.split()
    for name in set(found) - set(VLLM):
        assert name.startswith(("ruvon:", "process_")), (
            f"{name}: what vLLM has no name for begins with ruvon:"
        )


def test_counters_begin_at_zero_so_that_the_first_event_is_an_increase(measured):
    _, metrics, _ = measured()
    for family in families(metrics).values():
        if family.type in ("counter", "histogram") and not family.name.startswith("process_"):
            assert {sample.value for sample in family.samples} <= {0.0}
    (success,) = [family for name, family in families(metrics).items() if name == "vllm:request_success"]
    reasons = [sample.labels["finished_reason"] for sample in success.samples]
    assert reasons == ["stop", "length", "abort", "error", "repetition"], "vLLM's, each at 0"


def test_buckets_for_lengths():
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(99) == (1, 2, 5, 10, 20, 50)
    assert one_two_five(1) == (1,)


def test_tokens_and_finish_reasons_add_up(measured):
    engine, _, read = measured(SEVERAL)
    engine.add_request("a", "a prompt", GREEDY)  # a byte is a token
    engine.add_request("b", "of two", replace(GREEDY, max_tokens=3))
    engine.add_request("c", "stops", replace(GREEDY, max_tokens=50, stop_token_ids=list(range(256))))
    run_to_end(engine)
    assert read("vllm:prompt_tokens_total") == 8 + 6 + 5
    assert read("vllm:generation_tokens_total") == 6 + 3 + 1
    assert read("vllm:request_success_total", finished_reason="length") == 2
    assert read("vllm:request_success_total", finished_reason="stop") == 1
    assert read.observed("vllm:request_prompt_tokens") == (3, 19)
    assert read.observed("vllm:request_generation_tokens") == (3, 10)
    assert read.observed("vllm:request_params_max_tokens") == (3, 59)
    assert read.observed("vllm:request_max_num_generation_tokens") == (3, 10)
    assert read.observed("vllm:request_params_n") == (3, 3)
    assert read.observed("vllm:inter_token_latency_seconds")[0] == 5 + 2
    assert read.observed("vllm:time_to_first_token_seconds")[0] == 3


def test_the_times_of_a_request_leave_no_second_out(measured):
    engine, _, read = measured(SEVERAL)
    for name in "abcdefg":
        engine.add_request(name, f"the prompt of {name} is in several chunks", GREEDY)
    run_to_end(engine)
    seconds = {kind: read.observed(f"vllm:request_{kind}_time_seconds")[1] for kind in
               ("queue", "prefill", "decode", "inference")}  # fmt: skip
    assert seconds["queue"] + seconds["prefill"] == pytest.approx(
        read.observed("vllm:time_to_first_token_seconds")[1]
    )
    assert seconds["prefill"] + seconds["decode"] == pytest.approx(seconds["inference"])
    assert sum(seconds[kind] for kind in ("queue", "prefill", "decode")) == pytest.approx(
        read.observed("vllm:e2e_request_latency_seconds")[1]
    )
    assert seconds["decode"] == pytest.approx(read.observed("vllm:inter_token_latency_seconds")[1])


@pytest.mark.parametrize(("max_tokens", "observed"), [(1, 0), (2, 1)])
def test_a_single_token_has_no_time_per_output_token_on_the_dashboard(measured, max_tokens, observed):
    engine, metrics, _ = measured()
    engine.add_request("a", "hello", replace(GREEDY, max_tokens=max_tokens))
    run_to_end(engine)
    times = metrics.history.copy().samples["tpot"]
    assert len(times) == observed, "time per output token is the gap between tokens: a single one has none"


def test_a_prompt_in_chunks_counts_once_and_steps_count_what_they_computed(measured):
    recorder = Recorder()
    engine, _, read = measured(SEVERAL)
    engine.listeners.add(recorder)
    engine.add_request("a", "x" * 40, GREEDY)
    run_to_end(engine)
    assert len(recorder.records) == 8  # 16 + 16 + 8 prompt tokens, then five tokens more
    assert read("vllm:prompt_tokens_total") == 40
    assert read.observed("vllm:iteration_tokens_total") == (6, 46), (
        "vLLM counts a prompt in the step of its first output token, and each output token"
    )
    assert read("ruvon:steps_total") == 8
    assert read("ruvon:step_sequences_total") == 8
    assert read("ruvon:step_tokens_total") == 45
    assert read.buckets("vllm:iteration_tokens_total")["1.0"] == 5
    steps, seconds = read.observed("ruvon:step_seconds")
    assert steps == 8
    lasted = sum(record.end - record.start for record in recorder.records)
    assert seconds == pytest.approx(lasted), "a step lasts from its start to its end"


def test_preemption_neither_counts_a_prompt_twice_nor_begins_the_clock_anew(measured):
    cache, recorder = BlockCache(num_blocks=6, block_tokens=8), Recorder()
    engine, _, read = measured(
        partial(ContinuousScheduler, max_num_seqs=4, max_num_batched_tokens=32), cache, max_model_len=48
    )
    engine.listeners.add(recorder)
    arrivals = {}
    for name in "abc":
        engine.add_request(name, f"prompt {name}", replace(GREEDY, max_tokens=16))
        arrivals[f"{name}/0"] = engine._submissions[name].samples[0].stats.arrival
    run_to_end(engine)
    preempted = [about for event, about in recorder.heard if event == "preempt"]
    assert preempted, "this cache is too small for all three"
    assert read("vllm:num_preemptions_total") == len(preempted)
    assert read("vllm:prompt_tokens_total") == 3 * 8
    assert read("vllm:generation_tokens_total") == 3 * 16
    assert read.observed("vllm:time_to_first_token_seconds")[0] == 3
    assert read("vllm:prefix_cache_queries_total") == 3 * 8
    assert read.observed("vllm:request_num_preemptions") == (3, len(preempted))
    assert read.observed("vllm:request_prefill_kv_computed_tokens") == (3, 3 * 8), "once, as vLLM counts"
    first = {}
    for record in recorder.records:
        for request_id in record.request_ids:
            first.setdefault(request_id, record.start + record.schedule_seconds)
    queued = sum(first[request_id] - arrival for request_id, arrival in arrivals.items())
    assert read.observed("vllm:request_queue_time_seconds")[1] == pytest.approx(queued)


def test_whoever_asks_for_more_tokens_than_fit_spoils_no_sum(measured):
    """10**400 is no float: it once ended the listener, and 10**300 was the histogram's sum for ever."""
    engine, metrics, read = measured()
    for exponent in (300, 400):
        engine.add_request(str(exponent), "prompt", replace(GREEDY, max_tokens=10**exponent))
    run_to_end(engine)
    room = engine.max_model_len - len("prompt")
    assert read.observed("vllm:request_params_max_tokens") == (2, 2 * room)
    assert sum(metrics.succeeded.values()) == read.observed("vllm:request_params_n")[0] == 2


def test_a_request_without_max_tokens_is_observed_with_the_room_that_it_had(measured):
    engine, _, read = measured()
    engine.add_request("a", "prompt", replace(GREEDY, max_tokens=None))
    run_to_end(engine)
    assert read.observed("vllm:request_params_max_tokens") == (1, engine.max_model_len - len("prompt"))


def test_n_samples_are_n_requests_that_asked_once(measured):
    engine, _, read = measured(SEVERAL)
    engine.add_request("a", "prompt", SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True))
    run_to_end(engine)
    assert read("vllm:request_success_total", finished_reason="length") == 3
    assert read.observed("vllm:request_params_n") == (1, 3)
    assert read.observed("vllm:e2e_request_latency_seconds")[0] == 3
    assert read("vllm:prompt_tokens_total") == 18


# Each draws its own tokens, and ends with the first that is a stop: after different times.
DIFFERENT = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True, stop_token_ids=list(range(0, 256, 8)))
LONGEST = "vllm:request_max_num_generation_tokens"


def test_of_n_samples_the_longest_counts_once_all_have_ended(measured):
    engine, _, read = measured(partial(SEVERAL, max_num_seqs=1))  # one after another
    engine.add_request("a", "prompt", DIFFERENT)
    while engine.has_unfinished_requests():
        assert read.observed(LONGEST) == (0, 0), "one of the samples has not ended"
        (output,) = engine.step()
    lengths = [len(sample.token_ids) for sample in output.outputs]
    assert lengths[-1] < max(lengths), "it tells a mistake"
    assert read.observed(LONGEST) == (1, max(lengths))


def test_a_sample_that_was_aborted_is_not_the_longest(measured):
    engine, metrics, read = measured(SEVERAL)
    engine.add_request("a", "prompt", DIFFERENT)
    ended = []
    while len(ended) < 2:
        (output,) = engine.step()
        ended = [len(sample.token_ids) for sample in output.outputs if sample.finish_reason]
    (output,) = engine.step()
    assert max(len(sample.token_ids) for sample in output.outputs) > max(ended), "it tells a mistake"
    engine.abort_request("a")
    assert read.observed(LONGEST) == (1, max(ended))
    assert metrics._in_progress == {}


def test_an_aborted_request_leaves_its_tokens_but_is_in_no_request_metric(measured):
    engine, metrics, read = measured()
    engine.add_request("a", "prompt", GREEDY)
    engine.add_request("waits", "prompt", GREEDY)
    engine.step(), engine.step()
    engine.abort_request("a")
    engine.abort_request("waits")
    assert read("vllm:generation_tokens_total") == 2
    assert read.observed("vllm:time_to_first_token_seconds")[0] == 1
    assert read("ruvon:requests_ended_early_total", reason="abort") == 2
    assert read("vllm:request_success_total", finished_reason="abort") == 2
    assert read("vllm:request_success_total", finished_reason="length") == 0
    for name in (
        "vllm:e2e_request_latency_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_queue_time_seconds",
        "vllm:request_max_num_generation_tokens",
    ):
        assert read.observed(name) == (0, 0), f"{name} is of requests that ended well"
    assert metrics._in_progress == {}


def test_a_failed_step_and_its_request_are_counted(measured):
    cache = BlockCache(64, 16)
    forward = FakeForward(cache)
    forward.fail_at[2] = RuntimeError("the cable came loose")
    engine, metrics, read = measured(cache=cache, forward=forward)
    engine.add_request("a", "one", GREEDY)
    engine.add_request("b", "two", GREEDY)
    run_to_end(engine)
    assert read("ruvon:failed_steps_total") == 1
    assert read("ruvon:requests_ended_early_total", reason="error") == 1
    assert read("vllm:request_success_total", finished_reason="error") == 1
    assert read("vllm:request_success_total", finished_reason="length") == 1
    assert metrics._in_progress == {}


def test_a_refused_request_is_counted(measured):
    engine, _, read = measured()
    with pytest.raises(ParameterError):
        engine.add_request("a", "x" * 1000, GREEDY)
    assert read("ruvon:requests_ended_early_total", reason="reject") == 1
