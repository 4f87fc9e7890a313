// SPDX-License-Identifier: Apache-2.0
// The table of measured costs: what `python -m bench.fit` printed (bench/results/<device>/machine.json).
#include "cuda/machines.h"

#include <algorithm>

namespace cula::cuda {
namespace {

constexpr Machine kMachines[] = {
    {.name = "NVIDIA H200",
     .compute_capability = 90,
     .clock_mhz = 1980,
     .memory_gbps = 4917,
     .warpgroups = {{
         {.prepare = 4.47,
          .carry = {0.932, 1.38},
          .map = 2.04,
          .segment = {0.426, 0.832},
          .fused = {2.25, 3.76},
          .joined = {19, 2.87}},
         {.prepare = 4.67,
          .carry = {0.913, 1.35},
          .map = 2,
          .segment = {0.464, 0.905},
          .fused = {2.4, 0},
          .joined = {17.5, 3.15}},
         {.prepare = 3.06, .carry = {0.952, 1.41}, .map = 1.08, .segment = {0.494, 0.761}, .halves = 0.636},
         {.prepare = 3.23, .carry = {0.721, 1.07}, .map = 0.81, .segment = {0.555, 1.08}},
         {.carry = {0.95, 1.41}, .map = 0.282, .segment = {0.663, 1.02}},
     }},
     .warps = {{
         {.prepare = 4.04, .carry = {3.43, 5.08}, .map = 3.48, .segment = {1.87, 3.64}},
         {.prepare = 4.19, .carry = {3.42, 5.06}, .map = 3.49, .segment = {1.82, 3.55}},
         {.prepare = 2.04, .carry = {4.44, 6.58}, .map = 2.74, .segment = {2.55, 3.92}},
         {.prepare = 3.37, .carry = {2.53, 3.75}, .map = 0.798, .segment = {1.95, 3.8}},
         {.prepare = 1.21, .carry = {3.22, 4.77}, .map = 1.18, .segment = {2.47, 3.8}},
     }}},
    {.name = "NVIDIA H100 80GB HBM3",
     .compute_capability = 90,
     .clock_mhz = 1980,
     .memory_gbps = 3352,
     .warpgroups = {{
         // Joined segments are not measured here; a chunk as much longer as in the fused kernel.
         {.prepare = 5.64,
          .carry = {0.932, 1.38},
          .map = 2.52,
          .segment = {0.515, 1},
          .fused = {2.3, 3.92},
          .joined = {19, 2.95}},
         {.prepare = 5.64,
          .carry = {0.952, 1.41},
          .map = 2.52,
          .segment = {0.537, 1.05},
          .fused = {2.4, 0},
          .joined = {17.5, 3.15}},
         {.prepare = 3.86, .carry = {0.885, 1.31}, .map = 1.09, .segment = {0.597, 0.919}, .halves = 0.657},
         {.prepare = 4.11, .carry = {0.732, 1.08}, .map = 1.54, .segment = {0.555, 1.08}},
         {.carry = {0.945, 1.4}, .map = 0.389, .segment = {0.663, 1.02}},
     }},
     .warps = {{
         {.prepare = 5.08, .carry = {3.43, 5.07}, .map = 3.55, .segment = {2.05, 3.99}},
         {.prepare = 5.08, .carry = {3.42, 5.06}, .map = 3.52, .segment = {2.05, 3.99}},
         {.prepare = 2.43, .carry = {4.33, 6.41}, .map = 1.4, .segment = {4.09, 6.3}},
         {.prepare = 4.6, .carry = {2.51, 3.72}, .map = 0.929, .segment = {1.92, 3.75}},
         {.prepare = 1.68, .carry = {3.11, 4.6}, .map = 0.692, .segment = {3, 4.62}},
     }}},
};

// Products per clock of one multiprocessor, relative to sm_80, as mma.sync reaches them.
double products_per_clock(int compute_capability) {
    if (compute_capability >= 90 && compute_capability < 120) return 1.25;
    return compute_capability == 80 ? 1.0 : 0.5;
}

bool is(const Machine& machine, const Device& device) {
    const auto near = [](double one, double other) { return one < 1.05 * other && other < 1.05 * one; };
    return machine.compute_capability == device.compute_capability &&
           near(machine.memory_gbps, device.memory_gbps);
}

const Machine& row_of(const Device& device) {
    const auto found = std::ranges::find_if(kMachines, [&](const Machine& row) { return is(row, device); });
    return found == std::end(kMachines) ? kMachines[0] : *found;
}

}  // namespace

std::span<const Machine> machines() { return kMachines; }

Estimate::Estimate(const Device& device) : machine(row_of(device)) {
    if (is(machine, device) || device.clock_mhz <= 0 || device.memory_gbps <= 0) return;
    const auto products_of = [](double clock_mhz, int compute_capability) {
        return clock_mhz * products_per_clock(compute_capability);
    };
    products = products_of(machine.clock_mhz, machine.compute_capability) /
               products_of(device.clock_mhz, device.compute_capability);
    memory_gbps = device.memory_gbps;
    memory =
        machine.memory_gbps / kMultiprocessors / (device.memory_gbps / std::max(device.multiprocessors, 1));
}

Costs Estimate::costs(bool with_warpgroups, Family family) const {
    const auto i = static_cast<std::size_t>(family);
    Costs costs = with_warpgroups ? machine.warpgroups[i] : machine.warps[i];
    const double prepare = costs.prepare * std::max(products, memory);
    for (double* cost : costs.all()) *cost *= products;
    costs.prepare = prepare, costs.joined[1] *= products;
    return costs;
}

}  // namespace cula::cuda
