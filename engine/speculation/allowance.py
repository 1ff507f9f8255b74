"""What speculation may lose: a small share of all work, whatever it tries. Part 16.

Counts in plain steps, so that a crowd and a single request are counted alike. Promises, if it is told of
every step, that over any stretch of time what is lost is at most SHARE of it, MOST plain steps, and one step
more. Knows neither clocks nor lengths.
Source: Wu et al. 2016, Conservative Bandits, https://arxiv.org/abs/1602.04282
"""

SHARE = 0.02  # of all plain steps' time may be lost
MOST = 12.0  # plain steps: what is saved up at most, and owed at most
AGAIN = 4.0  # saved up before anything is tried again


class Allowance:
    """Open at first: what is new has to be tried."""

    def __init__(self) -> None:
        self.left, self.is_open = MOST, True

    def spend(self, cost: float, worth: float) -> None:
        """Something took as long as `cost` plain steps and brought what `worth` of them bring."""
        self.left = max(-MOST, min(MOST, self.left + (1 + SHARE) * worth - cost))
        if self.left <= 0:
            self.is_open = False
        elif self.left >= AGAIN:
            self.is_open = True
