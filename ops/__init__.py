"""kvc: GPU kernels that compress an LLM's KV cache outside the forward pass."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

try:
    from ._ops import set_debug
    from .nvfp4 import (
        PageBuffer,
        PageLayout,
        decode_pages_,
        encode_pages_,
        nvfp4_dequantize,
        nvfp4_quantize,
    )
except ImportError as _error:
    # `python -m kvc.collect_env` must run where torch or the libraries are missing; everything else says why it cannot.
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
    "decode_pages_",
    "encode_pages_",
    "nvfp4_dequantize",
    "nvfp4_quantize",
    "set_debug",
]
