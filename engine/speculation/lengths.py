"""How many tokens to propose: as many as make the output fastest. Part 16.

A draft takes a row of the next step and a pass of the draft model, whether it is accepted or not. Promises
the numbers of drafts that give the most tokens per second, by counts of accepted drafts and a table of step
times (engine/speculation/step_times.py); and that where no drafts pay, the tries that find out whether they
do by now take a small share of the time. Reads no clock: the same counts give the same numbers. Knows no
model.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

WEIGHT = 0.05  # of the newest observation in an acceptance rate
TRY_SHARE = 0.02  # of the time may go to tries, where no drafts pay


class TimeTable(Protocol):
    """What `StepTimes` says; tests have simulated machines."""

    def seconds(self, sequences: int, drafts: float) -> float:
        """Seconds of a step of so many sequences that have so many drafts each, in the mean; to propose them
        is included.
        """

    def seconds_to_read(self, tokens: int) -> float:
        """Seconds that a proposer takes to read so many tokens that it has not read yet."""


class DraftLengths:
    """Chooses the number of drafts of each request, at most `max_drafts`."""

    def __init__(self, max_drafts: int, times: TimeTable) -> None:
        self.max_drafts, self.times = max_drafts, times
        self._rates: dict[str, float] = {}  # by request: how often a draft is accepted, if those before are
        self._mean_rate = 1.0  # of all requests, for new ones; at the start 1, so that drafts are tried
        self._plain_tokens = 0  # that have come without drafts since something was proposed last
        self._unread_tokens = 0  # that had to be read before that
        self._equal_seconds: list[list[float]] = []  # [S, K]: of steps in which all S have k drafts
        self._seconds: dict[int, np.ndarray] = {}  # by S: what `seconds` returns

    @property
    def num_requests(self) -> int:
        """Requests whose acceptance rates are known."""
        return len(self._rates)

    def observe_plain_step(self, sequences: int) -> None:
        """A step without drafts brought a token for each of so many sequences."""
        self._plain_tokens += sequences

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Of `proposed` drafts of a request in one step, the first `accepted` were accepted."""
        if not proposed:
            self._plain_tokens += 1
        rate = self._rates.get(request_id, self._mean_rate)
        for i in range(min(accepted + 1, proposed)):  # behind the first rejected draft, nothing is known
            newest = 1.0 if i < accepted else 0.0
            rate += WEIGHT * (newest - rate)
            self._mean_rate += WEIGHT * (newest - self._mean_rate)
        self._rates[request_id] = rate

    def observe_proposals(self, num_unread: int) -> None:
        """Drafts are proposed; before that the proposer had to read so many tokens that it had not read."""
        self._plain_tokens, self._unread_tokens = 0, num_unread

    def retain(self, request_ids: Collection[str]) -> None:
        """Forget all requests but these."""
        self._rates = {name: rate for name, rate in self._rates.items() if name in request_ids}

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """For each of these requests, which are all that decode: how many tokens to propose, at most its cap.
        Changes nothing, since it may be called twice in a step.

        The m requests with the highest acceptance rates get k drafts each, the others none: the m and k that
        give the most tokens per second. A request of rate r with k drafts brings 1 + r + ... + r ** k tokens;
        how long the step takes, `seconds` says. Where steps without drafts are the fastest, a try may be due:
        the best m and k > 0, once TRY_SHARE of the time of all plain steps since the last try (which brought
        `_plain_tokens`) is as long as what this try takes beyond a plain step, with what the last one had to
        read first.
        """
        if not request_ids:
            return []
        # 1. The tokens that each k is expected to bring, likeliest requests first, and the time it takes.
        S = len(caps)
        rates = np.array([self._rates.get(name, self._mean_rate) for name in request_ids])  # [S]
        order = np.argsort(-rates, kind="stable")  # [S]
        gained = expected_tokens(rates[order], np.array(caps)[order], self.max_drafts) - 1  # [S, K]
        seconds = self.seconds(S)  # [S, K]
        # 2. The fastest of all; or a try.
        speed = (S + gained.cumsum(0)) / seconds  # [S, K]
        row, k = divmod(int(speed.argmax()), self.max_drafts + 1)
        if k == 0:
            row, k = divmod(int(speed[:, 1:].argmax()), self.max_drafts)
            k += 1  # column 0 was left out
            plain = seconds[0, 0]
            earned = TRY_SHARE * plain * self._plain_tokens / S
            if earned < seconds[row, k] - plain + self.times.seconds_to_read(self._unread_tokens):
                return [0] * S
        # 3. The first `row` + 1 of the order get k drafts, or their cap.
        lengths = [0] * S
        for s in order[: row + 1]:
            lengths[s] = min(k, caps[s])
        return lengths

    def seconds(self, S: int) -> np.ndarray:
        """[S, K]: seconds of a step of S sequences if m = 1 to S of them have k = 0 to `max_drafts` drafts
        each, and the others none.

        The table knows steps in which all have as many. So this is the time of a step of the m alone, and
        what the others add to a plain step; but no less than the time of a step in which all S share these
        drafts, since the time may depend on the number of rows, nor than that of a step with a single
        draft.
        """
        if S not in self._seconds:
            K = self.max_drafts + 1
            for n in range(len(self._equal_seconds) + 1, S + 1):
                self._equal_seconds.append([self.times.seconds(n, j) for j in range(K)])
            table = np.array(self._equal_seconds[:S])  # [S, K]
            k, m = np.arange(K), np.arange(1, S + 1)
            by_others = table[-1, 0] - table[:, :1]  # [S, 1]: of the S - m without drafts
            num_drafts = np.outer(m, k)  # [S, K]
            shared = np.interp(num_drafts / S, k, table[-1])  # [S, K]
            with_single = np.maximum(shared, self.times.seconds(S, 1 / S))  # [S, K]
            self._seconds[S] = np.maximum(table + by_others, np.where(num_drafts, with_single, shared))
        return self._seconds[S]


def expected_tokens(rates: np.ndarray, caps: np.ndarray, max_drafts: int) -> np.ndarray:
    """rates[S], caps[S] -> [S, K]: how many tokens a step with k = 0 to `max_drafts` drafts, or its cap,
    brings for each request. The j-th draft is accepted with probability rate ** j, and behind the last that
    is accepted comes one token more.
    """
    j = np.arange(max_drafts + 1)  # [K]
    return np.where(j <= caps[:, None], rates[:, None] ** j, 0.0).cumsum(1)
