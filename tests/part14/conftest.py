"""The fixtures of Part 10, and a server with a chat."""

from contextlib import ExitStack

import pytest

from engine.core.engine_thread import EngineThread
from engine.decoding.chat_template import ChatTemplate
from engine.server.app import create_app
from engine.server.chat import chat_routes
from engine.server.generate import generate_route
from engine.server.tokenization import tokenization_routes
from tests.part04.serving import serve
from tests.part06.conftest import engine, gate  # noqa: F401
from tests.part06.fakes import at_rest
from tests.part10.conftest import (  # noqa: F401
    fake_engine,
    passed,
    pytest_runtest_makereport,
    scoring_engine,
)


@pytest.fixture
def serving(scoring_engine, passed):  # noqa: F811
    """serving(**options of create_app) -> URL of a server of the fake model, called m, with chat,
    /generate and /tokenize; `serving.backend` is behind it. In the end nothing is left of any request.
    """
    with ExitStack() as stack:

        def start(**options) -> str:
            llm_engine = scoring_engine()
            start.backend = stack.enter_context(at_rest(EngineThread(llm_engine, "m"), passed))
            tokenizer, config = llm_engine.tokenizer, llm_engine.config
            template = ChatTemplate.from_pretrained("storyteller")
            extensions = [chat_routes(tokenizer, config, template), generate_route]
            extensions.append(tokenization_routes(tokenizer, config, template))
            return stack.enter_context(serve(create_app(start.backend, extensions, **options)))

        yield start
