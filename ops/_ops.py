"""Every schema, tag and fake of ``torch.ops.kvc.*``: the only file that names the namespace."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "kvc"

_MINIMUM_TORCH = (2, 11)
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < _MINIMUM_TORCH:
    raise ImportError(f"kvc needs torch >= 2.11, found {torch.__version__}")

_library = torch.library.Library(NAMESPACE, "DEF")


def _define(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an op; the decorated function is its fake."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        return fake

    return register


@_define(
    "nvfp4_quantize(Tensor x, float global_scale=1.0, int quantized_range_start=0,"
    " SymInt quantized_range_elements=-1, int residual_start=0, int residual_elements=0)"
    " -> (Tensor data, Tensor scales, Tensor lossless)"
)
def _(
    x: torch.Tensor,
    global_scale: float = 1.0,
    quantized_range_start: int = 0,
    quantized_range_elements: int = -1,
    residual_start: int = 0,
    residual_elements: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *rows, width = x.shape
    quantized = quantized_range_elements
    if quantized == -1:
        quantized = width - quantized_range_start
    slots = (quantized + residual_elements) // 16
    return (
        x.new_empty((*rows, slots * 8), dtype=torch.uint8),
        x.new_empty((*rows, slots), dtype=torch.uint8),
        x.new_empty((*rows, width - quantized)),
    )


@_define(
    "nvfp4_dequantize(Tensor data, Tensor scales, Tensor lossless, ScalarType dtype, float global_scale=1.0,"
    " int quantized_range_start=0, int residual_start=0, int residual_elements=0) -> Tensor"
)
def _(
    data: torch.Tensor,
    scales: torch.Tensor,
    lossless: torch.Tensor,
    dtype: torch.dtype,
    global_scale: float = 1.0,
    quantized_range_start: int = 0,
    residual_start: int = 0,
    residual_elements: int = 0,
) -> torch.Tensor:
    width = data.shape[-1] * 2 - residual_elements + lossless.shape[-1]
    return data.new_empty((*data.shape[:-1], width), dtype=dtype)


def _no_result(*args: Any, **kwargs: Any) -> None:
    return None


_define(
    "encode_pages_(Tensor(a!) cold, Tensor[] pools, Tensor pairs, Tensor table, Tensor scales,"
    " int max_ctas=0) -> ()"
)(_no_result)
_define(
    "decode_pages_(Tensor(a!)[] pools, Tensor cold, Tensor pairs, Tensor table, Tensor scales,"
    " int max_ctas=0) -> ()"
)(_no_result)

from . import _C  # noqa: E402  (the implementations need the schemas)

_libraries = [_C]
if torch.version.cuda is not None:
    try:
        from . import _C_cuda
    except ModuleNotFoundError:
        pass  # built without nvcc: CUDA tensors meet torch's "no kernel for backend CUDA"
    else:
        _libraries.append(_C_cuda)

ops = getattr(torch.ops, NAMESPACE)


def call(op: Callable[..., Any], *args: Any) -> Any:
    """Run an op and give its argument errors their Python type.

    C++ raises ``ValueError`` by itself; a ``TypeError`` or ``NotImplementedError`` of an op arrives as
    ``RuntimeError`` with the op's text.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        text = str(error).split("\n", 1)[0]
        if not text.startswith(f"{NAMESPACE}."):
            raise
        kind = NotImplementedError if " must be one of the built architectures" in text else TypeError
        raise kind(text) from None


def set_debug(enabled: bool) -> None:
    """Check values that live on the device, synchronising, before anything is written.

    Off by default: an out-of-range page id, token index or offset then skips its element.

    Parameters
    ----------
    enabled : bool
        Whether every later op of this process checks its device values.
    """
    for library in _libraries:
        library.set_debug(bool(enabled))
