// SPDX-License-Identifier: Apache-2.0
// Random calls of the CUDA kernels on the emulated device, judged by the error rule of the tests
// (tests/cula_testing/compare.py): emulate [--count 20] [--seed 1] [--first 0] [--<choice> <value> ...].
// A call that fails is printed as the options that repeat it.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "case.h"
#include "core/kernel.h"
#include "cuda/backward/plan.h"
#include "cuda/sm80/entry.h"
#include "cuda/sm90/entry.h"
#include "cuda_runtime_api.h"

namespace cula::test {
namespace {

const std::vector<Case::Instance> kInstances = {
#include "instances.inc"
};

struct Errors {
    double rms = 0, most = 0;
};

// Relative to the oracle; beside: numbers whose size counts too.
Errors errors(const std::vector<double>& x, const std::vector<double>& oracle,
              const std::vector<double>& beside) {
    double squares = 0, most = 0, size = 0, largest = 0, size_beside = 0, largest_beside = 0;
    for (std::size_t i = 0; i < oracle.size(); ++i) {
        const double error = x[i] - oracle[i];
        squares += error * error, most = std::max(most, std::fabs(error));
        size += oracle[i] * oracle[i], largest = std::max(largest, std::fabs(oracle[i]));
    }
    for (const double one : beside)
        size_beside += one * one, largest_beside = std::max(largest_beside, std::fabs(one));
    const auto count = static_cast<double>(std::max<std::size_t>(oracle.size(), 1));
    const double root =
        std::max(std::sqrt(size / count),
                 std::sqrt(size_beside / static_cast<double>(std::max<std::size_t>(beside.size(), 1))));
    constexpr double kTiny = 1e-30;
    return {std::sqrt(squares / count) / (root + kTiny), most / (std::max(largest, largest_beside) + kTiny)};
}

double eps(Dtype dtype) {
    switch (dtype) {
        case Dtype::kBFloat16: return 0x1p-7;
        case Dtype::kFloat16: return 0x1p-10;
        case Dtype::kFloat32: return 0x1p-23;
        case Dtype::kFloat8E4M3: return 0x1p-3;
        default: return 0x1p-52;
    }
}

// What a map M S + B is added to, at first the identity: M is as exact as that.
std::vector<double> identity(const TensorRef& m) {
    const auto channels = static_cast<std::size_t>(m.size[2]);
    if (m.ndim == 3) return std::vector<double>(channels, 1.0);
    std::vector<double> rows(channels * channels, 0.0);
    for (std::size_t i = 0; i < channels; ++i) rows[i * channels + i] = 1.0;
    return rows;
}

// Of a map the identity. Of a parameter the root of the sum of the squares that its gradient is the sum of.
std::vector<double> beside(const Args& args, std::string_view name) {
    if (name == "segment_m") return identity(args.segment_m);
    if ((name != "d_A_log" && name != "d_dt_bias") || !args.d_g) return {};
    const TensorRef& g = args.d_g;
    const bool by_channel = g.ndim == 4, of_bias = name == "d_dt_bias";
    const std::int64_t heads = g.size[2], channels = by_channel ? g.size[3] : 1,
                       columns = of_bias ? channels : 1;
    std::vector<double> sums(static_cast<std::size_t>(heads * columns));
    for (std::int64_t b = 0; b < g.size[0]; ++b)
        for (std::int64_t t = 0; t < g.size[1]; ++t)
            for (std::int64_t h = 0; h < heads; ++h)
                for (std::int64_t c = 0; c < channels; ++c) {
                    double term = *(by_channel ? g.at<double>(b, t, h, c) : g.at<double>(b, t, h));
                    if (!of_bias) {
                        double x = *(by_channel ? args.g.at<double>(b, t, h, c) : args.g.at<double>(b, t, h));
                        if (args.dt_bias)
                            x += *(by_channel ? args.dt_bias.at<double>(h, c) : args.dt_bias.at<double>(h));
                        term *=
                            args.gate == Gate::kSoftplus ? std::log1p(std::exp(x)) * (1 + std::exp(-x)) : x;
                    }
                    if (std::isfinite(term))
                        sums[static_cast<std::size_t>(h * columns + (of_bias ? c : 0))] += term * term;
                }
    for (double& sum : sums) sum = std::sqrt(sum);
    return sums;
}

// The element that is wrong by most, and its place in a tensor of these sizes.
std::size_t worst_of(const std::vector<double>& x, const std::vector<double>& oracle) {
    std::size_t worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i)
        if (std::fabs(x[i] - oracle[i]) > std::fabs(x[worst] - oracle[worst])) worst = i;
    return worst;
}
std::string place_of(std::size_t index, const std::vector<std::int64_t>& sizes) {
    std::string text = "]";
    for (std::size_t dim = sizes.size(); dim-- > 0;) {
        const auto size = static_cast<std::size_t>(sizes[dim]);
        text = (dim > 0 ? ", " : "[") + std::to_string(index % size) + text;
        index /= size;
    }
    return text;
}

bool same_bits(const std::vector<double>& x, const std::vector<double>& y) {
    return std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0;
}

bool is_hopper(std::string_view target) { return target.starts_with("sm90"); }

// Whether the instances are linked that a prefill with `saved` takes beside its own.
bool may_save(const Args& args, bool hopper) {
    const Algorithm& rule = args.algorithm;
    if (takes_low_rank(rule.update)) return false;
    // The carry of sm90 makes the operands of these rules itself.
    if (hopper && has_diagonal_map(rule.update) && !varies_by_channel(rule.decay)) return false;
    const std::string pass = varies_by_channel(rule.decay) ? "backward_channel" : "backward_token",
                      type = args.q.dtype == Dtype::kBFloat16 ? "__nv_bfloat16" : "__half";
    const std::int64_t dim = args.q.size[3], key = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
    return std::ranges::any_of(kInstances, [&](const Case::Instance& of) {
        return of.folder == (hopper ? "sm90" : "sm80") && of.pass == pass && of.type == type && of.key == key;
    });
}

// Args::saved of such a call, uninitialised.
TensorRef make_saved(Case::Memory& memory, const Problem& problem, bool hopper) {
    const Saving of = hopper ? cuda::sm90::saving(problem) : cuda::sm80::saving(problem);
    const std::int64_t rows = problem.tokens * problem.writes,
                       chunks = problem.varlen
                                    ? rows / of.chunk_tokens + problem.sequences
                                    : (rows + of.chunk_tokens - 1) / of.chunk_tokens * problem.sequences;
    TensorRef ref = TensorRef::contiguous(nullptr, Dtype::kInt32, {chunks, problem.value_heads, of.words});
    const auto bytes = static_cast<std::size_t>(chunks * problem.value_heads * of.words) * 4;
    ref.data = memory.blocks.emplace("saved", Guarded(bytes, 128)).first->second.data();
    return ref;
}

enum class Outcome { kRight, kRefused };

Outcome run(Draw& draw, const std::string& call_of, bool verbose) {
    Case call(draw, kInstances);
    call.remember();
    emulator::Settings& settings = emulator::settings;
    settings.order = static_cast<std::uint64_t>(draw.number("order", {0, 1, 2, 3, 4, 5, 6, 7}));
    Context context;
    context.device = cuda_device(0);
    context.device.multiprocessors = static_cast<int>(
        draw.number("multiprocessors", call.in_segments ? std::vector<std::int64_t>{132}
                                                        : std::vector<std::int64_t>{4, 16, 132}));
    const bool twice = draw.is("twice", 4);
    const auto alignment = static_cast<std::size_t>(draw.number("workspace_alignment", {64, 64, 256}));
    Case::Memory memory;
    const bool plain = !draw.is("output_layouts", 3);
    Args args = call.with_outputs(memory, plain, false);
    Plan planned;
    PreparedPtr within;
    // Chunked calls that are cut into slabs or segments although they are small.
    cuda::backward::BackwardLimits limits;
    const bool limited = call.pass == Pass::kBackward && call.target == "sm80",
               hopper = is_hopper(call.target);
    if (limited) {
        const std::int64_t kib = draw.number("slab_kib", {0, 0, 1, 400, 1000});
        if (kib > 0) limits.slab_bytes = static_cast<std::size_t>(kib) * 1024;
        limits.segments = draw.number("segments", {0, 0, 1, 2, 3, 5});
    }
    const auto prepare_within = [&](Pass pass, const Args& of) {
        constexpr auto kAny = cuda::chunked::StrategyKind::kAny;
        const Problem problem = describe(pass, of, context.device);
        return hopper ? cuda::sm90::backward_prepare<kAny>(problem, of, context)
                      : cuda::sm80::backward_prepare_within(problem, of, limits, kAny);
    };
    const bool whole = limits.slab_bytes == cuda::backward::kBackwardSlabBytes,
               saves = (call.target == "sm80" || call.target == "sm90") && call.pass != Pass::kSegment &&
                       whole && args.q.size[1] > 0 && may_save(args, hopper) && draw.is("saves", 3);
    if (saves) args.saved = make_saved(memory, describe(call.pass, args, context.device), hopper);
    try {
        // The name alone would stand for the three walks, too. verify has that name alone.
        const bool any_strategy = call.target == "sm80" || call.target == "sm90";
        planned = plan(call.pass, args, context,
                       call.pass == Pass::kVerify                     ? "sm80"
                       : call.pass == Pass::kBackward && any_strategy ? call.target + ":whole"
                                                                      : call.target);
        if (limited) {
            within = prepare_within(call.pass, args);
            planned.workspace_bytes = within->workspace_bytes();
        }
    } catch (const Error& error) {
        if (verbose) std::printf("refused: %s\n", error.what());
        return Outcome::kRefused;
    }
    const auto run_prepared = [&](const Prepared* prepared, std::size_t bytes, const Args& of) {
        context.workspace_bytes = std::max<std::size_t>(bytes, 64);
        const Guarded workspace(context.workspace_bytes, alignment);
        context.workspace = workspace.data();
        emulator::doing = "--seed " + call_of + draw.text();
        char where[80];
        std::snprintf(where, sizeof where, "; the workspace is %zu bytes at %p", context.workspace_bytes,
                      context.workspace);
        emulator::doing += where;
        if (prepared)
            prepared->run(of, context);
        else
            cula::run(planned, of, context);
        emulator::doing.clear();
    };
    const auto run_once = [&](const Args& of) { run_prepared(within.get(), planned.workspace_bytes, of); };
    if (verbose) std::printf("%s\n", draw.text().c_str()), std::fflush(stdout);
    Case::Memory of_prefill;
    if (saves && call.pass == Pass::kBackward) {
        // The prefill, whose outputs other calls are judged by.
        Args prefill = call.args;
        prefill.saved = args.saved, prefill.d_o = prefill.d_final_state = {};
        const TensorRef& v = prefill.v;
        const std::int64_t tokens = prefill.q.size[1];
        prefill.o = TensorRef::contiguous(nullptr, v.dtype, {v.size[0], tokens, v.size[2], v.size[3]});
        const auto bytes =
            static_cast<std::size_t>(v.size[0] * tokens * v.size[2] * v.size[3]) * size_bytes(v.dtype);
        prefill.o.data = of_prefill.blocks.emplace("o", Guarded(bytes)).first->second.data();
        const PreparedPtr first = prepare_within(Pass::kPrefill, prefill);
        run_prepared(first.get(), first->workspace_bytes(), prefill);
        memory.blocks.at("saved").remember();
    }
    run_once(args);
    if (call.pass == Pass::kPrefill && saves) memory.blocks.at("saved").remember();
    if (const std::string name = call.touched(args, memory); !name.empty())
        throw std::runtime_error("writes beside the elements of " + name);

    if (twice) {
        settings.order = settings.order == 0 ? 9 : 0;
        Case::Memory second;
        // The layout of a verify's states chooses the kernel.
        Args again = call.with_outputs(second, call.pass != Pass::kVerify || plain, false);
        again.saved = args.saved;
        run_once(again);
        for (const Case::Output& output : call.outputs)
            if (!same_bits(elements(args.*output.field.ref), elements(again.*output.field.ref)))
                throw std::runtime_error(std::string(output.field.name) +
                                         " differs in another order of threads");
    }
    if (saves && call.pass == Pass::kBackward) {
        Case::Memory second;
        const Args again = call.with_outputs(second, true, false);
        const PreparedPtr both = prepare_within(call.pass, again);
        run_prepared(both.get(), both->workspace_bytes(), again);
        for (const Case::Output& output : call.outputs)
            if (!same_bits(elements(args.*output.field.ref), elements(again.*output.field.ref)))
                throw std::runtime_error(std::string(output.field.name) +
                                         " differs from what is made without saved");
    }
    Case::Memory exact_memory, naive_memory;
    if (call.pass == Pass::kBackward && args.g && !args.d_g)  // for beside()
        call.outputs.push_back(
            {{"d_g", &Args::d_g}, args.g.dtype, {args.g.size.begin(), args.g.size.begin() + args.g.ndim}});
    const Args exact = call.with_outputs(exact_memory, true, true),
               naive = call.with_outputs(naive_memory, true, false);
    const auto reference = [&](const Args& of, const char* backend) {
        Context host;
        host.parallel_for = std_threads(2);
        const Plan plan_of = plan(call.pass, of, host, backend);
        std::vector<std::byte> workspace(plan_of.workspace_bytes + 64);
        host.workspace =
            workspace.data() + (64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64) % 64;
        host.workspace_bytes = plan_of.workspace_bytes;
        cula::run(plan_of, of, host);
    };
    reference(exact, "reference"), reference(naive, "reference:naive");

    std::string wrong;
    for (const Case::Output& output : call.outputs) {
        const TensorRef& ref = args.*output.field.ref;
        // Scales are judged with the states.
        if (!ref || output.field.ref == &Args::final_scales) continue;
        const std::vector<double> x = scaled(ref, args.final_scales),
                                  oracle = elements(exact.*output.field.ref),
                                  rounded = scaled(naive.*output.field.ref, naive.final_scales);
        const std::vector<double> also = beside(exact, output.field.name);
        const double budget = call.pass == Pass::kBackward ? 3 : 2,
                     floor = std::max(eps(output.dtype), eps(args.q.dtype)) / 2 + 8 * eps(Dtype::kFloat32);
        const auto bad = std::ranges::find_if_not(x, [](double one) { return std::isfinite(one); });
        const Errors found = errors(x, oracle, also), allowed = errors(rounded, oracle, also);
        char line[200];
        std::snprintf(line, sizeof line, " %s: rms %.2e of %.2e, max %.2e of %.2e;", output.field.name,
                      found.rms, budget * allowed.rms + floor, found.most, budget * allowed.most + floor);
        const bool finite = std::ranges::all_of(oracle, [](double one) { return std::isfinite(one); });
        if (verbose) std::printf("  %s%s\n", line, finite ? "" : " (the oracle is not finite)");
        if (!finite) continue;
        // A backward pass of bfloat16 takes 2^-40 for a write strength of zero (kLeastBeta in
        // backward/saved.cuh), so that gradients that are zero may come out that small.
        constexpr double kOfLeastBeta = 0x1p-36;
        const auto within = [](double most) { return [=](double one) { return std::fabs(one) <= most; }; };
        if (call.pass == Pass::kBackward && args.q.dtype == Dtype::kBFloat16 &&
            std::ranges::all_of(oracle, within(0)) && std::ranges::all_of(x, within(kOfLeastBeta)))
            continue;
        if (bad != x.end())
            wrong += std::string(" ") + output.field.name +
                     place_of(static_cast<std::size_t>(bad - x.begin()), output.sizes) + " is not finite;";
        else if (const auto worst = worst_of(x, oracle);
                 found.rms > budget * allowed.rms + floor || found.most > budget * allowed.most + floor)
            wrong += line + (" worst " + place_of(worst, output.sizes)) + ";";
    }
    if (!wrong.empty()) throw std::runtime_error("inaccurate:" + wrong);
    return Outcome::kRight;
}

int main(int argc, char** argv) {
    Draw::Given given;
    bool verbose = false;
    for (int i = 1; i < argc; ++i) {
        const std::string_view option = argv[i];
        if (option == "--verbose") {
            verbose = true;
        } else if (option.starts_with("--") && i + 1 < argc) {
            given[std::string(option.substr(2))] = argv[++i];
        } else {
            std::fprintf(stderr, "emulate: what is %s?\n", argv[i]);
            return 2;
        }
    }
    const auto number = [&](const char* name, std::int64_t otherwise) {
        const auto found = given.find(name);
        if (found == given.end()) return otherwise;
        const std::int64_t value = std::stoll(found->second);
        given.erase(found);
        return value;
    };
    const std::int64_t count = number("count", 20), seed = number("seed", 1), first = number("first", 0);
    emulator::settings.host_threads = static_cast<int>(number("host_threads", 2));
    // One device a process: the library asks for its properties once.
    emulator::settings.compute_capability = static_cast<int>(number("capability", __CUDA_ARCH__ / 10));
    const bool small = seed % 3 == 0 && emulator::settings.compute_capability != 90;
    emulator::settings.shared_bytes = static_cast<std::size_t>(number("shared_kib", small ? 99 : 227)) * 1024;
    std::int64_t failed = 0, refused = 0;
    for (std::int64_t i = first; i < first + count; ++i) {
        Draw draw(static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(i), given);
        const std::string call_of = std::to_string(seed) + " --first " + std::to_string(i) + " --count 1";
        try {
            refused += run(draw, call_of, verbose) == Outcome::kRefused;
        } catch (const std::exception& error) {
            ++failed;
            std::printf("FAILED --seed %s%s\n  %s\n", call_of.c_str(), draw.text().c_str(), error.what());
            std::fflush(stdout);
        }
    }
    std::printf("%lld calls, %lld refused, %lld failed\n", static_cast<long long>(count),
                static_cast<long long>(refused), static_cast<long long>(failed));
    return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace cula::test

int main(int argc, char** argv) { return cula::test::main(argc, argv); }
