// SPDX-License-Identifier: Apache-2.0
// What the kernels of a chunked prefill cost on the GPUs that were measured, and an estimate for any other.
// chunked/plan.h predicts from it what each way to run a call would take. `python -m bench.fit` measures the
// GPU at hand and prints its row.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "cula/problem.h"

namespace cula::cuda {

// The kernels that share their costs: by how the state decays and is written, and, with softplus gates, by
// the search for out-of-range channels.
enum class Family : std::uint8_t {
    kChannelDelta,
    kChannelDeltaSoftplus,
    kTokenDelta,
    kChannelAdditive,
    kTokenAdditive,
};
inline constexpr std::size_t kFamilies = 5;

constexpr Family family(Algorithm algorithm, Gate gate) {
    const bool per_channel = varies_by_channel(algorithm.decay);
    switch (algorithm.update) {
        case Update::kAdditive: return per_channel ? Family::kChannelAdditive : Family::kTokenAdditive;
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct:
        case Update::kDplr: break;
    }
    if (!per_channel) return Family::kTokenDelta;
    return gate == Gate::kSoftplus ? Family::kChannelDeltaSoftplus : Family::kChannelDelta;
}

// Microseconds, for K = V = 128 and 16-bit inputs. A round is as many CTAs as there are multiprocessors, side
// by side. Of the two costs of a carry the first is for CTAs of four warps, the second for eight. 0: there is
// no such kernel.
struct Costs {
    double prepare = 0.0;    // the operands of one chunk and head, of a multiprocessor
    double carry[2] = {};    // a chunk of a round of carries of whole sequences
    double map = 0.0;        // a chunk of a round of maps
    double segment[2] = {};  // a chunk of a round of carries of segments
    double halves = 0.0;     // a chunk of a sequence that is cut in two
    double fused[2] = {};    // a chunk of a round of the fused kernel: in pairs of CTAs, in single ones
    // Segments that join: a round besides its chunks, a chunk; the mean of gates that forget and that last.
    double joined[2] = {};

    // Those that bench.fit finds.
    constexpr std::array<double*, 9> all() {
        return {&prepare,    &carry[0], &carry[1], &map,     &segment[0],
                &segment[1], &halves,   &fused[0], &fused[1]};
    }
};

struct Machine {
    std::string_view name;
    int compute_capability = 0;
    double clock_mhz = 0.0, memory_gbps = 0.0;  // Device
    // A kernel more in a call; a round of CTAs; maps and compose, which do not overlap with their
    // neighbours; compose, per value head and map.
    double kernel = 10.0, round = 8.0, maps = 12.0, compose = 0.19;
    // Joined: half of what it takes to pass a map of a segment before, and, of a chunk, to make its part of M
    // and to add to its outputs. Gates that forget need none of this: the mean of both kinds has each half
    // once, gates that last have it twice.
    double joined_map = 0.65, joined_chunk = 0.47;
    std::array<Costs, kFamilies> warpgroups, warps;  // of carries with wgmma (sm_90), and with mma.sync
};

// The first row is also the estimate for every other GPU, scaled by the rates of its data sheet.
std::span<const Machine> machines();

// A row of machines(), and by how much longer its kernels take on the device at hand: those bound by
// products, and those bound by memory. 1 on the machine itself, and where the device's rates are unknown.
struct Estimate {
    static constexpr int kMultiprocessors = 132;  // of the machines in the table

    const Machine& machine;
    double products = 1.0, memory = 1.0;
    double memory_gbps = machine.memory_gbps;  // of the device at hand

    explicit Estimate(const Device& device);

    // with_warpgroups: of carries with wgmma.
    Costs costs(bool with_warpgroups, Family family) const;
    // Bytes that a copy moves in a microsecond: nine tenths of the peak.
    double copy_rate() const { return 0.9e3 * memory_gbps; }
};

}  // namespace cula::cuda
