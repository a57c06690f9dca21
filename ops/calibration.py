"""Offline query statistics for TriAttention scoring.

:func:`kvc.triattention_score` predicts how much the queries to come will attend to a cached key. It needs to know, per
layer, query head and RoPE frequency, where the model's queries lie before rotation: their mean as a complex number,
and how much longer they are on average than their mean (Mao et al., "TriAttention", arXiv:2604.04921). A model has
these numbers once and for all; :func:`collect` measures them on a text, :func:`save` and :func:`load` keep them.

Frequency f pairs element f of a head with element f + F, F = head_dim / 2 (the "half" layout of Llama, Qwen and
Mistral). Nothing here runs while a model serves, and :func:`load` refuses whatever does not fit the model.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "kvc.calibration"
VERSION = 1
NUM_OFFSETS = 17  # futures of 1, 2, 4, ..., 65,536 tokens
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FREQUENCY_TOLERANCE = 1e-5  # relative, of inv_freq and of the attention factor

STATISTICS = ("q_mean_real", "q_mean_imag", "q_norm_excess")
FREQUENCIES = ("freq_scale_sq", "omega")
_FLAT_KEYS = {"E_q", "E_q_norm", "omega", "freq_scale_sq"}
_HEAD_KEY = re.compile(r"layer([0-9]{1,9})_head([0-9]{1,9})")
_HEAD_STATISTICS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def _refusal(what: str, expected: object, got: object) -> ValueError:
    return ValueError(f"kvc.calibration: {what} must be {expected}, got {got}")


def _not_dense(value: object) -> str | None:
    """What a value is instead of a tensor whose numbers lie in memory, None where it is one."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_meta or value.is_nested or value.layout != torch.strided:
        return f"a {'meta' if value.is_meta else 'nested' if value.is_nested else value.layout} tensor"
    return f"a tensor of {value.dtype}" if value.is_quantized else None


def _offsets() -> Tensor:
    return 2 ** torch.arange(NUM_OFFSETS, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Calibration:
    """What :func:`kvc.mean_phase` and :func:`kvc.triattention_score` need to know about a model.

    Checked when it is made: shapes, dtypes, and that every number is finite.

    Attributes
    ----------
    q_mean_real, q_mean_imag : Tensor
        Mean of the queries before rotation and after any q_norm, elements f and f + F, fp32
        ``[layers, query_heads, F]``.
    q_norm_excess : Tensor
        Mean length of the queries at a frequency minus the length of their mean, fp32 ``[layers, query_heads, F]``.
    freq_scale_sq : Tensor
        Square of the factor that RoPE scaling puts on cos and sin, fp32 ``[F]``; 1 without.
    omega : Tensor
        The model's rotary frequencies (``inv_freq``), radians per token, fp32 ``[F]``.
    num_kv_heads : int or None
        KV heads of the model; None when the file did not say.
    offsets : Tensor
        How many tokens ahead to average over, int64 ``[O]``: 1, 2, 4, ..., 65,536 by default (the paper's).
    model : str
        Name of the model.
    tokens_seen : int
        Tokens the statistics were taken over; 0 when unknown.
    rope : Mapping
        The model's RoPE parameters, as transformers has them.
    """

    q_mean_real: Tensor
    q_mean_imag: Tensor
    q_norm_excess: Tensor
    freq_scale_sq: Tensor
    omega: Tensor
    num_kv_heads: int | None = None
    offsets: Tensor = field(default_factory=_offsets)
    model: str = ""
    tokens_seen: int = 0
    rope: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*STATISTICS, *FREQUENCIES, "offsets"):
            if kind := _not_dense(getattr(self, name)):
                raise TypeError(f"kvc.calibration: {name} must be a dense tensor, got {kind}")
        shape = self.q_mean_real.shape
        if len(shape) != 3 or 0 in shape:
            raise _refusal("q_mean_real", "[layers, query_heads, F], none of them 0", list(shape))
        for name in (*STATISTICS, *FREQUENCIES):
            value: Tensor = getattr(self, name)
            expected = shape if name in STATISTICS else shape[-1:]
            if value.dtype != torch.float32:
                raise TypeError(f"kvc.calibration: {name} must be float32, got {value.dtype}")
            if value.shape != expected:
                raise _refusal(name, f"of shape {list(expected)}", list(value.shape))
            if bad := int((~value.isfinite()).sum()):
                raise _refusal(name, "finite", f"{bad} values that are not")
        for name in FREQUENCIES:
            if not bool((getattr(self, name) > 0).all()):
                raise _refusal(name, "positive", f"a smallest value of {float(getattr(self, name).min())}")
        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or len(self.offsets) == 0:
            raise _refusal(
                "offsets", "int64 [O] with O > 0", f"{self.offsets.dtype} {list(self.offsets.shape)}"
            )
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or shape[1] % self.num_kv_heads):
            raise _refusal("num_kv_heads", f"a divisor of the {shape[1]} query heads", self.num_kv_heads)
        if self.tokens_seen < 0:
            raise _refusal("tokens_seen", "at least 0", self.tokens_seen)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.q_mean_real.shape[0]

    @property
    def num_query_heads(self) -> int:
        """Query heads of a layer."""
        return self.q_mean_real.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return 2 * self.q_mean_real.shape[2]

    @property
    def q_mean_norm(self) -> Tensor:
        """Length of the mean query, |E q|, fp32 ``[layers, query_heads, F]``."""
        return torch.hypot(self.q_mean_real, self.q_mean_imag)

    @property
    def resultant_length(self) -> Tensor:
        """Mean resultant length |E q| / E|q|, fp32 ``[layers, query_heads, F]``; 1: all queries point the same way."""
        norm = self.q_mean_norm + self.q_norm_excess
        return torch.where(norm > 0, self.q_mean_norm / norm, 0.0)

    def to(self, device: torch.device | str) -> Calibration:
        """The same statistics with every tensor on `device`."""
        names = (*STATISTICS, *FREQUENCIES, "offsets")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return dataclasses.replace(self, **moved)


# What a model is


@dataclass(frozen=True)
class _Geometry:
    """What a model's configuration says, as far as the statistics depend on it."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    omega: Tensor
    attention_factor: float
    rope: dict[str, Any]


def _geometry(model: Any) -> _Geometry:
    """Read a transformers model or configuration; refuse what TriAttention scoring cannot describe."""
    config = getattr(model, "config", model)
    kind = type(config).__name__
    name = str(getattr(config, "_name_or_path", "") or getattr(config, "model_type", kind))
    if Path(name).is_dir():
        name = Path(name).resolve().name  # where it lay on this machine concerns nobody
    for attribute in ("num_hidden_layers", "num_attention_heads"):
        if not isinstance(getattr(config, attribute, None), int):
            raise _refusal("model", f"a text model whose configuration has {attribute}", kind)
    if getattr(config, "kv_lora_rank", None):
        raise _refusal(
            "model", "one with multi-head or grouped-query attention", "multi-head latent attention"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim % 2:
        raise _refusal("head_dim", "even", head_dim)
    omega, factor, rope = _rope(config, head_dim)
    if isinstance(model, torch.nn.Module):
        for key, buffer in model.named_buffers():
            if key.rpartition(".")[2] == "inv_freq":
                _compare_frequencies(
                    buffer.float().cpu(), omega, f"{key} of the model", "its configuration's"
                )
                omega = buffer.detach().float().cpu().clone()  # the very numbers that rotate its keys
    return _Geometry(
        name=name,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        omega=omega,
        attention_factor=factor,
        rope=rope,
    )


def _rope(config: Any, head_dim: int) -> tuple[Tensor, float, dict[str, Any]]:
    """inv_freq fp32 ``[F]``, attention factor and parameters, by transformers' own functions."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise _refusal(
            "model", "one with rotary position embeddings", f"{type(config).__name__} without rope_parameters"
        )
    rope = dict(parameters)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _refusal("rope_parameters", "the same for all layers", f"one set each for {sorted(rope)}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise _refusal("rope_type", f"one of {', '.join(ROPE_TYPES)}", kind)
    if rope.get("mrope_section"):
        raise _refusal(
            "rope_parameters", "for one position per token", f"mrope_section {rope['mrope_section']}"
        )
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        raise _refusal("partial_rotary_factor", "1 (whole heads rotated)", partial)
    if kind == "default":
        # transformers keeps this one in each model's own file.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        omega, factor = 1.0 / rope["rope_theta"] ** exponent, 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        omega, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if omega.shape != (head_dim // 2,):
        raise _refusal("rotary frequencies", f"{head_dim // 2}, half of a head", len(omega))
    return omega.float(), float(factor), rope


def _compare_frequencies(omega: Tensor, expected: Tensor, what: str, whose: str) -> None:
    if omega.shape != expected.shape:
        raise _refusal(what, f"{len(expected)} frequencies", len(omega))
    deviation = ((omega.double() - expected.double()).abs() / expected.double()).max().item()
    if not deviation <= FREQUENCY_TOLERANCE:
        raise _refusal(
            what, f"{whose} inv_freq within {FREQUENCY_TOLERANCE}", f"a relative deviation of {deviation:.3g}"
        )


def _match(calibration: Calibration, geometry: _Geometry, source: str) -> Calibration:
    """Refuse statistics of another model; fill in what their file did not say."""
    found = {
        "layers": (calibration.num_layers, geometry.layers),
        "query heads": (calibration.num_query_heads, geometry.query_heads),
        "KV heads": (calibration.num_kv_heads or geometry.kv_heads, geometry.kv_heads),
        "head size": (calibration.head_dim, geometry.head_dim),
    }
    for what, (got, expected) in found.items():
        if got != expected:
            raise _refusal(f"{what} in {source}", f"{expected} as in {geometry.name}", got)
    _compare_frequencies(calibration.omega, geometry.omega, f"omega in {source}", f"{geometry.name}'s")
    scale = geometry.attention_factor**2
    if not bool(((calibration.freq_scale_sq - scale).abs() <= FREQUENCY_TOLERANCE * scale).all()):
        raise _refusal(
            f"freq_scale_sq in {source}",
            f"{scale:.6g} as in {geometry.name}",
            calibration.freq_scale_sq.tolist(),
        )
    return dataclasses.replace(
        calibration,
        num_kv_heads=geometry.kv_heads,
        model=calibration.model or geometry.name,
        rope=calibration.rope or geometry.rope,
    )


# Collecting


class _QuerySums:
    """Float64 sums over the queries a model rotates, and the proof that it rotates them as the score assumes."""

    def __init__(self, geometry: _Geometry) -> None:
        self.geometry = geometry
        shape = (geometry.layers, geometry.query_heads, geometry.head_dim // 2)
        self.real, self.imag, self.norm = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        self.tokens = 0
        self.skip = 0  # leading tokens of this forward pass that are context only
        self.seen: list[int] = []  # layers of this forward pass
        self.rotated_keys: dict[int, Tensor] | None = {}  # kept for the first pass, which is checked

    def add(
        self, layer: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotated: tuple[Tensor, Tensor]
    ) -> None:
        if self.rotated_keys is not None:
            self._check(layer, q, k, cos, sin, rotated[0])
            self.rotated_keys[layer] = rotated[1]
        self.seen.append(layer)
        half = self.geometry.head_dim // 2
        real, imag = q[0, :, self.skip :].double().split(half, dim=-1)
        self.real[layer] += real.sum(1).cpu()
        self.imag[layer] += imag.sum(1).cpu()
        self.norm[layer] += torch.hypot(real, imag).sum(1).cpu()

    def _check(self, layer: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotated: Tensor) -> None:
        """Queries, keys, cos and sin of the first tokens of a text, and the rotated queries."""
        g, tokens = self.geometry, q.shape[2] if q.ndim == 4 else 0
        where = f"layer {layer} of {g.name}"
        if cos.shape[-1] == g.head_dim // 2:  # gpt-oss hands over one value per frequency
            cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        for what, tensor, expected in (
            ("queries", q, (1, g.query_heads, tokens, g.head_dim)),
            ("keys", k, (1, g.kv_heads, tokens, g.head_dim)),
            ("cos", cos, (1, tokens, g.head_dim)),
        ):
            if tensor.shape != expected:
                raise _refusal(
                    f"{what} of {where}", f"of shape {list(expected)} when rotated", list(tensor.shape)
                )
        angle = torch.arange(tokens, dtype=torch.float64)[:, None] * g.omega.double()
        eps = torch.finfo(q.dtype).eps
        for what, tensor, exact in (("cos", cos, angle.cos()), ("sin", sin, angle.sin())):
            error = (tensor[0].double().cpu() - g.attention_factor * exact.repeat(1, 2)).abs().max().item()
            if not error <= 1e-4 + 2 * eps * g.attention_factor:
                raise _refusal(
                    f"{what} of {where}",
                    "that of position * inv_freq in the half layout",
                    f"off by {error:.3g}",
                )
        first, second = q.double().chunk(2, dim=-1)
        expected_q = (
            q.double() * cos[:, None].double() + torch.cat([-second, first], dim=-1) * sin[:, None].double()
        )
        error = (rotated.double() - expected_q).abs().max().item()
        if not error <= 8 * eps * float(q.abs().max()) * g.attention_factor:
            raise _refusal(
                f"rotation of {where}",
                "of elements f and f + F (half layout)",
                f"a result off by {error:.3g}",
            )

    def end_pass(self, tokens: int, cache: Any) -> None:
        """After `tokens` tokens went through every layer."""
        name = self.geometry.name
        if self.seen != list(range(self.geometry.layers)):
            raise _refusal(
                f"layers of {name} that rotate queries", f"0 to {self.geometry.layers - 1}", self.seen
            )
        for layer, keys in (self.rotated_keys or {}).items():
            cached = cache.layers[layer].keys
            count = min(keys.shape[2], cached.shape[2])  # a sliding window drops the oldest
            if not torch.equal(cached[:, :, -count:], keys[:, :, -count:]):
                raise _refusal(
                    f"cached keys of layer {layer} of {name}",
                    "the rotated keys",
                    "keys changed after rotation",
                )
        self.rotated_keys = None
        self.seen = []
        self.tokens += tokens - self.skip

    def calibration(self) -> Calibration:
        g = self.geometry
        real, imag, norm = (total / self.tokens for total in (self.real, self.imag, self.norm))
        return Calibration(
            q_mean_real=real.float(),
            q_mean_imag=imag.float(),
            q_norm_excess=(norm - torch.hypot(real, imag)).float(),
            freq_scale_sq=torch.full((g.head_dim // 2,), g.attention_factor**2),
            omega=g.omega,
            num_kv_heads=g.kv_heads,
            model=g.name,
            tokens_seen=self.tokens,
            rope=g.rope,
        )


@contextmanager
def _rotations(model: Any, geometry: _Geometry, add: Callable[..., None]) -> Iterator[None]:
    """Call `add` with what every attention layer hands to ``apply_rotary_pos_emb`` of its module."""

    def source(module: torch.nn.Module) -> Any:
        return sys.modules[type(module).__module__]

    attention = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "head_dim")
        and hasattr(source(module), "apply_rotary_pos_emb")
    ]
    if sorted(module.layer_idx for module in attention) != list(range(geometry.layers)):
        raise _refusal(
            "model",
            f"one whose {geometry.layers} attention layers all use an apply_rotary_pos_emb of their module"
            " (Llama, Qwen2, Qwen3, Mistral and their like)",
            f"{type(model).__name__} with {len(attention)}",
        )
    current: list[int] = []
    undo: list[Callable[[], None]] = []
    for module in attention:
        enter = module.register_forward_pre_hook(lambda module, args: current.append(module.layer_idx))
        leave = module.register_forward_hook(lambda module, args, output: current.clear())
        undo += [enter.remove, leave.remove]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_rotary_pos_emb(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            rotated = original(q, k, cos, sin, *args, **kwargs)
            if current:
                add(current[-1], q, k, cos, sin, rotated)
            return rotated

        return apply_rotary_pos_emb

    for file in {source(module) for module in attention}:
        undo.append(partial(setattr, file, "apply_rotary_pos_emb", file.apply_rotary_pos_emb))
        file.apply_rotary_pos_emb = wrap(file.apply_rotary_pos_emb)
    try:
        yield
    finally:
        for step in undo:
            step()


def _windows(tokens: Iterable[Tensor], window: int, stride: int) -> Iterator[tuple[Tensor, int]]:
    """Windows over a stream of token ids, and how many leading tokens of each an earlier one has counted."""
    held, counted = torch.empty(0, dtype=torch.int64), 0
    for part in tokens:
        held = torch.cat([held, part.reshape(-1).cpu()])
        while len(held) >= window:
            yield held[:window], counted
            held, counted = held[stride:], window - stride
    if len(held) > counted:
        yield held, counted


def collect(
    model: Any,
    tokens: Tensor | Iterable[Tensor],
    *,
    window: int = 4096,
    stride: int | None = None,
    chunk: int = 512,
    max_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Measure a model's query statistics on a text.

    The queries are taken as the model hands them to its rotation, so after q_proj and any q_norm. On the first tokens
    it is checked that the model rotates whole heads in the half layout, by the frequencies of its configuration, and
    caches what it rotated; any other model is refused. While it runs, ``apply_rotary_pos_emb`` of the model's module is
    wrapped: one collection at a time in a process.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model (Llama, Qwen2, Qwen3, Mistral and their like), on any device, in any dtype.
    tokens : Tensor or iterable of Tensor
        Token ids of one text, whole or in parts, any integer dtype. Parts are read as they are needed.
    window : int, optional
        Tokens of context: the text is read in windows of this length, each from an empty cache.
    stride : int, optional
        Step between windows, 1 to `window`. The tokens that a window shares with the one before are context and not
        counted again. Default: `window`.
    chunk : int, optional
        Tokens of one forward pass. Bounds the memory and does not change the result.
    max_tokens : int, optional
        Stop after so many tokens. Default: the whole text.
    on_progress : callable, optional
        Called with the number of tokens counted so far.

    Returns
    -------
    Calibration
        On the CPU. Sums are kept in float64; memory depends on `window` and `chunk`, not on the text.

    Raises
    ------
    ValueError
        For a model that the score cannot describe, an empty text, numbers or token ids out of range, queries that are
        not finite.
    TypeError
        For tokens that are no integers in dense tensors.
    """
    stride = window if stride is None else stride
    for what, value, largest in (
        ("window", window, None),
        ("stride", stride, window),
        ("chunk", chunk, None),
        ("max_tokens", max_tokens, None),
    ):
        if value is not None and (value < 1 or (largest is not None and value > largest)):
            raise _refusal(what, f"1 to {largest}" if largest else "at least 1", value)
    geometry = _geometry(model)
    if not isinstance(model, torch.nn.Module):
        raise _refusal("model", "a model, which can read the text", type(model).__name__)
    sums = _QuerySums(geometry)
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    vocabulary = getattr(embeddings, "num_embeddings", None)
    parts = _limited([tokens] if isinstance(tokens, Tensor) else tokens, max_tokens, vocabulary)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), _rotations(model, geometry, sums.add):
            for ids, counted in _windows(parts, window, stride):
                for _ in _read(model, ids, counted, chunk, sums):
                    if on_progress is not None:
                        on_progress(sums.tokens)
    finally:
        model.train(training)
    if sums.tokens == 0:
        raise _refusal("tokens", "at least one token", "an empty text")
    return sums.calibration()


def _limited(parts: Iterable[Tensor], count: int | None, vocabulary: int | None) -> Iterator[Tensor]:
    for part in parts:
        if kind := _not_dense(part):
            raise TypeError(f"kvc.calibration: tokens must be one dense tensor or several, got {kind}")
        if part.dtype.is_floating_point or part.dtype.is_complex or part.dtype == torch.bool:
            raise TypeError(f"kvc.calibration: tokens must be integers, got {part.dtype}")
        flat = part.reshape(-1).long()
        if vocabulary is not None and len(flat) > 0:  # on a GPU an embedding of another one is a device trap
            low, high = (int(value) for value in flat.aminmax())
            if low < 0 or high >= vocabulary:
                raise _refusal("tokens", f"0 to {vocabulary - 1}", low if low < 0 else high)
        yield flat if count is None else flat[:count]
        if count is not None:
            count -= min(count, len(flat))
            if count == 0:
                return


def _read(model: Any, ids: Tensor, counted: int, chunk: int, sums: _QuerySums) -> Iterator[None]:
    """One window through the model in chunks over a fresh cache."""
    from transformers import DynamicCache

    body = model.base_model  # without the vocabulary, whose logits nobody needs
    keyword = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    done = 0
    for part in ids.split(chunk):
        sums.skip = min(max(counted - done, 0), len(part))
        body(input_ids=part[None].to(model.device), use_cache=True, **{keyword: cache})
        sums.end_pass(len(part), cache)
        done += len(part)
        yield


def token_stream(tokenizer: Any, lines: Iterable[str], block: int = 1 << 13) -> Iterator[Tensor]:
    """Tokenize a text line by line, such as an open file, without holding it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's tokenizer. Only the first block gets its special tokens.
    lines : iterable of str
        The text; blocks end at a line's end.
    block : int, optional
        Characters that are tokenized together, at least.

    Yields
    ------
    Tensor
        int64 ``[tokens]``.
    """
    held: list[str] = []
    size, first = 0, True

    def ids() -> Tensor:
        encoded = tokenizer("".join(held), add_special_tokens=first, return_tensors="pt", verbose=False)
        return encoded["input_ids"][0].long()

    for line in lines:
        held.append(line)
        size += len(line)
        if size >= block:
            yield ids()
            held, size, first = [], 0, False
    if held:
        yield ids()


# Files


def save(calibration: Calibration, path: Path | str) -> None:
    """Write statistics as safetensors, with what is known about their origin as metadata.

    Parameters
    ----------
    calibration : Calibration
        Statistics; `num_kv_heads` must be known.
    path : Path or str
        The file, by custom ``*.safetensors``.
    """
    from safetensors.torch import save_file

    if calibration.num_kv_heads is None:
        raise _refusal("num_kv_heads", "known in a file", "None")
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "model": calibration.model,
        "tokens_seen": str(calibration.tokens_seen),
        "num_layers": str(calibration.num_layers),
        "num_query_heads": str(calibration.num_query_heads),
        "num_kv_heads": str(calibration.num_kv_heads),
        "head_dim": str(calibration.head_dim),
        "rope": json.dumps(dict(calibration.rope), sort_keys=True),
    }
    names = (*STATISTICS, *FREQUENCIES, "offsets")
    # Copies, since tensors that share memory are refused.
    tensors = {
        n: torch.clone(getattr(calibration, n).cpu(), memory_format=torch.contiguous_format) for n in names
    }
    save_file(tensors, str(path), metadata)


def load(path: Path | str, model: Any = None) -> Calibration:
    """Read statistics and check everything about them.

    Parameters
    ----------
    path : Path or str
        A file of :func:`save`, or a ``.pt`` file of the official repository: the layout with one entry for each
        head, or the flat one (``E_q``, ``E_q_norm``, ``omega``, ``freq_scale_sq``). Such files are read with
        ``weights_only=True``.
    model : transformers.PreTrainedModel or transformers.PretrainedConfig, optional
        The model the statistics must belong to: equal numbers of layers, query heads, KV heads and elements of a
        head, and ``inv_freq`` within a relative 1e-5. The official layout for each head needs it, since frequencies
        and scale come from there.

    Returns
    -------
    Calibration
        On the CPU.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        For a file of another kind or version, missing heads or entries, wrong shapes and dtypes, numbers that are not
        finite, and another model's statistics.
    """
    path = Path(path)
    geometry = None if model is None else _geometry(model)
    with path.open("rb") as file:
        head = file.read(9)
    # safetensors: eight bytes of length, then JSON.
    calibration = _load_own(path) if head[8:] == b"{" else _load_official(path, geometry)
    return calibration if geometry is None else _match(calibration, geometry, path.name)


def _load_own(path: Path) -> Calibration:
    from safetensors import SafetensorError, safe_open

    names = {*STATISTICS, *FREQUENCIES, "offsets"}
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _refusal(path.name, "a whole safetensors file", error) from error
    kind = metadata.get("format"), metadata.get("version")
    if kind != (FORMAT, str(VERSION)):
        raise _refusal(
            f"format of {path.name}", f"{FORMAT} version {VERSION}", " version ".join(map(str, kind))
        )
    if set(tensors) != names:
        raise _refusal(f"tensors in {path.name}", sorted(names), sorted(tensors))
    try:
        numbers = {
            name: int(metadata[name])
            for name in ("tokens_seen", "num_layers", "num_query_heads", "num_kv_heads", "head_dim")
        }
        rope, model = json.loads(metadata["rope"]), metadata["model"]
    except (KeyError, ValueError) as error:
        raise _refusal(f"metadata of {path.name}", "complete and readable", repr(error)) from error
    if not isinstance(rope, dict):
        raise _refusal(f"rope in {path.name}", "a JSON object", rope)
    try:
        calibration = Calibration(
            **tensors,
            num_kv_heads=numbers["num_kv_heads"],
            model=model,
            tokens_seen=numbers["tokens_seen"],
            rope=rope,
        )
    except TypeError as error:  # a dtype: of a file that is as wrong as a shape
        raise ValueError(str(error)) from error
    for name in ("num_layers", "num_query_heads", "head_dim"):
        if getattr(calibration, name) != numbers[name]:
            raise _refusal(f"{name} of the tensors in {path.name}", numbers[name], getattr(calibration, name))
    return calibration


def _load_official(path: Path, geometry: _Geometry | None) -> Calibration:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].strip()
        raise _refusal(
            path.name, "safetensors, or a torch file of plain tensors, lists and texts", reason
        ) from error
    if not isinstance(content, dict):
        raise _refusal(f"content of {path.name}", "a dictionary", type(content).__name__)
    if set(content) >= _FLAT_KEYS:
        return _from_flat(content, path.name)
    if "stats" in content:
        return _from_heads(content, path.name, geometry)
    known = f"'stats' (and 'metadata'), or {sorted(_FLAT_KEYS)}"
    raise _refusal(f"keys of {path.name}", known, sorted(map(str, content)))


def _from_flat(content: dict[str, Any], source: str) -> Calibration:
    for key in sorted(_FLAT_KEYS):
        value = content[key]
        if (got := _not_dense(value)) or value.is_complex() != (key == "E_q"):
            kind = "a complex tensor" if key == "E_q" else "a real tensor"
            raise _refusal(f"{key} in {source}", kind, got or value.dtype)
    mean, norm = content["E_q"].to(torch.complex128), content["E_q_norm"].double()
    if norm.shape != mean.shape:
        raise _refusal(f"E_q_norm in {source}", f"of shape {list(mean.shape)}", list(norm.shape))
    return Calibration(
        q_mean_real=mean.real.float(),
        q_mean_imag=mean.imag.float(),
        q_norm_excess=(norm - mean.abs()).float(),
        freq_scale_sq=content["freq_scale_sq"].float(),
        omega=content["omega"].float(),
    )


def _from_heads(content: dict[str, Any], source: str, geometry: _Geometry | None) -> Calibration:
    stats, metadata = content["stats"], content.get("metadata") or {}
    if not isinstance(stats, dict) or not isinstance(metadata, dict):
        raise _refusal(
            f"stats and metadata in {source}", "dictionaries", (type(stats).__name__, type(metadata).__name__)
        )
    if geometry is None:
        holds = f"{source} holds no rotary frequencies (python -m kvc.calibrate convert adds them)"
        raise _refusal("model", f"given, since {holds}", "None")
    expected = {
        "rope_style": "half",
        "head_dim": geometry.head_dim,
        "num_layers": geometry.layers,
        "num_attention_heads": geometry.query_heads,
        "num_kv_heads": geometry.kv_heads,
        "rope_theta": geometry.rope.get("rope_theta"),
    }
    for key, value in expected.items():
        if isinstance(metadata.get(key), Tensor) or metadata.get(key, value) != value:
            raise _refusal(f"{key} in {source}", f"{value} as in {geometry.name}", metadata[key])
    parsed = {_HEAD_KEY.fullmatch(str(key)): key for key in stats}
    if None in parsed:
        raise _refusal(f"stats in {source}", "named layer<l>_head<h>", parsed[None])
    keys = {(int(match[1]), int(match[2])): key for match, key in parsed.items() if match is not None}
    if len(keys) != len(parsed):
        raise _refusal(f"stats in {source}", "one entry for each head", "two with the same numbers")
    wanted = {(layer, head) for layer in range(geometry.layers) for head in range(geometry.query_heads)}
    shape = f"{geometry.layers} layers of {geometry.query_heads} query heads as in {geometry.name}"
    if missing := sorted(wanted - keys.keys()):
        layer, head = missing[0]
        raise _refusal(
            f"stats in {source}", shape, f"{len(missing)} missing, the first layer {layer} head {head}"
        )
    if extra := sorted(keys.keys() - wanted):
        layer, head = extra[-1]
        raise _refusal(f"stats in {source}", shape, f"layer {layer} head {head}")
    columns = []
    for name in _HEAD_STATISTICS:
        rows = []
        for head_index in sorted(wanted):
            key = keys[head_index]
            row: Any = stats[key].get(name) if isinstance(stats[key], dict) else None
            got = _not_dense(row)
            if got or row.shape != (geometry.head_dim // 2,) or row.is_complex():
                got = got or f"{row.dtype} {list(row.shape)}"
                raise _refusal(
                    f"{name} of {key} in {source}", f"a real tensor [{geometry.head_dim // 2}]", got
                )
            rows.append(row.double())
        columns.append(torch.stack(rows).view(geometry.layers, geometry.query_heads, -1))
    real, imag, norm = columns
    return Calibration(
        q_mean_real=real.float(),
        q_mean_imag=imag.float(),
        q_norm_excess=(norm - torch.hypot(real, imag)).float(),
        freq_scale_sq=torch.full_like(geometry.omega, geometry.attention_factor**2),
        omega=geometry.omega,
    )


# Report


def report(calibration: Calibration, plot: Path | str | None = None) -> Table:
    """Tell whether a model's queries are concentrated, which is what TriAttention lives on.

    The mean resultant length R = ``|E q| / E|q|`` of a frequency is 1 when all queries point the same way before
    rotation and near 0 when they point everywhere: then their mean says nothing about the next query.

    Parameters
    ----------
    calibration : Calibration
        Statistics to describe.
    plot : Path or str, optional
        Also draw R of every frequency and head, and its distribution, to this file (PNG, SVG, PDF).

    Returns
    -------
    rich.table.Table
        One row per layer. "weighted" is the sum of ``|E q|`` over the sum of ``E|q|``, so long queries count more.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    if plot is not None:
        _plot(calibration, Path(plot))
    lengths, mean = calibration.resultant_length.double(), calibration.q_mean_norm.double()
    norm = mean + calibration.q_norm_excess.double()
    by_head = (mean.sum(-1) / norm.sum(-1)).nan_to_num()  # [layers, heads]
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title=f"Mean resultant length of queries before rotation\n{escape(_origin(calibration))}",
        caption="R = |E q| / E|q| over heads and frequencies of a layer; weighted: long queries count more.",
        caption_justify="left",
    )
    for heading in ("layer", "median", "10 %", "90 %", "R > 0.5", "weighted", "best head", "worst head"):
        table.add_column(heading, justify="right", no_wrap=True)

    def row(name: str, layers: slice) -> None:
        values = lengths[layers].flatten()
        low, middle, high = torch.quantile(values, values.new_tensor([0.1, 0.5, 0.9])).tolist()
        weighted = (mean[layers].sum() / norm[layers].sum()).nan_to_num().item()
        heads = by_head[layers].flatten()
        ends = [
            f"{heads[int(i)]:.2f} ({int(i) % by_head.shape[1]})" for i in (heads.argmax(), heads.argmin())
        ]
        if name == "all":
            ends = [f"{heads.max():.2f}", f"{heads.min():.2f}"]
        share = (values > 0.5).double().mean().item()
        table.add_row(
            name, *(f"{v:.2f}" for v in (middle, low, high)), f"{share:.0%}", f"{weighted:.2f}", *ends
        )

    for layer in range(calibration.num_layers):
        row(str(layer), slice(layer, layer + 1))
    table.add_section()
    row("all", slice(None))
    return table


def _origin(calibration: Calibration) -> str:
    tokens = f"{calibration.tokens_seen:,}" if calibration.tokens_seen else "an unknown number of"
    return f"{calibration.model or 'unknown model'}, {tokens} tokens"


def _plot(calibration: Calibration, path: Path) -> None:
    from matplotlib.figure import Figure

    layers, heads, bands = calibration.q_mean_real.shape
    lengths = calibration.resultant_length
    norms = (calibration.q_mean_norm + calibration.q_norm_excess).clamp(min=0)
    figure = Figure(figsize=(11, 6.4), dpi=120, layout="constrained")
    axes = figure.subplot_mosaic([["map", "spread"], ["map", "bands"]], width_ratios=(3, 2))
    image = axes["map"].imshow(
        lengths.flatten(0, 1).numpy(), aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest"
    )
    named = range(0, layers, -(-layers // 12))
    axes["map"].set_yticks([(layer + 0.5) * heads - 0.5 for layer in named], [str(layer) for layer in named])
    axes["map"].set_ylabel(f"layer ({heads} query heads each)")
    axes["map"].set_xlabel("frequency, fast to slow")
    axes["map"].set_title(_origin(calibration), fontsize=10)
    figure.colorbar(image, ax=axes["map"], label="mean resultant length |E q| / E|q|")

    edges = torch.linspace(0, 1, 41).tolist()
    values, weights = lengths.flatten().clamp(0, 1).numpy(), norms.flatten().numpy()
    plain: dict[str, Any] = {"density": True, "histtype": "stepfilled", "color": "#0072B2", "alpha": 0.35}
    axes["spread"].hist(values, edges, label="every frequency alike", **plain)
    long: dict[str, Any] = {"density": True, "histtype": "step", "color": "#D55E00", "linewidth": 1.6}
    axes["spread"].hist(values, edges, weights=weights, label="weighted by query length", **long)
    axes["spread"].set_xlabel("mean resultant length")
    axes["spread"].set_ylabel("density")
    axes["spread"].legend(frameon=False, fontsize=8)

    low, middle, high = torch.quantile(lengths.flatten(0, 1), torch.tensor([0.1, 0.5, 0.9]), dim=0).tolist()
    axes["bands"].fill_between(
        range(bands), low, high, color="#0072B2", alpha=0.25, linewidth=0, label="10 to 90 %"
    )
    axes["bands"].plot(range(bands), middle, color="#0072B2", label="median over heads")
    axes["bands"].set_ylim(0, 1)
    axes["bands"].set_xlabel("frequency, fast to slow")
    axes["bands"].set_ylabel("mean resultant length")
    axes["bands"].legend(frameon=False, fontsize=8)
    figure.savefig(path)
