"""Compression methods on top of the ops: configuration, admission, and the hooks an engine calls.

Needs pydantic: ``pip install 'kvc[methods]'``.
"""

from __future__ import annotations

try:
    import pydantic as _pydantic  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError("kvc.methods needs pydantic: pip install 'kvc[methods]'") from _error

from .config import KvCacheCompressionConfig, create_kv_cache_compression_manager
from .engine import Engine, EngineFacts, LayerFacts, PagedCache, Request, Resize
from .manager import KVCacheCompressionManager, RequestsLostError
from .triattention import TriAttentionConfig, TriAttentionManager

__all__ = [
    "Engine",
    "EngineFacts",
    "KVCacheCompressionManager",
    "KvCacheCompressionConfig",
    "LayerFacts",
    "PagedCache",
    "Request",
    "RequestsLostError",
    "Resize",
    "TriAttentionConfig",
    "TriAttentionManager",
    "create_kv_cache_compression_manager",
]
