// SPDX-License-Identifier: Apache-2.0
// The table of measured costs. Its rows are what `python -m bench.fit` prints.
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
         {.prepare = 3.9, .carry = {1.2, 2.6}, .map = 1.0, .segment = {1.33, 2.6}, .fused = {2.3, 3.75}},
         {.prepare = 4.3, .carry = {1.2, 2.6}, .map = 1.0, .segment = {1.33, 2.6}, .fused = {2.82, 0.0}},
         {.prepare = 1.7, .carry = {1.2, 1.85}, .map = 0.9, .segment = {1.33, 2.05}, .halves = 0.85},
         {.prepare = 2.6, .carry = {1.0, 1.6}, .map = 0.8, .segment = {1.1, 1.7}},
         {.carry = {1.0, 1.6}, .map = 0.7, .segment = {1.1, 1.7}},
     }},
     .warps = {{
         {.prepare = 3.9, .carry = {2.0, 3.0}, .map = 1.6, .segment = {2.1, 3.1}},
         {.prepare = 4.3, .carry = {2.0, 3.0}, .map = 1.6, .segment = {2.1, 3.1}},
         {.prepare = 1.7, .carry = {2.0, 3.0}, .map = 1.6, .segment = {2.1, 3.1}},
         {.prepare = 2.6, .carry = {1.5, 2.2}, .map = 1.1, .segment = {1.6, 2.3}},
         {.prepare = 1.5, .carry = {1.5, 2.2}, .map = 1.1, .segment = {1.6, 2.3}},
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
