// SPDX-License-Identifier: Apache-2.0
// A CTA: its threads and its shared memory.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "runner.h"

namespace emulator {

namespace {

constexpr std::size_t kStackBytes = 256 * 1024, kPage = 4096;

void* map_with_guard(std::size_t bytes) {
    void* const base =
        mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    void* const inside = static_cast<char*>(base) + kPage;
    mprotect(inside, bytes, PROT_READ | PROT_WRITE);
    return inside;
}

}  // namespace

Cta::Cta()
    : threads(std::make_unique<Thread[]>(kMostThreads)),
      window(static_cast<unsigned char*>(map_with_guard(kMostSharedBytes))) {}

void Cta::start(const Kernel& kernel, unsigned of_block, Cluster& of, int of_rank) {
    block = of_block, cluster = &of, rank = of_rank;
    count = alive = static_cast<int>(kernel.config.blockDim.x);
    dynamic_bytes = kernel.config.dynamicSmemBytes;
    // The dynamic part ends where the guard page begins, as closely as its alignment allows.
    dynamic = window + (kMostSharedBytes - dynamic_bytes) / 1024 * 1024;
    most_static_bytes = std::min<std::size_t>(48 * 1024, kernel.shared_bytes - dynamic_bytes);
    std::memset(window, 0xff, kFirstStatic + most_static_bytes);
    std::memset(dynamic - 1024, 0xff, static_cast<std::size_t>(window + kMostSharedBytes - dynamic) + 1024);
    for (Barrier& barrier : barriers) barrier = {};
    for (Products& of_warp : products) of_warp = {};
    ready_warps = 0;
    std::fill(std::begin(ready_lanes), std::end(ready_lanes), 0u);
    for (int i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.cta = this;
        thread.number = i, thread.lane = i % 32, thread.warp = i / 32;
        thread.copies.clear(), thread.groups.clear();
        thread.stores.clear(), thread.store_groups.clear();
        if (!thread.stack) thread.stack = map_with_guard(kStackBytes);
        // Six registers, the address where it begins, and that of nothing, to which it must not return.
        void** const top = reinterpret_cast<void**>(static_cast<char*>(thread.stack) + kStackBytes) - 8;
        std::fill_n(top, 8, nullptr);
        top[6] = reinterpret_cast<void*>(&Runner::enter);
        thread.stack_pointer = top;
        make_ready(thread);
    }
}

std::string Cta::finish() const {
    const auto untouched = [](const unsigned char* from, const unsigned char* to) {
        return std::all_of(from, to, [](unsigned char byte) { return byte == 0xff; });
    };
    if (!untouched(dynamic + dynamic_bytes, window + kMostSharedBytes) || !untouched(dynamic - 1024, dynamic))
        return "has written shared memory beside its dynamic part";
    for (int warp = 0; warp < (count + 31) / 32; ++warp) {
        if (!products[warp].in_flight.empty()) return "ends while products (wgmma) are in flight";
        if (products[warp].issued != products[warp / 4 * 4].issued)
            return "has a warpgroup whose warps issue different products";
    }
    return {};
}

std::size_t Cta::address(const void* p) const {
    const auto* const byte = static_cast<const unsigned char*>(p);
    if (byte < window || byte > window + kMostSharedBytes)
        fail("takes the shared address of what is not in shared memory");
    return static_cast<std::size_t>(byte - window);
}

void* Cta::shared(std::uint32_t at, std::size_t bytes, std::size_t alignment) {
    unsigned char* const p = window + at;
    const bool in_static = p >= window + kFirstStatic && p + bytes <= window + cluster->static_end,
               in_dynamic = p >= dynamic && p + bytes <= dynamic + dynamic_bytes;
    if (!in_static && !in_dynamic)
        fail("accesses " + std::to_string(bytes) + " bytes of shared memory at " + std::to_string(at) +
             ", beyond what the CTA has: dynamic " + std::to_string(dynamic - window) + " + " +
             std::to_string(dynamic_bytes));
    if (at % alignment != 0)
        fail("accesses shared memory at " + std::to_string(at) + ", not a multiple of " +
             std::to_string(alignment));
    return p;
}

void* Cta::static_shared(const void* key, std::size_t bytes, std::size_t alignment) {
    const auto [found, is_new] = cluster->statics.emplace(key, 0);
    if (is_new) {
        const std::size_t step = std::max<std::size_t>(alignment, 16);
        found->second = (cluster->static_end + step - 1) / step * step;
        cluster->static_end = found->second + bytes;
        if (cluster->static_end > kFirstStatic + most_static_bytes)
            fail("has more static shared memory than there is");
    }
    return window + found->second;
}

// Its named barrier `number`, at which `threads` threads meet; 0: all.
Barrier& Cta::barrier(int number, int threads) {
    if (number < 0 || number >= kBarriers || threads % 32 != 0)
        fail("comes to barrier " + std::to_string(number) + " with " + std::to_string(threads) + " threads");
    Barrier& found = barriers[number];
    if (found.arrived > 0 && found.threads != threads)
        fail("comes to barrier " + std::to_string(number) + " with another count of threads");
    found.threads = threads;
    return found;
}

void Cta::complete(int number) {
    Barrier& barrier = barriers[number];
    const Reduced reduced{barrier.any, barrier.count == barrier.arrived, barrier.count};
    for (int i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        if (thread.state != Thread::kAtBarrier || thread.barrier != number) continue;
        thread.reduced = reduced;
        make_ready(thread);
    }
    barrier = {};
}

}  // namespace emulator
