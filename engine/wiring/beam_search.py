"""Checks the arguments of `LLM.beam_search` and runs the searches. Extension B's wiring.

No module imports this one: engine/wiring/extensions.py finds it by its name.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.core.beam_search import BeamSearch
from engine.core.llm_engine import LLMEngine
from engine.decoding.beam_search import BeamSearchOutput, BeamSearchParams
from engine.decoding.params import ParameterError
from engine.wiring.llm_progress import Progress, UseTqdm
from engine.wiring.llm_prompts import ParsedPrompt


def beam_search(
    engine: LLMEngine,
    prompts: Sequence[ParsedPrompt],
    params: BeamSearchParams,
    use_tqdm: UseTqdm = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """The best continuations of each prompt, one output per prompt in order.

    The engine's listeners and capabilities do not see these steps: metrics do not count them, and no tokens
    are drafted. Arguments and errors are those of `LLM.beam_search`.
    """
    if not isinstance(params, BeamSearchParams):
        raise ParameterError("params", f"params={params!r:.80}: BeamSearchParams are accepted")
    if concurrency_limit is not None and (type(concurrency_limit) is not int or concurrency_limit < 1):
        raise ParameterError(
            "concurrency_limit",
            f"concurrency_limit={concurrency_limit!r}: a whole number of at least 1 is accepted, or None",
        )
    # `replace` makes a copy, which checks also the fields that were assigned after `params` was made.
    runner = BeamSearch(engine, replace(params))
    searches = []
    for number, prompt in enumerate(prompts):
        request_id = f"beam-search-{number}"
        searches.append(runner.prepare(request_id, prompt.prompt, prompt.text, **prompt.options))

    progress = Progress(len(searches), use_tqdm)
    try:
        return runner.run(searches, concurrency_limit, on_end=lambda: progress.bar.update(1))
    finally:
        progress.close()
