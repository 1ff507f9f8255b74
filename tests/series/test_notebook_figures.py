"""An article and its notebook have the same figure for the same quantity.

Both may be right by themselves and still contradict each other: the article's number comes from a record, the
notebook's from the machine that executed it. What is counted must be equal. What is timed may differ by the
factor `within`; if it differs by more, one of the two was measured on a busy machine, or on another one.
"""

import json
import re
from dataclasses import dataclass
from functools import reduce

import pytest

from benchmarks.record import read_record
from parts.manifest import load_parts
from tests.series.conftest import ROOT


@dataclass(frozen=True)
class Pair:
    """One quantity: where the article has it from, and how the notebook prints it."""

    what: str
    part: str  # 08: the tag of article and notebook
    record: str  # RESULT.KEY.KEY…, as in the articles' marks
    printed: str  # a pattern with one group, which is found in the outputs of one cell
    scale: float = 1  # what the notebook's number is multiplied by, so that it is the record's
    within: float = 1  # the factor by which they may differ; 1: counted, and equal


PAIRS = (
    Pair(
        "questions answered right by the sum",
        "10",
        "part10_questions.figures.right_by_sum",
        r"right by the sum: (\d+) of",
    ),
    Pair(
        "questions answered right by the mean",
        "10",
        "part10_questions.figures.right_by_mean",
        r"right by the mean: (\d+) of",
    ),
    Pair(
        "bytes that a token leaves in the cache",
        "03",
        "part03_kv_cache.figures.kv_bytes_per_token",
        r"storyteller: ([\d,]+) bytes per token",
    ),
    Pair(
        "KiB that a token leaves in Llama 3 8B's",
        "03",
        "part03_kv_cache.figures.kv_kib_per_token_fp16.llama3_8b",
        r"Llama 3 8B +(\d+) KiB per token",
    ),
    Pair(
        "ms of a token with a cache, at the start",
        "03",
        "part03_kv_cache.figures.curve.cached_ms.0",
        r"\ncache: +(\d+\.\d) ms at 16 tokens",
        within=1.5,
    ),
    Pair(
        "share of a step that is a bare read",
        "03",
        "part03_memory_bound.figures.storyteller.threads_1.ratios.bare_read_of_a_step",
        r"a bare read is (\d+)% of a step",
        0.01,
        within=1.5,
    ),
    Pair(
        "ms of a step without a cache, at 1,000 tokens",
        "02",
        "part02_growth.figures.ms.longest",
        r"T = 1000: .* together (\d+) ms",
        within=1.5,
    ),
    Pair(
        "how many times attention grows, from 100 tokens to 1,000",
        "02",
        "part02_growth.figures.growth.attention",
        r"from T = 100: attention × (\d+)",
        within=1.5,
    ),
    Pair(
        "ms of a step without a cache, at 1,000 tokens, once more",
        "03",
        "part02_growth.figures.ms.longest",
        r"no cache: .* (\d+) at 1000: ",
        within=1.5,
    ),
    Pair(
        "what packed weights gain",
        "03",
        "part03_kv_cache.figures.packing_gains",
        r"packing: (\d+\.\d) times",
        within=1.5,
    ),
    Pair(
        "µs of an argmax",
        "05",
        "part05_sampling.figures.one_row_us.argmax",
        r"greedy +(\d+\.\d+) ms",
        1e3,
        within=1.5,
    ),
    Pair(
        "µs of a forward pass",
        "05",
        "part05_sampling.figures.forward_us",
        r"forward +(\d+\.\d+) ms",
        1e3,
        within=1.5,
    ),
    Pair(
        "tokens that top-p 0.9 keeps",
        "05",
        "part05_knobs.figures.kept.unsure.1.top_p",
        r"T = 1\.0: top-p 0\.9 keeps (\d+)",
    ),
    Pair(
        "tokens that min-p 0.1 keeps",
        "05",
        "part05_knobs.figures.kept.unsure.1.min_p",
        r"T = 1\.0: .* min-p 0\.1 keeps (\d+)",
    ),
    Pair(
        "padding in batches of 8",
        "07",
        "part07_batching.figures.waste.8.padding",
        r"\b8: '(\d+)%'",
        0.01,
        1.02,
    ),
    Pair(
        "padding in batches of 32",
        "07",
        "part07_batching.figures.waste.32.padding",
        r"\b32: '(\d+)%'",
        0.01,
        1.02,
    ),
    Pair(
        "the crowd's throughput over the queue's",
        "07",
        "part07_batching.figures.times_series",
        r"together: (\d\.\d) times",
        within=1.5,
    ),
    Pair(
        "µs of a hop to a thread",
        "04",
        "part04_server_overhead.figures.us_per_token.bare_hop",
        r"a hop with nothing in it (\d+) µs",
        within=1.5,
    ),
    Pair(
        "ms of a step of eight",
        "07",
        "part07_batching.figures.split.storyteller.step_ms.3",
        r" 8 requests: +(\d+\.\d+) ms",
        within=1.5,
    ),
    Pair(
        "ms of a pass of one row",
        "16",
        "part16_speculation.figures.ms.rows_1",
        r"target: \{1: (\d\.\d+)",
        within=1.5,
    ),
    Pair(
        "ms of a pass of the draft model",
        "16",
        "part16_speculation.figures.ms.draft",
        r"draft: (\d\.\d+)",
        within=1.5,
    ),
    Pair("steps with FIFO", "08", "part08_gantt.figures.FIFO.steps", r"FIFO +\d+ tokens in (\d+) steps"),
    Pair(
        "steps with static batches",
        "08",
        "part08_gantt.figures.static.steps",
        r"static +\d+ tokens in (\d+) steps",
    ),
    Pair(
        "steps with continuous batching",
        "08",
        "part08_gantt.figures.continuous.steps",
        r"continuous +\d+ tokens in (\d+) steps",
    ),
    Pair(
        "the largest step of a static batch",
        "08",
        "part08_gantt.figures.static.largest",
        r"static +.* at most (\d+) in one",
    ),
    Pair(
        "the longest step with a budget of 64",
        "08",
        "part08_gantt.figures.budgets.2.longest_step",
        r"budget +64: longest step +(\d+)",
    ),
    Pair(
        "steps of a long prompt with a budget of 64",
        "08",
        "part08_gantt.figures.budgets.2.first_word",
        r"budget +64: .* takes +(\d+) steps",
    ),
)


def recorded(path: str) -> float:
    name, *keys = path.split(".")
    return reduce(
        lambda tree, key: tree[int(key) if isinstance(tree, list) else key], keys, read_record(name)
    )


def printed(text: str, pattern: str) -> list[str]:
    """What the group of the pattern holds, wherever it is found in `text`, a notebook's file."""
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    return [found for output in outputs for found in re.findall(pattern, "".join(output.get("text", "")))]


def disagreement(pair: Pair, article: float, notebook: float) -> str:
    """What is wrong between the two numbers; empty if nothing is."""
    low, high = sorted((article, notebook * pair.scale))
    if high > low * pair.within:
        return f"{pair.what}: the article has {article:g}, the notebook {notebook * pair.scale:g}"
    return ""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.part}: {pair.what}")
def test_article_and_notebook_agree(pair):
    (part,) = [part for part in load_parts(ROOT) if part.number.tag == pair.part]
    name = pair.record.split(".")[0]
    assert name in (ROOT / f"articles/{part.name}.md").read_text(encoding="utf-8"), f"no mark of {name} there"
    found = printed((ROOT / f"notebooks/{part.name}.ipynb").read_text(encoding="utf-8"), pair.printed)
    assert len(found) == 1, f"{pair.what}: the notebook prints it {len(found)} times"
    wrong = disagreement(pair, recorded(pair.record), float(found[0].replace(",", "")))
    assert not wrong


@pytest.mark.parametrize(
    ("within", "article", "notebook", "agree"),
    [
        (1, 31, 31, True),
        (1, 31, 32, False),
        (1.5, 2.6, 2.0, True),
        (1.5, 2.0, 3.1, False),
        (1.5, 3.1, 2.0, False),
    ],
)
def test_what_is_counted_is_equal_and_what_is_timed_is_near(within, article, notebook, agree):
    pair = Pair("steps", "08", "a.b", "", within=within)
    assert (disagreement(pair, article, notebook) == "") is agree


def test_a_disagreement_names_both_numbers_in_the_records_unit():
    pair = Pair("share", "03", "a.b", "", 0.01, within=1.5)
    assert disagreement(pair, 0.5, 80) == "share: the article has 0.5, the notebook 0.8"
