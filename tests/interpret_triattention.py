"""Runs kernels/triattention/triattention.py under Triton's interpreter (TRITON_INTERPRET=1) against the reference.

A process of its own: the variable must be set before Triton is imported. It shows the arithmetic and the index logic,
with programs one after another; it is no proof of a GPU run. What the CUDA kernel `prepare_kernel` computes is
computed here in PyTorch.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from interpret import ints, load
from kvc.reference import triattention as reference
from torch import Tensor

CASES = 16
KEYS = {
    torch.bfloat16: ("bf16", 8),
    torch.float16: ("fp16", 8),
    torch.float32: ("fp32", 4),
    torch.float8_e4m3fn: ("e4m3", 16),
}


def plan(prompts: Tensor, sources: Tensor, tokens: int, length: int, spare: int) -> tuple[Tensor, Tensor]:
    """Pieces of `length` tokens and the first piece of each request, as prepare_kernel lays them out."""
    pieces, firsts = [], [0]
    for r, (prompt, source) in enumerate(zip(prompts.tolist(), sources.tolist(), strict=True)):
        first, last = max(prompt, 0), min(source, tokens)
        base = first // 128 * 128
        if last > first:
            for begin in range(base, last, length):
                pieces.append([r, max(begin, first), min(begin + length, last), base])
        firsts.append(len(pieces))
    return ints(pieces + [[-1, 0, 0, 0]] * spare), ints(firsts)


def score(
    kernels: Any, rng: random.Random, pools: list[Tensor], table: Tensor, arguments: list[Any], aligned: bool
) -> Tensor:
    prompts, sources, cos, sin, q_re, q_im, q_excess, scale, mode, normalize, width = arguments
    normalize = normalize or mode == "union"
    requests, layers = len(table), len(pools)
    _, kv_heads, slots, head_dim = pools[0].shape
    q_heads, bands = q_re.shape[1], head_dim // 2
    tokens = table.shape[1] * slots
    pieces, firsts = plan(prompts, sources, tokens, rng.choice([128, 256]), rng.randint(1, 3))
    pool_table = torch.tensor([[p.data_ptr(), len(p), *p.stride()[:3]] for p in pools])
    real, imag = (torch.einsum("...f,rf->r...f", q, c) for q, c in ((q_re, cos), (q_im, sin)))
    swapped = torch.einsum("lhf,rf->rlhf", q_re, sin) + torch.einsum("lhf,rf->rlhf", q_im, cos)
    excess = q_excess.expand_as(swapped)
    coefficients = (torch.stack((real - imag, swapped, excess), 3) * scale).contiguous()
    rows = layers * (q_heads if normalize else kv_heads)
    columns = -(-(min(width, tokens) + 127) // 128) * 128
    scores = torch.full((requests, rows, columns), float("nan"))
    moments = torch.full((len(pieces), 3, rows), float("nan"))
    normals = torch.full((requests, 2, rows), float("nan"))
    name, vector = KEYS[pools[0].dtype]
    two_parts = 16 < bands <= 32
    kernels.score_kernel[(len(pieces) * layers * kv_heads,)](
        *(pool_table, pieces, coefficients, table, prompts, scores, moments, table.stride(0), columns),
        *(layers, kv_heads, q_heads // kv_heads, bands, slots, width, int(normalize)),
        KEY=name,
        VECTOR=vector if aligned else 1,
        BLOCK_T=16,
        BLOCK_F=16 if two_parts else max(16, 1 << (bands - 1).bit_length()),
        PARTS=1 + two_parts,
        BLOCK_H=4,
        STAGES=1,
    )
    if normalize:
        blocks = -(-rows // 8)
        kernels.moments_kernel[(requests * blocks,)](
            moments, firsts, normals, rows, blocks, BLOCK_P=4, BLOCK_R=8
        )
    out_rows = {"union": 1, "per_head": kv_heads, "per_layer_perhead": layers * kv_heads}[mode]
    out = torch.full((requests, out_rows, width), float("nan"))
    plane_rows = rows // layers
    inner = rows if mode == "union" else plane_rows // kv_heads
    planes = layers if mode == "per_head" else 1
    blocks = -(-(width + 127) // 32)
    kernels.reduce_kernel[(requests * out_rows * blocks,)](
        *(scores, normals, prompts, sources, out, *out.stride(), columns, tokens),
        *(rows, inner, planes, plane_rows, out_rows, width, blocks, int(normalize)),
        BLOCK_R=8,
        BLOCK_C=32,
    )
    return out


def score_case(rng: random.Random, kernels: Any) -> None:
    torch.manual_seed(rng.randrange(1 << 30))
    dtype = rng.choice(list(KEYS))
    aligned = rng.random() < 0.5
    vector = KEYS[dtype][1]
    requests, layers, kv_heads, group = (
        rng.randint(1, 3),
        rng.randint(1, 2),
        rng.randint(1, 2),
        rng.randint(1, 6),
    )
    bands = vector * rng.randint(1, 2) if aligned else rng.randint(1, 10)
    slots = rng.choice([1, 4, 16, 24])
    columns = 160 // slots + 1
    pages = requests * columns + 2
    pools = []
    for layer in range(layers):
        shape = (pages + layer, kv_heads, slots, 2 * bands)
        if rng.random() < 0.5:
            pools.append(torch.randn(shape).to(dtype))
        else:
            pools.append(torch.randn(shape).transpose(1, 2).contiguous().to(dtype).transpose(1, 2))
    table = torch.randperm(pages)[: requests * columns].view(requests, columns).int()
    table[rng.randrange(requests), rng.randrange(columns)] = rng.choice([-1, pages + layers])
    prompts = ints([rng.choice([-3, 0, 5, 37, 150]) for _ in range(requests)])
    sources = ints([rng.choice([0, 33, 150, columns * slots, 10_000]) for _ in range(requests)])
    if rng.random() < 0.5:
        pools[0].view(torch.uint8)[pages // 2] = 0xFF  # NaN in every dtype
    positions, omega = torch.arange(requests) + 9, 0.05 * torch.rand(bands)
    cos, sin = reference.mean_phase(positions, omega, torch.tensor([1, 2, 4]))
    queries = [0.5 * torch.randn(layers, group * kv_heads, bands) for _ in range(3)]
    mode = rng.choice(["union", "per_head", "per_layer_perhead"])
    arguments: list[Any] = [
        prompts,
        sources,
        cos,
        sin,
        *queries,
        torch.rand(bands) + 0.5,
        mode,
        rng.random() < 0.5,
    ]
    arguments.append(rng.choice([1, 40, 160, 200]))
    expected = reference.triattention_score(pools, table, *arguments)
    actual = score(kernels, rng, pools, table, arguments, aligned)
    assert torch.equal(actual == -torch.inf, expected == -torch.inf), (dtype, aligned, arguments)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def phase_case(rng: random.Random, kernels: Any) -> None:
    requests, bands, count = rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 20)
    positions = torch.tensor([rng.choice([0, 9, 70_001, 1 << 24]) for _ in range(requests)])
    positions = positions if rng.random() < 0.5 else positions.int()
    omega = 10_000.0 ** -torch.rand(bands)
    offsets = torch.tensor([rng.choice([0, 1, -7, 65_536, 3_000]) for _ in range(count)])
    outputs = [torch.full((requests, bands), float("nan")) for _ in range(2)]
    blocks = -(-bands // 4)
    strides = [stride for o in outputs for stride in o.stride()]
    kernels.mean_phase_kernel[(requests * blocks,)](
        *(
            positions.view(torch.int32),
            omega,
            offsets,
            *outputs,
            positions.itemsize // 4,
            bands,
            count,
            blocks,
        ),
        *strides,
        BLOCK_O=8,
        BLOCK_F=4,
    )
    for a, e in zip(outputs, reference.mean_phase(positions, omega, offsets), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-6)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of NaN and infinity, which are meant
    module = load("triattention/triattention.py")
    for seed in range(CASES):
        phase_case(random.Random(seed), module)
        score_case(random.Random(seed), module)
    print(f"{CASES} cases agree")
