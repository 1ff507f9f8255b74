"""What articles say in words about their records holds for the records that stand.

A record that is taken again changes the numbers by itself; a sentence has to be written again.
"""

from itertools import pairwise

import pytest

from benchmarks.record import read_record
from engine.telemetry.shares import Weights
from tests.series.conftest import ROOT
from tests.series.test_notebook_figures import printed


def figures(name: str) -> dict:
    return read_record(name)["figures"]


def rows_of(name: str, table: str) -> list[list]:
    return read_record(name)["tables"][table]["rows"]


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


def test_every_row_through_the_output_layer_costs_what_is_reckoned_and_lists_hardly_more():
    """The article reckons 1.22 for storyteller, and 1.45 for GPT-2's shape."""
    for row, reckoned in zip(rows_of("part10_logprobs", "prompt"), (1.22, 1.45), strict=True):
        spreads = [spread_of(cell) for cell in row[3:]]
        assert spreads[0] == pytest.approx((reckoned, reckoned), rel=0.1)
        assert spreads[0][1] > min(least for least, _ in spreads[1:]), "rounds differ by as much"


def test_inside_the_scores_is_half_of_what_a_step_of_storyteller_takes_more():
    steps, inside = rows_of("part10_logprobs", "step"), rows_of("part10_logprobs", "scorer")
    found = figures("part10_logprobs")["step"]["storyteller_1"]
    more = found["ms"]["5"] - found["ms"]["nobody asks"]
    assert 0.4 < float(inside[0][6].split()[0]) / more < 0.6
    assert spread_of(steps[3][3])[1] < spread_of(steps[3][6])[0], "32 in GPT-2's shape, in every round"
    assert all(spread_of(row[3])[0] < 1 < spread_of(row[3])[1] for row in steps), "nobody asks"


def test_a_listener_takes_a_hundredth_of_a_step_and_steps_differ_by_more():
    found, (least, most) = figures("part11_cost"), spread_of(rows_of("part11_cost", "cost")[0][1])
    assert 0.005 < found["listener_share"] < 0.015
    assert most - least > found["listener_ms"]


def test_to_compute_a_long_sequence_again_more_than_doubles_and_a_copy_is_shorter_at_every_length():
    ms = {int(n): of for n, of in figures("part12_swap")["ms"].items()}
    grows = {
        way: [ms[2 * n][way]["median"] / ms[n][way]["median"] for n in (128, 256)]
        for way in ("swap", "recompute")
    }
    assert min(grows["recompute"]) > 2 > max(grows["swap"])
    assert ms[1000]["recompute"]["median"] > 2 * ms[512]["recompute"]["median"]
    rows = rows_of("part12_swap", "way_back")
    copies, again = ({row[0]: spread_of(row[i]) for row in rows} for i in (1, 2))
    assert all(copies[n][1] < again[n][0] for n in ms), "in every round"
    fastest, median = copies[1000][0], ms[1000]["swap"]["median"]
    before = ms[512]["swap"]["median"]
    assert (round(fastest / before), round(median / before)) == (2, 4), "the last line's rounds are far apart"


def test_pages_cost_something_in_each_round_and_the_reader_in_c_gains_more():
    slots, by_ragged, by_c = figures("part12_table")["seconds"].values()
    assert all(c < slot < page for slot, page, c in zip(slots, by_ragged, by_c, strict=True))


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
def test_a_stream_has_its_first_word_sooner_and_in_a_crowd_its_last_one_later(users):
    found = figures("part14_streaming")["users"][users]
    stream, piece = found["stream"], found["one piece"]
    assert stream["first_word_ms"] < piece["first_word_ms"]
    (least, _), (_, most) = stream["last_word_ms_spread"], piece["last_word_ms_spread"]
    assert (least > most) == (users != "1"), "with one the ranges overlap"


def test_32_streams_last_word_is_as_late_as_if_the_loop_and_the_engine_had_one_core():
    found, tokens = figures("part14_streaming"), read_record("part14_streaming")["workload"]["tokens"]
    adds = found["stream_adds_us_per_token"]["32"] * 32 * tokens / 1e6
    stream, piece = (found["users"]["32"][way] for way in ("stream", "one piece"))
    late = (stream["last_word_ms"] - piece["last_word_ms"]) / 1e3
    assert (round(adds, 2), round(late, 2)) == (0.22, 0.29)


def test_from_one_event_of_ten_tokens_to_the_next_somebody_reads_less_than_a_word():
    found, steps = figures("part14_streaming"), figures("part14_stream_interval")
    words = found["users"]["32"]["stream"]["words_per_second"]
    gaps = 10 / 1.3 / words, 10 * steps["control_step_ms"]["median"] / 1e3
    assert gaps == pytest.approx((1 / 10, 1 / 6), rel=0.1), "a tenth of a second, and a sixth"
    assert max(gaps) * found["reading_words_per_second"] < 1


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
    assert ratio == pytest.approx(1.33, abs=0.05), "a third later, in the table of readers"
    step = users["one piece"]["last_word_ms"] / tokens
    assert step < figures("part14_stream_interval")["control_step_ms"]["median"] / 2, "where steps were short"


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


def test_where_seats_are_full_the_work_hardly_grows_and_the_wait_does():
    by_name = figures("part15_concurrency")["points"]
    seats = read_record("part15_concurrency")["workload"]["seats"]
    points = {name: {point["users"]: point for point in of} for name, of in by_name.items()}
    for name, of in points.items():
        full = 1 if name == "FIFO" else seats
        assert of[64]["tokens_per_second"] < 1.1 * of[full]["tokens_per_second"], name
        waits = [point["ttft_p50"] for point in of.values()]
        assert waits == sorted(waits), name
    fifo, continuous = points["FIFO"], points["continuous"]
    assert continuous[seats]["ttft_p50"] < fifo[4]["ttft_p50"], "a seat for everybody, and one at a time"
    assert continuous[64]["ttft_p50"] > 10 * continuous[seats]["ttft_p50"], "who has none waits for an end"


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


def test_eight_rows_cost_little_more_than_two_and_a_draft_a_quarter():
    ms = figures("part16_speculation")["ms"]
    assert ms["rows_8"] / ms["rows_1"] == pytest.approx(2.1, abs=0.15)
    assert ms["draft"] / ms["rows_1"] == pytest.approx(0.25, abs=0.03)


def test_the_formula_fitted_at_one_draft_says_too_much_of_the_others_since_f_is_not_fixed():
    """The same curve as articles/figures/16_formula.py draws."""
    found = figures("part16_speculation")
    ms, one = found["ms"], found["one"]
    measured = {k: one["tokens_per_second"][f"{k} drafts"] for k in range(1, 6)}
    alpha = one["tokens_per_step"]["1 drafts"] - 1
    fixed = 1000 * (1 + alpha) / measured[1] - ms["rows_2"] - ms["draft"]
    said = {
        k: 1000 * sum(alpha**j for j in range(k + 1)) / (fixed + ms[f"rows_{k + 1}"] + k * ms["draft"])
        for k in (2, 3, 4, 5)
    }
    too_high = [speed / measured[k] for k, speed in said.items()]
    assert min(too_high) > 1.05
    assert max(too_high) == pytest.approx(7 / 6, abs=0.02), "at worst by a sixth"
    plain = one["tokens_per_second"]["this engine, no drafts"]
    assert max(measured.values()) < plain < min(said.values()), "and that decides"
    inside = found["inside"]
    each = (inside["drafts"] + inside["around_drafts"]) / 3 - ms["draft"]
    assert each == pytest.approx(0.1, abs=0.02), "each pass brings 0.1 ms of its own"


def test_nothing_is_gained_on_this_machine_and_both_terms_eat_it():
    found = figures("part16_speculation")
    rows = {row[0]: row[3] for row in rows_of("part16_speculation", "one")}
    least, most = spread_of(rows["this engine, no drafts"])
    assert all(spread_of(rows[f"{k} drafts"])[1] < 1 for k in range(1, 6)), "none reaches Part 3's loop"
    for k in (3, 4, 5):
        assert spread_of(rows[f"{k} drafts"])[0] < most
        assert least < spread_of(rows[f"{k} drafts"])[1], "nor can be told from no drafts"
    assert spread_of(rows["adaptive, up to 5"])[1] < least, "less than no drafts"
    shown = {name: round(ms, 2) for name, ms in found["ms"].items()}
    tokens = round(found["one"]["tokens_per_step"]["3 drafts"], 1)
    passes, drafts = shown["rows_4"], 3 * shown["draft"]
    steps = {
        "F' as small as F": shown["fixed"] + passes + drafts,
        "drafts for nothing": shown["fixed_with_drafts"] + passes,
        "as it is": shown["fixed_with_drafts"] + passes + drafts,
    }
    assert [round(tokens * shown["plain_step"] / step, 2) for step in steps.values()] == [1.46, 1.25, 0.99]
    assert sum(found["inside"].values()) == pytest.approx(found["ms"]["step_with_drafts"], rel=0.1)
    beside = found["inside"]["around_drafts"] + found["inside"]["rest"]
    assert 0.5 < beside / found["ms"]["fixed_with_drafts"] < 0.7, "more than half of it"


def test_the_notebooks_loop_which_has_no_engine_around_it_gains_a_third_with_three_drafts():
    notebook = (ROOT / "notebooks/16_speculative_decoding.ipynb").read_text(encoding="utf-8")
    (gain,) = printed(notebook, r"3 drafts: (\d\.\d+) times as fast")
    assert float(gain) == pytest.approx(4 / 3, abs=0.05)


def test_drafts_lose_in_every_crowd_and_fixed_ones_most_from_four_on():
    crowd = figures("part16_speculation")["crowd"].values()
    fixed, adaptive = ([side[name] for side in crowd] for name in ("fixed", "adaptive"))
    assert max(*fixed, *adaptive) < 1
    assert fixed[0] > fixed[1] > max(fixed[2:])
    assert max(fixed[2:]) == pytest.approx(0.75, abs=0.03), "a quarter"
    assert adaptive[1:] == sorted(adaptive[1:]), "the less the larger the crowd"
    rows = rows_of("part16_speculation", "crowd")
    assert spread_of(rows[0][2])[1] < 1, "one request, in every round"
    assert rows[0][4] == pytest.approx(3, abs=0.3)
    assert min(adaptive[1:]) > 0.9, "it still loses some percent"
    assert max(row[4] for row in rows[1:]) < 0.2, "with next to no drafts"


def test_where_a_text_repeats_itself_fixed_n_grams_gain_and_of_adaptive_ones_it_cannot_be_told():
    stories, rows = figures("part16_speculation")["ngram"]["stories"], rows_of("part16_speculation", "ngram")
    assert spread_of(rows[2][4])[0] > 1
    assert spread_of(rows[3][4])[0] < 1 < spread_of(rows[3][4])[1]
    assert stories["fixed"] == pytest.approx(0.8, abs=0.03), "a fifth"
    assert 0.9 < stories["adaptive"] < 1, "some percent"


def test_codes_of_eight_bits_are_faster_on_a_cpu_and_of_four_slower():
    found = figures("part17_one_request_gpt2_shape")
    assert found["int4_over_fp32"] < 1 < found["int8_over_fp32"] < 4


def test_huge_pages_gain_in_each_round_for_gpt2_in_fp32_and_not_beyond_the_rounds_with_codes():
    gains = {row[0]: row[3] for row in read_record("part17_huge_pages")["tables"]["gain"]["rows"]}
    least, most = spread_of(gains.pop("storyteller, fp32"))
    assert least < 1 < most
    assert spread_of(gains.pop("GPT-2 124M, fp32"))[0] > 1
    for cell in gains.values():
        least, most = spread_of(cell)
        assert most - least >= float(cell.split()[0]) - 1


def voices(requests: int) -> dict[str, tuple[float, float]]:
    """Of each side of part18_mixed, least and most of the rounds' ratios to the base without slots."""
    rows = read_record("part18_mixed")["tables"]["steps"]["rows"]
    return {row[1]: spread_of(f"({row[4]})") for row in rows if row[0] == requests}


@pytest.mark.parametrize("requests", [4, 16])
def test_a_step_grows_with_each_voice(requests):
    found = voices(requests)
    sides = ("base alone", "one adapter", "base and two adapters", "four adapters")
    spreads = [found[f"slots, {side}"] for side in sides]
    assert all(fewer[0] < more[0] and fewer[1] < more[1] for fewer, more in pairwise(spreads))


def test_a_step_grows_by_more_milliseconds_in_a_crowd():
    ms = figures("part18_mixed")["rounds_ms"]
    grown = [
        ms[requests]["slots, four adapters"]["first"] - ms[requests]["slots, base alone"]["third"]
        for requests in ("4", "16")
    ]
    assert grown[1] > 1.3 * grown[0] > 0


@pytest.mark.parametrize("requests", [1, 4, 16])
def test_one_voice_in_a_slot_is_faster_than_merged_and_merged_as_fast_as_the_base_in_fp32(requests):
    found = voices(requests)
    merged, full = found["merged, one adapter"], found["no slots, base, in fp32"]
    assert found["slots, one adapter"][1] < merged[0]
    assert merged[0] <= full[1]
    assert full[0] <= merged[1]


def test_slots_without_an_adapter_show_with_one_request_and_not_with_16():
    assert voices(1)["slots, base alone"][0] > 1
    least, most = voices(16)["slots, base alone"]
    assert least < 1 < most


def test_a_streams_longest_pause_is_as_long_without_swaps():
    rows = {row[0]: spread_of(row[3]) for row in read_record("part18_swap")["tables"]["swap"]["rows"]}
    with_swaps = rows["pause between two tokens of a stream, with swaps"]
    assert with_swaps[0] < rows["the same, without"][1]
    assert rows["the same, without"][0] < with_swaps[1]


def test_output_costs_not_twice_as_much_as_input_but_ten_times_as_much_alone():
    found = figures("part19_weights")
    prompt = found["base_ns"] / 96 + found["input_ns"]  # a token of 96 that are read alone
    assert found["input_ns"] < found["output_ns"] < 2 * found["input_ns"]
    assert found["base_ns"] + found["output_ns"] > 10 * prompt


def test_the_engines_weights_are_of_a_slower_machine_and_their_ratios_differ_by_less_than_half():
    found, weights = figures("part19_weights"), Weights()
    times = sorted(getattr(weights, name) / found[f"{name}_ns"] for name in ("input", "output", "held"))
    assert times[0] > 2
    assert times[-1] < 1.5 * times[0]


def test_used_is_nine_tenths_between_40_and_60_percent_of_the_load_and_prices_fall_on():
    record = read_record("part19_utilisation")
    of_share = {point["share"]: point for point in record["figures"]["points"]}
    assert of_share[0.4]["used"] < 0.9 < of_share[0.6]["used"]
    rates = [of_share[share]["output_tokens_per_second"] for share in (0.6, 1)]
    assert rates[1] > 1.3 * rates[0], "it looks full long before it is"
    prices = {row[0]: spread_of(f"({row[6]})") for row in record["tables"]["load"]["rows"]}
    assert prices["100%"][1] < prices["60%"][0]
