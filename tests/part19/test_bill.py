"""Prices as people write them, and a bill in dollars and cents."""

from fractions import Fraction

import pytest

from engine.telemetry.bill import PAID_KINDS, UNPAID_KINDS, ApiPrice, Bill, Price, money

HOUR = 3600 * 10**9


def bill(price: str = "2.50", requests: int = 0, tokens=(0, 0, 0), **ns: int) -> Bill:
    times = dict.fromkeys([*PAID_KINDS, *UNPAID_KINDS], 0) | ns
    return Bill(Price.parse(price), times, dict(zip(PAID_KINDS, tokens, strict=True)), requests)


def test_an_hour_costs_the_price_of_an_hour():
    assert Price.parse("2.50").of(HOUR) == Fraction(5, 2)
    assert Price.parse("2.50").of(1) == Fraction(5, 2 * HOUR), "a nanosecond, exactly"


@pytest.mark.parametrize(
    "wrong", ["", "-1", "1e3", "nan", "inf", "2,5", "12345678", "1.1234567891", "٣", "$2"]
)
def test_a_price_is_dollars_as_people_write_them(wrong):
    with pytest.raises(ValueError, match=r"price_per_hour=.*dollars such as 2\.50 are accepted"):
        Price.parse(wrong)


def test_a_price_of_nothing_is_refused():
    with pytest.raises(ValueError, match="more than 0 is accepted"):
        Price.parse("0.00")


def test_an_api_price_has_three_amounts_for_a_million_tokens():
    price = ApiPrice.parse("0.10, 1, 4")
    tokens = {"cached": 500_000, "input": 2_000_000, "output": 250_000}
    assert price.of(tokens) == Fraction(305, 100), "0.05 + 2.00 + 1.00"
    assert ApiPrice.parse("0,0,0").of(tokens) == 0


@pytest.mark.parametrize("wrong", ["1,2", "1,2,3,4", "", "a,b,c", "1,,2"])
def test_another_api_price_is_refused(wrong):
    with pytest.raises(ValueError, match="api_price"):
        ApiPrice.parse(wrong)


def test_the_bill_is_all_the_time_there_was():
    found = bill(tokens=(10, 20, 100), cached=HOUR // 8, input=HOUR // 8, output=HOUR // 4, idle=HOUR // 2)
    assert found.total == Fraction(5, 2)
    assert found.utilization == 0.5
    assert found.per_output_token == Fraction(5, 200), "idle time is in the price of a token"
    assert found.per_token("input") == Fraction(5, 16) / 20
    assert found.per_token("cached") == Fraction(5, 16) / 10


def test_without_tokens_or_time_there_is_no_price_of_a_token():
    assert bill().per_output_token is None
    assert bill().per_token("output") is None
    assert bill().utilization == 0
    assert bill().total == 0


def test_lines_in_cents_add_up_to_the_total_in_cents():
    found = bill("1.00", input=HOUR // 3, output=HOUR // 3, idle=HOUR - 2 * (HOUR // 3))
    cents = found.cents()
    assert sum(cents.values()) == 100
    assert sorted(cents.values())[-3:] == [33, 33, 34], "three thirds of a dollar"
    assert sum(bill("0.01", idle=HOUR // 2).cents().values()) == 1, "half a cent is rounded up"
    assert set(bill().cents().values()) == {0}


@pytest.mark.parametrize(
    ("dollars", "said"),
    [
        (None, "–"),
        (Fraction(0), "$0"),
        (Fraction(1234567, 100), "$12,345.67"),
        (Fraction(1, 3), "$0.333"),
        (Fraction(9996, 10**4), "$1.00"),
        (Fraction(9996, 10**5), "$0.100"),
        (Fraction(1234, 10**8), "$0.0000123"),
    ],
)
def test_money_for_people(dollars, said):
    assert money(dollars) == said
