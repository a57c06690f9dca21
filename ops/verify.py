"""What NVFP4 does to numbers: ``python -m kvc.verify``.

Round trips. A block's result depends on its largest magnitude m and on each member alone: m fixes the block
scale, scale and member fix the stored value, and the next trip starts from the decoded m, which stays the
largest because rounding is monotone. So pairs (member, m) say everything about blocks of 16. The tool visits
them in two ways, with both signs of either:

- *largest*: every finite value of the dtype as m, beside fifteen members at i/16 of it;
- *member*: every finite value as an ordinary member under maxima that cover the dtype. FP8 takes all of them,
  that is, every pair. FP16 and BF16 have 1e9 pairs each, but many m behave alike: those with the same block
  scale and the same decoded m. The smallest and the largest m of each such class are taken; the largest
  leaves no member out, the smallest makes distances relative to m as long as they get. The classes come from
  the op's own answers, so they span every E4M3 block scale that values of the dtype can produce: zero,
  subnormal codes, normal codes, and saturation. ``--all-pairs`` takes every m after all.

After trip r, d_orig = ``|x_r - x_0| / m`` and d_prev = ``|x_r - x_(r-1)| / m``, with the original m. Pairs are told
apart by the block scale of their first trip: *zero* (the block vanishes), *subnormal* and *normal* E4M3
codes, and *saturated* (m above 6 * 448, more than a block can hold). Under normal scales d_prev must be zero
from the second trip on; if it is not, the exit code is 1. Under subnormal scales blocks may move once more,
and those whose scale was barely above zero vanish then.

Tensors. ``--kv FILE.safetensors`` reports bytes per value and relative error of single NVFP4, skip-RoPE and
2FP4 on real keys and values.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from . import nvfp4_dequantize, nvfp4_quantize

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure
    from rich.progress import Progress, TaskID
    from rich.table import Table
    from typer import Typer

GROUP = 16
DTYPES = {"fp8": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALE_CLASSES = ("zero", "subnormal", "normal", "saturated")
LARGEST_BLOCK_VALUE = 6 * 448.0
BINS = 1 << 16  # of the distribution that the medians are read from: a resolution of 1.5e-5
CHUNK_ROWS = 1 << 16
TABLE_COLUMNS = 120
MODES = ("NVFP4", "skip-RoPE", "2FP4")


class DType(str, Enum):
    fp8 = "fp8"
    fp16 = "fp16"
    bf16 = "bf16"


class Rope(str, Enum):
    leading = "leading"
    trailing = "trailing"


@dataclass
class Trips:
    """Round trips of one dtype under one class of block scales; the lists have one entry per trip."""

    dtype: str
    scales: str
    values: int
    pairs: int
    d_orig_median: list[float]
    d_orig_max: list[float]
    d_prev_max: list[float]
    changed: list[int]

    @property
    def settles(self) -> bool:
        """Whether nothing moved after the first trip."""
        return not any(self.changed[1:])


@dataclass
class Cost:
    """What one way of storing a tensor costs; `zero_blocks` is the share of blocks that vanish."""

    tensor: str
    mode: str
    dtype: str
    values: int
    bytes_per_value: float
    relative_error: float
    zero_blocks: float


def _ignore(share: float) -> None:
    pass


def code_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype.itemsize == 1 else torch.int16


def from_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of integer bit patterns; an IEEE format orders its magnitudes as their bit patterns."""
    return codes.to(code_dtype(dtype)).view(dtype)


def magnitudes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bit patterns of every finite magnitude, zero included, ascending."""
    codes = torch.arange(1 << (8 * dtype.itemsize - 1), device=device)
    return codes[from_codes(codes, dtype).float().isfinite()]


def round_trip(x: Tensor) -> tuple[Tensor, Tensor]:
    """One trip through NVFP4, and the block scales' bytes."""
    data, scales, lossless = nvfp4_quantize(x)
    return nvfp4_dequantize(data, scales, lossless, x.dtype), scales


def class_ends(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Smallest and largest magnitude (bit patterns) of each class of maxima that behave alike."""
    codes = magnitudes(dtype, device)
    decoded, scales = round_trip(from_codes(codes, dtype).unsqueeze(1).repeat(1, GROUP))
    keys = torch.stack([scales[:, 0].float(), decoded[:, 0].float()], dim=1)
    _, which = keys.unique(dim=0, return_inverse=True)
    count = int(which.max()) + 1
    low = codes.new_zeros(count).scatter_reduce(0, which, codes, "amin", include_self=False)
    high = codes.new_zeros(count).scatter_reduce(0, which, codes, "amax", include_self=False)
    return torch.cat([low, high]).unique()


def largest_blocks(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks `[rows, 16]` with every value as the largest, and which elements to count."""
    codes = magnitudes(dtype, device)
    sign = 1 << (8 * dtype.itemsize - 1)
    top = from_codes(torch.cat([codes, codes + sign]), dtype).float()
    ratios = torch.arange(GROUP, 0, -1, device=device) / GROUP
    ratios[1::2].neg_()
    blocks = (top.unsqueeze(1) * ratios).to(dtype)
    for part in blocks.split(CHUNK_ROWS):
        yield part, torch.ones(part.shape, dtype=torch.bool, device=device)


def member_blocks(
    maxima: Tensor, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks with every value at most m, of both signs, beside each m of `maxima` in column 0."""
    sign = 1 << (8 * dtype.itemsize - 1)
    members = GROUP - 1
    # Row r of m's blocks holds signed members 15 r to 15 r + 14; the order of patterns is +0, -0, +1, -1, ...
    rows = (2 * (maxima + 1) + members - 1) // members
    for first, last in _spans(rows.tolist(), CHUNK_ROWS):
        counts = rows[first:last]
        m, before = (t.repeat_interleave(counts) for t in (maxima[first:last], counts.cumsum(0) - counts))
        start = torch.arange(len(m), device=device) - before
        position = members * start.unsqueeze(1) + torch.arange(members, device=device)
        inside = position < 2 * (m + 1).unsqueeze(1)
        signed = torch.where(inside, position // 2 + sign * (position % 2), 0)
        top = (m + sign * (start % 2)).unsqueeze(1)
        count = torch.cat([torch.zeros_like(top, dtype=torch.bool), inside], dim=1)
        yield from_codes(torch.cat([top, signed], dim=1), dtype), count


def _spans(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive index ranges whose sizes add up to about `limit`."""
    first = total = 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            yield first, i
            first, total = i, 0
        total += size
    if total:
        yield first, len(sizes)


class TripCounter:
    """Sums up round trips of one dtype, on the device, by class of the first block scale."""

    def __init__(self, dtype: torch.dtype, trips: int, device: torch.device) -> None:
        self.dtype, self.trips = dtype, trips
        classes = len(SCALE_CLASSES)
        self.seen = torch.zeros(classes, 1 << 8 * dtype.itemsize, dtype=torch.bool, device=device)
        self.pairs = torch.zeros(classes, dtype=torch.int64, device=device)
        self.histogram = torch.zeros(trips, classes, BINS, dtype=torch.int64, device=device)
        self.d_orig = torch.zeros(trips, classes, device=device)
        self.d_prev = torch.zeros(trips, classes, device=device)
        self.changed = torch.zeros(trips, classes, dtype=torch.int64, device=device)

    def add(self, blocks: Tensor, count: Tensor) -> None:
        """Send `[rows, 16]` blocks, the largest magnitude in column 0, through all trips."""
        original = blocks.float()
        largest = original[:, :1].abs()
        unit = torch.where(largest > 0, largest, 1.0)
        current, previous = blocks, original
        for trip in range(self.trips):
            current, scales = round_trip(current)
            if trip == 0:
                kinds = self._classes(scales, largest).expand_as(count)[count]
                codes = blocks.view(code_dtype(self.dtype))[count].long() & (self.seen.shape[1] - 1)
                self.seen[kinds, codes] = True
                self.pairs += torch.bincount(kinds, minlength=len(SCALE_CLASSES))
            values = current.float()
            d_orig = ((values - original).abs() / unit)[count]
            d_prev = ((values - previous).abs() / unit)[count]
            bins = (d_orig.nan_to_num(1.0) * (BINS - 1)).round().clamp(max=BINS - 1).long()
            self.histogram[trip].view(-1).add_(
                torch.bincount(kinds * BINS + bins, minlength=self.histogram[trip].numel())
            )
            self.d_orig[trip].scatter_reduce_(0, kinds, d_orig, "amax")
            self.d_prev[trip].scatter_reduce_(0, kinds, d_prev, "amax")
            # Not d_prev > 0: a move of the smallest BF16 values beside the largest underflows to 0.
            moved = (values != previous)[count]
            self.changed[trip] += torch.bincount(kinds[moved], minlength=len(SCALE_CLASSES))
            previous = values

    @staticmethod
    def _classes(scales: Tensor, largest: Tensor) -> Tensor:
        """Index into SCALE_CLASSES per block, `[rows, 1]`."""
        kind = (scales > 0).long() + (scales >= 8).long()  # E4M3 codes below 8 are subnormal
        return torch.where(largest > LARGEST_BLOCK_VALUE, 3, kind)

    def results(self, name: str) -> list[Trips]:
        found = []
        medians = (self.histogram.cumsum(-1) * 2 >= self.pairs[:, None]).byte().argmax(-1) / (BINS - 1)
        for i, scales in enumerate(SCALE_CLASSES):
            if self.pairs[i] == 0:
                continue
            found.append(
                Trips(
                    dtype=name,
                    scales=scales,
                    values=int(self.seen[i].sum()),
                    pairs=int(self.pairs[i]),
                    d_orig_median=medians[:, i].tolist(),
                    d_orig_max=self.d_orig[:, i].tolist(),
                    d_prev_max=self.d_prev[:, i].tolist(),
                    changed=self.changed[:, i].tolist(),
                )
            )
        return found


def verify_dtype(
    name: str,
    trips: int = 4,
    device: torch.device | str = "cpu",
    all_pairs: bool = False,
    on_progress: Callable[[float], None] = _ignore,
) -> list[Trips]:
    """Run the round trips of one dtype of `DTYPES`; `on_progress` gets the share of blocks done, 0 to 1."""
    dtype, device = DTYPES[name], torch.device(device)
    counter = TripCounter(dtype, trips, device)
    every = all_pairs or dtype.itemsize == 1
    maxima = magnitudes(dtype, device) if every else class_ends(dtype, device)
    total = int(((2 * maxima + GROUP) // (GROUP - 1)).sum()) + 2 * len(magnitudes(dtype, device))
    done = 0
    for blocks_of in (largest_blocks(dtype, device), member_blocks(maxima, dtype, device)):
        for blocks, count in blocks_of:
            counter.add(blocks, count)
            done += len(blocks)
            on_progress(done / total)
    return counter.results(name)


def measure_tensor(
    name: str, x: Tensor, rotary_dim: int | None, residual_dim: int | None, rope: Rope = Rope.leading
) -> list[Cost]:
    """Costs of `MODES` on one tensor ``[..., head_dim]``; a mode that has nothing to do is left out."""
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError("nothing to quantize")
    width = x.shape[-1]
    rotary = width if rotary_dim is None else rotary_dim
    residual = rotary if residual_dim is None else residual_dim
    if rotary > width:
        raise ValueError(f"rotary-dim {rotary} is more than the {width} elements of a row")
    trailing = rope is Rope.trailing
    options: dict[str, tuple[int, int, int, int]] = {"NVFP4": (0, width, 0, 0)}
    if 0 < rotary < width:
        options["skip-RoPE"] = (0 if trailing else rotary, width - rotary, 0, 0)
    if residual > 0:
        options["2FP4"] = (0, width, width - residual if trailing else 0, residual)

    costs = []
    rows = x.reshape(-1, width)
    for mode, (start, elements, residual_start, residual_elements) in options.items():
        nbytes = blocks = zero = 0
        difference = norm = 0.0
        for part in rows.split(max(1, (1 << 24) // width)):
            data, scales, lossless = nvfp4_quantize(
                part, 1.0, start, elements, residual_start, residual_elements
            )
            back = nvfp4_dequantize(
                data, scales, lossless, x.dtype, 1.0, start, residual_start, residual_elements
            )
            nbytes += data.nbytes + scales.nbytes + lossless.nbytes
            difference += (back.double() - part.double()).square().sum().item()
            norm += part.double().square().sum().item()
            stored = back[:, start : start + elements].float().unflatten(1, (-1, GROUP))
            blocks += stored[..., 0].numel()
            zero += int((stored == 0).all(-1).sum())
        costs.append(
            Cost(
                tensor=name,
                mode=mode,
                dtype=str(x.dtype).removeprefix("torch."),
                values=x.numel(),
                bytes_per_value=nbytes / x.numel(),
                relative_error=(difference / norm) ** 0.5 if norm else 0.0,
                zero_blocks=zero / blocks,
            )
        )
    return costs


def measure_file(
    path: Path,
    names: Sequence[str],
    device: torch.device | str,
    rotary_dim: int | None,
    residual_dim: int | None,
    rope: Rope,
    on_progress: Callable[[float], None] = _ignore,
) -> list[Cost]:
    """Costs of the tensors of a safetensors file whose names contain one of `names`; of all without names."""
    from safetensors import safe_open

    costs: list[Cost] = []
    with safe_open(str(path), framework="pt") as file:
        keys = sorted(
            file.keys(), key=lambda key: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", key)]
        )
        found = [key for key in keys if not names or any(name in key for name in names)]
        for i, key in enumerate(found):
            x = file.get_tensor(key).to(device)
            try:
                costs += measure_tensor(key, x, rotary_dim, residual_dim, rope)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{key} {list(x.shape)}: {error} (--tensor chooses by name)") from error
            on_progress((i + 1) / len(found))
    if not costs:
        raise ValueError(f"{path} has no tensor whose name contains one of {list(names)}")
    return costs


def trips_table(results: Sequence[Trips]) -> "Table":
    from rich import box
    from rich.table import Table

    trips = len(results[0].changed)
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title="Repeated NVFP4 round trips",
        caption=(
            "d_orig, the distance to the original as a share of the block's largest magnitude: median over "
            "the visited pairs, and largest. moved: pairs that changed on that trip (and the largest d_prev)"
        ),
        caption_justify="left",
    )
    for heading in ("dtype", "block scale"):
        table.add_column(heading, no_wrap=True)
    shown = (0, trips - 1) if trips > 1 else (0,)
    headings = [f"trip {t + 1}\n{what}" for t in shown for what in ("median", "max")]
    headings += [f"moved on\ntrip {t}" for t in range(2, trips + 1)]
    for heading in ("values", "pairs", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, r in enumerate(results):
        if i and r.dtype != results[i - 1].dtype:
            table.add_section()
        distances = [f"{d[t]:.4f}" for t in shown for d in (r.d_orig_median, r.d_orig_max)]
        moves = list(zip(r.changed, r.d_prev_max, strict=True))[1:]
        moved = [f"{count:,} ({distance:.3f})" if count else "0" for count, distance in moves]
        table.add_row(r.dtype, r.scales, f"{r.values:,}", f"{r.pairs:,}", *distances, *moved)
    return table


def costs_table(costs: Sequence[Cost]) -> "Table":
    from rich import box
    from rich.table import Table

    modes = [mode for mode in MODES if any(c.mode == mode for c in costs)]
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title="What each mode costs",
        caption="error: norm of the difference over norm of the tensor; zero: share of blocks that vanish",
        caption_justify="left",
    )
    for heading in ("tensor", "dtype"):
        table.add_column(heading)
    for mode in modes:
        for heading in (f"{mode}\nB/value", "\nerror", "\nzero"):
            table.add_column(heading, justify="right", no_wrap=True)
    for tensor in dict.fromkeys(c.tensor for c in costs):
        found = {c.mode: c for c in costs if c.tensor == tensor}
        cells = []
        for c in (found.get(mode) for mode in modes):
            cells += (
                [f"{c.bytes_per_value:.4f}", f"{c.relative_error:.4f}", f"{c.zero_blocks:.1%}"]
                if c
                else [""] * 3
            )
        table.add_row(tensor, next(iter(found.values())).dtype, *cells)
    return table


# Okabe and Ito's colours, told apart by every kind of colour vision; shapes say the same once more.
_CLASS_STYLE = {
    "zero": ("#0072B2", "o"),
    "subnormal": ("#D55E00", "^"),
    "normal": ("#009E73", "s"),
    "saturated": ("#000000", "D"),
}
_MODE_STYLE = {"NVFP4": ("#D55E00", "o", 6), "skip-RoPE": ("#0072B2", "s", 8), "2FP4": ("#009E73", "^", 5)}


def plot(results: Sequence[Trips], costs: Sequence[Cost], path: Path) -> None:
    """Draw distances by trip and scale class, and error against bytes per value."""
    from matplotlib.figure import Figure

    heights = [6.4] * bool(results) + [4.2] * bool(costs)
    figure = Figure(figsize=(11, sum(heights)), dpi=120, layout="constrained")
    parts = iter(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if results:
        _plot_trips(results, next(parts))
    if costs:
        _plot_costs(costs, next(parts))
    figure.savefig(path)


def _plot_trips(results: Sequence[Trips], figure: "SubFigure") -> None:
    names = list(dict.fromkeys(r.dtype for r in results))
    distances, moves = figure.subplots(2, len(names), sharex=True, sharey="row", squeeze=False)
    for r in results:
        column = names.index(r.dtype)
        colour, marker = _CLASS_STYLE[r.scales]
        # Side by side, so that equal values do not hide one another.
        shift = 0.1 * (SCALE_CLASSES.index(r.scales) - 1.5)
        trips = [trip + shift for trip in range(1, len(r.changed) + 1)]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5.5, "linewidth": 0.8}
        share = [count / r.pairs for count in r.changed]
        moves[column].plot(trips, share, label=r.scales, **style)
        distances[column].plot(trips, r.d_orig_max, **style)
        distances[column].plot(trips, r.d_orig_median, markerfacecolor="white", linestyle=":", **style)
    for name, upper, lower in zip(names, distances, moves, strict=True):
        upper.set_title(name.upper())
        upper.grid(axis="y", alpha=0.3)
        lower.grid(axis="y", alpha=0.3)
        lower.set_xlabel("trip")
        lower.set_xticks(range(1, len(results[0].changed) + 1))
    distances[0].set_ylabel("distance to original / block max\n(filled: largest, open: median)")
    distances[0].set_ylim(-0.04, 1.08)
    moves[0].set_ylabel("pairs that move on this trip")
    # Zero must be visible beside 0.1 %: it is the claim.
    moves[0].set_yscale("symlog", linthresh=1e-3, linscale=0.5)
    moves[0].set_ylim(-3e-4, 2)
    moves[0].set_yticks([0, 1e-3, 1e-2, 1e-1, 1], ["none", "0.1 %", "1 %", "10 %", "all"])
    moves[0].minorticks_off()
    classes: dict[str, Any] = {}
    for axes in moves:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            classes.setdefault(label, handle)
    figure.legend(
        classes.values(), classes.keys(), title="first block scale", loc="outside right upper", frameon=False
    )


def _plot_costs(costs: Sequence[Cost], figure: "SubFigure") -> None:
    by_bytes, by_tensor = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    tensors = list(dict.fromkeys(c.tensor for c in costs))
    for mode in MODES:
        found = [c for c in costs if c.mode == mode]
        if not found:
            continue
        colour, marker, size = _MODE_STYLE[mode]
        errors = [c.relative_error for c in found]
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "none", "markersize": size}
        style["markerfacecolor"] = "none"
        by_bytes.plot([c.bytes_per_value for c in found], errors, label=mode, **style)
        by_tensor.plot([tensors.index(c.tensor) for c in found], errors, **style)
    by_bytes.set_xlabel("bytes per value")
    by_bytes.set_ylabel("relative error")
    by_bytes.set_xlim(0, 1.1 * max(c.bytes_per_value for c in costs))
    by_bytes.set_ylim(bottom=0)
    by_bytes.legend(loc="lower left", frameon=False)
    step = -(-len(tensors) // 20)
    by_tensor.set_xticks(range(0, len(tensors), step), tensors[::step], rotation=60, ha="right", fontsize=7)
    by_bytes.grid(alpha=0.3)
    by_tensor.grid(alpha=0.3)


def _advance(progress: "Progress", task: "TaskID", share: float) -> None:
    progress.update(task, completed=share)


def build_app() -> "Typer":
    """The command line; importing its libraries waits until here."""
    try:
        import matplotlib.figure  # noqa: F401
        import typer
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as missing:
        raise SystemExit(f"kvc.verify needs {missing.name}: pip install 'kvc[verify]'") from missing

    app = typer.Typer(add_completion=False)

    @app.command(
        help="Check that repeated NVFP4 round trips settle, for every FP8, FP16 and BF16 value, and measure"
        " what NVFP4 costs on given tensors. `python -m pydoc kvc.verify` describes the method."
    )
    def verify(
        trips: Annotated[int, typer.Option(min=1, max=16, help="Round trips per pair.")] = 4,
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        dtype: Annotated[list[DType] | None, typer.Option(help="Only this dtype; repeatable.")] = None,
        all_pairs: Annotated[
            bool, typer.Option("--all-pairs", help="Every pair of FP16 and BF16 values: for a GPU.")
        ] = False,
        round_trips: Annotated[bool, typer.Option(help="Run the round trips.")] = True,
        kv: Annotated[
            Path | None, typer.Option(exists=True, dir_okay=False, help="Tensors [..., head_dim] to measure.")
        ] = None,
        tensor: Annotated[
            list[str] | None, typer.Option(help="Only tensors whose name contains this; repeatable.")
        ] = None,
        rotary_dim: Annotated[
            int | None, typer.Option(min=0, help="Elements of a row with RoPE. [default: the whole row]")
        ] = None,
        residual_dim: Annotated[
            int | None, typer.Option(min=0, help="Elements stored as 2FP4. [default: rotary-dim]")
        ] = None,
        rope: Annotated[Rope, typer.Option(help="Where in the row these elements are.")] = Rope.leading,
        plot_path: Annotated[
            Path | None, typer.Option("--plot", help="Write a picture here (PNG, SVG, PDF).")
        ] = None,
        json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
    ) -> None:
        if not round_trips and kv is None:
            raise typer.BadParameter("--no-round-trips leaves nothing to do without --kv")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise typer.BadParameter("this PyTorch sees no CUDA device", param_hint="--device")
        names = [d.value for d in dtype or DType] if round_trips else []
        results: list[Trips] = []
        costs: list[Cost] = []
        with Progress(console=Console(stderr=True)) as progress:
            tasks = {name: progress.add_task(f"{name} round trips", total=1) for name in names}
            for name, task in tasks.items():
                results += verify_dtype(name, trips, device, all_pairs, partial(_advance, progress, task))
            if kv is not None:
                advance = partial(_advance, progress, progress.add_task(kv.name, total=1))
                try:
                    costs = measure_file(kv, tensor or [], device, rotary_dim, residual_dim, rope, advance)
                except ValueError as error:
                    raise typer.BadParameter(str(error), param_hint="--kv") from error

        if plot_path is not None:
            plot(results, costs, plot_path)
        if json_path is not None:
            report = {
                "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
                "torch": torch.__version__,
                "all_pairs": all_pairs,
                "round_trips": [asdict(r) for r in results],
                "tensors": [asdict(c) for c in costs],
            }
            json_path.write_text(json.dumps(report, indent=1) + "\n")
        console = Console()
        if console.width < TABLE_COLUMNS:
            console = Console(width=TABLE_COLUMNS)
        if costs:
            console.print(costs_table(costs))
        if results:
            console.print(trips_table(results))
        restless = [r for r in results if r.scales == "normal" and not r.settles]
        for r in restless:
            console.print(
                f"[bold red]{r.dtype}: pairs under normal block scales move after the first trip[/]"
            )
        if restless:
            raise typer.Exit(1)
        if results and trips > 1:
            console.print("Under normal block scales nothing moves after the first trip.")

    return app


if __name__ == "__main__":
    build_app()()
