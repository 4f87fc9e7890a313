// SPDX-License-Identifier: Apache-2.0
// The segment cursor of a carry: which chunks a CTA runs through, where
// its first state comes from, and where states are stored on the way.
//
// A warp holds 16 rows of S [V, K], or of a map, in the accumulator layout of the tensor cores
// (ptx/mma.cuh): lane l has rows l/4 and l/4 + 8 at channels 8 tile + 2 (l%4) and the next one.
#pragma once

#include "cuda/chunked/chunk.cuh"
#include "cuda/tile/convert.cuh"
#include "cuda/tile/scan.cuh"
#include "cuda/tile/store_row.cuh"

namespace cula::cuda::chunked {

inline constexpr int kWarpRows = 16;  // value rows of one warp

// What a carry is launched with. States between segments are [map][HV][rows][K]
// floats, with rows of kKey channels where compose reads them.
struct CarryParams {
    int stages = 1, value_blocks = 1;
    Divisor row_blocks;
    int cluster = 1;                               // CTAs that share chunk operands
    const std::int32_t* is_compensated = nullptr;  // [chunks of the slab, HV]
    const float* fading = nullptr;  // same shape; set if maps may skip chunks that later ones make irrelevant
    States starts;                  // state before segment i: slot i
    States slab_start;              // state of the sequence that the previous slab left unfinished
    States slab_end;
    States map_m, map_b;    // maps: slot i, or slot `sequence` where they are the call's own
    bool last_map = false;  // make the map of a sequence's last segment too, which no later segment needs
    bool wants_m = true;    // maps: M and B, or B alone
    bool first_m = true;    // make M of first segments, too
    // Maps of first segments start from the sequence's state, so that their B is the state after them.
    bool first_from_state = false;
    // Maps: rank of the first segment of each sequence that a launch makes, and the number of ranks.
    // beside_others: the launch before makes other maps and has itself waited for what precedes both.
    // Other launches: first_rank is the number of the first segment.
    std::int32_t first_rank = 0;
    Divisor ranks;
    bool beside_others = false;
    // At most two segments per sequence. The map of the first starts from the
    // sequence's state, so it has no M, and its B is the state before the second.
    // The carry of the first segment runs at the same time as its map.
    bool halves = false;
    // First segments are carried beside the maps of the others, by a launch for them alone (first_only).
    // That launch leaves their last states in slab_end, one slot per sequence.
    bool first_beside_maps = false, first_only = false;
};

// The rows of a warp: kWarpRows from `first` on, of which those below `end` exist.
struct RowWindow {
    int first, end, key_dim;

    // First row and channel of the lane.
    __device__ __forceinline__ int row() const { return first + static_cast<int>(threadIdx.x) % 32 / 4; }
    __device__ __forceinline__ static int channel() { return static_cast<int>(threadIdx.x) % 4 * 2; }
};
// The same of a lane that is given, so that the compiler derives nothing from threadIdx.x earlier.
struct LaneRows : RowWindow {
    int lane;

    __device__ __forceinline__ int row() const { return first + lane / 4; }
    __device__ __forceinline__ int channel() const { return lane % 4 * 2; }
};

// Calls body(pair, row, channel) for neighbouring pairs of the
// lane's numbers. Row and channel count from the lane's first.
template <int kTiles, class Body>
__device__ __forceinline__ void each_pair(float (&state)[kTiles][4], Body body) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float2 pair{state[tile][2 * half], state[tile][2 * half + 1]};
            body(pair, 8 * half, 8 * tile);
            state[tile][2 * half] = pair.x, state[tile][2 * half + 1] = pair.y;
        }
}

// Calls body(tiles, channel) for groups of four tiles (two where registers are short), in a loop whose code
// is that of one group: the groups take turns in the first places of `state`, and at last are where they
// were. For code that runs rarely and is long. channel: that of the group's first tile, counted from the
// lane's first.
template <int kTiles, class Body>
__device__ __forceinline__ void each_group(float (&state)[kTiles][4], Body body) {
    constexpr int kGroup = kTiles < 32 ? 4 : 2;
    static_assert(kTiles % kGroup == 0);
#pragma unroll 1
    for (int first = 0; first < kTiles; first += kGroup) {
        float group[kGroup][4];
#pragma unroll
        for (int tile = 0; tile < kGroup; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) group[tile][e] = state[tile][e];
        body(group, 8 * first);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                state[tile][e] =
                    tile + kGroup < kTiles ? state[tile + kGroup][e] : group[tile + kGroup - kTiles][e];
    }
}

// The lane's numbers in a tensor of states, of any strides and dtype.
struct StateElements {
    Element type;
    char* first;                // the lane's first number
    std::int64_t row, channel;  // strides, in bytes
    bool has_row[2];            // of the lane's two rows
    int channels;               // from the lane's first on

    template <class Rows>
    __device__ __forceinline__ StateElements(const States& states, std::int64_t base, const Rows& rows)
        : type(element(states.dtype)) {
        const int size = type == Element::kFloat32 ? 4 : 2, lane_row = rows.row(),
                  lane_channel = rows.channel();
        row = states.v * size, channel = states.k * size;
        first = static_cast<char*>(states.data) + base * size + lane_row * row + lane_channel * channel;
        has_row[0] = lane_row < rows.end, has_row[1] = lane_row + 8 < rows.end;
        channels = rows.key_dim - lane_channel;
    }
    __device__ __forceinline__ char* at(int half, int c) const {
        return first + half * 8 * row + c * channel;
    }
    __device__ __forceinline__ bool has(int half, int c) const { return has_row[half] && c < channels; }
};

// Whether the lane may load and store pairs as float2.
template <int kKey>
__device__ __forceinline__ bool in_pairs(const States& states, std::int64_t base, const RowWindow& rows) {
    return rows.first + kWarpRows <= rows.end && rows.key_dim == kKey && states.dtype == Dtype::kFloat32 &&
           states.k == 1 && (states.v | base) % 2 == 0 &&
           reinterpret_cast<std::uintptr_t>(states.data) % 8 == 0;
}

// Conversion of two channels of a state (from the lane's first one + `channel` on) before it is stored: none.
struct AsTheyAre {
    __device__ __forceinline__ float2 operator()(float2 pair, int) const { return pair; }
};

template <int kKey, class Rows, class Stored = AsTheyAre>
__device__ __forceinline__ void store_state(float (&state)[kKey / 8][4], const States& states,
                                            std::int64_t base, const Rows& rows, const Stored& stored = {}) {
    if (in_pairs<kKey>(states, base, rows)) {
        auto* to = static_cast<float*>(states.data) + base + rows.row() * states.v + rows.channel();
        each_pair(state, [&](const float2& pair, int row, int channel) {
            *reinterpret_cast<float2*>(to + row * states.v + channel) = stored(pair, channel);
        });
        return;
    }
    const StateElements to(states, base, rows);
    each_group(state, [&](auto& group, int first_channel) {
        each_pair(group, [&](const float2& of_state, int row, int more) {
            const int channel = first_channel + more;
            const float2 pair = stored(of_state, channel);
            store_float_if(to.at(row / 8, channel), to.type, pair.x, to.has(row / 8, channel));
            store_float_if(to.at(row / 8, channel + 1), to.type, pair.y, to.has(row / 8, channel + 1));
        });
    });
}

template <int kKey>
__device__ __forceinline__ void load_state(float (&state)[kKey / 8][4], const States& states,
                                           std::int64_t base, const RowWindow& rows) {
    if (in_pairs<kKey>(states, base, rows)) {
        const auto* from =
            static_cast<const float*>(states.data) + base + rows.row() * states.v + RowWindow::channel();
        each_pair(state, [&](float2& pair, int row, int channel) {
            pair = *reinterpret_cast<const float2*>(from + row * states.v + channel);
        });
        return;
    }
    const StateElements from(states, base, rows);
    each_group(state, [&](auto& group, int first_channel) {
        constexpr int kTiles = sizeof(group) / sizeof(group[0]);
        RawFloat raw[kTiles][4];  // all loads come before what waits for them
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int half = e / 2, channel = first_channel + 8 * tile + e % 2;
                raw[tile][e].load_coherent(from.at(half, channel), from.type, from.has(half, channel));
            }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) group[tile][e] = raw[tile][e].value(from.type);
    });
}

// Number in the slab of the segment that a CTA takes.
// With halves all first segments come before the second ones, because the latter wait for maps.
template <bool kMaps>
__device__ __forceinline__ int segment_number(const DeviceArgs& a, const Schedule& schedule,
                                              const CarryParams& p, int block) {
    const int i = a.by_value_heads.divide(p.row_blocks.divide(block));
    if (kMaps && !p.halves)
        return i + p.ranks.divide(i) * static_cast<int>(schedule.by_pieces.value - p.ranks.value) +
               p.first_rank;
    if (!p.halves || schedule.segments) return i + p.first_rank;
    const int sequences = schedule.max_segments / 2;
    return i % sequences * 2 + i / sequences;
}
// The segment of a CTA, number `block` of its carry. Warp-collective where the call is scheduled by warps.
template <int kKey, bool kMaps>
__device__ __forceinline__ Segment own_segment(const DeviceArgs& a, const Schedule& schedule,
                                               const CarryParams& p,
                                               int block = static_cast<int>(blockIdx.x)) {
    const int number = segment_number<kMaps>(a, schedule, p, block);
    Segment own = schedule.by_warp ? segment_by_warp<kTokens<kKey>>(a, schedule, number)
                                   : segment_of(a, schedule, number);
    if (!kMaps && p.first_beside_maps) {
        if ((own.rank == 0) != p.first_only) own = {};
        if (p.first_only) own.count = 1;  // its last state is stored like that of a slab's last segment
    }
    return own;
}

// Segments and chunks count in the order of the walk. kEitherWay: it may be reversed (DeviceArgs), so that
// the first chunk of its first segment is the last one of the sequence, which may have fewer tokens.
template <int kKey, bool kMaps, bool kEitherWay = false>
struct SegmentCursor {
    static constexpr int kRows = kTokens<kKey>;

    const DeviceArgs& a;
    const CarryParams& p;
    Segment segment;
    int number, value_head;  // number: of the segment in the slab
    bool of_m;               // the rows are those of M
    bool forgot = false;     // a map: the cursor starts behind the segment's first chunk, so M is zero
    RowWindow rows;
    std::int64_t first_token = 0;
    std::int32_t sequence_chunk = 0;  // the sequence's first chunk, among those of the call
    int batch = 0, last_count = 0;    // last_count: tokens of the last chunk (reversed: of the sequence's
                                      // first); all others are full
    StateSlots slots;
    bool starts_sequence = false, ends_sequence = false;

    __device__ __forceinline__ SegmentCursor(const DeviceArgs& args, const Schedule& schedule,
                                             const CarryParams& params, const Segment& of, int warp,
                                             int warps, int block = static_cast<int>(blockIdx.x))
        : a(args), p(params), segment(of) {
        asm volatile("" : "+r"(block));  // a cursor that is made again shares no registers with the first
        const int column = p.row_blocks.divide(block),
                  row_block = block - column * static_cast<int>(p.row_blocks.value);
        value_head = column - a.by_value_heads.divide(column) * a.value_heads;
        number = segment_number<kMaps>(a, schedule, p, block);
        of_m = kMaps && row_block >= p.value_blocks;
        rows.first = ((of_m ? row_block - p.value_blocks : row_block) * warps + warp) * kWarpRows;
        rows.end = of_m ? a.key_dim : a.value_dim, rows.key_dim = a.key_dim;
        if (segment.sequence < 0) return;
        sequence_chunk = schedule.slab_begin + segment.slot - segment.chunk;
        if (kMaps && p.fading) leave_out_forgotten();
        const TokenRange tokens = tokens_of(a, segment.sequence);
        slots = states_of(a, segment.sequence);
        starts_sequence = segment.chunk == 0, ends_sequence = chunk_start(segment.chunks) >= tokens.length;
        batch = static_cast<int>(tokens.batch);
        if (reversed()) {
            const std::int64_t begin = (std::int64_t{ceil_div(tokens.length, kRows)} - 1) * kRows;
            first_token = tokens.begin + begin - chunk_start(0);
            last_count = static_cast<int>(tokens.length - begin);
            return;
        }
        first_token = tokens.begin + chunk_start(0);
        if (segment.chunks > 0)
            last_count = static_cast<int>(
                min(tokens.length - chunk_start(segment.chunks - 1), static_cast<std::int64_t>(kRows)));
    }

    __device__ __forceinline__ bool reversed() const { return kEitherWay && a.reversed; }

    // Moves the start of a map to the last chunks that suffice to
    // forget the state before them (kForgotten). Warp-collective.
    __device__ __forceinline__ void leave_out_forgotten() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        float after = 0.0f;
#pragma unroll 1
        for (int last = segment.chunks - 1; last >= 0; last -= 32) {
            const int chunk = last - lane;
            float x[1] = {0.0f};
            if (chunk >= 0)
                x[0] =
                    p.fading[(static_cast<std::int64_t>(segment.slot) + chunk) * a.value_heads + value_head];
            running_sums(x);
            const unsigned enough = __ballot_sync(0xffffffffu, chunk > 0 && after + x[0] <= kForgotten);
            if (enough) {
                const int left_out = last - __ffs(static_cast<int>(enough)) + 1;
                segment.chunk += left_out, segment.slot += left_out, segment.chunks -= left_out;
                forgot = true;
                return;
            }
            after += __shfl_sync(0xffffffffu, x[0], 31);
        }
    }

    // Whether the CTA has no work: no such segment; the map of a last segment or the M of a first one that no
    // one reads; or a sequence with the null index.
    __device__ __forceinline__ bool nothing() const {
        if (segment.sequence < 0) return true;
        if (kMaps && segment.rank + 1 >= segment.count && !p.last_map) return true;
        if (of_m && segment.rank == 0 && !p.first_m) return true;
        return slots.skipped && (!kMaps || p.halves);
    }

    // Zeroes outputs that no cursor covers: those of sequences with
    // the null index, and those of tokens after the last sequence. kSeveral: tokens may write several times.
    template <bool kSeveral = false>
    __device__ __forceinline__ void zero_skipped(const Schedule& schedule) const {
        if (kMaps) return;
        if (a.cu_seqlens && number == 0 && schedule.slab_begin == 0)
            zero_outputs<kSeveral>(0, a.sequences > 0 ? Offsets(a).at(a.sequences) : 0, a.tokens);
        if (segment.sequence >= 0 && slots.skipped) {
            const int last = segment.chunks - 1, from = reversed() ? last : 0, to = reversed() ? 0 : last;
            zero_outputs<kSeveral>(batch, token(from), token(to) + count(to));
        }
    }

    // Tokens of the sequence before chunk `chunk` of the segment.
    __device__ __forceinline__ std::int64_t chunk_start(int chunk) const {
        return (static_cast<std::int64_t>(segment.chunk) + chunk) * kRows;
    }
    // First token of chunk `chunk`, and its number of tokens.
    __device__ __forceinline__ std::int64_t token(int chunk) const {
        return first_token + static_cast<std::int64_t>(reversed() ? -chunk : chunk) * kRows;
    }
    __device__ __forceinline__ int count(int chunk) const {
        if (!kEitherWay) return chunk + 1 < segment.chunks ? kRows : last_count;
        return chunk == (a.reversed ? -segment.chunk : segment.chunks - 1) ? last_count : kRows;
    }

    // Of the tokens whose last row is one from `first` to `last`.
    template <bool kSeveral>
    __device__ __forceinline__ void zero_outputs(std::int64_t batch, std::int64_t first,
                                                 std::int64_t last) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if (kEitherWay && !a.o.data) return;
        const auto token = [&](std::int64_t row) {  // counts_fit(); negative behind no chunks
            return kSeveral ? static_cast<std::int32_t>(row) / a.writes : row;
        };
        const std::int64_t end = token(last);
        for (std::int64_t t = token(first); t < end; ++t)
            if (lane < kWarpRows && rows.first + lane < a.value_dim)
                store_row(a.o.data, a.o.dtype, a.o.offset(batch, t, value_head) + rows.first + lane, 0.0f);
    }

    __device__ __forceinline__ void first_state(float (&state)[kKey / 8][4]) const {
        States from{};
        std::int64_t slot = 0;
        if (kMaps && !(p.first_from_state && segment.rank == 0)) {
            if (!starts_sequence && p.map_b.slots && !forgot)
                from = of_m ? p.map_m : p.map_b, slot = segment.sequence;
        } else if (!forgot) {
            if (segment.rank > 0)
                from = p.halves ? p.map_b : p.starts, slot = p.halves ? number - 1 : number;
            else if (!starts_sequence)
                from = p.slab_start;
            else if (slots.initial >= 0)
                from = a.initial, slot = slots.initial;
        }
        if (from.data) return load_state<kKey>(state, from, from.offset(slot, value_head), rows);
        const int lane_row = rows.row(), lane_channel = RowWindow::channel();
        each_pair(state, [&](float2& pair, int row, int channel) {
            const int diagonal = of_m && !forgot ? lane_row + row - lane_channel - channel : -1;
            pair = {diagonal == 0 ? 1.0f : 0.0f, diagonal == 1 ? 1.0f : 0.0f};
        });
    }

    // Number of chunk states of the packed sequences before this one.
    __device__ __forceinline__ std::int64_t chunk_states_before() const {
        if (a.chunk_tokens == kRows) return sequence_chunk;
        std::int64_t count = 0;
        for (std::int64_t i = 0; a.cu_seqlens && i < segment.sequence; ++i)
            count += (tokens_of(a, i).length + a.chunk_tokens - 1) / a.chunk_tokens;
        return count;
    }

    // Stores the state before chunk `chunk` of the segment wherever the
    // call asks for it: final state, dense chunk states, checkpoints.
    // Rows of the plan are scanned one by one. The warp-wide search of recurrent/checkpoints.cuh
    // makes the compiler reorder the whole loop over chunks, also in calls without a plan.
    template <class Stored = AsTheyAre>
    __device__ __forceinline__ void store_asked(float (&state)[kKey / 8][4], int chunk,
                                                const Stored& stored = {}) const {
        const bool end = chunk == segment.chunks;
        if (kMaps && !end) return;
        const std::int64_t n = segment.sequence;
        const std::int64_t before =
            end && chunk > 0 ? chunk_start(chunk - 1) + last_count : chunk_start(chunk);
        const std::int64_t asked = !end || ends_sequence ? a.num_checkpoints : 0;
        if (!end && asked == 0 && !a.chunk_states.data) return;
#pragma unroll 1
        for (std::int64_t m = -2; m < asked; ++m) {
            States to{};
            std::int64_t base = 0;
            if (m == -2) {
                if (!end) continue;
                if (kMaps)
                    to = of_m ? p.map_m : p.map_b, base = to.offset(p.map_b.slots ? n : number, value_head);
                else if (!ends_sequence && segment.rank + 1 == segment.count)
                    to = p.slab_end, base = to.offset(n, value_head);
                else if (ends_sequence && slots.final >= 0) {
                    to = a.final, base = to.offset(slots.final, value_head);
                    if (kEitherWay && a.has_final && !a.has_final[n])
                        each_pair(state, [](float2& pair, int, int) { pair = {}; });
                }
            } else if (m == -1) {
                if (end || !a.chunk_states.data || before % a.chunk_tokens != 0) continue;
                const ChunkStates dense = chunk_states_of(a, n, value_head, chunk_states_before());
                const std::int64_t index = before / a.chunk_tokens;
                if (index >= dense.room) continue;
                to = a.chunk_states, base = dense.offset + index * to.slot;
            } else {
                if (a.checkpoint_plan.low(m, 0) != n || a.checkpoint_plan.low(m, 1) != before) continue;
                const std::int64_t slot = a.checkpoint_plan.at(m, 2);
                if (slot < 0 || slot >= a.checkpoints.slots) continue;
                to = a.checkpoints, base = to.offset(slot, value_head);
            }
            if (to.data) store_state<kKey>(state, to, base, rows, stored);
        }
    }
};

// The map of an additive segment: its decay, one number per channel. Empty with kKey = 0.
template <int kKey, bool kPerChannel>
struct DecayMap {
    float whole[kKey > 0 ? kKey / 32 : 1];

    template <class W>
    __device__ __forceinline__ explicit DecayMap(const W& cursor) {
        const States& m = cursor.p.map_m;
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < kKey / 32; ++i) {
            const int channel = lane + 32 * i;
            whole[i] = 1.0f;
            if (!cursor.starts_sequence && m.slots && channel < cursor.a.key_dim)
                whole[i] = static_cast<const float*>(
                    m.data)[m.offset(cursor.segment.sequence, cursor.value_head) + channel * m.k];
        }
    }
    __device__ __forceinline__ void pass(const float* decay) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < kKey / 32; ++i) whole[i] *= decay[kPerChannel ? lane + 32 * i : 0];
    }
    template <class W>
    __device__ __forceinline__ void store(const W& cursor) const {
        const States& m = cursor.p.map_m;
        if (!m.data) return;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const std::int64_t base =
            m.offset(m.slots ? cursor.segment.sequence : cursor.number, cursor.value_head);
#pragma unroll
        for (int i = 0; i < kKey / 32; ++i)
            if (lane + 32 * i < cursor.a.key_dim)
                static_cast<float*>(m.data)[base + (lane + 32 * i) * m.k] = whole[i];
    }
};

}  // namespace cula::cuda::chunked
