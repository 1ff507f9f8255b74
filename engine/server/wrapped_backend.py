"""A backend that passes every call on to another one: the base of backends that change one thing. Part 15."""

from typing import Self

from engine.decoding.params import SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.backend import Backend, OutputStream


class WrappedBackend:
    """A `Backend` whose methods call those of `backend`, and raise their errors. A subclass replaces the
    methods that do more.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.supports = backend, backend.supports

    async def __aenter__(self) -> Self:
        await self.backend.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.backend.__aexit__(*details)

    def models(self) -> list[str]:
        return self.backend.models()

    def health(self) -> bool:
        return self.backend.health()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options
    ) -> OutputStream:
        return await self.backend.generate(prompt, params, request_id, **options)

    async def abort(self, request_id: str) -> None:
        await self.backend.abort(request_id)
