// SPDX-License-Identifier: Apache-2.0
// Random calls, right and wrong, over the public headers: fuzz [count] [seed] [first call].
//
// Each tensor has memory of exactly its extent, and a sanitizer watches. What is refused is refused by an
// Error (or std::bad_alloc) and leaves every byte as it was; what is taken writes nothing but outputs, and
// every CPU target gives about what the oracle gives.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <string>

#include "cula/kernels.h"
#include "fuzz_calls.h"

namespace cula::test {
namespace {

struct Field {
    const char* name;
    TensorRef Args::* ref;
    bool output = false;
};

constexpr Field kFields[] = {
    {"q", &Args::q},
    {"k", &Args::k},
    {"v", &Args::v},
    {"g", &Args::g},
    {"gamma", &Args::gamma},
    {"beta", &Args::beta},
    {"erase", &Args::erase},
    {"a_key", &Args::a_key},
    {"b_key", &Args::b_key},
    {"A_log", &Args::A_log},
    {"dt_bias", &Args::dt_bias},
    {"cu_seqlens", &Args::cu_seqlens},
    {"initial_state", &Args::initial_state},
    {"final_state", &Args::final_state, true},
    {"initial_state_indices", &Args::initial_state_indices},
    {"final_state_indices", &Args::final_state_indices},
    {"has_initial_state", &Args::has_initial_state},
    {"o", &Args::o, true},
    {"checkpoints", &Args::checkpoints, true},
    {"checkpoint_plan", &Args::checkpoint_plan},
    {"chunk_states", &Args::chunk_states, true},
    {"state_indices", &Args::state_indices},
    {"num_accepted", &Args::num_accepted},
    {"snapshots", &Args::snapshots, true},
    {"snapshot_indices", &Args::snapshot_indices},
    {"parents", &Args::parents},
    {"segment_m", &Args::segment_m, true},
    {"segment_b", &Args::segment_b, true},
    {"kept", &Args::kept},
    {"d_o", &Args::d_o},
    {"d_final_state", &Args::d_final_state},
    {"d_q", &Args::d_q, true},
    {"d_k", &Args::d_k, true},
    {"d_v", &Args::d_v, true},
    {"d_g", &Args::d_g, true},
    {"d_beta", &Args::d_beta, true},
    {"d_A_log", &Args::d_A_log, true},
    {"d_dt_bias", &Args::d_dt_bias, true},
    {"d_initial_state", &Args::d_initial_state, true},
    {"d_erase", &Args::d_erase, true},
    {"d_a_key", &Args::d_a_key, true},
    {"d_b_key", &Args::d_b_key, true},
};

constexpr std::int64_t kLimits[] = {
    0,
    1,
    -1,
    2,
    3,
    7,
    63,
    64,
    65,
    257,
    1 << 20,
    std::numeric_limits<std::int32_t>::max(),
    std::int64_t{1} << 32,
    -(std::int64_t{1} << 32),
    std::int64_t{1} << 62,
    std::numeric_limits<std::int64_t>::max(),
    std::numeric_limits<std::int64_t>::min(),
    std::numeric_limits<std::int32_t>::min(),
};

[[noreturn]] void fail(const std::string& what) { throw std::logic_error(what); }

class Fuzz : RandomCall {
public:
    explicit Fuzz(std::uint64_t seed) : RandomCall(seed) {}

    // What became of the call.
    enum class Outcome : std::uint8_t { kTaken, kRefused };

    Outcome run() {
        if (random_.one_in(20)) return random_.one_in(2) ? run_compose() : run_explain();
        make_call();
        const bool spoilt = random_.one_in(2);
        if (spoilt)
            for (std::int64_t i = random_.between(1, 2); i > 0; --i) spoil();
        memory_.remember();
        const std::optional<std::vector<double>> oracle = outcome_of("reference");
        if (!oracle && !spoilt && args_.q.dtype != Dtype::kFloat64)
            fail("a valid call is refused: " + message_);
        for (const std::string_view target : targets()) {
            if (target == "reference" || !random_.one_in(2)) continue;
            memory_.restore();
            const std::optional<std::vector<double>> found = outcome_of(target);
            if (found && !oracle) fail(std::string(target) + " takes what the oracle refuses: " + message_);
            if (found && finite_) compare(target, *oracle, *found);
        }
        memory_.restore();
        return oracle ? Outcome::kTaken : Outcome::kRefused;
    }

    // Maps for compose(), some of them wrong.
    Outcome run_compose() {
        const std::int64_t P = random_.between(0, 3), N = random_.between(0, 3),
                           heads = random_.between(1, 3), rows = random_.between(0, 20),
                           keys = random_.between(1, 20);
        const Dtype dtype = random_.of({Dtype::kFloat32, Dtype::kFloat64});
        Composition given;
        given.m = tensor(dtype, {P, N, heads, random_.one_in(2) ? 1 : keys, keys}, -1, 1);
        given.b = tensor(dtype, {P, N, heads, rows, keys}, -1, 1);
        given.state = tensor(dtype, {N, heads, rows, keys}, -1, 1, true);
        if (random_.one_in(2))
            given.joins =
                integers(Dtype::kBool, {P}, std::vector<std::int64_t>(static_cast<std::size_t>(P), 1), true);
        if (random_.one_in(2)) {
            TensorRef* const tensors[] = {&given.m, &given.b, &given.state, &given.joins};
            spoil_layout(*tensors[random_.between(0, 3)]);
        }
        memory_.remember();
        Context context;
        if (random_.one_in(2)) context.parallel_for = std_threads(static_cast<int>(random_.between(1, 3)));
        bool taken = true;
        try {
            compose(given, context);
            memory_.expect_writes(given.state);
        } catch (const Error&) {
            taken = false;
        } catch (const std::bad_alloc&) {
            taken = false;
        }
        if (!memory_.kept()) fail("compose has written what is no state");
        return taken ? Outcome::kTaken : Outcome::kRefused;
    }

    // Whatever the numbers are, there is an answer.
    Outcome run_explain() {
        Problem problem;
        problem.pass =
            random_.of({Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment, Pass::kBackward});
        const auto drawn = random_.between(0, static_cast<std::int64_t>(kAlgorithms.size()) - 1);
        problem.algorithm = kAlgorithms[static_cast<std::size_t>(drawn)].algorithm;
        problem.device.kind = random_.of({DeviceKind::kCpu, DeviceKind::kCuda});
        problem.device.compute_capability = random_.of({0, 70, 80, 90, 100});
        problem.dtype = static_cast<Dtype>(random_.between(0, 6));
        for (auto number :
             {&Problem::batch, &Problem::tokens, &Problem::sequences, &Problem::heads, &Problem::value_heads,
              &Problem::key_dim, &Problem::value_dim, &Problem::draft_tokens})
            problem.*number = random_.one_in(3) ? some_limit() : random_.between(0, 300);
        problem.tree = random_.one_in(2), problem.varlen = random_.one_in(2);
        int chosen = 0;
        for (const Explanation& row : explain(problem)) chosen += row.chosen;
        if (chosen > 1) fail("explain chooses more than one kernel");
        return chosen ? Outcome::kTaken : Outcome::kRefused;
    }

    std::string describe_call() const {
        std::string text =
            std::string(name(pass_)) + " " + std::string(name(args_.algorithm)) + ", scale " +
            std::to_string(args_.scale) + ", gate " + std::to_string(static_cast<int>(args_.gate)) + " of " +
            std::to_string(args_.lower_bound) + ", null_index " + std::to_string(args_.null_index) +
            ", chunk_tokens " + std::to_string(args_.chunk_tokens);
        if (args_.qk_l2norm) text += ", qk_l2norm";
        if (args_.beta_is_logit) text += ", beta_is_logit";
        if (args_.allow_neg_eigval) text += ", allow_neg_eigval";
        if (args_.batch_invariant) text += ", batch_invariant";
        if (args_.keep) text += ", keep";
        for (const Field& field : kFields) {
            const TensorRef& ref = args_.*field.ref;
            if (ref)
                text += "\n  " + std::string(field.name) + ": " + std::string(name(ref.dtype)) + ", " +
                        layout_of(ref) + (ref.data ? "" : ", null");
        }
        return text;
    }

private:
    // --- a call that is wrong, or just different ---

    std::int64_t some_limit() { return kLimits[random_.between(0, std::ssize(kLimits) - 1)]; }

    TensorRef& some_tensor() {
        for (int tries = 0;; ++tries) {
            TensorRef& ref = args_.*kFields[random_.between(0, std::ssize(kFields) - 1)].ref;
            if (ref || tries == 50) return ref;
        }
    }

    void spoil() {
        switch (random_.between(0, 9)) {
            case 0: some_tensor().data = nullptr; break;
            case 1: some_tensor() = {}; break;
            case 2:
                args_.*kFields[random_.between(0, std::ssize(kFields) - 1)].ref = some_tensor();
                finite_ = false;
                break;
            case 3: spoil_values(); break;
            case 4: spoil_options(); break;
            case 5: {
                TensorRef& ref = some_tensor();
                if (ref.data) ref.data = static_cast<std::byte*>(ref.data) + random_.between(0, 1);
                // At an odd address a tensor of more than a byte per element is refused before it is read;
                // any other has to have all the memory that it claims.
                const bool odd = (reinterpret_cast<std::uintptr_t>(ref.data) & 1) != 0;
                if (ref.data && (!odd || size_bytes(ref.dtype) < 2)) memory_.place(ref);
                break;
            }
            default: spoil_layout(some_tensor()); break;
        }
    }

    void spoil_layout(TensorRef& ref) {
        const auto dim = static_cast<std::size_t>(random_.between(0, kMaxDims - 1));
        switch (random_.between(0, 3)) {
            case 0:
                ref.size[dim] = random_.one_in(2) ? some_limit() : ref.size[dim] + random_.between(-2, 2);
                break;
            case 1: ref.stride[dim] = random_.one_in(2) ? some_limit() : random_.between(-40, 40); break;
            case 2:
                ref.dtype =
                    static_cast<Dtype>(random_.one_in(4) ? random_.between(0, 255) : random_.between(0, 6));
                break;
            default: ref.ndim = static_cast<int>(random_.between(-1, kMaxDims + 2)); break;
        }
        const bool small = ref.size[dim] < kMostMutated && std::abs(ref.stride[dim] / 2) < kMostMutated;
        memory_.place(ref);
        if (!small || ref.ndim < 1 || size_bytes(ref.dtype) == 0) return;
        const bool decays = &ref == &args_.g || &ref == &args_.gamma;  // which do not grow
        memory_.fill(ref, random_, decays ? -1 : 0, decays ? 0 : 0.5);
    }

    // Of indices, lengths, flags and plans.
    void spoil_values() {
        constexpr TensorRef Args::* kValues[] = {
            &Args::cu_seqlens,    &Args::initial_state_indices, &Args::final_state_indices,
            &Args::state_indices, &Args::num_accepted,          &Args::snapshot_indices,
            &Args::parents,       &Args::checkpoint_plan,       &Args::has_initial_state,
        };
        const TensorRef& ref = args_.*kValues[random_.between(0, std::ssize(kValues) - 1)];
        if (!ref.data || !memory_.on_heap(ref)) return;
        const std::int64_t limit = some_limit();
        const bool close = random_.one_in(2);
        each_element(ref, [&](std::int64_t place) {
            if (!random_.one_in(3)) return;
            const std::int64_t value = close ? random_.between(-2, 5) : limit;
            std::byte* to = static_cast<std::byte*>(ref.data) + place;
            std::memcpy(to, &value, size_bytes(ref.dtype));
        });
    }

    void spoil_options() {
        const double huge = random_.of({0.0, 1e30, -1e300, HUGE_VAL, std::nan("")});
        switch (random_.between(0, 9)) {
            case 0: args_.scale = huge, finite_ = false; break;
            case 1: args_.lower_bound = huge, finite_ = false; break;
            case 2: args_.chunk_tokens = static_cast<int>(random_.between(-1, 200)); break;
            case 3: args_.null_index = static_cast<std::int32_t>(random_.between(-5, 5)); break;
            case 4: args_.gate = static_cast<Gate>(random_.between(0, 4)); break;
            case 5: args_.algorithm.decay = static_cast<Decay>(random_.between(0, 5)); break;
            case 6: args_.algorithm.update = static_cast<Update>(random_.between(0, 3)); break;
            case 7: args_.keep = !args_.keep; break;
            case 8: args_.allow_neg_eigval = !args_.allow_neg_eigval; break;
            default: pass_ = static_cast<Pass>(random_.between(0, 4)); break;
        }
    }

    // --- what comes of it ---

    bool is_output(const Field& field) const { return field.output && (args_.*field.ref).data; }

    // The values of all outputs, or none where the call is refused.
    std::optional<std::vector<double>> outcome_of(std::string_view backend) {
        Context context;
        const auto threads = static_cast<int>(random_.between(-1, 3));
        if (threads > 0) context.parallel_for = std_threads(threads);
        try {
            if (random_.one_in(2))
                run_in_own_workspace(context, backend);
            else
                run_pass(context, backend);
        } catch (const Error& error) {
            message_ = error.what();
            if (!memory_.kept()) fail("a refused call has written: " + message_);
            return {};
        } catch (const std::bad_alloc&) {
            message_ = "out of memory";
            if (!memory_.kept()) fail("a call without memory has written");
            return {};
        }
        std::vector<double> values;
        for (const Field& field : kFields) {
            const TensorRef& ref = args_.*field.ref;
            if (!is_output(field) || !memory_.on_heap(ref)) continue;
            memory_.expect_writes(ref);
            each_element(ref, [&](std::int64_t place) { values.push_back(read(element_at(ref, place), 0)); });
        }
        if (!memory_.kept()) fail("a call has written what is no output");
        return values;
    }

    void run_pass(const Context& context, std::string_view backend) const {
        switch (pass_) {
            case Pass::kPrefill: return prefill(args_, context, backend);
            case Pass::kDecode: return decode(args_, context, backend);
            case Pass::kVerify: return verify(args_, context, backend);
            case Pass::kSegment: return segment(args_, context, backend);
            case Pass::kBackward: return backward(args_, context, backend);
        }
    }

    void run_in_own_workspace(Context context, std::string_view backend) {
        const Plan planned = plan(pass_, args_, context, backend);
        if (planned.workspace_bytes > kMostWorkspace) throw std::bad_alloc();
        void* workspace = nullptr;
        if (posix_memalign(&workspace, 64, planned.workspace_bytes) != 0) throw std::bad_alloc();
        const std::unique_ptr<void, decltype(&std::free)> owner(workspace, &std::free);
        std::memset(workspace, 0xff, planned.workspace_bytes);
        context.workspace = workspace, context.workspace_bytes = planned.workspace_bytes;
        cula::run(planned, args_, context);
    }

    // Loosely: how accurate the targets are is tested elsewhere. What grows without bound is nobody's
    // contract.
    void compare(std::string_view target, const std::vector<double>& oracle,
                 const std::vector<double>& found) {
        double largest = 1e-2;
        for (const double x : oracle)
            if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
        if (largest > 1e3) return;
        const double allowed = (target == "reference:naive" ? 0.5 : 0.1) * largest;
        for (std::size_t i = 0; i < oracle.size(); ++i) {
            if (!std::isfinite(oracle[i])) continue;
            if (!(std::abs(found[i] - oracle[i]) <= allowed))
                fail(std::string(target) + " gives " + std::to_string(found[i]) + " where the oracle gives " +
                     std::to_string(oracle[i]));
        }
    }

    static constexpr std::int64_t kMostMutated = 1 << 16;
    static constexpr std::size_t kMostWorkspace = 1 << 26;

    std::string message_;
};

int fuzz(std::int64_t count, std::uint64_t seed, std::int64_t first) {
    std::int64_t taken = 0;
    for (std::int64_t i = first; i < first + count; ++i) {
        Fuzz one(seed * 1'000'003 + static_cast<std::uint64_t>(i));
        try {
            taken += one.run() == Fuzz::Outcome::kTaken;
        } catch (const std::exception& error) {
            std::fprintf(stderr, "call %lld of seed %llu: %s\n%s\n", static_cast<long long>(i),
                         static_cast<unsigned long long>(seed), error.what(), one.describe_call().c_str());
            return 1;
        }
    }
    std::printf("%lld calls, of which %lld were taken and %lld refused\n", static_cast<long long>(count),
                static_cast<long long>(taken), static_cast<long long>(count - taken));
    return 0;
}

}  // namespace
}  // namespace cula::test

int main(int argc, char** argv) {
    const auto argument = [&](int i, long long otherwise) {
        return argc > i ? std::atoll(argv[i]) : otherwise;
    };
    return cula::test::fuzz(argument(1, 1000), static_cast<std::uint64_t>(argument(2, 1)), argument(3, 0));
}
