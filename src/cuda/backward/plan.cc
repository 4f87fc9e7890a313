// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/plan.h"

#include <algorithm>
#include <array>
#include <string>

#include "cuda/machines.h"

namespace cula::cuda::backward {
namespace {

// Predicts what the walks take, whole and cut into segments. Of n segments the carry makes n - 1 maps and the
// return as many; the n - 2 between the first and the last have an M besides.
class WalkPlanner {
public:
    // longest: chunks of a sequence, or of a slab if that holds fewer. chunk_bytes: of a chunk and value
    // head, what the walks read and write.
    WalkPlanner(const chunked::PrefillShape& shape, bool diagonal_maps, const chunked::CarryTraits& carry,
                const Device& device, std::int64_t longest, std::size_t chunk_bytes)
        : shape_(shape),
          diagonal_maps_(diagonal_maps),
          carry_(carry),
          estimate_(device),
          costs_(estimate_.costs(carry.warpgroups, carry.family)),
          multiprocessors_(device.multiprocessors > 0 ? device.multiprocessors : Estimate::kMultiprocessors),
          longest_(longest),
          chunk_bytes_(static_cast<double>(chunk_bytes)) {}

    // The cheapest cut. wanted: kWhole, kSegments, or kAny. segments: if not 0, how many.
    // All segments run side by side, and have to promise a time that is shorter by 4 %.
    WalkCut choose(chunked::StrategyKind wanted, std::int64_t segments) const {
        constexpr double kWorthCutting = 0.96;
        const bool may_cut = wanted == chunked::StrategyKind::kSegments ||
                             (wanted == chunked::StrategyKind::kAny && !shape_.batch_invariant);
        const bool must_cut = wanted == chunked::StrategyKind::kSegments || segments > 1;
        const std::int64_t least = must_cut ? 1 : kLeastChunks,
                           most = may_cut ? std::max<std::int64_t>(longest_ / least, 1) : 1,
                           heads =
                               kDirections * std::max<std::int64_t>(shape_.sequences, 1) * shape_.value_heads;
        WalkCut best{rows(kManyWarps)};
        double best_time = 0.0;
        for (std::int64_t count = must_cut ? 2 : 1; count <= std::min<std::int64_t>(most, kMostSegments);
             ++count) {
            if (segments > 0 && count != segments) continue;
            for (const int warps : {kManyWarps, kFewWarps}) {
                const WalkCut cut{rows(warps), count};
                const bool fits = heads * cut.rows.blocks * count <= multiprocessors_;
                if (count > 1 && !must_cut && !fits) continue;
                const double time = predict(cut),
                             share = best.segments < 2 && count > 1 ? kWorthCutting : 1.0;
                if (best_time == 0.0 || time < share * best_time) best = cut, best_time = time;
            }
        }
        return best;
    }

    // Microseconds. Packed sequences may be alike, or all but one empty: the sum of both.
    double predict(const WalkCut& cut) const {
        const std::int64_t sequences = std::max<std::int64_t>(shape_.sequences, 1);
        const double chunks = static_cast<double>(shape_.tokens) / carry_.chunk_tokens;
        const double alike = predict(cut, sequences, chunks / static_cast<double>(sequences));
        return shape_.packed ? alike + predict(cut, 1, chunks) : alike;
    }

private:
    // Of calls that walk in one direction alone, too: where one slab holds both, their bits are those of
    // others.
    static constexpr int kDirections = 2;
    static constexpr std::int64_t kMostSegments = 32;
    static constexpr std::int64_t kLeastChunks = 4;      // of a segment
    static constexpr int kFewWarps = 4, kManyWarps = 8;  // of a CTA: Costs::carry[0] and [1]
    // What walks take in costs of a prefill's carry. No units: ratios of microseconds, measured on an H200
    // with K = V = 128 (docs/log/2026-11-25-backward-segments.md).
    struct Shares {
        double walk;   // a chunk of a walk, in chunks of a carry
        double wider;  // what many warps add to few, in what they add in a carry
        double map;    // a chunk of a map, in chunks of a walk
    };
    // mma.sync: a chunk takes as long as in a carry. Eight warps add 0.8 of what they add there (the log,
    // "Segments"). A map has no rows of outputs or of Q: its chunk is to that of a carry as 3.48 us to 5.08
    // (kChannelDelta in machines.cc).
    static constexpr Shares kWarpShares{.walk = 1.0, .wider = 0.8, .map = 0.7};
    // wgmma: a chunk takes 2.7 us with eight warps, where a carry's takes 1.4 (the log, "Walks by
    // warpgroups"); wider and map are not measured apart from it.
    static constexpr Shares kWarpgroupShares{.walk = 1.9, .wider = 1.0, .map = 1.0};
    const Shares& shares() const { return carry_.warpgroups ? kWarpgroupShares : kWarpShares; }
    // Bytes of a map, in those of a walk: it saves nothing.
    static constexpr double kMapBytes = 0.5;

    chunked::CarryRows rows(int warps) const {
        const int tiles = std::max(1, (shape_.value_dim + 15) / 16), step = carry_.warp_step,
                  used = std::min((tiles + step - 1) / step * step, warps);
        return {used, std::max(1, (tiles + used - 1) / used)};
    }
    double rounds(std::int64_t ctas) const {
        const std::int64_t whole = (ctas + multiprocessors_ - 1) / multiprocessors_;
        return static_cast<double>(whole);
    }
    double predict(const WalkCut& cut, std::int64_t sequences, double chunks) const {
        const std::int64_t heads = sequences * shape_.value_heads, blocks = cut.rows.blocks;
        const Shares& of = shares();
        const double wider = of.wider * (cut.rows.warps - kFewWarps) / (kManyWarps - kFewWarps),
                     chunk = of.walk * (costs_.carry[0] + (costs_.carry[1] - costs_.carry[0]) * wider),
                     memory = static_cast<double>(heads) * chunks * chunk_bytes_ / estimate_.copy_rate();
        const auto walks = [&](std::int64_t pieces) {
            return std::max(rounds(heads * blocks * kDirections * pieces) *
                                (estimate_.machine.round + chunk * chunks / static_cast<double>(pieces)),
                            memory);
        };
        if (cut.segments == 1) return walks(1);
        const double fixed = estimate_.machine.maps;
        const std::int64_t of_segment = (longest_ + cut.segments - 1) / cut.segments;
        if (chunks <= static_cast<double>(of_segment)) return fixed + walks(1);
        const std::int64_t n = static_cast<std::int64_t>(chunks / static_cast<double>(of_segment) + 0.999),
                           channels = (shape_.key_dim + 15) / 16,
                           of_m = diagonal_maps_ ? 0 : (channels + cut.rows.warps - 1) / cut.rows.warps;
        const double maps = std::max(rounds(heads * (kDirections * blocks * (n - 1) + of_m * (n - 2))) *
                                         of.map * chunk * chunks / static_cast<double>(n),
                                     kMapBytes * memory);
        return fixed + maps + walks(n) +
               estimate_.machine.compose * static_cast<double>(kDirections * heads * (n - 1));
    }

    const chunked::PrefillShape& shape_;
    bool diagonal_maps_;
    const chunked::CarryTraits& carry_;
    Estimate estimate_;
    Costs costs_;
    int multiprocessors_;
    std::int64_t longest_;
    double chunk_bytes_;
};

}  // namespace

BackwardPlan plan_backward(const Problem& problem, const Args& args, const chunked::CarryTraits& carry,
                           const ChunkBytes& bytes, const BackwardLimits& limits,
                           chunked::StrategyKind strategy) {
    const auto divide_up = [](std::int64_t x, std::int64_t y) { return (x + y - 1) / y; };
    BackwardPlan plan{.shape = chunked::shape_of(problem, carry.chunk_tokens),
                      .wanted = WantedGradients(args)};
    plan.shape.costs = {};  // the caller's, for as long as it plans
    if (problem.saves) plan.half = problem.pass == Pass::kPrefill ? Half::kFirst : Half::kSecond;
    if (plan.half == Half::kFirst) plan.wanted.any = true;

    const chunked::PrefillShape& shape = plan.shape;
    const std::size_t of_chunk = bytes.of_chunk(problem);
    const std::int64_t chunks = std::max<std::int64_t>(shape.chunks, 1),
                       longest =
                           std::max<std::int64_t>(1, static_cast<std::int64_t>(limits.slab_bytes / of_chunk)),
                       of_sequence = shape.packed ? 0 : shape.longest;
    // What slabs have a multiple of.
    const bool whole = of_sequence > 0 && of_sequence <= longest;
    const std::int64_t unit = whole ? of_sequence : 1, units = divide_up(chunks, unit),
                       slab_chunks = divide_up(units, divide_up(units, longest / unit)) * unit;
    plan.cuts_sequences = !whole && slab_chunks < chunks;
    const std::int64_t in_slab =
        std::max<std::int64_t>(1, std::min<std::int64_t>(shape.longest, slab_chunks));
    const WalkPlanner planner(shape, has_diagonal_map(problem.algorithm.update), carry, problem.device,
                              in_slab, bytes.of_walks);
    plan.cut = planner.choose(strategy, limits.segments);
    const std::int64_t segment_chunks = divide_up(in_slab, plan.cut.segments);
    plan.slab_chunks = static_cast<std::int32_t>(slab_chunks);
    plan.segment_chunks = static_cast<std::int32_t>(segment_chunks);
    plan.by_warp =
        shape.packed && shape.sequences <= chunked::kMostByWarp && plan.slabs() == 1 && !plan.makes_maps();
    std::int64_t segments = shape.sequences;
    if (shape.packed && !plan.by_warp)
        segments += divide_up(slab_chunks, segment_chunks);
    else if (!shape.packed && shape.longest > 0)
        segments = std::min(segments, divide_up(slab_chunks, shape.longest) + 1) *
                   divide_up(in_slab, segment_chunks);
    // A prefill needs one CTA in any case: it zeroes the outputs that belong to no sequence.
    plan.max_segments =
        static_cast<std::int32_t>(std::max<std::int64_t>(segments, plan.half == Half::kFirst ? 1 : 0));
    return plan;
}

void check_saved(const Problem& problem, const TensorRef& saved, const Saving& of, const BackwardPlan& plan) {
    const std::array<std::int64_t, 3> shape{plan.shape.chunks, problem.value_heads, of.words};
    const auto text = [](const auto& sizes) {
        return "[" + std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", " +
               std::to_string(sizes[2]) + "]";
    };
    if (plan.slabs() != 1 || !std::equal(shape.begin(), shape.end(), saved.size.begin()))
        throw Error(std::string(name(problem.pass)) + ": saved must have shape " + text(shape) +
                    " (chunks, value heads, words), got " + text(saved.size));
}

}  // namespace cula::cuda::backward
