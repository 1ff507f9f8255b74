"""Simulated machines: what steps take there, how often drafts stand, and a clock that adds it up."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engine.speculation.lengths import DraftLengths

MOST = 5  # drafts
PROMPT = 20  # tokens that a proposer has to read before the first draft of a request


@dataclass(frozen=True)
class Machine:
    """It is its own table of step times, as if they had been measured without any error."""

    step: Callable[[int], float]  # rows -> seconds of the target's pass
    draft: float = 0.1  # a pass of the proposer
    read: float = 0.002  # and each token that it reads
    host: float = 0.0  # for each step: beside the device while steps run ahead, so without drafts
    stands: tuple[float, ...] = (0.8,)  # how often a draft does, if those before it did; of requests by turns
    later: tuple[float, ...] | None = None  # the same in the second half, where that is another

    def seconds(self, sequences: int, drafts: float) -> float:
        if not drafts:
            return max(self.host, self.step(sequences))
        verifying = self.host + self.step(round(sequences * (drafts + 1)))
        readers = min(1, drafts) * sequences  # less than one draft each: some have none
        return verifying + drafts * self.draft + readers * self.seconds_to_read(1 + int(drafts) // 2)

    def seconds_to_read(self, tokens: int) -> float:
        return self.read * tokens

    def rate(self, number: int, is_late: bool) -> float:
        """Of the request of this number."""
        rates = self.later if is_late and self.later else self.stands
        return rates[number % len(rates)]


SOME = Machine(lambda rows: 1 + 0.05 * rows)
MACHINES = {
    "rows cost nothing": Machine(lambda rows: 1.0),
    "each row costs a step": Machine(lambda rows: 0.5 + 0.5 * rows),
    "rows cost something": SOME,
    "many rows take another form": Machine(lambda rows: (1.0 if rows < 8 else 2.5) + 0.02 * rows),
    "the draft model is slow": Machine(lambda rows: 1 + 0.01 * rows, draft=0.9),
    "to catch up is dear": Machine(SOME.step, read=0.05),
    "drafts hardly ever stand": Machine(SOME.step, stands=(0.1,)),
    "half as fast": Machine(lambda rows: 2 + 0.1 * rows, draft=0.2, read=0.004),
    "the second row is dear": Machine(
        lambda rows: 1.0 if rows == 1 else 1.72 + 0.005 * rows, draft=0.03, stands=(0.85,)
    ),
}
OTHERS = {
    "steps run ahead": Machine(SOME.step, host=0.6),
    "they do, and drafts stand every other time": Machine(SOME.step, host=0.6, stands=(0.5,)),
    "to catch up is dear, and for nothing": Machine(SOME.step, read=0.05, stands=(0.1,)),
    "some requests are easy, some are not": Machine(SOME.step, stands=(0.95, 0.05)),
    "texts become easy": Machine(SOME.step, stands=(0.1,), later=(0.8,)),
    "texts become hard": Machine(SOME.step, stands=(0.8,), later=(0.1,)),
}


class Fixed(DraftLengths):
    """Always as many."""

    def choose(self, request_ids, caps):
        return [min(self.max_drafts, cap) for cap in caps]


def speed(machine: Machine, people: int, lengths: DraftLengths, steps: int = 1000) -> float:
    """Tokens per second, as multiples of those without drafts, until each of so many people has got as many
    tokens as in so many plain steps. Requests of 40 to 120 tokens follow one another.
    """
    random, now, told, number = Random(0), 0.0, 0, 0
    requests: list[Asked] = []
    while told < steps * people:
        while len(requests) < people:
            number += 1
            requests.append(Asked(str(number), random.randint(40, 120), number))
        drafts = lengths.choose(
            [r.name for r in requests], [min(MOST, r.limit - r.said - 1) for r in requests]
        )
        asked = [(request, k) for request, k in zip(requests, drafts, strict=True) if k]
        # 1. What the step takes, and what was proposed for it.
        if asked:
            unread = [PROMPT + request.said - request.read for request, _ in asked]
            lengths.observe_proposals(sum(max(0, tokens - MOST - 1) for tokens in unread))
            now += machine.host + machine.draft * max(drafts) + machine.seconds_to_read(sum(unread))
            now += machine.step(people + sum(drafts))
        else:
            now += machine.seconds(people, 0)
        # 2. What stood.
        for request, k in zip(requests, drafts, strict=True):
            request.read = PROMPT + request.said if k else request.read
            rate, stood = machine.rate(request.number, told > steps * people / 2), 0
            while stood < k and random.random() < rate:
                stood += 1
            request.said, told = request.said + stood + 1, told + stood + 1
            lengths.observe(request.name, k, stood)
        requests = [request for request in requests if request.said < request.limit]
        lengths.retain({request.name for request in requests})
    return told / people * machine.seconds(people, 0) / now


@dataclass
class Asked:
    """A request: tokens to be said, said so far, and read by the proposer."""

    name: str
    limit: int
    number: int
    said: int = 0
    read: int = 0


def best_fixed(machine: Machine, people: int) -> tuple[float, int]:
    """The speed of the best length of all, and that length."""
    return max((speed(machine, people, Fixed(k, machine)), k) for k in range(MOST + 1))
