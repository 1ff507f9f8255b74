"""What articles 2 to 4 say in words about their records holds for the records that stand.

A record that is taken again changes the numbers by itself; a sentence has to be written again.
"""

import pytest

from benchmarks.record import read_record


def figures(name: str) -> dict:
    return read_record(name)["figures"]


def ratios(model: str) -> dict:
    return figures("part03_memory_bound")[model]["threads_1"]["ratios"]


def test_most_of_a_large_models_step_is_reading_and_less_than_half_of_storytellers():
    assert ratios("storyteller")["bare_read_of_a_step"] < 0.5 < ratios("gpt2_shape")["bare_read_of_a_step"]


def test_eight_tokens_cost_a_large_model_far_less_than_eight_times_the_time():
    assert ratios("gpt2_shape")["eight_tokens_over_one"] < 4


def test_packing_gains_more_than_half_the_bytes_could():
    assert figures("part03_kv_cache")["packing_gains"] > ratios("storyteller")["gain_if_bytes_alone"]


@pytest.mark.parametrize("side", ["full", "cached", "packed", "hf", "hf_compiled", "ctranslate2", "bare"])
def test_two_threads_help_the_loop_without_a_cache_alone(side):
    one, two = (figures("part03_kv_cache")["tokens_per_second"][threads][side] for threads in "12")
    assert (two > one) == (side == "full")


def test_without_its_cache_hugging_face_is_about_as_fast_and_with_it_times_faster():
    found = figures("part02_growth")
    assert 0.85 < found["over_hf_without_cache"] < 1.15
    assert found["hf_cache_over_ours"] > 2


def test_what_the_server_adds_is_less_than_a_tenth_of_a_step_of_20_ms():
    found = figures("part04_server_overhead")
    per_token_us = (
        (found["cpu_ms"]["HTTP, streamed"] - found["cpu_ms"]["Part 3's loop"]) / found["new_tokens"] * 1e3
    )
    assert 0 < per_token_us < 0.1 * 20_000
