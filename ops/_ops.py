"""Every schema, tag and fake of ``torch.ops.kvc.*``: the only file that names the namespace."""

from __future__ import annotations

import re
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
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

    parameters = [argument.name for argument in torch._C.parse_schema(f"{NAMESPACE}::{schema}").arguments]

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            _refuse_part_meta(name, dict(zip(parameters, args, strict=False)) | kwargs)
            return fake(*args, **kwargs)

        torch.library.register_fake(f"{NAMESPACE}::{name}", checked, lib=_library)
        return fake

    return register


# Read on the host by ops whose other tensors live on a device.
_HOST_ARGUMENTS = ("table", "scales", "pairs")


def _refuse_part_meta(name: str, arguments: dict[str, Any]) -> None:
    """One meta tensor sends the whole call to the fake; beside real ones it would silently do nothing."""
    kinds: dict[bool, str] = {}
    for argument, value in arguments.items():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                kinds.setdefault(tensor.device.type == "meta", argument)
    if len(kinds) == 2 and not (kinds[False] in _HOST_ARGUMENTS and kinds[True] not in _HOST_ARGUMENTS):
        op = name.split(".", 1)[0]
        raise TypeError(f"{NAMESPACE}.{op}: {kinds[True]} must be on the device of {kinds[False]}, got meta")


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


def _move_outputs(
    kept: torch.Tensor, num_layers: int, num_kv_heads: int, total: int, side_total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = kept.shape[1]
    per_layer = num_layers > 1 and rows == num_layers * num_kv_heads
    return (
        kept.new_empty((num_layers, num_kv_heads, total) if per_layer else (num_kv_heads, total)),
        kept.new_empty((num_kv_heads, side_total)),
    )


_PACK_MOVE_SOURCES = (
    "Tensor kept, Tensor valid_lengths, Tensor dense_offsets, Tensor? swa_offsets, int window, int num_layers,"
    " int num_kv_heads, SymInt dense_total, SymInt swa_total"
)


@_define(f"pack_move_sources({_PACK_MOVE_SOURCES}) -> (Tensor dense, Tensor swa)")
def _(
    kept: torch.Tensor,
    valid_lengths: torch.Tensor,
    dense_offsets: torch.Tensor,
    swa_offsets: torch.Tensor | None,
    window: int,
    num_layers: int,
    num_kv_heads: int,
    dense_total: int,
    swa_total: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _move_outputs(kept, num_layers, num_kv_heads, dense_total, swa_total)


_define(f"pack_move_sources.out({_PACK_MOVE_SOURCES}, *, Tensor(a!) dense, Tensor(b!) swa) -> ()")(_no_result)

_PACK_FILL_MOVES = (
    "Tensor kept, Tensor valid_lengths, Tensor bases, Tensor fill_offsets, Tensor tail_offsets, int num_layers,"
    " int num_kv_heads, SymInt fill_total, SymInt tail_total"
)


@_define(f"pack_fill_moves({_PACK_FILL_MOVES}) -> (Tensor sources, Tensor destinations, Tensor tail_sources)")
def _(
    kept: torch.Tensor,
    valid_lengths: torch.Tensor,
    bases: torch.Tensor,
    fill_offsets: torch.Tensor,
    tail_offsets: torch.Tensor,
    num_layers: int,
    num_kv_heads: int,
    fill_total: int,
    tail_total: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sources, tail_sources = _move_outputs(kept, num_layers, num_kv_heads, fill_total, tail_total)
    return sources, torch.empty_like(sources), tail_sources


_define(
    f"pack_fill_moves.out({_PACK_FILL_MOVES},"
    " *, Tensor(a!) sources, Tensor(b!) destinations, Tensor(c!) tail_sources) -> ()"
)(_no_result)
_define(
    "compact_pages_(Tensor(a!)[] pools, Tensor page_table, Tensor sources, Tensor offsets, Tensor bases,"
    " Tensor? layer_map=None, Tensor? destinations=None) -> ()"
)(_no_result)

_RADIX_TOPK = "Tensor scores, Tensor lengths, SymInt k, Tensor? bases=None"


@_define(f"radix_topk({_RADIX_TOPK}) -> Tensor")
def _(scores: torch.Tensor, lengths: torch.Tensor, k: int, bases: torch.Tensor | None = None) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


_define(f"radix_topk.out({_RADIX_TOPK}, *, Tensor(a!) out) -> ()")(_no_result)

_SETTLE_TIES = "Tensor scores, Tensor lengths, Tensor provisional, Tensor? bases=None"


@_define(f"settle_ties({_SETTLE_TIES}) -> Tensor")
def _(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    provisional: torch.Tensor,
    bases: torch.Tensor | None = None,
) -> torch.Tensor:
    return scores.new_empty(provisional.shape, dtype=torch.int32)


_define(f"settle_ties.out({_SETTLE_TIES}, *, Tensor(a!) out) -> ()")(_no_result)

_MEAN_PHASE = "Tensor positions, Tensor omega, Tensor offsets"


@_define(f"mean_phase({_MEAN_PHASE}) -> (Tensor cos, Tensor sin)")
def _(
    positions: torch.Tensor, omega: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (positions.shape[0], omega.shape[0])
    return omega.new_empty(shape), omega.new_empty(shape)


_define(f"mean_phase.out({_MEAN_PHASE}, *, Tensor(a!) cos, Tensor(b!) sin) -> ()")(_no_result)

_TRIATTENTION_SCORE = (
    "Tensor[] key_pools, Tensor page_table, Tensor prompt_lengths, Tensor source_lengths, Tensor mean_cos,"
    " Tensor mean_sin, Tensor q_mean_real, Tensor q_mean_imag, Tensor q_norm_excess, Tensor freq_scale_sq, str mode,"
    " bool normalize, SymInt width"
)


@_define(f"triattention_score({_TRIATTENTION_SCORE}) -> Tensor")
def _(
    key_pools: list[torch.Tensor],
    page_table: torch.Tensor,
    prompt_lengths: torch.Tensor,
    source_lengths: torch.Tensor,
    mean_cos: torch.Tensor,
    mean_sin: torch.Tensor,
    q_mean_real: torch.Tensor,
    q_mean_imag: torch.Tensor,
    q_norm_excess: torch.Tensor,
    freq_scale_sq: torch.Tensor,
    mode: str,
    normalize: bool,
    width: int,
) -> torch.Tensor:
    if not key_pools:
        raise ValueError(f"{NAMESPACE}.triattention_score: key_pools must be at least one tensor, got none")
    heads = key_pools[0].shape[1]
    rows = {"union": 1, "per_head": heads, "per_layer_perhead": len(key_pools) * heads}
    if mode not in rows:
        raise ValueError(
            f"{NAMESPACE}.triattention_score: mode must be union, per_head or per_layer_perhead, got {mode}"
        )
    return mean_cos.new_empty((page_table.shape[0], rows[mode], width))


_define(f"triattention_score.out({_TRIATTENTION_SCORE}, *, Tensor(a!) out) -> ()")(_no_result)

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


@ops.triattention_score.out.py_functionalize_impl
def _(context: Any, *args: Any, out: torch.Tensor) -> None:
    """The functional op and a copy. torch's own way passes keywords and trips over one of the name `mode`."""
    arguments, target = context.unwrap_tensors(args), context.unwrap_tensors(out)
    with context.redispatch_to_next():
        result = ops.triattention_score.default(*arguments)
        if result.shape != target.shape or target.dtype != result.dtype:
            raise ValueError(
                f"{NAMESPACE}.triattention_score: out must be {result.dtype} {list(result.shape)},"
                f" got {target.dtype} {list(target.shape)}"
            )
        result = torch.ops.aten.copy.default(target, result)
    context.replace(out, result)
    context.commit_update(out)
    context.sync(out)


_SCHEMA_MISMATCH = re.compile(
    rf"{NAMESPACE}::(\w+)\(\) Expected a value of type '(.+)' for argument '(\w+)' but instead found type '(.+)'"
)


def _refuse_none(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch hands None to an op as an undefined tensor, of which the op can only say that a call on it failed."""
    schema = (op.default if isinstance(op, torch._ops.OpOverloadPacket) else op)._schema
    given = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
    for argument in schema.arguments:
        if isinstance(argument.type, torch.TensorType) and given.get(argument.name, op) is None:
            op_name = schema.name.split("::")[1]
            raise TypeError(f"{NAMESPACE}.{op_name}: {argument.name} must be a Tensor, got None") from None


def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an op and give its argument errors their Python type.

    C++ raises ``ValueError`` by itself; a ``TypeError`` or ``NotImplementedError`` of an op arrives as
    ``RuntimeError`` with the op's text.
    """
    if torch.compiler.is_dynamo_compiling():
        return op(*args, **kwargs)
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        text = str(error).split("\n", 1)[0]
        if mismatch := _SCHEMA_MISMATCH.match(text):
            op_name, wanted, argument, found = mismatch.groups()
            raise TypeError(f"{NAMESPACE}.{op_name}: {argument} must be a {wanted}, got a {found}") from None
        if not text.startswith(f"{NAMESPACE}."):
            _refuse_none(op, args, kwargs)
            raise
        kind = NotImplementedError if " must be one of the built architectures" in text else TypeError
        raise kind(text) from None


_debugging = False


def debugging() -> bool:
    """Whether ops check their device values now, see :func:`set_debug`."""
    return _debugging


def set_debug(enabled: bool) -> None:
    """Check values that live on the device, synchronising, before anything is written.

    Off by default: an out-of-range page id, token index or offset then skips its element.

    Parameters
    ----------
    enabled : bool
        Whether every later op of this process checks its device values.
    """
    global _debugging
    for library in _libraries:
        library.set_debug(bool(enabled))
    _debugging = bool(enabled)
