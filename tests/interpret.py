"""Runs a family's Triton kernels under Triton's interpreter against the reference: ``interpret.py FAMILY``.

A process of its own: TRITON_INTERPRET=1 must be set before Triton is imported. It shows the index logic, with
programs one after another; it is no proof of a GPU run.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvc.reference import compaction, topk
from triton.runtime import interpreter  # type: ignore[import-untyped]

# The interpreter's scalars are arrays of one element, which recent NumPy does not turn into an index by
# itself.
_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_with_index
# On a GPU the maximum of NaN and a number is the number.
interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


def load(source: str) -> Any:
    path = Path(__file__).parents[1] / "kernels" / source
    spec = importlib.util.spec_from_file_location("kvc_interpreted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(rng: random.Random, requests: int, most: int) -> torch.Tensor:
    if rng.random() < 0.3:
        return ints([rng.randint(-5, 90) for _ in range(requests + 1)])
    return ints(list(itertools.accumulate((rng.randint(0, most) for _ in range(requests)), initial=0)))


def pack_case(rng: random.Random, pack: Any) -> None:
    requests, layers, heads, count = (
        rng.randint(0, 4),
        rng.randint(1, 3),
        rng.randint(1, 2),
        rng.randint(0, 40),
    )
    decision_rows = rng.choice([1, heads, layers * heads])
    rows = layers * heads if layers > 1 and decision_rows == layers * heads else heads
    picks = [sorted(rng.sample(range(2, 70), count)) for _ in range(requests * decision_rows)]
    kept = ints(picks).view(requests, decision_rows, count)
    if count:
        kept[..., count - rng.randint(0, min(count, 3)) :] = -1
    lengths = ints([rng.randint(55, 75) for _ in range(requests)])
    bases = ints([rng.randint(0, 30) for _ in range(requests)])
    first, side = offsets(rng, requests, count + 3), offsets(rng, requests, 9)
    total, side_total = (max(0, int(o.max()) + rng.randint(-4, 40)) for o in (first, side))
    window, blocks, clearing = rng.randint(0, 8), rng.randint(1, 3), rng.randint(1, 3)
    grid_rows = max(1, rows + heads - rng.randint(0, 1))

    def outputs(*shapes: tuple[int, int]) -> list[torch.Tensor]:
        return [torch.full(shape, 0x5EED, dtype=torch.int32) for shape in shapes]

    def agree(actual: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> None:
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a.view_as(e), e), (a, e)

    packed = outputs((rows, total), (heads, side_total))
    pack.pack_move_sources_kernel[(requests + clearing) * blocks, grid_rows](
        *(kept, lengths, first, side, *packed),
        *(requests, decision_rows, count, window, rows, total, heads, side_total, blocks),
        BLOCK=16,
    )
    agree(
        packed,
        compaction.pack_move_sources(kept, lengths, first, side, window, layers, heads, total, side_total),
    )

    filled = outputs((rows, total), (rows, total), (heads, side_total))
    pack.pack_fill_moves_kernel[requests + clearing, grid_rows](
        *(kept, lengths, bases, first, side, *filled),
        *(requests, decision_rows, count, rows, total, heads, side_total),
        BLOCK=16,
        COUNT=16,
    )
    agree(
        filled,
        compaction.pack_fill_moves(kept, lengths, bases, first, side, layers, heads, total, side_total),
    )


def settle_case(rng: random.Random, settle: Any) -> None:
    chunk, vector = 64, rng.choice([4, 8])
    rows, width, k = rng.randint(1, 3), rng.randint(0, 500), rng.randint(1, 60)
    dtype = torch.float32 if vector == 4 else rng.choice([torch.float16, torch.bfloat16])
    generator = torch.Generator().manual_seed(rng.randint(0, 10**6))
    row_stride, start = width + rng.randint(0, 9), rng.randint(0, 9)
    memory = torch.zeros(start + rows * row_stride + 32, dtype=dtype)
    memory = memory[
        -(memory.data_ptr() // memory.element_size()) % vector :
    ]  # starts at a multiple of 16 bytes
    scores = memory[start:].as_strided((rows, width), (row_stride, 1))
    scores.copy_(torch.randint(-3, 4, scores.shape, generator=generator) * rng.choice([0, 1, 1]))
    strange = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    odd = torch.rand(scores.shape, generator=generator) < rng.choice([0, 0, 0.3])
    scores[odd] = strange[torch.randint(0, 4, (int(odd.sum()),), generator=generator)].to(dtype)
    lengths = ints([rng.choice([-1, 0, k, width, width + 2, rng.randint(0, width)]) for _ in range(rows)])
    bases = ints([rng.randint(0, 99) for _ in range(rows)])
    expected = topk.radix_topk(scores, lengths, k, bases)

    provisional = torch.full((rows, k), -1, dtype=rng.choice([torch.int32, torch.int64]))
    for row, length in enumerate(lengths.clamp(0, width).tolist()):
        # The other end of each tie, in any order and place, between indices that do not count.
        values = scores[row, :length].float().flip(0)
        order = values.masked_fill(values.isnan(), -float("inf")).sort(descending=True, stable=True)
        winners = length - 1 - order.indices[:k]
        places = torch.randperm(k, generator=generator)
        provisional[row] = rng.choice([-1, -5, length, 2**31 - 1])
        provisional[row, places[: len(winners)]] = winners.to(provisional.dtype)
    if provisional.dtype == torch.int64:
        provisional[provisional == -5] = 2**32  # whose low half would be an index

    chunks, parts = 2 * max(1, -(-(width + vector - 1) // (2 * chunk))), rng.randint(1, 3)
    leasts = torch.full((rows, 8, 2), -1, dtype=torch.int32)
    classes = torch.full((rows, chunks * chunk // 16), -1, dtype=torch.int32)
    counts = torch.full((rows, chunks), -1, dtype=torch.int32)
    out = torch.full((rows, k), 0x5EED, dtype=torch.int32)
    step = provisional.element_size() // 4
    settle.settle_pivot_kernel[rows, parts](
        *(scores, lengths, provisional.view(torch.int32), leasts, width, row_stride, k, -(-k // parts), step),
        BLOCK=16,
    )
    settle.settle_classify_kernel[(rows * chunks,)](
        *(scores, lengths, leasts, classes, counts),
        *(width, row_stride, start % vector, parts, chunks),
        VECTOR=vector,
        CHUNK=chunk,
    )
    settle.settle_emit_kernel[(rows * chunks // 2,)](
        *(lengths, bases, leasts, classes, counts, out),
        *(width, row_stride, start % vector, k, parts, chunks, 1, vector),
        CHUNK=chunk,
        TILE=2 * chunk,
        BLOCK=8,
    )
    assert torch.equal(out, expected), (out, expected)


# The source of a family's kernels, what tries them, and how often.
FAMILIES: dict[str, tuple[str, Callable[[random.Random, Any], None], int]] = {
    "compaction": ("compaction/pack.py", pack_case, 60),
    "topk": ("topk/settle.py", settle_case, 20),
}

if __name__ == "__main__":
    source, case, cases = FAMILIES[sys.argv[1]]
    module = load(source)
    for seed in range(cases):
        case(random.Random(seed), module)
    print(f"{cases} cases agree")
