// SPDX-License-Identifier: Apache-2.0
// The emulated device: threads of a CTA are fibers of one host thread, CTAs are shared out among host
// threads.
//
// A fiber runs until it waits: at a collective of its warp for the other lanes, at a barrier for other
// threads. Then the next lane of the warp that can run does so, or, where none can, a lane of another warp.
// Where no fiber can run and not all have ended, the CTA is deadlocked, and the launch fails with what its
// threads wait for.
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cuda_runtime_api.h"
#include "emulator/ptx.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

namespace {

constexpr std::size_t kStackBytes = 256 * 1024, kPage = 4096;
constexpr std::size_t kStaticBytes = 64 * 1024, kMostDynamicBytes = 228 * 1024;
constexpr int kMostThreads = 1024, kBarriers = 16;

void* map_with_guard(std::size_t bytes) {
    void* const base =
        mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    void* const inside = static_cast<char*>(base) + kPage;
    mprotect(inside, bytes, PROT_READ | PROT_WRITE);
    return inside;
}

// Saves the registers that a function must keep and the stack pointer, and continues on another stack.
extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

struct Copy {
    unsigned char* to;
    const void* from;
    int bytes, given;
};

struct Thread {
    int number, lane, warp;
    void* stack = nullptr;
    void* stack_pointer = nullptr;
    enum { kReady, kGathering, kAtBarrier, kExited } state;
    const char* collective;  // kGathering
    unsigned mask;
    void* own;
    int barrier;      // kAtBarrier
    bool is;          // what it has passed to the barrier
    Reduced reduced;  // what it gets
    std::vector<Copy> copies;
    std::vector<std::size_t> groups;  // the ends of the committed groups in `copies`
};

struct Barrier {
    int arrived = 0, threads = 0, any = 0, count = 0;
};

struct Kernel {
    std::string name;
    const cudaLaunchConfig_t& config;
    const std::function<void()>& body;
};

// Runs CTAs, one after another.
class Runner {
public:
    Runner()
        : threads_(std::make_unique<Thread[]>(kMostThreads)),
          window_(static_cast<unsigned char*>(map_with_guard(kStaticBytes + kMostDynamicBytes))) {
        for (int i = 0; i < kMostThreads; ++i) threads_[i].stack = map_with_guard(kStackBytes);
    }

    // Returns what has gone wrong; empty: nothing.
    std::string run(const Kernel& kernel, unsigned block);
    std::string where() const;

    Thread& current() { return *current_; }

    [[noreturn]] void fail(std::string what) {
        error_ = std::move(what);
        leave_cta();
    }

    void gather(const char* name, unsigned mask, void* own, void (*run)(Lanes));
    Reduced barrier_sync(int number, int threads, bool is);
    void barrier_arrive(int number, int threads);
    void pause() {
        if (++pauses_ > 100'000'000) fail("waits for memory that nothing writes");
        give_way();
    }

    void* dynamic_shared(std::size_t alignment) {
        if (alignment > 1024) fail("a dynamic shared array wants an alignment beyond 1024");
        return dynamic_;
    }
    void* static_shared(const void* key, std::size_t bytes, std::size_t alignment);
    std::size_t address(const void* p) {
        const auto* const byte = static_cast<const unsigned char*>(p);
        if (byte < window_ || byte > window_ + kStaticBytes + kMostDynamicBytes)
            fail("takes the shared address of what is not in shared memory");
        return static_cast<std::size_t>(byte - window_);
    }
    void* shared(std::uint32_t address, std::size_t bytes, std::size_t alignment) {
        unsigned char* const p = window_ + address;
        const bool in_static = p >= window_ + kFirstStatic && p + bytes <= window_ + static_end_,
                   in_dynamic = p >= dynamic_ && p + bytes <= dynamic_ + dynamic_bytes_;
        if (!in_static && !in_dynamic)
            fail("accesses " + std::to_string(bytes) + " bytes of shared memory at " +
                 std::to_string(address) + ", beyond what the CTA has: dynamic " +
                 std::to_string(dynamic_ - window_) + " + " + std::to_string(dynamic_bytes_));
        if (address % alignment != 0)
            fail("accesses shared memory at " + std::to_string(address) + ", not a multiple of " +
                 std::to_string(alignment));
        return p;
    }

private:
    static constexpr std::size_t kFirstStatic = 1024;

    static void enter() {
        Runner& runner = *self;
        runner.kernel_->body();
        runner.exit_thread();
    }
    void exit_thread();
    void start(int number);
    void switch_to(Thread& next) {
        Thread& from = *current_;
        current_ = &next;
        threadIdx.x = static_cast<unsigned>(next.number);
        emulator_switch(&from.stack_pointer, next.stack_pointer);
    }
    [[noreturn]] void leave_cta() {
        void* unused;
        emulator_switch(&unused, main_stack_pointer_);
        std::abort();
    }
    // The running thread waits: another one runs until this one can.
    void wait_for_others() {
        Thread* const next = choose(current_->warp);
        if (!next) fail_deadlocked();
        if (next != current_) switch_to(*next);
    }
    // The running thread could go on, but another one may run first.
    void give_way() {
        make_ready(*current_);
        if (Thread* const next = choose(-1); next != current_) switch_to(*next);
        current_->state = Thread::kReady;
    }
    void make_ready(Thread& thread) {
        thread.state = Thread::kReady;
        ready_lanes_[thread.warp] |= 1u << thread.lane;
        ready_warps_ |= 1u << thread.warp;
    }
    // Takes a thread that can run, of this warp if there is one.
    Thread* choose(int warp) {
        if (warp < 0 || ready_lanes_[warp] == 0) {
            if (ready_warps_ == 0) return nullptr;
            warp = pick(ready_warps_);
        }
        const int lane = pick(ready_lanes_[warp]);
        ready_lanes_[warp] &= ~(1u << lane);
        if (ready_lanes_[warp] == 0) ready_warps_ &= ~(1u << warp);
        return &threads_[warp * 32 + lane];
    }
    // A bit of the mask: the lowest, or the first from a random one on.
    int pick(unsigned mask) {
        if (settings.order == 0) return std::countr_zero(mask);
        const int from = static_cast<int>(random() % 32);
        return (std::countr_zero(std::rotr(mask, from)) + from) % 32;
    }
    std::uint64_t random() {
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        return random_;
    }
    [[noreturn]] void fail_deadlocked();
    void complete(int number);
    std::string finish();

public:
    static thread_local Runner* self;

private:
    std::unique_ptr<Thread[]> threads_;
    unsigned char* const window_;  // static shared memory, then dynamic
    const Kernel* kernel_ = nullptr;
    unsigned block_ = 0;
    int count_ = 0, alive_ = 0;
    Thread* current_ = nullptr;
    void* main_stack_pointer_ = nullptr;
    unsigned ready_warps_ = 0, ready_lanes_[32] = {};
    Barrier barriers_[kBarriers];
    unsigned char* dynamic_ = nullptr;
    std::size_t dynamic_bytes_ = 0, static_end_ = 0;
    std::map<const void*, void*> statics_;
    std::string error_;
    std::uint64_t random_ = 1;
    std::int64_t pauses_ = 0;
};

thread_local Runner* Runner::self = nullptr;

std::string Runner::where() const {
    if (!kernel_) return "outside of kernels";
    std::string text = kernel_->name + ", block " + std::to_string(block_) + " of " +
                       std::to_string(kernel_->config.gridDim.x);
    if (current_) text += ", thread " + std::to_string(current_->number);
    return text;
}

void Runner::start(int number) {
    Thread& thread = threads_[number];
    thread.number = number, thread.lane = number % 32, thread.warp = number / 32;
    thread.copies.clear(), thread.groups.clear();
    // Six registers, the address where it begins, and that of nothing, to which it must not return.
    void** top = reinterpret_cast<void**>(static_cast<char*>(thread.stack) + kStackBytes) - 8;
    std::fill_n(top, 8, nullptr);
    top[6] = reinterpret_cast<void*>(&enter);
    thread.stack_pointer = top;
    make_ready(thread);
}

std::string Runner::run(const Kernel& kernel, unsigned block) {
    kernel_ = &kernel, block_ = block;
    self = this;
    count_ = alive_ = static_cast<int>(kernel.config.blockDim.x);
    dynamic_bytes_ = kernel.config.dynamicSmemBytes;
    // The dynamic part ends where the guard page begins, as closely as its alignment allows.
    dynamic_ = window_ + kStaticBytes + (kMostDynamicBytes - dynamic_bytes_) / 1024 * 1024;
    static_end_ = kFirstStatic;
    statics_.clear();
    std::memset(window_, 0xff, kFirstStatic);
    std::memset(dynamic_ - 1024, 0xff,
                static_cast<std::size_t>(window_ + kStaticBytes + kMostDynamicBytes - dynamic_) + 1024);
    for (Barrier& barrier : barriers_) barrier = {};
    error_.clear();
    random_ = (settings.order + 1) * 0x9e3779b97f4a7c15u + (block + 1) * 0xbf58476d1ce4e5b9u;
    pauses_ = 0;
    ready_warps_ = 0;
    std::fill(std::begin(ready_lanes_), std::end(ready_lanes_), 0u);
    for (int i = 0; i < count_; ++i) start(i);
    current_ = choose(-1);
    threadIdx = {static_cast<unsigned>(current_->number), 0, 0}, blockIdx = {block, 0, 0};
    blockDim = {kernel.config.blockDim.x, 1, 1}, gridDim = {kernel.config.gridDim.x, 1, 1};
    emulator_switch(&main_stack_pointer_, current_->stack_pointer);
    if (error_.empty()) {
        const auto untouched = [](const unsigned char* from, const unsigned char* to) {
            return std::all_of(from, to, [](unsigned char byte) { return byte == 0xff; });
        };
        if (!untouched(dynamic_ + dynamic_bytes_, window_ + kStaticBytes + kMostDynamicBytes) ||
            !untouched(dynamic_ - 1024, dynamic_))
            error_ = "has written shared memory beside its dynamic part";
    }
    std::string error = error_.empty() ? "" : where() + ": " + error_;
    kernel_ = nullptr, current_ = nullptr;
    return error;
}

void Runner::exit_thread() {
    current_->state = Thread::kExited;
    --alive_;
    if (Barrier& all = barriers_[0]; all.arrived > 0 && all.threads == 0 && all.arrived == alive_)
        complete(0);
    Thread* const next = choose(current_->warp);
    if (!next && alive_ > 0) fail_deadlocked();
    if (!next) leave_cta();
    switch_to(*next);
    std::abort();
}

void Runner::gather(const char* name, unsigned mask, void* own, void (*run)(Lanes)) {
    Thread& thread = *current_;
    Thread* const warp = &threads_[thread.warp * 32];
    if ((mask >> thread.lane & 1u) == 0) fail(std::string(name) + " without the calling lane in its mask");
    thread.state = Thread::kGathering;
    thread.collective = name, thread.mask = mask, thread.own = own;
    void* lanes[32] = {};
    const int present = std::min(32, count_ - thread.warp * 32);
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        const int lane = std::countr_zero(rest);
        if (lane >= present) fail(std::string(name) + " of a lane that does not exist");
        const Thread& other = warp[lane];
        if (other.state == Thread::kExited) continue;  // it counts as present, and has nothing to give
        if (other.state != Thread::kGathering || other.collective != name || other.mask != mask)
            return wait_for_others();
        lanes[lane] = other.own;
    }
    run(lanes);
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        Thread& other = warp[std::countr_zero(rest)];
        if (other.state == Thread::kGathering) make_ready(other);
    }
    if (settings.order != 0 && random() % 16 == 0) return give_way();
    ready_lanes_[thread.warp] &= ~(1u << thread.lane);
    if (ready_lanes_[thread.warp] == 0) ready_warps_ &= ~(1u << thread.warp);
}

void Runner::complete(int number) {
    Barrier& barrier = barriers_[number];
    const Reduced reduced{barrier.any, barrier.count == barrier.arrived, barrier.count};
    for (int i = 0; i < count_; ++i) {
        Thread& thread = threads_[i];
        if (thread.state != Thread::kAtBarrier || thread.barrier != number) continue;
        thread.reduced = reduced;
        make_ready(thread);
    }
    barrier = {};
}

Reduced Runner::barrier_sync(int number, int threads, bool is) {
    Thread& thread = *current_;
    Barrier& barrier = barriers_[number];
    if (barrier.arrived > 0 && barrier.threads != threads)
        fail("comes to barrier " + std::to_string(number) + " with another count of threads");
    barrier.threads = threads;
    ++barrier.arrived, barrier.any |= is, barrier.count += is;
    thread.state = Thread::kAtBarrier, thread.barrier = number;
    if (barrier.arrived == (threads > 0 ? threads : alive_)) complete(number);
    wait_for_others();
    return thread.reduced;
}

void Runner::barrier_arrive(int number, int threads) {
    Barrier& barrier = barriers_[number];
    if (barrier.arrived > 0 && barrier.threads != threads)
        fail("comes to barrier " + std::to_string(number) + " with another count of threads");
    barrier.threads = threads;
    if (++barrier.arrived == threads) complete(number);
}

void* Runner::static_shared(const void* key, std::size_t bytes, std::size_t alignment) {
    void*& found = statics_[key];
    if (!found) {
        static_end_ = (static_end_ + std::max<std::size_t>(alignment, 16) - 1) &
                      ~(std::max<std::size_t>(alignment, 16) - 1);
        if (static_end_ + bytes > kFirstStatic + 48 * 1024)
            fail("has more than 48 KiB of static shared memory");
        found = window_ + static_end_;
        static_end_ += bytes;
        std::memset(found, 0xff, bytes);
    }
    return found;
}

void Runner::fail_deadlocked() {
    std::map<std::string, std::string> waiting;
    for (int i = 0; i < count_; ++i) {
        const Thread& thread = threads_[i];
        std::string at = "have ended";
        if (thread.state == Thread::kAtBarrier) at = "wait at barrier " + std::to_string(thread.barrier);
        if (thread.state == Thread::kGathering) {
            char mask[16];
            std::snprintf(mask, sizeof mask, "%#x", thread.mask);
            at = std::string("wait at ") + thread.collective + " of lanes " + mask;
        }
        std::string& list = waiting[at];
        const bool follows = i > 0 && !list.empty() && list.ends_with("-" + std::to_string(i - 1));
        if (follows)
            list = list.substr(0, list.rfind('-') + 1) + std::to_string(i);
        else
            list += (list.empty() ? "" : ", ") + std::to_string(i) + "-" + std::to_string(i);
    }
    std::string text = "deadlock;";
    for (const auto& [at, list] : waiting) text += " threads " + list + " " + at + ";";
    current_ = nullptr;
    fail(text);
}

std::string name_of(const void* kernel) {
    Dl_info info;
    if (dladdr(kernel, &info) == 0 || !info.dli_sname) return "a kernel";
    int status = 0;
    char* const text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = text ? text : info.dli_sname;
    std::free(text);
    // Without the result's type and the parameters' types.
    int depth = 0;
    std::size_t end = name.size();
    for (std::size_t i = 0; i < name.size(); ++i) {
        depth += (name[i] == '<') - (name[i] == '>');
        if (depth == 0 && name[i] == '(' && name.compare(i, 5, "(anon") != 0) {
            end = i;
            break;
        }
    }
    name.resize(end);
    return name.starts_with("void ") ? name.substr(5) : name;
}

void report_signal(int signal, siginfo_t* info, void*) {
    char at[64];
    std::snprintf(at, sizeof at, " (%s at %p)\n", strsignal(signal), info->si_addr);
    const std::string message = "emulator: invalid memory access in " +
                                (Runner::self ? Runner::self->where() : std::string("the host's code")) + at +
                                doing + "\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, message.data(), message.size());
    _exit(139);
}

void catch_signals() {
    static thread_local std::unique_ptr<char[]> stack;
    if (stack) return;
    stack = std::make_unique<char[]>(64 * 1024);
    stack_t alternate{};
    alternate.ss_sp = stack.get(), alternate.ss_size = 64 * 1024;
    sigaltstack(&alternate, nullptr);
    struct sigaction action{};
    action.sa_sigaction = report_signal;
    action.sa_flags = SA_ONSTACK | SA_SIGINFO;
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}

std::unordered_map<const void*, std::size_t> shared_limits;

Runner& running() { return *Runner::self; }

}  // namespace

void fail(const std::string& what) { running().fail(what); }
void unknown_asm(const char* ptx) {
    running().fail(std::string("executes PTX that translate.py does not know: ") + ptx);
}
void gather(const char* name, unsigned mask, void* own, void (*run)(Lanes)) {
    running().gather(name, mask, own, run);
}
Reduced barrier_sync(int barrier, int threads, bool is) {
    return running().barrier_sync(barrier, threads, is);
}
void barrier_arrive(int barrier, int threads) { running().barrier_arrive(barrier, threads); }
void pause() { running().pause(); }
void* dynamic_shared(std::size_t alignment) { return running().dynamic_shared(alignment); }
void* static_shared(const void* key, std::size_t bytes, std::size_t alignment) {
    return running().static_shared(key, bytes, alignment);
}
std::size_t shared_address(const void* p) { return running().address(p); }
void* shared(std::uint32_t address, std::size_t bytes, std::size_t alignment) {
    return running().shared(address, bytes, alignment);
}

// --- asynchronous copies ---

void copy_async(std::uint32_t to, const void* from, int bytes, int given) {
    const auto size = static_cast<std::size_t>(bytes);
    auto* const target = static_cast<unsigned char*>(running().shared(to, size, size));
    if (given < 0 || given > bytes) running().fail("cp.async of more bytes than it writes");
    if (reinterpret_cast<std::uintptr_t>(from) % size != 0 && given > 0)
        running().fail("cp.async from an address that is not a multiple of " + std::to_string(bytes));
    std::memset(target, 0xff, size);
    running().current().copies.push_back({target, from, bytes, given});
}
void commit_group() {
    Thread& thread = running().current();
    thread.groups.push_back(thread.copies.size());
}
void wait_group(int pending) {
    Thread& thread = running().current();
    if (thread.groups.size() <= static_cast<std::size_t>(pending)) return;
    const std::size_t groups = thread.groups.size() - static_cast<std::size_t>(pending),
                      copies = thread.groups[groups - 1];
    for (std::size_t i = 0; i < copies; ++i) {
        const Copy& copy = thread.copies[i];
        if (copy.given > 0) std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.given));
        std::memset(copy.to + copy.given, 0, static_cast<std::size_t>(copy.bytes - copy.given));
    }
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(copies));
    thread.groups.erase(thread.groups.begin(), thread.groups.begin() + static_cast<std::ptrdiff_t>(groups));
    for (std::size_t& end : thread.groups) end -= copies;
}
void wait_all() {
    commit_group();
    wait_group(0);
}

// --- launches ---

void raise_shared_limit(const void* kernel, std::size_t bytes) { shared_limits[kernel] = bytes; }

void launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& body) {
    const Kernel of{name_of(kernel), config, body};
    const auto refuse = [&](const std::string& what) {
        throw std::runtime_error("emulator: " + of.name + ": " + what);
    };
    if (config.blockDim.x > kMostThreads || config.blockDim.x == 0 || config.gridDim.x == 0)
        refuse("launched with " + std::to_string(config.gridDim.x) + " blocks of " +
               std::to_string(config.blockDim.x));
    const std::size_t limit = shared_limits.contains(kernel) ? shared_limits[kernel] : 48 * 1024;
    if (config.dynamicSmemBytes > limit || config.dynamicSmemBytes > settings.shared_bytes)
        refuse("launched with " + std::to_string(config.dynamicSmemBytes) +
               " bytes of shared memory; it may have " +
               std::to_string(std::min(limit, settings.shared_bytes)));
    if (std::getenv("EMULATOR_VERBOSE"))
        std::fprintf(stderr, "%s: %u blocks of %u threads, %zu bytes of shared memory\n", of.name.c_str(),
                     config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes);

    std::vector<unsigned> blocks(config.gridDim.x);
    std::iota(blocks.begin(), blocks.end(), 0u);
    if (settings.order != 0) std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(settings.order));
    static std::vector<std::unique_ptr<Runner>> runners;
    const auto hosts = std::min<std::size_t>(static_cast<std::size_t>(settings.host_threads), blocks.size());
    while (runners.size() < hosts) runners.push_back(std::make_unique<Runner>());
    std::atomic<std::size_t> next = 0;
    std::mutex mutex;
    std::string error;
    const auto work = [&](Runner& runner) {
        catch_signals();
        for (std::size_t i; (i = next.fetch_add(1)) < blocks.size();) {
            std::string found = runner.run(of, blocks[i]);
            if (found.empty()) continue;
            next = blocks.size();
            const std::lock_guard lock(mutex);
            if (error.empty()) error = std::move(found);
        }
        Runner::self = nullptr;
    };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < hosts; ++i) others.emplace_back(work, std::ref(*runners[i]));
    work(*runners[0]);
    for (std::thread& other : others) other.join();
    if (!error.empty()) throw std::runtime_error("emulator: " + error);
}

}  // namespace emulator

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const emulator::Settings& of = emulator::settings;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrClockRate: *value = 1'980'000; break;
        case cudaDevAttrMemoryClockRate: *value = 2'619'000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
        case cudaDevAttrMultiProcessorCount: *value = of.multiprocessors; break;
        case cudaDevAttrComputeCapabilityMajor: *value = of.compute_capability / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = of.compute_capability % 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(of.shared_bytes); break;
    }
    return cudaSuccess;
}
