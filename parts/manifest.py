"""What the manifests say: reads every `parts/*/part.toml`, and answers which part a file belongs to.

A lettered extension (A, B, ...) is a part after Part 20 and after the letters before it, and in all else like
the others.

Promises: a record per part, in order, or a `SeriesError` that names the file, the field and what is accepted.
Does not know git, nor how a tree is written (tree.py).
"""

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import get_origin

PARTS_PLANNED = 20  # after them come lettered extensions
TAG = r"(?:0[1-9]|1\d|20|[A-Z])"  # what names begin with: 03_kv_cache, A_many_devices

# In every tree, whatever the part. Everything else is owned by a part, or stays behind.
SHARED = (
    ".gitignore",
    "LICENSE",
    "articles/figures/drawing.py",
    "benchmarks/record.py",
    "constraints.txt",
    "parts/*.py",
    "pyproject.toml",
    "tests/*.py",
)


class SeriesError(Exception):
    """The tool cannot do what was asked; the message says what it needs."""


class Number(int):
    """A part's place in the series, by which parts are ordered: 1 to 20, then the letters, A as 21.

    As a text it is what a reader says: 3, or A.
    """

    @classmethod
    def read(cls, text: str | int) -> "Number":
        """From 3, "3", "03", "A" or "a". Raises ValueError for anything else."""
        if re.fullmatch("[A-Za-z]", name := str(text)):
            return cls(PARTS_PLANNED + 1 + ord(name.upper()) - ord("A"))
        if re.fullmatch("[0-9]+", name) and 1 <= int(name) <= PARTS_PLANNED:
            return cls(name)
        raise ValueError(f"{text!r}: accepted: 1 to {PARTS_PLANNED}, or a letter")

    @property
    def is_letter(self) -> bool:
        return self > PARTS_PLANNED

    @property
    def tag(self) -> str:
        """As the names of folders and files have it: 03, or A."""
        return str(self) if self.is_letter else f"{int(self):02d}"

    @property
    def label(self) -> str:
        """Part 3, or Extension A."""
        return f"{'Extension' if self.is_letter else 'Part'} {self}"

    def __repr__(self) -> str:
        return chr(ord("A") + self - PARTS_PLANNED - 1) if self.is_letter else int.__repr__(self)

    __str__ = __repr__


@dataclass(frozen=True)
class Exercise:
    """A function that the learner writes."""

    where: str  # engine/file.py:Class.method, or engine/file.py:function
    write: str  # what to do, on one line
    tests: tuple[str, ...]  # the test files that turn green with it, from small to large
    grade: int = 0  # how hard it is, 1 to 3; 0: not said

    @property
    def stars(self) -> str:
        """The grade as it is shown: stars behind a blank, or nothing."""
        return f" {'★' * self.grade}" if self.grade else ""

    @property
    def path(self) -> str:
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        return self.where.partition(":")[2]


@dataclass(frozen=True)
class Part:
    """One manifest."""

    number: Number
    slug: str
    title: str
    article: str
    capability: str
    minutes: int  # to read, write and play through
    landed: bool  # False: the manifest is here, the part is not
    needs: tuple[Number, ...] = ()  # the parts it builds on
    adds: tuple[str, ...] = ()  # patterns of its files under engine/
    files: tuple[str, ...] = ()  # patterns of other files, beyond those that carry its name or number
    exercises: tuple[Exercise, ...] = ()

    @property
    def name(self) -> str:
        """`03_kv_cache`: the folder under parts/, and the stem of the notebook and the article."""
        return f"{self.number.tag}_{self.slug}"

    @property
    def demo(self) -> str:
        return f"parts/{self.name}/demo.py"

    @property
    def tests(self) -> str:
        return f"tests/part{self.number.tag}"

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """Everything this part owns: what the manifest lists, and what carries the part's name or number."""
        tag = self.number.tag
        return (
            *self.adds,
            *self.files,
            f"parts/{self.name}/**",
            f"{self.tests}/**",
            f"notebooks/{self.name}.ipynb",
            f"articles/{self.name}.md",
            f"articles/figures/{tag}_*",
            f"benchmarks/part{tag}_*",
            f"benchmarks/results/part{tag}_*",
        )

    @cached_property
    def test_files(self) -> tuple[str, ...]:
        """The files that the exercises name, in the order of a learner's run: from small to large.

        Those that come first in their exercises' lists, the examples by hand, come before all that come
        second, and so on; a file of several lists has the last of its places there. So a mistake shows first
        where it is seen best.
        """
        places: dict[str, int] = {}
        for exercise in self.exercises:
            for place, path in enumerate(exercise.tests):
                places[path] = max(place, places.get(path, 0))
        return tuple(sorted(places, key=lambda path: places[path]))

    def announcement(self, exercise: Exercise) -> str:
        """The message of the NotImplementedError that stands in for the exercise."""
        return f"{self.number.label}: {exercise.write}"

    def announced(self, report: str) -> Exercise | None:
        """The exercise that a failing test's report waits for; None when it failed for another reason.

        A Triton kernel that is no Python function at the time shows the line that raises, not an error.
        """
        for exercise in self.exercises:
            if re.search(rf"NotImplementedError\W+{re.escape(self.announcement(exercise))}", report):
                return exercise
        return None


def matches(path: str, *patterns: str) -> bool:
    """Whether a pattern is the whole path: `*` stays in one folder, `folder/**` is everything below it."""
    return _expression(patterns).fullmatch(path) is not None


def owners(path: str, parts: list[Part]) -> list[Number]:
    """The numbers of the parts that own `path`; 0 stands for the files that every tree shares."""
    shared = [Number(0)] if matches(path, *SHARED) else []
    return shared + [part.number for part in parts if matches(path, *part.patterns)]


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern:
    """They are asked about every file of the repository, part by part: one expression for all is quick."""
    each = (re.escape(pattern).replace(r"/\*\*", "/.*").replace(r"\*", "[^/]*") for pattern in patterns)
    return re.compile("|".join(each), re.DOTALL)


def load_parts(root: Path) -> list[Part]:
    """Every manifest under root/parts, in the order of the series, landed or not."""
    manifests = sorted((root / "parts").glob("*/part.toml"))
    if not manifests:
        raise SeriesError(
            f"no part.toml under {root / 'parts'}: the series lives in a checkout of its repository, not in "
            "an installed package. Clone the repository and run `python -m parts` in it."
        )
    return sorted(map(_read, manifests), key=lambda part: part.number)


def find_part(parts: list[Part], number: int | str) -> Part:
    """The landed part with this number or letter, as `Number.read` takes them."""
    landed = [part for part in parts if part.landed]
    for part in landed:
        if str(part.number) == str(number).lstrip("0").upper():
            return part
    have = ", ".join(str(part.number) for part in landed)
    raise SeriesError(f"part {number} is not here (it may not have landed yet); accepted: {have}")


def read_toml(path: Path) -> dict:
    """The tables of the file, as they stand there."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SeriesError(f"{path}: not valid TOML: {error}") from error


def record(kind, raw: dict, place: str):
    """`raw` as a dataclass `kind`: no unknown field, none missing, each of its type; else SeriesError.

    A field's metadata may give the key that it has in the file.
    """
    fields = {field.metadata.get("key", field.name): field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(raw) - set(fields)):
        raise SeriesError(f"{place}: unknown field {unknown[0]!r}; accepted: {', '.join(fields)}")
    required = [key for key, field in fields.items() if field.default is dataclasses.MISSING]
    if missing := [key for key in required if key not in raw]:
        raise SeriesError(f"{place}: field {missing[0]!r} is missing")
    values = {}
    for key, value in raw.items():
        value = tuple(value) if isinstance(value, list) else value
        kind_of_value = fields[key].type
        accepted = get_origin(kind_of_value) or kind_of_value  # tuple for tuple[str, ...]
        assert isinstance(accepted, type)  # not a text: these modules evaluate their annotations
        if not isinstance(value, accepted) or (value == "" and key in required):
            not_empty = ", not empty" if key in required else ""
            raise SeriesError(f"{place}: {key} = {value!r}: accepted: {accepted.__name__}{not_empty}")
        values[fields[key].name] = value
    return kind(**values)


def _read(path: Path) -> Part:
    raw = read_toml(path)
    try:
        if "number" in raw:
            raw["number"] = Number.read(raw["number"])
        if isinstance(raw.get("needs"), list):
            raw["needs"] = [Number.read(need) for need in raw["needs"]]
    except ValueError as error:
        raise SeriesError(f"{path}: number and needs: {error}") from None
    raw["exercises"] = tuple(
        record(Exercise, entry, f"{path}: exercises[{i}]") for i, entry in enumerate(raw.get("exercises", ()))
    )
    part = record(Part, raw, str(path))
    if part.name != path.parent.name:
        raise SeriesError(f"{path}: number and slug make {part.name!r}, the folder is {path.parent.name!r}")
    if any(need >= part.number for need in part.needs):
        raise SeriesError(f"{path}: needs = {list(part.needs)}: accepted are parts before {part.number}")
    for exercise in part.exercises:
        if exercise.grade not in range(4):
            raise SeriesError(
                f"{path}: exercise {exercise.where!r}: grade = {exercise.grade}: accepted: 1 to 3, or none"
            )
        if not matches(exercise.path, *part.adds):
            raise SeriesError(f"{path}: exercise {exercise.where!r} is not in a file that the part adds")
    return part
