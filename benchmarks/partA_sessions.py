"""How much of a conversation's prompt does a replica find in its prefix cache, with x-session-id and without?

    python -m benchmarks.partA_sessions      # where Ray is; about two minutes

Conversations of several turns, which take turns, against two replicas. Each turn sends the whole conversation
so far, as chat clients do. Rounds differ by which replica chance chose. Counts of tokens: a busy machine
changes no figure here.
"""

import re
import tempfile
from pathlib import Path
from random import Random

import httpx

from benchmarks.partA_replicas import MODEL, clustered
from benchmarks.record import record, show, whole_numbers
from engine.load.plan import random_text

ANSWER_TOKENS = 40
WITHOUT, WITH = "without the header", "with x-session-id"


def counts(url: str) -> dict[str, dict[str, float]]:
    """By metric and engine: prompt tokens looked up in the prefix cache, and found there."""
    scraped = httpx.get(f"{url}/metrics", timeout=60).text
    found: dict[str, dict[str, float]] = {}
    for kind in ("queries", "hits"):
        pattern = rf'^vllm:prefix_cache_{kind}_total{{engine="(\d+)".*}} (\S+)$'
        found[kind] = {engine: float(count) for engine, count in re.findall(pattern, scraped, re.MULTILINE)}
    return found


def talk(url: str, conversations: int, turns: int, words: int, label: str, sticky: bool) -> None:
    """All conversations, one turn of each after another. `label`: in each text, so that nothing of another
    call is found.
    """
    random = Random(0)
    histories: list[list[dict]] = [[] for _ in range(conversations)]
    for turn in range(turns):
        for number, history in enumerate(histories):
            said = f"{label} {number} {turn} {random_text(words, random)}"
            history.append({"role": "user", "content": said})
            body = {"model": MODEL, "messages": history, "max_tokens": ANSWER_TOKENS, "temperature": 0}
            headers = {"x-session-id": f"{label}-{number}"} if sticky else {}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)
            message = answer.raise_for_status().json()["choices"][0]["message"]
            history.append({"role": "assistant", "content": message["content"]})


def main() -> None:
    question = (
        "How much of a conversation does a replica find in its prefix cache, with x-session-id and without?"
    )
    options = whole_numbers(question, conversations=16, turns=6, words=40, rounds=3)
    found: dict[str, list[dict]] = {WITHOUT: [], WITH: []}
    with tempfile.TemporaryDirectory() as folder, clustered(Path(folder) / "cluster.txt") as url:
        for number in range(options.rounds):
            for side, rounds in found.items():
                before = counts(url)
                label = f"{side == WITH:d}{number}"
                talk(url, options.conversations, options.turns, options.words, label, side == WITH)
                after = counts(url)
                rounds.append(
                    {
                        kind: sum(after[kind].values()) - sum(before[kind].values())
                        for kind in ("queries", "hits")
                    }
                )
    columns = ["requests", "prompt tokens", "computed", "share found", "least", "most"]
    rows = []
    for side, rounds in found.items():
        asked, hits = (sum(one[kind] for one in rounds) for kind in ("queries", "hits"))
        shares = [one["hits"] / one["queries"] for one in rounds]
        rows.append([side, int(asked), int(asked - hits), hits / asked, min(shares), max(shares)])
    shown = {"hits": {"columns": columns, "rows": rows}}
    workload = {"model": MODEL, "replicas": 2, "answer_tokens": ANSWER_TOKENS} | vars(options)
    show(record("partA_sessions", question, workload, found, shown), shown)


if __name__ == "__main__":
    main()
