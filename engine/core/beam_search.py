"""Beam search on forked pages: beams share the blocks that they have in common. Extension B.

`BeamSearch` makes the steps in the engine's place, with the engine's scheduler and executor. A beam is a
`Request`. Each step computes one token of each beam and returns the log probabilities of the tokens that may
follow. Then `best_continuations` chooses. A beam without a continuation is finished, and its blocks are free.
A beam with one goes on in its blocks. Each further continuation is a new request whose `parent` is the beam:
the cache has both share the full blocks, and copies the last block, which both will write. So the beams
compute no key twice, and store the full blocks of the prompt once.

vLLM submits each beam as a new prompt in each step, and its prefix cache finds the full blocks; the tokens
behind them are computed again. If beams ran beside other requests, a beam could wait for memory that those
hold, and the other beams would wait for it. So beam search needs an idle engine, and checks that the memory
is enough before anything is computed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.cache.paged import PagedCache
from engine.core.beams import Beam, Search, next_token_logprobs
from engine.core.llm_engine import LLMEngine
from engine.decoding.beam_search import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    BestAnswers,
    Continuation,
    best_continuations,
    num_candidates,
    penalized,
)
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.requests.request import State, error_text
from engine.scheduling.continuous import ContinuousScheduler


class BeamSearch:
    """Beam searches with the same parameters, on an engine that has no other request."""

    def __init__(self, engine: LLMEngine, params: BeamSearchParams) -> None:
        """Raises ParameterError if the engine's cache has no pages, or has no room for so many beams, and
        RuntimeError if the engine has unfinished requests.
        """
        scheduler, cache = engine.scheduler, engine.scheduler.cache
        if not isinstance(cache, PagedCache) or not isinstance(scheduler, ContinuousScheduler):
            raise ParameterError(
                "kv_cache",
                "beam search shares and copies pages: it needs kv_cache='paged' and continuous batching",
            )
        if engine.has_unfinished_requests():
            raise RuntimeError(
                f"beam search needs an idle engine, and {len(engine.unfinished_request_ids())} requests are "
                "under way: read their streams to the end, or close them, first"
            )
        if params.beam_width > scheduler.max_num_seqs:
            raise ParameterError(
                "beam_width",
                f"beam_width={params.beam_width}: each beam is a running sequence, and at most "
                f"max_num_seqs={scheduler.max_num_seqs} run at once",
            )
        self.engine, self.scheduler, self.cache, self.params = engine, scheduler, cache, params
        self.end_ids = frozenset() if params.ignore_eos else frozenset(engine.config.eos_token_ids)
        self.num_likeliest = num_candidates(params.beam_width, len(self.end_ids))

    def prepare(self, request_id: str, prompt: Prompt, text: str | None = None, **options) -> Search:
        """Check a prompt, and return its search, which has not begun. `text` is the prompt as the answers
        show it. `options` are those of `LLMEngine.make_requests`.

        Raises ParameterError for a prompt that is refused, or if the cache cannot hold its beams at once.
        """
        sampling = SamplingParams(
            temperature=0, max_tokens=self.params.max_tokens, ignore_eos=self.params.ignore_eos
        )
        (request,) = self.engine.make_requests(request_id, prompt, sampling, **options)
        # These scores may be more than a user's request may ask for, so they are set after the check.
        request.params.logprobs = self.num_likeliest
        request.is_scored = True
        num_blocks = self._num_blocks(request.num_prompt_tokens, request.output.limit)
        orig_prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
        if text is not None:
            orig_prompt["prompt"] = text
        return Search(
            beams=[Beam(request)],
            answers=BestAnswers(self.params.beam_width, self.params.length_penalty),
            num_blocks=num_blocks,
            max_answer_tokens=request.output.limit,
            orig_prompt=orig_prompt,
            adapter=request.adapter,
        )

    def _num_blocks(self, num_prompt_tokens: int, max_answer_tokens: int) -> int:
        """The most blocks that the beams of one search hold together. Raises ParameterError if the cache has
        fewer.
        """
        width, block_size = self.params.beam_width, self.cache.block_size
        # The last token of an answer is never computed. All beams share the full blocks of the prompt.
        num_longest = num_prompt_tokens + max_answer_tokens - 1
        num_shared_blocks = num_prompt_tokens // block_size
        num_beams = width if max_answer_tokens > 1 else 1
        num_blocks_of_beam = self.cache.num_blocks_for(num_longest) - num_shared_blocks
        num_blocks = num_shared_blocks + num_beams * num_blocks_of_beam
        if num_blocks > self.cache.num_blocks:
            raise ParameterError(
                "beam_width",
                f"beam_width={width}: {num_beams} beams of up to {num_longest} tokens, of which they share "
                f"{num_shared_blocks * block_size}, may need {num_blocks} blocks of {block_size} tokens, and "
                f"the cache has {self.cache.num_blocks}; fewer beams, a smaller "
                f"max_tokens={self.params.max_tokens}, or a larger cache is accepted",
            )
        return num_blocks

    def run(
        self,
        searches: Sequence[Search],
        concurrency_limit: int | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> list[BeamSearchOutput]:
        """Run the searches, as many in the same steps as there is room for, at most `concurrency_limit`.
        Searches with another adapter than the running ones wait. `on_end` is called when a search has ended.

        Returns one output per search, in order. Raises RuntimeError if a step fails, and what `Adapters.key`
        raises. After the call, also after an error, the scheduler has no request, and all blocks are free.
        """
        waiting = deque(searches)
        running: list[Search] = []
        try:
            for search in searches:  # an adapter that cannot be read is refused before anything is computed
                self._adapter_key(search)
            while waiting or running:
                # 1. Begin searches while there is room.
                while waiting and self._has_room(running, waiting[0], concurrency_limit):
                    search = waiting.popleft()
                    request = search.beams[0].request
                    request.adapter = self._adapter_key(search)
                    running.append(search)
                    self.scheduler.add(request)
                # 2. Make a step. A search goes on once all of its beams are scored: a long prompt takes
                #    several steps.
                self._step(running)
                for search in running:
                    if all(beam.next_logprobs is not None for beam in search.beams):
                        self._advance(search)
                        if not search.beams:
                            on_end()
                running = [search for search in running if search.beams]
        finally:
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self.scheduler.finish(request)
        outputs = []
        for search in searches:
            outputs.append(BeamSearchOutput([answer for _, answer in search.answers.kept]))
        return outputs

    def _adapter_key(self, search: Search) -> str | None:
        """The name by which scheduler and cache know the search's adapter. Loads it if it is not loaded."""
        adapters = self.engine.adapters
        return None if adapters is None or search.adapter is None else adapters.key(search.adapter)

    def _has_room(self, running: Sequence[Search], search: Search, limit: int | None) -> bool:
        """Whether a search may begin beside the running ones: they have the same adapter, at most `limit`
        searches run then, and all of their beams can run and hold their blocks at the same time.
        """
        if not running:  # `__init__` and `prepare` have checked that one search has room
            return True
        all_searches = [*running, search]
        return (
            search.adapter == running[0].adapter
            and (limit is None or len(all_searches) <= limit)
            and len(all_searches) * self.params.beam_width <= self.scheduler.max_num_seqs
            and sum(running_search.num_blocks for running_search in all_searches) <= self.cache.num_blocks
        )

    def _step(self, searches: Sequence[Search]) -> None:
        """Make one step, and give its log probabilities to the beams. A step that ran out of memory gives
        none, if the scheduler can make smaller steps. Raises RuntimeError if it cannot, or for another error.
        """
        step = self.scheduler.schedule()
        if step is None:
            raise RuntimeError(
                f"beam search failed: no step has room for all beams any more; {len(self.scheduler.waiting)} "
                f"wait, and {self.scheduler.max_num_seqs} may run at once"
            )
        try:
            step.pending = self.engine.executor.submit(step.batch)
            result = step.result()
            logprobs = next_token_logprobs(step, result)
        except Exception as error:
            self.scheduler.rollback(step)
            failed = self.engine.recover(step, error)
            if not failed:
                return
            for request in failed:  # the cache no longer shares the blocks of a request with an error
                request.error = error_text(error)
            raise RuntimeError(f"beam search failed: {error_text(error)}") from error
        for request in step.requests:
            request.parent = None  # it has its blocks; without the link, ancestors can be forgotten
        self.scheduler.update(step)
        for search in searches:
            for beam in search.beams:
                beam.next_logprobs = logprobs.get(beam.request.id, beam.next_logprobs)

    def _advance(self, search: Search) -> None:
        """Choose the next beams of a search whose beams are all scored. If the search has ended, it has no
        beam afterwards.
        """
        last_beams = search.beams
        search.num_tokens += 1
        num_tokens = search.num_tokens
        is_last = num_tokens == search.max_answer_tokens
        # 1. Choose the continuations, keep the answers that have ended, and see whether the search goes on.
        scores = [beam.score for beam in last_beams]
        likeliest = [beam.computed_logprobs().top(self.num_likeliest) for beam in last_beams]

        def ends(token_id: int) -> bool:
            return is_last or token_id in self.end_ids

        going_on, ended = best_continuations(scores, likeliest, self.params.beam_width, ends)
        for continuation in ended:
            search.answers.add(continuation.score, num_tokens, self._answer(search, continuation))
        if going_on and not search.answers.may_improve(going_on[0].score, num_tokens):
            going_on = []  # so the search has ended
        forks = search.go_on(going_on)
        # 2. Free the blocks of beams that do not go on.
        kept_ids = {beam.request.id for beam in search.beams}
        for beam in last_beams:
            if beam.request.id not in kept_ids:
                self.scheduler.finish(beam.request)
        # 3. Let the cache share all that is computed, so that a fork finds all keys of its parent.
        for beam in search.beams:
            if beam.request.state is State.RUNNING:
                self.cache.commit(beam.request, beam.request.num_computed_tokens)
        # 4. Queue the forks. The next step admits them.
        for request in forks:
            self.scheduler.add(request)

    def _answer(self, search: Search, continuation: Continuation) -> BeamSearchSequence:
        """The answer that ends with this continuation. Its text leaves out the end-of-sequence token, unless
        the parameters include it, and ids that the tokenizer does not know.
        """
        beam = search.beams[continuation.beam]
        tokens = [*beam.request.token_ids, continuation.token_id]
        has_stopped = continuation.token_id in self.end_ids
        hides_end = has_stopped and not self.params.include_stop_str_in_output
        shown_ids = tokens[:-1] if hides_end else tokens
        tokenizer = self.engine.tokenizer
        text = tokenizer.decode(token_id for token_id in shown_ids if token_id in tokenizer)
        return BeamSearchSequence(
            orig_prompt=search.orig_prompt,
            tokens=tokens,
            logprobs=[*beam.logprobs, beam.computed_logprobs()],
            lora_request=search.adapter,
            cum_logprob=continuation.score,
            text=text,
            finish_reason="stop" if has_stopped else "length",
            stop_reason=continuation.token_id if has_stopped else None,
            score=penalized(continuation.score, search.num_tokens, self.params.length_penalty),
        )
