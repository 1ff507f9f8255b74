"""What articles say in words about their records holds for the records that stand.

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


def test_the_last_in_the_queue_has_its_first_word_when_everybody_else_has_the_last():
    found = figures("part06_queue")
    assert found["queue_first_ms"][7] > 0.95 * found["queue_last_ms"][6]


def test_the_line_says_too_much_for_one_request_and_too_little_for_32_of_the_larger_model():
    found = figures("part07_line")
    assert found["storyteller"]["off"][0] > 0
    assert found["gpt2_shape"]["off"][-1] < -0.05


def test_five_rows_share_the_linear_layers_and_reading_is_most_of_a_large_models():
    small, large = (figures("part07_batching")["split"][model] for model in ("storyteller", "gpt2_shape"))
    assert small["linear_ms"][2] < 2 * small["linear_ms"][0]
    assert small["bare_read_ms"] < small["linear_ms"][0] / 2
    assert large["bare_read_ms"] > large["linear_ms"][0] / 2


def test_of_five_together_only_the_first_would_have_been_done_sooner_in_series():
    found = figures("part07_batching")
    one_story = found["series"]["seconds"] / 5
    assert one_story < found["batch"]["seconds"] < 2 * one_story


def test_a_padded_batch_of_prompts_takes_longer_than_a_loop_and_a_packed_one_does_not():
    found = figures("part07_batching")
    assert found["packed_over_one"] < 1 < found["padded_over_one"]


def test_what_is_reckoned_of_continuous_over_static_is_near_what_is_measured():
    reckoned = figures("part08_predicted")["storyteller"]["over_static"]
    assert figures("part08_schedulers")["continuous_over_static"] == pytest.approx(reckoned, abs=0.08)


def test_first_words_come_sooner_with_each_scheduler():
    found = figures("part08_http_latency")
    fifo, static = found["fifo_first_words_ms_p95"], found["static_first_words_ms_p95"]
    assert found["first_words_ms_p95"] < static < fifo
    assert figures("part08_schedulers")["short_wait_over_static"] < 0.6


def test_the_table_costs_less_than_the_rounds_differ_by_and_c_was_quicker_in_each():
    slots, by_ragged, by_c = figures("part12_table")["seconds"].values()
    ratio = sorted(page / slot for page, slot in zip(by_ragged, slots, strict=True))
    assert ratio[0] < 1 < ratio[-1]
    assert all(page < slot for page, slot in zip(by_c, slots, strict=True))


def test_launching_was_most_of_one_sequences_step_and_for_256_the_step_ahead_brings_most():
    eager, graph, tuned, ahead = (
        figures("part13_launches")["launches"][way] for way in ("eager", "graph", "tuned", "ahead")
    )
    assert 0.75 < 1 - graph["b1"] / eager["b1"] < 0.8, "nearly four fifths"
    assert tuned["b1"] < graph["b1"] / 2, "tuned kernels more than halve the rest"
    assert 0.07 < 1 - ahead["b1"] / tuned["b1"] < 0.13, "a tenth"
    gains = [eager["b256"] - graph["b256"], graph["b256"] - tuned["b256"], tuned["b256"] - ahead["b256"]]
    assert max(gains) == gains[-1]


@pytest.mark.parametrize("users", ["1", "8", "32"])
def test_a_stream_has_its_first_word_sooner_and_its_last_one_later(users):
    found = figures("part14_streaming")["users"][users]
    stream, piece = found["stream"], found["one piece"]
    assert stream["first_word_ms"] < piece["first_word_ms"]
    assert stream["last_word_ms"] > piece["last_word_ms"]


def in_steps(figure: str) -> dict[str, dict]:
    """Of each side of part14_stream_interval, the figure's median and quartiles."""
    sides = figures("part14_stream_interval")["in_steps"]
    return {name.removeprefix("stream, tokens an event: "): side[figure] for name, side in sides.items()}


def test_neither_readers_nor_the_switch_interval_keep_the_engine_and_a_tenth_is_noise():
    step, last = in_steps("step"), in_steps("last_word")
    assert abs(step["in one piece"]["median"] - 1) == pytest.approx(0.1, abs=0.03)
    for side in ("1, readers throw it away", "1, the lock changes hands sooner"):
        assert last[side]["median"] == pytest.approx(last["1"]["median"], rel=0.05), "nothing changes"


def spread_of(cell: str) -> tuple[float, float]:
    """Least and most of a cell such as "114 (111 to 131)"."""
    least, most = cell.split("(")[1].rstrip(")").split(" to ")
    return float(least), float(most)


def test_a_fifth_of_the_events_take_away_all_of_the_loss_that_can_be_told():
    piece, *streams = (
        spread_of(row[1]) for row in read_record("part14_stream_interval")["tables"]["sides"]["rows"][:6]
    )
    one, two, *more = streams
    assert two[1] > one[0], "half as many events: within the noise"
    assert more[0][1] < one[0], "a fifth as many: not within it"
    assert all(least < piece[1] for least, _ in more), "and not to be told from one piece"


def test_a_stream_is_a_fifth_to_a_third_later_between_controls():
    last, piece = in_steps("last_word"), in_steps("last_word")["in one piece"]
    tokens = read_record("part14_stream_interval")["workload"]["tokens"]
    streams = {name: side["median"] for name, side in last.items()}
    assert 1.15 < streams["1"] / tokens < streams["1"] / piece["median"] < 1.4, "a fifth to a third later"
    users = figures("part14_streaming")["users"]["32"]
    ratio = users["stream"]["last_word_ms"] / users["one piece"]["last_word_ms"]
    assert ratio == pytest.approx(1.5, abs=0.1), "half as late again, in the table of readers"


def test_what_the_loop_works_more_a_step_is_longer_and_the_engine_waits():
    loop, step, waits = (
        {name: side["median"] for name, side in in_steps(figure).items()}
        for figure in ("loop", "step", "waits")
    )
    more = loop["1"] - loop["in one piece"]
    assert 0.2 < more < 0.25, "nearly a quarter of a step"
    assert step["1"] - 1 < more < step["1"] - step["in one piece"], "the step is longer by about as much"
    assert in_steps("waits")["1"]["first"] > in_steps("waits")["in one piece"]["third"]
    longer = step["1"] - 1, step["1"] - step["in one piece"]
    assert (round(longer[0], 1), round(longer[1], 1)) == (0.2, 0.3)
    assert (waits["1"] - waits["in one piece"]) / longer[1] > 0.45, "half of that, or more"
    assert max(waits[n] for n in ("5", "10", "20")) == waits["5"]
    assert waits["5"] == pytest.approx(waits["in one piece"], abs=0.02)
    found = read_record("part14_stream_interval")
    event_ms = loop["1"] * found["figures"]["control_step_ms"]["median"] / found["workload"]["users"]
    assert event_ms == pytest.approx(1 / 6, abs=0.02)


def goodput(percent: int, side: str, figure: str = "in_time") -> dict:
    return figures("part15_goodput")[str(percent)]["shares"][side][figure]


def test_at_three_times_the_load_a_bound_alone_has_answers_in_time():
    found = figures("part15_goodput")
    counted = read_record("part15_goodput")["workload"]["seconds"] / 2
    expected = found["100"]["full_seats_complete_per_second"]["median"] * counted
    assert (round(expected, -1), round(expected**0.5)) == (40, 6)
    at_one, at_three = read_record("part15_goodput")["tables"]["in_time"]["rows"]
    spreads = [spread_of(cell) for cell in at_one[1:]]
    assert max(least for least, _ in spreads) < min(most for _, most in spreads), "no side can be told"
    assert max(most for _, most in spreads) < 1.15, "shares above 1 are noise of a tenth"
    assert at_three[1] == "0 (0 to 0)", "nothing, in any round"
    assert goodput(300, "a deadline alone")["median"] == 0
    assert goodput(300, "a bound of 16", "asked")["median"] > 3


def test_of_the_last_who_is_admitted_so_many_answers_fit_into_a_second():
    workload = read_record("part15_goodput")["workload"]
    pace = figures("part15_goodput")["300"]["full_seats_complete_per_second"]["median"]
    seats, (least, most) = workload["seats"], workload["new_tokens"]
    token = seats / pace / ((least + most) / 2)
    waits = {bound: (bound - seats) / pace for bound in (11, 12, 13, 16)}
    assert (round(waits[16], 2), round(waits[13], 2), round(token * 1e3, 1)) == (0.52, 0.33, 8.2)
    fit = {bound: int((workload["good_seconds"] - waits[bound]) / token) for bound in (13, 16)}
    assert fit == {16: 58, 13: 82}
    shares = {bound: (tokens - least + 1) / (most - least + 1) for bound, tokens in fit.items()}
    assert shares == pytest.approx({16: 0.4, 13: 0.79}, abs=0.02), "four in ten, and nearly eight"
    for bound, share in shares.items():
        measured = goodput(300, f"a bound of {bound}")["median"]
        assert share < measured < share + 0.15, "a little more than reckoned"
    longest = token * most
    assert (round(longest, 2), round(waits[11] + longest, 2)) == (0.78, 0.98)
    assert waits[12] + longest > workload["good_seconds"], "11 fit, and no more"
    assert round(waits[13] + longest, 2) == 1.11
    assert 1 - shares[13] == pytest.approx(0.2, abs=0.03), "two in ten are late"


def test_with_a_bound_far_fewer_are_let_in_and_wait_for_nothing():
    def in_vain(side: str) -> float:
        asked, refused, in_time = (
            goodput(300, side, name)["median"] for name in ("asked", "refused", "in_time")
        )
        return asked - refused - in_time

    assert (round(in_vain("no bound"), 1), round(in_vain("a bound of 13"), 2)) == (3.1, 0.16)


def test_eight_rows_cost_less_than_two_and_a_draft_more_than_a_quarter():
    ms = figures("part16_speculation")["ms"]
    assert ms["rows_8"] < 2 * ms["rows_1"]
    assert ms["draft"] > ms["rows_1"] / 4


def test_the_length_that_adapts_beats_no_drafts_and_no_fixed_length_from_two_on():
    gain = figures("part16_speculation")["one"]["gain"]
    adaptive = gain["adaptive, up to 5"]
    assert gain["this engine, no drafts"] < adaptive
    assert all(adaptive < gain[f"{k} drafts"] for k in (2, 3, 4, 5))


def test_one_or_two_requests_gain_by_drafts_and_from_four_on_they_lose():
    crowd = figures("part16_speculation")["crowd"]
    assert min(crowd[f"b{people}"][side] for people in (1, 2) for side in ("fixed", "adaptive")) > 1
    for people in (4, 8, 16, 32):
        assert crowd[f"b{people}"]["fixed"] < 1
        assert 0.935 < crowd[f"b{people}"]["adaptive"] < 1, "it still loses up to 6%"


def test_where_a_text_repeats_itself_fixed_n_grams_gain_and_adaptive_ones_do_not():
    stories, repeats = (figures("part16_speculation")["ngram"][text] for text in ("stories", "repeats"))
    assert repeats["fixed"] > 1 > repeats["adaptive"]
    assert 0.4 < (1 - stories["adaptive"]) / (1 - stories["fixed"]) < 0.6, "it loses half as much"


def test_codes_of_eight_bits_are_faster_on_a_cpu_and_of_four_slower():
    found = figures("part17_one_request_gpt2_shape")
    assert found["int4_over_fp32"] < 1 < found["int8_over_fp32"] < 4


def test_a_crowd_of_one_voice_is_cheap_and_of_four_is_not():
    crowd = figures("part18_mixed")["16"]
    assert crowd["slots, one adapter"] < 1.1 * crowd["slots, base alone"]
    assert crowd["slots, four adapters"] > 1.5 * crowd["slots, one adapter"]


def test_output_costs_not_twice_as_much_as_input_but_ten_times_as_much_alone():
    found = figures("part19_weights")
    prompt = found["base_ns"] / 96 + found["input_ns"]  # a token of 96 that are read alone
    assert found["input_ns"] < found["output_ns"] < 2 * found["input_ns"]
    assert found["base_ns"] + found["output_ns"] > 10 * prompt
