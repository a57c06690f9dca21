"""Which cached tokens can go? TriAttention against simple rules on SmolLM2-135M.

The model's query statistics are measured on one text (:func:`kvc.calibration.collect`). It then reads 2,048 tokens of
another text, keeps some of them in its cache by each rule, and goes on: the keys and values that stay are gathered for
each layer and head, keep the rotation of their old positions, and the next tokens get the positions they would have
had. Reported are the perplexity of the next 500 tokens and the share of their attention, measured with nothing
evicted, that falls on what was kept. Run it with ``python examples/evict_smollm.py``.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import smollm  # first: it sets environment variables that torch reads

# isort: split
import argparse
import inspect
import subprocess
import tarfile
import typing

import kvc
import torch
import typer
from cold_pages_smollm import KeysValues, cut_into_pages, forward, hf_cache, prefill
from kvc import calibration
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

TOKENS_PER_PAGE = 32
SINKS = 4
MODES = ("union", "per_head", "per_layer_perhead")
# The library reference; the passages come from the language reference, which shares no chapter with these.
CALIBRATION_TOPICS = (
    "typesseq", "string-methods", "formatstrings", "debugger", "typesmapping", "comparisons", "numeric-types"
)  # fmt: skip
CODE = (argparse, inspect, subprocess, tarfile, typing)
TABLE_COLUMNS = 110


class CalibrationText(str, Enum):
    prose = "prose"
    code = "code"


@dataclass
class Passage:
    """A text that has been read up to `tokens`, and what its next tokens attend to.

    `cache` holds K and V of each layer in turn, ``[kv_heads, tokens, head_dim]``; `received` is the attention that a
    cached token gets from the next ones on average, fp32 ``[layers, query_heads, tokens]``; `following` are the
    next token ids, ``[1, scored + 1]``.
    """

    cache: KeysValues
    following: Tensor
    received: Tensor
    full_loss: float


@dataclass
class Result:
    """One rule at one budget, over all passages; `by_passage` has the perplexity of each."""

    rule: str
    budget: int
    perplexity: float
    perplexity_change: float
    attention_kept: float
    by_passage: list[float]


def calibration_text(kind: CalibrationText) -> str:
    if kind is CalibrationText.code:
        return "\n\n".join(inspect.getsource(module) for module in CODE)
    return "\n\n".join(topics[name].strip() for name in CALIBRATION_TOPICS if name in topics)


@contextmanager
def attention_received(model: Any, tokens: int) -> Iterator[list[Tensor]]:
    """In it each layer appends the mean attention that the first `tokens` keys get, ``[query_heads, tokens]``."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that shows its weights
    received: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, output: received.append(output[1][0, :, :, :tokens].mean(1))
        )
        for layer in model.model.layers
    ]
    try:
        yield received
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)


def next_token_loss(logits: Tensor, ids: Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits[0].float(), ids[0, 1:]).item()


def read(model: Any, ids: Tensor, tokens: int) -> Passage:
    """Read a passage ``[1, tokens + scored + 1]``."""
    cache, following = prefill(model, ids[:, :tokens]), ids[:, tokens:]
    with attention_received(model, tokens) as received:
        logits = forward(model, following[:, :-1], hf_cache(cache))
    return Passage(cache, following, torch.stack(received), next_token_loss(logits, following))


def triattention(passage: Passage, statistics: calibration.Calibration, mode: str) -> Tensor:
    """Scores from paged keys, as in an engine: ``[rows, tokens]``; nothing is protected as a prompt."""
    keys = passage.cache[0::2]
    tokens = keys[0].shape[1]
    pages = -(-tokens // TOKENS_PER_PAGE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
    pools = cut_into_pages(keys, table, pages, TOKENS_PER_PAGE)
    source = torch.tensor([tokens], dtype=torch.int32)
    cos, sin = kvc.mean_phase(source, statistics.omega, statistics.offsets)
    return kvc.triattention_score(
        pools,
        table[None],
        torch.zeros_like(source),
        source,
        cos,
        sin,
        statistics.q_mean_real,
        statistics.q_mean_imag,
        statistics.q_norm_excess,
        statistics.freq_scale_sq,
        mode,
        True,
        tokens,
    )[0]


def rules(passage: Passage, statistics: calibration.Calibration, seed: int) -> dict[str, Tensor]:
    """What each rule thinks of every cached token, ``[layers or 1, kv_heads or 1, tokens]``; the best stay."""
    layers, kv_heads = len(passage.cache) // 2, passage.cache[0].shape[0]
    tokens = passage.cache[0].shape[1]
    position = torch.arange(tokens, dtype=torch.float32).view(1, 1, -1)
    shapes = {"union": (1, 1), "per_head": (1, kv_heads), "per_layer_perhead": (layers, kv_heads)}
    found = {
        f"TriAttention {mode}": triattention(passage, statistics, mode).view(*shape, tokens)
        for mode, shape in shapes.items()
    }
    found["most recent"] = position
    found[f"recent + {SINKS} sinks"] = torch.where(position < SINKS, tokens, position)
    found["random"] = torch.rand(1, 1, tokens, generator=torch.Generator().manual_seed(seed))
    found["lowest key norm"] = -torch.stack([keys.norm(dim=-1) for keys in passage.cache[0::2]])
    found["oracle"] = passage.received.unflatten(1, (kv_heads, -1)).sum(2)
    return found


def keep(scores: Tensor, budget: int, layers: int, kv_heads: int) -> Tensor:
    """Indices of the tokens that stay, ascending, int64 ``[layers, kv_heads, budget]``."""
    rows = scores.flatten(0, 1).contiguous()
    lengths = torch.full((len(rows),), rows.shape[1], dtype=torch.int32)
    kept = kvc.radix_topk(rows, lengths, budget).long()
    return kept.view(*scores.shape[:2], budget).expand(layers, kv_heads, budget)


def evict(cache: KeysValues, kept: Tensor) -> KeysValues:
    """The keys and values of the tokens that stay; a key keeps the rotation of its old position."""

    def gather(rows: Tensor, index: Tensor) -> Tensor:
        return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2]))

    return [gather(rows, kept[i // 2]) for i, rows in enumerate(cache)]


def continued_loss(model: Any, cache: KeysValues, passage: Passage) -> float:
    """Loss of the next tokens after `cache`, at the positions they have in the text."""
    start, count = passage.cache[0].shape[1], passage.following.shape[1] - 1
    positions = torch.arange(start, start + count)[None]
    # The mask follows the order in the cache, the rotation the given positions.
    logits = model(passage.following[:, :-1], None, positions, hf_cache(cache)).logits
    return next_token_loss(logits, passage.following)


def attention_kept(received: Tensor, kept: Tensor) -> tuple[float, float]:
    """Attention on the kept tokens and on all cached ones, summed over layers and query heads."""
    grouped = received.double().unflatten(1, (kept.shape[1], -1))  # [layers, kv_heads, group, tokens]
    index = kept[:, :, None].expand(-1, -1, grouped.shape[2], -1)
    return grouped.gather(-1, index).sum().item(), grouped.sum().item()


def measure(
    model: Any,
    passages: Sequence[Tensor],
    tokens: int,
    budgets: Sequence[int],
    statistics: calibration.Calibration,
    only: Sequence[str] = ("",),
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[float, list[Result]]:
    """Perplexity with nothing evicted, and the results of rules and budgets over all passages.

    Of the rules, those whose name contains one of `only` are measured.
    """
    full: list[float] = []
    losses: dict[tuple[str, int], list[float]] = {}
    masses: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number, ids in enumerate(passages):
        on_step(f"passage {number + 1} of {len(passages)}: reading {tokens:,} tokens")
        passage = read(model, ids, tokens)
        layers, kv_heads = len(passage.cache) // 2, passage.cache[0].shape[0]
        full.append(passage.full_loss)
        for rule, scores in rules(passage, statistics, seed=number).items():
            if not any(part in rule for part in only):
                continue
            on_step(f"passage {number + 1} of {len(passages)}: {rule}")
            for budget in budgets:
                kept = keep(scores, budget, layers, kv_heads)
                loss = continued_loss(model, evict(passage.cache, kept), passage)
                losses.setdefault((rule, budget), []).append(loss)
                masses.setdefault((rule, budget), []).append(attention_kept(passage.received, kept))

    def perplexity(values: Sequence[float]) -> float:
        return torch.tensor(values, dtype=torch.float64).mean().exp().item()

    results = []
    for (rule, budget), values in losses.items():
        kept_mass, mass = (sum(column) for column in zip(*masses[rule, budget], strict=True))
        ratio = perplexity(values) / perplexity(full) - 1
        each = [perplexity([value]) for value in values]
        results.append(Result(rule, budget, perplexity(values), ratio, kept_mass / mass, each))
    return perplexity(full), results


def rows_of(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for rule in dict.fromkeys(r.rule for r in results):
        yield rule, [r for r in results if r.rule == rule]


def as_table(full: float, results: Sequence[Result], tokens: int, scored: int) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title=f"Perplexity of the next {scored:,} tokens, and attention kept, by tokens kept of {tokens:,}",
        caption=f"Nothing evicted: {full:.3f}. Attention kept: the share of the attention on cached tokens that falls"
        " on those kept, from the next tokens with nothing evicted.",
        caption_justify="left",
    )
    table.add_column("rule")
    budgets = list(dict.fromkeys(r.budget for r in results))
    for heading in (*(f"{b:,}" for b in budgets), *(f"{b:,}\nkept" for b in budgets)):
        table.add_column(heading, justify="right", no_wrap=True)
    for rule, row in rows_of(results):
        table.add_row(rule, *(f"{r.perplexity:.2f}" for r in row), *(f"{r.attention_kept:.1%}" for r in row))
    return table


def as_markdown(full: float, results: Sequence[Result]) -> str:
    budgets = list(dict.fromkeys(r.budget for r in results))
    numbers = " | ".join(f"{b:,}" for b in budgets)
    lines = [
        f"| tokens kept | {numbers} | {numbers} |",
        "| --- |" + " ---: |" * (2 * len(budgets)),
        "| | perplexity" + " |" * len(budgets) + " attention kept" + " |" * len(budgets),
    ]
    for rule, row in rows_of(results):
        cells = [*(f"{r.perplexity:.2f}" for r in row), *(f"{r.attention_kept:.1%}" for r in row)]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    lines.append("| nothing evicted |" + f" {full:.2f} |" * len(budgets) + " 100.0% |" * len(budgets))
    return "\n".join(lines) + "\n"


# Okabe and Ito's colours, told apart by every kind of colour vision; markers and dashes say the same once more.
STYLES = {
    "TriAttention union": ("#D55E00", "o", "-"),
    "TriAttention per_head": ("#E69F00", "s", "-"),
    "TriAttention per_layer_perhead": ("#CC79A7", "^", "-"),
    "most recent": ("#0072B2", "v", "--"),
    f"recent + {SINKS} sinks": ("#56B4E9", "D", "--"),
    "random": ("#999999", "x", ":"),
    "lowest key norm": ("#009E73", "P", "--"),
    "oracle": ("#000000", "*", "-."),
}


def plot(full: float, results: Sequence[Result], tokens: int, scored: int, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 4.8), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for rule, row in rows_of(results):
        colour, marker, dashes = STYLES[rule]
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 6}
        budgets = [r.budget for r in row]
        left.plot(budgets, [r.perplexity_change for r in row], label=rule, **style)
        right.plot(budgets, [1 - r.attention_kept for r in row], **style)
    # Around zero a logarithm has no place for what eviction improves.
    left.set_yscale("symlog", linthresh=0.01, linscale=0.4)
    left.axhline(0, color="#000000", linewidth=0.8)
    left.set_yticks([0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2])
    left.set_ylabel(f"perplexity of the next {scored:,} tokens,\nabove {full:.2f} with nothing evicted")
    right.set_yscale("log")
    right.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    right.set_ylabel("attention lost with the evicted tokens")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{b:,}" for b in budgets])
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_xlabel(f"tokens kept of {tokens:,}")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path)


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are read before the eviction.")] = 2048,
    scored: Annotated[int, typer.Option(min=1, help="Following tokens for the perplexity.")] = 500,
    budgets: Annotated[str, typer.Option(help="Tokens that stay, separated by commas.")] = "128,256,512,1024",
    passages: Annotated[int, typer.Option(min=1, help="Passages to average over.")] = 1,
    rule: Annotated[
        list[str] | None, typer.Option(help="Only rules whose name contains this; repeatable.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the calibration text.")] = 8192,
    calibrate_on: Annotated[
        CalibrationText, typer.Option(help="Other prose, or Python source code.")
    ] = CalibrationText.prose,
    statistics_path: Annotated[
        Path | None,
        typer.Option("--statistics", help="Read the statistics here if the file exists, else write it."),
    ] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw the results here.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table here.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Evict most of SmolLM2's KV cache by several rules, and print what that costs."""
    start = time.perf_counter()
    console = Console()
    if console.width < TABLE_COLUMNS:
        console = Console(width=TABLE_COLUMNS)  # a pipe reports 80, which would cut the numbers

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - start:6.1f} s[/dim]  {escape(text)}", highlight=False)

    kept_sizes = [int(b) for b in budgets.split(",")]
    if not all(0 < b <= tokens for b in kept_sizes):
        raise typer.BadParameter(f"numbers from 1 to {tokens}", param_hint="--budgets")
    if rule and not any(part in name for name in STYLES for part in rule):
        raise typer.BadParameter(f"one of {', '.join(STYLES)}", param_hint="--rule")
    say("loading SmolLM2-135M-Instruct from its GGUF file")
    lm = smollm.load()
    length = tokens + scored + 1
    text = smollm.english_tokens(lm.tokenizer, passages * length)
    if statistics_path is not None and statistics_path.exists():
        statistics = calibration.load(statistics_path, lm.model)
    else:
        say(f"measuring the query statistics on {calibration_tokens:,} tokens of {calibrate_on.value}")
        ids = lm.tokenizer(calibration_text(calibrate_on), return_tensors="pt", verbose=False)["input_ids"]
        statistics = calibration.collect(lm.model, ids, window=tokens, max_tokens=calibration_tokens)
        statistics = replace(statistics, model=smollm.gguf_path().stem)
        if statistics_path is not None:
            calibration.save(statistics, statistics_path)
    with torch.inference_mode():
        parts = text.split(length, dim=1)
        full, results = measure(lm.model, parts, tokens, kept_sizes, statistics, rule or [""], say)
    elapsed = time.perf_counter() - start
    say("done")

    console.print(as_table(full, results, tokens, scored))
    if plot_path is not None:
        plot(full, results, tokens, scored, plot_path)
    if markdown_path is not None:
        markdown_path.write_text(as_markdown(full, results))
    if json_path is not None:
        report = {
            "model": smollm.gguf_path().name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kvc": kvc.__version__,
            "tokens": tokens,
            "scored": scored,
            "passages": passages,
            "calibration": {"text": calibrate_on.value, "tokens": statistics.tokens_seen},
            "seconds": round(elapsed, 1),
            "perplexity": full,
            "rows": [asdict(r) for r in results],
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
