"""Compression methods on top of the ops: configuration, admission, and the hooks an engine calls.

Needs pydantic: ``pip install 'kvc[methods]'``.
"""

from __future__ import annotations

try:
    import pydantic as _pydantic  # noqa: F401
except ModuleNotFoundError as _error:
    raise ImportError("kvc.methods needs pydantic: pip install 'kvc[methods]'") from _error

from .cold_pages import ColdPageCodec, ColdPageConfig, ColdPageManager
from .config import KvCacheCompressionConfig, create_kv_cache_compression_manager
from .engine import Engine, EngineFacts, LayerFacts, PagedCache, Request, Resize
from .manager import KVCacheCompressionManager, RequestsLostError
from .modelopt import load_kv_scales
from .placement import CacheRows, HotBuffer, LayerBuffers, LifeCycle
from .tiers import NoFreePagesError, StoreStats, TieredPageStore, TierStats, prefix_keys
from .triattention import TriAttentionConfig, TriAttentionManager

__all__ = [
    "CacheRows",
    "ColdPageCodec",
    "ColdPageConfig",
    "ColdPageManager",
    "Engine",
    "EngineFacts",
    "HotBuffer",
    "KVCacheCompressionManager",
    "KvCacheCompressionConfig",
    "LayerBuffers",
    "LayerFacts",
    "LifeCycle",
    "NoFreePagesError",
    "PagedCache",
    "Request",
    "RequestsLostError",
    "Resize",
    "StoreStats",
    "TierStats",
    "TieredPageStore",
    "TriAttentionConfig",
    "TriAttentionManager",
    "create_kv_cache_compression_manager",
    "load_kv_scales",
    "prefix_keys",
]
