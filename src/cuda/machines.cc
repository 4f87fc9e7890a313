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
         {.prepare = 4.69, .carry = {0.92, 1.36}, .map = 1.23, .segment = {1.39, 2.71}, .fused = {2.4, 4.07}},
         {.prepare = 4.8, .carry = {0.911, 1.35}, .map = 1.36, .segment = {1.29, 2.52}, .fused = {2.4, 0}},
         {.prepare = 3.15, .carry = {0.952, 1.41}, .map = 0.431, .segment = {0.883, 1.36}, .halves = 0.625},
         {.prepare = 3.42, .carry = {0.717, 1.06}, .map = 0.369, .segment = {1.14, 2.22}},
         {.carry = {1.02, 1.5}, .map = 0.749, .segment = {0.832, 1.28}},
     }},
     .warps = {{
         {.prepare = 4.3, .carry = {3.4, 5.03}, .map = 2.64, .segment = {3.23, 6.29}},
         {.prepare = 4.59, .carry = {3.35, 4.95}, .map = 3.1, .segment = {2.66, 5.2}},
         {.prepare = 1.97, .carry = {4.42, 6.54}, .map = 1.23, .segment = {3.28, 5.05}},
         {.prepare = 3.48, .carry = {2.54, 3.76}, .map = 1.52, .segment = {1.37, 2.67}},
         {.prepare = 1.06, .carry = {3.26, 4.82}, .map = 1.33, .segment = {2.44, 3.76}},
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
    costs.prepare = prepare;
    return costs;
}

}  // namespace cula::cuda
