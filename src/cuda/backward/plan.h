// SPDX-License-Identifier: Apache-2.0
// How a backward call is divided: into slabs, whose chunks share one workspace, and among the CTAs of the two
// walks. Host code; all follows from shapes and the device, so that the same call always gives the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/chunked/plan.h"
#include "cula/cula.h"

namespace cula::cuda::backward {

// The most that chunk operands and saved slices of one slab take.
inline constexpr std::size_t kBackwardSlabBytes = std::size_t{9} << 28;

// Whether gradients are wanted for which chunks have to be differentiated, and which scratch they need.
struct WantedGradients {
    bool keys, parameters, any;

    explicit WantedGradients(const Args& args)
        : keys(args.d_q || args.d_k),
          parameters(args.d_A_log || args.d_dt_bias),
          any(keys || parameters || args.d_g || args.d_beta || args.d_erase || args.d_a_key || args.d_b_key) {
    }
    static WantedGradients all() {
        WantedGradients wanted{Args{}};
        wanted.keys = wanted.parameters = wanted.any = true;
        return wanted;
    }
    bool operator==(const WantedGradients&) const = default;
};

// What of a backward call is planned. With Args::saved a prefill is its first half and the backward its
// second (launch.cuh).
enum class Half : std::uint8_t { kBoth, kFirst, kSecond };

// What a chunk takes of the workspace, of one value head and of one head; and what both walks read and write
// of it where all gradients are wanted.
struct ChunkBytes {
    std::size_t of_value_head = 0, of_head = 0, of_walks = 0;

    // Of all heads.
    std::size_t of_chunk(const Problem& problem) const {
        return of_value_head * static_cast<std::size_t>(problem.value_heads) +
               of_head * static_cast<std::size_t>(problem.heads);
    }
};

// How the walks of a call are divided.
struct WalkCut {
    chunked::CarryRows rows = {};
    std::int64_t segments = 1;  // of a sequence; 1: it is not cut
};

struct BackwardPlan {
    chunked::PrefillShape shape;
    WantedGradients wanted;  // of a first half: S and U of all chunks
    Half half = Half::kBoth;
    WalkCut cut = {};
    bool by_warp = false;         // as in Schedule
    bool cuts_sequences = false;  // a sequence may go on from one slab to the next
    std::int32_t slab_chunks = 1, segment_chunks = 1, max_segments = 1;

    bool makes_maps() const { return cut.segments > 1; }
    int slabs() const {
        return static_cast<int>(std::max<std::int64_t>(1, (shape.chunks + slab_chunks - 1) / slab_chunks));
    }
};

// What is not left to the planner: the most bytes that the chunks of a slab take, and, in tests, the segments
// of a sequence (0: as many as take least).
struct BackwardLimits {
    std::size_t slab_bytes = kBackwardSlabBytes;
    std::int64_t segments = 0;
};

// Batched sequences that a slab holds whole are not cut by slabs. The halves of a call are cut into the same
// segments as the whole call, so that its S and U have the same bits.
BackwardPlan plan_backward(const Problem& problem, const Args& args, const chunked::CarryTraits& carry,
                           const ChunkBytes& bytes, const BackwardLimits& limits = {},
                           chunked::StrategyKind strategy = chunked::StrategyKind::kAny);

// Throws Error unless `saved` has the shape that such a call needs, which then is one slab.
void check_saved(const Problem& problem, const TensorRef& saved, const Saving& of, const BackwardPlan& plan);

}  // namespace cula::cuda::backward
