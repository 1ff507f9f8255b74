"""Chooses how many tokens to propose: the number that makes the output fastest. Part 16.

A draft takes a row of the next step and a pass of the draft model, whether it is accepted or not. The chosen
numbers of drafts give the most tokens per second, by counts of accepted drafts and a table of step times
(engine/speculation/step_times.py). If no drafts pay, drafts are tried from time to time, in case they pay by
then; these tries take a small share of the time. This module reads no clock, so the same counts give the same
numbers, and it knows no model.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

WEIGHT = 0.05  # the weight of the newest observation in an acceptance rate
TRY_SHARE = 0.02  # the share of the time that tries may take while no drafts pay


class TimeTable(Protocol):
    """The times of steps: `StepTimes`, or a simulated machine in tests."""

    def seconds(self, sequences: int, drafts: float) -> float:
        """The seconds of a step of `sequences` sequences with `drafts` drafts each on average, including the
        time to propose them.
        """

    def seconds_to_read(self, tokens: int) -> float:
        """The seconds that a proposer takes to read `tokens` unread tokens."""


class DraftLengths:
    """Chooses the number of drafts of each request, at most `max_drafts`.

    In shapes, K is `max_drafts` + 1: column k is for k drafts.
    """

    def __init__(self, max_drafts: int, times: TimeTable) -> None:
        """`times` says how long steps take. Nothing is known of any request yet."""
        self.max_drafts, self.times = max_drafts, times
        # By request id: how often a draft is accepted if all drafts before it are.
        self._rates: dict[str, float] = {}
        self._mean_rate = 1.0  # of all requests, used for new ones; starts at 1, so that drafts are tried
        self._plain_tokens = 0  # of requests that had no drafts in their step, since the last proposal
        self._unread_tokens = 0  # tokens that had to be read before the last proposal
        self._equal_seconds: list[list[float]] = []  # [S, K]: of steps in which all S sequences have k drafts
        self._seconds: dict[int, np.ndarray] = {}  # by S: the result of `seconds`

    @property
    def num_requests(self) -> int:
        """The number of requests whose acceptance rates are known."""
        return len(self._rates)

    def observe_plain_step(self, sequences: int) -> None:
        """Note that a step without drafts gave a token to each of `sequences` sequences."""
        self._plain_tokens += sequences

    def observe(self, request_id: str, proposed: int, accepted: int) -> None:
        """Note that of a request's `proposed` drafts in one step, the first `accepted` were accepted. Without
        drafts, the step was a plain one for this request.
        """
        if not proposed:
            self._plain_tokens += 1
        rate = self._rates.get(request_id, self._mean_rate)
        for i in range(min(accepted + 1, proposed)):  # nothing is known of drafts behind the first rejected
            newest = 1.0 if i < accepted else 0.0
            rate += WEIGHT * (newest - rate)
            self._mean_rate += WEIGHT * (newest - self._mean_rate)
        self._rates[request_id] = rate

    def observe_proposals(self, num_unread: int) -> None:
        """Note that drafts are proposed, before which the proposer must read `num_unread` tokens."""
        self._plain_tokens, self._unread_tokens = 0, num_unread

    def retain(self, request_ids: Collection[str]) -> None:
        """Forget all requests except `request_ids`."""
        self._rates = {id: rate for id, rate in self._rates.items() if id in request_ids}

    def choose(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """How many tokens to propose for each request, at most its cap in `caps`. `request_ids` are all
        requests that decode. Changes nothing, since a step may call this twice.

        The m requests with the highest acceptance rates get k drafts each (or their cap), and the others
        none. m and k are those that give the most tokens per second. A request of rate r with k drafts is
        expected to give 1 + r + ... + r ** k tokens; `seconds` gives the time of the step.

        If steps without drafts are the fastest, a try with drafts may be due, with the best m and k > 0. A
        try costs its time beyond a plain step, and the time to read as many tokens as the last try had to
        read. Plain steps earn time for it: TRY_SHARE of the time that they take. The earned time is computed
        from the tokens that were got without drafts since the last try (`_plain_tokens`), and from the
        present time of a plain step, which gives S tokens. A try is due if it costs no more than was earned.
        """
        if not request_ids:
            return []
        # 1. The tokens that each m and k are expected to give, highest rates first, and the time they take.
        S = len(caps)
        rates = np.array([self._rates.get(id, self._mean_rate) for id in request_ids])  # [S]
        order = np.argsort(-rates, kind="stable")  # [S]
        # `gained` leaves out the one token that a request gets without drafts, too.
        gained = expected_tokens(rates[order], np.array(caps)[order], self.max_drafts) - 1  # [S, K]
        seconds = self.seconds(S)  # [S, K]
        # 2. Choose the fastest m and k: row m - 1, column k. `argmax` counts row by row, so its index is
        #    row · K + k. If k is 0, see whether a try is due.
        speed = (S + gained.cumsum(0)) / seconds  # [S, K]
        row, k = divmod(int(speed.argmax()), self.max_drafts + 1)
        if k == 0:
            row, k = divmod(int(speed[:, 1:].argmax()), self.max_drafts)
            k += 1  # since column 0 was left out
            plain = seconds[0, 0]
            earned = TRY_SHARE * plain * self._plain_tokens / S
            if earned < seconds[row, k] - plain + self.times.seconds_to_read(self._unread_tokens):
                return [0] * S
        # 3. The first m = `row` + 1 requests of the order get k drafts, or their cap.
        lengths = [0] * S
        for s in order[: row + 1]:
            lengths[s] = min(k, caps[s])
        return lengths

    def seconds(self, S: int) -> np.ndarray:
        """[S, K]: the seconds of a step of S sequences, of which m = 1 to S have k = 0 to `max_drafts` drafts
        each, and the others none. Computed once for each S.

        The table knows only steps in which all sequences have equally many drafts. So the time is estimated
        as that of a step of the m sequences alone, plus the time that the others add to a plain step. The
        estimate is at least the time of a step in which all S sequences share these drafts equally, since the
        time may depend on the number of rows. With drafts, it is also at least the time of a step with a
        single draft.
        """
        if S not in self._seconds:
            self._seconds[S] = self._estimate(S)
        return self._seconds[S]

    def _estimate(self, S: int) -> np.ndarray:
        """[S, K]: as `seconds`, computed anew."""
        # 1. The m sequences alone, and what the others add.
        K = self.max_drafts + 1
        for n in range(len(self._equal_seconds) + 1, S + 1):
            self._equal_seconds.append([self.times.seconds(n, k) for k in range(K)])
        equal = np.array(self._equal_seconds[:S])  # [S, K]: of m sequences with k drafts each
        of_others = equal[-1, 0] - equal[:, :1]  # [S, 1]: what S - m sequences without drafts add
        # 2. The least time: that of as many drafts, shared by all S sequences, or that of a single draft.
        k, m = np.arange(K), np.arange(1, S + 1)
        num_drafts = np.outer(m, k)  # [S, K]: of all sequences together
        shared = np.interp(num_drafts / S, k, equal[-1])  # [S, K]
        with_single = np.maximum(shared, self.times.seconds(S, 1 / S))  # [S, K]
        least = np.where(num_drafts > 0, with_single, shared)  # [S, K]
        return np.maximum(equal + of_others, least)


def expected_tokens(rates: np.ndarray, caps: np.ndarray, max_drafts: int) -> np.ndarray:
    """rates[S], caps[S] -> [S, K]: the expected tokens of each request in a step in which it has k = 0 to
    `max_drafts` drafts, or its cap. The j-th draft is accepted with probability rate ** j, and one token more
    follows the last accepted draft.
    """
    j = np.arange(max_drafts + 1)  # [K]
    return np.where(j <= caps[:, None], rates[:, None] ** j, 0.0).cumsum(1)
