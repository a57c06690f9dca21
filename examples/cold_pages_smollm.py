"""A language model's KV cache leaves its pools, becomes cold pages, comes back, and the model goes on.

SmolLM2-135M reads 2,048 tokens of English. Its keys and values are cut into paged pools as an engine keeps
them; every page goes through :func:`kvc.encode_pages_` into a cold tensor (pinned host memory beside a GPU),
the pools are overwritten with NaN, and :func:`kvc.decode_pages_` brings the pages back into other slots. The
model then continues from the restored cache. Run it with ``python examples/cold_pages_smollm.py``.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import smollm  # first: it sets environment variables that torch reads

# isort: split
import kvc
import torch
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

TOKENS_PER_PAGE = 32
HOT_DTYPES = {"BF16": torch.bfloat16, "FP8": torch.float8_e4m3fn}
POISON = 0xFF  # bytes of 0xFF read as NaN in BF16 and in E4M3
TABLE_COLUMNS = 120

KeysValues = list[
    torch.Tensor
]  # K of layer 0, V of layer 0, K of layer 1, ...: each [kv_heads, tokens, head_dim]


@dataclass
class Result:
    """One row of the table; an error is the norm of the difference over the norm of the original."""

    hot: str
    mode: str
    hot_page_bytes: int
    cold_page_bytes: int | None
    key_error: float
    value_error: float
    key_error_vs_bf16: float
    value_error_vs_bf16: float
    perplexity: float
    perplexity_change: float
    greedy_differs: int
    greedy_differs_vs_bf16: int
    encode_seconds: float | None
    decode_seconds: float | None


def cold_layouts(
    num_layers: int, num_kv_heads: int, head_dim: int, tokens_per_page: int, dtype: torch.dtype
) -> dict[str, kvc.PageLayout]:
    """The kinds of cold page to compare, for pools 2l (K) and 2l + 1 (V) of layer l."""
    geometry = (num_layers, num_kv_heads, head_dim, tokens_per_page, dtype)
    rows = num_kv_heads * tokens_per_page

    def copied(pool: int) -> kvc.PageBuffer:
        return kvc.PageBuffer.copy(pool, rows * head_dim * dtype.itemsize)

    def quantized(pool: int) -> kvc.PageBuffer:
        return kvc.PageBuffer(pool, rows, head_dim, dtype)

    layers = range(num_layers)
    return {
        "copy": kvc.PageLayout([[copied(2 * i), copied(2 * i + 1)] for i in layers]),
        "NVFP4": kvc.PageLayout.attention(*geometry),
        # `skip_rope_quantization=True` is for keys that are rotated in part; here it would leave nothing.
        "skip-RoPE": kvc.PageLayout([[copied(2 * i), quantized(2 * i + 1)] for i in layers]),
        "2FP4 keys": kvc.PageLayout.attention(*geometry, residual_dim=head_dim),
    }


def cut_into_pages(
    cache: KeysValues, table: torch.Tensor, slots: int, tokens_per_page: int
) -> list[torch.Tensor]:
    """Pools ``[slots, kv_heads, tokens_per_page, head_dim]``; page i of the cache is in slot ``table[i]``."""
    pools = []
    for rows in cache:
        heads, tokens, dim = rows.shape
        padded = rows.new_zeros(heads, len(table) * tokens_per_page, dim)
        # Bytes throughout: indexed writes do not know float8.
        padded.view(torch.uint8)[:, :tokens] = rows.view(torch.uint8)
        pages = padded.view(heads, len(table), tokens_per_page, dim).transpose(0, 1)
        pool = rows.new_zeros(slots, heads, tokens_per_page, dim)
        pool.view(torch.uint8)[table.to(rows.device)] = pages.view(torch.uint8)
        pools.append(pool)
    return pools


def gather_pages(pools: Sequence[torch.Tensor], table: torch.Tensor, tokens: int) -> KeysValues:
    """The inverse of :func:`cut_into_pages`."""
    cache = []
    for pool in pools:
        pages = pool.view(torch.uint8)[table.to(pool.device)]
        cache.append(pages.transpose(0, 1).flatten(1, 2)[:, :tokens].contiguous().view(pool.dtype))
    return cache


def through_cold_pages(
    cache: KeysValues, layout: kvc.PageLayout, tokens_per_page: int, seed: int = 0
) -> tuple[KeysValues, float, float]:
    """Send every page of `cache` to cold memory and back: what came back, and the seconds out and in."""
    tokens, device = cache[0].shape[1], cache[0].device
    pages = -(-tokens // tokens_per_page)
    slots = pages + pages // 4 + 1
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(slots, generator=generator, dtype=torch.int32)
    before, after = shuffled[:pages], shuffled.roll(1)[:pages]
    cold_slots = torch.randperm(pages, generator=generator, dtype=torch.int32)

    pools = cut_into_pages(cache, before, slots, tokens_per_page)
    cold = torch.empty(pages, layout.cold_page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def seconds(op: Callable[[], None]) -> float:
        start = time.perf_counter()
        op()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    out = torch.stack([cold_slots, before], dim=1)
    encode = seconds(lambda: kvc.encode_pages_(cold, pools, out, layout.table, layout.scales))
    for pool in pools:
        pool.view(torch.uint8).fill_(POISON)
    back = torch.stack([after, cold_slots], dim=1)
    decode = seconds(lambda: kvc.decode_pages_(pools, cold, back, layout.table, layout.scales))
    return gather_pages(pools, after, tokens), encode, decode


def relative_errors(restored: KeysValues, original: KeysValues) -> tuple[float, float]:
    """‖restored - original‖ / ‖original‖ over all layers, for keys and for values."""

    def error(first: int) -> float:
        difference = norm = 0.0
        for r, o in zip(restored[first::2], original[first::2], strict=True):
            difference += (r.double() - o.double()).square().sum().item()
            norm += o.double().square().sum().item()
        return (difference / norm) ** 0.5

    return error(0), error(1)


def hf_cache(cache: KeysValues) -> Any:
    """A transformers cache with these keys and values, in the float32 that the model computes in."""
    from transformers import DynamicCache

    built = DynamicCache()
    for layer in range(len(cache) // 2):
        keys, values = (rows.float().unsqueeze(0) for rows in cache[2 * layer : 2 * layer + 2])
        built.update(keys, values, layer)
    return built


def forward(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    """Logits; the cache goes by position because its keyword differs between versions of transformers."""
    return model(ids, None, None, cache, **options).logits


def prefill(model: Any, ids: torch.Tensor) -> KeysValues:
    """Run the prompt and return its keys and values in float32."""
    cache = hf_cache([])
    forward(model, ids, cache, logits_to_keep=1)
    return [rows[0] for layer in cache.layers for rows in (layer.keys, layer.values)]


def perplexity(model: Any, cache: KeysValues, ids: torch.Tensor) -> float:
    """Perplexity of ``ids[:, 1:]`` given the cache and the token before, in one teacher-forced pass."""
    logits = forward(model, ids[:, :-1], hf_cache(cache))[0].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()


def continue_greedily(model: Any, cache: KeysValues, token: torch.Tensor, count: int) -> list[int]:
    """The `count` most likely tokens after `token`, each fed back."""
    built = hf_cache(cache)
    chosen: list[int] = []
    for _ in range(count):
        token = forward(model, token, built)[:, -1:].argmax(-1)
        chosen.append(int(token))
    return chosen


def differing(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def measure(
    lm: smollm.SmolLM,
    exact: KeysValues,
    following: torch.Tensor,
    generate: int,
    tokens_per_page: int = TOKENS_PER_PAGE,
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[list[Result], dict[tuple[str, str], list[int]]]:
    """Measure every kind of cold page.

    `exact` is the prompt's cache in float32 and `following` the tokens after it, ``[1, scored + 1]``. Returns
    the rows of the table and the greedy continuation of each (hot dtype, mode).
    """
    results: list[Result] = []
    continuations: dict[tuple[str, str], list[int]] = {}
    bf16 = [rows.to(torch.bfloat16) for rows in exact]
    for hot, dtype in HOT_DTYPES.items():
        untouched = [rows.to(dtype) for rows in bf16]
        layouts = cold_layouts(lm.num_layers, lm.num_kv_heads, lm.head_dim, tokens_per_page, dtype)
        baseline = 0.0
        for mode in ("untouched", *layouts):
            on_step(f"{hot} pages, {mode}")
            restored, encode, decode = untouched, None, None
            if mode in layouts:
                restored, encode, decode = through_cold_pages(untouched, layouts[mode], tokens_per_page)
            score = perplexity(lm.model, restored, following)
            baseline = baseline or score
            chosen = continue_greedily(lm.model, restored, following[:, :1], generate)
            continuations[hot, mode] = chosen
            key_error, value_error = relative_errors(restored, untouched)
            key_error_vs_bf16, value_error_vs_bf16 = relative_errors(restored, bf16)
            results.append(
                Result(
                    hot=hot,
                    mode=mode,
                    hot_page_bytes=layouts["copy"].hot_page_bytes,
                    cold_page_bytes=layouts[mode].cold_page_bytes if mode in layouts else None,
                    key_error=key_error,
                    value_error=value_error,
                    key_error_vs_bf16=key_error_vs_bf16,
                    value_error_vs_bf16=value_error_vs_bf16,
                    perplexity=score,
                    perplexity_change=score / baseline - 1,
                    greedy_differs=differing(chosen, continuations[hot, "untouched"]),
                    greedy_differs_vs_bf16=differing(chosen, continuations["BF16", "untouched"]),
                    encode_seconds=encode,
                    decode_seconds=decode,
                )
            )
    return results, continuations


def as_table(results: Sequence[Result], scored: int, generate: int) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        title="A KV cache through cold pages and back",
        caption=(
            "Errors (relative), perplexity change and differing tokens compare with the untouched cache of "
            "the same hot dtype; 'vs BF16' compares with the untouched BF16 cache.\n"
            "skip-RoPE: this model rotates its whole keys, so K is copied as it is and only V becomes NVFP4. "
            "2FP4 keys: K in two NVFP4 components; beside FP8 pages they take more bytes than the copy (72 "
            "against 64 per 64 values)."
        ),
        caption_justify="left",
    )
    headings = [
        ("hot", ""),
        ("cold page", ""),
        ("hot", "B/page"),
        ("cold", "B/page"),
        ("ratio", ""),
        ("K", "error"),
        ("V", "error"),
        ("K", "vs BF16"),
        ("V", "vs BF16"),
        ("perplexity", f"of {scored:,}"),
        ("", "change"),
        ("tokens", f"differ/{generate}"),
        ("", "vs BF16"),
    ]
    for i, (first, second) in enumerate(headings):
        table.add_column(f"{first}\n{second}", justify="left" if i < 2 else "right", no_wrap=True)
    for i, r in enumerate(results):
        if i and r.hot != results[i - 1].hot:
            table.add_section()
        cold = r.cold_page_bytes
        table.add_row(
            r.hot,
            r.mode,
            f"{r.hot_page_bytes:,}",
            f"{cold:,}" if cold else "-",
            f"{r.hot_page_bytes / cold:.2f}x" if cold else "-",
            f"{r.key_error:.4f}",
            f"{r.value_error:.4f}",
            f"{r.key_error_vs_bf16:.4f}",
            f"{r.value_error_vs_bf16:.4f}",
            f"{r.perplexity:.3f}",
            f"{r.perplexity_change:+.2%}",
            str(r.greedy_differs),
            str(r.greedy_differs_vs_bf16),
        )
    return table


def save_cache(cache: KeysValues, path: Path) -> None:
    """Write the cache in BF16, ``layers.<l>.key`` and ``layers.<l>.value``: food for ``kvc.verify --kv``."""
    from safetensors.torch import save_file

    names = [f"layers.{i // 2}.{('key', 'value')[i % 2]}" for i in range(len(cache))]
    save_file({n: rows.to(torch.bfloat16).contiguous() for n, rows in zip(names, cache, strict=True)}, path)


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens whose cache is moved.")] = 2048,
    scored: Annotated[int, typer.Option(min=1, help="Following tokens for the perplexity.")] = 1000,
    generate: Annotated[int, typer.Option(min=1, help="Tokens of the greedy continuation.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU when there is one.")] = "auto",
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")] = None,
    save_kv: Annotated[
        Path | None,
        typer.Option(help="Write the BF16 cache here as safetensors, for python -m kvc.verify --kv."),
    ] = None,
) -> None:
    """Move SmolLM2's KV cache through cold pages and back, and print what that costs."""
    start = time.perf_counter()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console, say = smollm.narrator(TABLE_COLUMNS)
    say("loading SmolLM2-135M-Instruct from its GGUF file")
    lm = smollm.load(device)
    ids = smollm.english_tokens(lm.tokenizer, tokens + scored + 1, device)
    say(
        f"reading {tokens:,} tokens of English on {device}: {-(-tokens // TOKENS_PER_PAGE)} pages of "
        f"{TOKENS_PER_PAGE} tokens, {lm.num_layers} layers, {lm.num_kv_heads} KV heads of {lm.head_dim}"
    )
    with torch.inference_mode():
        exact = prefill(lm.model, ids[:, :tokens])
        if save_kv is not None:
            save_cache(exact, save_kv)
        results, continuations = measure(lm, exact, ids[:, tokens:], generate, on_step=say)
    elapsed = time.perf_counter() - start
    say("done")

    console.print(as_table(results, scored, generate))
    for mode in ("untouched", "NVFP4"):
        text = escape(repr(lm.tokenizer.decode(continuations["BF16", mode])))
        console.print(f"[bold]BF16, {mode}[/bold], goes on: {text}", highlight=False)
    if json_path is not None:
        report = {
            "model": smollm.gguf_path().name,
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kvc": kvc.__version__,
            "tokens": tokens,
            "tokens_per_page": TOKENS_PER_PAGE,
            "scored": scored,
            "generate": generate,
            "seconds": round(elapsed, 1),
            "rows": [asdict(r) for r in results],
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
