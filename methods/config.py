"""Configurations of compression methods, and the admission of one to an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from .engine import EngineFacts

if TYPE_CHECKING:
    from .manager import KVCacheCompressionManager

__all__ = ["KvCacheCompressionConfig", "create_kv_cache_compression_manager"]


class KvCacheCompressionConfig(BaseModel, ABC):
    """Base of the configurations: one subclass per method holds the method's own fields.

    A configuration is immutable. Its predicates say what an engine may combine it with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    changes_physical_kv_length: ClassVar[bool]
    """Whether requests get shorter, so that the cache length is no position any more."""

    @abstractmethod
    def supports_block_reuse(self) -> bool:
        """Whether pages of a prompt may still serve other requests."""

    @abstractmethod
    def supports_speculative_decoding(self) -> bool:
        """Whether tokens may be drafted and rejected."""

    def reasons_against(self, facts: EngineFacts) -> list[str]:
        """Why this method cannot serve that engine; empty when it can.

        Subclasses add to the list of their base.
        """
        reasons = []
        if facts.block_reuse and not self.supports_block_reuse():
            reasons.append("block reuse is on and the method does not keep prompt pages as they are")
        speculates = facts.max_draft_tokens > 0 or bool(facts.draft_layers)
        if speculates and not self.supports_speculative_decoding():
            reasons.append("speculative decoding is on and the method cannot follow it")
        if self.changes_physical_kv_length:
            if not facts.logical_positions:
                reasons.append(
                    "the method shortens requests and the engine takes a token's position from its cache length"
                    " (logical_positions=False)"
                )
            if facts.beam_width > 1:
                reasons.append(
                    f"beams share pages that the method would rewrite, and beam_width is {facts.beam_width}"
                )
        return reasons

    @abstractmethod
    def create_manager(self, facts: EngineFacts) -> KVCacheCompressionManager:
        """The manager, artifacts loaded and validated; called once :meth:`reasons_against` has none."""


def create_kv_cache_compression_manager(
    config: KvCacheCompressionConfig, engine_facts: EngineFacts
) -> KVCacheCompressionManager:
    """Admit a method to an engine, load what it needs, and return its manager.

    An engine instance runs one method. Call ``manager.bind(engine)`` when the pools exist.

    Parameters
    ----------
    config : KvCacheCompressionConfig
        The method.
    engine_facts : EngineFacts
        What the engine is.

    Raises
    ------
    ValueError
        The combination is not supported, with every reason; or an artifact does not fit.
    TypeError
        `config` is no configuration, or `engine_facts` are no facts.
    OSError
        An artifact cannot be read.
    """
    if not isinstance(config, KvCacheCompressionConfig):
        raise TypeError(
            "kvc.methods.create_kv_cache_compression_manager: config must be one KvCacheCompressionConfig,"
            f" got {type(config).__name__}"
        )
    if not isinstance(engine_facts, EngineFacts):
        raise TypeError(
            "kvc.methods.create_kv_cache_compression_manager: engine_facts must be EngineFacts,"
            f" got {type(engine_facts).__name__}"
        )
    if reasons := config.reasons_against(engine_facts):
        raise ValueError(f"kvc.methods.{type(config).__name__}: not supported here: {'; '.join(reasons)}")
    return config.create_manager(engine_facts)
