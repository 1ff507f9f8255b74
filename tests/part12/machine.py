"""A machine that Hypothesis drives: any order of add, step, fork, abort, preempt, swap and fail, on small
memory.

After each call all invariants hold; each step reads the tokens back from the pages that its tables name; in
the end everybody has the tokens it has alone, and nothing is left. `python -m tests.part12.machine` prints
how much was driven.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.decoding.params import SamplingParams
from engine.decoding.stopping import GrowingOutput
from engine.requests.request import State
from tests.part06.fakes import assert_idle, told_alone
from tests.part12.pages import TWO_LAYERS, WatchedCache, fake_engine, reader_of

BEGINNINGS = ("", "once upon a time ", "once upon a tide ", "once ")
outputs_alone: dict[tuple[str, str, int], GrowingOutput] = {}
done = Counter()  # over all runs


def told(prompt: str, params: SamplingParams, index: int) -> GrowingOutput:
    """`told_alone`, computed once for the same question."""
    key = prompt, repr(params), index
    if key not in outputs_alone:
        outputs_alone[key] = told_alone(prompt, params, index)
    return outputs_alone[key]


class PagedEngine(RuleBasedStateMachine):
    """An engine over pages, with a fake model that reads them."""

    @initialize(
        room=st.integers(52, 110),  # tokens: one request, prompt and output, fits
        block_size=st.sampled_from([1, 2, 4, 8]),
        prefix_caching=st.booleans(),
        mode=st.sampled_from(["swap", "recompute"]),
        swap_blocks=st.sampled_from([3, 40]),
        seats=st.integers(2, 6),
        budget=st.sampled_from([6, 13, 64]),
    )
    def build(self, room, block_size, prefix_caching, mode, swap_blocks, seats, budget):
        self.cache = WatchedCache(
            TWO_LAYERS, -(-room // block_size), block_size,
            enable_prefix_caching=prefix_caching, num_swap_blocks=swap_blocks, preemption_mode=mode,
        )  # fmt: skip
        self.spared = True
        self.engine = fake_engine(self.cache, seats, budget, recover=self.recover)
        self.forward = reader_of(self.engine)
        self.asked: dict[str, tuple[str, SamplingParams]] = {}
        done["runs"] += 1

    def recover(self, step, error):
        return [] if self.spared else list(step.requests)

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        end=st.text("ab", min_size=1, max_size=12),
        n=st.sampled_from([1, 1, 2, 4]),
        greedy=st.booleans(),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from([None, None, "salt"]),
    )
    def add(self, beginning, end, n, greedy, max_tokens, salt):
        name = str(len(self.asked))
        temperature = 0 if greedy else 0.9
        params = SamplingParams(n=n, temperature=temperature, seed=len(end), max_tokens=max_tokens)
        self.engine.add_request(name, beginning + end, params, cache_salt=salt)
        self.asked[name] = beginning + end, params
        done["requests"] += 1
        done["forked samples"] += n - 1

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.take(self.engine.step())

    @rule(spared=st.booleans())
    @precondition(lambda self: self.engine.scheduler.running)
    def fail(self, spared):
        self.spared, self.forward.fail_next = spared, RuntimeError("a test says so")
        self.take(self.engine.step())
        done["failed steps"] += self.forward.fail_next is None
        self.forward.fail_next = None

    @rule(which=st.integers(0, 5))
    @precondition(lambda self: self.engine.scheduler.running)
    def preempt(self, which):
        running = self.engine.scheduler.running
        self.engine.scheduler._preempt(running[which % len(running)])
        done["preempted by the machine"] += 1

    @rule(which=st.integers(0, 30))
    @precondition(lambda self: self.asked)
    def abort(self, which):
        name = str(which % len(self.asked))
        done["aborts"] += self.engine.abort_request(name) is not None
        self.asked[name] = None

    def take(self, outputs):
        for output in outputs:
            if not output.finished or output.error:
                continue
            prompt, params = self.asked[output.request_id]
            for sample in output.outputs:
                alone = told(prompt, params, sample.index).token_ids
                assert sample.token_ids == alone, f"request {output.request_id} says what it says alone"
            done["outputs compared"] += len(output.outputs)

    @invariant()
    def all_hold(self):
        if hasattr(self, "cache"):
            self.cache.invariants.check()
            for request in self.engine.scheduler.waiting:
                assert request.id not in self.cache.allocations, "who waits holds no blocks"
                assert request.state is State.WAITING
            done["checks"] += 1

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.has_unfinished_requests():
            self.step(1)
        assert_idle(self.engine)
        self.all_hold()
        assert len(self.cache.swap) == 0, "somebody left, and stays in the swap space"
        done["steps"] += self.forward.steps
        done["swapped out"] += self.cache.num_swapped
        done["tokens found or forked"] += self.cache.hit_tokens
        done["tokens computed"] += self.forward.computed


def drive(runs: int, **options) -> Counter:
    """So many runs, of up to 30 calls each; `options`: Hypothesis's settings."""
    done.clear()
    chosen = settings(max_examples=runs, stateful_step_count=30, report_multiple_bugs=False, **options)
    run_state_machine_as_test(PagedEngine, settings=chosen)
    return done


if __name__ == "__main__":
    import sys

    from tests import conftest  # noqa: F401

    for what, count in drive(int(sys.argv[1]) if len(sys.argv) > 1 else 300).items():
        print(f"{count:>10,} {what}")
