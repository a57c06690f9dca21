"""kvc: GPU kernels that compress an LLM's KV cache outside the forward pass."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

try:
    from ._ops import set_debug
    from .compaction import compact_pages_, pack_fill_moves, pack_move_sources
    from .nvfp4 import (
        PageBuffer,
        PageLayout,
        decode_pages_,
        encode_pages_,
        nvfp4_dequantize,
        nvfp4_quantize,
    )
    from .topk import radix_topk, settle_ties
    from .triattention import mean_phase, triattention_score
except (ImportError, OSError) as _error:  # OSError: torch without the libraries it loads itself
    # `python -m kvc.collect_env` must run without torch and the libraries; all else says why it cannot.
    _reason = _error

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"kvc.{name} is not available: {_reason}. `python -m kvc.collect_env` shows what is installed."
        ) from _reason


__all__ = [
    "PageBuffer",
    "PageLayout",
    "__version__",
    "compact_pages_",
    "decode_pages_",
    "encode_pages_",
    "mean_phase",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "pack_fill_moves",
    "pack_move_sources",
    "radix_topk",
    "set_debug",
    "settle_ties",
    "triattention_score",
]
