"""What articles 1 to 9 say in words about their records holds for the records that stand.

A record that is taken again changes the numbers by itself; a sentence has to be written again.
"""

import pytest

from benchmarks.record import read_record
from tests.series.sentences import figures, rows_of, spread_of


def ratios(model: str) -> dict:
    return figures("part03_memory_bound")[model]["threads_1"]["ratios"]


def test_a_word_cache_is_what_helps_on_stories_and_saves_nothing_on_words_that_never_come_back():
    rows = {row[0]: row for row in read_record("part01_tokenizer")["tables"]["speed"]["rows"]}
    stories, random_words = ({name: spread_of(row[at]) for name, row in rows.items()} for at in (1, 3))
    ours, *rust = "heap + word cache (the engine)", *(name for name in rows if "Rust" in name)
    assert figures("part01_tokenizer")["text"]["heap_over_rescan"] < 1.1, "next to nothing"
    assert all(stories[ours][0] > stories[side][1] for side in rows if side != ours)
    assert all(random_words[ours][1] < random_words[side][0] for side in rust)
    assert random_words[ours][0] < random_words["heap"][1]


def test_reading_is_most_of_a_large_models_step_in_another_kernel_alone_and_never_of_storytellers():
    share = {}
    for model in ("storyteller", "gpt2_shape"):
        assert ratios(model)["bare_read_of_a_step"] < 0.5
        found = figures("part03_memory_bound")[model]["threads_1"]
        beside_reading = found["step_ms"] - found["bare_read_ms"]["fp32"]
        in_the_layers = found["split"]["layers_plain_ms"] - found["bare_read_ms"]["fp32"]
        assert in_the_layers > beside_reading / 2, "above all nn.Linear"
        share[model] = found["bare_read_ms"]["fp32"] / found["forms"]["Blocked"]["step_ms"]
    assert share["storyteller"] < 0.5 < share["gpt2_shape"]


def test_eight_tokens_cost_a_large_model_far_less_than_eight_times_the_time():
    assert ratios("gpt2_shape")["eight_tokens_over_one"] < 4


def test_packing_gains_more_than_half_the_bytes_could():
    gain = figures("part03_kv_cache")["packing_gains"]
    assert gain > ratios("storyteller")["gain_if_bytes_alone"]
    assert ratios("storyteller")["gain_of_half"] == pytest.approx(gain, rel=0.1), "about as much"
    found = figures("part03_memory_bound")["storyteller"]["threads_1"]
    saved = found["split"]["layers_plain_ms"] - found["split"]["layers_half_ms"]
    assert saved > 2 * found["bare_read_ms"]["fp32"], "no reading at all would save less than half of it"


def test_a_step_on_two_threads_takes_from_0_6_to_1_6_times_as_long_as_on_one():
    rows = {tuple(row[:3]): row for row in rows_of("part03_memory_bound", "steps")}
    least, most = spread_of(f"({rows['storyteller', 2, '`nn.Linear`'][5]})")
    one = rows["storyteller", 1, "`nn.Linear`"][4]
    assert (round(least / one, 1), round(most / one, 1)) == (0.6, 1.6)


@pytest.mark.parametrize("side", ["full", "cached", "packed", "hf", "hf_compiled", "ctranslate2", "bare"])
def test_two_threads_help_the_loop_without_a_cache_alone(side):
    one, two = (figures("part03_kv_cache")["tokens_per_second"][threads][side] for threads in "12")
    assert (two > one) == (side == "full")


def test_without_its_cache_hugging_face_takes_longer_and_with_it_is_times_faster():
    found = figures("part02_growth")
    sides = {row[0]: row for row in read_record("part02_growth")["tables"]["sides"]["rows"]}
    ours, theirs, every_row = (
        spread_of(f"({sides[name][2]})")
        for name in (
            "this loop (FullForward)",
            "Hugging Face, use_cache=False",
            "this loop, logits for every row",
        )
    )
    assert ours[1] < theirs[0]
    assert ours[1] < every_row[0]
    assert found["hf_cache_over_ours"] > 2


def test_what_the_server_adds_is_less_than_a_tenth_of_a_step_of_20_ms():
    found = figures("part04_server_overhead")
    per_token_us = (
        (found["cpu_ms"]["HTTP, streamed"] - found["cpu_ms"]["Part 3's loop"]) / found["new_tokens"] * 1e3
    )
    assert 0 < per_token_us < 0.1 * 20_000


def test_of_what_a_server_adds_streaming_and_the_thread_cost_something_in_every_turn():
    found = figures("part04_server_overhead")
    turns = {name: spread_of(f"({cell})") for name, cell in found["us_per_token_in_turns"].items()}
    assert [name for name, (least, _) in turns.items() if least > 0] == ["hop_adds", "streaming_adds"]
    least, most = turns["hop_adds"]
    assert least < found["us_per_token"]["bare_hop"] < most, "whether a thread changes more is not told"
    rows = read_record("part04_server_overhead")["tables"]["ways"]["rows"]
    ways = {row[0]: spread_of(f"({row[4]})") for row in rows}
    steps = ("the loop, each step in a thread", "backend, no HTTP", "HTTP, in one piece", "HTTP, streamed")
    before = ("Part 3's loop", *steps[:-1])
    overlaps = [ways[b][0] < ways[a][1] for a, b in zip(before, steps, strict=True)]
    assert overlaps == [False, True, True, True], "the table alone allows the thread"


def test_at_temperature_1_5_top_p_leaves_most_of_the_gibberish_and_min_p_next_to_none():
    unknown = {name: found["unknown_per_hundred"] for name, found in figures("part05_knobs")["text"].items()}
    assert unknown["temperature 1.5, top-p 0.9"] > unknown["temperature 1.5"] / 2
    assert unknown["temperature 1.5, min-p 0.1"] < 0.1
    assert unknown["temperature 0.7"] == 0


def test_to_sort_a_row_of_gpt2_takes_pytorch_longer_than_a_forward_pass_and_numpy_not():
    found = figures("part05_sampling")
    assert (
        found["torch_sort_over_forward"]
        > 1
        > found["torch_sort_over_forward"] / found["torch_sort_over_np_sort"]
    )
    assert found["hf_row_by_row_over_ours"] > 1.5


def test_the_engines_thread_costs_what_part_4s_lock_costs():
    rows = {row[0]: row[2] for row in read_record("part06_queue")["tables"]["cost"]["rows"]}
    lock, thread = rows["Part 4's backend (lock, a thread hop per token)"], rows["engine in its own thread"]
    assert thread == pytest.approx(lock, rel=0.1)


def test_what_the_engine_adds_to_a_token_is_less_than_the_loops_rounds_differ_by():
    found = read_record("part06_queue")
    least, most = spread_of(found["tables"]["cost"]["rows"][0][1])
    assert 0 < found["figures"]["bookkeeping_us"] < found["figures"]["engine_adds_us"] < (most - least) * 1e3
    assert 0.4 < found["figures"]["ms_per_token"]["engine, stepped by hand"] < 0.65, "half a millisecond"


def test_the_last_in_the_queue_has_its_first_word_when_everybody_else_has_the_last():
    found = figures("part06_queue")
    assert found["queue_first_ms"][7] > 0.95 * found["queue_last_ms"][6]


def test_the_line_is_near_between_2_and_16_and_misses_by_an_eighth_at_most_at_its_ends():
    small, large = (figures("part07_line")[model] for model in ("storyteller", "gpt2_shape"))
    assert max(small["off_at_most"], large["off_at_most"]) < 0.1
    ends = [abs(off) for model in (small, large) for off in (model["off"][0], model["off"][-1])]
    assert max(ends) == pytest.approx(1 / 8, abs=0.015)
    each_from_8_on = (large["step_ms"][-1] - large["step_ms"][3]) / 24
    assert 1.25 < each_from_8_on / large["by_hand"]["each_ms"] < 1.35, "over a quarter more"
    assert large["off"][0] < -0.1, "one request takes more than the line says"
    assert abs(small["off"][0]) < 0.05, "storyteller's whole step hardly shows the shorter way"


def test_a_single_request_of_storyteller_takes_a_shorter_way_through_attention():
    one, two, five = figures("part07_batching")["split"]["storyteller"]["attention_ms"][:3]
    assert two - one > 2 * (five - two) / 3, "more than a further row costs"


def test_one_more_row_costs_far_less_than_a_step_of_its_own():
    found = figures("part07_line")["storyteller"]
    assert found["each_ms"] < found["step_ms"][0] / 3


def test_five_rows_share_the_linear_layers_and_reading_is_most_of_a_large_models():
    small, large = (figures("part07_batching")["split"][model] for model in ("storyteller", "gpt2_shape"))
    assert small["linear_ms"][2] < 2 * small["linear_ms"][0]
    assert small["bare_read_ms"] < small["linear_ms"][0] / 2
    assert large["bare_read_ms"] > large["linear_ms"][0] / 2


def test_of_five_together_only_the_first_two_would_have_been_done_sooner_in_series():
    found = figures("part07_batching")
    one_story = found["series"]["seconds"] / 5
    assert 2 * one_story < found["batch"]["seconds"] < 3 * one_story
    assert found["batch"]["mean_wait_seconds"] < found["series"]["mean_wait_seconds"]


def test_a_padded_batch_of_prompts_takes_longer_than_a_loop_and_a_packed_one_does_not():
    found = figures("part07_batching")
    assert found["packed_over_one"] < 1 < found["padded_over_one"]


def test_what_is_reckoned_of_continuous_over_static_is_near_what_is_measured():
    reckoned = figures("part08_predicted")["storyteller"]["over_static"]
    race = figures("part08_schedulers")
    assert race["continuous_over_static"] == pytest.approx(reckoned, abs=0.06)
    assert race["continuous_over_static_least"] < 1
    assert reckoned < race["continuous_over_static"], "prompts bring it nearer to 1"
    line, steps = figures("part07_line")["storyteller"]["by_hand"], figures("part08_predicted")["steps"]
    by_hand = [
        steps[name] * line["once_ms"] + steps["fifo"] * line["each_ms"] for name in ("continuous", "static")
    ]
    assert round(by_hand[0] / by_hand[1], 2) == 0.84, "with the two numbers by hand"
    medians = [race["seconds"][name]["median"] for name in race["seconds"]]
    assert round(medians[-1] / medians[-2], 2) == 0.95, "as the table's medians divide"


def test_first_words_come_sooner_with_each_scheduler():
    found = figures("part08_http_latency")
    fifo, static = found["fifo_first_words_ms_p95"], found["static_first_words_ms_p95"]
    assert found["first_words_ms_p95"] < static < fifo
    assert figures("part08_schedulers")["short_wait_over_static"] < 0.6


def test_tiles_are_quicker_than_eager_from_512_tokens_on_and_by_far_at_the_longest():
    rows = read_record("part09_growth")["tables"]["growth"]["rows"]
    eager, tiled, sdpa = ([spread_of(row[at].replace(",", "")) for row in rows] for at in (1, 2, 3))
    assert rows[1][0] == 512
    assert eager[0][0] < tiled[0][1], "at 256 not in every round"
    assert all(of_tiles[1] < of_eager[0] for of_eager, of_tiles in zip(eager[1:], tiled[1:], strict=True))
    assert eager[-1][0] > 4 * tiled[-1][1], "more than four times, by its quickest round"
    assert eager[-1][1] > 1.5 * eager[-1][0], "and its rounds lie far apart"
    assert eager[-1][0] > 7 * sdpa[-1][1], "more than seven times sdpa's"


def test_tiles_of_256_are_no_faster_than_of_128_and_hold_nearly_twice_as_much():
    found = figures("part09_growth")["tile_sizes"]
    at_128, at_256 = found["tiles"].index(128), found["tiles"].index(256)
    assert found["rounds"][at_256]["median"] > found["rounds"][at_128]["first"]
    assert 1.6 < found["mb"][at_256] / found["mb"][at_128] < 2
