"""GET /docs: every route and every field, as a page without scripts. Part 4.

The page is written from the app's own description, /openapi.json, so that it cannot say something else. It
loads nothing, from this host or another. Both are open if the server has an API key: they say nothing that
this package's source does not say.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

STYLE = """
:root { color-scheme: light dark;
  --paper: #f6f7f9; --card: #fff; --ink: #16202c; --soft: #566270; --line: #dfe4ea; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0e1217; --card: #171d25; --ink: #e8edf3; --soft: #9aa6b4; --line: #2a333f; }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 8px 0;
  padding: 8px 14px; }
summary { cursor: pointer; overflow-wrap: anywhere; }
nav a { margin-right: 1rem; }
@media (pointer: coarse) {
  summary { padding: .6rem 0; } nav a { display: inline-block; min-width: 40px; padding: .6rem 0; }
}
summary b { display: inline-block; min-width: 3.5rem; }
summary span { color: var(--soft); margin-left: .6rem; }
h2, p { margin: 12px 0 4px; } h2 { font-size: 15px; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: 3px 12px 3px 0; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 400; } th:first-child, code { font-family: ui-monospace, monospace; }
th:first-child { width: 36%; }
td:last-child { width: 6rem; }
@media (max-width: 40rem) {
  table { font-size: 13px; } th, td { padding-right: 6px; } td:last-child { width: 4rem; }
}
"""
STYLE_HASH = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# Keywords of JSON Schema that bound a value, and how the page says them.
BOUNDS = {
    "minimum": "from {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "to {:g}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
    "pattern": "matching {}",
}
PAGES = {"/": "Chat", "/dashboard": "Dashboard", "/engine": "Engine"}  # which later parts may have added
MAX_DEPTH = 3  # fields of fields of fields are shown
NOT_LISTED = "Not listed: the pages that a browser shows, and what they alone load; both may change."


class FieldRow(NamedTuple):
    """A row of a table: one field of an object."""

    name: str  # with the names of the fields around it, such as messages[].role
    kind: str  # what the field accepts, in words
    is_required: bool


def docs_page(description: Mapping[str, Any], pages: Mapping[str, str]) -> str:
    """The page for an OpenAPI description, as HTML, with links to `pages`: path -> name."""
    title = escape(f"{description['info']['title']}: routes and fields")
    schemas = description.get("components", {}).get("schemas", {})
    routes = []
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            routes.append(_route(method, path, operation, schemas))
    links = []
    for path, name in pages.items():
        # Relative to /docs, so that it also leads there under a proxy's path.
        address = "./" if path == "/" else path.removeprefix("/")
        links.append(f'<a href="{address}">{name}</a>')
    nav = f'<nav aria-label="page">{" ".join(links)}</nav>' if links else ""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>{nav}<main>'
        f'<h1>{title}</h1><p>The same as JSON: <a href="openapi.json">/openapi.json</a>. {NOT_LISTED}</p>'
        f"{_key_rule(description)}"
        f"{''.join(routes)}</main>"
        "</body></html>"
    )


def _key_rule(description: Mapping[str, Any]) -> str:
    """Which routes need the API key, as a paragraph; empty if the server has no key."""
    if not description.get("security"):
        return ""
    open_paths = []
    for path, operations in description["paths"].items():
        if any(operation.get("security") == [] for operation in operations.values()):
            open_paths.append(f"<code>{escape(path)}</code>")
    but = f", but {', '.join(open_paths)}" if open_paths else ""
    return f"<p>Each route{but} needs the header <code>Authorization: Bearer KEY</code>.</p>"


def _route(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """One route as HTML: the fields of its body and of its answers. `schemas` are the description's schemas
    that others refer to, by name.
    """
    about = escape(operation.get("summary", ""))
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> <span>{about}</span>"
    parts = [f"<details><summary>{head}</summary>"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        parts.append(_table("Body", _fields(body, schemas), if_empty="none"))
    error_statuses = []
    for status, response in operation["responses"].items():
        if not status.startswith("2"):
            error_statuses.append(status)
            continue
        for media_type, content in response.get("content", {}).items():
            if media_type == "text/event-stream":
                name, schema = "Each event of a stream", _event_schema(content["itemSchema"])
            else:
                name, schema = "Answer", content.get("schema", {})
            heading = f"{name} ({status}, {media_type})"
            parts.append(_table(heading, _fields(schema, schemas), if_empty=_kind(schema, schemas)))
    parts.append(f"<p>Errors: {escape(', '.join(error_statuses))}</p></details>")
    return "".join(parts)


def _event_schema(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a stream's events. `item` is the schema of one item of the stream, as `openapi_responses`
    makes it: an item's data is [DONE] or an event.
    """
    _done, event = item["properties"]["data"]["anyOf"]
    return event["contentSchema"]["anyOf"][0]


def _table(heading: str, rows: Iterator[FieldRow], if_empty: str) -> str:
    """A table of `rows`; the paragraph `if_empty` if there are no rows."""
    lines = []
    for row in rows:
        required = "required" if row.is_required else ""
        cells = f"<td>{escape(row.kind)}</td><td>{required}</td>"
        lines.append(f'<tr><th scope="row">{escape(row.name)}</th>{cells}</tr>')
    content = f"<table>{''.join(lines)}</table>" if lines else f"<p>{if_empty}</p>"
    return f"<h2>{escape(heading)}</h2>{content}"


def _fields(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[FieldRow]:
    """A row for each field of an object.

    After a field that holds objects come their fields, such as messages[].role after messages. `prefix` is
    put before each name. `depth` is the number of objects around this one.
    """
    schema = _resolved(schema, schemas)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield FieldRow(prefix + name, _kind(field, schemas), is_required=name in required)
        if depth + 1 < MAX_DEPTH:
            for inner_schema, brackets in _objects(field, schemas):
                inner_prefix = f"{prefix}{name}{brackets}."
                yield from _fields(inner_schema, schemas, inner_prefix, depth + 1)


def _objects(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """(schema, brackets) of each object with named fields that a field may hold. The brackets are "" for the
    object itself, "[]" for an object in a list, "[][]" for one in a list of lists.
    """
    field = _resolved(field, schemas)
    if "properties" in field:
        yield field, ""
    for choice in _choices(field):
        yield from _objects(choice, schemas)
    if "items" in field:
        for inner_schema, brackets in _objects(field["items"], schemas):
            yield inner_schema, "[]" + brackets


def _choices(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a field's value must fit one; none if there is no such choice."""
    return [*field.get("anyOf", ()), *field.get("oneOf", ())]


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that `schema` refers to, or `schema` itself if it is no reference."""
    reference = schema.get("$ref")  # such as #/components/schemas/Message
    return schemas[reference.rpartition("/")[2]] if reference else schema


def _kind(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """What a field accepts, in words, such as "integer (from 0) or null"."""
    field = _resolved(field, schemas)
    if "enum" in field:
        return " or ".join(json.dumps(value) for value in field["enum"])
    if "const" in field:
        return json.dumps(field["const"])
    choices = _choices(field)
    if choices:
        kinds = list(dict.fromkeys(_kind(choice, schemas) for choice in choices))  # each of them once
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")  # a number may be whole
        kind = " or ".join(kinds)
    elif field.get("type") == "array":
        kind = f"list of {_kind(field.get('items', {}), schemas)}"
    else:
        kind = field.get("type", "any value")
    bounds = [words.format(field[keyword]) for keyword, words in BOUNDS.items() if keyword in field]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind
