"""The hooks an engine calls on a compression method."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .config import KvCacheCompressionConfig
from .engine import Engine, EngineFacts, Request

__all__ = ["KVCacheCompressionManager", "RequestsLostError"]


class RequestsLostError(RuntimeError):
    """A method failed after it had begun to rewrite the pages of `request_ids`.

    Their pages hold neither the old nor the new tokens. No length, page or state has changed; the engine drops
    these requests or computes them anew. All other requests are untouched.
    """

    def __init__(self, message: str, request_ids: Sequence[Hashable]) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class KVCacheCompressionManager:
    """Base of the methods: five hooks, each of which does nothing unless a method says otherwise.

    The engine calls the hooks in one thread. A method keeps these rules:

    1. Before its first physical change it may refuse, defer a request to a later step, or do nothing. An
       exception raised then leaves the cache, the lengths and its own state as they were, so the engine may go
       on without it and the method may try again.
    2. Once work that changes pages is submitted it finishes, or raises :class:`RequestsLostError` naming the
       requests. It never leaves a state in which lengths, pages and the method's own numbers disagree:
       ``Engine.resize`` is called once, with everything, after the work, and the method's state changes last.
    3. It waits for no GPU work. Freed pages travel with an event.
    4. Artifacts are loaded and validated when the manager is made and never change after.
    5. It owns its algorithm, its state per request and its formats; never pages, scheduling or attention.
    """

    def __init__(self, config: KvCacheCompressionConfig, facts: EngineFacts) -> None:
        self.config = config
        self.facts = facts
        self._engine: Engine | None = None

    def bind(self, engine: Engine) -> None:
        """Meet the engine whose pools now exist; once, before the first hook.

        Raises
        ------
        ValueError
            Pools or page tables are not what the facts said.
        RuntimeError
            An engine is already bound.
        """
        if self._engine is not None:
            raise RuntimeError(f"kvc.methods.{type(self).__name__}: an engine is already bound")
        self._bind(engine)
        self._engine = engine

    def _bind(self, engine: Engine) -> None:
        """What a method prepares for the engine: checks and buffers. Raising leaves it unbound."""

    def on_request_init(self, request: Request) -> None:
        """A request was admitted; nothing of it is in the cache, but for reused prompt pages."""

    def on_context_step_end(self, requests: Sequence[Request]) -> None:
        """A step wrote prompt tokens of `requests`, perhaps not their last."""

    def on_generation_step_begin(self, requests: Sequence[Request]) -> None:
        """A step is about to generate for `requests`."""

    def on_generation_step_end(self, requests: Sequence[Request]) -> None:
        """A step has generated for `requests`: lengths are confirmed, rejected draft tokens taken back."""

    def on_request_finish(self, request: Request) -> None:
        """A request ended, well or not. Called for every request that was initialised."""
