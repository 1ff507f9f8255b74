"""The articles and notebooks as a site: `make site`, then `python -m http.server -d out/site`.

    python tools/build_site.py [FOLDER]       # default: out/site; a warning is an error

Sphinx reads Markdown and notebooks as they are. What this adds: a front page, the road as its navigation, an
API reference, and a page for each file that an article links to: code is a click away, and no download.
Figures that can be played load modules and recordings, which a browser reads over HTTP only: a page that is
opened as a file shows their pictures. Where the site will be is in RUVON_SITE, for links that must be whole
(site/pages.py).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from parts.manifest import TAG, Part, load_parts  # noqa: E402
from tools.site_pages import NOT_FOUND, in_colab, landing  # noqa: E402
from tools.slides import slides  # noqa: E402

LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")
PICTURE = re.compile(r"^!\[[^\]]*\]\(figures/(\w+)\.svg\)$", re.MULTILINE)  # alone in its line
FENCE = re.compile(r"^(```+).*?^\1\s*$", re.DOTALL | re.MULTILINE)
BESIDE = (  # the articles beside the road, in the order of the navigation
    "articles/use.md",
    "articles/glossary.md",
    "articles/course.md",
    "articles/differs_from_vllm.md",
)
README = "readme.md"  # README's page; the first page is a shorter one
FIGURES = ROOT / "articles" / "figures"
PLAYER = ROOT / "engine" / "server" / "pages"  # play.js and what it needs, which a server's pages use, too
LANGUAGES = {
    ".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".html": "html", ".js": "javascript",
    ".css": "css", ".sh": "bash",
}  # fmt: skip


class Stage:
    """The folder that Sphinx reads."""

    def __init__(self, folder: Path, parts: list[Part]) -> None:
        self.folder, self.parts = folder, parts
        self.pages = {f"{kind}/{part.name}.{end}" for part in parts for kind, end in KINDS.items()}
        self.pages |= set(BESIDE)
        self.sources: set[str] = set()

    def build(self) -> None:
        from tools.api_reference import page as api_reference  # imports torch and the engine

        for name in ("conf.py", "pages.py", "search.js", "favicon.svg"):
            shutil.copy(ROOT / "site" / name, self._at(name))
        for name in ("ruvon.css", "card.png"):
            shutil.copy(ROOT / "site" / name, self._at(f"_static/{name}"))
        for file in PLAYER.glob("play*"):
            shutil.copy(file, self._at(f"_static/{file.name}"))
        for file in FIGURES.glob("*.play.json"):
            shutil.copy(file, self._at(f"_static/{file.name}"))
        shutil.copytree(FIGURES, self.folder / "articles" / "figures")
        readme = (ROOT / "README.md").read_text()
        self._at("index.md").write_text(self._front(readme))
        self._at(README).write_text(self._linked(readme, "README.md"))
        self._at("api.md").write_text(api_reference())
        self._at("404.md").write_text(NOT_FOUND)
        for path in BESIDE:
            self._at(path).write_text(self._linked((ROOT / path).read_text(), path))
        for part in self.parts:
            self._at(f"articles/{part.name}.md").write_text(self._article(part))
            self._at(f"notebooks/{part.name}.ipynb").write_text(self._notebook(part))
        for path in sorted(self.sources):
            self._at(f"source/{path}.md").write_text(_source(ROOT / path, path))

    def _at(self, path: str) -> Path:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        return self.folder / path

    def _front(self, readme: str) -> str:
        text = self._linked(landing(readme, self.parts), "README.md")
        road = [f"{part.number}. {part.title} <articles/{part.name}>" for part in self.parts]
        beside = [path.removesuffix(".md") for path in (*BESIDE, "api.md", README)]
        return text + _navigation("The road", road) + _navigation("Beside it", beside)

    def _article(self, part: Part) -> str:
        path = f"articles/{part.name}.md"
        text = played(self._linked((ROOT / path).read_text(), path))
        return (
            f"{text}\n\n```{{toctree}}\n:hidden:\n\nNotebook {part.number} <../notebooks/{part.name}>\n```\n"
        )

    def _notebook(self, part: Part) -> str:
        path = f"notebooks/{part.name}.ipynb"
        notebook = json.loads((ROOT / path).read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self._linked("".join(cell["source"]), path)
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            notebook["cells"][0]["source"] += in_colab(path, repository)
        return json.dumps(notebook)

    def _linked(self, text: str, page: str) -> str:
        """The text of `page`, with links to files of the repository that lead to pages of this site."""
        return _outside_fences(text, lambda prose: LINK.sub(lambda link: self._link(link, page), prose))

    def _link(self, link: re.Match, page: str) -> str:
        opens, target, anchor, closes = link.groups(default="")
        parent = PurePosixPath(page).parent
        path = _normal(parent / target)
        if path in self.pages or path.startswith("articles/figures/"):
            return link[0]
        if path == "README.md":
            path = README
        elif re.match(rf"(articles|notebooks)/{TAG}_", path):
            return link[0]  # Sphinx says that it is not there
        else:
            self.sources.add(path)
            path, anchor = f"source/{path}.md", ""
        return opens + "../" * len(parent.parts) + path + anchor + closes


KINDS = {"articles": "md", "notebooks": "ipynb"}


def played(article: str) -> str:
    """The article, with each picture that has a recording beside it inside the element that plays it."""

    def playing(picture: re.Match) -> str:
        recording = f"{picture[1]}.play.json"
        if not (FIGURES / recording).exists():
            return picture[0]
        return f'<ruvon-play src="../_static/{recording}">\n\n{picture[0]}\n\n</ruvon-play>'

    text = PICTURE.sub(playing, article)
    if text == article:
        return article
    return f'{text}\n\n<script type="module" src="../_static/play.js"></script>\n'


def _navigation(caption: str, entries: list[str]) -> str:
    lines = "\n".join(entries)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    done, at = [], 0
    for fence in FENCE.finditer(text):
        done += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*done, change(text[at:])])


def _normal(path: PurePosixPath) -> str:
    steps: list[str] = []
    for step in path.parts:
        steps = steps[:-1] if step == ".." else [*steps, step]
    return "/".join(steps)


def _source(file: Path, path: str) -> str:
    """A page with a file's text, or the names of a folder's files. Raises OSError: there is no such file."""
    if file.is_dir():
        names = "\n".join(sorted(one.name for one in file.iterdir() if not one.name.startswith((".", "__"))))
        return f"---\norphan: true\n---\n# {path}\n\n```text\n{names}\n```\n"
    language = LANGUAGES.get(file.suffix, "text")
    return f"---\norphan: true\n---\n# {path}\n\n``````{language}\n{file.read_text()}\n``````\n"


def main(folder: Path) -> None:
    parts = [part for part in load_parts(ROOT) if part.landed]
    with tempfile.TemporaryDirectory() as stage:
        Stage(Path(stage), parts).build()
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            "-b",
            "html",
            "-d",
            f"{stage}/.trees",
        ]
        status = subprocess.call([*command, stage, folder])
    if status == 0:
        (folder / "slides.html").write_text(slides(parts))
        copy_pictures(folder)
        whole_links(folder / "404.html", os.environ.get("RUVON_SITE", ""))
    sys.exit(status)


def copy_pictures(folder: Path) -> None:
    """Copy the pictures of README's HTML, which Sphinx leaves as it is, to where that page looks for them."""
    for path in re.findall(r'src(?:set)?="(articles/figures/[^"]+)"', (ROOT / "README.md").read_text()):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)


def whole_links(page: Path, site: str) -> None:
    """Let the page find its style from wherever it is shown: GitHub shows 404.html at any path."""
    if site:
        base = f'<base href="{urlsplit(site).path.rstrip("/")}/">'
        page.write_text(page.read_text().replace("<head>", f"<head>{base}", 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "out" / "site")
