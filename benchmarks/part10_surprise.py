"""How surprised is storyteller by a story, by the same words in another order, and by a text of another kind?

    python -m benchmarks.part10_surprise

Each text is scored as a prompt: its tokens' log probabilities, their mean as perplexity, and what the model
had expected instead. No times: the figures are the same on any machine, but for rounding. The demo and the
article's figure use the same functions.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from random import Random

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, record
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS, perplexity, token_text
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.layers.packed_linear import pack_linears
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from engine.text.tokenizer import Tokenizer

MODEL = "storyteller"
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her ball in the garden. "
    "One day, the ball fell into the volcano. Lily was very sad and started to cry."
)
TEXTS = {
    "a story": STORY,
    "the same, one word exchanged": STORY.replace("volcano", "pond"),
    "the same words, shuffled": " ".join(Random(0).sample(STORY.split(), len(STORY.split()))),
    "a lease": (
        "The tenant shall indemnify the landlord against all liabilities arising from any breach of the "
        "covenants contained in this lease, and shall pay interest on arrears at the statutory rate."
    ),
}
INSTEAD = 3  # of what the model had expected, beside each token
FULL = 12.0  # bits of surprise at which the colour is deepest
STOPS = ((255, 255, 255), (254, 217, 118), (227, 26, 28))  # no surprise, some, FULL


@dataclass(frozen=True)
class Token:
    """One token of a scored text."""

    text: str
    logprob: float | None  # None: the first token, before which nothing stands
    rank: int | None
    expected: list[tuple[str, float]]  # the likeliest tokens here, with their probabilities

    @property
    def bits(self) -> float | None:
        """Its surprise: how often a certainty is halved to get its probability."""
        return None if self.logprob is None else -self.logprob / math.log(2)


def make_engine(seats: int = 4) -> LLMEngine:
    """Part 8's engine, whose runner scores."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    model = load_model(MODEL, transform=partial(pack_linears, rows=seats))
    memory = SlotMemory(model.config, seats)
    scheduler = ContinuousScheduler(memory.plan(), seats, 256, select_rows=scored_rows)
    scores = logprobs_of(tokenizer, model.logits)
    runner = ModelRunner([EagerWay(model, memory)], memory, scores=scores)
    return LLMEngine(tokenizer, model.config, scheduler, runner, supports=SUPPORTS)


def run(engine: LLMEngine, prompt: str, params: SamplingParams):
    """The last output of one request. Raises ParameterError for what is refused."""
    engine.add_request("0", prompt, params)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    return output


def as_tokens(tokenizer: Tokenizer, ids: list[int], scores: list) -> list[Token]:
    """A text's tokens with what was said of them. Bytes that are no text by themselves are shown as \\xf0."""

    def text(id: int) -> str:
        return token_text(tokenizer, id).removeprefix("bytes:")

    return [
        Token(
            text(id),
            own and own.logprob,
            own and own[id].rank,
            [(text(other), math.exp(p)) for other, p in own.top(INSTEAD)] if own else [],
        )
        for id, own in zip(ids, scores, strict=True)
    ]


def scored(engine: LLMEngine, text: str) -> list[Token]:
    """`text` as a prompt: one token is generated, and not looked at."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=INSTEAD)
    output = run(engine, text, params)
    return as_tokens(engine.tokenizer, output.prompt_token_ids, output.prompt_logprobs)


def perplexity_of(tokens: list[Token]) -> float:
    """Of all tokens that have a probability, which the first one has not."""
    return perplexity([token.logprob for token in tokens if token.logprob is not None])


def colour(bits: float | None) -> str:
    """#rrggbb for a surprise; gray for a token that has none."""
    if bits is None:
        return "#e1e1e1"
    at = min(bits / FULL, 1.0) * (len(STOPS) - 1)
    below = min(int(at), len(STOPS) - 2)
    pairs = zip(STOPS[below], STOPS[below + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - below)):02x}" for a, b in pairs)


def svg(tokens: list[Token], columns: int = 72) -> str:
    """The text as a picture, each token on its colour, and below it the scale."""
    wide, high, left = 9.1, 26, 14
    parts, row, column = [], 0, 0
    for token in tokens:
        text = token.text.replace("\n", "⏎")
        if column and column + len(text) > columns:
            row, column = row + 1, 0
        x, y = left + column * wide, 12 + row * high
        hue = colour(token.bits)
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{len(text) * wide:.1f}" height="21" fill="{hue}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 16}" xml:space="preserve">{escape(text)}</text>')
        column += len(text)
    y = 24 + (row + 1) * high
    for i in range(48):
        hue = colour(i / 47 * FULL)
        parts.append(f'<rect x="{left + i * 6}" y="{y}" width="6" height="12" fill="{hue}"/>')
    for bits in (0, 2, 4, 6, 8, 10, 12):
        x = left + bits / FULL * 288
        end = "+" if bits == FULL else ""
        parts.append(f'<text class="s" x="{x:.0f}" y="{y + 27}" text-anchor="middle">{bits}{end}</text>')
    parts.append(
        f'<text class="s" x="{left + 308}" y="{y + 11}">bits of surprise: −log₂ of the probability</text>'
    )
    parts.append(f'<rect x="{left + 308}" y="{y + 17}" width="12" height="12" fill="{colour(None)}"/>')
    parts.append(f'<text class="s" x="{left + 326}" y="{y + 27}">nothing before it, no probability</text>')
    width, height = 2 * left + columns * wide, y + 40
    style = "text{font:15px 'DejaVu Sans Mono',monospace;fill:#111}.s{font:12px 'DejaVu Sans',sans-serif}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    engine = make_engine()
    found = {name: scored(engine, text) for name, text in TEXTS.items()}
    rows = []
    for name, tokens in found.items():
        bits = [token.bits for token in tokens[1:]]
        worst = max(tokens[1:], key=lambda token: token.bits)
        rows.append([name, len(tokens), sum(bits) / len(bits), perplexity_of(tokens), worst.text.strip()])
    table = {
        "columns": ["text", "tokens", "bits of surprise per token", "perplexity", "most surprising token"],
        "rows": rows,
    }
    figures = {
        "perplexity": {name: perplexity_of(tokens) for name, tokens in found.items()},
        "story": [asdict(token) | {"bits": token.bits} for token in found["a story"]],
    }
    workload = {"model": MODEL, "texts": TEXTS, "dtype": "float32"}
    path = record("part10_surprise", "What surprises storyteller?", workload, figures, {"texts": table})
    shown = Table(*table["columns"])
    for row in rows:
        shown.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(shown)
    print(f"Written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
