"""One request's times, from its stamps; and its tokens, as they come."""

import pytest

from engine.decoding.outputs import RequestStats
from engine.telemetry.metrics import times_of
from engine.telemetry.request_times import RequestProgress, Times
from tests.part06.steps import make_request

STATS = RequestStats(arrival=10.0, token_times=[13.0, 14.0, 16.5])
INTER = "vllm:inter_token_latency_seconds"
FIRST = "vllm:time_to_first_token_seconds"


@pytest.fixture
def times() -> Times:
    return times_of(STATS, scheduled=11.0)


def test_queue_time_is_from_arrival_to_the_first_step(times):
    assert times.queue == 1.0, "queue: from arrival (10) to its first step (11)"


def test_prefill_time_begins_with_its_first_step(times):
    assert times.prefill == 2.0, (
        "prefill: from its first step (11), not from arrival, to its first token (13)"
    )


def test_decode_time_is_from_the_first_token_to_the_last(times):
    assert times.decode == 3.5, "decode: from the first token (13) to the last (16.5)"


def test_inference_time_is_prefill_and_decode(times):
    assert times.inference == 5.5, "inference: from its first step (11) to its last token (16.5)"


def test_end_to_end_begins_with_arrival(times):
    assert times.e2e == 6.5, "e2e: from arrival (10) to the last token (16.5)"


def test_a_single_token_has_no_decode_time():
    times = times_of(RequestStats(arrival=10.0, token_times=[13.0]), scheduled=11.0)
    assert times == Times(queue=1.0, prefill=2.0, decode=0.0, inference=2.0, e2e=3.0), (
        "a single token is the first and the last: its decode time is 0"
    )


@pytest.fixture
def tokens(measured):
    """tokens(*when) -> a step in which tokens came at these times to a request that arrived at 10 with a
    prompt of 7; then the reader.
    """
    _, metrics, reading = measured()
    reading.history = metrics.history
    progress = RequestProgress(make_request("a", prompt=7, output=50))
    progress.request.stats.arrival, progress.scheduled = 10.0, 11.5
    progress.request.num_cached_tokens = 4  # found in a prefix cache: tokens of the prompt, too

    def come(*when: float):
        progress.request.stats.token_times += when
        progress.request.token_ids += [1] * len(when)
        metrics._observe_tokens(progress)
        return reading

    return come


def test_the_first_token_is_a_wait_and_no_gap(tokens):
    read = tokens(12.0)
    assert read.observed(FIRST) == (1, 2.0), "the first token: its wait since arrival (10 to 12) is observed"
    assert read.observed(INTER) == (0, 0.0), "the first token has none before it: no inter-token latency"
    assert read("vllm:generation_tokens_total") == 1, "the first token counts as an output token"


def test_the_first_tokens_wait_is_noted_for_the_dashboard(tokens):
    noted = list(tokens(12.0).history.copy().samples["ttft"])
    assert noted == [(12.0, 2.0)], (
        "the first token's wait goes to history.sample, kind ttft: it came at 12, after 2 seconds"
    )


def test_tokens_that_come_with_the_first_are_no_gap(tokens):
    read = tokens(12.0, 12.0)
    assert read.observed(INTER) == (0, 0.0), "a gap begins with a token seen in an earlier step"
    assert read("vllm:generation_tokens_total") == 2, "each output token is counted once, in the step it came"


def test_later_tokens_are_gaps_and_no_waits(tokens):
    tokens(12.0)
    read = tokens(12.25)
    assert read.observed(INTER) == (1, 0.25), (
        "a gap reaches from the last token seen (12) to the newest (12.25)"
    )
    assert read.observed(FIRST) == (1, 2.0), "time to first token is observed once, with the first token"


def test_each_token_counts_once(tokens):
    tokens(12.0)
    tokens(12.5)
    read = tokens(13.0)
    assert read("vllm:generation_tokens_total") == 3, "each output token is counted once, in the step it came"
    assert read.observed(INTER) == (2, 1.0), "two gaps, of 0.5 and 0.5: each begins where the last one ended"


def test_the_prompt_counts_once_with_the_first_token(tokens):
    tokens(12.0)
    read = tokens(12.5)
    assert read("vllm:prompt_tokens_total") == 7, (
        "the prompt's 7 tokens are counted with the first token, once, and no output tokens among them; "
        "those that a cache had are counted, too"
    )


def test_tokens_that_come_together_are_one_gap(tokens):
    tokens(12.0)
    read = tokens(12.5, 12.5, 12.5)
    assert read.observed(INTER) == (1, 0.5), (
        "a step is one gap, however many tokens it brought (drafts, Part 16)"
    )
    assert read("vllm:generation_tokens_total") == 4, "all tokens of a step are counted"
    assert tokens(12.75).observed(INTER) == (2, 0.75), "the next gap begins with the newest of them"


def test_after_tokens_that_came_together_each_token_counts_once(tokens):
    tokens(12.0)
    tokens(12.5, 12.5, 12.5)
    tokens(13.0, 13.0, 13.0)
    read = tokens(13.5)
    counted = read("vllm:generation_tokens_total")
    assert counted == 8, (
        "1, 3, 3 and 1 tokens are 8: num_counted becomes the number of all output tokens, not one more; "
        f"{counted:.0f} were counted"
    )
    assert read.observed(INTER) == (3, 1.5), (
        "three gaps of 0.5: each begins with the newest token of the last step"
    )


def test_what_comes_together_with_the_first_token_takes_nothing_from_it(tokens):
    read = tokens(12.0, 12.0)
    assert (read.observed(FIRST), read("vllm:prompt_tokens_total")) == ((1, 2.0), 7), (
        "the first token has its wait and the prompt is counted, however many tokens came with it"
    )
