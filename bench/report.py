"""What results look like: tables between the markers of a page, and plots of time against size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill as wrap
from typing import TYPE_CHECKING, Any

from bench.common import HOST_YARDSTICK, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision can tell apart; markers differ too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = "osD^vP"
Lines = list[str]


@dataclass
class Run:
    rows: list[Row]
    environment: dict[str, Any]

    @property
    def place(self) -> str:
        facts = self.environment
        where = f"{facts['gpu']}, driver {facts['driver']}" if "gpu" in facts else "CPU"
        dirty = " with changes" if facts.get("dirty") else ""
        cuda = f", CUDA {facts['cuda']}" if facts.get("cuda") else ""
        return f"{where}, torch {facts['torch']}{cuda}, kvc {facts['commit']}{dirty}, {facts['when'][:10]}"

    def find(self, case: str) -> Row | None:
        return next((row for row in self.rows if row["case"] == case), None)

    def starting(self, prefix: str) -> Iterator[tuple[str, Row]]:
        for row in self.rows:
            if row["case"].startswith(prefix):
                yield row["case"].removeprefix(prefix), row


Runs = dict[str, Run]


def load(paths: Sequence[Path]) -> Runs:
    """Families by name, from files of one family or of all."""
    runs: Runs = {}
    for path in paths:
        content = json.loads(path.read_text())
        if "environment" not in content or not content.keys() & {"rows", "families"}:
            raise SystemExit(f"{path} must be written by a benchmark, got other keys: {', '.join(content)}")
        families = content.get("families") or {content["benchmark"]: content["rows"]}
        runs |= {name: Run(rows, content["environment"]) for name, rows in families.items()}
    return runs


def rate(gb_per_s: float) -> str:
    return f"{gb_per_s / 1e3:.2f} TB/s" if gb_per_s >= 1000 else f"{gb_per_s:.1f} GB/s"


def of_ceiling(row: Row | None) -> str:
    return f"{rate(row['gb_per_s'])}, {row['share']:.1%}" if row else "-"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """A table; columns that are all numbers stand to the right."""

    def numeric(column: int) -> bool:
        return all(re.fullmatch(r"[\d,.]+[x%]?|-", row[column]) for row in rows)

    rule = ["---:" if numeric(i) else "---" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)] if rows else []


def pinned(run: Run) -> Lines:
    rows = [
        [
            *(name, of_ceiling(row), f"{row['share_of_copy_engine']:.1%}"),
            *(of_ceiling(run.find(f"pinned decode from: {name}, 16 CTAs")), pages_of(row)),
        ]
        for case, row in run.starting("pinned encode to: ")
        if case.endswith(", 16 CTAs")
        for name in [case.removesuffix(", 16 CTAs")]
    ]
    out = ("out, share of plain stores", "of the copy engine")
    head = ("hot pages", *out, "in, share of plain loads", "pages/s out")
    return markdown(head, rows) + notes(cpu_rates(run))


def cpu_rates(run: Run) -> Iterator[str]:
    for case, row in run.starting("CPU encode: BF16 whole, "):
        back = run.find(f"CPU decode: BF16 whole, {case}")
        if back:
            rates = f"encodes {row['gb_per_s']:.1f} and decodes {back['gb_per_s']:.1f} GB/s of hot BF16"
            yield f"The CPU op {rates} on {case.removesuffix('s') if case == '1 threads' else case} of that machine."


def pages_of(row: Row) -> str:
    return f"{row['pages_per_s']:,.0f}"


def hbm(run: Run) -> Lines:
    rows = [
        [name, of_ceiling(row), of_ceiling(run.find(f"HBM decode: {name}"))]
        for name, row in run.starting("HBM encode: ")
        if "after" not in name
    ]
    return markdown(("hot pages", "encode, share of a copy", "decode, share of a copy"), rows)


def beside(run: Run) -> Lines:
    rows = [
        [
            row["case"].split(" beside ")[1],
            f"{row['slowdown'] - 1:+.1%}",
            rate(row["gb_per_s"]),
            rate(row["gb_per_s_alone"]),
        ]
        for row in run.rows
        if "slowdown" in row
    ]
    return markdown(("transfer", "the model's products take", "transfer beside them", "transfer alone"), rows)


def direction(row: Row) -> str | None:
    """Of a row about pages of one size: out to pinned memory, or in."""
    return row.get("direction", "out") if "page_bytes" in row else None


def transfers(run: Run) -> Lines:
    """Every other size, either direction; the plot has them all."""
    tables: list[Lines] = []
    for way_of_pages in ("out", "in"):
        found = [row for row in run.rows if direction(row) == way_of_pages]
        ways = list(dict.fromkeys(row["way"] for row in found))
        rows = []
        for size in sorted({row["page_bytes"] for row in found})[::2]:
            times = {row["way"]: row for row in found if row["page_bytes"] == size}
            cells = [time_of(times.get(way, {})) for way in ways]
            rows.append([f"{size >> 10:,} KiB", *cells])
        tables.append(markdown((f"BF16 page {way_of_pages}, us a page", *ways), rows))
    out, back = tables
    return [*out, "", *back] if out and back else out or back


def time_of(row: Row) -> str:
    return f"{row['us_page']:.2f}" if "us_page" in row else str(row.get("refuses", "-"))


def us_of(row: Row | None) -> str:
    return f"{row['us']:,.1f}" if row and "us" in row else "-"


def notes(lines: Iterable[str]) -> Lines:
    """Paragraphs below a table."""
    return [part for line in lines for part in ("", line)]


def refusals(rows: Iterable[Row]) -> Lines:
    """Why rows have no time."""
    return notes(f"No time of {row['case']}: {row['refuses']}." for row in rows if "refuses" in row)


def peers(run: Run) -> Lines:
    found = {(row["op"], row["way"]): row for row in run.rows if "way" in row and "op" in row}
    rows = []
    for way in dict.fromkeys(way for (_, way), row in found.items() if "us" in row):
        cells = []
        for op in ("quantize", "dequantize"):
            row, ours = found.get((op, way), {}), found.get((op, "kvc"), {})
            both = "us" in row and "us" in ours
            cells += [us_of(row), f"{row['us'] / ours['us']:.1f}x" if both else "-"]
            cells += [f"{row['equal_bytes']:.2%}" if "us" in row else "-"]
        rows.append([way, *cells])
    head = ("by", "quantize, us", "of kvc's", "equal bytes", "dequantize, us", "of kvc's", "equal bytes")
    return markdown(head, rows) + refusals(found.values())


IN_GRAPH = "each of 20 in a graph"


def compaction(run: Run) -> Lines:
    kinds = ("ordered: ", "fill: ", "side by side, 32")
    details = ("pages of", "head size", "MLA", "idle")  # in the JSON
    found = [
        row
        for row in run.rows
        if row["case"].startswith(kinds) and not any(word in row["case"] for word in details)
    ]
    rows = [[row["case"], us_of(row), of_ceiling(row)] for row in found if "share" in row]
    packing = [
        f"`{case.split(',')[0]}` for 64 requests, 8 heads and 2,048 kept tokens takes {us_of(row)} us as one of 20 in"
        f" a graph{by_torch(run, case)}; {us_of(run.find(case.replace(IN_GRAPH, 'cold L2')))} us alone and with a cold"
        " L2."
        for case, row in run.starting("")
        if case.startswith("pack_") and case.endswith(IN_GRAPH) and "one row" not in case
    ]
    fill = [
        f"Filling holes takes {row['of_ordered_time']:.1%} of the time of keeping the order ({name})."
        for name, row in run.starting("fill: ")
        if "of_ordered_bar" in row
    ]
    table = markdown(("case", "us", "share of a copy"), rows)
    return table + refusals(found) + notes(fill) + notes(packing)


def by_torch(run: Run, case: str) -> str:
    """What the same takes as a composition of PyTorch's operators."""
    others = {way: run.find(f"{case}: PyTorch{way}") for way in ("", ", torch.compile")}
    times = [f"{us_of(row)} us as PyTorch{way}" for way, row in others.items() if row and "us" in row]
    return "".join(f", {text}" for text in times)


def topk(run: Run) -> Lines:
    rows: list[list[str]] = []
    refused: dict[str, set[str]] = {}
    for row in run.rows:
        found = re.fullmatch(r"256 x (\d+), k (\d+), normal, full", row["case"])
        if found:
            best = row.get("best_peer")
            other = f"{best}, {row['peers'][best]['us']:.1f} us, {row['speedup']:.1f}x" if best else "-"
            for name, peer in row["peers"].items():
                if "refuses" in peer:
                    refused.setdefault(f"{name}: {peer['refuses']}", set()).add(f"{int(found[2]):,}")
            plain = row["peers"]["torch.topk"].get("us")
            cells = [f"{int(found[1]):,}", f"{int(found[2]):,}", f"{row['us']:.1f}", f"{row['read_us']:.1f}"]
            cells += [f"{row['settle_us']:.1f}" if "settle_us" in row else "-"]
            rows.append([*cells, other, f"{plain:,.1f}" if plain else "-"])
    table = markdown(
        (
            "scores",
            "k",
            "radix_topk, us",
            "a read, us",
            "settle_ties, us",
            "best peer of equal result",
            "torch.topk, us",
        ),
        rows,
    )
    settled = [
        f"`settle_ties` of {row['case'].split(', normal')[0]}: {row['settle_us']:.1f} us"
        + "".join(f", {us_of(peer)} us as {way}" for way, peer in row["settle_peers"].items() if "us" in peer)
        + "."
        for row in run.rows
        if "settle_peers" in row
    ]
    why = notes(f"No time of k {', '.join(sorted(ks))}: {why}." for why, ks in refused.items())
    return table + why + notes(settled)


SCORED = (  # the other cases are in the JSON
    "union, 32 requests x 2,176",
    "union, 1 request x 32,768",
    "union, 1 request x 2,176",
    "per_head, 32 x 2,176",
    "per_layer_perhead, 32 x 2,176",
    "union, head size 64, 32 x 2,176",
    "union, FP8, 32 x 2,176",
    "Triton scorer: union, 32 requests x 2,176",
)


def triattention(run: Run) -> Lines:
    rows = [
        [row["case"], f"{row['us']:,.1f}", of_ceiling(row), f"{row['peak_bytes'] / 2**20:,.0f}"]
        for row in run.rows
        if row["case"] in SCORED or row["case"].startswith("side by side, union, 32 x 2,176: gather")
    ]
    phases = [
        f"`mean_phase` for 32 requests, 64 bands and 17 offsets takes {us_of(row)} us as one of 20 in a graph"
        f"{by_torch(run, case)}."
        for case, row in run.starting("")
        if case.startswith("mean_phase, 32 requests") and case.endswith(IN_GRAPH)
    ]
    return markdown(("case", "us", "share of a copy", "scratch, MiB"), rows) + notes(phases)


def rounds(run: Run) -> Lines:
    rows = []
    for row in run.rows:
        name = row["case"].removesuffix(": whole round")
        host = run.find(f"{name}: host")
        if "of_sum" in row and row["case"] != name and host:
            rows.append([name, f"{row['us']:,.0f}", f"{row['of_sum']:.2f}x", f"{host['us']:,.0f}"])
    return markdown(("round", "us", "of its ops' sum", "host, us"), rows)


def host(run: Run) -> Lines:
    rows, small = list[list[str]](), None
    for name, row in run.starting("host: "):
        if name == HOST_YARDSTICK:
            small = row
        elif small:
            rows.append([name, us_of(row), f"{row['us'] / small['us']:.1f}x", us_of(small)])
    return markdown(("call", "us", "of torch.add's", "torch.add then, us"), rows)


def server(run: Run) -> Lines:
    """What the rates mean for a server of Qwen3-8B in BF16: 36 layers, 8 KV heads of 128, pages of 32 tokens."""
    names = {
        "quantized": "pinned encode to: BF16 whole, 16 CTAs",
        "whole": "pinned encode to: lossless BF16, 16 CTAs",
        "copy": "ceiling: device copy, read + write",
        "fill": "union, fill: whole round",
        "ordered": "union, ordered: whole round",
        "beside": "30 products of 8192^3 beside encode, 16 CTAs",
    }
    found = {name: row for name, case in names.items() if (row := run.find(case))}
    if found.keys() != names.keys():
        return []
    hot, pages, weights = 36 * 2 * 8 * 32 * 128 * 2, 32768 // 32, 16.4e9
    cold, cache = hot * 9 // 32, 32 * 2688 / 32 * hot
    step_us = (weights + cache) / found["copy"]["gb_per_s"] / 1e3
    quantized, whole, beside = found["quantized"], found["whole"], found["beside"]
    beside_ms = pages * cold / beside["gb_per_s"] / 1e6
    away = [pages / row["pages_per_s"] * 1e3 for row in (quantized, whole)]
    share = {name: found[name]["us"] / (128 * step_us) for name in ("fill", "ordered")}
    items = (
        "- *Pages a second per link* = rate of the link / `cold_page_bytes`. A page of 32 tokens of Qwen3-8B in BF16"
        f" has {hot:,} bytes hot and {cold:,} cold: at {rate(quantized['gb_per_s'])} {pages_of(quantized)} pages a"
        f" second, {32e-6 * quantized['pages_per_s']:.1f} million tokens, against {pages_of(whole)} pages that are"
        f" moved whole. A request of 32,768 tokens leaves in {away[0]:.0f} ms instead of {away[1]:.0f}.",
        "- *A round as a share of decoding* = time of the round / (`beta` * time of a step), since a request is due"
        " once in `beta` tokens and all requests that are due share a round. A step of 32 requests of 2,688 tokens"
        f" reads at least Qwen3-8B's weights and the cache, {weights / 1e9:.1f} + {cache / 1e9:.1f} GB:"
        f" {step_us / 1e3:.1f} ms at the rate of a copy. In 128 such steps a round that fills holes,"
        f" {found['fill']['us'] / 1e3:.1f} ms, is {share['fill']:.1%}, one that keeps the order,"
        f" {found['ordered']['us'] / 1e3:.1f} ms, {share['ordered']:.1%}.",
        "- *What a transfer takes from the model* = its time beside the model * (1 - 1 / slowdown); `--parts beside`"
        f" measures both. With 16 blocks the request of 32,768 tokens takes {beside_ms:.0f} ms beside matrix products,"
        f" which take {beside['slowdown'] - 1:.1%} longer meanwhile: it costs the model"
        f" {beside_ms * (1 - 1 / beside['slowdown']):.0f} ms.",
    )
    return [wrap(item, 120, subsequent_indent="  ", break_on_hyphens=False) for item in items]


def offload(run: Run) -> Lines:
    times = {name: row["us"] for name, row in run.starting("offload: ")}
    times |= {f"back, {name}": row["us"] for name, row in run.starting("onboard: ")}
    rows = [[name, f"{us / 1e3:.2f}"] for name, us in times.items()]
    return markdown(("1 GiB of BF16 pages of Qwen3-8B's shape to pinned host memory", "ms"), rows)


EVERY = "every family"
TABLES: dict[str, tuple[str, Callable[[Run], Lines]]] = {
    "pinned": ("nvfp4", pinned),
    "hbm": ("nvfp4", hbm),
    "beside": ("nvfp4", beside),
    "transfers": ("nvfp4", transfers),
    "peers": ("nvfp4", peers),
    "compaction": ("compaction", compaction),
    "topk": ("topk", topk),
    "triattention": ("triattention", triattention),
    "rounds": ("methods", rounds),
    "host": (EVERY, host),
    "server": (EVERY, server),
    "offload": ("methods", offload),
}
MACHINE = "machine"  # the marker of the run that tables without one of their own are of


CAPTIONS = {
    "pinned": "Cold pages to and from pinned host memory, 16 thread blocks; plain kernels that only store or load the"
    " cold bytes\nare the ceiling.",
    "hbm": "Between pools and cold pages in the GPU's memory, hot and cold bytes counted, against a copy, {copy}."
    "\n\n![time against bytes](docs/bench_bytes.svg)",
    "beside": "What a transfer to or from pinned memory costs matrix products that run beside it.",
    "transfers": "Pages of one size to pinned memory and back, launches included."
    "\n\n![time against the size of a page](docs/bench_transfers.svg)",
    "peers": "256 MiB of BF16 rows of 128 to NVFP4 and back in the GPU's memory, plain calls. FlashInfer quantizes as"
    " it appends to\nthe pages of a cache.",
    "compaction": "Compaction in BF16, budget 2,048, 128 of 2,176 tokens evicted at random; bytes read and written"
    " against\na copy, {copy}.",
    "topk": "Top-k of 256 rows of fp32 scores, normal, cold L2."
    "\n\n![time against the width of a row](docs/bench_topk.svg)",
    "triattention": "TriAttention scores of 36 layers, every key byte counted once against a copy, {copy}.",
    "rounds": "Whole eviction rounds of requests of 512 + 2,176 tokens, 36 layers.",
    "host": "How long a call keeps the host, beside an addition of one element in PyTorch at the same moment, as that"
    " machine's\ncores change their pace.",
}


def copy_rate(run: Run) -> str:
    row = run.find("ceiling: device copy, read + write")
    return rate(row["gb_per_s"]) if row else "not measured"


MARKED = re.compile(r"<!-- bench:(\w+) -->(.*?)<!-- /bench -->", re.DOTALL)


def write_tables(page: Path, runs: Runs) -> tuple[list[str], list[str]]:
    """Renew what stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; tables without results stay. Names of
    both. A page with a place for the machine names it once, if all of its tables are of one run."""
    text = page.read_text()
    places = {run.place for run in runs.values()}
    if runs:
        newest = next(reversed(runs.values()))
        rows = [row for run in runs.values() for row in run.rows]
        runs = {**runs, EVERY: Run(rows, newest.environment)}
    marked = {name: old.strip() for name, old in MARKED.findall(text)}
    if unknown := marked.keys() - {*TABLES, MACHINE}:
        known = ", ".join((*TABLES, MACHINE))
        raise SystemExit(f"{page}: bench:{', '.join(sorted(unknown))} must be one of {known}")
    bodies: dict[str, Lines] = {}
    left: list[str] = []
    for name in (name for name in marked if name in TABLES):
        family, table = TABLES[name]
        if lines := table(runs[family]) if family in runs else []:
            caption = CAPTIONS.get(name, "").format(copy=copy_rate(runs[family]))
            bodies[name] = [caption, "", *lines] if caption else lines
        else:
            left.append(name)
    if MACHINE in marked and bodies and len(places) == 1 and not any(marked[name] for name in left):
        bodies[MACHINE] = [f"Tables that name no run of their own: {places.pop()}."]
    else:
        for name, lines in bodies.items():
            lines += ["", f"{runs[TABLES[name][0]].place}."]

    def renew(found: re.Match[str]) -> str:
        name = found[1]
        body = "\n".join(bodies.get(name, []))
        return f"<!-- bench:{name} -->\n\n{body}\n\n<!-- /bench -->" if body else found[0]

    page.write_text(MARKED.sub(renew, text))
    return [name for name in marked if name in bodies], left


def draw(folder: Path, runs: Runs) -> list[Path]:
    """A plot for each kind of result there is: time against size, both logarithmic, with the physical limit."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "kvc"  # the same results, the same file
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Axes, Runs], str | None]] = {
        "bench_bytes.svg": draw_bytes,
        "bench_transfers.svg": draw_transfers,
        "bench_topk.svg": draw_topk,
    }
    written = []
    for name, plot in plots.items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log")
        if place := plot(axes, runs):
            axes.grid(which="major", color="0.85")
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
            axes.set_title(place, fontsize=8, color="0.3")
            figure.savefig(folder / name, metadata={"Date": None})
            text = (folder / name).read_text()  # matplotlib ends lines in spaces
            (folder / name).write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
            written.append(folder / name)
    return written


def limit(axes: Axes, sizes: Sequence[float], times: Sequence[float], label: str, style: str = "--") -> None:
    axes.plot(sizes, times, style, color="black", linewidth=1, label=label)


def draw_bytes(axes: Axes, runs: Runs) -> str | None:
    """Every op that is limited by memory: time against the bytes it must move, above the time of a copy."""
    found = {
        family: [row for row in runs[family].rows if counted(row)]
        for family in ("nvfp4", "compaction", "triattention")
        if family in runs
    }
    found = {family: rows for family, rows in found.items() if rows}
    if not found:
        return None
    for colour, marker, (family, rows) in zip(COLOURS, MARKERS, found.items(), strict=False):
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "none", "markersize": 5}
        axes.plot([r["bytes"] for r in rows], [r["us"] for r in rows], label=family, **style)
    run = runs[next(iter(found))]
    ceiling = run.rows[0]["gb_per_s"]
    sizes = sorted(row["bytes"] for rows in found.values() for row in rows)
    ends = [sizes[0] / 2, sizes[-1] * 2]
    limit(axes, ends, [size / ceiling / 1e3 for size in ends], f"device copy, {rate(ceiling)}")
    axes.set(xlabel="bytes read and written", ylabel="us")
    return run.place


def counted(row: Row) -> bool:
    """Ops on the GPU's own memory, without what stands beside them."""
    prefixes = ("HBM ", "ordered: ", "fill: ", "union", "per_head", "per_layer_perhead")
    return "bytes" in row and row["case"].startswith(prefixes)


def draw_transfers(axes: Axes, runs: Runs) -> str | None:
    if "nvfp4" not in runs:
        return None
    run = runs["nvfp4"]
    found = [row for row in run.rows if "us_page" in row and direction(row) == "out"]
    if not found:
        return None
    for colour, marker, way in zip(
        COLOURS, MARKERS, dict.fromkeys(row["way"] for row in found), strict=False
    ):
        points = sorted((row["page_bytes"], row["us_page"]) for row in found if row["way"] == way)
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour, markersize=4, label=way)
    links = runs.get("ceilings", run)
    link = next((row for name, row in links.starting("ceiling: copy engine out")), None)
    if link is not None:
        sizes = sorted({row["page_bytes"] for row in found})
        whole = [size / link["gb_per_s"] / 1e3 for size in sizes]
        limit(axes, sizes, whole, f"the link, BF16, {rate(link['gb_per_s'])}")
        limit(axes, sizes, [us * 9 / 32 for us in whole], "the link, NVFP4", ":")
    axes.set(xlabel="bytes of a BF16 page", ylabel="us a page")
    return run.place


def draw_topk(axes: Axes, runs: Runs, rows: int = 256, k: int = 2048) -> str | None:
    if "topk" not in runs:
        return None
    points: dict[str, list[tuple[int, float]]] = {}
    for row in runs["topk"].rows:
        match = re.fullmatch(rf"{rows} x (\d+), k {k}, normal, full", row["case"])
        if match is None:
            continue
        found = {"radix_topk": row["us"], "settle_ties": row.get("settle_us"), "read": row["read_us"]}
        found |= {name: peer.get("us") for name, peer in row["peers"].items()}
        for name, us in found.items():
            if us is not None:
                points.setdefault(name, []).append((int(match[1]), us))
    if not points:
        return None
    sizes, times = zip(*sorted(points.pop("read")), strict=True)
    styles = [(colour, MARKERS[i], line) for line in ("-", ":") for i, colour in enumerate(COLOURS)]
    for (name, line), (colour, marker, style) in zip(points.items(), styles, strict=False):
        axes.plot(
            *zip(*sorted(line), strict=True), style, marker=marker, color=colour, markersize=4, label=name
        )
    limit(axes, sizes, times, "one read of the scores")
    axes.set(xlabel=f"fp32 scores a row; {rows} rows, k {k:,}", ylabel="us")
    return runs["topk"].place
