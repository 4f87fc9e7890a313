// SPDX-License-Identifier: Apache-2.0
// The memory of a chunked backward call: its workspace, and what a prefill has saved for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/carve.h"
#include "cuda/backward/plan.h"
#include "cuda/backward/saved.cuh"
#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/prepare_erase.h"
#include "cuda/chunked/timeline.h"

namespace cula::cuda::backward {

using chunked::ceil_div, chunked::ChunkOperands, chunked::kTokens, chunked::Segment;

// Args::saved: what a prefill makes of all chunks of a call, for the backward of that call.
template <class T, int kKey, bool kPerChannel>
struct SavedOfCall {
    using Operands = ChunkOperands<T, kKey, kPerChannel>;
    using Carried = CarrySlice<T, kKey>;

    Operands* operands;            // [chunks, HV]
    Carried* carried;              // [chunks, HV, slices]
    std::int32_t* is_compensated;  // [chunks, HV]

    // of_heads: chunks times value heads. slices: of one of them.
    SavedOfCall(void* base, std::int64_t of_heads, std::int64_t slices)
        : operands(static_cast<Operands*>(base)),
          carried(reinterpret_cast<Carried*>(operands + of_heads)),
          is_compensated(reinterpret_cast<std::int32_t*>(carried + of_heads * slices)) {
        static_assert(sizeof(Operands) % alignof(Carried) == 0);
    }
    // What one chunk takes of each value head.
    static std::int64_t words(std::int64_t slices) {
        constexpr std::int64_t kWord = sizeof(std::int32_t), kOperands = sizeof(Operands) / kWord,
                               kSlice = sizeof(Carried) / kWord;
        return kOperands + slices * kSlice + 1;
    }
};

template <class T, int kKey, bool kPerChannel>
struct BackwardWorkspace {
    using Operands = ChunkOperands<T, kKey, kPerChannel>;

    std::int32_t* first_chunk = nullptr;  // the schedule's: [N + 1], [chunks of a slab], [segments]
    chunked::PackedChunk* packed = nullptr;
    Segment* segments = nullptr;
    std::int32_t* is_compensated = nullptr;        // of operands: [chunks of a slab, HV]
    Operands* operands = nullptr;                  // [chunks of a slab, HV]
    CarrySlice<T, kKey>* carried = nullptr;        // [chunks of a slab, HV, slices]
    ReturnSlice<T, kKey>* returned = nullptr;      // likewise
    GradientScratch scratch;                       // its parameters: those of all chunks of the call
    float *states = nullptr, *d_states = nullptr;  // at slab borders: [borders, HV, V, K], [2, HV, V, K]
    // Of segments, in rows of kKey channels: M and M^T [segments, HV, K, kKey], or the diagonals of M
    // [segments, HV, kKey]; the others [segments, HV, V, kKey].
    float *map_m = nullptr, *map_m_turned = nullptr, *map_b = nullptr, *map_z = nullptr;
    float *starts = nullptr, *ends = nullptr;
    // Of rules with erase strengths; and the gradients of beta o v, in rows as erase.values.
    chunked::EraseOperands<T> erase;
    chunked::Timeline timeline;  // of tokens that write several times
    T* d_values = nullptr;
    std::size_t bytes = 0;

    static int slices_of(int value_dim) { return ceil_div(value_dim, kSliceValues); }

    static ChunkBytes chunk_bytes(const Problem& problem, const WantedGradients& wanted) {
        const auto slices = static_cast<std::size_t>(slices_of(static_cast<int>(problem.value_dim)));
        const std::size_t saved = slices * sizeof(SavedSlice<T, kKey>);
        return {
            .of_value_head = sizeof(Operands) + (wanted.any ? saved : 0),
            .of_head = shares_keys(problem.heads, problem.value_heads, wanted) ? kSums * sizeof(float) : 0,
            .of_walks = 2 * sizeof(Operands) + saved};
    }

    // base: the call's own workspace; saved: Args::saved, of a call that has it. Both may be null to count
    // the bytes. channels: parameters of a value head. diagonal: maps have no M that is a matrix.
    BackwardWorkspace(const BackwardPlan& plan, int heads, int channels, bool diagonal, void* base,
                      void* saved) {
        const chunked::PrefillShape& shape = plan.shape;
        Carver carver(base);
        const std::int64_t chunks = plan.slab_chunks, value_heads = shape.value_heads,
                           of_state = value_heads * shape.value_dim * shape.key_dim;
        if (shape.several_writes) timeline.carve_ends(carver, shape), timeline.carve_plan(carver, shape);
        if (shape.packed && !plan.by_warp) {
            first_chunk = carver.take<std::int32_t>(shape.sequences + 1);
            packed = carver.take<chunked::PackedChunk>(chunks);
            segments = carver.take<Segment>(plan.max_segments);
        }
        const std::int64_t of_heads = chunks * value_heads, slices = slices_of(shape.value_dim);
        if (plan.half == Half::kBoth) {
            is_compensated = carver.take<std::int32_t>(of_heads);
            operands = carver.take<Operands>(of_heads);
            if (plan.wanted.any) carried = carver.take<CarrySlice<T, kKey>>(of_heads * slices);
        } else if (saved) {
            const SavedOfCall<T, kKey, kPerChannel> from(saved, of_heads, slices);
            is_compensated = from.is_compensated, operands = from.operands, carried = from.carried;
        }
        if (plan.wanted.any && plan.half != Half::kFirst)
            returned = carver.take<ReturnSlice<T, kKey>>(of_heads * slices);
        if constexpr (kPerChannel && kHasAnchored<T, kKey>)
            if (plan.wanted.any && heads == value_heads) scratch.left = carver.take<std::uint8_t>(of_heads);
        if (shares_keys(heads, value_heads, plan.wanted))
            scratch.keys = carver.take<float>(chunks * heads * kSums);
        if (plan.wanted.parameters)
            scratch.parameters = carver.take<float>(shape.chunks * value_heads * (1 + channels));
        if (plan.cuts_sequences) {
            if (plan.wanted.any) states = carver.take<float>((plan.slabs() - 1) * of_state);
            d_states = carver.take<float>(2 * of_state);
        }
        if (plan.makes_maps()) {
            const std::int64_t rows = plan.max_segments * value_heads * kKey;
            map_m = carver.take<float>(rows * (diagonal ? 1 : shape.key_dim));
            if (!diagonal) map_m_turned = carver.take<float>(rows * shape.key_dim);
            if (plan.half != Half::kFirst)
                map_z = carver.take<float>(rows * shape.value_dim),
                ends = carver.take<float>(rows * shape.value_dim);
            if (plan.wanted.any && plan.half != Half::kSecond)
                map_b = carver.take<float>(rows * shape.value_dim),
                starts = carver.take<float>(rows * shape.value_dim);
        }
        if (shape.erases) {
            const std::int64_t rows = shape.tokens * value_heads;
            erase.carve(carver, rows, shape, plan.wanted.any && plan.half != Half::kFirst);
            if (plan.half != Half::kFirst)
                d_values = carver.take<T>(rows * chunked::width_of_rows(shape.value_dim));
        }
        bytes = carver.bytes();
    }

private:
    // Floats of a chunk and head: GradientScratch::keys.
    static constexpr std::int64_t kSums = 2 * kTokens<kKey> * kKey;

    static bool shares_keys(std::int64_t heads, std::int64_t value_heads, const WantedGradients& wanted) {
        return kPerChannel && wanted.keys && value_heads > heads;
    }
};

}  // namespace cula::cuda::backward
