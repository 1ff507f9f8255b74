"""For Sphinx: what each page gets beside its text: neighbours on the road, a description, a link to edit it.

Where the site and the repository are is known to whoever publishes: RUVON_SITE (https://owner.github.io/ruvon/),
and GitHub's own GITHUB_SERVER_URL and GITHUB_REPOSITORY. Without them, pages have no such links.
"""

import os
import re
from html import escape

from docutils import nodes

SITE = os.environ.get("RUVON_SITE", "").rstrip("/")
REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "")
HOME = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{REPOSITORY}" if REPOSITORY else ""
ROAD = re.compile(r"articles/(\d\d|[A-Z])_")
SHORTEST = 60  # characters of a paragraph that describes a page
PICTURE = re.compile(r'(<a [^>]*>\s*)?(<img [^>]*src="([^"]*_images/[^"]+)"[^>]*>)')


def setup(app) -> dict[str, bool]:
    app.connect("html-page-context", add, priority=900)  # after the theme, whose navigation it mends
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add(app, page: str, template: str, context: dict, doctree) -> None:
    tree = context.get("furo_navigation_tree", "")  # its captions are headings of no level
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')
    road = sorted(name for name in app.env.found_docs if ROAD.match(name))
    for way, name in neighbours(page, road).items():
        title = app.env.titles[name].astext() if name else ""
        context[way] = {"link": context["pathto"](name), "title": escape(title)} if name else None
    about = description(doctree) if doctree else ""
    title = doctree.next_node(nodes.title) if doctree else None
    context["metatags"] = context.get("metatags", "") + tags(
        page, title.astext() if title else "ruvon", about
    )
    context["body"] = enlarged(reachable(context.get("body", "")))
    if link := edit_link(page):
        words = "In the repository" if page.startswith("source/") else "Edit this page"
        context["body"] += f'<p class="edit-page"><a href="{link}">{words}</a></p>'


def neighbours(page: str, road: list[str]) -> dict[str, str | None]:
    """`prev` and `next` of an article, or of its notebook; nothing for another page."""
    kind, _, name = page.partition("/")
    article = f"articles/{name}"
    if kind not in ("articles", "notebooks") or article not in road:
        return {}
    at = road.index(article)
    before = road[at - 1] if at else None
    return {
        "prev": article if kind == "notebooks" else before,
        "next": road[at + 1] if at + 1 < len(road) else None,
    }


def reachable(body: str) -> str:
    """What may be wider than its place, and is pushed sideways, is reached by the Tab key, too."""
    return body.replace("<pre>", '<pre tabindex="0">').replace(
        '<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'
    )


def enlarged(body: str) -> str:
    """Each picture that is no link yet leads to itself alone, where a browser shows it at any size."""
    return PICTURE.sub(
        lambda found: found[0] if found[1] else f'<a class="enlarge" href="{found[3]}">{found[2]}</a>', body
    )


def description(doctree) -> str:
    """The first paragraph that says something."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if len(text) >= SHORTEST and not re.match(r"(Part|Extension) \w+( of|,)", text):
            return text if len(text) <= 200 else text[:200].rpartition(" ")[0] + " …"
    return ""


def tags(page: str, title: str, about: str) -> str:
    """What search engines and previews of links read."""
    said = {
        "og:title": title,
        "og:site_name": "ruvon",
        "og:type": "website" if page == "index" else "article",
    }
    if about:
        said["og:description"] = about
    if SITE:
        said["og:url"] = f"{SITE}/{page}.html"
        said["og:image"] = f"{SITE}/_static/card.png"
        said["og:image:alt"] = "ruvon: an LLM inference engine in twenty parts"
    found = [f'<meta property="{name}" content="{escape(value)}" />' for name, value in said.items()]
    if about:
        found.append(f'<meta name="description" content="{escape(about)}" />')
    return "\n".join(found) + "\n"


def edit_link(page: str) -> str:
    """Where the page's text is changed; empty where that is unknown, or where no file has it."""
    kind, _, rest = page.partition("/")
    files = {"articles": f"{page}.md", "notebooks": f"{page}.ipynb", "source": rest, "readme": "README.md"}
    way = "blob" if kind == "source" else "edit"  # of a file or a folder
    return f"{HOME}/{way}/main/{files[kind]}" if HOME and kind in files else ""
