"""Runs kernels/compaction/pack.py under Triton's interpreter (TRITON_INTERPRET=1) against the reference.

A process of its own: the variable must be set before Triton is imported. It shows the index logic, with
programs one after another; it is no proof of a GPU run.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path
from typing import Any

import torch
from kvc.reference import compaction as reference
from triton.runtime import interpreter  # type: ignore[import-untyped]

CASES = 60

# The interpreter's scalars are arrays of one element, which recent NumPy does not turn into an index by
# itself.
_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_with_index


def load() -> Any:
    path = Path(__file__).parents[1] / "kernels" / "compaction" / "pack.py"
    spec = importlib.util.spec_from_file_location("kvc_pack", path)
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


def case(rng: random.Random, pack: Any) -> None:
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
        reference.pack_move_sources(kept, lengths, first, side, window, layers, heads, total, side_total),
    )

    filled = outputs((rows, total), (rows, total), (heads, side_total))
    pack.pack_fill_moves_kernel[requests + clearing, grid_rows](
        *(kept, lengths, bases, first, side, *filled),
        *(requests, decision_rows, count, rows, total, heads, side_total),
        BLOCK=16,
        COUNT=16,
    )
    agree(
        filled, reference.pack_fill_moves(kept, lengths, bases, first, side, layers, heads, total, side_total)
    )


if __name__ == "__main__":
    module = load()
    for seed in range(CASES):
        case(random.Random(seed), module)
    print(f"{CASES} cases agree")
