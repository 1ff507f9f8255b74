"""Reads the values of `ruvon bench serve`'s flags, and refuses them by name. Part 20's wiring."""

import json
import re
from collections.abc import Collection
from typing import Any

import httpx

from engine.client.untrusted import check_port
from engine.load.report import LatencyLimits

LIMIT_FIELDS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}  # vLLM's name -> the field of LatencyLimits
ADDRESS = "an address such as http://127.0.0.1:8000 is accepted"


def request_url(base_url: str, endpoint: str | None) -> str | None:
    """Where requests are sent: the path `endpoint` on the server. None if `endpoint` is None: requests are
    then sent to the usual path of the API. Raises ValueError if `endpoint` is not a path.
    """
    if endpoint is None:
        return None
    if not endpoint.startswith("/"):
        raise ValueError(f"--endpoint {endpoint}: a path such as /v1/completions is accepted")
    return base_url.rstrip("/").removesuffix("/v1") + endpoint


def check_address(url: str) -> None:
    """Raise ValueError if no request can be sent to `url`: it needs http:// or https://, a host, and a port
    that exists (`check_port`).
    """
    try:
        check_port(url)
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{url}: {error}; {ADDRESS}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url}: {ADDRESS}")


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """The JSON object in the value of a flag; {} for None. Raises ValueError if the text is anything else, or
    could not be sent: NaN, infinity or half a character.
    """
    if text is None:
        return {}
    try:
        fields = json.loads(text)
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError(f"{flag}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{flag} {text}: a JSON object is accepted")
    return fields


def check_choice(flag: str, value: str, accepted: Collection[str]) -> None:
    """Raise ValueError if `value` is none of the accepted ones."""
    if value not in accepted:
        raise ValueError(f"{flag} {value}: accepted are {', '.join(accepted)}")


def check_text(flag: str, value: str | None) -> None:
    """Raise ValueError if `value` has bytes that are not UTF-8, which no request can have."""
    if value is None:
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{flag} {value!r}: UTF-8 is accepted") from error


def check_above_zero(flag: str, value: float) -> None:
    """Raise ValueError if `value` is not above 0, or not a number; infinity is accepted."""
    if not value > 0:  # also refuses nan
        raise ValueError(f"{flag} {value}: more than 0 is accepted, or inf")


def percentile_of(number: str) -> float:
    """The number in a text, such as 99.9. Raises ValueError if it is not a number from 0 to 100."""
    is_number = re.fullmatch(r"[0-9]+(\.[0-9]*)?", number)
    if not is_number or float(number) > 100:
        raise ValueError(f"--metric-percentiles {number}: numbers from 0 to 100 are accepted")
    return float(number)


def latency_limits(goodput: list[str] | None) -> LatencyLimits | None:
    """The limits of --goodput, each written as in vLLM: `ttft:500` is 500 milliseconds. None without limits.
    Raises ValueError if a name is unknown or comes twice, or if a value is not a number above 0.
    """
    if not goodput:
        return None
    seconds: dict[str, float] = {}
    for limit in goodput:
        name, _, milliseconds = limit.partition(":")
        if name not in LIMIT_FIELDS or LIMIT_FIELDS[name] in seconds or not _is_above_zero(milliseconds):
            raise ValueError(
                f"--goodput {' '.join(goodput)}: ttft:MS, tpot:MS and e2el:MS are accepted, each once"
            )
        seconds[LIMIT_FIELDS[name]] = float(milliseconds) / 1e3
    return LatencyLimits(**seconds)


def _is_above_zero(text: str) -> bool:
    """Whether the text is a number above 0."""
    try:
        return float(text) > 0
    except ValueError:
        return False
