"""The rules of the series as functions: one line per breach, so that a planted breach can be shown caught.

They read source text alone and import nothing of what they check. `files` are paths relative to `root`.
"""

import ast
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from parts.manifest import PARTS_PLANNED, TAG, Number, Part, matches, owners
from parts.tree import tree_files

# The rooms of engine/ from bottom to top: a room imports only rooms that stand before it here.
# tools/draw_rooms.py draws its picture from this list, too.
ROOMS = (
    "zoo",
    "machine",
    "attention",
    "models",
    "layers",
    "text",
    "decoding",
    "requests",
    "cache",
    "kernels",
    "quantization",
    "execution",
    "scheduling",
    "lora",
    "speculation",
    "structured",
    "core",
    "parallel",
    "telemetry",
    "server",
    "wiring",
    "client",
    "load",
    "demo",
    "cli",
)
# Import paths of vLLM's that its users' scripts name. They stand outside the rooms, and no room imports them.
VLLM_PATHS = (
    "engine/inputs.py",
    "engine/sampling_params.py",
    "engine/utils/__init__.py",
    "engine/utils/argparse_utils.py",
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)|<img[^>]+src=\"([^\"]+)\"")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
# `ruvon` where a command stands: first on a line of code, after a prompt or a notebook's `!`. The prefix of a
# metric (`ruvon:steps_total`) is none.
SWITCH = re.compile(r"^## Switch it on\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^[`\s]*[!$%]*\s*ruvon\b(?!:)", re.MULTILINE)


def ownership(files: list[str], parts: list[Part]) -> list[str]:
    """Every file under engine/ belongs to exactly one part, and no pattern of a landed part is idle."""
    engine = [path for path in files if path.startswith("engine/")]
    wrong = [
        f"{path}: owned by {owners(path, parts) or 'no part'}"
        for path in engine
        if len(owners(path, parts)) != 1
    ]
    idle = [
        f"part {part.number}: {pattern!r} matches nothing"
        for part in parts
        for pattern in (*part.adds, *part.files)
        if part.landed and not any(matches(path, pattern) for path in files)
    ]
    return wrong + idle


def later_imports(root: Path, files: list[str], parts: list[Part]) -> list[str]:
    """No file imports from a part later than its own, at the top or in a function, nor what no part owns."""
    first = {path: min(owners(path, parts), default=None) for path in files}
    home = _home(root)
    there = {*files, *(folder.as_posix() for path in files for folder in PurePosixPath(path).parents)}
    breaches = []
    for path in files:
        if first[path] is None or not path.endswith((".py", ".ipynb")):
            continue
        number = first[path] or 1  # shared files are in the first tree too
        for line, module, must_exist in _imports(root, path):
            found = _files_of(module, there, home)
            if must_exist and not _is_module(module, there):
                breaches.append(f"{path}:{line}: {module} does not exist")
            for target in found:
                owner = first[target]
                if owner is None:
                    breaches.append(f"{path}:{line}: {module} is in {target}, which belongs to no part")
                elif owner > number:
                    breaches.append(f"{path}:{line}: {module} is in {target}, of part {owner} > {number}")
    return list(dict.fromkeys(breaches))


def early_showcase(root: Path, files: list[str], parts: list[Part]) -> list[str]:
    """Demos, notebooks, articles and tests before Part 20 use neither `LLM` nor the command `ruvon`, but for
    an article's section SWITCH: it says what a reader types in the full checkout.
    """
    breaches = []
    for part in [part for part in parts if part.number < PARTS_PLANNED]:
        for path in files:
            if path.startswith("engine/") or not matches(path, *part.patterns):
                continue
            if path.endswith((".py", ".ipynb")):
                nodes = list(ast.walk(_tree(root, path)))
                uses = ["LLM"] * any(_name(node) == "LLM" for node in nodes)
                uses += ["ruvon"] * any(map(_runs_ruvon, nodes))
            else:
                uses = []
            if path.endswith((".md", ".ipynb")):
                for code in CODE.findall(SWITCH.sub("", _prose(root, path))):
                    uses += re.findall(r"\bLLM\b", code) + ["ruvon"] * bool(COMMAND.search(code))
            if path.endswith(".ipynb") and COMMAND.search(_cells(root, path, "code")):
                uses.append("ruvon")
            breaches += [
                f"{path}: uses {name}, which part {PARTS_PLANNED} brings" for name in sorted(set(uses))
            ]
    return breaches


def uninstalled_imports(root: Path, files: list[str], parts: list[Part]) -> list[str]:
    """A notebook that imports from a folder beside engine/ says where it is: engine/ alone is installed."""
    breaches = []
    for path in files:
        if not re.fullmatch(r"notebooks/.+\.ipynb", path):
            continue
        says_where = "sys.path.insert(0, str(Path.cwd().parent))" in _cells(root, path, "code")
        for _line, module, _names in _imported(_tree(root, path), path):
            folder = root / module.split(".")[0]
            if not says_where and folder.is_dir() and folder.name != "engine":
                breaches.append(f"{path}: imports {folder.name}, which is not installed")
    return list(dict.fromkeys(breaches))


def broken_links(root: Path, files: list[str], parts: list[Part]) -> list[str]:
    """What an article or notebook links to is in its part's tree, but for later articles and notebooks."""
    breaches = []
    for part in [part for part in parts if part.landed]:
        there = set(tree_files(files, parts, part.number)) | {"README.md"}
        folders = {str(parent) for path in there for parent in PurePosixPath(path).parents}
        for path in (f"articles/{part.name}.md", f"notebooks/{part.name}.ipynb"):
            if path not in files:
                continue
            for link in (a or b for a, b in LINK.findall(_prose(root, path))):
                if re.match(r"\w+:", link):
                    continue
                target = _normal(PurePosixPath(path).parent / link)
                later = re.match(rf"(articles|notebooks)/({TAG})_", target)
                if target not in there | folders and not (later and Number.read(later[2]) > part.number):
                    breaches.append(
                        f"{path}: links to {link}, which is not in the tree of part {part.number}"
                    )
    return breaches


def rooms(root: Path, files: list[str], order: Sequence[str] = ROOMS) -> list[str]:
    """engine/ is one `__init__.py` and rooms (folders), all in `order`, each with its contract in a line.
    VLLM_PATHS stand beside them.
    """
    engine = [path for path in files if path.startswith("engine/") and path not in VLLM_PATHS]
    breaches = [
        f"{path}: stands in no room; only engine/__init__.py stands at the root of engine/"
        for path in engine
        if path.count("/") == 1 and path != "engine/__init__.py"
    ]
    standing = sorted({_room(path) for path in engine if path.count("/") > 1})
    breaches += [f"engine/{room}: is not in the order of rooms" for room in standing if room not in order]
    breaches += [f"engine/{room}: is in the order, and no room" for room in order if room not in standing]
    for room in standing:
        init = f"engine/{room}/__init__.py"
        text = contract(root, room) if init in files else ""
        if len(text.splitlines()) != 1:
            breaches.append(f"{init}: must begin with the room's contract, a docstring of one line")
    return breaches


def imports_upwards(root: Path, files: list[str], order: Sequence[str] = ROOMS) -> list[str]:
    """A room imports only rooms below it, and none of VLLM_PATHS; where the one above imports it in turn, the
    circle is named.
    """
    imports = room_imports(root, files)
    breaches = [
        f"{line}: imports {target}, which is there for scripts written for vLLM alone"
        for line, target in _imports_of_rooms(root, files)
        if target in VLLM_PATHS
    ]
    breaches = list(dict.fromkeys(breaches))  # a line may import several names
    for (room, above), lines in sorted(imports.items()):
        if room not in order or above not in order or order.index(above) < order.index(room):
            continue
        back = _way(imports, above, room)
        circle = "".join(f" → {target} ({imports[source, target][0]})" for source, target in back)
        closes = f"; this closes the circle {room} → {above}{circle}" if back else ""
        breaches.append(f"{room} imports {above}, which stands above it, in {', '.join(lines)}{closes}")
    return breaches


def computed_imports(root: Path, files: list[str], _: Sequence[str] = ROOMS) -> list[str]:
    """`import_module` is given a plain text, or a name that is computed within the file's own room, since
    `imports_upwards` sees nothing that is computed.
    """
    breaches = []
    for path in files:
        if path.count("/") < 2 or not re.fullmatch(r"engine/.+\.py", path):
            continue
        tree, own_room = _tree(root, path), f"engine.{_room(path)}."
        constants = {
            target.id: node.value
            for node in ast.walk(tree) if isinstance(node, ast.Assign)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and _name(node.func) == "import_module"):
                continue
            given = node.args[0]
            value = constants.get(given.id, given) if isinstance(given, ast.Name) else given
            text = ast.unparse(value).lstrip("f'\"").replace("{__package__}.", own_room)
            if not isinstance(given, ast.Constant) and not text.startswith(own_room):
                line = f"{path}:{node.lineno}"
                breaches.append(f"{line}: imports {ast.unparse(given)}, which is computed")
    return breaches


def room_imports(root: Path, files: list[str]) -> dict[tuple[str, str], list[str]]:
    """(room, room that it imports) -> the lines that do, as path:line, in functions and for types as well.

    The table of public names in engine/__init__.py is no import; to import a name by it is one of its file.
    What is found by scanning (architectures) or started as a program is none.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for line, target in _imports_of_rooms(root, files):
        pair = _room(line), _room(target)
        if target.count("/") < 2 or target in VLLM_PATHS or pair[0] == pair[1]:
            continue
        if line not in lines.get(pair, ()):
            lines.setdefault(pair, []).append(line)
    return lines


def _imports_of_rooms(root: Path, files: list[str]) -> Iterator[tuple[str, str]]:
    """(line as path:line, file that it imports) of all files in rooms."""
    home = _home(root)
    for path in files:
        if path.count("/") < 2 or path in VLLM_PATHS or not re.fullmatch(r"engine/.+\.py", path):
            continue
        for number, module, _ in _imported(_tree(root, path), path):
            for target in _files_of(module, files, home):
                yield f"{path}:{number}", target


def contract(root: Path, room: str) -> str:
    """The docstring of the room's `__init__.py`; empty: it has none."""
    text = (root / f"engine/{room}/__init__.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""


def _room(path: str) -> str:
    return path.split("/")[1]


def _way(imports: Collection[tuple[str, str]], start: str, end: str) -> list[tuple[str, str]]:
    """The shortest way from room to room along imports, as pairs; empty: there is none."""
    reached: dict[str, list[tuple[str, str]]] = {start: []}
    for room in (queue := [start]):
        for source, target in imports:
            if source == room and target not in reached:
                reached[target] = [*reached[room], (source, target)]
                queue.append(target)
    return reached.get(end, [])


def _normal(path: PurePosixPath) -> str:
    steps: list[str] = []
    for step in path.parts:
        if step == "..":
            steps = steps[:-1]
        elif step != ".":
            steps.append(step)
    return "/".join(steps) or "."


def _cells(root: Path, path: str, kind: str) -> str:
    cells = json.loads((root / path).read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind)


def _prose(root: Path, path: str) -> str:
    return (
        _cells(root, path, "markdown")
        if path.endswith(".ipynb")
        else (root / path).read_text(encoding="utf-8")
    )


def _tree(root: Path, path: str) -> ast.AST:
    if path.endswith(".py"):
        return ast.parse((root / path).read_text(encoding="utf-8"), filename=path)
    # IPython's own lines (%, !) are no Python: an empty statement keeps the block they stand in whole.
    return ast.parse(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", _cells(root, path, "code")), filename=path)


def _name(node: ast.AST) -> str | None:
    for field in ("id", "attr", "name"):
        if isinstance(value := getattr(node, field, None), str):
            return value
    return None


def _runs_ruvon(node: ast.AST) -> bool:
    """A string that is the command with arguments, or a list whose first word it is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.startswith("ruvon ")
    first = node.elts[0] if isinstance(node, ast.List | ast.Tuple) and node.elts else None
    return isinstance(first, ast.Constant) and first.value == "ruvon"


def _home(root: Path) -> dict[str, str]:
    """The table of public names in engine/__init__.py: name -> module."""
    for node in ast.parse((root / "engine/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return {name: f"engine.{module}" for name, module in ast.literal_eval(node.value).items()}
    return {}


def _imports(root: Path, path: str) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, whether it must be a module) of all that the file imports or names as a module."""
    tree = _tree(root, path)
    yield from _imported(tree, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _root_of(node) == "engine":
            yield node.lineno, ast.unparse(node), False
        # "engine.decoding.sampling" as text: monkeypatch, python -m
        elif isinstance(node, ast.Constant) and re.fullmatch(r"engine(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value), False


def _root_of(node: ast.expr) -> str | None:
    """The name that a.b.c begins with; None where it begins with something else than a name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _imported(tree: ast.AST, path: str) -> Iterator[tuple[int, str, bool]]:
    """The same of what is imported, by a statement anywhere or by `import_module` with a plain text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.name.startswith("engine.")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = PurePosixPath(path).parts[: -node.level]
                base = ".".join([*package, base]).strip(".")
            yield node.lineno, base, base.startswith("engine.")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", False
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module":
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value), False


def _is_module(module: str, there: Collection[str]) -> bool:
    """`there`: files and folders."""
    stem = module.replace(".", "/")
    return stem in there or f"{stem}.py" in there


def _files_of(module: str, files: Collection[str], home: dict[str, str]) -> list[str]:
    """The files that importing `module` runs: every package on the way, and the home of a public name."""
    steps = module.split(".")
    names = [".".join(steps[: i + 1]) for i in range(len(steps))]
    if steps[0] == "engine" and len(steps) > 1 and steps[1] in home:
        names.append(home[steps[1]])
    stems = [name.replace(".", "/") for name in names]
    return [path for stem in stems for path in (f"{stem}.py", f"{stem}/__init__.py") if path in files]
