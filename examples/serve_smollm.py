"""A small server on SmolLM2-135M whose conversations need more KV cache than its GPU memory holds.

Conversations share a system prompt and take turns. The cache lives in paged pools with few slots; what a turn finds
there or in a tier below (:class:`kvc.methods.TieredPageStore`) it need not compute again. The same conversations are
served with pools that hold everything, with few slots and nothing below them, with lossless tiers and with NVFP4
tiers; then long answers are generated with the whole cache and under TriAttention. It runs on a CPU, where all of
the tiers but the disk are ordinary memory, or on a GPU. Run it with ``python examples/serve_smollm.py``.

To be comparable, a mode's history goes on with the answers of the first mode, whatever it answered itself.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import smollm  # first: it sets environment variables that torch reads

# isort: split
import kvc
import torch
import typer
from cold_pages_smollm import KeysValues, forward, hf_cache
from kvc import calibration
from kvc.methods import (
    CacheRows,
    ColdPageCodec,
    ColdPageConfig,
    EngineFacts,
    HotBuffer,
    LayerBuffers,
    LayerFacts,
    LifeCycle,
    Resize,
    TieredPageStore,
    TriAttentionConfig,
    create_kv_cache_compression_manager,
    prefix_keys,
)
from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor

TOKENS_PER_PAGE = 32
DTYPE = torch.bfloat16
TABLE_COLUMNS = 132
TEMPERATURE = 0.7  # of the long answers: the most likely words of a small model soon repeat themselves
LONG_MODES = ("whole cache", "TriAttention", "TriAttention speaks")
# What is promised of the perplexity of the first mode's answers: README, "What it costs in quality".
ALLOWED_CHANGE = {"NVFP4 tiers": 0.02, "TriAttention": 0.25}


@dataclass
class Result:
    """One mode over all turns. Losses are sums over the `scored` tokens of the first mode's answers."""

    mode: str
    computed_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    differing_tokens: int = 0
    loss: float = 0.0
    scored: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    offloaded_bytes: dict[str, int] = field(default_factory=dict)
    onboarded_bytes: dict[str, int] = field(default_factory=dict)
    evicted_tokens: int = 0
    freed_pages: int = 0
    rounds: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / max(1, self.scored))


@dataclass(eq=False)
class Request:
    """What is running: its pages and the numbers that a compression method reads."""

    request_id: int
    prompt_length: int
    length: int
    pages: list[int]
    slot: int = 0
    tail: int = 0
    draft_tail: int = 0
    suspended: bool = False


@dataclass
class Answer:
    """Tokens that were said, and the likeliest one at each place."""

    said: list[int]
    best: list[int]


class PagedPools:
    """K and V of every layer in paged pools, one request's page table, and the engine's side of kvc.methods."""

    def __init__(self, lm: smollm.SmolLM, slots: int, columns: int, dtype: torch.dtype = DTYPE) -> None:
        shape = (slots, lm.num_kv_heads, TOKENS_PER_PAGE, lm.head_dim)
        self.device = next(lm.model.parameters()).device
        self.memory = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2 * lm.num_layers)]
        self.page_table = torch.full((1, columns), -1, dtype=torch.int32, device=self.device)
        self.draft = None
        self.freed: Callable[[list[int]], None] = lambda pages: None
        self.result: Result | None = None

    @property
    def target(self) -> PagedPools:
        return self

    @property
    def pools(self) -> list[list[Tensor]]:
        return [[pool.unsqueeze(1) for pool in self.memory[i : i + 2]] for i in range(0, len(self.memory), 2)]

    def resize(self, changes: Sequence[Resize], after: torch.cuda.Event | None) -> None:
        """Adopt what a compression method left of the request; all is on one stream, so nobody waits."""
        for change in changes:
            request: Any = change.request
            kept = -(-change.capacity // TOKENS_PER_PAGE)
            self.freed(request.pages[kept:])
            del request.pages[kept:]
            request.length = change.length
            self.show(request)
            if self.result is not None:
                self.result.freed_pages += change.freed_pages
                self.result.rounds += 1
                self.result.evicted_tokens = max(self.result.evicted_tokens, change.compressed)

    def show(self, request: Request) -> None:
        row = request.pages + [-1] * (self.page_table.shape[1] - len(request.pages))
        self.page_table[request.slot] = torch.tensor(row, dtype=torch.int32)

    def write(self, pages: Sequence[int], first: int, new: KeysValues) -> None:
        """Tokens `first` and following of a request, K and V of each layer ``[kv_heads, tokens, head_dim]``."""
        tokens = torch.arange(first, first + new[0].shape[1], device=self.device)
        page = torch.tensor(pages, device=self.device)[tokens // TOKENS_PER_PAGE]
        place = tokens % TOKENS_PER_PAGE
        for pool, rows in zip(self.memory, new, strict=True):
            pool[page, :, place] = rows.transpose(0, 1).to(pool.dtype)

    def read(self, pages: Sequence[int], tokens: int) -> Any:
        """The first tokens of a request as a cache of the model's library."""
        if tokens == 0:
            return hf_cache([])
        index = torch.tensor(pages, device=self.device)
        rows = [pool[index].transpose(0, 1).flatten(1, 2)[:, :tokens] for pool in self.memory]
        return hf_cache(rows)


class Server:
    """Serves one request at a time from pools with `slots` pages and the tiers below them."""

    def __init__(
        self,
        lm: smollm.SmolLM,
        mode: str,
        slots: int,
        longest: int,
        *,
        quantized: bool = False,
        host_pages: int = 0,
        disk_pages: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.lm, self.result = lm, Result(mode)
        self.pools = PagedPools(lm, slots, -(-longest // TOKENS_PER_PAGE))
        rows = CacheRows.gqa(lm.num_kv_heads, lm.head_dim, TOKENS_PER_PAGE, DTYPE)
        layers = tuple(
            LayerBuffers(
                layer=layer,
                rows=rows if quantized else None,
                buffers=tuple(
                    HotBuffer(role=role, pool=2 * layer + i, nbytes=rows.nbytes)
                    for i, role in enumerate(("key", "value"))
                ),
            )
            for layer in range(lm.num_layers)
        )
        codec = ColdPageCodec(ColdPageConfig(), [self.pools.memory], [LifeCycle(id=0, layers=layers)])
        page = codec.cold_page_bytes(0)
        record = 4096 + -(-page // 4096) * 4096
        self.store = TieredPageStore(
            codec,
            host_bytes=host_pages * page,
            disk_bytes=disk_pages * record,
            folder=folder,
            identity="SmolLM2-135M",
        )

    def start(self, history: Sequence[int], room: int) -> tuple[Request, Any, Tensor]:
        """Find the pages of a history and compute the rest: request, cache, and logits of the next token."""
        store, result = self.store, self.result
        keys = prefix_keys(history, TOKENS_PER_PAGE)
        pages = store.acquire(0, keys[: (len(history) - 1) // TOKENS_PER_PAGE])  # one token must be computed
        found = len(pages)
        reused = found * TOKENS_PER_PAGE
        pages += store.allocate(0, -(-(len(history) + room) // TOKENS_PER_PAGE) - found)
        request = Request(0, len(history), len(history), pages)
        cache = self.pools.read(pages, reused)
        logits = forward(self.lm.model, self.ids(history[reused:]), cache, logits_to_keep=1)
        self.pools.write(pages, reused, tail_of(cache, reused))
        store.commit(0, pages[found : len(keys)], keys[found:])
        result.reused_tokens += reused
        result.computed_tokens += len(history) - reused
        return request, cache, logits[0, -1]

    def turn(self, history: list[int], generate: int, reference: list[int] | None) -> list[int]:
        """Answer a history. Returns the answer; the cache goes on with `reference` if there is one."""
        result, model = self.result, self.lm.model
        began = time.perf_counter()
        request, cache, logits = self.start(history, generate)
        own = copy.deepcopy(cache)
        token = logits.argmax().view(1, 1)
        answer = [int(token)]
        result.first_token_seconds.append(time.perf_counter() - began)
        while len(answer) < generate:
            token = forward(model, token, own)[:, -1:].argmax(-1)
            answer.append(int(token))
        result.seconds += time.perf_counter() - began
        result.generated_tokens += generate

        said = answer if reference is None else reference
        following = forward(model, self.ids(said), cache)[0]
        predicted = torch.cat((logits[None], following[:-1])).float()
        result.loss += torch.nn.functional.cross_entropy(predicted, self.ids(said)[0], reduction="sum").item()
        result.scored += generate
        result.differing_tokens += sum(a != b for a, b in zip(answer, said, strict=True))

        began = time.perf_counter()
        self.pools.write(request.pages, len(history), tail_of(cache, len(history)))
        keys = prefix_keys(history + said, TOKENS_PER_PAGE)
        old = len(history) // TOKENS_PER_PAGE
        self.store.commit(0, request.pages[old : len(keys)], keys[old:])
        self.store.release(0, request.pages)
        result.seconds += time.perf_counter() - began
        return said

    def long_answer(
        self,
        history: list[int],
        generate: int,
        reference: Answer | None,
        config: TriAttentionConfig | None,
    ) -> Answer:
        """Generate with every token in the pools, evicting by `config`; or say `reference` and measure its loss."""
        result, model = self.result, self.lm.model
        request, cache, logits = self.start(history, 0)
        self.pools.freed = lambda pages: self.store.release(0, pages)
        self.pools.result = result
        manager = None
        if config is not None:
            manager = create_kv_cache_compression_manager(config, self.facts(len(history) + generate))
            manager.bind(self.pools)
            manager.on_request_init(request)
        answer = Answer([], [])
        generator = torch.Generator(self.pools.device).manual_seed(len(history))
        began = time.perf_counter()
        for step in range(generate):
            answer.best.append(int(logits.argmax()))
            chances = torch.softmax(logits.float() / TEMPERATURE, -1)
            said = int(torch.multinomial(chances, 1, generator=generator))
            if reference is not None:
                said = reference.said[step]
                result.differing_tokens += answer.best[step] != reference.best[step]
            answer.said.append(said)
            if reference is not None or config is None:
                result.loss -= torch.log_softmax(logits.float(), -1)[said].item()
            # Its position counts evicted tokens too.
            position = torch.tensor([[len(history) + step]], device=self.pools.device)
            logits = model(self.ids([said]), None, position, cache).logits[0, -1]
            if request.length == len(request.pages) * TOKENS_PER_PAGE:
                request.pages += self.store.allocate(0, 1)
            self.pools.write(request.pages, request.length, tail_of(cache, request.length))
            request.length += 1
            self.pools.show(request)
            if manager is not None:
                before = request.length
                manager.on_generation_step_end([request])
                if request.length != before:
                    cache = self.pools.read(request.pages, request.length)
        result.seconds += time.perf_counter() - began
        result.generated_tokens += generate
        result.scored += generate
        if manager is not None:
            manager.on_request_finish(request)
        self.store.release(0, request.pages)
        return answer

    def facts(self, longest: int) -> EngineFacts:
        lm = self.lm
        return EngineFacts(
            layers=tuple(
                LayerFacts(index=i, num_kv_heads=lm.num_kv_heads, head_dim=lm.head_dim)
                for i in range(lm.num_layers)
            ),
            num_q_heads=lm.model.config.num_attention_heads,
            rotary_dim=lm.head_dim,
            dtype=DTYPE,
            device=self.pools.device,
            tokens_per_page=TOKENS_PER_PAGE,
            max_requests=1,
            max_seq_len=longest,
            block_reuse=True,
            logical_positions=True,
        )

    def ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.pools.device)

    def finish(self) -> Result:
        stats, result = self.store.stats, self.result
        tiers = {"gpu": stats.gpu, "host": stats.host, "disk": stats.disk}
        result.hits = {name: tier.hits for name, tier in tiers.items()}
        result.offloaded_bytes = {name: tier.offloaded_bytes for name, tier in tiers.items()}
        result.onboarded_bytes = {name: tier.onboarded_bytes for name, tier in tiers.items()}
        self.store.close()
        return result


def tail_of(cache: Any, first: int) -> KeysValues:
    """Keys and values from token `first` on."""
    return [rows[0, :, first:] for layer in cache.layers for rows in (layer.keys, layer.values)]


@dataclass
class Workload:
    """Conversations over pieces of one text: token ids of the system prompt and of what the users say."""

    system: list[int]
    users: list[list[list[int]]]  # [conversation][turn]
    generate: int

    @property
    def longest(self) -> int:
        return len(self.system) + max(sum(len(u) + self.generate for u in turns) for turns in self.users)

    @property
    def pages(self) -> int:
        """Pages of all conversations at their end."""
        shared = len(self.system) // TOKENS_PER_PAGE
        return shared + len(self.users) * (-(-self.longest // TOKENS_PER_PAGE) - shared)


def make_workload(
    ids: Sequence[int], system: int, conversations: int, turns: int, user: int, generate: int
) -> Workload:
    parts = [list(ids[system + i * user : system + (i + 1) * user]) for i in range(conversations * turns)]
    return Workload(
        list(ids[:system]), [parts[c * turns : (c + 1) * turns] for c in range(conversations)], generate
    )


def serve(server: Server, work: Workload, reference: list[list[int]] | None) -> list[list[int]]:
    """All turns, conversations in rotation; returns what was said."""
    histories = [list(work.system) for _ in work.users]
    said: list[list[int]] = []
    for turn in range(len(work.users[0])):
        for conversation, history in enumerate(histories):
            history += work.users[conversation][turn]
            expected = reference[len(said)] if reference is not None else None
            said.append(server.turn(history, work.generate, expected))
            history += said[-1]
    return said


def serve_in_every_mode(
    lm: smollm.SmolLM,
    work: Workload,
    slots: int,
    host_pages: int,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """The conversations with room for all, with few slots, and with tiers below them."""
    results: list[Result] = []
    reference: list[list[int]] | None = None
    for mode, options in (
        ("everything fits", {"slots": work.pages + 4}),
        ("tiers off", {"slots": slots}),
        ("lossless tiers", {"slots": slots, "host_pages": host_pages, "disk_pages": work.pages}),
        (
            "NVFP4 tiers",
            {"slots": slots, "host_pages": host_pages, "disk_pages": work.pages, "quantized": True},
        ),
    ):
        on_step(f"{mode}: {options['slots']} slots for {work.pages} pages")
        with tempfile.TemporaryDirectory(prefix="kvc-serve-") as folder:
            server = Server(lm, mode, longest=work.longest, folder=Path(folder), **options)  # type: ignore[arg-type]
            reference = serve(server, work, reference)
            results.append(server.finish())
    return results


def generate_long_answers(
    lm: smollm.SmolLM,
    prompts: Sequence[list[int]],
    generate: int,
    config: TriAttentionConfig,
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[list[Result], dict[str, list[Answer]]]:
    """Long answers sampled with the whole cache; the same under TriAttention; and answers of TriAttention's own.

    The loss of the last is what the whole cache thinks of them: text that made no sense would be unlikely.
    """
    longest = max(map(len, prompts)) + generate
    results: list[Result] = []
    answers: dict[str, list[Answer]] = {}
    for mode in LONG_MODES:
        on_step(f"{mode}: {len(prompts)} answers of {generate} tokens")
        server = Server(lm, mode, -(-longest // TOKENS_PER_PAGE) * (1 + len(prompts)), longest)
        references: Sequence[Answer | None] = [None] * len(prompts)
        if mode == LONG_MODES[1]:
            references = answers[LONG_MODES[0]]
        method = None if mode == LONG_MODES[0] else config
        answers[mode] = [
            server.long_answer(prompt, generate, reference, method)
            for prompt, reference in zip(prompts, references, strict=True)
        ]
        results.append(server.finish())
    results[-1].loss = sum(
        loss_of(lm.model, prompt, answer.said)
        for prompt, answer in zip(prompts, answers[LONG_MODES[2]], strict=True)
    )
    return results, answers


def loss_of(model: Any, history: Sequence[int], said: Sequence[int], piece: int = 256) -> float:
    """Sum of the losses of `said` after `history`, with nothing evicted."""
    ids = torch.tensor([[*history, *said]], device=model.device)
    cache, loss, first = hf_cache([]), 0.0, len(history) - 1
    for start in range(0, ids.shape[1] - 1, piece):
        end = min(start + piece, ids.shape[1] - 1)
        logits = forward(model, ids[:, start:end], cache)[0].float()
        skipped = min(max(first - start, 0), end - start)
        target = ids[0, start + 1 + skipped : end + 1]
        loss += torch.nn.functional.cross_entropy(logits[skipped:], target, reduction="sum").item()
    return loss


def broken_promises(results: Sequence[Result], baseline: Result) -> list[str]:
    """What a mode was to keep and did not."""
    broken = []
    for r in results:
        change = r.perplexity / baseline.perplexity - 1
        if r.mode == "lossless tiers" and (r.differing_tokens or r.loss != baseline.loss):
            broken.append(f"{r.mode}: {r.differing_tokens} tokens differ, perplexity {change:+.3%}")
        if r.mode in ALLOWED_CHANGE and not change <= ALLOWED_CHANGE[r.mode]:
            broken.append(
                f"{r.mode}: perplexity {change:+.2%}, at most {ALLOWED_CHANGE[r.mode]:+.0%} is promised"
            )
    return broken


def as_table(results: Sequence[Result], baseline: Result, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, title=title)
    headings = [
        ("mode", ""),
        ("tokens", "reused"),
        ("tokens", "computed"),
        ("hits", "gpu"),
        ("", "host"),
        ("", "disk"),
        ("MB to", "host"),
        ("", "disk"),
        ("MB from", "host"),
        ("", "disk"),
        ("tokens", "/s"),
        ("first", "token"),
        ("tokens", "differ"),
        ("perplexity", ""),
        ("", "change"),
    ]
    for i, (first, second) in enumerate(headings):
        table.add_column(f"{first}\n{second}", justify="right" if i else "left", no_wrap=True)
    for r in results:

        def megabytes(counts: dict[str, int], tier: str) -> str:
            return f"{counts.get(tier, 0) / 1e6:,.1f}"

        first_token = (
            sum(r.first_token_seconds) / len(r.first_token_seconds) if r.first_token_seconds else None
        )
        table.add_row(
            r.mode,
            f"{r.reused_tokens:,}",
            f"{r.computed_tokens:,}",
            *(f"{r.hits.get(tier, 0):,}" for tier in ("gpu", "host", "disk")),
            *(megabytes(r.offloaded_bytes, tier) for tier in ("host", "disk")),
            *(megabytes(r.onboarded_bytes, tier) for tier in ("host", "disk")),
            f"{r.generated_tokens / r.seconds:.1f}",
            f"{first_token:.2f} s" if first_token else "-",
            "-" if r.mode == LONG_MODES[2] else f"{r.differing_tokens}/{r.generated_tokens}",
            f"{r.perplexity:.3f}",
            f"{r.perplexity / baseline.perplexity - 1:+.2%}",
        )
    return table


def main(
    conversations: Annotated[int, typer.Option(min=1, help="Conversations in rotation.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    system: Annotated[int, typer.Option(min=1, help="Tokens of the system prompt they share.")] = 512,
    user: Annotated[int, typer.Option(min=1, help="Tokens of what a user says.")] = 80,
    generate: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24,
    gpu_pages: Annotated[int, typer.Option(min=1, help="Slots of the pools, pages of 32 tokens.")] = 30,
    host_pages: Annotated[int, typer.Option(min=0, help="Pages that host memory holds.")] = 10,
    long_answer: Annotated[
        int, typer.Option(min=0, help="Tokens of the long answers; 0 leaves them out.")
    ] = 160,
    budget: Annotated[int, typer.Option(min=1, help="Generated tokens that TriAttention keeps.")] = 64,
    beta: Annotated[int, typer.Option(min=1, help="Tokens between two evictions.")] = 32,
    calibration_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of TriAttention's calibration.")
    ] = 2048,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU when there is one.")] = "auto",
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")] = None,
) -> None:
    """Serve conversations from tiers and with TriAttention, and print what each finds, moves and answers."""
    start = time.perf_counter()
    if json_path is not None and not json_path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_path.parent}", param_hint="--json")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console, say = smollm.narrator(TABLE_COLUMNS)
    say("loading SmolLM2-135M-Instruct from its GGUF file")
    lm = smollm.load(device)
    needed = system + conversations * turns * user
    ids = smollm.english_tokens(lm.tokenizer, needed + calibration_tokens)[0].tolist()
    work = make_workload(ids, system, conversations, turns, user, generate)
    if work.longest > gpu_pages * TOKENS_PER_PAGE:
        raise typer.BadParameter(
            f"one conversation alone has {work.longest} tokens", param_hint="--gpu-pages"
        )
    with torch.inference_mode():
        results = serve_in_every_mode(lm, work, gpu_pages, host_pages, say)
    console.print(
        as_table(results, results[0], f"{conversations} conversations of {turns} turns, on {device}")
    )
    broken = broken_promises(results, results[0])

    if long_answer:
        say(f"measuring TriAttention's statistics on {calibration_tokens:,} tokens of other text")
        other = torch.tensor([ids[needed:]], device=device)
        with tempfile.TemporaryDirectory(prefix="kvc-serve-") as folder:
            path = Path(folder) / "calibration.safetensors"
            calibration.save(calibration.collect(lm.model, other, window=1024), path)
            config = TriAttentionConfig(budget=budget, beta=beta, calibration_path=path)
            prompts = [work.system + turns_of[0] for turns_of in work.users[:2]]
            with torch.inference_mode():
                long, answers = generate_long_answers(lm, prompts, long_answer, config, say)
        console.print(
            as_table(long, long[0], f"Long answers; TriAttention keeps {budget} of {long_answer} tokens")
        )
        say(
            f"TriAttention evicted {long[1].evicted_tokens} tokens of each answer, {long[1].rounds} rounds in all,"
            f" and freed {long[1].freed_pages} pages"
        )
        for mode in (LONG_MODES[0], LONG_MODES[2]):
            text = escape(repr(lm.tokenizer.decode(answers[mode][0].said[-80:])))
            console.print(f"[bold]{mode}[/bold] ends: {text}", highlight=False)
        broken += broken_promises(long, long[0])
        results += long
    for text in broken:
        console.print(f"[bold red]not as promised:[/bold red] {escape(text)}")
    say("done" if broken else "done: every mode answers as promised")
    if json_path is not None:
        report = {
            "model": smollm.gguf_path().name,
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kvc": kvc.__version__,
            "seconds": round(time.perf_counter() - start, 1),
            "rows": [asdict(r) for r in results],
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if broken:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
