"""Selection of the k largest of long rows, for sm_90a and sm_100f: ``streaming_select`` of stream.cuh in CuTe DSL.

stream.cuh explains the algorithm; both give the same bytes. A team of blocks (a cluster, or a block alone) reads its
row once through a window of values that a sample of the row suggests, and falls back on exact passes when the counts
show that the sample misled. The kernels are compiled ahead of time and launched by select.cu.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint8, Uint16, Uint32, Uint64
from cutlass.cute import arch
from cutlass.cute.runtime import make_ptr

THREADS = 512
WARPS = THREADS // 32
BINS = 4 * THREADS
STEP = 4  # groups of four scores that a thread takes at a time
SAMPLE = 8  # scores a thread takes as a sample, in two groups of four
PIECE = 4  # groups of a sample that lie together: 64 bytes of fp32
SMALL = 64  # members of a bin that are ranked by comparing all pairs
UNIT = 8  # words of marks that a lane takes at a time
STAGE = 1024  # indices a warp collects before it writes them
LOWEST, HIGHEST = 0x007FFFFF, 0xFF800000  # keys of -inf and +inf
INFINITY = float("inf")
SELECTED, EQUAL = 0x0F0F0F0F, 0xF0F0F0F0
NO_FLAGS = float(1 << 23)

# Shared memory, in bytes: scores of the step at hand (also the sums of histograms, and the indices being written),
# the histogram, control words, marks, the list.
HIST_AT = 16 * STEP * THREADS
CONTROL_AT = HIST_AT + 4 * BINS
MARKS_AT = CONTROL_AT + 1024
# Control words.
ABOVE, COUNTED_EQUAL, INSIDE, SMALL_COUNT, TOTALS, EDGES = 0, 1, 2, 3, 4, 6
BIN, MEMBERS = 10, 16  # what find_bins found: index, above and count of two bins; all members
WARP_A, WARP_B, KEYS, PLACES = 32, 64, 96, 160


def ptx(code: str, result: Any, *arguments: Any) -> Any:
    return arch.inline_ptx(code, write_only_types=[result], read_only_args=list(arguments))


def bits_of(x: Any) -> Any:
    return ptx("mov.b32 {$w0}, {$r0};", Uint32, x)


def score_of_bits(bits: Any) -> Any:
    return ptx("mov.b32 {$w0}, {$r0};", Float32, bits)


def flag(relation: str, a: Any, b: Any) -> Any:
    """1.0 or 0.0 in one instruction."""
    return ptx(f"set.{relation}.f32.f32 {{$w0}}, {{$r0}}, {{$r1}};", Float32, a, b)


def multiply_add(a: Any, b: Any, c: Any, saturate: bool = False) -> Any:
    return ptx(
        f"fma.rn{'.sat' if saturate else ''}.f32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};", Float32, a, b, c
    )


def larger(a: Any, b: Any) -> Any:
    return ptx("max.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def smaller(a: Any, b: Any) -> Any:
    return ptx("min.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def key_of(score: Any) -> Any:
    """Keys compare like scores: -0 equals +0. The score is no NaN."""
    bits = bits_of(score + Float32(0.0))
    return bits ^ (Uint32(Int32(bits) >> 31) | Uint32(0x80000000))


def score_of(key: Any) -> Any:
    sign = Uint32(Int32(key) >> 31)  # all ones for a score >= 0
    return score_of_bits(key ^ (~sign | Uint32(0x80000000)))


def first_of(mask: Any) -> Any:
    """The lowest bit that is set."""
    return ptx("bfind.u32 {$w0}, {$r0};", Uint32, mask & (Uint32(0) - mask))


def leading_zeros(x: Any) -> Any:
    return ptx("clz.b32 {$w0}, {$r0};", Uint32, x)


def bin_shift(span: Any) -> Any:
    """The shift that brings a span of keys into BINS bins."""
    return cutlass.max(Int32(0), Int32(32 - (BINS.bit_length() - 1)) - Int32(leading_zeros(span)))


def ballot(condition: Any) -> Any:
    return Uint32(arch.vote_ballot_sync(condition))


def reduce(value: Any, kind: str) -> Any:
    return Uint32(arch.warp_redux_sync(value, kind))


def shuffle(value: Any, lane: Any) -> Any:
    return Uint32(arch.shuffle_sync(value, Int32(lane)))


def add_to(tensor: Any, index: Any, value: Any = 1) -> Any:
    return arch.atomic_add(tensor.iterator + Int32(index), Uint32(value), scope="cta")


def word_of(tensor: Any, index: Any) -> Any:
    return Uint32(tensor[index])


def peer_address(tensor: Any, index: Any, rank: Any) -> Any:
    """Of a word of the same shared memory in another block of the team."""
    return ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        Uint32,
        (tensor.iterator + Int32(index)).toint(),
        rank,
    )


def peer_word(tensor: Any, index: Any, rank: Any) -> Any:
    return ptx("ld.shared::cluster.b32 {$w0}, [{$r0}];", Uint32, peer_address(tensor, index, rank))


def own_words(tensor: Any, index: Any) -> list[Any]:
    """Four neighbours, aligned."""
    words = arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[(tensor.iterator + Int32(index)).toint()],
    )
    return [Uint32(word) for word in words]


def peer_words(tensor: Any, index: Any, rank: Any, count: int) -> list[Any]:
    """Two or four neighbours, aligned: another block's memory is far away, so that each access should bring much."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    words = arch.inline_ptx(
        f"ld.shared::cluster.v{count}.b32 {{{names}}}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[peer_address(tensor, index, rank)],
    )
    return [Uint32(word) for word in words]


def pack_nibbles(a: Any, b: Any) -> Any:
    """The low nibbles of eight bytes, side by side."""
    a, b = a & Uint32(SELECTED), b & Uint32(SELECTED)
    return ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x6420;", Uint32, a | (a >> 4), b | (b >> 4))


def last_of(mask: Any) -> Any:
    """The highest bit that is set."""
    return ptx("bfind.u32 {$w0}, {$r0};", Uint32, mask)


class StreamingSelect:
    """One kernel for rows of one score type; see the module."""

    def __init__(self, score: type) -> None:
        self.score = score
        self.bytes = score.width // 8
        self.words = self.bytes  # 32-bit words of four scores

    @cute.jit
    def __call__(
        self,
        scores: cute.Pointer,
        row_stride: Int64,
        lengths: cute.Pointer,
        bases: cute.Pointer,
        has_bases: Int32,
        out: cute.Pointer,
        k: Int64,
        width: Int32,
        list_capacity: Int32,
        mark_groups: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(
            scores, row_stride, lengths, bases, has_bases, out, k, width, list_capacity, mark_groups
        ).launch(
            grid=[1, 1, 1],
            block=[THREADS, 1, 1],
            smem=MARKS_AT,
            cluster=[1, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
        )

    # ------------------------------------------------------------------ teams

    @cute.jit
    def sync(self, size: Uint32) -> None:
        if size > 1:
            arch.cluster_arrive(aligned=True)
            arch.cluster_wait()
        else:
            arch.sync_threads()

    @cute.jit
    def of_peers(
        self, control: cute.Tensor, word: cutlass.Constexpr, count: cutlass.Constexpr, limit: Uint32
    ):
        """`count` words of the first `limit` blocks of the team: a lane has those of a block, or zeros."""
        a, b, c, d = Uint32(0), Uint32(0), Uint32(0), Uint32(0)
        lane = Uint32(arch.lane_idx())
        if lane < limit:
            if cutlass.const_expr(count == 4):
                a, b, c, d = peer_words(control, word, lane, 4)
            else:
                a, b = peer_words(control, word, lane, 2)
        return a, b, c, d

    # ------------------------------------------------------------- histograms

    @cute.jit
    def clear(self, hist: cute.Tensor) -> None:
        t = Int32(arch.thread_idx()[0])
        for i in cutlass.range_constexpr(BINS // THREADS):
            hist[t + i * THREADS] = Uint32(0)

    @cute.jit
    def sum_bins(self, hist: cute.Tensor, sums: cute.Tensor, size: Uint32) -> Uint32:
        """Leaves the team's histogram in `sums`, which is `hist` in a block alone; returns this thread's share."""
        t = Int32(arch.thread_idx()[0])
        first = Int32(BINS - 4) - 4 * t
        a, b, c, d = own_words(hist, first)
        if size > 1:
            rank = Uint32(arch.block_idx_in_cluster())
            for r in cutlass.range(1, Int32(size), 1, unroll=1):
                other = rank + Uint32(r)
                if other >= size:
                    other -= size
                w0, w1, w2, w3 = peer_words(hist, first, other, 4)
                a, b, c, d = a + w0, b + w1, c + w2, d + w3
            sums[first], sums[first + 1], sums[first + 2], sums[first + 3] = a, b, c, d
        return a + b + c + d

    @cute.jit
    def inclusive_sum(self, value: Uint32) -> Uint32:
        lane = Uint32(arch.lane_idx())
        for step in cutlass.range_constexpr(5):
            other = Uint32(arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0))
            if lane >= (1 << step):
                value += other
        return value

    @cute.jit
    def find_bins(
        self, hist: cute.Tensor, control: cute.Tensor, own: Uint32, rank0: Uint32, rank1: Uint32
    ) -> None:
        """Leaves the bins of two ranks (0: not wanted) in control[BIN ...]: index, members of higher bins, members.

        `own`: members of this thread's bins. A rank past all members gets a bin of none. Three barriers.
        """
        lane, warp = Uint32(arch.lane_idx()), Uint32(arch.thread_idx()[0]) // 32
        own = reduce(own, "add")
        if lane == 0:
            control[WARP_A + warp] = own
        arch.sync_threads()
        if warp < 2:
            rank = rank0
            if warp == 1:
                rank = rank1
            if rank != 0:
                before = Uint32(0)
                if lane < WARPS:
                    before = word_of(control, WARP_A + lane)
                before = self.inclusive_sum(before)
                reached = ballot(before >= rank)
                at = BIN + 3 * warp
                if reached != 0:
                    part = first_of(reached)
                    above = shuffle(before, (part + 31) & 31)
                    if part == 0:
                        above = Uint32(0)
                    first = Uint32(BINS - 4) - 4 * (part * 32 + lane)
                    b0, b1, b2, b3 = own_words(hist, first)
                    total = b0 + b1 + b2 + b3
                    through = self.inclusive_sum(total)
                    owner = first_of(ballot(above + through >= rank))
                    above += through - total
                    index, count = first + 3, b3
                    if above + count < rank:
                        index, above, count = index - 1, above + count, b2
                    if above + count < rank:
                        index, above, count = index - 1, above + count, b1
                    if above + count < rank:
                        index, above, count = index - 1, above + count, b0
                    if lane == owner:
                        control[at], control[at + 1], control[at + 2] = index, above, count
                elif lane == 0:
                    control[at + 2] = Uint32(0)
                if lane == 31 and warp == 0:
                    control[MEMBERS] = before
        arch.sync_threads()

    def bin_found(self, control: Any, i: int = 0) -> tuple[Any, Any, Any]:
        return tuple(word_of(control, BIN + 3 * i + j) for j in range(3))

    @cute.jit
    def find(self, hist: cute.Tensor, sums: cute.Tensor, control: cute.Tensor, size: Uint32, rank: Uint32):
        """The bin of the rank-th largest of a team: its index, the members of higher bins, its own members."""
        self.find_bins(sums, control, self.sum_bins(hist, sums, size), rank, Uint32(0))
        return self.bin_found(control)

    # Bins of equal width between two scores, by a monotonic map. A bin is known by its number plus 2^23, as a float.
    @cute.jit
    def linear(self, low: Float32, high: Float32):
        scale = Float32(1.0) / (high - low)
        if not (scale < INFINITY and scale > 0.0):
            scale = Float32(0.0)
        shift = -low * scale
        if not (shift < INFINITY and shift > -INFINITY):
            scale = Float32(0.0)
            shift = Float32(0.0)
        return scale, shift

    def place(self, x: Any, scale: Any, shift: Any) -> Any:
        return multiply_add(multiply_add(x, scale, shift, True), Float32(BINS - 1), Float32(NO_FLAGS))

    # ------------------------------------------------- few scores, exactly

    @cute.jit
    def narrow(
        self,
        entries: cute.Tensor,
        pitch: cutlass.Constexpr,
        count_entries: Uint32,
        scale: Float32,
        shift_by: Float32,
        border: Float32,
        hist: cute.Tensor,
        sums: cute.Tensor,
        control: cute.Tensor,
        size: Uint32,
        rank: Uint32,
        count: Uint32,
    ):
        """The rank-th largest of the listed scores in one bin, by counting in an ever smaller range of keys.

        Returns its key, how many equal ones are selected, and whether equal ones count at all: if not, the keys above
        the returned one are selected.
        """
        t = Uint32(arch.thread_idx()[0])
        lane = Uint32(arch.lane_idx())
        low, high = Uint32(0), Uint32(0xFFFFFFFF)
        key, quota, ties = Uint32(0), Uint32(0), Boolean(False)
        done = Boolean(False)
        while not done:
            self.sync(size)
            if t == 0:
                control[EDGES] = Uint32(0xFFFFFFFF)
                control[EDGES + 1] = Uint32(0)
            self.clear(hist)
            arch.sync_threads()
            least, most = Uint32(0xFFFFFFFF), Uint32(0)
            i = t
            while i < count_entries:
                x = score_of_bits(word_of(entries, i * pitch))
                candidate = key_of(x)
                if (
                    x > -INFINITY
                    and self.place(x, scale, shift_by) == border
                    and candidate >= low
                    and candidate <= high
                ):
                    least, most = cutlass.min(least, candidate), cutlass.max(most, candidate)
                i += THREADS
            least, most = reduce(least, "umin"), reduce(most, "umax")
            if lane == 0 and least <= most:
                arch.atomic_min(control.iterator + EDGES, least, scope="cta")
                arch.atomic_max(control.iterator + (EDGES + 1), most, scope="cta")
            self.sync(size)
            peer = lane % size
            if size == 1:  # a block on its own, be it in a team or not
                peer = Uint32(arch.block_idx_in_cluster())
            low, high = peer_words(control, EDGES, peer, 2)
            low, high = reduce(low, "umin"), reduce(high, "umax")
            if low == high:
                key, quota, ties, done = low, rank, Boolean(True), Boolean(True)
            elif rank == count:
                key, done = low - 1, Boolean(True)
            else:
                shift = Uint32(bin_shift(high - low))
                i = t
                while i < count_entries:
                    x = score_of_bits(word_of(entries, i * pitch))
                    candidate = key_of(x)
                    inside = x > -INFINITY and candidate >= low and candidate <= high
                    if inside and self.place(x, scale, shift_by) == border:
                        add_to(hist, (candidate - low) >> shift)
                    i += THREADS
                self.sync(size)
                index, above, count = self.find(hist, sums, control, size, rank)
                rank -= above
                low += index << shift
                high = cutlass.min(high, low + ((Uint32(1) << shift) - 1))
        return key, quota, ties

    # ----------------------------------------------------------------- loads

    def load(self, address: Any, ahead: Any, at: int, predicate: Any = None) -> None:
        """One aligned group of four scores."""
        names = ", ".join(f"{{$w{i}}}" for i in range(self.words))
        raw = arch.inline_ptx(
            f"ld.global.nc.v{self.words}.b32 {{{names}}}, [{{$r0}}];",
            write_only_types=[Uint32] * self.words,
            read_only_args=[address],
            predicate=predicate,
        )
        for i in range(self.words):
            ahead[at * self.words + i] = raw[i]

    def widen(self, ahead: Any, at: int) -> list[Any]:
        words = [ahead[at * self.words + i] for i in range(self.words)]
        if self.score is Float32:
            return [score_of_bits(w) for w in words]
        if self.score is BFloat16:
            return [score_of_bits(h) for w in words for h in (w << 16, w & Uint32(0xFFFF0000))]
        halves = [Uint16(h) for w in words for h in (w & Uint32(0xFFFF), w >> 16)]
        return [ptx("cvt.f32.f16 {$w0}, {$r0};", Float32, h) for h in halves]

    def load_score(self, address: Any) -> Any:
        if self.score is Float32:
            return ptx("ld.global.nc.f32 {$w0}, [{$r0}];", Float32, address)
        raw = ptx("ld.global.nc.u16 {$w0}, [{$r0}];", Uint16, address)
        if self.score is BFloat16:
            return score_of_bits(Uint32(raw) << 16)
        return ptx("cvt.f32.f16 {$w0}, {$r0};", Float32, raw)

    # ---------------------------------------------------------------- sample

    @cute.jit
    def sample(
        self,
        base: Int64,
        inner_begin: Int32,
        inner_end: Int32,
        begin: Int32,
        end: Int32,
        length: Int32,
        k: Uint32,
        scratch: cute.Tensor,
        control: cute.Tensor,
    ):
        """A window that holds the k-th largest unless the sample misleads.

        Returns its ends, whether the lower end itself is a tie, and the highest key seen.
        """
        t = Uint32(arch.thread_idx()[0])
        lane = Uint32(arch.lane_idx())
        hist = cute.make_tensor(scratch.iterator, cute.make_layout((BINS,)))
        kept = cute.make_tensor(scratch.iterator + BINS, cute.make_layout((SAMPLE * THREADS,)))
        # Pieces of a row, each somewhere in a stretch of its own, so that periodic rows do not mislead.
        pieces = 2 * THREADS // PIECE
        starts = Uint64(Uint32(inner_end - inner_begin) // PIECE)
        ahead = cute.make_rmem_tensor((2 * self.words,), Uint32)
        for q in cutlass.range_constexpr(2):
            piece = t // PIECE + q * (pieces // 2)
            jitter = (piece + 1) * Uint32(0x9E3779B1)
            jitter = (jitter ^ (jitter >> 15)) * Uint32(0x85EBCA6B)
            start = Int32((Uint64((piece << 16) | (jitter >> 16)) * starts) // (pieces << 16))
            group = inner_begin + start * PIECE + Int32(t % PIECE)
            self.load(base + Int64(group) * (4 * self.bytes), ahead, q)
        # The memory need not idle while the sample is looked at.
        early = begin + Int32(t) * (32 // self.bytes)
        if early < cutlass.min(end, inner_end):
            arch.inline_ptx(
                "prefetch.global.L2 [{$r0}];", read_only_args=[base + Int64(early) * (4 * self.bytes)]
            )
        self.clear(hist)
        if t < 4:
            control[EDGES + t] = Uint32(0xFFFFFFFF) * (1 - (t & 1))
        x = [larger(v, Float32(-INFINITY)) for v in self.widen(ahead, 0) + self.widen(ahead, 1)]
        least, most = Float32(INFINITY), Float32(-INFINITY)
        for i in cutlass.range_constexpr(SAMPLE):
            kept[t + i * THREADS] = bits_of(x[i])
        for i in cutlass.range_constexpr(SAMPLE):
            if x[i] < INFINITY and x[i] > -INFINITY:
                least, most = smaller(least, x[i]), larger(most, x[i])
        low, high = reduce(key_of(least), "umin"), reduce(key_of(most), "umax")
        if lane == 0:
            control[WARP_A + t // 32] = low
            control[WARP_B + t // 32] = high
        arch.sync_threads()
        low = reduce(word_of(control, WARP_A + lane % WARPS), "umin")
        high = reduce(word_of(control, WARP_B + lane % WARPS), "umax")
        scale, shift = self.linear(score_of(low), score_of(high))
        for i in cutlass.range_constexpr(SAMPLE):
            if x[i] > -INFINITY:
                add_to(hist, bits_of(self.place(x[i], scale, shift)) - Uint32(0x4B000000))
        # Ranks in the sample, four standard deviations to either side.
        size = float(SAMPLE * THREADS)
        share = Float32(k) / Float32(length)
        expected = share * Float32(size)
        margin = Float32(4.0) * cute.math.sqrt(expected * (Float32(1.0) - share)) + Float32(4.0)
        upper, lower = Int32(expected - margin), Int32(expected + margin) + 1
        arch.sync_threads()
        own = self.sum_bins(hist, hist, Uint32(1))
        self.find_bins(hist, control, own, Uint32(lower), Uint32(cutlass.max(upper, 1)))
        total = Int32(word_of(control, MEMBERS))
        index0, above0, count0 = self.bin_found(control, 0)
        index1, above1, count1 = self.bin_found(control, 1)
        window_low, window_high, ties = Uint32(LOWEST), Uint32(HIGHEST), Boolean(True)
        if upper > total:
            window_high = Uint32(LOWEST)  # -inf is the k-th largest
        else:
            open_above, open_below = upper < 1, count0 == 0
            crowded0, crowded1 = count0 > SMALL, count1 > SMALL and not open_above
            ties = Boolean(open_below)
            # Any score near the border of the bin will do.
            origin, width = score_of(low), (score_of(high) - score_of(low)) * Float32(1.0 / (BINS - 1))
            if not open_below:
                window_low = key_of(multiply_add(Float32(Int32(index0)) - Float32(0.5), width, origin))
                if index0 == 0:
                    window_low, ties = Uint32(LOWEST), Boolean(True)
            if not open_above and index1 != BINS - 1:
                window_high = key_of(multiply_add(Float32(Int32(index1)) + Float32(0.5), width, origin))
            if crowded0 or crowded1 or scale == 0.0 or window_low >= window_high:
                # Bins with many members, as seen on plateaus and where scores are of very unequal sizes.
                ties = Boolean(True)
                edge = Int32(0)
                while edge < 2:
                    index, count, rank, crowded = index0, count0, Uint32(lower) - above0, crowded0
                    open_ = open_below
                    if edge == 1:
                        index, count, rank, crowded = index1, count1, Uint32(upper) - above1, crowded1
                        open_ = open_above
                    border = score_of_bits(index + Uint32(0x4B000000))
                    first, last = Uint32(0xFFFFFFFF), Uint32(0)
                    for i in cutlass.range_constexpr(SAMPLE):
                        if self.place(x[i], scale, shift) == border and x[i] > -INFINITY:
                            first, last = cutlass.min(first, key_of(x[i])), cutlass.max(last, key_of(x[i]))
                    first, last = reduce(first, "umin"), reduce(last, "umax")
                    if lane == 0 and first <= last:
                        arch.atomic_min(control.iterator + (EDGES + 2 * edge), first, scope="cta")
                        arch.atomic_max(control.iterator + (EDGES + 1 + 2 * edge), last, scope="cta")
                    arch.sync_threads()
                    first, last = word_of(control, EDGES + 2 * edge), word_of(control, EDGES + 1 + 2 * edge)
                    bound = first
                    if edge == 1:
                        bound = last
                    if crowded and first != last:
                        bound, _, tied = self.narrow(
                            kept,
                            1,
                            Uint32(SAMPLE * THREADS),
                            scale,
                            shift,
                            border,
                            hist,
                            hist,
                            control,
                            Uint32(1),
                            rank,
                            count,
                        )
                        if not tied:
                            bound += 1
                    if edge == 0:
                        window_low = bound
                        if open_:
                            window_low = Uint32(LOWEST)
                    else:
                        window_high = bound
                        if open_:
                            window_high = Uint32(HIGHEST)
                    edge += 1
        return window_low, window_high, ties, high

    # ---------------------------------------------------------------- stream

    @cute.jit
    def keep(
        self,
        open_: Uint32,
        place: Uint32,
        distance: cutlass.Constexpr,
        window_low: Uint32,
        shift: Int32,
        spill: cute.Tensor,
        hist: cute.Tensor,
        control: cute.Tensor,
        entries: cute.Tensor,
        capacity: Uint32,
        ties: cutlass.Constexpr,
    ) -> None:
        """Appends open scores to the list; all lanes of a warp. Bit 8 * q + j: score j of this thread's q-th group."""
        t, lane = Uint32(arch.thread_idx()[0]), Uint32(arch.lane_idx())
        found = reduce(arch.popc(open_), "add")
        if found != 0:
            at = Uint32(0)
            if lane == 0:
                at = add_to(control, INSIDE, found)
            at = shuffle(at, 0)
            below = (Uint32(1) << lane) - 1
            active = ballot(open_ != 0)
            while active != 0:
                if open_ != 0:
                    bit = first_of(open_)
                    q, j = bit >> 3, bit & 7
                    open_ &= open_ - 1
                    raw = word_of(spill, q * (4 * THREADS) + t * 4 + j)
                    entry = at + arch.popc(active & below)
                    if entry < capacity:
                        entries[2 * entry] = raw
                        entries[2 * entry + 1] = place + q * distance + j
                    if cutlass.const_expr(ties):  # noqa: SIM102 - the one is decided when compiling
                        if shift >= 0:
                            add_to(hist, (key_of(score_of_bits(raw)) - window_low - 1) >> Uint32(shift))
                at += arch.popc(active)
                active = ballot(open_ != 0)

    @cute.jit
    def stream(
        self,
        base: Int64,
        head: Int32,
        length: Int32,
        begin: Int32,
        end: Int32,
        window_low: Uint32,
        window_high: Uint32,
        shift: Int32,
        spill: cute.Tensor,
        hist: cute.Tensor,
        control: cute.Tensor,
        marks: cute.Tensor,
        entries: cute.Tensor,
        capacity: Uint32,
        ties: cutlass.Constexpr,
        mark_them: cutlass.Constexpr,
    ) -> None:
        """Looks at the groups [begin, end) of the row through the window, as Streamer::stream of stream.cuh does."""
        t, lane = Int32(arch.thread_idx()[0]), Int32(arch.lane_idx())
        low, high = score_of(window_low), score_of(window_high)
        groups = Int32((Uint32(head) + Uint32(length) + 3) // 4)
        row_begin, row_end = Int32(0), Int32((Uint32(head) + Uint32(length)) // 4)
        if head > 0:
            row_begin = Int32(1)
        above, equal = Uint32(0), Uint32(0)
        # Groups partly outside, at most one at each end of the row.
        if t < 32:
            group, partly = Int32(0), Boolean(False)
            if t == 0:
                partly = row_begin == 1
            if t == 1:
                group = row_end
                partly = row_end < groups and row_end >= row_begin
            open_ = Uint32(0)
            if partly and group >= begin and group < end:
                mark = Uint32(0)
                for j in cutlass.range_constexpr(4):
                    where = Uint32(group) * 4 + j - Uint32(head)
                    if where < Uint32(length):
                        x = larger(
                            self.load_score(base + (Int64(group) * 4 + j) * self.bytes), Float32(-INFINITY)
                        )
                        spill[t * 4 + j] = bits_of(x)
                        if x > high:
                            mark |= Uint32(1 << j)
                        elif x > low:
                            open_ |= Uint32(1 << j)
                        elif x == low:
                            if cutlass.const_expr(ties):
                                mark |= Uint32(16 << j)
                            else:
                                open_ |= Uint32(1 << j)
                if cutlass.const_expr(mark_them):
                    marks[group - begin] = Uint8(mark)
                above += arch.popc(mark & Uint32(SELECTED))
                equal += arch.popc(mark & Uint32(EQUAL))
            self.keep(
                open_,
                Uint32(group - begin) * 4,
                0,
                window_low,
                shift,
                spill,
                hist,
                control,
                entries,
                capacity,
                ties,
            )

        first, last = cutlass.max(begin, row_begin), cutlass.min(end, row_end) - 1
        group = first + t
        address = base + Int64(group) * (4 * self.bytes)
        ahead = cute.make_rmem_tensor((STEP * self.words,), Uint32)
        for i in cutlass.range_constexpr(STEP * self.words):
            ahead[i] = Uint32(0)
        for q in cutlass.range_constexpr(STEP):
            if group + q * THREADS <= last:
                self.load(address + q * THREADS * 4 * self.bytes, ahead, q)
        warp_first = group - lane
        while warp_first <= last:
            selected = [Float32(NO_FLAGS), Float32(NO_FLAGS)]
            opened = [Float32(NO_FLAGS), Float32(NO_FLAGS)]
            for q in cutlass.range_constexpr(STEP):
                x = self.widen(ahead, q)
                for j in cutlass.range_constexpr(4):
                    v = x[j]
                    if cutlass.const_expr(ties):
                        v = larger(v, Float32(-INFINITY))  # NaN
                    spill[q * (4 * THREADS) + t * 4 + j] = bits_of(v)
                    one = Float32(float(1 << (q % 2 * 8 + j)))
                    selected[q // 2] = multiply_add(flag("gt", v, high), one, selected[q // 2])
                    if cutlass.const_expr(ties):
                        selected[q // 2] = multiply_add(flag("eq", v, low), one * 16.0, selected[q // 2])
                        opened[q // 2] = multiply_add(flag("gt", v, low), one, opened[q // 2])
                    else:
                        opened[q // 2] = multiply_add(flag("ge", v, low), one, opened[q // 2])
            mark = self.flags(selected)
            open_ = self.flags(opened) & ~mark & Uint32(SELECTED)
            valid = Uint32(0xFFFFFFFF)
            if warp_first + (STEP - 1) * THREADS + 31 > last:
                valid = Uint32(0)
                for q in cutlass.range_constexpr(STEP):
                    if group + q * THREADS <= last:
                        valid |= Uint32(0xFF << 8 * q)
                mark &= valid
                open_ &= valid
            if cutlass.const_expr(mark_them):
                for q in cutlass.range_constexpr(STEP):
                    if (valid >> (8 * q)) & 1 != 0:
                        marks[group - begin + q * THREADS] = Uint8((mark >> (8 * q)) & 255)
            address += STEP * THREADS * 4 * self.bytes
            for q in cutlass.range_constexpr(STEP):
                if group + (STEP + q) * THREADS <= last:
                    self.load(address + q * THREADS * 4 * self.bytes, ahead, q)
            above += arch.popc(mark & Uint32(SELECTED))
            if cutlass.const_expr(ties):
                equal += arch.popc(mark & Uint32(EQUAL))
            self.keep(
                open_,
                Uint32(group - begin) * 4,
                4 * THREADS,
                window_low,
                shift,
                spill,
                hist,
                control,
                entries,
                capacity,
                ties,
            )
            group += STEP * THREADS
            warp_first += STEP * THREADS
        above, equal = reduce(above, "add"), reduce(equal, "add")
        if lane == 0:
            if above != 0:
                add_to(control, ABOVE, above)
            if equal != 0:
                add_to(control, COUNTED_EQUAL, equal)

    def flags(self, sums: list[Any]) -> Any:
        """The lowest 16 bits of either sum, see NO_FLAGS."""
        return ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", Uint32, bits_of(sums[0]), bits_of(sums[1]))

    # ------------------------------------------------------------------ emit

    @cute.jit
    def select_mark(self, words: cute.Tensor, place: Uint32, nibble: cutlass.Constexpr) -> None:
        bit = ((place >> 2) & 3) * 8 + (place & 3) + nibble
        arch.atomic_or(words.iterator + Int32(place >> 4), Uint32(1) << bit, scope="cta")

    @cute.jit
    def rank_small(
        self,
        control: cute.Tensor,
        words: cute.Tensor,
        count: Uint32,
        need: Uint32,
        begin: Uint32,
        scores: Uint32,
    ) -> None:
        """Marks those of the `count` small members that are selected and lie in this block's part."""
        lane, i = Uint32(arch.lane_idx()), Uint32(arch.thread_idx()[0]) // 32
        while i < count:
            key, place = word_of(control, KEYS + i), word_of(control, PLACES + i)
            better = Uint32(0)
            for first in cutlass.range_constexpr(0, SMALL, 32):
                j = lane + first
                other, where = word_of(control, KEYS + j), word_of(control, PLACES + j)
                ahead = j < count and (other > key or (other == key and where < place))
                better += arch.popc(ballot(ahead))
            if better < need and lane == 0 and place - begin < scores:
                self.select_mark(words, place - begin, 0)
            i += WARPS

    @cute.jit
    def emit(
        self,
        words: cute.Tensor,
        word_count: Uint32,
        quota: Uint32,
        place: Uint32,
        ties: Uint32,
        out: Int64,
        first_index: Int32,
        stage: cute.Tensor,
        control: cute.Tensor,
        above: Uint32,
        equal: Uint32,
        steps: Uint32,
    ) -> None:
        """Writes the indices of the marked scores, as emit() of select.cuh does. One barrier."""
        t, lane = Uint32(arch.thread_idx()[0]), Uint32(arch.lane_idx())
        warp = t // 32
        if lane == 0:
            control[WARP_A + warp] = above
            control[WARP_B + warp] = equal
        arch.sync_threads()
        others_above, others_equal = Uint32(0), Uint32(0)
        if lane < warp:
            others_above, others_equal = word_of(control, WARP_A + lane), word_of(control, WARP_B + lane)
        place += reduce(others_above, "add")
        ties += reduce(others_equal, "add")
        step = Uint32(0)
        while step < steps:
            first_word = (warp * steps + step) * (32 * UNIT)
            if first_word < word_count:
                word = first_word + lane * UNIT
                marked = [Uint32(0) for _ in range(UNIT)]
                for u in cutlass.range_constexpr(0, UNIT, 4):
                    if word + u < word_count:
                        marked[u], marked[u + 1], marked[u + 2], marked[u + 3] = own_words(words, word + u)
                bits = [pack_nibbles(marked[u], marked[u + 1]) for u in range(0, UNIT, 2)]
                found = [Uint32(arch.popc(b)) for b in bits]
                equals = [Uint32(0) for _ in bits]
                if quota != 0:
                    for i in cutlass.range_constexpr(UNIT // 2):
                        equals[i] = pack_nibbles(marked[2 * i] >> 4, marked[2 * i + 1] >> 4)
                        found[i] |= Uint32(arch.popc(equals[i])) << 16
                counts = found[0] + found[1] + found[2] + found[3]
                through = self.inclusive_sum(counts)
                total = shuffle(through, 31)
                ties_after = ties + (total >> 16)
                before = cutlass.min(ties, quota)
                count = (total & 0xFFFF) + cutlass.min(ties_after, quota) - before
                tie = ties + ((through - counts) >> 16)
                at = ((through - counts) & 0xFFFF) + cutlass.min(tie, quota) - before
                to = out + Int64(place + before) * 4
                index = first_index + Int32(first_word * 16)
                ends = [Uint32(0) for _ in bits]
                for i in cutlass.range_constexpr(UNIT // 2):
                    at += found[i] & 0xFFFF
                    here = found[i] >> 16
                    if here != 0:
                        wanted = cutlass.min(tie + here, quota) - cutlass.min(tie, quota)
                        kept, n = equals[i], here
                        if wanted == 0:
                            kept, n = Uint32(0), Uint32(0)
                        while n != wanted:  # once a row
                            kept ^= Uint32(1) << last_of(kept)
                            n -= 1
                        bits[i] |= kept
                        at += wanted
                        tie += here
                    ends[i] = at
                # Several masks at a time, which do not wait for each other.
                b0, b1, b2, b3 = bits
                at0, at1, at2, at3 = ends
                offset, staged, warp_stage = lane * (16 * UNIT), count <= STAGE, warp * STAGE
                while (b0 | b1 | b2 | b3) != 0:
                    b0, at0 = self.put(stage, warp_stage, staged, to, index, at0, offset, b0)
                    b1, at1 = self.put(stage, warp_stage, staged, to, index, at1, offset + 32, b1)
                    b2, at2 = self.put(stage, warp_stage, staged, to, index, at2, offset + 64, b2)
                    b3, at3 = self.put(stage, warp_stage, staged, to, index, at3, offset + 96, b3)
                if count <= STAGE:
                    arch.sync_warp()
                    i = lane
                    while i < count:
                        self.store(to + Int64(i) * 4, index + Int32(Uint16(stage[warp_stage + i])))
                        i += 32
                    arch.sync_warp()
                place += total & 0xFFFF
                ties = ties_after
            step += 1

    @cute.jit
    def put(
        self,
        stage: cute.Tensor,
        begin: Uint32,
        staged: Boolean,
        to: Int64,
        index: Int32,
        at: Uint32,
        offset: Uint32,
        bits: Uint32,
    ):
        """Writes the last of `bits`, if there is any, before place `at`; returns the others and its place."""
        if bits != 0:
            bit = last_of(bits)
            found = offset + bit
            at -= 1
            if staged:
                stage[begin + at] = Uint16(found)
            else:
                self.store(to + Int64(at) * 4, index + Int32(found))
            bits ^= Uint32(1) << bit
        return bits, at

    def store(self, address: Any, value: Any) -> None:
        arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])

    @cute.jit
    def count_marks(self, words: cute.Tensor, word_count: Uint32, steps: Uint32):
        """Selected and equal marks in this warp's part, in emit()'s division."""
        t, lane = Uint32(arch.thread_idx()[0]), Uint32(arch.lane_idx())
        begin = (t // 32) * steps * (32 * UNIT)
        end = cutlass.min(begin + steps * (32 * UNIT), (word_count + 3) // 4 * 4)
        above, equal = Uint32(0), Uint32(0)
        i = begin + lane * 4
        while i < end:
            w = own_words(words, i)
            for u in cutlass.range_constexpr(0, 4, 2):
                above += arch.popc((w[u] & Uint32(SELECTED)) | ((w[u + 1] & Uint32(SELECTED)) << 4))
                equal += arch.popc((w[u] & Uint32(EQUAL)) | ((w[u + 1] & Uint32(EQUAL)) >> 4))
            i += 128
        return reduce(above, "add"), reduce(equal, "add")

    # ---------------------------------------------------------------- kernel

    @cute.kernel
    def kernel(
        self,
        scores: cute.Pointer,
        row_stride: Int64,
        lengths: cute.Pointer,
        bases: cute.Pointer,
        has_bases: Int32,
        out: cute.Pointer,
        k: Int64,
        width: Int32,
        list_capacity: Int32,
        mark_groups: Int32,
    ) -> None:
        t = Int32(arch.thread_idx()[0])
        rank, size = Uint32(arch.block_idx_in_cluster()), Uint32(arch.cluster_size())
        row = Int64(Uint32(arch.block_idx()[0]) // size)
        out_row = Int64(out.toint()) + row * k * 4
        length = cutlass.min(cutlass.max(self.load_int(Int64(lengths.toint()) + row * 4), 0), width)
        shift = Int32(0)
        if has_bases != 0:
            shift = self.load_int(Int64(bases.toint()) + row * 4)
        if Int64(length) <= k:
            i = Int64(rank * THREADS) + Int64(t)
            while i < k:
                value = Int32(-1)
                if i < Int64(length):
                    value = shift + Int32(i)
                self.store(out_row + i * 4, value)
                i += Int64(size * THREADS)
        else:
            self.select(
                Int64(scores.toint()) + row * row_stride * self.bytes,
                length,
                Uint32(k),
                out_row,
                shift,
                rank,
                size,
                list_capacity,
                mark_groups,
            )

    def load_int(self, address: Any) -> Any:
        return ptx("ld.global.nc.b32 {$w0}, [{$r0}];", Int32, address)

    @cute.jit
    def select(
        self,
        begin_of_row: Int64,
        length: Int32,
        k: Uint32,
        out: Int64,
        index_of_first: Int32,
        rank: Uint32,
        size: Uint32,
        list_capacity: Int32,
        mark_groups: Int32,
    ) -> None:
        t, lane = Int32(arch.thread_idx()[0]), Uint32(arch.lane_idx())
        memory = arch.get_dyn_smem(Uint8, 16)
        scratch = self.words_at(memory, 0, 4 * STEP * THREADS)
        stage = cute.make_tensor(cute.recast_ptr(memory, dtype=Uint16), cute.make_layout((WARPS * STAGE,)))
        hist = self.words_at(memory, HIST_AT, BINS)
        control = self.words_at(memory, CONTROL_AT, 256)
        marks = cute.make_tensor(memory + MARKS_AT, cute.make_layout((1 << 20,)))
        words = self.words_at(memory, MARKS_AT, 1 << 18)
        entries = cute.make_tensor(
            cute.recast_ptr((memory + MARKS_AT) + mark_groups, dtype=Uint32), cute.make_layout((1 << 18,))
        )

        head = Int32((begin_of_row & (4 * self.bytes - 1)) // self.bytes)
        base = begin_of_row - Int64(head * self.bytes)
        groups = Int32((Uint32(head) + Uint32(length) + 3) // 4)
        inner_begin, inner_end = Int32(0), Int32((Uint32(head) + Uint32(length)) // 4)
        if head > 0:
            inner_begin = Int32(1)
        blocks = Int32(size)
        per_block = ((groups + blocks - 1) // blocks + 15) // 16 * 16
        begin = cutlass.min(groups, Int32(rank) * per_block)
        end = cutlass.min(groups, begin + per_block)
        word_count = Uint32(end - begin + 3) // 4
        self.clear(hist)
        if t < 4:
            control[t] = Uint32(0)
        if word_count > 0 and t < 16:
            tail = Int32((word_count - 1) // 4 * 16) + t
            if tail >= end - begin:
                marks[tail] = Uint8(0)
        window_low, window_high, ties, reach = Uint32(LOWEST), Uint32(HIGHEST), Boolean(True), Uint32(HIGHEST)
        key_shift = bin_shift(window_high - window_low)
        if inner_end - inner_begin >= 4 * THREADS:
            window_low, window_high, ties, reach = self.sample(
                base, inner_begin, inner_end, begin, end, length, k, scratch, control
            )
            window_low, window_high = self.as_low(window_low), self.as_high(window_high)
            key_shift = Int32(-1)
        arch.sync_threads()

        capacity = Uint32(list_capacity)
        key, quota, tied, settled, done = Uint32(0), Uint32(0), Boolean(False), Boolean(False), Boolean(False)
        sums = self.words_at(memory, 0, BINS)
        if size == 1:
            sums = hist
        while not done:
            if ties:
                self.stream(
                    base,
                    head,
                    length,
                    begin,
                    end,
                    window_low,
                    window_high,
                    key_shift,
                    scratch,
                    hist,
                    control,
                    marks,
                    entries,
                    capacity,
                    True,
                    True,
                )
            else:
                self.stream(
                    base,
                    head,
                    length,
                    begin,
                    end,
                    window_low,
                    window_high,
                    key_shift,
                    scratch,
                    hist,
                    control,
                    marks,
                    entries,
                    capacity,
                    False,
                    True,
                )
            self.sync(size)
            above, equal, inside, _ = self.of_peers(control, ABOVE, 4, size)
            above, equal = reduce(above, "add"), reduce(equal, "add")
            whole, inside = reduce(inside, "umax") <= capacity, reduce(inside, "add")
            count = word_of(control, INSIDE)
            next_low, next_high = Uint32(LOWEST), Uint32(HIGHEST)
            if above >= k:
                next_low = window_high + 1
            elif above + inside >= k:
                need = k - above
                if whole:
                    done = Boolean(True)
                    if key_shift >= 0:
                        self.sync(size)
                        self.clear(hist)
                        arch.sync_threads()
                    scale, shift = self.linear(
                        larger(score_of(window_low), Float32(-3e38)),
                        smaller(score_of(cutlass.min(window_high, reach)), Float32(3e38)),
                    )
                    i = Uint32(t)
                    while i < count:
                        x = score_of_bits(word_of(entries, 2 * i))
                        add_to(hist, bits_of(self.place(x, scale, shift)) - Uint32(0x4B000000))
                        i += THREADS
                    self.sync(size)
                    index, higher, members = self.find(hist, sums, control, size, need)
                    border = score_of_bits(index + Uint32(0x4B000000))
                    if members <= SMALL:
                        settled = Boolean(True)
                        i = Uint32(t)
                        while i < count:
                            x = score_of_bits(word_of(entries, 2 * i))
                            where = word_of(entries, 2 * i + 1)
                            spot = self.place(x, scale, shift)
                            if spot > border:
                                self.select_mark(words, where, 0)
                            if spot == border:
                                self.add_small(control, key_of(x), Uint32(begin) * 4 + where)
                            i += THREADS
                        self.sync(size)
                        if rank != 0:
                            if t < SMALL:
                                small_key = peer_word(control, KEYS + t, Uint32(0))
                                small_place = peer_word(control, PLACES + t, Uint32(0))
                                control[KEYS + t], control[PLACES + t] = small_key, small_place
                            arch.sync_threads()
                        self.rank_small(
                            control, words, members, need - higher, Uint32(begin) * 4, Uint32(end - begin) * 4
                        )
                    else:
                        key, quota, tied = self.narrow(
                            entries,
                            2,
                            count,
                            scale,
                            shift,
                            border,
                            hist,
                            sums,
                            control,
                            size,
                            need - higher,
                            members,
                        )
                else:
                    next_low, next_high = window_low, window_high
                    if not ties:
                        next_low = window_low - 1  # it was open itself
                    elif key_shift >= 0:
                        index, higher, members = self.find(hist, sums, control, size, need)
                        next_low = window_low + 1 + (index << Uint32(key_shift))
                        next_high = cutlass.min(
                            window_high, next_low + ((Uint32(1) << Uint32(key_shift)) - 1)
                        )
            elif above + inside + equal >= k:
                key, quota, tied = window_low, k - above - inside, Boolean(True)
                done = whole
                next_low, next_high = window_low, window_low
            else:
                next_high = window_low - 1
            if not done:
                window_low, window_high, ties = self.as_low(next_low), self.as_high(next_high), Boolean(True)
                key_shift, reach = bin_shift(window_high - window_low), Uint32(HIGHEST)
                self.sync(size)  # everybody has read the counts
                self.clear(hist)
                if t < 3:
                    control[t] = Uint32(0)
                arch.sync_threads()

        if not settled:
            if tied and key != window_low:
                i = Uint32(t)
                while i < word_count:
                    words[i] = word_of(words, i) & Uint32(SELECTED)
                    i += THREADS
                arch.sync_threads()
            count = word_of(control, INSIDE)
            i = Uint32(t)
            while i < count:
                candidate, where = key_of(score_of_bits(word_of(entries, 2 * i))), word_of(entries, 2 * i + 1)
                if candidate > key:
                    self.select_mark(words, where, 0)
                elif tied and candidate == key:
                    self.select_mark(words, where, 4)
                i += THREADS
        arch.sync_threads()
        steps = (word_count + (UNIT * THREADS - 1)) // (UNIT * THREADS)
        above, equal = self.count_marks(words, word_count, steps)
        block_above, block_equal = Uint32(0), Uint32(0)
        if size > 1:
            if t < 2:
                control[TOTALS + t] = Uint32(0)
            arch.sync_threads()
            if lane == 0:
                add_to(control, TOTALS, above)
                add_to(control, TOTALS + 1, equal)
            self.sync(size)
            block_above, block_equal, _, _ = self.of_peers(control, TOTALS, 2, rank)
            block_above, block_equal = reduce(block_above, "add"), reduce(block_equal, "add")
            arch.cluster_arrive(aligned=True)  # no block leaves before its counts were read
        self.emit(
            words,
            word_count,
            quota,
            block_above,
            block_equal,
            out,
            index_of_first - head + begin * 4,
            stage,
            control,
            above,
            equal,
            steps,
        )
        if size > 1:
            arch.cluster_wait()

    @cute.jit
    def as_low(self, key: Uint32) -> Uint32:
        """No score has the key of -0, but a window may end there, which comparison would take for 0."""
        if key == Uint32(0x7FFFFFFF):
            key = Uint32(0x80000000)
        return key

    @cute.jit
    def as_high(self, key: Uint32) -> Uint32:
        if key == Uint32(0x7FFFFFFF):
            key = Uint32(0x7FFFFFFE)
        return key

    @cute.jit
    def add_small(self, control: cute.Tensor, key: Uint32, place: Uint32) -> None:
        """To the small members, which the first block of the team keeps."""
        at = ptx(
            "atom.relaxed.cluster.shared::cluster.add.u32 {$w0}, [{$r0}], {$r1};",
            Uint32,
            peer_address(control, SMALL_COUNT, Uint32(0)),
            Uint32(1),
        )
        for word, value in ((KEYS, key), (PLACES, place)):
            address = peer_address(control, word, Uint32(0)) + at * 4
            arch.inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[address, value])

    def words_at(self, memory: Any, at: int, count: int) -> Any:
        return cute.make_tensor(cute.recast_ptr(memory + at, dtype=Uint32), cute.make_layout((count,)))


def example(score: type) -> tuple[Any, ...]:
    def pointer(dtype: type) -> Any:
        return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)

    return (
        pointer(score),
        Int64(1),
        pointer(Int32),
        pointer(Int32),
        Int32(0),
        pointer(Int32),
        Int64(1),
        Int32(1),
        Int32(1),
        Int32(1),
        cuda.CUstream(0),
    )


CUTE = {
    f"streaming_select_{name}": (StreamingSelect(score), example(score))
    for name, score in (("float", Float32), ("half", Float16), ("bfloat16", BFloat16))
}
