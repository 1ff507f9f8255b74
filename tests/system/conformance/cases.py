"""The 244 requests that were sent to a real vLLM 0.32 and are sent to `ruvon serve`.

Both serve storyteller in float32 with a context of 512 tokens.
"""

from tests.system.conformance.cases_chat import CHAT
from tests.system.conformance.cases_completions import COMPLETIONS
from tests.system.conformance.cases_routes import BODIES, ROUTES

CASES = [*ROUTES, *COMPLETIONS, *CHAT, *BODIES]
