"""The README of a cut tree: what to write, in which file, how to check it, what to read, how to set up.

Made from the manifests alone, without a date, so that two cuts of the same source are the same file.
"""

from parts.manifest import Part

SETUP = """\
## Set up

The environment of the checkout that this folder was cut from serves here too: activate it, and stay in this
folder. `python -m parts` always takes the engine of the folder it is run in; each test run says which.

Without a checkout, make one here, with Python 3.11 to 3.13:

```
python -m venv .venv
. .venv/bin/activate                # Windows: .venv\\Scripts\\activate
pip install -c constraints.txt -e ".[dev]"
```
"""


def readme(part: Part, parts: list[Part], solved: bool) -> str:
    """Markdown for a tree cut at `part`."""
    sections = [
        _head(part, solved),
        SETUP,
        _read(part, solved),
        _exercises(part, solved),
        _check(part, solved),
        _road(part, parts),
    ]
    return "\n".join(sections)


def _head(part: Part, solved: bool) -> str:
    state = (
        "This is the finished part."
        if solved
        else f"All before it works; {part.number.label} needs {len(part.exercises)} functions that you write."
    )
    needs = f"It builds on Parts {', '.join(map(str, part.needs))}. " if part.needs else ""
    return f"""\
# {part.number.label}: {part.title}

{part.capability}

{state} {needs}Plan about {part.minutes} minutes.
The folder stands on its own: it holds the engine up to this part and nothing of later ones.
"""


def _exercises(part: Part, solved: bool) -> str:
    lines = ["## What was written" if solved else "## Third, write", ""]
    for number, exercise in enumerate(part.exercises, 1):
        tests = ", ".join(f"`{path}`{_unless(path)}" for path in exercise.tests)
        lines += [
            f"{number}. **`{exercise.name}`**{exercise.stars} in [`{exercise.path}`]({exercise.path})  ",
            f"   {exercise.write[0].upper()}{exercise.write[1:]}.  ",
            f"   {'Checked by' if solved else 'Turns green'}: {tests}",
        ]
    if any(exercise.grade for exercise in part.exercises):
        lines += ["", "★ is short, ★★ takes some thought, ★★★ is the hardest here."]
    if not solved:
        lines += [
            "",
            "Each of them is a signature, a docstring that says what it promises, and a line that raises",
            f"`NotImplementedError: {part.number.label}: ...`. Replace that line. Write them in this order.",
        ]
    return "\n".join(lines) + "\n"


def _unless(path: str) -> str:
    return " (skipped without a GPU)" if path.endswith("_gpu.py") else ""


def _check(part: Part, solved: bool) -> str:
    n = part.number
    if solved:
        return f"## Check it\n\n```\npython -m parts test {n}\npython -m parts run {n}\n```\n"
    return f"""\
## Check it

```
python -m parts test {n}                  # this part's tests
python -m parts test {n} -- FILE          # those of one file, which takes seconds
python -m parts test {n} -- -k NAME       # only those whose name contains NAME
python -m parts test {n} --all            # every file, also after one that fails
python -m parts test {n} --report r.json  # every file, and what came out as a file, for whoever grades it
python -m parts run {n}                   # the demo, once the tests are green
```

**Red tests are expected.** Before you write anything, tests in the files named above fail with
`NotImplementedError: {part.number.label}: ...`. The run ends with how many tests wait for each exercise
(`-- -v` lists them), and says how many fail for any other reason: none, to begin with. A test stops at the
first open exercise that it meets, so it may move on to the next exercise before it turns green. Tests run
from small to large, up to the end of the first file in which something else is wrong; the first such failure
is shown once more at the end, with the rule that is broken. When you are done, nothing waits and all of
`{part.tests}` is green.

To compare with the answer, run `python -m parts start {n} OTHER_FOLDER --solved` in the checkout that this
folder was cut from (this folder cannot be cut again).
"""


def _read(part: Part, solved: bool) -> str:
    runs = (
        "Run it with `python -m parts lab`."
        if solved
        else """Its outputs are in it. It runs in this folder
(`python -m parts lab`) once you have written this part's functions, and in the checkout at any time."""
    )
    return f"""\
## First, read

The article: [{part.article}](articles/{part.name}.md).

## Second, play

The notebook: [notebooks/{part.name}.ipynb](notebooks/{part.name}.ipynb). {runs}
"""


def _road(part: Part, parts: list[Part]) -> str:
    lines = ["## The road up to here", ""]
    for other in parts:
        if other.landed and other.number <= part.number:
            here = " (this one)" if other is part else ""
            lines.append(f"- {other.number.label}: [{other.title}](articles/{other.name}.md){here}")
    return "\n".join(lines) + "\n"
