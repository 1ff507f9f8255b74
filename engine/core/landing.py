"""Appends the tokens that a step chose for one of its requests. Part 6.

Promises that an error in one request ends that request alone. Knows no scheduler: `LLMEngine.land` calls
`append_tokens` for each request of a step, and frees the memory of those that have ended.
"""

import logging

from engine.decoding.params import ParameterError
from engine.decoding.sampling import NO_TOKEN
from engine.requests.request import Request, State, error_text
from engine.requests.step import StepResult

logger = logging.getLogger(__name__)


def append_tokens(request: Request, s: int, result: StepResult, landed_at: float) -> bool:
    """Append the tokens and log probabilities that `result` has for `request`, which is sequence `s` of the
    step. `landed_at` is when the result was read, in seconds of time.perf_counter().

    Returns whether the request has ended: by a token (the tokens after it are dropped), or by an error, which
    is noted in the request and not raised.
    """
    try:
        # A preempted request computes the log probabilities of its prompt again later.
        if result.prompt_logprobs and request.state is State.RUNNING:
            request.prompt_logprobs += result.prompt_logprobs[s]
        scores = result.logprobs[s] if result.logprobs else None  # None or empty if the request asks for none
        for i, token_id in enumerate(result.tokens[s]):
            if token_id == NO_TOKEN:
                if request.constraint is not None:
                    raise ParameterError("structured_outputs", request.constraint.why_no_token)
                other_cause = ", or the request forbids all tokens" if request.sampling.is_adjusted else ""
                raise ArithmeticError(f"the model's logits are not finite numbers{other_cause}")
            if scores:
                logprobs = scores[i]
                request.logprobs.append(logprobs)
                request.text_offsets.append(len(request.output.text))
                request.cumulative_logprob = (request.cumulative_logprob or 0.0) + logprobs[token_id].logprob
            if request.confirm(token_id, landed_at):
                return True
    except ParameterError as error:
        request.error, request.error_field = str(error), error.field
        request.output.finish_reason = "error"
        return True
    except Exception as error:
        logger.exception("request %s failed", request.id)
        request.error = error_text(error)
        request.output.finish_reason = "error"
        return True
    return False
