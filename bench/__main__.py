"""All benchmarks in one go: ``python -m bench`` measures, ``report`` writes tables and plots, ``compare`` shows two
runs side by side."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench import bench_compaction, bench_methods, bench_nvfp4, bench_topk, bench_triattention, common, report
from bench.peers import reason

FAMILIES: dict[str, ModuleType] = {
    "nvfp4": bench_nvfp4,
    "compaction": bench_compaction,
    "topk": bench_topk,
    "triattention": bench_triattention,
    "methods": bench_methods,
}
PAGES = [Path("README.md"), Path("docs/benchmarks.md"), Path("docs/tiers.md")]
app = typer.Typer(add_completion=False, help=__doc__)
Results = Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="What a run has written.")]


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    json: Annotated[Path, typer.Option(help="Where to write the results.")] = Path("bench-results.json"),
    families: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(FAMILIES),
    parts: Annotated[str, typer.Option(help="Comma-separated; every part of a family by default.")] = "",
    peers: Annotated[Path | None, typer.Option(help="A folder that bench/peers.py filled.")] = None,
) -> None:
    """Run the benchmarks of every family, ceilings first. Without a GPU, those of the CPU ops."""
    if context.invoked_subcommand is not None:
        return
    gpu, screen = torch.cuda.is_available(), Console(stderr=True)
    if not gpu:
        screen.print("no GPU that this PyTorch can use: only the CPU ops are measured")
    wanted = [name for name in parts.split(",") if name]
    unknown = set(wanted)
    plan: list[tuple[str, str, common.Parts]] = (
        [("ceilings", "link", {"link": common.link_rows})] if gpu else []
    )
    for family in families.split(","):
        if family not in FAMILIES:
            raise typer.BadParameter(f"there are {', '.join(FAMILIES)}", param_hint="--families")
        module = FAMILIES[family]
        known = module.all_parts(**({"peers": peers} if family in ("nvfp4", "topk") else {}))
        unknown -= known.keys()
        chosen = [name for name in wanted if name in known] if wanted else module.PARTS.split(",")
        plan += [(family, name, known) for name in chosen if gpu or name in common.CPU_PARTS]
    if unknown:
        raise typer.BadParameter(f"no family has {', '.join(sorted(unknown))}", param_hint="--parts")
    results: dict[str, list[common.Row]] = {}
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}

    def save() -> None:
        """At first, to learn whether it works; then after each part, as a run cut short has measured something too."""
        content = {"benchmark": "all", "families": results, "failed": failed, "seconds": seconds}
        common.write(json, content, peers)

    save()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen) as progress:
        task = progress.add_task("", total=len(plan))
        for family, name, known in plan:
            progress.update(task, description=f"{family}: {name}")
            begin = perf_counter()
            try:
                found = common.measure(known, [name])
            except (
                Exception,
                SystemExit,
            ) as error:  # hours of other results are worth keeping; the exit status tells
                failed[f"{family}: {name}"] = f"{type(error).__name__}: {reason(error)}"
                screen.print(
                    Text(f"{family}: {name} failed: {failed[f'{family}: {name}']}", style="bold red")
                )
            else:
                rows = results.setdefault(family, [])
                rows += [row for row in found if row not in rows]  # each part brings the ceiling along
                if family in FAMILIES:
                    FAMILIES[family].show(found)
            seconds[f"{family}: {name}"] = round(perf_counter() - begin, 1)
            save()
            progress.advance(task)
    screen.print(f"wrote {json}")
    if failed:
        raise typer.Exit(1)


@app.command("report")
def report_command(
    results: Results,
    page: Annotated[list[Path], typer.Option(help="Where tables go, between markers; repeatable.")] = PAGES,
    plots: Annotated[Path, typer.Option(help="Folder of the plots.")] = Path("docs"),
) -> None:
    """Write the tables of the pages and the plots. Of a family in several files the last one counts."""
    runs = report.load(results)
    screen = Console()
    for path in page:
        written, left = report.write_tables(path, runs)
        screen.print(f"{path}: {', '.join(written) or 'nothing'}", soft_wrap=True)
        if left:
            text = f"{path}: without results and left as it was: {', '.join(left)}"
            screen.print(text, style="bold red", soft_wrap=True)
    for path in report.draw(plots, runs):
        screen.print(str(path))


def spread(row: common.Row) -> tuple[float, float]:
    """The middle 80% of a row's times."""
    return float(row.get("us_p10") or row["us"]), float(row.get("us_p90") or row["us"])


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
) -> None:
    """Show two runs side by side; a change counts when the middle 80% of the two do not overlap."""
    old, new = report.load([before]), report.load([after])
    screen = Console()
    for label, runs in (("before", old), ("after", new)):
        for facts in {str(run.place): run for run in runs.values()}.values():
            screen.print(f"{label}: {facts.place}")
    table = Table("case", "before, us", "after, us", "change")
    for family in sorted(old.keys() & new.keys()):
        times = {row["case"]: row for row in old[family].rows if "us" in row}
        for row in new[family].rows:
            was = times.get(row["case"])
            if was is None or "us" not in row:
                continue
            change = row["us"] / was["us"] - 1
            clear = spread(row)[0] > spread(was)[1] or spread(row)[1] < spread(was)[0]
            style = ("red" if change > 0 else "green") if clear else "dim"
            cells = f"{was['us']:.1f}", f"{row['us']:.1f}", Text(f"{change:+.1%}", style=style)
            table.add_row(f"{family}: {row['case']}", *cells)
    if not table.rows:
        raise SystemExit("the two runs have no case in common")
    screen.print(table)


if __name__ == "__main__":
    app(prog_name="python -m bench")
