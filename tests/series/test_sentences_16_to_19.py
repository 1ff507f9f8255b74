"""What articles 16 to 19 say in words about their records holds for the records that stand.

A record that is taken again changes the numbers by itself; a sentence has to be written again.
"""

from itertools import pairwise

import pytest

from benchmarks.part16_speculation import by_the_formula
from benchmarks.record import read_record
from engine.telemetry.shares import Weights
from tests.series.conftest import ROOT
from tests.series.sentences import figures, rows_of, spread_of
from tests.series.test_notebook_figures import printed


def test_eight_rows_cost_little_more_than_two_and_a_draft_a_quarter():
    ms = figures("part16_speculation")["ms"]
    assert ms["rows_8"] / ms["rows_1"] == pytest.approx(2.1, abs=0.15)
    assert ms["draft"] / ms["rows_1"] == pytest.approx(0.25, abs=0.03)


def test_the_formula_fitted_at_one_draft_says_too_much_of_the_others_since_f_is_not_fixed():
    found = figures("part16_speculation")
    ms, one, says = found["ms"], found["one"], by_the_formula(found)
    measured = {k: one["tokens_per_second"][f"{k} drafts"] for k in says}
    assert says[1] == pytest.approx(measured[1]), "fitted there"
    said = {k: says[k] for k in (2, 3, 4, 5)}
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


def test_huge_pages_gain_six_percent_for_gpt2_and_a_round_of_int8_lost():
    gains = {row[0]: row[3] for row in read_record("part17_huge_pages")["tables"]["gain"]["rows"]}
    least, most = spread_of(gains.pop("storyteller, fp32"))
    assert least < 1 < most
    assert all(1.05 < float(cell.split()[0]) < 1.075 for cell in gains.values())
    lost = [name for name, cell in gains.items() if spread_of(cell)[0] < 1]
    assert lost == ["GPT-2 124M, int8"]


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
