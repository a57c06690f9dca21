"""What a compression method and an engine know of each other: facts, protocols and the messages between them.

The engine keeps pages, scheduling and attention; a method keeps its algorithm and its state per request.
``docs/engine.md`` shows how to bind an engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

__all__ = ["Engine", "EngineFacts", "LayerFacts", "PagedCache", "Request", "Resize"]

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


class LayerFacts(BaseModel):
    """One attention layer of a cache, as this rank holds it.

    Attributes
    ----------
    index : int
        Number of the layer in the whole model, from 0.
    num_kv_heads, head_dim : int
        Heads of this rank and elements of a row; of an MLA layer 1 and the width of its latent row.
    window : int, optional
        Tokens a sliding-window layer looks back; None for full attention.
    kind : {"gqa", "mla", "other"}
        ``"gqa"`` covers MHA and MQA; ``"other"`` is state that is no list of tokens (SSM, convolution).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: Natural
    num_kv_heads: Count
    head_dim: Count
    window: Count | None = None
    kind: Literal["gqa", "mla", "other"] = "gqa"


class EngineFacts(BaseModel):
    """What an engine knows when it starts and what never changes after: the ground for admitting a method.

    Attributes
    ----------
    layers, draft_layers : tuple of LayerFacts
        The target's layers on this rank, in the order of ``Engine.target.pools``, and those of a draft model
        that keeps a cache of its own.
    num_q_heads : int
        Query heads of a target layer on this rank.
    rotary_dim : int, optional
        Elements of a key that RoPE rotates; None when there is no RoPE.
    rope_style : {"half", "interleaved"}
        Whether element f pairs with f + rotary_dim / 2 or with its neighbour.
    rope_frequencies : tuple of float, optional
        The model's inverse frequencies. They turn on a check: an artifact measured with others, such as a
        calibration of another theta, is refused; without them it is taken as it is.
    dtype, device : torch.dtype, torch.device
        Of the target's key pools.
    tokens_per_page, max_requests, max_seq_len : int
        Tokens of a page, requests that may run at once, and tokens a request may count, evicted ones included.
    max_draft_tokens : int
        Tokens a speculative step may accept beyond the first; 0 without speculation.
    max_tail, max_draft_tail : int
        Most slots reserved behind a request's confirmed tokens for work in flight, in either cache.
    block_reuse : bool
        Whether pages of a prompt may serve several requests.
    beam_width, tensor_parallel_size, tensor_parallel_rank : int
        A rank holds the contiguous heads ``[rank * num_q_heads, (rank + 1) * num_q_heads)``.
    logical_positions : bool
        Whether a new token's position is counted apart from the length of its cache, as it must be once tokens
        have been evicted. An attention kernel that rotates by the cache length cannot promise that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    layers: Annotated[tuple[LayerFacts, ...], Field(min_length=1)]
    num_q_heads: Count
    rotary_dim: Count | None
    rope_style: Literal["half", "interleaved"] = "half"
    rope_frequencies: tuple[float, ...] | None = None
    dtype: torch.dtype
    device: torch.device
    tokens_per_page: Count
    max_requests: Count
    max_seq_len: Count
    draft_layers: tuple[LayerFacts, ...] = ()
    max_draft_tokens: Natural = 0
    max_tail: Natural = 0
    max_draft_tail: Natural = 0
    block_reuse: bool = False
    beam_width: Count = 1
    tensor_parallel_size: Count = 1
    tensor_parallel_rank: Natural = 0
    logical_positions: bool = False

    @field_validator("device")
    @classmethod
    def _with_index(cls, device: torch.device) -> torch.device:
        """``cuda`` as the tensors of this moment's device say it, ``cuda:0``."""
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return device

    @model_validator(mode="after")
    def _check(self) -> EngineFacts:
        if self.tensor_parallel_rank >= self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_rank must be below the size of {self.tensor_parallel_size}, got"
                f" {self.tensor_parallel_rank}"
            )
        return self


class Request(Protocol):
    """A request as the engine sees it now; a method reads it during a hook and keeps nothing but its id."""

    @property
    def request_id(self) -> Hashable:
        """Unique among the requests between their init and finish."""

    @property
    def slot(self) -> int:
        """Row of this request in the page tables of the target and of the draft cache."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""

    @property
    def length(self) -> int:
        """Confirmed tokens in the target's cache now, prompt included, evicted and rejected ones not."""

    @property
    def tail(self) -> int:
        """Slots of the target's cache behind `length` that work in flight writes or has written."""

    @property
    def draft_tail(self) -> int:
        """The same of the draft cache; 0 without one."""

    @property
    def suspended(self) -> bool:
        """Whether one of its caches is out of reach now; a method then leaves the request for later."""


class PagedCache(Protocol):
    """The pools and page tables of one model."""

    @property
    def pools(self) -> Sequence[Sequence[Tensor]]:
        """For each layer its tensors, ``[pages, planes, kv_heads, tokens_per_page, head_dim]`` with any strides
        and a contiguous last dimension. Plane 0 of the first holds the keys, rotated. One tensor with K and V
        as planes, or one each. Their memory stays where it is.
        """

    @property
    def page_table(self) -> Tensor:
        """int32 ``[slots, max_pages]`` on the pools' device, always the same memory. Column c of a row is the
        page of tokens ``[c * tokens_per_page, (c + 1) * tokens_per_page)``. A hook finds, in stream order, the
        tables that belong to the lengths it is shown.
        """


class Resize(NamedTuple):
    """A request's new size in one cache, once a method has moved what it keeps to the front.

    Attributes
    ----------
    request : Request
        As it was given to the hook.
    cache : {"target", "draft"}
        Which cache.
    length, capacity : int
        Confirmed tokens and slots, tail included. Pages behind ``ceil(capacity / tokens_per_page)`` are free.
    freed_pages : int
        How many those are.
    compressed : int
        Tokens of the request evicted so far: the position of its next token is ``length + compressed``.
    """

    request: Request
    cache: Literal["target", "draft"]
    length: int
    capacity: int
    freed_pages: int
    compressed: int


class Engine(Protocol):
    """The engine's side. Hooks are called in one thread, with the stream that writes the cache current."""

    @property
    def target(self) -> PagedCache:
        """The model's cache."""

    @property
    def draft(self) -> PagedCache | None:
        """The cache of a draft model, if it has one of its own."""

    def resize(self, changes: Sequence[Resize], after: torch.cuda.Event | None) -> None:
        """Adopt new lengths and take freed pages back: all of `changes`, or none and raise.

        The copies are enqueued, perhaps not done. Whatever reads the shortened requests or writes a freed page
        on a stream other than the current one must wait for `after` (None on a CPU: they are done).
        """
