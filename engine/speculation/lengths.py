"""How many tokens to propose: as many as pay, by what stood of late and by what steps cost. Part 16.

A proposal costs a row of the next step, and a pass of the draft model, whether it stands or not. Promises
the lengths that give the most tokens per second by counts of what stood and by a table of costs
(engine/speculation/costs.py); and that where none pay, all tries together cost a small share of the time.
Reads no clock: the same counts give the same lengths. Knows no model.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

WEIGHT = 0.05  # of the newest observation in a rate
SHARE = 0.02  # of the time may go to tries, where no drafts pay


class Costs(Protocol):
    def seconds(self, sequences: int, drafts: float) -> float:
        """What a step of so many sequences takes, each with so many drafts, in the mean, if some have fewer;
        proposing them included.
        """

    def reading(self, tokens: int) -> float:
        """What a proposer takes to read so many tokens beside, of a text that it has not read along."""


class Lengths:
    """At most `most` tokens for each request."""

    def __init__(self, most: int, costs: Costs) -> None:
        self.most, self.costs = most, costs
        self._usual = 1.0  # the rate that new requests begin with: what was never tried looks good
        self._rates: dict[str, float] = {}  # by request: how often a draft stands behind those that do
        self._plain = 0  # tokens that have come without drafts since the last proposals
        self._late = 0  # tokens that had to be read before these
        self._all_alike: list[list[float]] = []  # [m, K]: of steps in which all m have as many
        self._seconds: dict[int, np.ndarray] = {}  # by S: see `seconds`

    @property
    def num_requests(self) -> int:
        """Of how many something is known."""
        return len(self._rates)

    def passed(self, sequences: int) -> None:
        """A step without drafts brought each of so many a token."""
        self._plain += sequences

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts in a row the first `accepted` stood; the next one, if any, did not."""
        self._plain += not proposed
        rate = self._rates.get(request_id, self._usual)
        for i in range(min(accepted + 1, proposed)):
            rate += WEIGHT * ((i < accepted) - rate)
            self._usual += WEIGHT * ((i < accepted) - self._usual)
        self._rates[request_id] = rate

    def proposing(self, late: int) -> None:
        """Somebody proposes, and reads so many tokens before that because it has not read along."""
        self._plain, self._late = 0, late

    def retain(self, request_ids: Collection[str]) -> None:
        """All others have left."""
        self._rates = {name: rate for name, rate in self._rates.items() if name in request_ids}

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """For each of these, which are all that decode: how many tokens to propose, at most its cap. Changes
        nothing: it is asked twice in a step.

        The m requests whose drafts stand most often get k tokens each, the others none: the m and k that give
        the most tokens per second. A request of rate r with k drafts brings 1 + r + ... + r ** k tokens; what
        the step takes, `seconds` says. Where it is fastest without drafts, a try may be due: the best m and
        k > 0, once SHARE of the time of all plain steps since the last try (they brought `_plain` tokens)
        pays for what this one takes beyond a plain step, and for what that one had to read first.
        """
        if not request_ids:
            return []
        # 1. What each k would bring, likeliest requests first; and what it takes.
        S, rates = len(caps), np.array([self._rates.get(name, self._usual) for name in request_ids])
        order = np.argsort(-rates, kind="stable")  # [S]
        gained = expected_tokens(rates[order], np.array(caps)[order], self.most) - 1  # [S, K]
        seconds = self.seconds(S)  # [S, K]
        # 2. The fastest of all; or a try.
        speed = (S + gained.cumsum(0)) / seconds  # [S, K]
        row, k = divmod(int(speed.argmax()), self.most + 1)
        if k == 0:
            row, k = divmod(int(speed[:, 1:].argmax()), self.most)
            k, plain = k + 1, seconds[0, 0]
            if SHARE * plain * self._plain / S < seconds[row, k] - plain + self.costs.reading(self._late):
                return [0] * S
        # 3. To each its own.
        lengths = [0] * S
        for s in order[: row + 1]:
            lengths[s] = min(k, caps[s])
        return lengths

    def seconds(self, S: int) -> np.ndarray:
        """[S, K]: what a step of S sequences takes if m = 1 to S of them have k = 0 to `most` drafts each.

        The table knows steps in which all have as many. So it is what m with drafts take, and the others add
        to it; but no less than if all shared these drafts, since a step's rows may cost by their number, nor
        than with a single one.
        """
        if S not in self._seconds:
            for n in range(len(self._all_alike) + 1, S + 1):
                self._all_alike.append([self.costs.seconds(n, j) for j in range(self.most + 1)])
            table = np.array(self._all_alike[:S])  # [S, K]
            k, m = np.arange(self.most + 1), np.arange(1, S + 1)
            added = table[-1, 0] - table[:, :1]  # [S, 1]
            drafts = np.outer(m, k)  # [S, K]
            shared = np.interp(drafts / S, k, table[-1])
            shared = np.where(drafts, np.maximum(shared, self.costs.seconds(S, 1 / S)), shared)
            self._seconds[S] = np.maximum(table + added, shared)
        return self._seconds[S]


def expected_tokens(rates: np.ndarray, caps: np.ndarray, most: int) -> np.ndarray:
    """rates[S], caps[S] -> [S, K]: how many tokens a step with k = 0 to `most` drafts brings, or its cap, if
    each draft whose predecessors stood stands with probability `rate`: the j-th stands with rate ** j, and
    behind the last that does comes one token more.
    """
    j = np.arange(most + 1)
    return np.where(j <= caps[:, None], rates[:, None] ** j, 0.0).cumsum(1)
