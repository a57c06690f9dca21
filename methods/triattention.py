"""TriAttention as an engine switches it on: when a request is due, what a round keeps, and the one number that
remembers it.

A request's tokens are its prompt, which never moves, and what was generated. Every `beta` generated tokens the
ones of a request that exceed `budget` are evicted: scored against where queries of this model are known to point
(``kvc.triattention_score``), the best `budget` kept (``kvc.radix_topk``), moved together behind the prompt
(``kvc.compact_pages_``). Keys keep the rotation of their old position, so a request needs no positions, only the
number of tokens it has lost: the logical length is the physical length plus `compressed`.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NoReturn

import torch
from kvc import calibration as calibration_files
from pydantic import Field

from .config import KvCacheCompressionConfig
from .engine import Engine, EngineFacts, LayerFacts, PagedCache, Request, Resize
from .manager import KVCacheCompressionManager, RequestsLostError
from .triattention_round import DueRequest, EvictionRound, RoundShape, Statistics

__all__ = ["TriAttentionConfig", "TriAttentionManager"]

KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
# Beyond these a float32 phase or an int32 index is not exact any more.
MAX_POSITION = 1 << 24
INT32_END = 1 << 31


class TriAttentionConfig(KvCacheCompressionConfig):
    """Evict generated tokens by TriAttention.

    Attributes
    ----------
    budget : int
        Generated tokens a request keeps; its prompt comes on top.
    beta : int
        Generated tokens from one eviction to the next.
    eviction_mode : {"union", "per_head", "per_layer_perhead"}
        Whether all heads keep the same tokens, each KV head its own in all layers, or each head of each layer.
    normalize_scores : bool
        Whether a query head's scores are standardised before heads are compared; ``"union"`` needs it.
    calibration_path : Path
        Query statistics of the model, see :func:`kvc.calibration.load`. An official ``.pt`` file with one entry for
        each head holds no rotary frequencies: ``python -m kvc.calibrate convert`` adds those of a model.
    compaction : {"ordered", "fill"}
        Keep the tokens in order, or move only as many as there are holes; see :mod:`kvc.compaction` for when
        order may be given up.

    References
    ----------
    TriAttention, arXiv 2604.04921; the trigger follows TensorRT-LLM (pull request 16957).
    """

    changes_physical_kv_length: ClassVar[bool] = True

    budget: Annotated[int, Field(ge=1)] = 2048
    beta: Annotated[int, Field(ge=1)] = 128
    eviction_mode: Literal["union", "per_head", "per_layer_perhead"] = "union"
    normalize_scores: bool = True
    calibration_path: Path
    compaction: Literal["ordered", "fill"] = "ordered"

    def supports_block_reuse(self) -> bool:
        """True: a prompt stays byte for byte where it is."""
        return True

    def supports_speculative_decoding(self) -> bool:
        """Only with one decision for all heads, since a draft model's heads are others."""
        return self.eviction_mode == "union"

    def selection_width(self, max_draft_tokens: int) -> int:
        """Decode tokens a request may have when its round comes: the budget, a period, and what one step of
        accepted drafts and one suspended step add to it."""
        return -(-(self.budget + self.beta + 2 * max_draft_tokens + 1) // 256) * 256

    def is_due(self, prompt: int, source: int, compressed: int) -> bool:
        """Whether a request has crossed a multiple of `beta` since its last eviction and has tokens to lose.

        Parameters
        ----------
        prompt, source, compressed : int
            Tokens of the prompt, confirmed tokens in the cache, and tokens evicted so far.
        """
        crossed = (source - prompt + compressed) // self.beta > (self.budget + compressed) // self.beta
        return crossed and source > prompt + self.budget

    def reasons_against(self, facts: EngineFacts) -> list[str]:
        reasons = super().reasons_against(facts)
        if self.eviction_mode == "union" and not self.normalize_scores:
            reasons.append("union compares heads and always normalises, and normalize_scores is False")
        if any(layer.kind != "gqa" for layer in (*facts.layers, *facts.draft_layers)):
            reasons.append("there are layers other than multi-head or grouped-query attention")
        dense = dense_layers(facts.layers)
        if not dense:
            reasons.append("there is no layer with full attention to score")
            return reasons
        heads, width = dense[0].num_kv_heads, dense[0].head_dim
        if any((layer.num_kv_heads, layer.head_dim) != (heads, width) for layer in dense):
            reasons.append("layers with full attention differ in KV heads or head size")
        if facts.num_q_heads % heads:
            reasons.append(f"{facts.num_q_heads} query heads are no multiple of {heads} KV heads")
        if facts.rotary_dim != width or width % 2 or width > 256:
            reasons.append(
                f"keys must be rotated whole, even and at most 256 wide, and {facts.rotary_dim} of {width} elements are"
            )
        if facts.rope_style != "half":
            reasons.append(
                f"RoPE must pair element f with f + head_dim / 2, and rope_style is {facts.rope_style!r}"
            )
        if facts.dtype not in KEY_DTYPES:
            reasons.append(f"keys must be bf16, fp16, fp32 or e4m3, and are {facts.dtype}")
        for name, layers in (("target", facts.layers), ("draft", facts.draft_layers)):
            windows = {layer.window for layer in layers if layer.window is not None}
            if len(windows) > 1:
                reasons.append(f"the {name}'s sliding windows differ: {sorted(windows)}")
            if max(windows, default=0) > self.budget:
                reasons.append(
                    f"the {name}'s sliding window of {max(windows)} exceeds the budget of {self.budget}"
                )
        if facts.tensor_parallel_size > 1 and self.eviction_mode == "union":
            reasons.append(
                "union takes the maximum over all heads, and tensor parallelism spreads them over ranks"
            )
        if facts.max_seq_len > MAX_POSITION:
            reasons.append(f"max_seq_len must be at most 2^24, and is {facts.max_seq_len}")
        rows = {"union": 1, "per_head": heads, "per_layer_perhead": heads * len(dense)}[self.eviction_mode]
        width = max(
            self.selection_width(facts.max_draft_tokens),
            self.budget + max(facts.max_tail, facts.max_draft_tail),
        )
        if facts.max_requests * rows * width >= INT32_END:
            reasons.append(
                f"a round of {facts.max_requests} requests, {rows} rows each, has 2^31 columns or more"
            )
        return reasons

    def create_manager(self, facts: EngineFacts) -> TriAttentionManager:
        return TriAttentionManager(self, facts, calibration_files.load(self.calibration_path))


class TriAttentionManager(KVCacheCompressionManager):
    """TriAttention's rounds for one engine; see :class:`TriAttentionConfig`.

    Parameters
    ----------
    config, facts
        Admitted to each other, as :func:`create_kv_cache_compression_manager` does.
    calibration : kvc.calibration.Calibration
        Copied to the device.

    Raises
    ------
    ValueError
        The calibration is not one of this model.
    """

    config: TriAttentionConfig

    def __init__(
        self, config: TriAttentionConfig, facts: EngineFacts, calibration: calibration_files.Calibration
    ) -> None:
        super().__init__(config, facts)
        self._statistics = place(calibration, facts)
        self._width = config.selection_width(facts.max_draft_tokens)
        self._compressed: dict[Hashable, int] = {}
        self._lost: set[Hashable] = set()
        self._slots = self._most_tokens = 0
        self._round: EvictionRound

    def _bind(self, engine: Engine) -> None:
        caches = [(engine.target, self.facts.layers)]
        if self.facts.draft_layers:
            if engine.draft is None:
                raise ValueError("kvc.methods.TriAttentionManager: engine.draft must be a cache, got None")
            caches.append((engine.draft, self.facts.draft_layers))
        for name, (cache, layers) in zip(("target", "draft"), caches, strict=False):
            check_cache(f"engine.{name}", cache, layers, self.facts)
        config, facts = self.config, self.facts
        tables = [cache.page_table.shape for cache, _ in caches]
        self._slots = min(rows for rows, _ in tables)
        self._most_tokens = min(columns for _, columns in tables) * facts.tokens_per_page
        shape = RoundShape(
            mode=config.eviction_mode,
            normalize=config.normalize_scores,
            fill=config.compaction == "fill",
            budget=config.budget,
            width=self._width,
            requests=facts.max_requests,
            max_tails=(facts.max_tail, facts.max_draft_tail),
            device=facts.device,
        )
        self._round = EvictionRound(shape, self._statistics, caches)
        self._round.rehearse()

    def compressed(self, request_id: Hashable) -> int:
        """Tokens of a request evicted so far."""
        return self._compressed[request_id]

    def logical_length(self, request: Request) -> int:
        """Tokens of a request, evicted ones included: the position of its next token."""
        return request.length + self._compressed[request.request_id]

    def on_request_init(self, request: Request) -> None:
        if request.request_id in self._compressed:
            raise RuntimeError(
                f"kvc.methods.TriAttentionManager: request {request.request_id!r} is known already"
            )
        self._compressed[request.request_id] = 0

    def on_request_finish(self, request: Request) -> None:
        self._compressed.pop(request.request_id, None)
        self._lost.discard(request.request_id)

    def on_generation_step_end(self, requests: Sequence[Request]) -> None:
        """Run one round for all requests that are due.

        Raises
        ------
        RuntimeError
            A request was not initialised, or its numbers cannot be: shorter than its last round left it, longer than
            a round can select from or `max_seq_len`, or with a longer tail than the facts allow. Or the current stream
            is being captured. Nothing has changed.
        RequestsLostError
            The round failed after it began to move tokens.
        """
        if self._engine is None:
            raise RuntimeError("kvc.methods.TriAttentionManager: no engine is bound")
        due, requests, names = self._due(requests)
        if not due:
            return
        if self.facts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("kvc.methods.TriAttentionManager: a round cannot be part of a CUDA graph")
        self._round.stage(due)
        self._round.decide(len(due))
        changes = self._resizes(due, requests)
        try:
            self._engine.resize(changes, self._round.move(len(due)))
        except BaseException as error:
            self._lost.update(names)
            raise RequestsLostError(
                f"kvc.methods.TriAttentionManager: a round failed while it moved tokens of {names}: {error}",
                names,
            ) from error
        known = self._compressed
        for name, change in zip(names, changes[:: len(changes) // len(names)], strict=True):
            if name in known:  # or finished in `resize`
                known[name] = change.compressed

    def _due(self, requests: Sequence[Request]) -> tuple[list[DueRequest], list[Request], list[Hashable]]:
        """The numbers of the requests that are due, those requests and their names.

        Runs after every step of the engine for all its requests, so it makes all checks of one in an expression and
        leaves it to :meth:`_refuse` to say which failed.
        """
        config, facts, known, lost = self.config, self.facts, self._compressed, self._lost
        budget, beta, width, slots, most = (
            config.budget,
            config.beta,
            self._width,
            self._slots,
            self._most_tokens,
        )
        max_tail, max_draft_tail, max_seq_len = facts.max_tail, facts.max_draft_tail, facts.max_seq_len
        due: list[DueRequest] = []
        found: list[Request] = []
        names: list[Hashable] = []
        for request in requests:
            if request.suspended:
                continue
            name, prompt, source = request.request_id, request.prompt_length, request.length
            compressed, generated = known.get(name, -1), source - prompt
            if (
                compressed < 0
                or prompt < 0
                or generated < (budget if compressed else 0)
                or (lost and name in lost)
            ):
                self._refuse(request)
            # As `is_due` has it; a boundary that lies behind the budget is crossed by more tokens than that.
            if (generated + compressed) // beta <= (budget + compressed) // beta:
                continue
            slot, tail, draft_tail = request.slot, request.tail, request.draft_tail
            if not (
                0 <= slot < slots
                and 0 <= tail <= max_tail
                and 0 <= draft_tail <= max_draft_tail
                and generated <= width
                and source + compressed <= max_seq_len
                and source + tail <= most
                and source + draft_tail <= most
            ):
                self._refuse(request)
            due.append((slot, prompt, source, compressed, tail, draft_tail))
            found.append(request)
            names.append(name)
        if len({numbers[0] for numbers in due}) < len(due):
            taken: set[int] = set()
            for request in found:
                if request.slot in taken:
                    self._refuse(request, taken)
                taken.add(request.slot)
        if len(found) > facts.max_requests:
            raise RuntimeError(
                f"kvc.methods.TriAttentionManager: at most {facts.max_requests} requests must be due,"
                f" got {len(found)}"
            )
        return due, found, names

    def _refuse(self, request: Request, taken: Container[int] = ()) -> NoReturn:
        """Raise what is wrong with a request; slots of requests before it are `taken`."""
        facts, width, name = self.facts, self._width, request.request_id
        if name in self._lost:
            raise RequestsLostError(
                f"kvc.methods.TriAttentionManager: request {name!r} was lost in an earlier round", [name]
            )
        prompt, source, slot = request.prompt_length, request.length, request.slot
        tails, compressed = (request.tail, request.draft_tail), self._compressed.get(name)
        generated, least = source - prompt, self.config.budget if compressed else 0
        counted, longest = source + (compressed or 0), source + max(tails)
        checks: list[tuple[bool, str, object]] = [
            (compressed is not None, "be one that was initialised and is not finished", "an unknown one"),
            (prompt >= 0, "have a prompt of 0 tokens or more", prompt),
            (generated >= least, f"have at least {least} generated tokens", generated),
            (counted <= facts.max_seq_len, f"count at most {facts.max_seq_len} tokens, max_seq_len", counted),
            (generated <= width, f"have at most {width} generated tokens, the selection width", generated),
            (
                0 <= tails[0] <= facts.max_tail and 0 <= tails[1] <= facts.max_draft_tail,
                f"have tails of at most {facts.max_tail} and, in the draft cache, {facts.max_draft_tail}",
                tails,
            ),
            (
                0 <= slot < self._slots and slot not in taken,
                f"have a slot of its own below {self._slots}",
                slot,
            ),
            (longest <= self._most_tokens, f"fit its page table of {self._most_tokens} tokens", longest),
        ]
        expected, actual = next((expected, actual) for holds, expected, actual in checks if not holds)
        raise RuntimeError(f"kvc.methods.TriAttentionManager: request {name!r} must {expected}, got {actual}")

    def _resizes(self, due: Sequence[DueRequest], requests: Sequence[Request]) -> list[Resize]:
        """What a round does to the caches, in the order of `due`; with a draft cache two for each request."""
        budget, page, draft = self.config.budget, self.facts.tokens_per_page, bool(self.facts.draft_layers)
        up = page - 1
        changes = []
        for (_, prompt, source, compressed, tail, draft_tail), request in zip(due, requests, strict=True):
            length = prompt + budget
            evicted = compressed + source - length
            end = length + tail
            freed = (source + tail + up) // page - (end + up) // page
            changes.append(Resize(request, "target", length, end, freed, evicted))
            if draft:
                end = length + draft_tail
                freed = (source + draft_tail + up) // page - (end + up) // page
                changes.append(Resize(request, "draft", length, end, freed, evicted))
        return changes


def dense_layers(layers: Sequence[LayerFacts]) -> list[LayerFacts]:
    """The layers that see every token."""
    return [layer for layer in layers if layer.window is None]


def place(calibration: calibration_files.Calibration, facts: EngineFacts) -> Statistics:
    """The statistics of this rank's scored layers and heads on its device, checked against the facts."""

    def reject(what: str, expected: object, actual: object) -> None:
        raise ValueError(f"kvc.methods.TriAttentionManager: {what} must be {expected}, got {actual}")

    dense = dense_layers(facts.layers)
    last = max(layer.index for layer in dense)
    layers, heads, bands = calibration.q_mean_real.shape
    if layers <= last:
        reject("layers of the calibration", f"more than the last scored one, {last}", layers)
    if heads != facts.num_q_heads * facts.tensor_parallel_size:
        reject("query heads of the calibration", facts.num_q_heads * facts.tensor_parallel_size, heads)
    kv_heads = dense[0].num_kv_heads * facts.tensor_parallel_size
    if calibration.num_kv_heads not in (None, kv_heads):
        reject("KV heads of the calibration", kv_heads, calibration.num_kv_heads)
    if 2 * bands != dense[0].head_dim:
        reject("frequencies of the calibration", dense[0].head_dim // 2, bands)
    omega = calibration.omega.double().cpu()
    if facts.rope_frequencies is not None:
        expected = torch.tensor(facts.rope_frequencies, dtype=torch.float64)
        if expected.shape != omega.shape or not torch.allclose(omega, expected, rtol=1e-5, atol=0):
            reject("omega of the calibration", "the model's rope_frequencies within 1e-5", omega.tolist())
    first = facts.tensor_parallel_rank * facts.num_q_heads
    rank = slice(first, first + facts.num_q_heads)
    index = torch.tensor([layer.index for layer in dense])

    def local(values: torch.Tensor) -> torch.Tensor:
        return values.cpu()[index, rank].contiguous().to(facts.device)

    return Statistics(
        local(calibration.q_mean_real),
        local(calibration.q_mean_imag),
        local(calibration.q_norm_excess),
        calibration.freq_scale_sq.to(facts.device, copy=True),
        calibration.omega.to(facts.device, copy=True),
        calibration.offsets.to(facts.device, copy=True),
    )


def check_cache(name: str, cache: PagedCache, layers: Sequence[LayerFacts], facts: EngineFacts) -> None:
    """Whether pools and page table are what the facts said."""

    def reject(what: str, expected: object, actual: object) -> None:
        raise ValueError(f"kvc.methods.TriAttentionManager: {name}.{what} must be {expected}, got {actual}")

    if len(cache.pools) != len(layers):
        reject("pools", f"of {len(layers)} layers", len(cache.pools))
    target = name.endswith("target")
    for i, (pools, layer) in enumerate(zip(cache.pools, layers, strict=True)):
        shape = (layer.num_kv_heads, facts.tokens_per_page, layer.head_dim)
        if not pools:
            reject(f"pools[{i}]", "one tensor at least", "none")
        for j, pool in enumerate(pools):
            if pool.dim() != 5 or tuple(pool.shape[2:4]) != shape[:2]:
                reject(f"pools[{i}][{j}]", f"[pages, planes, {shape[0]}, {shape[1]}, D]", tuple(pool.shape))
            if pool.device != facts.device:
                reject(f"pools[{i}][{j}]", f"on {facts.device}", f"on {pool.device}")
        if pools[0].shape[1] < 1 or pools[0].shape[4] != shape[2]:
            reject(f"pools[{i}][0]", f"keys of {shape[2]} elements", tuple(pools[0].shape))
        if target and pools[0].dtype != facts.dtype:
            reject(f"pools[{i}][0]", facts.dtype, pools[0].dtype)
    table = cache.page_table
    if table.dim() != 2 or table.dtype != torch.int32 or table.device != facts.device:
        reject(
            "page_table", f"int32 [slots, max_pages] on {facts.device}", f"{table.dtype} {tuple(table.shape)}"
        )
    if table.shape[0] < 1:
        reject("page_table", "of one slot at least", tuple(table.shape))
