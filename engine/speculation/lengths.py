"""How many tokens to propose: as many as pay, for this request, in this crowd. Part 16.

A proposal costs a row of the next step, and a pass of the draft model, whether it stands or not. Promises the
lengths that give the most tokens per second by what was seen of late: how often each request's drafts were
accepted, and how long steps of so many rows took; and that all tries together cost no more than `Allowance`
grants. Knows no model.
"""

import math
from collections.abc import Sequence

from engine.listeners import Listener
from engine.scheduling.request import Request
from engine.speculation.allowance import Allowance

PRIOR = 0.7  # of acceptance, until there is more to go by
WEIGHT = 0.05  # of the newest observation
TRIES = 3  # before a time is believed: the first of a kind are slow
UP, DOWN = 0.1, 0.5  # of what was known, at most, that a time grows at once; of a shorter time's difference
ROW = 10  # longer times in a row: from then on each is believed
FADE = 0.004  # of what is known of other sizes, each step, for one request: a try costs more in a crowd
FORGET = 0.02  # with which a request that has no drafts comes back to what is usual
PAUSE = 16  # steps, at most, before it is asked again after a choice of none
CHECK = 32  # steps with drafts behind which there is one without: what a plain step costs is to be known


class Average:
    """A mean that forgets."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float, weight: float = WEIGHT) -> None:
        self.value += weight * (value - self.value)


class Seconds:
    """How long something of so many rows takes, by what was seen."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}  # by `size_of`
        self._tries: dict[int, int] = {}
        self._longer: dict[int, int] = {}  # how many times in a row it took longer than what was known
        self._faded: dict[int, float] = {}  # the share of its time that a size is taken for

    def add(self, rows: int, seconds: float) -> None:
        """What else runs on the machine only adds to a time: a shorter one says more than a longer one; but
        each that is longer again may raise it three times as much as the one before.
        """
        size = size_of(rows)
        old = self._of.get(size, seconds)
        longer = self._longer[size] = min(ROW, self._longer.get(size, -1) + 1) if seconds > old else -1
        self._of[size] = (
            min(seconds, old * (1 + UP * 3**longer)) if longer >= 0 else old + DOWN * (seconds - old)
        )
        self._tries[size] = self._tries.get(size, 0) + 1
        self._faded[size] = 1.0

    def fade(self, share: float, but: int | None = None) -> None:
        """What was not tried of late may have been measured in a bad moment: it looks cheaper by and by,
        until it is tried again.
        """
        for size in self._faded:
            if but is None or size != size_of(but):
                self._faded[size] *= 1 - share

    def knows(self, rows: int) -> bool:
        return self._tries.get(size_of(rows), 0) >= TRIES

    def seen(self, rows: int) -> float:
        """What so many rows took, however often that was tried, and not faded; else what `of` says."""
        return self._of.get(size_of(rows)) or self.of(rows)

    def of(self, rows: int) -> float:
        """Fewer rows never cost more than more rows did. What is not known lies on the line through the next
        two smaller sizes, or costs what the only one does; where there is none, nothing.
        """
        sizes, size = sorted(size for size in self._of if self.knows(size)), size_of(rows)
        below = [known for known in sizes if known <= size][-2:]
        if not below:
            return 0.0
        seen = [min(self._of[other] for other in sizes if other >= known) for known in below]
        times = [self._faded[known] * time for known, time in zip(below, seen, strict=True)]
        if len(below) == 1 or below[-1] == size:
            return times[-1]
        return times[1] + (times[1] - times[0]) / (below[1] - below[0]) * (size - below[1])


def size_of(rows: int) -> int:
    """Numbers of rows taken for one: up to 8 each is its own, then there are four to a power of two."""
    shift = max(0, (rows - 1).bit_length() - 3)
    return -(-rows >> shift) << shift


class Lengths(Listener):
    """At most `most` tokens for each request. It listens to the engine, to forget who has finished.

    Where plain steps run one ahead (Part 13), a step before and behind drafts cannot, and takes longer. So a
    plain step has two costs, and drafts are compared with the smaller one. Who runs the steps says which is
    which, in `ahead` and `on_top`, before telling or asking anything.
    """

    ahead = False  # whether plain steps of these requests run one ahead
    on_top = False  # whether the step in question was launched before the one before it had landed

    def __init__(self, most: int) -> None:
        self.most = most
        self.step, self.draft = Seconds(), Seconds()  # a step of the target; a pass of the draft model
        self.flow = Seconds()  # a plain step on top of another, by its requests
        self._usual = Average(PRIOR)
        self._accepted: dict[str, Average] = {}  # by request; one that is not here has what is usual
        self.allowance = Allowance()
        self._people = self._rest = self._unchecked = 0
        self._pause = 1

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts in a row the first `accepted` stood; the next one, if any, did not."""
        own = self._accepted.get(request_id)
        if own is None:
            own = self._accepted[request_id] = Average(self._usual.value)
        if not proposed:
            own.add(self._usual.value, FORGET)
        for i in range(min(accepted + 1, proposed)):
            own.add(float(i < accepted))
            self._usual.add(float(i < accepted), WEIGHT / 4)

    def found_nothing(self, request_id: str) -> None:
        """Asked for, and there was no draft: as good as one that did not stand."""
        self.observe(request_id, 1, 0)

    def stepped(self, people: int, rows: int, seconds: float) -> None:
        """A step of so many requests, in which all of them decoded."""
        flows = self.ahead and self.on_top
        if flows:
            self.flow.add(people, seconds)
        else:
            self.step.add(rows, seconds)
        self.step.fade(FADE / people, but=None if flows else rows)
        self.flow.fade(FADE / people, but=people if flows else None)
        self.draft.fade(FADE / people)
        self._unchecked = 0 if rows == people and flows == self.ahead else self._unchecked + 1

    def checks(self) -> None:
        """A step is under way that will tell what a plain step costs."""
        self._unchecked = 0

    def account(self, people: int, rows: int, tokens: int, seconds: float, proposing: float) -> None:
        """So many requests had so many rows in a step, and got so many tokens; `proposing` is what it took
        afterwards to propose. A step that took longer than its like is taken for one of them, and a plain
        step for a plain step; but one that had to wait for drafts, or for their absence, for what it took.
        """
        plain = self._plain.seen(people)
        if not plain:  # nothing is known yet
            return
        waited = self.ahead and not self.on_top and seconds < math.inf
        took = plain
        if rows > people or waited:
            took = min(seconds, self.step.seen(rows) or plain)
        self.allowance.spend((took + proposing) / plain, tokens / people)

    @property
    def _plain(self) -> Seconds:
        return self.flow if self.ahead else self.step

    def asks(self, people: int) -> bool:
        """Whether `choose` is to be asked. Not while tries have used up what they may; not when it is time
        for a plain step; and after a choice of none not for some steps, twice as many each time, unless there
        are more or fewer requests now.
        """
        if size_of(people) != self._people:
            self._people, self._rest, self._pause = size_of(people), 0, 1
        if self._rest:
            self._rest -= 1
            return False
        return self.allowance.is_open and self._unchecked < CHECK

    def chose(self, any_drafts: bool) -> None:
        """What came of it."""
        if any_drafts:
            self._pause = 1
        else:
            self._rest, self._pause = self._pause, min(2 * self._pause, PAUSE)

    def on_finish(self, request: Request) -> None:
        self._accepted.pop(request.id, None)

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """For each of these, which are all that decode: how many tokens to propose, at most its cap.

        One length k for all, from 0 to `most`: the fastest by `_speed`. But lengths are tried one by one:
        none is compared beyond the first whose step (a row for each request, and for each draft of k or its
        cap) is not known yet. Then a request's own drafts end before the first that is not worth its row: one
        that stands (with all before it) with a smaller probability than the tokens that the chosen step makes
        in the seconds that one of its drafts adds.
        """
        rates = [self._accepted.get(name, self._usual).value for name in request_ids]
        best = (0.0, 0.0, 0)
        for k in range(self.most + 1):
            best = max(best, (*self._speed(rates, caps, k), k))
            if not self._knows(len(caps), sum(min(k, cap) for cap in caps)):
                break
        speed, row_seconds, k = best
        return [
            next((j for j in range(min(k, cap)) if rate ** (j + 1) < speed * row_seconds), min(k, cap))
            for rate, cap in zip(rates, caps, strict=True)
        ]

    def _knows(self, people: int, drafts: int) -> bool:
        """Whether a step of so many requests, with so many drafts altogether, was tried often enough."""
        return self.step.knows(people + drafts) if drafts else self._plain.knows(people)

    def _speed(self, rates: Sequence[float], caps: Sequence[int], k: int) -> tuple[float, float]:
        """Tokens per second with drafts of k tokens where there may be so many; and the seconds that each
        row of a draft adds to such a step.
        """
        B, rows = len(rates), len(rates)
        tokens = 0.0
        for rate, cap in zip(rates, caps, strict=True):
            rows += min(k, cap)
            tokens += expected_tokens(rate, min(k, cap))
        if rows == B:
            return tokens / max(self._plain.of(B), 1e-9), 0.0
        floor = self.flow.of(B) if self.ahead else 0.0  # what waits takes no less than what does not
        step, bare = (max(floor, self.step.of(n)) for n in (rows, B))
        return tokens / max(step + k * self.draft.of(B), 1e-9), (step - bare) / (rows - B)


def expected_tokens(rate: float, k: int) -> float:
    """How many tokens a step with k drafts brings, if each draft whose predecessors stood stands with
    probability `rate`: the j-th stands with rate ** j, and behind the last that does comes one token more.
    """
    return sum(rate**j for j in range(k + 1))
