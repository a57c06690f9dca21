"""The ops from NumPy, CuPy and JAX: arrays become tensors and back through DLPack, without copies.

``python examples/other_frameworks.py`` evicts tokens from a cache that NumPy owns, and selects from scores that JAX
and, on a GPU, CuPy own where they are installed.
"""

from __future__ import annotations

import importlib.util

import kvc
import numpy as np
import torch


def evict_from_numpy() -> None:
    rng = np.random.default_rng(0)
    requests, tokens_per_page, length, budget = 2, 16, 100, 64
    pages = -(-length // tokens_per_page)
    pool = rng.standard_normal(
        (requests * pages, 2, 4, tokens_per_page, 64), dtype=np.float32
    )  # K and V, 4 heads
    table = np.arange(requests * pages, dtype=np.int32).reshape(requests, pages)
    scores = rng.standard_normal((requests, length), dtype=np.float32)
    lengths = np.full(requests, length, dtype=np.int32)

    kept = kvc.radix_topk(torch.from_dlpack(scores), torch.from_dlpack(lengths), budget)
    offsets = torch.arange(requests + 1, dtype=torch.int32) * budget
    sources, _ = kvc.pack_move_sources(
        kept.unsqueeze(1), torch.from_dlpack(lengths), offsets, None, 0, 1, 4, requests * budget, 0
    )
    before = pool.copy()
    bases = torch.zeros(requests, dtype=torch.int32)
    kvc.compact_pages_([torch.from_dlpack(pool)], torch.from_dlpack(table), sources, offsets, bases)
    for r in range(requests):  # the array itself has changed
        for to, token in enumerate(np.from_dlpack(kept)[r]):
            old = before[table[r, token // tokens_per_page], :, :, token % tokens_per_page]
            new = pool[table[r, to // tokens_per_page], :, :, to % tokens_per_page]
            assert np.array_equal(old, new)
    print(f"NumPy: {budget} of {length} tokens of {requests} requests kept, in the array they lay in")


def select_from_jax() -> None:
    import jax
    import jax.numpy as jnp

    scores = jax.random.normal(jax.random.key(0), (8, 1000))
    lengths = jnp.full(8, 1000, dtype=jnp.int32)
    kept = kvc.radix_topk(torch.from_dlpack(scores), torch.from_dlpack(lengths), 10)
    back = jnp.from_dlpack(kept)  # JAX arrays are immutable, so only functional ops take them
    assert (jnp.sort(jax.lax.top_k(scores, 10)[1], axis=1) == back).all()
    print(
        f"JAX: selected {back.shape[1]} of {scores.shape[1]} scores on {kept.device}, as jax.lax.top_k does"
    )


def select_from_cupy() -> None:
    import cupy

    scores = cupy.asarray(np.random.default_rng(0).standard_normal((8, 1000), dtype=np.float32))
    lengths = cupy.full(8, 1000, dtype=cupy.int32)
    kept = cupy.from_dlpack(kvc.radix_topk(torch.from_dlpack(scores), torch.from_dlpack(lengths), 10))
    assert (cupy.sort(cupy.argsort(-scores, axis=1)[:, :10], axis=1) == kept).all()
    print(f"CuPy: selected {kept.shape[1]} of {scores.shape[1]} scores, as cupy.argsort does")


if __name__ == "__main__":
    evict_from_numpy()
    for name, module, select, here in (
        ("JAX", "jax", select_from_jax, True),
        ("CuPy", "cupy", select_from_cupy, torch.cuda.is_available()),
    ):
        if here and importlib.util.find_spec(module) is not None:
            select()
        else:
            print(f"{name}: not installed" if here else f"{name}: no GPU")
