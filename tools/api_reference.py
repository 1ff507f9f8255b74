"""The API reference of the site, from docstrings, fields, the app's own description and its metrics.

`page()` is Markdown. Nothing here is written by hand: what a docstring does not say is not on the page.
"""

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from engine import LLM, EngineArgs, SamplingParams  # noqa: E402
from engine.cli.serve_flags import ServeFlags  # noqa: E402
from engine.cli.serving import Service  # noqa: E402
from engine.server.docs_page import NOT_LISTED, docs_page  # noqa: E402
from engine.telemetry.cost_accounting import CostAccounting  # noqa: E402

HEAD = """\
# API

Made from the code's own words: docstrings, the help of options, the description that a server gives of its
routes, and its metrics. Names and meanings are vLLM's and OpenAI's; what one does with them:
[Use it](articles/use.md).
"""
PRICE = ("2.50", "0.10,1.00,4.00", None, None)  # so that a server's metrics of costs are there, too


def page() -> str:
    """The whole page."""
    service = Service(
        EngineArgs(
            model="storyteller-draft",
            enable_lora=True,
            kv_cache_memory_bytes=1 << 22,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        ),
        ServeFlags(lora_dir=ROOT / "adapters"),
    )
    app = service.app([], None, True, CostAccounting.parse(*PRICE))
    sections = [HEAD, llm(), sampling_params(), engine_args(), serve_flags(), routes(app), metrics(service)]
    return "\n".join(sections)


def llm() -> str:
    """`LLM`: its docstring, and each public method with its signature."""
    lines = ["## LLM", "", inspect.getdoc(LLM) or "", "", *_method("LLM", LLM.__init__)]
    for name, member in vars(LLM).items():
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(function):
            lines += [f"### LLM.{name}", "", *_method(f"LLM.{name}", function, isinstance(member, property))]
    return "\n".join(lines)


def _method(shown: str, function: Any, is_property: bool = False) -> list[str]:
    signature = inspect.signature(function)
    given = [one for one in signature.parameters.values() if one.name != "self"]
    text = str(signature.replace(parameters=given))
    if len(shown + text) > 100 and given:
        text = "(\n    " + ",\n    ".join(_shown(given)) + ",\n)" + _returns(signature)
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z]|tqdm\b)", "", text)  # names without their modules
    return [f"```python\n{shown}{'' if is_property else text}\n```", "", inspect.getdoc(function) or "", ""]


def _shown(given: list[inspect.Parameter]) -> Iterator[str]:
    """The parameters, with a * before the first that is taken by its name alone."""
    star = next((one for one in given if one.kind is one.KEYWORD_ONLY), None)
    for one in given:
        if one is star and not any(other.kind is other.VAR_POSITIONAL for other in given):
            yield "*"
        yield str(one)


def _returns(signature: inspect.Signature) -> str:
    if signature.return_annotation is signature.empty:
        return ""
    return f" -> {inspect.formatannotation(signature.return_annotation)}"


def sampling_params() -> str:
    """`SamplingParams`: each field with its default and the comment beside it."""
    comments = field_comments(inspect.getsource(SamplingParams))
    rows = []
    for spec in fields(SamplingParams):
        says = comments.get(spec.name, "")
        if reason := spec.metadata.get("refused"):
            says = f"only the default is accepted: {reason}"
        rows.append((f"`{spec.name}`", _default(spec.default), says))
    head = f"## SamplingParams\n\n{inspect.getdoc(SamplingParams)}\n"
    return head + "\n" + _table(("field", "default", "what"), rows)


def field_comments(source: str) -> dict[str, str]:
    """field -> its comment: on its line, or on the lines before it."""
    found: dict[str, str] = {}
    before: list[str] = []
    for line in source.splitlines():
        declared = re.match(r"    (\w+): [^#]*?(?:#\s*(.*))?$", line)
        if comment := re.match(r"    # (.*)", line):
            before.append(comment[1])
        elif declared:
            found[declared[1]] = declared[2] or " ".join(before)
            before = []
        else:
            before = []
    return {name: text for name, text in found.items() if text}


def engine_args() -> str:
    """`EngineArgs`: each option by topic."""
    topics: dict[str, list] = defaultdict(list)
    for spec in fields(EngineArgs):
        flag = f"`--{spec.name.replace('_', '-')}`"
        topics[spec.metadata["topic"]].append(
            (f"`{spec.name}`", flag, _default(spec.default), spec.metadata["help"])
        )
    lines = [f"## EngineArgs\n\n{inspect.getdoc(EngineArgs)}\n\nFields of `LLM(...)`, flags of `ruvon`.\n"]
    for topic, rows in topics.items():
        lines.append(f"### {topic}\n\n{_table(('field', 'flag', 'default', 'what'), rows)}")
    return "\n".join(lines)


def serve_flags() -> str:
    """What `ruvon serve` takes beside these."""
    topics: dict[str, list] = defaultdict(list)
    hints = get_type_hints(ServeFlags, include_extras=True)
    for spec in fields(ServeFlags):
        option = get_args(hints[spec.name])[1]
        flag = f"`--{spec.name.replace('_', '-')}`"
        topics[option.rich_help_panel].append((flag, _default(spec.default), option.help))
    lines = ["## ruvon serve\n\nBeside the flags above:\n"]
    for topic, rows in topics.items():
        lines.append(f"### {topic}\n\n{_table(('flag', 'default', 'what'), rows)}")
    return "\n".join(lines)


def routes(app: Any) -> str:
    """The routes as the server's own page /docs shows them."""
    shown = docs_page(app.openapi(), pages={})
    folded = shown[shown.index("<details>") : shown.index("</main>")]
    folded = folded.replace("<h2>", '<p class="body">').replace("</h2>", "</p>")
    about = f"A running server shows the same at `/docs`, and as JSON at `/openapi.json`. {NOT_LISTED}"
    return f'## HTTP routes\n\n{about}\n\n<div class="routes">{folded}</div>\n'


def metrics(service: Service) -> str:
    """What /metrics has, by name."""
    rows = sorted(
        (f"`{family.name}`", family.type, family.documentation)
        for family in service.metrics.registry.collect()
    )
    about = "With speculation, adapters and a price, `/metrics` has these; a counter's name ends in `_total`."
    return f"## Metrics\n\n{about}\n\n{_table(('name', 'kind', 'what'), rows)}"


def _default(value: Any) -> str:
    return "" if value is MISSING else f"`{getattr(value, 'name', value)!s}`"


def _table(columns: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
