// SPDX-License-Identifier: Apache-2.0
// How a prefill is spread over the device (docs/design/planning.md): candidates, the time that each is
// predicted to take, and the choice.
// Decisions follow from shapes and the device alone, so that the same call always gives the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "cuda/machines.h"
#include "cula/problem.h"

namespace cula::cuda::chunked {

// The most operands of a slab, and of a call that keeps them: that is one slab.
inline constexpr std::size_t kSlabBytes = std::size_t{2} << 30, kKeptBytes = std::size_t{16} << 30;
// CTAs of prepare per multiprocessor on sm_90: as many as fit its shared memory (of prepare_token where a CTA
// has a chunk and one or two value heads), with registers that do not spill.
// Fewer on other architectures.
inline constexpr int kChannelCtas = 3, kTokenCtas = 4;
// The most key channels of the instances for low-rank keys.
inline constexpr int kMostLowRankChannels = 128;
// prepare_token: the most value heads of a CTA that share q and k, a warp for each; the most pairs of q and
// k, of one value head each.
inline constexpr int kMostSpan = 4, kMostPairs = 2;
inline constexpr int kLeastSegment = 8;   // chunks: in shorter segments the maps cost more than they save
inline constexpr int kLeastJoined = 2;    // chunks of a segment that joins
inline constexpr int kLeastSegments = 3;  // below this many segments likewise
inline constexpr int kLeastHalved = 64;   // chunks of a sequence from which halves pay
// Chunks per segment from which Segments::first_beside_maps pays for its extra launch.
inline constexpr int kLeastBesideMaps = 32;

// How the value rows of a head are shared among CTAs of the carry: 16 rows for each warp.
struct CarryRows {
    int warps = 8, blocks = 1;
};

// One kernel that prepares chunks and carries states at once. warpgroups: of state warps in a CTA; 1 is the
// paired form, 2 the unpaired one.
struct Fused {
    int warpgroups = 1;
};
// A sequence is carried from its first chunk to its last.
struct Whole {
    CarryRows rows;
};
// A sequence is cut in two. The second half starts from the B of the map of the first, which starts from the
// sequence's state. The carry of the first half runs beside its map; a map takes less time per chunk than a
// carry that also writes outputs, so the first half is the longer one (5/8).
struct Halves {
    CarryRows rows;
};
// A sequence is cut into `count` segments, whose maps are made and composed before the carry.
struct Segments {
    CarryRows rows;
    std::int64_t count = 1;
    // The first segment is carried beside the maps of the others and needs no map.
    bool first_beside_maps = false;
    // Maps of first segments have no M, and run beside the maps of the others.
    bool first_apart = false;
};
// The fused kernel, paired, over segments of so many chunks, all of them at once, each of which makes its map
// besides; what they lack of the states before them is added behind them (sm90/fused/join.cuh).
struct Joined {
    static constexpr int kMostSegments = 32;  // of a sequence
    std::int64_t chunks = 1;
};
using Strategy = std::variant<Fused, Whole, Halves, Segments, Joined>;

// A strategy to force; kAny: the cheapest.
enum class StrategyKind : std::uint8_t { kAny, kFused, kWhole, kHalves, kSegments, kJoined };

constexpr std::string_view name(StrategyKind kind) {
    switch (kind) {
        case StrategyKind::kAny: return "any";
        case StrategyKind::kFused: return "fused";
        case StrategyKind::kWhole: return "whole";
        case StrategyKind::kHalves: return "halves";
        case StrategyKind::kSegments: return "segments";
        case StrategyKind::kJoined: return "joined";
    }
    return "unknown";
}

inline StrategyKind kind(const Strategy& strategy) {
    static_assert(std::variant_size_v<Strategy> == 5);
    return static_cast<StrategyKind>(strategy.index() + 1);
}

inline CarryRows rows_of(const Strategy& strategy) {
    return std::visit(
        [](const auto& of) {
            if constexpr (requires { of.rows; })
                return of.rows;
            else
                return CarryRows{};
        },
        strategy);
}

// A call, as far as its plan depends on it.
struct PrefillShape {
    // tokens: of all sequences together; where tokens are several rows of chunks, their rows.
    std::int64_t sequences = 1, tokens = 0;
    std::int64_t chunks = 0, longest = 0;  // upper bounds: of all sequences together, of one
    int value_heads = 1, key_dim = 0, value_dim = 0;
    bool packed = false, batch_invariant = false;
    bool segment = false;    // a segment call: maps of whole sequences
    bool kept = false;       // maps are made in any case, and chunk operands stay until a prefill reads them
    bool from_zero = false;  // no one needs the M of a sequence's first segment
    bool erases = false;     // a rule with erase strengths (erase_operands.cuh)
    bool converts_erase = false;         // its erase strengths come in rows that prepare_channel cannot read
    bool several_writes = false;         // chunks are rows of writes (timeline.h)
    bool low_rank = false;               // chunks are of two rows a token (low_rank_rows.cuh)
    bool joins = false;                  // Joined may take the call
    std::int64_t checkpoints = 0;        // rows of the checkpoint plan; counted where rows are not tokens
    std::span<const double> costs = {};  // Problem::costs
};

// The rows of chunks that a token is.
constexpr std::int64_t rows_of_token(const Problem& problem) {
    return takes_low_rank(problem.algorithm.update) ? 2 : problem.writes;
}

inline PrefillShape shape_of(const Problem& problem, int chunk_tokens) {
    const std::int64_t tokens = problem.tokens * rows_of_token(problem),
                       of_row = (tokens + chunk_tokens - 1) / chunk_tokens;
    const std::int64_t chunks =
        problem.varlen ? tokens / chunk_tokens + problem.sequences : of_row * problem.sequences;
    return {.sequences = problem.sequences,
            .tokens = tokens * (problem.varlen ? 1 : problem.sequences),
            .chunks = chunks,
            .longest = problem.varlen ? chunks : of_row,
            .value_heads = static_cast<int>(problem.value_heads),
            .key_dim = static_cast<int>(problem.key_dim),
            .value_dim = static_cast<int>(problem.value_dim),
            .packed = problem.varlen,
            .batch_invariant = problem.batch_invariant,
            .segment = problem.pass == Pass::kSegment,
            .erases = takes_erase(problem.algorithm.update),
            .several_writes = problem.writes > 1,
            .low_rank = takes_low_rank(problem.algorithm.update),
            .costs = problem.costs};
}

// What the plan has to know of a carry.
struct CarryTraits {
    int warp_step = 1;              // CTAs have a multiple of so many warps
    std::size_t operand_bytes = 0;  // of a chunk; 0 if it makes them itself
    // The column and the row of its costs.
    bool warpgroups = false;
    Family family = Family::kChannelDelta;
    bool first_beside_maps = false;  // whether first segments may be carried beside maps
    double first_apart = 1.0;        // of two segments, the first to the second, where the first has no M
    int chunk_tokens = 64;
};

struct Candidate {
    Strategy strategy;
    // Predicted, in microseconds: for sequences of equal length, and for one sequence with all tokens. The
    // host does not know which a packed call has, since cu_seqlens lies on the device.
    double expected = 0.0, skewed = 0.0;
    double if_gates_last = 0.0;  // of Joined, whose expected time is a mean: where no gate forgets
};

// Every way to run a call, with its predicted time.
class Candidates {
public:
    // packed: lengths are not known.
    explicit Candidates(bool packed) : packed_(packed) {}

    void add(const Candidate& candidate) { rows_[static_cast<std::size_t>(count_++)] = candidate; }
    std::span<const Candidate> all() const { return {rows_.data(), static_cast<std::size_t>(count_)}; }

    // The cheapest of a kind; null if there is none.
    //
    // The fused kernel cuts no sequence. Its forms are compared with Whole alone, by the expected time, so
    // that a batch and the same sequences packed get the same bits; with skewed lengths a form must not take
    // more than kMostRegret times as long. Otherwise a packed call takes the strategy with the least sum of
    // both times, since either may come.
    // What comes later in the list has to promise a time that is shorter by 4 %: what cuts more, and segments
    // with more row blocks, each of which reads the operands of its chunks once more.
    //
    // Segments that join are compared in the same way, by the expected time, with what would be chosen
    // without them, and must not take more than kMostIfGatesLast times as long where gates last.
    const Candidate* choose(StrategyKind wanted) const {
        constexpr double kMostRegret = 1.75, kWorthCutting = 0.96, kMostIfGatesLast = 1.05;
        const Candidate *fused = nullptr, *whole = nullptr, *other = nullptr;
        const auto time = [&](const Candidate& of) { return of.expected + (packed_ ? of.skewed : 0.0); };
        for (const Candidate& candidate : all()) {
            const StrategyKind of = kind(candidate.strategy);
            if (wanted == StrategyKind::kAny ? of == StrategyKind::kJoined : wanted != of) continue;
            if (of == StrategyKind::kWhole) whole = &candidate;
            if (of != StrategyKind::kFused && (!other || time(candidate) < kWorthCutting * time(*other)))
                other = &candidate;
        }
        if (wanted != StrategyKind::kAny && wanted != StrategyKind::kFused) return other;
        for (const Candidate& candidate : all()) {
            if (kind(candidate.strategy) != StrategyKind::kFused) continue;
            const bool pays = !whole || (candidate.expected < whole->expected &&
                                         candidate.skewed <= kMostRegret * whole->skewed);
            if (pays && (!fused || candidate.expected < fused->expected)) fused = &candidate;
        }
        const Candidate* best = fused ? fused : other;
        for (const Candidate& candidate : all())
            if (wanted == StrategyKind::kAny && kind(candidate.strategy) == StrategyKind::kJoined && best &&
                candidate.expected < best->expected && candidate.skewed <= kMostRegret * best->skewed &&
                candidate.if_gates_last <= kMostIfGatesLast * best->expected)
                best = &candidate;
        return best;
    }

private:
    std::array<Candidate, 8> rows_{};
    int count_ = 0;
    bool packed_;
};

// Makes the candidates of a call.
class Planner {
public:
    Planner(const PrefillShape& shape, const CarryTraits& carry, const Device& device)
        : shape_(shape),
          carry_(carry),
          estimate_(device),
          costs_(estimate_.costs(carry.warpgroups, carry.family)),
          multiprocessors_(device.multiprocessors > 0 ? device.multiprocessors : Estimate::kMultiprocessors),
          tiles_(static_cast<int>((shape.value_dim + 15) / 16)) {
        const std::int64_t chunks = std::max<std::int64_t>(shape.chunks, 1);
        const std::int64_t longest_slab =
            carry.operand_bytes == 0 || shape.kept
                ? chunks
                : std::max<std::int64_t>(1, static_cast<std::int64_t>(kSlabBytes / carry.operand_bytes) /
                                                std::max(shape.value_heads, 1));
        const auto costs = costs_.all();
        for (std::size_t i = 0; i < std::min(shape.costs.size(), costs.size()); ++i)
            *costs[i] = shape.costs[i];
        slabs_ = (chunks + longest_slab - 1) / longest_slab;
        slab_chunks_ = (chunks + slabs_ - 1) / slabs_;
        per_sequence_ = std::max<std::int64_t>(1, std::min<std::int64_t>(shape.longest, slab_chunks_));
    }

    std::int64_t slab_chunks() const { return slab_chunks_; }

    // Of a sequence that a slab holds whole.
    std::int64_t segment_chunks(const Strategy& strategy) const {
        if (std::holds_alternative<Halves>(strategy)) return (5 * per_sequence_ + 7) / 8;
        if (const auto* joined = std::get_if<Joined>(&strategy)) return joined->chunks;
        const auto* segments = std::get_if<Segments>(&strategy);
        if (!segments) return per_sequence_;
        if (segments->first_apart && segments->count == 2)
            return static_cast<std::int64_t>(std::ceil(static_cast<double>(per_sequence_) *
                                                       carry_.first_apart / (1.0 + carry_.first_apart)));
        return (per_sequence_ + segments->count - 1) / segments->count;
    }

    // with_fused: the call is one that the fused kernel takes.
    Candidates candidates(bool with_fused) const {
        Candidates found(shape_.packed);
        if (with_fused && shape_.tokens > 0 && shape_.sequences > 0)
            for (int warpgroups : {1, 2})
                if (costs_.fused[warpgroups - 1] > 0) add(found, Fused{warpgroups});
        if (shape_.joins && costs_.joined[0] > 0) add_joined(found);
        // Row blocks of a CTA: as many as it can have, or half as many, whichever takes less. Rows never
        // meet, so this changes no bit.
        const CarryRows widest = rows(whole_steps(std::min(tiles_, 8))),
                        half = rows(whole_steps((widest.warps + 1) / 2));
        // Memory bounds both alike, so it is left out.
        const auto expected_of = [&](const CarryRows& rows) {
            const Lengths of = expected();
            return rounds(heads(of) * rows.blocks) *
                   (estimate_.machine.round + per_chunk(costs_.carry, rows.warps) * of.chunks);
        };
        const CarryRows best = widest.warps > 4 && expected_of(half) < expected_of(widest) ? half : widest;
        add(found, Whole{best});
        const std::int64_t heads = shape_.sequences * shape_.value_heads;
        if (shape_.batch_invariant || heads == 0 || (shape_.segment && !shape_.kept)) return found;
        if (costs_.halves > 0 && !shape_.kept && per_sequence_ >= kLeastHalved &&
            2 * heads * best.blocks <= multiprocessors_)
            add(found, Halves{best});
        if (most_segments(widest) > most_segments(best)) add_segments(found, widest);
        add_segments(found, best);
        return found;
    }

private:
    // Lengths that a prediction is for: sequences, and chunks of each.
    struct Lengths {
        std::int64_t sequences;
        double chunks;
    };
    Lengths expected() const {
        constexpr double kEndless = 1e6;  // a batch-invariant call is planned as one endless sequence
        if (shape_.batch_invariant) return {1, kEndless};
        const std::int64_t sequences = std::max<std::int64_t>(shape_.sequences, 1);
        return {sequences,
                static_cast<double>(shape_.tokens) / carry_.chunk_tokens / static_cast<double>(sequences)};
    }
    Lengths skewed() const {
        if (shape_.batch_invariant) return expected();
        return {1, static_cast<double>(shape_.tokens) / carry_.chunk_tokens};
    }

    int whole_steps(int warps) const {
        return (warps + carry_.warp_step - 1) / carry_.warp_step * carry_.warp_step;
    }
    CarryRows rows(int warps) const { return {warps, warps > 0 ? (tiles_ + warps - 1) / warps : 1}; }
    double rounds(std::int64_t ctas) const {
        const std::int64_t whole = (ctas + multiprocessors_ - 1) / multiprocessors_;
        return static_cast<double>(whole);
    }
    // Of CTAs of so many warps, from the costs of four and of eight.
    static double per_chunk(const double (&cost)[2], int warps) {
        return cost[0] + (cost[1] - cost[0]) * 0.25 * (warps - 4);
    }
    std::int64_t heads(const Lengths& of) const { return of.sequences * shape_.value_heads; }

    std::int64_t most_segments(const CarryRows& rows) const {
        const std::int64_t heads = shape_.sequences * shape_.value_heads;
        return std::min<std::int64_t>(multiprocessors_ / (heads * rows.blocks),
                                      per_sequence_ / kLeastSegment);
    }
    int fused_blocks(int warpgroups) const {
        return static_cast<int>((shape_.value_dim + 127) / 128) * (warpgroups == 1 ? 2 : 1);
    }
    // As many equal segments as have room for all CTAs at once, or fewer, if that takes less.
    void add_joined(Candidates& found) const {
        if (shape_.batch_invariant || shape_.segment || shape_.kept || shape_.tokens == 0 ||
            shape_.sequences == 0)
            return;
        const Lengths of = expected();
        const auto of_one = std::llround(std::ceil(of.chunks));
        std::optional<Candidate> best;
        for (std::int64_t count = 2; count * kLeastJoined <= of_one; ++count) {
            if (of.sequences * count > Joined::kMostSegments) break;  // one may have all tokens
            if (heads(of) * fused_blocks(1) * count > multiprocessors_) break;
            const Joined way{(of_one + count - 1) / count};
            const double takes = time_of(way, of);
            if (!best || takes < best->expected)
                best = {way, takes, time_of(way, skewed()), takes + more_if_gates_last(way, of)};
        }
        if (best) found.add(*best);
    }
    // As many equal segments as fill the device.
    void add_segments(Candidates& found, const CarryRows& rows) const {
        const std::int64_t heads = shape_.sequences * shape_.value_heads;
        Segments cut{.rows = rows, .count = most_segments(rows)};
        if (cut.count < (shape_.kept ? 2 : kLeastSegments)) return;
        const std::int64_t map_blocks = 2 * this->rows(8).blocks;  // M has about as many rows as B
        cut.first_beside_maps = carry_.first_beside_maps && !shape_.packed && !shape_.kept &&
                                per_sequence_ >= kLeastBesideMaps * (cut.count + 1) &&
                                (slabs_ == 1 || shape_.sequences == 1) &&
                                heads * (rows.blocks + map_blocks * (cut.count - 1)) <= multiprocessors_;
        if (cut.first_beside_maps) ++cut.count;
        cut.first_apart = shape_.from_zero && heads * (map_blocks / 2 + map_blocks * (cut.count - 1)) <=
                                                  std::int64_t{multiprocessors_};
        add(found, cut);
    }

    void add(Candidates& found, const Strategy& strategy) const {
        found.add({strategy, time(strategy, expected()), time(strategy, skewed())});
    }

    double time(const Strategy& strategy, const Lengths& of) const {
        return std::visit([&](const auto& way) { return time_of(way, of); }, strategy);
    }

    double time_of(const Fused& way, const Lengths& of) const {
        return rounds(heads(of) * fused_blocks(way.warpgroups)) *
               (estimate_.machine.round + costs_.fused[way.warpgroups - 1] * of.chunks);
    }
    static double count_of(const Joined& way, const Lengths& of) {
        return std::max(1.0, std::ceil(of.chunks / static_cast<double>(way.chunks)));
    }
    // The mean of gates that forget and gates that last.
    double time_of(const Joined& way, const Lengths& of) const {
        const double count = count_of(way, of);
        return rounds(heads(of) * fused_blocks(1) * std::llround(count)) *
                   (costs_.joined[0] + costs_.joined[1] * of.chunks / count) +
               estimate_.machine.joined_map * (count - 1.0);
    }
    double more_if_gates_last(const Joined& way, const Lengths& of) const {
        const double count = count_of(way, of);
        return estimate_.machine.joined_map * (count - 1.0) +
               estimate_.machine.joined_chunk * of.chunks / count;
    }
    double time_of(const Whole& way, const Lengths& of) const {
        const double map = shape_.kept ? costs_.map * of.chunks : 0.0;
        return prepare(of) + carry(of, way.rows, per_chunk(costs_.carry, way.rows.warps)) + map;
    }
    double time_of(const Halves& way, const Lengths& of) const {
        // Packed sequences that are no longer than the first half of all tokens are not cut.
        if (of.chunks <= static_cast<double>(segment_chunks(way))) return time_of(Whole{way.rows}, of);
        return prepare(of) + estimate_.machine.round + costs_.halves * of.chunks;
    }
    double time_of(const Segments& way, const Lengths& of) const {
        const auto count = static_cast<double>(way.count);
        const std::int64_t maps = way.count - (shape_.kept ? 0 : way.first_beside_maps ? 2 : 1);
        const std::int64_t all_heads = shape_.sequences * shape_.value_heads;
        const double composed =
            estimate_.machine.maps + estimate_.machine.compose * static_cast<double>(maps * all_heads);
        if (of.chunks <= static_cast<double>(segment_chunks(way)))
            return time_of(Whole{way.rows}, of) + composed;
        double map = costs_.map * rounds(maps * all_heads * 2 * rows(8).blocks);
        if (way.first_beside_maps) map = std::max(map, per_chunk(costs_.carry, way.rows.warps));
        // Maps of rules without operands read k and v: half as much as a carry reads and writes. Operands are
        // in the second-level cache when a carry reads them after a map.
        const double copy = carry_.operand_bytes == 0 ? 1.5 * copied(of) : 0.0;
        return prepare(of) + composed + estimate_.machine.round +
               std::max((map + per_chunk(costs_.segment, way.rows.warps)) * of.chunks / count, copy);
    }

    double prepare(const Lengths& of) const {
        if (carry_.operand_bytes == 0) return 0.0;
        // Of erase strengths one more, which reads v and beta and writes their product, 16 bits each. Of
        // low-rank keys two more: one reads v and writes two rows of it, one reads a row of o and writes o.
        const double rows = static_cast<double>(heads(of)) * of.chunks * carry_.chunk_tokens,
                     erase = estimate_.machine.kernel + 6.0 * rows * shape_.value_dim / estimate_.copy_rate(),
                     low_rank = 2.0 * estimate_.machine.kernel +
                                5.0 * rows * shape_.value_dim / estimate_.copy_rate();
        return estimate_.machine.kernel + (shape_.erases ? erase : 0.0) + (shape_.low_rank ? low_rank : 0.0) +
               costs_.prepare * static_cast<double>(heads(of)) * of.chunks / multiprocessors_;
    }
    // Rounds of CTAs; all of them together are bound by memory.
    double carry(const Lengths& of, const CarryRows& rows, double chunk) const {
        return std::max(rounds(heads(of) * rows.blocks) * (estimate_.machine.round + chunk * of.chunks),
                        copied(of));
    }
    // What a copy of a carry's inputs and outputs would take: its operands, or q and k where it makes them
    // itself, and v and o.
    double copied(const Lengths& of) const {
        const double row = 4.0 * carry_.chunk_tokens, inputs = carry_.operand_bytes > 0
                                                                   ? static_cast<double>(carry_.operand_bytes)
                                                                   : row * shape_.key_dim;
        return static_cast<double>(heads(of)) * of.chunks * (inputs + row * shape_.value_dim) /
               estimate_.copy_rate();
    }

    PrefillShape shape_;
    CarryTraits carry_;
    Estimate estimate_;
    Costs costs_;
    int multiprocessors_, tiles_;
    std::int64_t slabs_ = 1, slab_chunks_ = 1, per_sequence_ = 1;
};

// Up to this many packed sequences that stay whole need no schedule
// kernel: every warp finds its chunk by itself, with sequence n in lane n.
inline constexpr int kMostByWarp = 32;

// The choice, and what follows from it: all that a launch needs to know besides its arguments.
struct PrefillPlan {
    Strategy strategy;
    PrefillShape shape;
    bool prepares = false;  // chunk operands are made, by a kernel of their own
    bool found = false;     // the workspace is one that a segment call has kept
    bool by_warp = false;   // as in Schedule
    std::int32_t slab_chunks = 1, segment_chunks = 1, max_segments = 1;

    bool cuts() const { return std::holds_alternative<Segments>(strategy); }
    bool joins() const { return std::holds_alternative<Joined>(strategy); }
    // Whether the fused kernel does everything.
    bool fuses() const { return std::holds_alternative<Fused>(strategy) || joins(); }
    bool makes_maps() const { return cuts() || std::holds_alternative<Halves>(strategy); }
    int slabs() const {
        return static_cast<int>(std::max<std::int64_t>(1, (shape.chunks + slab_chunks - 1) / slab_chunks));
    }
};

// None if there is no candidate of the kind that is wanted.
inline std::optional<PrefillPlan> plan_prefill(const PrefillShape& shape, const CarryTraits& carry,
                                               const Device& device, StrategyKind wanted, bool with_fused) {
    const auto divide_up = [](std::int64_t x, std::int64_t y) { return (x + y - 1) / y; };
    const Planner planner(shape, carry, device);
    const Candidates candidates = planner.candidates(with_fused);
    // Without tokens there is nothing to choose: states are copied, whatever is wanted.
    const bool empty = shape.tokens == 0 || shape.sequences == 0;
    const Candidate* const chosen = candidates.choose(empty ? StrategyKind::kWhole : wanted);
    if (!chosen) return std::nullopt;
    PrefillPlan plan{.strategy = chosen->strategy, .shape = shape};
    plan.shape.costs = {};  // the caller's, for as long as it plans
    const bool joins = plan.joins(), fused = plan.fuses();
    plan.prepares = carry.operand_bytes > 0 && !fused;
    // The fused kernel has no operands, so that all chunks are one slab.
    const std::int64_t slab_chunks = fused ? std::max<std::int64_t>(shape.chunks, 1) : planner.slab_chunks();
    const std::int64_t in_slab = std::min(shape.longest, slab_chunks);
    const std::int64_t segment_chunks =
        fused && !joins ? std::max<std::int64_t>(in_slab, 1) : planner.segment_chunks(plan.strategy);
    plan.slab_chunks = static_cast<std::int32_t>(slab_chunks);
    plan.segment_chunks = static_cast<std::int32_t>(segment_chunks);
    plan.by_warp =
        shape.packed && shape.sequences <= kMostByWarp && plan.slabs() == 1 && !plan.makes_maps() && !joins;
    std::int64_t segments = 0;
    if (plan.by_warp) {
        segments = shape.sequences;
    } else if (shape.packed) {
        segments = shape.sequences + divide_up(slab_chunks, segment_chunks);
    } else {
        const std::int64_t pieces =
            shape.longest > 0 ? divide_up(slab_chunks, shape.longest) + 1 : shape.sequences;
        segments = std::min(pieces, shape.sequences) * (in_slab > 0 ? divide_up(in_slab, segment_chunks) : 1);
    }
    // One CTA must zero the outputs that belong to no sequence.
    plan.max_segments = static_cast<std::int32_t>(std::max<std::int64_t>(segments, 1));
    return plan;
}

// What a CTA of prepare_token takes: `span` value heads that share q and k, of each of `pairs` pairs of chunk
// and head.
struct PrepareShare {
    std::int32_t span = 1, pairs = 1;

    std::size_t blocks(std::size_t chunks_of_heads) const {
        const std::size_t each = static_cast<std::size_t>(span) * static_cast<std::size_t>(pairs);
        return (chunks_of_heads + each - 1) / each;
    }
};
// The most that still leaves six CTAs for each multiprocessor, of which three or four fit at once.
inline PrepareShare prepare_share(std::size_t chunks_of_heads, int group, int multiprocessors) {
    const auto leaves_enough = [&](const PrepareShare& share) {
        return 2 * share.blocks(chunks_of_heads) >= 12 * static_cast<std::size_t>(multiprocessors);
    };
    for (std::int32_t span = kMostSpan; span > 1; span /= 2)
        if (group % span == 0 && leaves_enough({.span = span})) return {.span = span};
    return {.pairs = leaves_enough({.pairs = kMostPairs}) ? kMostPairs : 1};
}

// Whether a carry that only waits for chunk operands should wait for
// every chunk by itself (CarryWaits::per_chunk) rather than for all
// `blocks` CTAs of prepare, of which `resident` share a multiprocessor.
// It costs each CTA of prepare 1.4 us more, but the carry begins up to 11 us earlier.
// It pays where prepare leaves multiprocessors free from the start,
// and where more CTAs than fit at once end at different times.
// It does not where all CTAs just fit, since those end together.
inline bool pays_per_chunk(std::size_t blocks, int resident, int multiprocessors) {
    const auto all = static_cast<std::size_t>(multiprocessors);
    return 2 * blocks <= all || (blocks > static_cast<std::size_t>(resident) * all && blocks <= 12 * all);
}

}  // namespace cula::cuda::chunked
