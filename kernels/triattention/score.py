"""The scorer on tensor cores: keys in, one normalised score per token, layer and KV head out, nothing else in memory.

A cluster of blocks owns one (request, layer, KV head). Its warps walk tiles of tokens. A thread loads up to 16 bytes of
K[t, f...] and of K[t, f + F...] straight into the registers where ``mma.m16n8k16`` wants its A operand (permuting f
changes no sum, so the coefficients simply follow), and makes the magnitudes there. B, the coefficients, stays in
registers: column 2h is the high part and column 2h + 1 the low part of query head h, so that two accumulators of a
thread add up to one score. Scores wait in shared memory until the range's mean and deviation are known; then each
token's maximum over the group leaves. Rows of an operand do not mix, so a score depends on its key, not on its place.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr, select_
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx

WARPS = 4
KEYS = "ld.global.nc.L1::no_allocate.L2::128B"  # a load takes half a line: the hint spares L2 and HBM the second visit
HEADER = 1024  # bytes of shared memory before the scores
NORMALS, TOTAL, PARTIAL = (
    0,
    64,
    160,
)  # in it: mean and reciprocal deviation; moments of the block; of its warps
MOMENTS = 12  # bytes: count, mean, squared deviations
BELOW_ALL = float("-inf")
DOWN, UP = 2.0**-40, 2.0**40  # deviations are scaled down before they are squared: room for scores up to 1e31
EPSILON, LARGEST = 1e-6, 1e37  # of a deviation: its reciprocal is a normal number
MOST_NEGATIVE = -0x7FFFFFFF


def load(address, words, kind=Uint32, instruction="ld.global.nc"):
    """Loads neighbouring 32-bit (or 64-bit) values, as a list."""
    names = ", ".join(f"{{$w{i}}}" for i in range(words))
    vector, target = (f".v{words}", f"{{{names}}}") if words > 1 else ("", names)
    suffix = {Uint32: "b32", Float32: "f32", Int32: "s32", Int64: "s64"}[kind]
    loaded = inline_ptx(
        f"{instruction}{vector}.{suffix} {target}, [{{$r0}}];",
        write_only_types=[kind] * words,
        read_only_args=[address],
    )
    return list(loaded) if words > 1 else [loaded]


def store(address, value, predicate=None):
    inline_ptx("st.f32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=predicate)


def bits(value):
    return Uint32(llvm.bitcast(Uint32.mlir_type, value.ir_value()))


def from_bits(value):
    return Float32(llvm.bitcast(Float32.mlir_type, value.ir_value()))


def absolute(value):
    return from_bits(bits(value) & 0x7FFFFFFF)


def finite(value):
    return (bits(value) & 0x7FFFFFFF) < Uint32(0x7F800000)


def choose(condition, one, other):
    return type(one)(select_(condition, one, other))


def fma(a, b, c):
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def split(kind, low, high, second):
    """Of two floats the nearest pair of 16-bit numbers or, if ``second``, the pair nearest to what those leave."""
    whole = {
        "bf16": "shl.b32 l, p, 16; and.b32 h, p, 0xffff0000;",
        "f16": ".reg .b16 a, b; mov.b32 {a, b}, p; cvt.f32.f16 l, a; cvt.f32.f16 h, b;",
    }[kind]
    return inline_ptx(
        "{.reg .pred second; .reg .b32 p, l, h, rest;"
        f"cvt.rn.{kind}x2.f32 p, {{$r1}}, {{$r0}}; {whole}"
        "sub.f32 l, {$r0}, l; sub.f32 h, {$r1}, h;"
        f"cvt.rn.{kind}x2.f32 rest, h, l;"
        "setp.ne.s32 second, {$r2}, 0; selp.b32 {$w0}, rest, p, second;}",
        write_only_types=[Uint32],
        read_only_args=[low, high, second],
    )


def magnitudes(kind, real, imaginary):
    """Magnitudes of two complex numbers as two bf16 pairs: the leading bits, and the rest."""
    unpack = {
        "bf16": "shl.b32 {0}0, {1}, 16; and.b32 {0}1, {1}, 0xffff0000;",
        "f16": "mov.b32 {{a, b}}, {1}; cvt.f32.f16 {0}0, a; cvt.f32.f16 {0}1, b;",
    }[kind]
    root = "mul.f32 x{0}, x{0}, x{0}; fma.rn.f32 x{0}, y{0}, y{0}, x{0}; sqrt.approx.ftz.f32 x{0}, x{0};"
    return inline_ptx(
        "{.reg .b16 a, b; .reg .b32 x0, x1, y0, y1;"
        + unpack.format("x", "{$r0}")
        + unpack.format("y", "{$r1}")
        + root.format(0)
        + root.format(1)
        + "prmt.b32 {$w0}, x0, x1, 0x7632;"
        "and.b32 y0, x0, 0xffff0000; and.b32 y1, x1, 0xffff0000; sub.f32 x0, x0, y0; sub.f32 x1, x1, y1;"
        "cvt.rn.bf16x2.f32 {$w1}, x1, x0;}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[real, imaginary],
    )


def e4m3_to_f16(word):
    return inline_ptx(
        "{.reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b;}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


def mma(kind, acc, a, b):
    return list(
        inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )


def atomic_max(address, value):
    """Exact, so in any order the same. Of negative numbers the largest has the smallest bits."""
    negative = Int32(bits(value)) < 0
    for operation, when in (("max.s32", ~negative), ("min.u32", negative)):
        inline_ptx(
            f"red.global.{operation} [{{$r0}}], {{$r1}};",
            read_only_args=[address, bits(value)],
            predicate=when,
        )


def merge(one, other):
    """Moments of two samples together. Equal means stay to the bit, and an empty sample changes nothing."""
    (n, mean, squares), (other_n, other_mean, other_squares) = one, other
    total = n + other_n
    weight = other_n / cutlass.max(total, Float32(1))
    step = other_mean - mean
    return total, mean + step * weight, squares + other_squares + (step * DOWN * weight) * (step * DOWN * n)


def least_blocks(head_dim: int, heads: int) -> int:
    """Blocks on a multiprocessor, which score_cute.cu counts on: coefficients and keys take registers."""
    return 2 if head_dim > 128 else 3 if heads > 4 else 4


class Scorer:
    """A kernel for one head size, one key type ("bf16", "fp16" or "e4m3") and 4 or 8 query heads at a time."""

    def __init__(self, head_dim: int, key: str, heads: int) -> None:
        self.freqs = head_dim // 2
        self.key = key
        self.kind = "bf16" if key == "bf16" else "f16"  # e4m3 is converted, exactly
        self.key_bytes = 1 if key == "e4m3" else 2
        self.row_bytes = head_dim * self.key_bytes
        self.heads = heads
        self.quads = heads // 4  # B has eight columns, for four heads
        self.warps = WARPS
        self.threads = 32 * self.warps
        self.least_blocks = least_blocks(head_dim, heads)
        self.blocks = max(1, 256 // self.row_bytes)  # of 16 tokens in a tile: about 32 registers of keys
        self.rows = 2 * self.blocks  # of a tile that a thread holds a part of
        self.tile = 16 * self.blocks
        self.lane_rows = max(1, self.tile // 32)  # of a tile that a lane finds the address of
        # The bands come in chunks; a thread takes a quarter of each, in as few loads as possible.
        self.chunks: list[tuple[int, int]] = []  # first band, bands of a thread
        start = 0
        while start < self.freqs:
            each = next(e for e in (16, 8, 4) if e * self.key_bytes <= 16 and start + 4 * e <= self.freqs)
            self.chunks.append((start, each))
            start += 4 * each
        self.words = [
            each * self.key_bytes // 4 for _, each in self.chunks
        ]  # registers of a chunk of half a row
        self.row_words = 2 * sum(self.words)

    @cute.jit
    def __call__(
        self,
        pools: Int64,
        page_table: Int64,
        page_row: Int64,
        prompt: Int64,
        source: Int64,
        mean_cos: Int64,
        mean_sin: Int64,
        q_real: Int64,
        q_imag: Int64,
        q_excess: Int64,
        freq_scale: Int64,
        out: Int64,
        out_request: Int64,
        out_row: Int64,
        out_column: Int64,
        spill: Int64,
        layers: Int32,
        kv_heads: Int32,
        group: Int32,
        tokens_per_page: Int32,
        factor: Uint32,
        shift: Int32,
        limit: Int32,
        width: Int32,
        capacity: Int32,
        near: Int32,
        normalize: Int32,
        union: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            pools, page_table, page_row, prompt, source, mean_cos, mean_sin, q_real, q_imag, q_excess, freq_scale, out,
            out_request, out_row, out_column, spill, layers, kv_heads, group, tokens_per_page, factor, shift, limit,
            width, capacity, near, normalize, union,
        ).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=HEADER,
            stream=stream,
            min_blocks_per_mp=self.least_blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip

    def coefficients(self, statistics, phases, freq_scale, present, quad_lane, second):
        """B for one column: per 16 bands a pair of registers each for real part, imaginary part and magnitude.

        With fp16 keys also the power of two to multiply sums by.
        """
        a, b, c = [], [], []
        for start, each in self.chunks:
            for i in range(0, each, 4):
                at = Int64(4) * (start + quad_lane * each + i)
                re, im, excess, cos, sin, scale = (
                    load(base + at, 4, Float32) for base in (*statistics, *phases, freq_scale)
                )
                for j in range(4):
                    fs = choose(present, scale[j], Float32(0))
                    a.append(fs * (re[j] * cos[j] - im[j] * sin[j]))
                    b.append(fs * (re[j] * sin[j] + im[j] * cos[j]))
                    c.append(fs * excess[j])
        unscale = None
        if self.kind == "f16":
            # fp16 has few exponents: a power of two per head brings its largest coefficient to 2^13 ... 2^14.
            largest = Float32(0)
            for value in a + b + c:
                largest = cutlass.max(largest, absolute(value))
            for offset in (1, 2):
                largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset))
            exponent = cutlass.max(cutlass.min(267 - Int32(bits(largest) >> 23), Int32(253)), Int32(1))
            scale = from_bits(Uint32(exponent) << 23)
            unscale = from_bits(Uint32(254 - exponent) << 23)
            a, b, c = ([value * scale for value in values] for values in (a, b, c))
        pairs = [
            [
                [split(kind, values[i], values[i + 1], second) for i in (k, k + 2)]
                for kind, values in ((self.kind, a), (self.kind, b), ("bf16", c))
            ]
            for k in range(0, len(a), 4)
        ]
        return pairs, unscale

    def locate(self, local, piece):
        """The page of a token of this block's slice, and its place there; past the last token, the last one's."""
        count, kept, kept_at, rest_at, first, table, factor, shift, tokens_per_page = piece
        local = cutlass.max(cutlass.min(local, count - 1), Int32(0))
        token = first + local + choose(local < kept, kept_at, rest_at)
        entry = inline_ptx(
            "{.reg .u64 p; mul.wide.u32 p, {$r0}, {$r1}; shr.u64 p, p, {$r2}; cvt.u32.u64 {$w0}, p;}",
            write_only_types=[Int32],
            read_only_args=[token, factor, shift],
        )
        page = inline_ptx(
            "{.reg .pred some; setp.gt.s32 some, {$r1}, 0; mov.s32 {$w0}, -1; @some ld.global.nc.s32 {$w0}, [{$r0}];}",
            write_only_types=[Int32],
            read_only_args=[table + Int64(entry) * 4, count],
        )
        return page, token - entry * tokens_per_page

    def key_address(self, pool, page, offset):
        """Of a key, plus 1 if its page is good. A bad page reads page 0: it exists, and what it says is thrown away."""
        keys_at, page_stride, token_stride, pages = pool
        good = Uint32(page) < Uint32(pages)
        page = choose(good, page, Int32(0))
        return keys_at + Int64(page) * page_stride + Int64(offset) * token_stride + Int64(Int32(good))

    def address_of(self, addresses, row, group_lane):
        """Lanes find the addresses of rows in order, and load from the row that their accumulators stand for."""
        return cute.arch.shuffle_sync(addresses[8 * row // 32], 8 * row % 32 + group_lane)

    def score_address(self, scores, local):
        in_shared, far, near = scores
        return choose(local < near, in_shared, far) + Int64(local) * (4 * self.heads)

    def load_chunk(self, keys, row, chunk, address, quad_lane):
        first, each = self.chunks[chunk]
        at = address + (first * self.key_bytes + quad_lane * (each * self.key_bytes))
        words = self.words[chunk]
        base = row * self.row_words + 2 * sum(self.words[:chunk])
        for half in (0, 1):
            loaded = load(at + half * self.freqs * self.key_bytes, words, Uint32, KEYS)
            for i in range(words):
                keys[base + half * words + i] = loaded[i]

    def pairs_of(self, keys, row, chunk, half):
        words = self.words[chunk]
        base = row * self.row_words + 2 * sum(self.words[:chunk]) + half * words
        loaded = [keys[base + i] for i in range(words)]
        return [pair for word in loaded for pair in e4m3_to_f16(word)] if self.key == "e4m3" else loaded

    def multiply(self, keys, block, chunk, coefficients, plain, magnitude):
        """Adds one chunk of 16 tokens to the accumulators of every quad of heads."""
        real, imaginary = (
            [self.pairs_of(keys, 2 * block + row, chunk, half) for row in (0, 1)] for half in (0, 1)
        )
        step = sum(each for _, each in self.chunks[:chunk]) // 4
        for k in range(self.chunks[chunk][1] // 4):
            places = [(row, i) for i in (2 * k, 2 * k + 1) for row in (0, 1)]
            re = [real[row][i] for row, i in places]
            im = [imaginary[row][i] for row, i in places]
            high, low = zip(*(magnitudes(self.kind, x, y) for x, y in zip(re, im, strict=True)), strict=True)
            for quad in range(self.quads):
                a, b, c = coefficients[quad][step + k]
                plain[quad] = mma(self.kind, plain[quad], re, a)
                plain[quad] = mma(self.kind, plain[quad], im, b)
                magnitude[quad] = mma("bf16", magnitude[quad], high, c)
                magnitude[quad] = mma("bf16", magnitude[quad], low, c)

    @cute.jit
    def carefully(self, row, statistics, phases, freq_scale):
        """One score of one bf16 row by one thread, whose magnitudes do not overflow before the sum does."""
        total = Float32(0)
        for f in cutlass.range(self.freqs, unroll=1):
            x, y = (
                inline_ptx(
                    "{.reg .b16 k, z; ld.global.nc.b16 k, [{$r0}]; mov.b16 z, 0; mov.b32 {$w0}, {z, k};}",
                    write_only_types=[Float32],
                    read_only_args=[row + Int64(2) * (f + half * self.freqs)],
                )
                for half in (0, 1)
            )
            re, im, excess, cos, sin, fs = (
                load(base + Int64(f) * 4, 1, Float32)[0] for base in (*statistics, *phases, freq_scale)
            )
            larger = cutlass.max(absolute(x), absolute(y))
            ratio = cutlass.min(absolute(x), absolute(y)) / cutlass.max(larger, Float32(1e-30))
            magnitude = larger * cute.math.sqrt(Float32(1) + ratio * ratio)
            total += fs * (re * cos - im * sin) * x + fs * (re * sin + im * cos) * y + fs * excess * magnitude
        return total

    def read_moments(self, address):
        return tuple(load(address + 4 * i, 1, Float32, "ld")[0] for i in range(3))

    @cute.jit
    def share_moments(self, header, moments, warp, lane):
        """The warps' moments in shared memory, from the threads' counts, first scores and sums of what they leave."""
        for quad in range_constexpr(self.quads):
            n, initial, total, squares = (moments[4 * quad + i] for i in range(4))
            share = total / cutlass.max(n, Float32(1))
            mean = choose(n == Float32(0), Float32(0), initial + share * UP)
            sample = (n, mean, cutlass.max(squares - total * share, Float32(0)))
            for step in range_constexpr(3):
                sample = merge(
                    sample, tuple(cute.arch.shuffle_sync_bfly(value, 4 << step) for value in sample)
                )
            at = header + (PARTIAL + MOMENTS * (warp * self.heads + 4 * quad + lane % 4))
            for i in range_constexpr(3):
                store(at + 4 * i, sample[i], lane < 4)

    @cute.jit
    def find_normals(self, header, thread, ranks, heads_left, normalize):
        """Mean and reciprocal deviation of each head in shared memory, the same in every block of the cluster."""
        cute.arch.sync_threads()
        if normalize != 0:
            if thread < self.heads:
                sample = self.read_moments(header + (PARTIAL + MOMENTS * thread))
                for warp in range_constexpr(1, self.warps):
                    at = header + (PARTIAL + MOMENTS * (warp * self.heads + thread))
                    sample = merge(sample, self.read_moments(at))
                for i in range_constexpr(3):
                    store(header + (TOTAL + MOMENTS * thread + 4 * i), sample[i])
            if ranks > 1:
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
        if thread < self.heads:
            mean = Float32(0)
            reciprocal = Float32(1)
            if normalize != 0:
                n = Float32(0)
                squares = Float32(0)
                for peer in cutlass.range(ranks, unroll=1):
                    at = inline_ptx(
                        "mapa.u64 {$w0}, {$r0}, {$r1};",
                        write_only_types=[Int64],
                        read_only_args=[header + (TOTAL + MOMENTS * thread), peer],
                    )
                    n, mean, squares = merge((n, mean, squares), self.read_moments(at))
                deviation = cute.math.sqrt(squares / cutlass.max(n, Float32(1))) * UP
                deviation = cutlass.min(cutlass.max(deviation, Float32(EPSILON)), Float32(LARGEST))
                reciprocal = Float32(1) / deviation
            # A column without a head loses against every other.
            mean = choose(thread < heads_left, mean, Float32(float("inf")))
            store(header + (NORMALS + 4 * thread), mean)
            store(header + (NORMALS + 4 * self.heads + 4 * thread), reciprocal)
        cute.arch.sync_threads()

    @cute.jit
    def write(self, header, scores, thread, stored, target, column, union, again):
        """Each kept token's largest normalised score."""
        means, reciprocals = (
            [
                value
                for quad in range(self.quads)
                for value in load(header + (NORMALS + 4 * self.heads * half + 16 * quad), 4, Float32, "ld")
            ]
            for half in (0, 1)
        )
        for local in cutlass.range(thread, stored, self.threads, unroll=1):
            best = Float32(BELOW_ALL)
            for quad in range_constexpr(self.quads):
                values = load(self.score_address(scores, local) + 16 * quad, 4, Float32, "ld")
                for i in range_constexpr(4):
                    best = cutlass.max(best, (values[i] - means[4 * quad + i]) * reciprocals[4 * quad + i])
            at = target + Int64(local) * column
            if union != 0:
                atomic_max(at, best)
            else:
                if again:
                    best = cutlass.max(best, load(at, 1, Float32, "ld.global")[0])
                store(at, best)

    @cute.kernel
    def kernel(
        self,
        pools: Int64,  # per layer: address; stride of page, head and token in bytes; pages
        page_table: Int64,
        page_row: Int64,  # strides are in bytes
        prompt: Int64,
        source: Int64,
        mean_cos: Int64,
        mean_sin: Int64,
        q_real: Int64,
        q_imag: Int64,
        q_excess: Int64,
        freq_scale: Int64,
        out: Int64,
        out_request: Int64,
        out_row: Int64,
        out_column: Int64,
        spill: Int64,  # room for the scores that shared memory has none for
        layers: Int32,
        kv_heads: Int32,
        group: Int32,
        tokens_per_page: Int32,
        factor: Uint32,  # t / tokens_per_page is t * factor >> shift
        shift: Int32,
        limit: Int32,  # tokens that the page table names
        width: Int32,
        capacity: Int32,  # tokens whose scores a block keeps, a multiple of the tile
        near: Int32,  # of them in shared memory
        normalize: Int32,
        union: Int32,  # into one row by atomic maxima; the row is -inf beforehand
    ):
        tile, heads = self.tile, self.heads
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank, ranks = cute.arch.block_idx_in_cluster(), cute.arch.cluster_size()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        group_lane, quad_lane = lane // 4, lane % 4
        unit = block // ranks
        kv_head = unit % kv_heads
        layer = unit // kv_heads % layers
        request = unit // kv_heads // layers

        prompt_at = cutlass.max(load(prompt + Int64(request) * 4, 1, Int32)[0], Int32(MOST_NEGATIVE))
        last = cutlass.max(load(source + Int64(request) * 4, 1, Int32)[0], Int32(0))
        first = cutlass.max(prompt_at, Int32(0))
        skew = first - prompt_at  # columns before the first token's
        tokens = cutlass.max(cutlass.min(last, limit) - first, Int32(0))

        # A block takes a slice of the tokens whose scores are kept, and one of the rest, which only counts in moments.
        tiles = tokens // tile + Int32(tokens % tile > 0)
        kept = cutlass.min((tiles + ranks - 1) // ranks * tile, capacity)
        rest = cutlass.max(tokens - kept * ranks, Int32(0)) * normalize
        rest_tiles = rest // tile + Int32(rest % tile > 0)
        share = (rest_tiles + ranks - 1) // ranks * tile
        stored = cutlass.max(cutlass.min(tokens - rank * kept, kept), Int32(0))
        count = stored + cutlass.max(cutlass.min(rest - rank * share, share), Int32(0))
        count_tiles = count // tile + Int32(count % tile > 0)
        kept_at, rest_at = rank * kept, ranks * kept + rank * share - kept
        table = page_table + Int64(request) * page_row
        piece = (count, kept, kept_at, rest_at, first, table, factor, shift, tokens_per_page)

        layer_at = pools + Int64(layer) * 40
        address, page_stride, head_stride, token_stride, pages = (
            load(layer_at + 8 * i, 1, Int64)[0] for i in range(5)
        )
        pool = (address + Int64(kv_head) * head_stride, page_stride, token_stride, Int32(pages))
        phase_at = Int64(request) * (4 * self.freqs)
        phases = (mean_cos + phase_at, mean_sin + phase_at)
        kv_row = Int64(layer) * kv_heads + kv_head

        header = inline_ptx(
            "{.reg .u64 s; cvt.u64.u32 s, {$r0}; cvta.shared.u64 {$w0}, s;}",
            write_only_types=[Int64],
            read_only_args=[cute.arch.get_dyn_smem(Float32, 16).toint()],
        )
        far = spill + (Int64(block) * (capacity - near) - near) * (4 * heads)
        scores = (header + HEADER, far, near)
        row_out = out + Int64(request) * out_request + kv_row * out_row

        keys = cute.make_rmem_tensor((self.rows * self.row_words,), Uint32)
        next_at = cute.make_rmem_tensor((self.lane_rows,), Int64)
        next_page = cute.make_rmem_tensor((self.lane_rows,), Int32)
        next_offset = cute.make_rmem_tensor((self.lane_rows,), Int32)
        usable = cute.make_rmem_tensor((self.rows,), Int32)
        results = cute.make_rmem_tensor((2 * self.quads,), Float32)
        moments = cute.make_rmem_tensor(
            (4 * self.quads,), Float32
        )  # count, first score, sums of what it leaves

        for head_block in cutlass.range((group + heads - 1) // heads, unroll=1):
            # The first keys are on their way while the coefficients are made.
            starts = []
            for slot in range_constexpr(self.lane_rows):
                lane_row = 32 * slot + lane % tile
                page, offset = self.locate(warp * tile + lane_row, piece)
                starts.append(self.key_address(pool, page, offset))
                page, offset = self.locate((warp + self.warps) * tile + lane_row, piece)
                next_page[slot], next_offset[slot] = page, offset
            for row in range_constexpr(self.rows):
                at = self.address_of(starts, row, group_lane)
                usable[row] = Int32(at & 1)
                for chunk in range_constexpr(len(self.chunks)):
                    self.load_chunk(keys, row, chunk, at & -16, quad_lane)

            coefficients, unscales = [], []
            for quad in range_constexpr(self.quads):
                head = head_block * heads + 4 * quad + group_lane // 2
                skip = (kv_row * group + cutlass.min(head, group - 1)) * (4 * self.freqs)
                pairs, unscale = self.coefficients(
                    (q_real + skip, q_imag + skip, q_excess + skip),
                    phases,
                    freq_scale,
                    head < group,
                    quad_lane,
                    group_lane % 2,
                )
                coefficients.append(pairs)
                # Coefficients belong to the head of column `group_lane`, accumulators to head `quad_lane`.
                unscales.append(None if unscale is None else cute.arch.shuffle_sync(unscale, 8 * quad_lane))
                for i in range_constexpr(4):
                    moments[4 * quad + i] = Float32(0)

            for at_tile in cutlass.range(warp, count_tiles, self.warps, unroll=1):
                addresses, next_usable = [], []
                for slot in range_constexpr(self.lane_rows):
                    next_at[slot] = self.key_address(pool, next_page[slot], next_offset[slot])
                    page, offset = self.locate(
                        (at_tile + 2 * self.warps) * tile + 32 * slot + lane % tile, piece
                    )
                    next_page[slot], next_offset[slot] = page, offset
                for row in range_constexpr(self.rows):
                    at = self.address_of(next_at, row, group_lane)
                    next_usable.append(Int32(at & 1))
                    addresses.append(at & -16)
                for sub in range_constexpr(self.blocks):
                    plain = [[Float32(0)] * 4 for _ in range(self.quads)]
                    magnitude = [[Float32(0)] * 4 for _ in range(self.quads)]
                    for chunk in range_constexpr(len(self.chunks)):
                        self.multiply(keys, sub, chunk, coefficients, plain, magnitude)
                        for row in range_constexpr(2 * sub, 2 * sub + 2):
                            self.load_chunk(keys, row, chunk, addresses[row], quad_lane)
                    overflow = Boolean(False)
                    for half in range_constexpr(2):
                        local = at_tile * tile + 8 * (2 * sub + half) + group_lane
                        present = Boolean(usable[2 * sub + half] != 0) & (local < count)
                        for quad in range_constexpr(self.quads):
                            score = (plain[quad][2 * half] + plain[quad][2 * half + 1]) + (
                                magnitude[quad][2 * half] + magnitude[quad][2 * half + 1]
                            )
                            if const_expr(unscales[quad] is not None):
                                score = score * unscales[quad]
                            results[2 * quad + half] = score
                            overflow = overflow | (present & ~finite(score))
                    if const_expr(self.key == "bf16"):  # noqa: SIM102 - it is decided when compiling
                        if cute.arch.vote_any_sync(overflow):
                            # Squares of keys past 1.8e19 overflow: so rare that such rows are simply done again.
                            for half in range_constexpr(2):
                                own_page, own_offset = self.locate(
                                    at_tile * tile + 8 * (2 * sub + half) + group_lane, piece
                                )
                                own_row = self.key_address(pool, own_page, own_offset) & -16
                                for quad in range_constexpr(self.quads):
                                    own_head = kv_row * group + cutlass.min(
                                        head_block * heads + 4 * quad + quad_lane, group - 1
                                    )
                                    own_at = own_head * (4 * self.freqs)
                                    again = self.carefully(
                                        own_row,
                                        (q_real + own_at, q_imag + own_at, q_excess + own_at),
                                        phases,
                                        freq_scale,
                                    )
                                    if ~finite(results[2 * quad + half]):
                                        results[2 * quad + half] = again
                    for half in range_constexpr(2):
                        local = at_tile * tile + 8 * (2 * sub + half) + group_lane
                        present = Boolean(usable[2 * sub + half] != 0) & (local < count)
                        for quad in range_constexpr(self.quads):
                            counted = present & finite(results[2 * quad + half])
                            score = choose(counted, results[2 * quad + half], Float32(BELOW_ALL))
                            at = self.score_address(scores, local) + (4 * quad + quad_lane) * 4
                            store(at, score, local < stored)
                            n, initial, total, squares = (moments[4 * quad + i] for i in range(4))
                            initial = choose(n == Float32(0), score, initial)
                            difference = choose(counted, (score - initial) * DOWN, Float32(0))
                            moments[4 * quad] = n + choose(counted, Float32(1), Float32(0))
                            moments[4 * quad + 1] = initial
                            moments[4 * quad + 2] = total + difference
                            moments[4 * quad + 3] = fma(difference, difference, squares)
                for row in range_constexpr(self.rows):
                    usable[row] = next_usable[row]

            if normalize != 0:
                self.share_moments(header, moments, warp, lane)
            self.find_normals(header, thread, ranks, group - head_block * heads, normalize)
            self.write(
                header,
                scores,
                thread,
                cutlass.min(stored, width - skew - kept_at),
                row_out + (Int64(skew) + kept_at) * out_column,
                out_column,
                union,
                head_block > 0,
            )
            if (union == 0) & (head_block == 0):
                for column in cutlass.range(
                    rank * self.threads + thread, width, ranks * self.threads, unroll=1
                ):
                    if (column < skew) | (column - skew >= tokens):
                        store(row_out + Int64(column) * out_column, Float32(BELOW_ALL))
            if (normalize != 0) & (ranks > 1):  # the others read this block's moments
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
            cute.arch.sync_threads()


def kernels() -> dict[str, tuple[Scorer, list[Any]]]:
    arguments = [*[Int64(1)] * 16, *[Int32(1)] * 4, Uint32(1), *[Int32(1)] * 7, cuda.CUstream(0)]
    return {
        f"triattention_score_{key}_{head_dim}_{heads}": (Scorer(head_dim, key, heads), arguments)
        for key in ("bf16", "fp16", "e4m3")
        for head_dim in (64, 96, 128, 256)
        for heads in (4, 8)
    }


CUTE = kernels()
