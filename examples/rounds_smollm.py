"""Rounds of eviction on a long text of SmolLM2-135M, window by window, against the whole cache.

A request with a short prompt goes on for thousands of tokens while TriAttention (:mod:`kvc.methods`, on paged pools)
evicts all generated tokens but a budget at every multiple of `beta`. Two kinds of text:

* real prose, fed as if it had been generated: the same tokens for every rule, so losses can be compared one by one;
* prose that the model samples itself, once with the whole cache and once under TriAttention, chapter by chapter of a
  book whose headings are given. No run of a few tokens may repeat. Without either a model of this size soon says one
  sentence for ever, or drifts into none. The whole cache judges both texts.

Run it with ``python examples/rounds_smollm.py``.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import smollm  # first: it sets environment variables that torch reads

# isort: split
import kvc
import torch
import typer
from cold_pages_smollm import hf_cache
from evict_smollm import MODES, STYLES, CalibrationText, calibration_text
from kvc import calibration
from kvc.methods import (
    EngineFacts,
    LayerFacts,
    TriAttentionConfig,
    create_kv_cache_compression_manager,
)
from rich import box
from rich.markup import escape
from rich.table import Table
from serve_smollm import TOKENS_PER_PAGE, PagedPools, Request, tail_of
from torch import Tensor

WHOLE, RECENT = "whole cache", "most recent"
TABLE_COLUMNS = 132
WINDOW = 256
# Of the sampled text. A run of REPEATABLE + 1 tokens that was said before is not said again.
TEMPERATURE, TOP_P, REPEATABLE = 0.7, 0.95, 3
OPENING = """Rivers and Cities: A History of Settlement

Chapter 1. Why people settle by rivers

Most of the oldest cities in the world were built beside a river. A river gives drinking water, carries boats, \
waters the fields and drives the mill, and its floods leave new soil behind. In this book we follow several \
rivers from their sources to the sea, and look at how the people on their banks lived, what they built, what \
they traded, and why some of their cities grew while others were abandoned. \
We begin"""
# A heading comes every CHAPTER tokens, so none at a round.
CHAPTER = 210
HEADINGS = (
    "The Nile and the farmers of Egypt",
    "The Tigris, the Euphrates and the first cities",
    "The Indus and its planned towns",
    "The Yellow River and its floods",
    "The Rhine and its merchants",
    "The Thames and the port of London",
    "The Mississippi and the steamboat",
    "The Amazon and its forest",
    "Mills, dams and electric power",
    "What rivers need from cities",
)


class Session:
    """A request whose cache keeps every token. `next` are the logits of what follows, ``[1, vocabulary]``."""

    def __init__(self, lm: smollm.SmolLM) -> None:
        self.lm, self.cache, self.seen, self.prompt = lm, hf_cache([]), 0, 0
        self.next: Tensor

    def feed(self, ids: Tensor) -> Tensor:
        """Read tokens ``[n]``, first the prompt; logits of what follows each, ``[n, vocabulary]``."""
        # A token's position counts evicted ones too; the mask follows the order in the cache.
        positions = torch.arange(self.seen, self.seen + len(ids))[None]
        logits = self.lm.model(ids[None], None, positions, self.cache).logits[0].float()
        self.prompt = self.prompt or len(ids)
        self.seen += len(ids)
        self.next = logits[-1:]
        self.evict()
        return logits

    def take_over(self, other: Session) -> Session:
        """Go on from where another session stands that has evicted nothing."""
        self.cache, self.next = copy.deepcopy(other.cache), other.next
        self.seen, self.prompt = other.seen, other.prompt
        self.evict()
        return self

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    def evict(self) -> None:
        """What happens to the cache after a step."""


class RecentSession(Session):
    """One that keeps its prompt and, from every multiple of `beta` on, the latest `budget` tokens."""

    def __init__(self, lm: smollm.SmolLM, budget: int, beta: int) -> None:
        super().__init__(lm)
        self.budget, self.beta = budget, beta

    def evict(self) -> None:
        generated = self.seen - self.prompt
        if generated and generated % self.beta == 0 and self.cached > self.prompt + self.budget:
            rows = tail_of(self.cache, 0)
            self.cache = hf_cache([torch.cat((r[:, : self.prompt], r[:, -self.budget :]), 1) for r in rows])


class TriAttentionSession(Session):
    """One in paged pools, which TriAttention's manager shortens."""

    def __init__(self, lm: smollm.SmolLM, config: TriAttentionConfig, longest: int) -> None:
        super().__init__(lm)
        slots = -(-longest // TOKENS_PER_PAGE)
        self.pools = PagedPools(lm, slots, slots, torch.float32)  # what the model computes in
        self.free = list(range(slots))
        self.pools.freed = self.free.extend
        layers = range(lm.num_layers)
        facts = EngineFacts(
            layers=tuple(
                LayerFacts(index=i, num_kv_heads=lm.num_kv_heads, head_dim=lm.head_dim) for i in layers
            ),
            num_q_heads=lm.model.config.num_attention_heads,
            rotary_dim=lm.head_dim,
            dtype=torch.float32,
            device=self.pools.device,
            tokens_per_page=TOKENS_PER_PAGE,
            max_requests=1,
            max_seq_len=longest,
            logical_positions=True,
        )
        self.manager = create_kv_cache_compression_manager(config, facts)
        self.manager.bind(self.pools)
        self.request: Request | None = None
        self.kept_pages: list[int] = []

    def evict(self) -> None:
        if self.request is None:
            self.request = Request(0, self.prompt, 0, [])
            self.manager.on_request_init(self.request)
        request, pages = self.request, self.request.pages
        new = tail_of(self.cache, request.length)
        length = request.length + new[0].shape[1]
        while len(pages) * TOKENS_PER_PAGE < length:
            pages.append(self.free.pop())
        self.pools.write(pages, request.length, new)
        request.length = length
        self.pools.show(request)
        self.manager.on_generation_step_end([request])
        if request.length < length:
            self.cache = self.pools.read(pages, request.length)


@dataclass
class Reading:
    """What a rule makes of a text: the loss of each token and the likeliest one in its place."""

    losses: Tensor
    best: Tensor


@torch.inference_mode()
def read(session: Session, text: Tensor, step: int) -> Reading:
    """Feed a text to a session, `step` tokens at a time."""
    losses, best = [], []
    for piece in text.split(step):
        before = session.next
        predicted = torch.cat((before, session.feed(piece)[:-1]))
        losses.append(torch.nn.functional.cross_entropy(predicted, piece, reduction="none"))
        best.append(predicted.argmax(-1))
    return Reading(torch.cat(losses), torch.cat(best))


@torch.inference_mode()
def write(
    session: Session, before: Tensor, count: int, seed: int, given: Mapping[int, int] | None = None
) -> Tensor:
    """Sample `count` tokens in a session that has been fed those `before`; never the end of the text.

    Tokens that are `given`, by their place in the whole text, are not sampled.
    """
    said, end = before.tolist(), session.lm.model.config.eos_token_id
    runs: dict[tuple[int, ...], list[int]] = {}  # what has followed REPEATABLE tokens
    for i in range(len(said) - REPEATABLE):
        runs.setdefault(tuple(said[i : i + REPEATABLE]), []).append(said[i + REPEATABLE])
    for _ in range(count):
        followed = runs.setdefault(tuple(said[-REPEATABLE:]), [])
        logits = session.next[0].clone()
        logits[followed + ([] if end is None else [end])] = -math.inf
        chances, order = torch.softmax(logits / TEMPERATURE, -1).sort(descending=True)
        chances[chances.cumsum(0) - chances > TOP_P] = 0
        # The draw depends on the place alone, so texts part where their chances do.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + len(said))
        token = int(order[torch.multinomial(chances, 1, generator=generator)])
        token = (given or {}).get(len(said), token)
        followed.append(token)
        said.append(token)
        session.feed(torch.tensor([token]))
    return torch.tensor(said[len(before) :])


@dataclass
class Result:
    """One rule at one budget: perplexity and agreement of the likeliest tokens with the whole cache's, by span.

    Spans are the stretches between rounds; `windows` has the perplexity of every `WINDOW` tokens.
    """

    rule: str
    budget: int
    perplexity: list[float]
    agreement: list[float]
    windows: list[float]


def session_of(
    lm: smollm.SmolLM, rule: str, budget: int, beta: int, statistics_path: Path, longest: int
) -> Session:
    if rule == WHOLE:
        return Session(lm)
    if rule == RECENT:
        return RecentSession(lm, budget, beta)
    mode: Any = rule.removeprefix("TriAttention ")
    config = TriAttentionConfig(
        budget=budget, beta=beta, eviction_mode=mode, calibration_path=statistics_path
    )
    return TriAttentionSession(lm, config, longest)


def summarise(
    rule: str, budget: int, readings: Sequence[Reading], whole: Sequence[Reading], beta: int
) -> Result:
    losses = torch.stack([reading.losses for reading in readings]).double().mean(0)
    same = torch.stack([a.best == b.best for a, b in zip(readings, whole, strict=True)]).double().mean(0)
    return Result(
        rule,
        budget,
        [part.mean().exp().item() for part in losses.split(beta)],
        [part.mean().item() for part in same.split(beta)],
        [part.mean().exp().item() for part in losses.split(WINDOW)],
    )


def read_by_every_rule(
    lm: smollm.SmolLM,
    passages: Sequence[tuple[Tensor, Tensor]],
    rules: Sequence[str],
    budgets: Sequence[int],
    beta: int,
    statistics_path: Path,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Results of the whole cache and then of every rule and budget, over (prompt, text) pairs of one length."""
    longest = max(len(prompt) + len(text) for prompt, text in passages)
    readings: dict[tuple[str, int], list[Reading]] = {}
    for number, (prompt, text) in enumerate(passages):
        common = Session(lm)  # up to the first round all are alike
        with torch.inference_mode():
            common.feed(prompt)
        first = read(common, text[:beta], WINDOW)
        for rule, budget in [(WHOLE, longest), *((rule, b) for rule in rules for b in budgets)]:
            on_step(
                f"text {number + 1} of {len(passages)}: {rule}{'' if rule == WHOLE else f', {budget} kept'}"
            )
            session = session_of(lm, rule, budget, beta, statistics_path, longest).take_over(common)
            rest = read(session, text[beta:], WINDOW)
            whole = Reading(torch.cat((first.losses, rest.losses)), torch.cat((first.best, rest.best)))
            readings.setdefault((rule, budget), []).append(whole)
    baseline = readings[WHOLE, longest]
    return [summarise(rule, budget, found, baseline, beta) for (rule, budget), found in readings.items()]


def given_headings(tokenizer: Any, opening: int) -> dict[int, int]:
    """Tokens of the headings by their places in a text with an opening of so many tokens."""
    given: dict[int, int] = {}
    for number, heading in enumerate(HEADINGS, 1):
        ids = tokenizer(f"\n\nChapter {number + 1}. {heading}\n\n")["input_ids"]
        given.update(enumerate(ids, opening + number * CHAPTER))
    return given


def repeated(text: Tensor, length: int = 8) -> float:
    """Share of the runs of `length` tokens that have been said before."""
    runs = [tuple(run) for run in text.unfold(0, length, 1).tolist()]
    return 1 - len(set(runs)) / len(runs)


def around(tokenizer: Any, text: Tensor, place: int, before: int = 50, after: int = 70) -> tuple[str, str]:
    """What was said before and after a place."""
    return tokenizer.decode(text[place - before : place]), tokenizer.decode(text[place : place + after])


def spans_of(length: int, beta: int) -> list[str]:
    return [f"{first:,}-{min(first + beta, length):,}" for first in range(0, length, beta)]


def as_table(results: Sequence[Result], length: int, beta: int, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, title=title)
    table.add_column("rule")
    table.add_column("kept", justify="right")
    for what in ("perplexity", "agrees"):
        for span in spans_of(length, beta):
            table.add_column(f"{what}\n{span}", justify="right", no_wrap=True)
    for r in results:
        kept = "all" if r.budget > length else f"{r.budget:,}"
        numbers = (*(f"{p:.3f}" for p in r.perplexity), *(f"{a:.1%}" for a in r.agreement))
        table.add_row(r.rule, kept, *numbers)
    return table


def plot(results: Sequence[Result], length: int, beta: int, path: Path) -> None:
    """Perplexity of each window over the whole cache's, a panel for each budget."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    whole, budgets = results[0], sorted({r.budget for r in results[1:]})
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    middles = [first + WINDOW / 2 for first in range(0, length, WINDOW)]
    for axes, budget in zip(panels, budgets, strict=True):
        for r in results[1:]:
            if r.budget == budget:
                colour, marker, dashes = STYLES[r.rule]
                change = [a / b - 1 for a, b in zip(r.windows, whole.windows, strict=True)]
                axes.plot(middles, change, dashes, color=colour, marker=marker, markersize=5, label=r.rule)
        for place in range(beta, length, beta):
            axes.axvline(place, color="#000000", linewidth=0.8, linestyle=":")
        axes.axhline(0, color="#000000", linewidth=0.8)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_title(f"{budget:,} generated tokens kept", fontsize=10)
        axes.set_xlabel("generated tokens")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"perplexity of {WINDOW} tokens,\nabove the whole cache's")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path)


def main(
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt of real text, which stay.")] = 256,
    generated: Annotated[int, typer.Option(min=1, help="Tokens behind a prompt.")] = 2304,
    beta: Annotated[int, typer.Option(min=1, help="Tokens between two rounds.")] = 768,
    budgets: Annotated[str, typer.Option(help="Generated tokens kept, separated by commas.")] = "128,256,512",
    passages: Annotated[int, typer.Option(min=0, help="Passages of real text; 0 for none.")] = 4,
    sampled: Annotated[
        str, typer.Option(help="Mode and budget that a sampled text is written under; empty for none.")
    ] = "union,512",
    seed: Annotated[int, typer.Option(help="Of the sampled text.")] = 0,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the calibration text.")] = 8192,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw the results here.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write numbers and sampled texts here.")
    ] = None,
) -> None:
    """Evict again and again while SmolLM2 reads real text and writes its own, and print what that costs."""
    console, say = smollm.narrator(TABLE_COLUMNS)
    kept = [int(budget) for budget in budgets.split(",")]
    if beta % WINDOW or generated <= beta or not all(0 < b < beta for b in kept):
        raise typer.BadParameter(
            f"beta must be a multiple of {WINDOW} below --generated, and budgets from 1 to below it"
        )
    say("loading SmolLM2-135M-Instruct from its GGUF file")
    lm = smollm.load()
    report: dict[str, Any] = {
        "model": smollm.gguf_path().name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kvc": kvc.__version__,
        "prompt": prompt,
        "generated": generated,
        "beta": beta,
        "passages": passages,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory(prefix="kvc-rounds-") as folder:
        path = Path(folder) / "calibration.safetensors"
        say(f"measuring the query statistics on {calibration_tokens:,} tokens of other prose")
        other = lm.tokenizer(calibration_text(CalibrationText.prose), return_tensors="pt", verbose=False)
        calibration.save(
            calibration.collect(lm.model, other["input_ids"], window=2048, max_tokens=calibration_tokens),
            path,
        )
        if passages:
            length = prompt + generated
            texts = smollm.english_tokens(lm.tokenizer, passages * length)[0].split(length)
            pairs = [(text[:prompt], text[prompt:]) for text in texts]
            rules = [*(f"TriAttention {mode}" for mode in MODES), RECENT]
            results = read_by_every_rule(lm, pairs, rules, kept, beta, path, say)
            report["real"] = [asdict(r) for r in results]
            console.print(as_table(results, generated, beta, f"{passages} passages of real text"))
            if plot_path is not None:
                plot(results, generated, beta, plot_path)
        if sampled:
            mode, budget = sampled.split(",")
            report["sampled"] = write_and_judge(
                lm, f"TriAttention {mode}", int(budget), beta, generated, seed, path, console, say
            )
    say("done")
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")


def write_and_judge(
    lm: smollm.SmolLM,
    rule: str,
    budget: int,
    beta: int,
    count: int,
    seed: int,
    statistics_path: Path,
    console: Any,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Texts that the model writes with the whole cache and under a rule, and what the whole cache thinks of each."""
    opening = torch.tensor(lm.tokenizer(OPENING)["input_ids"])
    longest = len(opening) + count
    common = Session(lm)
    with torch.inference_mode():
        common.feed(opening)
    headings = given_headings(lm.tokenizer, len(opening))
    say(f"writing {beta:,} tokens, up to the first round")
    start = write(common, opening, beta, seed, headings)
    report: dict[str, Any] = {}
    written = {}
    for name in (WHOLE, rule):
        say(f"{name}: writing {count - beta:,} more")
        session = session_of(lm, name, budget, beta, statistics_path, longest).take_over(common)
        rest = write(session, torch.cat((opening, start)), count - beta, seed, headings)
        written[name] = torch.cat((start, rest))
    rows = []
    for name, text in written.items():
        results = read_by_every_rule(lm, [(opening, text)], [rule], [budget], beta, statistics_path, say)
        rows += [Result(f"{name} wrote, {r.rule} reads", *list(asdict(r).values())[1:]) for r in results]
        report[name] = {
            "text": lm.tokenizer.decode(text),
            "repeated": repeated(text),
            "read": [asdict(r) for r in results],
        }
    console.print(as_table(rows, count, beta, f"Sampled text; {rule} keeps {budget:,} tokens"))
    for name, text in written.items():
        console.print(f"[bold]{name}[/bold]: {report[name]['repeated']:.1%} of 8-token runs were said before")
        for place in range(beta, count, beta):
            before, after = around(lm.tokenizer, text, place)
            console.print(
                f"[dim]{escape(before)}[/dim][bold]|{place:,}|[/bold]{escape(after)}\n", highlight=False
            )
    return report


if __name__ == "__main__":
    typer.run(main)
