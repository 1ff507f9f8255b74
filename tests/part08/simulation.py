"""The scheduler alone, under thousands of random requests, with its promises checked at every step.

No model: a token is a number that says whose it is and where it stands. Arrivals come in bursts; requests are
aborted; steps fail and are taken back; memory is short, so requests are preempted; drafts are proposed and
mostly rejected. `python -m tests.part08.simulation` prints how much was simulated.
"""

import random
from dataclasses import dataclass

from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.requests.listeners import Listener, Listeners
from engine.requests.request import Request, State
from engine.scheduling.continuous import ContinuousScheduler
from tests.part06.fakes import BlockCache
from tests.part06.steps import Countdown

PARAMS = SamplingParams()


@dataclass(frozen=True)
class Setting:
    """What one simulation is like."""

    seed: int
    num_requests: int = 400
    max_num_seqs: int = 8
    budget: int = 64
    num_blocks: int = 40
    block_tokens: int = 8
    arrivals: float = 0.35  # mean number of requests per step
    priorities: tuple[int, ...] = (0,)
    abort_rate: float = 0.01  # per step
    failure_rate: float = 0.02  # per step
    drafts: int = 0  # at most, per request and step


SETTINGS = {
    "plain": Setting(1),
    "one seat": Setting(2, max_num_seqs=1, budget=7, arrivals=0.03),
    "tight budget": Setting(3, max_num_seqs=12, budget=12),
    "budget of one": Setting(4, num_requests=120, max_num_seqs=1, budget=1, arrivals=0.01),
    "little memory": Setting(5, num_blocks=16, arrivals=0.2),
    "barely one fits": Setting(6, num_blocks=10, block_tokens=8, arrivals=0.1),
    "memory by the token": Setting(7, num_blocks=100, block_tokens=1, arrivals=0.15),
    "many seats": Setting(8, num_requests=1000, max_num_seqs=64, budget=512, num_blocks=200, arrivals=2),
    "priorities": Setting(9, priorities=(-2, 0, 0, 0, 1, 5)),
    "priorities and little memory": Setting(10, priorities=(-1, 0, 3), num_blocks=18, arrivals=0.3),
    "everything fails": Setting(11, failure_rate=0.3, abort_rate=0.1),
    "drafts": Setting(12, drafts=4),
    "drafts and little memory": Setting(13, drafts=4, num_blocks=18, priorities=(0, 1), arrivals=0.3),
    "a flood at the start": Setting(14, arrivals=50, num_blocks=20),
    "all of it": Setting(15, 800, 16, 40, 30, 5, 0.5, (-3, 0, 1, 2), 0.03, 0.05, 3),
}


class WatchfulCache(BlockCache):
    """Also notes the most tokens each sequence was given room for, and whether it said no in this step."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        super().__init__(num_blocks, block_tokens)
        self.given: dict[str, int] = {}
        self.refused = False

    def admit(self, seq):
        cached = super().admit(seq)
        self.refused |= cached is None
        self.given[seq.id] = 0
        return cached

    def reserve(self, seq, num_tokens):
        granted = super().reserve(seq, num_tokens)
        self.refused |= not granted
        if granted:
            self.given[seq.id] = max(self.given[seq.id], num_tokens)
        return granted


class Simulation(Listener):
    """Plays the engine to a ContinuousScheduler."""

    def __init__(self, setting: Setting) -> None:
        self.s, self.rng = setting, random.Random(setting.seed)
        self.cache = WatchfulCache(setting.num_blocks, setting.block_tokens)
        self.scheduler = ContinuousScheduler(self.cache, setting.max_num_seqs, setting.budget)
        self.scheduler.listeners = Listeners([self])
        self.live: dict[str, Request] = {}
        self.computed: dict[str, int] = {}  # what is truly in the cache, as the steps that succeeded tell
        self.admitted: set[str] = set()  # at least once
        self.first_admissions: dict[int, list[int]] = {}  # priority -> numbers of arrival
        self.preempted: list[tuple[Request, bool, bool]] = []  # in this step
        self.arrived = self.steps = self.checks = self.preemptions = self.failures = self.ended = 0

    def run(self) -> "Simulation":
        while self.arrived < self.s.num_requests or self.live:
            self.arrive()
            if self.live and self.rng.random() < self.s.abort_rate:
                self.end(self.rng.choice(list(self.live.values())))
            self.step()
            assert self.steps < 400 * self.s.num_requests, "some request never ends"
        self.check(
            self.cache.usage().num_sequences == 0 and self.cache.free_blocks == self.s.num_blocks,
            "all have ended, and some memory is still held",
        )
        self.check(
            not self.scheduler.waiting and not self.scheduler.running, "all have ended, yet one is queued"
        )
        self.check(self.ended == self.s.num_requests, "some request never ended")
        return self

    def arrive(self) -> None:
        mean = self.s.arrivals
        wanted = int(mean) + (self.rng.random() < mean % 1)
        for _ in range(min(wanted, self.s.num_requests - self.arrived)):
            number = self.arrived
            self.arrived += 1
            room = self.s.num_blocks * self.s.block_tokens - self.s.drafts
            length = self.rng.randint(1, min(60, room - 20))
            name = str(number)
            ids = [token(name, place) for place in range(length)]
            story = Countdown(self.rng.randint(1, 20))
            row = SamplingState(PARAMS, ids, [], number)
            request = Request(
                name, name, ids, length, PARAMS, story, row, priority=self.rng.choice(self.s.priorities)
            )
            self.live[name], self.computed[name] = request, 0
            self.scheduler.add(request)

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.check(request.state is State.FINISHED, "ended, but not finished")
        del self.live[request.id], self.computed[request.id]
        self.ended += 1

    def on_preempt(self, request: Request) -> None:
        """Noted now and judged later: what a listener raises is caught."""
        lost_all = request.num_computed_tokens == 0 and request.draft_ids == []
        worst = all(other.rank < request.rank for other in self.scheduler.running)
        self.preempted.append((request, lost_all and request.state is State.WAITING, worst))

    def step(self) -> None:
        self.steps += 1
        self.preempted, self.cache.refused = [], False
        before = set(self.scheduler.running)
        step = self.scheduler.schedule()
        for request, lost_all, worst in self.preempted:
            self.check(lost_all, "preempted and still holding on")
            self.check(worst, "somebody worse went on running")
            self.check(request in before, "preempted without ever having run")
            self.computed[request.id] = 0
            self.preemptions += 1
        self.check((step is None) == (not self.live), "idle with work to do, or busy without")
        self.check_queues()
        if step is None:
            return
        self.check_step(step)
        self.check_order(step, before)
        if self.rng.random() < self.s.failure_rate:
            self.failures += 1
            self.scheduler.rollback(step)
            unchanged = all(r.num_computed_tokens == self.computed[r.id] for r in step.requests)
            self.check(unchanged, "a step was taken back, yet its tokens still count as computed")
            for request in step.requests:
                if self.rng.random() < 0.2:
                    self.end(request)
        else:
            self.succeed(step)
        self.check_queues()

    def succeed(self, step) -> None:
        """Tokens appear where logits were wanted: one, and as many more as drafts are accepted."""
        finished, drafts = [], []
        for request, end, rows in zip(
            step.requests, step.batch.context_lens, step.batch.rows.chosen_counts, strict=True
        ):
            self.computed[request.id] = end
            accepted = self.rng.randint(1, rows) if rows else 0
            for _ in range(accepted):
                if request.confirm(token(request.id, len(request.token_ids)), 0.0):
                    finished.append(request)
                    break
            wanted = self.rng.randint(0, self.s.drafts) if accepted else 0
            drafts.append([-7] * wanted)
        self.scheduler.update(step, drafts if self.s.drafts else None)
        for request in step.requests:
            self.computed[request.id] = min(self.computed[request.id], len(request.token_ids) - 1)
            self.check(
                request.num_computed_tokens == self.computed[request.id], "computed is not what the steps did"
            )
        for request in finished:
            self.end(request)

    def check(self, holds: bool, what: str = "") -> None:
        assert holds, f"step {self.steps} of {self.s}: {what}"
        self.checks += 1

    def check_queues(self) -> None:
        """Every live request is in one queue; the cache holds what those who run asked for, and no more."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        self.check(len(waiting) + len(running) == len(self.live), "lost, or in two queues")
        self.check({*waiting, *running} == set(self.live.values()), "lost, or in two queues")
        self.check(
            all(request.state is State.WAITING for request in waiting), "in the queue, but not waiting"
        )
        self.check(all(request.state is State.RUNNING for request in running), "has a seat, but does not run")
        self.check(len(running) <= self.s.max_num_seqs, "more running than seats")
        self.check(self.cache.blocks.keys() == {request.id for request in running}, "memory without a seat")
        self.check(self.cache.free_blocks >= 0, "more memory given than there is")
        for request in running:
            needed = -(-self.cache.given[request.id] // self.s.block_tokens)
            self.check(self.cache.blocks[request.id] == needed, "memory nobody asked for")
            self.check(
                request.num_computed_tokens <= len(request.token_ids) + len(request.draft_ids),
                "more tokens computed than there are",
            )
            self.check(request.num_computed_tokens <= self.cache.given[request.id], "computed without room")
        self.check(all(request.num_computed_tokens == 0 for request in waiting), "waits with computed tokens")

    def check_step(self, step) -> None:
        """Within the budget, each request once, the next tokens of each and no others."""
        batch = step.batch
        self.check(0 < batch.num_tokens <= self.s.budget, "over budget")
        self.check(len(set(batch.ids)) == len(batch.ids), "twice in one step")
        running = set(self.scheduler.running)
        for s, request in enumerate(step.requests):
            self.check(request in running, "not admitted")
            a, b = batch.query_start[s : s + 2]
            start, end = self.computed[request.id], batch.context_lens[s]
            self.check(end - start == b - a > 0, "a step without a token of its own, or with others' tokens")
            self.check(batch.positions[a:b] == tuple(range(start, end)), "a token was left out or done twice")
            known = [*request.token_ids, *request.draft_ids]
            self.check(list(batch.token_ids[a:b]) == known[start:end], "other tokens than its own")
            self.check(
                bool(batch.rows.chosen_counts[s]) == (end >= len(request.token_ids)),
                "logits of an incomplete prompt, or none of a complete one",
            )

    def check_order(self, step, before: set[Request]) -> None:
        """No budget is wasted, the best go first, and among equals the first come."""
        s, waiting = self.s, self.scheduler.waiting
        best = min(self.scheduler.running, key=lambda request: request.rank)
        self.check(best in step.requests, "the best did not get on")
        spare = step.batch.num_tokens < s.budget
        if spare:
            self.check(set(self.scheduler.running) == set(step.requests), "budget left, yet one sat idle")
        if spare and waiting and len(self.scheduler.running) < s.max_num_seqs:
            self.check(self.cache.refused, "budget, seats and memory left, yet one waits")
        newly = [request for request in self.scheduler.running if request not in before]
        for request in newly:
            overtaken = set(waiting) - {preempted for preempted, *_ in self.preempted}
            self.check(all(request.rank < other.rank for other in overtaken), "overtaken in the queue")
            if request.id not in self.admitted:
                self.admitted.add(request.id)
                self.first_admissions.setdefault(request.priority, []).append(int(request.id))
        for numbers in self.first_admissions.values():
            self.check(numbers[-2:] == sorted(numbers[-2:]), "an equal who came later went first")


def token(name: str, place: int) -> int:
    return int(name) * 1000 + place


if __name__ == "__main__":
    done = {name: Simulation(setting).run() for name, setting in SETTINGS.items()}
    for name, simulation in {**done, "all": None}.items():
        of = [simulation] if simulation else list(done.values())
        names = ("arrived", "steps", "checks", "preemptions", "failures")
        counts = ", ".join(f"{sum(getattr(one, count) for one in of):>9,} {count}" for count in names)
        print(f"{name:<30}{counts}")
