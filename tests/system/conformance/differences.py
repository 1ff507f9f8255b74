"""What differs between two servers' answers to one request.

Compared are: status, content type, the structure of the JSON (keys, kinds, nulls), and for greedy cases
every value (texts, ids, reasons, usage; numbers to 1e-3; the order of top_logprobs). Of a stream: the kinds
of its events in order (role, text, empty, finish, usage, [DONE]), the joined text and log probabilities, and
the last usage. An error's message is not compared.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from tests.system.conformance.case import Case

MAY_DIFFER = {"id", "created", "system_fingerprint", "owned_by", "root", "permission"}  # in their values
TOLERANCE = 1e-3
KINDS = {
    bool: "bool", int: "number", float: "number", str: "text", list: "list", dict: "object",
    type(None): "null",
}  # fmt: skip


class Difference(NamedTuple):
    case: str
    what: str  # status, content type, header, missing, missing null, more, more null, null, kind, value, …
    where: str  # "body.choices[0].text"
    vllm: str
    ours: str


# ------------------------------------------------------------------------------------------------ asking


def ask(client: httpx.Client, case: Case) -> dict[str, Any]:
    """The server's answer in the form that is recorded: status, type, and json, events or text."""
    headers, data = dict(case.headers), case.raw or ""
    if case.body is not None:
        data = json.dumps(case.body)
        headers.setdefault("Content-Type", "application/json")
    content = data.encode() if case.method == "POST" else None
    response = client.request(case.method, case.path, content=content, headers=headers)
    kind = response.headers.get("content-type", "").split(";")[0]
    answer: dict[str, Any] = {"status": response.status_code, "type": kind}
    if "x-request-id" in response.headers:
        answer["x-request-id"] = response.headers["x-request-id"]
    if kind == "text/event-stream":
        answer["events"] = [event(lines) for lines in response.text.split("\n\n") if lines.strip()]
    elif kind == "application/json":
        answer["json"] = response.json() if response.content else None
        if case.name == "openapi":
            answer["json"] = {path: sorted(verbs) for path, verbs in answer["json"]["paths"].items()}
    elif case.name == "metrics":
        answer["json"] = metrics(response.text)
    else:
        answer["text"] = response.text[:300]
    return answer


def event(lines: str) -> Any:
    data = "\n".join(line[5:].lstrip() for line in lines.split("\n") if line.startswith("data:"))
    return data if data == "[DONE]" else json.loads(data)


def metrics(text: str) -> dict[str, Any]:
    """Each metric's type, labels and buckets; our own metrics (`ruvon:`) are left out."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            if not name.endswith("_created") and not name.startswith("ruvon:"):
                found[name] = {"type": kind, "labels": [], "buckets": []}
        elif match := re.match(r"(\w[\w:]*)(?:{(.*)})? ", line):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            name = match[1] if match[1] in found else re.sub("_(bucket|sum|count)$", "", match[1])
            if name in found:
                edge = labels.pop("le", "+Inf")
                if edge != "+Inf" and float(edge) not in found[name]["buckets"]:
                    found[name]["buckets"].append(float(edge))
                found[name]["labels"] = sorted({*found[name]["labels"], *labels})
    return found


# ------------------------------------------------------------------------------------------------ comparing


def differences(case: Case, theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[Difference]:
    for what, where, vllm, own in _of_answers(case, theirs, ours):
        yield Difference(case.name, what, where, short(vllm), short(own))


def _of_answers(case: Case, theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple]:
    if ("x-request-id" in theirs) != ("x-request-id" in ours):
        yield "header", "x-request-id", theirs.get("x-request-id"), ours.get("x-request-id")
    if theirs["status"] != ours["status"]:
        yield "status", "", brief(theirs), brief(ours)
        return
    if theirs["status"] < 400 and theirs["type"] != ours["type"]:
        yield "content type", "", theirs["type"], ours["type"]
    if "events" in theirs and "events" in ours:
        yield from _of_streams(case, theirs["events"], ours["events"])
    elif "json" in theirs and "json" in ours:
        yield from _of_values(theirs["json"], ours["json"], "body", case.values)


def _of_streams(case: Case, theirs: list, ours: list) -> Iterator[tuple]:
    both = joined(theirs), joined(ours)
    if not case.values:
        for side in both:
            del side["choices"]
    yield from _of_values(*both, "stream", True)
    for where, find in (("first", first_event), ("finish", finish_event)):
        yield from _of_values(find(theirs), find(ours), where, False)


def _of_values(theirs: Any, ours: Any, where: str, values: bool) -> Iterator[tuple]:
    name = where.rsplit(".", 1)[-1]
    kinds = KINDS[type(theirs)], KINDS[type(ours)]
    if kinds[0] != kinds[1]:
        yield "null" if "null" in kinds else "kind", where, theirs, ours
    elif isinstance(theirs, dict):
        if name.startswith("top_logprobs") and not values:
            return  # its keys are tokens
        for key in sorted(theirs.keys() - ours.keys()):
            yield "missing null" if theirs[key] is None else "missing", f"{where}.{key}", theirs[key], None
        for key in sorted(ours.keys() - theirs.keys()):
            yield "more null" if ours[key] is None else "more", f"{where}.{key}", None, ours[key]
        if (
            values
            and name.startswith("top_logprobs")
            and set(theirs) == set(ours)
            and list(theirs) != list(ours)
        ):
            yield "order", where, list(theirs), list(ours)
        for key in theirs:
            if key in ours and not (name == "error" and key == "message"):
                yield from _of_values(theirs[key], ours[key], f"{where}.{key}", values)
    elif isinstance(theirs, list):
        if values and len(theirs) != len(ours):
            yield "length", where, theirs, ours
        pairs = list(zip(theirs, ours))
        for i, pair in enumerate(pairs if values else pairs[:1]):
            yield from _of_values(*pair, f"{where}[{i}]", values)
    elif values and name not in MAY_DIFFER:
        near = kinds[0] == "number" and abs(theirs - ours) <= TOLERANCE
        if not near and theirs != ours:
            yield "value", where, theirs, ours


def first_event(events: list) -> dict:
    return next((one for one in events if one != "[DONE]"), {})


def finish_event(events: list) -> dict:
    """The last event that says why a choice ended."""
    for one in reversed(events):
        if one != "[DONE]" and any(choice.get("finish_reason") for choice in one.get("choices", ())):
            return one
    return {}


def joined(events: list) -> dict[str, Any]:
    """A stream's choices put together, the order of its events' kinds (runs of one kind count once), and its
    last usage. Events of several choices may come in any order.
    """
    end, orders, choices, usage, keys, ids = [], {}, {}, None, set(), set()
    for one in events:
        if one == "[DONE]" or "error" in one:
            end.append("[DONE]" if one == "[DONE]" else "error")
            continue
        ids.add(one.get("id"))
        keys |= one.keys() - {"choices", "usage"}
        usage = one.get("usage") or usage
        if not one.get("choices"):
            end.append("usage")
        for choice in one.get("choices", ()):
            index = str(choice["index"])
            add_to(choices.setdefault(index, new_choice()), choice)
            kind = kind_of(one, choice)
            order = orders.setdefault(index, [])
            if order[-1:] != [kind]:
                order.append(kind)
    orders["end"] = end
    return {"order": orders, "choices": choices, "usage": usage, "keys": sorted(keys), "ids": len(ids)}


def new_choice() -> dict[str, Any]:
    return {"text": "", "finish_reason": None, "stop_reason": "absent", "logprobs": [], "token_ids": []}


def text_of(choice: dict) -> str | None:
    delta = choice.get("delta", choice)
    return delta.get("content", delta.get("text"))


def add_to(whole: dict[str, Any], choice: dict) -> None:
    whole["text"] += text_of(choice) or ""
    for key in ("finish_reason", "stop_reason"):
        if choice.get(key) is not None or (key in choice and whole[key] == "absent"):
            whole[key] = choice[key]
    whole["token_ids"] += choice.get("token_ids") or []
    if logprobs := choice.get("logprobs"):
        lists = [logprobs.get(key, ()) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
        whole["logprobs"] += logprobs.get("content") or [list(row) for row in zip(*lists)]


def kind_of(one: dict, choice: dict) -> str:
    text = text_of(choice)
    parts = ["role"] if choice.get("delta", {}).get("role") else []
    if choice.get("finish_reason"):
        parts.append("finish")  # whether text is left for it depends on how fast the events were read
    else:
        parts.append("text" if text else "empty" if text == "" else "no text")
    if "usage" in one:
        parts.append("+usage null" if one["usage"] is None else "+usage")
    return " ".join(parts)


# ------------------------------------------------------------------------------------------------ in words


def short(value: Any, most: int = 260) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[:most] + "…"


def brief(answer: dict[str, Any]) -> dict[str, Any]:
    said = {key: answer[key] for key in ("json", "text") if key in answer}
    if "events" in answer:
        said = {
            "text": {index: whole["text"] for index, whole in joined(answer["events"])["choices"].items()}
        }
    return {"status": answer["status"]} | said
