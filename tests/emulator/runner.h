// SPDX-License-Identifier: Apache-2.0
// What the emulated device is made of: threads of a CTA are fibers of one host thread, CTAs of a cluster run
// together, clusters are shared out among host threads.
//
// A fiber runs until it waits: at a collective of its warp for the other lanes, at a barrier for other
// threads. Then the next lane of the warp that can run does so, or, where none can, a lane of another warp.
// Asynchronous copies take place when no fiber can run, when one polls memory, and, where the order is
// random, at any time. Where no fiber can run, not all have ended and nothing is in flight, the launch fails
// with what its threads wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "emulator/ptx.h"

namespace emulator {

struct Cta;

// cp.async
struct Copy {
    unsigned char* to;
    const void* from;
    int bytes, given;
};
// A bulk store to global memory: read() takes what is in shared memory, write() brings it to its place.
struct BulkStore {
    std::function<void()> read, write;
    bool was_read = false;
};

struct Thread {
    Cta* cta;
    int number, lane, warp;
    void* stack = nullptr;
    void* stack_pointer = nullptr;
    enum { kReady, kGathering, kAtBarrier, kBlocked, kExited } state;
    const char* collective;  // kGathering; kBlocked: what it waits for
    unsigned mask;
    void* own;
    int barrier;      // kAtBarrier
    const void* key;  // kBlocked
    bool is;          // what it has passed to the barrier
    Reduced reduced;  // what it gets
    std::vector<Copy> copies;
    std::vector<std::size_t> groups;  // the ends of the committed groups in `copies`
    std::vector<BulkStore> stores;
    std::vector<std::size_t> store_groups;
};

// An asynchronous copy in flight. from: null where the source is global memory, or registers.
struct AsyncCopy {
    const Cta *from, *to;
    const Thread* issuer;
    std::function<void()> copy;
};

struct Barrier {
    int arrived = 0, threads = 0, any = 0, count = 0;
};

// The products of a warp, its share of those of its warpgroup, that are in flight.
struct Products {
    // d of all lanes, from the first product on it until none is in flight.
    struct Sum {
        int tiles, in_flight = 0;
        float* lanes[32];
        std::vector<float> d;  // [16 x 8 tiles]
    };
    struct Product {
        Sum* sum;
        Element element;
        bool add, has_left;
        std::uint32_t a[32][4];
        std::uint64_t left, right;  // descriptors
        bool transposed_left, transposed_right;
        bool done = false;
    };
    std::deque<Product> in_flight;
    std::vector<std::size_t> groups;  // the ends of the committed ones in `in_flight`
    std::map<float*, std::unique_ptr<Sum>> sums;
    bool fenced = false;       // wgmma.fence since the start, or since the last wait
    std::uint64_t issued = 0;  // what all products were, in which the warps of a warpgroup must agree
};

struct Kernel {
    std::string name;
    const cudaLaunchConfig_t& config;
    const std::function<void()>& body;
    unsigned cluster;          // CTAs
    std::size_t shared_bytes;  // that a CTA may have, static and dynamic
    std::atomic<bool> failed = false;
};

struct Cluster;

// Static shared memory, then dynamic: together not more than a descriptor of wgmma can address.
inline constexpr std::size_t kMostSharedBytes = 256 * 1024;
inline constexpr int kMostThreads = 1024, kBarriers = 16;

struct Cta {
    Cta();
    void start(const Kernel& kernel, unsigned block, Cluster& of, int rank);
    // A piece of its shared memory, by its 32-bit address.
    void* shared(std::uint32_t address, std::size_t bytes, std::size_t alignment);
    void* static_shared(const void* key, std::size_t bytes, std::size_t alignment);
    std::size_t address(const void* p) const;
    Barrier& barrier(int number, int threads);
    void make_ready(Thread& thread) {
        thread.state = Thread::kReady;
        ready_lanes[thread.warp] |= 1u << thread.lane;
        ready_warps |= 1u << thread.warp;
    }
    void complete(int number);
    // What is wrong with it at its end, or nothing.
    std::string finish() const;

    static constexpr std::size_t kFirstStatic = 1024;
    std::unique_ptr<Thread[]> threads;
    unsigned char* const window;  // its shared memory
    Cluster* cluster = nullptr;
    unsigned block = 0;
    int rank = 0, count = 0, alive = 0;
    unsigned ready_warps = 0, ready_lanes[32] = {};
    Barrier barriers[kBarriers];
    Products products[32];  // of each warp
    unsigned char* dynamic = nullptr;
    std::size_t dynamic_bytes = 0, most_static_bytes = 0;
};

struct Cluster {
    std::vector<std::unique_ptr<Cta>> ctas;
    int alive = 0, arrived = 0;  // threads; those at the barrier of the cluster
    std::deque<AsyncCopy> in_flight;
    // Where static variables begin, the same in all CTAs.
    std::map<const void*, std::size_t> statics;
    std::size_t static_end = Cta::kFirstStatic;
};

// Runs clusters, one after another. Where a thread polls memory, further clusters become resident beside its
// own.
class Runner {
public:
    // Runs those that `next` gives, until it has no more. Returns what has gone wrong; empty: nothing.
    std::string run(Kernel& kernel, const std::function<bool(unsigned& first_block)>& next);
    std::string where() const;

    Thread& current() { return *current_; }
    Cta& cta() { return *current_->cta; }
    Cluster& cluster() { return *current_->cta->cluster; }

    [[noreturn]] void fail(const std::string& what);
    void gather(const char* name, unsigned mask, void* own, void (*run)(Lanes));
    Reduced barrier_sync(int number, int threads, bool is);
    void barrier_arrive(int number, int threads);
    void sync_cluster();
    // The running thread could go on, but others may run before; it asks again what they may have written.
    void pause();
    // The running thread waits for wake(key).
    void block_on(const void* key, const char* what);
    void wake(Cluster& of, const void* key);
    // Puts a copy of the running thread in flight.
    void defer(const Cta* from, const Cta& to, std::function<void()> copy);
    // Whether to do now what may be done later; with order 0 never.
    bool at_random(unsigned of) { return settings.order != 0 && random() % of == 0; }

    static void enter();  // where fibers begin
    static thread_local Runner* self;

private:
    void exit_thread();
    void end_cta(Cta& of);
    void switch_to(Thread& next);
    [[noreturn]] void leave();
    bool admit();
    void release();
    unsigned resident_ctas() const;
    Cta* ready_cta(unsigned turn);
    Thread* choose(const Thread* beside, unsigned turn = 0);
    int pick(unsigned mask, unsigned from);
    bool copy_something();
    void wait_for_others();
    void give_way(unsigned turn = 0);
    void complete_cluster();
    std::uint64_t random() {
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        return random_;
    }
    [[noreturn]] void fail_deadlocked();
    std::string deadlock() const;

    std::vector<std::unique_ptr<Cta>> unused_;
    std::vector<std::unique_ptr<Cluster>> resident_;
    Kernel* kernel_ = nullptr;
    const std::function<bool(unsigned&)>* next_ = nullptr;
    Thread* current_ = nullptr;
    const Thread* copying_ = nullptr;  // whose asynchronous copy takes place
    void* main_stack_pointer_ = nullptr;
    std::string error_;
    std::uint64_t random_ = 1;
    std::int64_t pauses_ = 0, copies_ = 0;  // copies in flight
    unsigned turn_ = 0;                     // of those that pause
};

Runner& running();
// Brings all bulk stores of a thread to memory.
void end_stores(Thread& thread);

}  // namespace emulator
