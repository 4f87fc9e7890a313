// SPDX-License-Identifier: Apache-2.0
#include <cxxabi.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <unordered_map>

#include "runner.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

namespace {

constexpr std::size_t kMostResident = 256;  // clusters

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

}  // namespace

// --- what runs when ---

thread_local Runner* Runner::self = nullptr;

std::string Runner::where() const {
    if (!kernel_) return "outside of kernels";
    std::string text = kernel_->name;
    if (const Thread* const of = copying_ ? copying_ : current_)
        text += ", block " + std::to_string(of->cta->block) + " of " +
                std::to_string(kernel_->config.gridDim.x) + ", thread " + std::to_string(of->number);
    if (copying_) text += ", an asynchronous copy";
    return text;
}

void Runner::fail(const std::string& what) {
    error_ = where() + ": " + what;
    if (!current_) throw std::runtime_error(error_);  // in run()
    leave();
}
// Back to run().
void Runner::leave() {
    void* unused;
    emulator_switch(&unused, main_stack_pointer_);
    std::abort();
}

// Makes another cluster resident, if there is one.
bool Runner::admit() {
    unsigned first;
    if (resident_.size() >= kMostResident || !(*next_)(first)) return false;
    if (resident_.empty()) {  // the order in a cluster follows from its number
        random_ = (settings.order + 1) * 0x9e3779b97f4a7c15u + (first + 1) * 0xbf58476d1ce4e5b9u;
        turn_ = 0;
    }
    Cluster& cluster = *resident_.emplace_back(std::make_unique<Cluster>());
    for (unsigned rank = 0; rank < kernel_->cluster; ++rank) {
        if (unused_.empty()) unused_.push_back(std::make_unique<Cta>());
        cluster.ctas.push_back(std::move(unused_.back()));
        unused_.pop_back();
        cluster.ctas.back()->start(*kernel_, first + rank, cluster, static_cast<int>(rank));
        cluster.alive += cluster.ctas.back()->count;
    }
    return true;
}

// Takes away the clusters that have ended, or after a failure all.
void Runner::release() {
    std::erase_if(resident_, [&](const std::unique_ptr<Cluster>& cluster) {
        if (cluster->alive > 0 && error_.empty()) return false;
        for (std::unique_ptr<Cta>& cta : cluster->ctas) unused_.push_back(std::move(cta));
        return true;
    });
    if (resident_.empty()) copies_ = 0;
}

std::string Runner::run(Kernel& kernel, const std::function<bool(unsigned&)>& next) {
    kernel_ = &kernel, next_ = &next;
    self = this;
    error_.clear();
    pauses_ = 0;
    blockDim = {kernel.config.blockDim.x, 1, 1}, gridDim = {kernel.config.gridDim.x, 1, 1};
    try {
        while (error_.empty() && (!resident_.empty() || admit())) {
            Thread* const first = choose(nullptr);
            if (!first) fail(deadlock());
            current_ = first;
            threadIdx = {static_cast<unsigned>(first->number), 0, 0}, blockIdx = {first->cta->block, 0, 0};
            emulator_switch(&main_stack_pointer_, first->stack_pointer);
            current_ = nullptr, copying_ = nullptr;
            release();
        }
    } catch (const std::runtime_error&) {
        copying_ = nullptr;
    }
    release();
    kernel_ = nullptr;
    return error_;
}

void Runner::enter() {
    Runner& runner = *self;
    runner.kernel_->body();
    runner.exit_thread();
}

void Runner::exit_thread() {
    Cta& of = cta();
    end_stores(*current_);
    current_->state = Thread::kExited;
    --of.alive, --of.cluster->alive;
    if (Barrier& all = of.barriers[0]; all.arrived > 0 && all.threads == 0 && all.arrived == of.alive)
        of.complete(0);
    if (of.cluster->alive > 0 && of.cluster->arrived == of.cluster->alive) complete_cluster();
    if (of.alive == 0) end_cta(of);
    if (of.cluster->alive == 0) leave();
    Thread* const next = choose(current_);
    if (!next) fail_deadlocked();
    switch_to(*next);
    std::abort();
}

void Runner::end_cta(Cta& of) {
    for (const AsyncCopy& copy : of.cluster->in_flight)
        if (copy.from == &of || copy.to == &of)
            fail("ends while a copy to or from its shared memory is in flight");
    if (const std::string wrong = of.finish(); !wrong.empty()) fail(wrong);
}

void Runner::switch_to(Thread& next) {
    Thread& from = *current_;
    current_ = &next;
    threadIdx.x = static_cast<unsigned>(next.number), blockIdx.x = next.cta->block;
    emulator_switch(&from.stack_pointer, next.stack_pointer);
}

// The lowest bit of the mask from bit `from` on; where the order is random, from a random one on.
int Runner::pick(unsigned mask, unsigned from) {
    if (settings.order != 0) from = static_cast<unsigned>(random());
    from %= 32;
    const auto first = static_cast<unsigned>(std::countr_zero(std::rotr(mask, static_cast<int>(from))));
    return static_cast<int>((first + from) % 32);
}

// Takes a thread that can run: of the same warp if there is one, then of the same CTA. `turn` says which of
// the others comes first: numbers that follow each other come upon all.
Thread* Runner::choose(const Thread* beside, unsigned turn) {
    if (copies_ > 0 && at_random(8)) copy_something();
    Cta* cta = beside ? beside->cta : nullptr;
    int warp = beside ? beside->warp : 0;
    if (!cta || cta->ready_lanes[warp] == 0) {
        if (!cta || cta->ready_warps == 0 || (resident_ctas() > 1 && at_random(4))) cta = ready_cta(turn);
        while (!cta) {
            if (!copy_something()) return nullptr;
            cta = ready_cta(turn);
        }
        turn /= resident_ctas();
        warp = pick(cta->ready_warps, turn);
        turn /= 32;
    }
    const int lane = pick(cta->ready_lanes[warp], turn);
    cta->ready_lanes[warp] &= ~(1u << lane);
    if (cta->ready_lanes[warp] == 0) cta->ready_warps &= ~(1u << warp);
    return &cta->threads[warp * 32 + lane];
}
unsigned Runner::resident_ctas() const { return static_cast<unsigned>(resident_.size()) * kernel_->cluster; }
Cta* Runner::ready_cta(unsigned turn) {
    const std::size_t count = resident_ctas(), first = settings.order == 0 ? turn : random();
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = (first + i) % count;
        Cta* const cta = resident_[at / kernel_->cluster]->ctas[at % kernel_->cluster].get();
        if (cta->ready_warps != 0) return cta;
    }
    return nullptr;
}

void Runner::defer(const Cta* from, const Cta& to, std::function<void()> copy) {
    cluster().in_flight.push_back({from, &to, current_, std::move(copy)});
    ++copies_;
}
// Does one of the asynchronous copies, if there are any: the first, or where the order is random any.
bool Runner::copy_something() {
    for (const std::unique_ptr<Cluster>& cluster : resident_) {
        auto& in_flight = cluster->in_flight;
        if (in_flight.empty()) continue;
        const auto at = in_flight.begin() +
                        static_cast<std::ptrdiff_t>(settings.order == 0 ? 0 : random() % in_flight.size());
        const AsyncCopy copy = std::move(*at);
        in_flight.erase(at);
        --copies_;
        copying_ = copy.issuer;
        copy.copy();
        copying_ = nullptr;
        return true;
    }
    return false;
}

// The running thread waits: another one runs until this one can.
void Runner::wait_for_others() {
    Thread* const next = choose(current_);
    if (!next) fail_deadlocked();
    if (next != current_) switch_to(*next);
}
// The running thread could go on, but another one may run first.
void Runner::give_way(unsigned turn) {
    cta().make_ready(*current_);
    if (Thread* const next = choose(nullptr, turn); next != current_) switch_to(*next);
    current_->state = Thread::kReady;
}
void Runner::pause() {
    if (++pauses_ > 100'000'000) fail("waits for memory that nothing writes");
    if (kernel_->failed) fail("waits for memory after another CTA has failed");
    if (copies_ > 0) copy_something();
    if (pauses_ % 64 == 0) admit();
    give_way(++turn_);
}

void Runner::block_on(const void* key, const char* what) {
    current_->state = Thread::kBlocked;
    current_->key = key, current_->collective = what;
    wait_for_others();
}
void Runner::wake(Cluster& of, const void* key) {
    for (const std::unique_ptr<Cta>& cta : of.ctas)
        for (int i = 0; i < cta->count; ++i)
            if (Thread& thread = cta->threads[i]; thread.state == Thread::kBlocked && thread.key == key)
                cta->make_ready(thread);
}

void Runner::gather(const char* name, unsigned mask, void* own, void (*run)(Lanes)) {
    Thread& thread = *current_;
    Cta& of = *thread.cta;
    Thread* const warp = &of.threads[thread.warp * 32];
    if ((mask >> thread.lane & 1u) == 0) fail(std::string(name) + " without the calling lane in its mask");
    thread.state = Thread::kGathering;
    thread.collective = name, thread.mask = mask, thread.own = own;
    void* lanes[32] = {};
    const int present = std::min(32, of.count - thread.warp * 32);
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
        if (other.state == Thread::kGathering) of.make_ready(other);
    }
    if (at_random(16)) return give_way();
    of.ready_lanes[thread.warp] &= ~(1u << thread.lane);
    if (of.ready_lanes[thread.warp] == 0) of.ready_warps &= ~(1u << thread.warp);
}

Reduced Runner::barrier_sync(int number, int threads, bool is) {
    Thread& thread = *current_;
    Cta& of = *thread.cta;
    Barrier& barrier = of.barrier(number, threads);
    ++barrier.arrived, barrier.any |= is, barrier.count += is;
    thread.state = Thread::kAtBarrier, thread.barrier = number;
    if (barrier.arrived == (threads > 0 ? threads : of.alive)) of.complete(number);
    wait_for_others();
    return thread.reduced;
}

void Runner::barrier_arrive(int number, int threads) {
    if (++cta().barrier(number, threads).arrived == threads) cta().complete(number);
}

void Runner::sync_cluster() {
    Cluster& of = cluster();
    current_->state = Thread::kBlocked;
    current_->key = &of, current_->collective = "the barrier of the cluster";
    if (++of.arrived == of.alive) complete_cluster();
    wait_for_others();
}
void Runner::complete_cluster() {
    cluster().arrived = 0;
    wake(cluster(), &cluster());
}

void Runner::fail_deadlocked() {
    error_ = kernel_->name + ": " + deadlock();
    leave();
}
std::string Runner::deadlock() const {
    std::string text = "deadlock;";
    for (const std::unique_ptr<Cluster>& cluster : resident_)
        for (const std::unique_ptr<Cta>& cta : cluster->ctas) {
            std::map<std::string, std::string> waiting;
            for (int i = 0; i < cta->count; ++i) {
                const Thread& thread = cta->threads[i];
                std::string at = "have ended";
                if (thread.state == Thread::kAtBarrier)
                    at = "wait at barrier " + std::to_string(thread.barrier);
                if (thread.state == Thread::kBlocked) at = std::string("wait at ") + thread.collective;
                if (thread.state == Thread::kGathering) {
                    char mask[16];
                    std::snprintf(mask, sizeof mask, "%#x", thread.mask);
                    at = std::string("wait at ") + thread.collective + " of lanes " + mask;
                }
                std::string& list = waiting[at];
                if (i > 0 && !list.empty() && list.ends_with("-" + std::to_string(i - 1)))
                    list = list.substr(0, list.rfind('-') + 1) + std::to_string(i);
                else
                    list += (list.empty() ? "" : ", ") + std::to_string(i) + "-" + std::to_string(i);
            }
            if (resident_ctas() > 1) text += " block " + std::to_string(cta->block) + ":";
            for (const auto& [at, list] : waiting) text += " threads " + list + " " + at + ";";
        }
    return text;
}

namespace {

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

}  // namespace

Runner& running() { return *Runner::self; }

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
void* dynamic_shared(std::size_t alignment) {
    if (alignment > 1024) fail("a dynamic shared array wants an alignment beyond 1024");
    return running().cta().dynamic;
}
void* static_shared(const void* key, std::size_t bytes, std::size_t alignment) {
    return running().cta().static_shared(key, bytes, alignment);
}
std::size_t shared_address(const void* p) { return running().cta().address(p); }
void* shared(std::uint32_t address, std::size_t bytes, std::size_t alignment) {
    return running().cta().shared(address, bytes, alignment);
}

// --- asynchronous copies ---

void copy_async(std::uint32_t to, const void* from, int bytes, int given) {
    const auto size = static_cast<std::size_t>(bytes);
    auto* const target = static_cast<unsigned char*>(shared(to, size, size));
    if (given < 0 || given > bytes) fail("cp.async of more bytes than it writes");
    if (reinterpret_cast<std::uintptr_t>(from) % size != 0 && given > 0)
        fail("cp.async from an address that is not a multiple of " + std::to_string(bytes));
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
    const bool asks = shared_limits.contains(kernel);
    const std::size_t limit = asks ? std::min(shared_limits[kernel], settings.shared_bytes) : 48 * 1024;
    Kernel of{name_of(kernel), config, body, 1, asks ? settings.shared_bytes : 48 * 1024};
    for (unsigned i = 0; i < config.numAttrs; ++i)
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
            of.cluster = config.attrs[i].val.clusterDim.x;
    const auto refuse = [&](const std::string& what) {
        throw std::runtime_error("emulator: " + of.name + ": " + what);
    };
    if (config.blockDim.x > kMostThreads || config.blockDim.x == 0 || config.gridDim.x == 0)
        refuse("launched with " + std::to_string(config.gridDim.x) + " blocks of " +
               std::to_string(config.blockDim.x));
    if (config.gridDim.x % of.cluster != 0 || of.cluster > 8)
        refuse("launched with " + std::to_string(config.gridDim.x) + " blocks in clusters of " +
               std::to_string(of.cluster));
    if (config.dynamicSmemBytes > limit)
        refuse("launched with " + std::to_string(config.dynamicSmemBytes) +
               " bytes of shared memory; it may have " + std::to_string(limit));
    if (std::getenv("EMULATOR_VERBOSE"))
        std::fprintf(stderr, "%s: %u blocks of %u threads, %zu bytes of shared memory\n", of.name.c_str(),
                     config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes);

    std::vector<unsigned> clusters(config.gridDim.x / of.cluster);
    std::iota(clusters.begin(), clusters.end(), 0u);
    if (settings.order != 0) std::shuffle(clusters.begin(), clusters.end(), std::mt19937_64(settings.order));
    static std::vector<std::unique_ptr<Runner>> runners;
    const auto hosts =
        std::min<std::size_t>(static_cast<std::size_t>(settings.host_threads), clusters.size());
    while (runners.size() < hosts) runners.push_back(std::make_unique<Runner>());
    std::atomic<std::size_t> next = 0;
    std::mutex mutex;
    std::string error;
    const auto take = [&](unsigned& first_block) {
        const std::size_t i = next.fetch_add(1);
        if (i >= clusters.size()) return false;
        first_block = clusters[i] * of.cluster;
        return true;
    };
    const auto work = [&](Runner& runner) {
        catch_signals();
        if (std::string found = runner.run(of, take); !found.empty()) {
            next = clusters.size();
            const std::lock_guard lock(mutex);
            if (!of.failed.exchange(true)) error = std::move(found);
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
