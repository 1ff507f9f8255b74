"""What work a request caused in a step."""

from engine.telemetry.shares import Weights, Work, work_of

W = Weights(input=10, output=100, held=1)


def work(start: int, end: int, *, prompt: int = 8, cached: int = 0, reached: int | None = None) -> Work:
    """By default, all before `start` was reached, and nothing more."""
    reached = start if reached is None else reached
    return work_of(prompt=prompt, cached=cached, reached=reached, start=start, end=end, weights=W)


def test_a_prompt_is_input():
    assert work(0, 8) == Work(input=8 * 10 + 8), (
        "eight prompt tokens at weights.input, and eight held tokens: all of it is input"
    )


def test_the_next_token_is_output_and_reads_all_that_is_held():
    assert work(8, 9) == Work(output=100 + 9), (
        "one output token at weights.output, and nine held tokens, the new one and all before it"
    )


def test_a_chunk_counts_its_own_tokens_and_reads_those_before_it():
    assert work(4, 8) == Work(input=4 * 10 + 8), (
        "the second chunk: four tokens computed, eight held; what was computed before is not again"
    )


def test_several_tokens_at_once_behind_the_prompt_are_output():
    assert work(8, 12) == Work(output=4 * 100 + 12), "behind the prompt every token is output (drafts)"


def test_cached_tokens_cost_what_it_takes_to_read_them():
    assert work(6, 8, cached=6) == Work(cached=6, input=2 * 10 + 2), (
        "six of the eight held tokens were found: they bear their own reading, and no computing"
    )


def test_once_the_prompt_is_read_the_output_bears_the_cached_tokens_too():
    assert work(8, 9, cached=6) == Work(output=100 + 9), (
        "a step of output reads all held tokens for the output's sake, cached ones as well"
    )


def test_what_was_computed_before_is_recomputed_and_weighs_as_input():
    assert work(0, 10, reached=10) == Work(recomputed=10 * 10 + 10), (
        "after a preemption: eight prompt tokens and two output tokens again, each at weights.input"
    )


def test_a_chunk_may_go_beyond_what_was_reached():
    assert work(0, 10, reached=9) == Work(recomputed=9 * 10, output=100 + 10), (
        "nine tokens again, then a new one: the kind of the last token bears the reading"
    )
    assert work(0, 12, prompt=20, reached=8) == Work(recomputed=8 * 10, input=4 * 10 + 12), (
        "eight prompt tokens again, then four new ones"
    )


def test_recomputing_behind_a_cached_beginning():
    assert work(4, 12, prompt=20, cached=4, reached=12) == Work(recomputed=8 * 10 + 12), (
        "all computed tokens are recomputed, so that kind bears the reading, of cached tokens too"
    )


def test_a_step_across_the_prompts_end_reads_for_its_last_token():
    assert work(4, 10) == Work(input=4 * 10, output=2 * 100 + 10), (
        "four prompt tokens and two behind them: the last one is output, so output bears all of the reading"
    )
