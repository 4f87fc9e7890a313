// SPDX-License-Identifier: Apache-2.0
// torch.ops.cula.explain: which kernel would run a problem, in what time, and why others cannot.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/kernel.h"
#include "cula/cula.h"
#include "handles.h"
#include "library.h"
#include "schema.h"

namespace cula::torch_binding {
namespace {

[[noreturn]] void refuse(Pass pass, std::string_view argument, const std::string& names,
                         std::string_view given) {
    throw Error(std::string(name(pass)) + ": " + std::string(argument) + " must be one of " + names +
                ", got \"" + std::string(given) + "\"");
}

Algorithm parse_algorithm(Pass pass, std::string_view text) {
    if (const std::optional<Algorithm> algorithm = find_algorithm(text)) return *algorithm;
    std::string names;
    for (const NamedAlgorithm& row : kAlgorithms)
        names += (names.empty() ? "" : ", ") + std::string(row.name);
    refuse(pass, "algorithm", names, text);
}

Gate parse_gate(Pass pass, std::string_view text) {
    const auto row = std::ranges::find(kGates, text);
    if (row != kGates.end()) return static_cast<Gate>(row - kGates.begin());
    refuse(pass, "gate", "log_decay, softplus, bounded", text);
}

constexpr char kExplainSchema[] =
    "explain(str pass_name, str algorithm, str device, *, int batch, int tokens, int sequences, int heads, "
    "int value_heads, int key_dim, int value_dim, str dtype, str state_dtype, str gate, float lower_bound, "
    "bool varlen, bool beta_per_value, bool checkpoints, bool chunk_states, bool tree, int chunk_tokens, "
    "bool batch_invariant, str costs, bool qk_l2norm=False, bool saves=False, int writes=1) -> str";

template <class T>
T one_of(std::string_view argument, std::string_view text, std::initializer_list<T> values) {
    std::string names;
    for (T value : values) {
        if (text == cula::name(value)) return value;
        names += (names.empty() ? "" : ", ") + std::string(cula::name(value));
    }
    throw Error("explain: " + std::string(argument) + " must be one of " + names + ", got \"" +
                std::string(text) + "\"");
}

// Shared memory that one thread block may have, by compute capability (CUDA C++ Programming Guide, technical
// specifications).
std::size_t shared_bytes(int compute_capability) {
    switch (compute_capability) {
        case 80:
        case 87: return 163 << 10;
        case 90:
        case 100:
        case 103:
        case 110: return 227 << 10;
        default: return 99 << 10;
    }
}

// "cpu", "cuda:1", or an architecture that this machine need not have: "sm_90".
Device explained_device(std::string_view text) {
    const auto number_after = [&](std::string_view prefix) -> std::optional<int> {
        int number = 0;
        const char* const end = text.data() + text.size();
        if (!text.starts_with(prefix)) return std::nullopt;
        const auto [last, error] = std::from_chars(text.data() + prefix.size(), end, number);
        return error == std::errc() && last == end && number >= 0 ? std::optional(number) : std::nullopt;
    };
    if (text == "cpu") return {.kind = DeviceKind::kCpu};
    if (const std::optional<int> capability = number_after("sm_"))
        return {.kind = DeviceKind::kCuda,
                .compute_capability = *capability,
                .shared_bytes = shared_bytes(*capability)};
    if (const std::optional<int> index = number_after("cuda:")) {
        const auto on_cuda = [](const Kernel& kernel) { return kernel.device == DeviceKind::kCuda; };
        // A build without CUDA has nothing to ask, and its rows say so.
        return std::ranges::any_of(kernels(), on_cuda) ? cuda_device(*index)
                                                       : Device{.kind = DeviceKind::kCuda};
    }
    throw Error("explain: device must be cpu, cuda or an architecture such as sm_90, got \"" +
                std::string(text) + "\"");
}

// The numbers of Problem::costs, separated by commas; or none.
std::vector<double> parse_costs(std::string_view text) {
    constexpr std::size_t kCosts = 9;
    const auto refuse = [&] {
        throw Error("explain: costs must be " + std::to_string(kCosts) +
                    " numbers of at least 0 separated by commas, or none, got \"" + std::string(text) + "\"");
    };
    std::vector<double> costs;
    const char *at = text.data(), *const end = text.data() + text.size();
    while (at != end) {
        double cost = 0.0;
        const auto [next, error] = std::from_chars(at, end, cost);
        if (error != std::errc() || (next != end && *next != ',') || !(cost >= 0.0 && std::isfinite(cost)))
            refuse();
        costs.push_back(cost);
        at = next == end ? end : next + 1;
    }
    if (!costs.empty() && costs.size() != kCosts) refuse();
    return costs;
}

// Rows of the registry, one a line: target, "chosen", "yes" or "no", the reason, the microseconds that it is
// predicted to take, or nothing, and of a call that saves the three numbers of Saving, or nothing; separated
// by tabs.
void explain_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const String pass_name = arguments.string(), algorithm = arguments.string(), device = arguments.string();
    Problem problem;
    for (std::int64_t* number : {&problem.batch, &problem.tokens, &problem.sequences, &problem.heads,
                                 &problem.value_heads, &problem.key_dim, &problem.value_dim})
        *number = arguments.value<std::int64_t>();
    const String dtype = arguments.string(), state_dtype = arguments.string(), gate = arguments.string();
    problem.lower_bound = arguments.value<double>();
    for (bool* flag : {&problem.varlen, &problem.beta_per_value, &problem.checkpoints, &problem.chunk_states,
                       &problem.tree})
        *flag = arguments.value<bool>();
    const auto chunk_tokens = arguments.value<std::int64_t>();
    problem.batch_invariant = arguments.value<bool>();
    const String cost_text = arguments.string();
    const std::vector<double> costs = parse_costs(cost_text.view());
    problem.costs = costs;
    problem.qk_l2norm = arguments.value<bool>();
    problem.saves = arguments.value<bool>();
    problem.writes = arguments.value<std::int64_t>();

    problem.pass = one_of("pass_name", pass_name.view(),
                          {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment, Pass::kBackward});
    problem.algorithm = parse_algorithm(problem.pass, algorithm.view());
    problem.gate = parse_gate(problem.pass, gate.view());
    problem.device = explained_device(device.view());
    const auto floats = {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32, Dtype::kFloat64};
    problem.dtype = one_of("dtype", dtype.view(), floats);
    problem.state_dtype =
        one_of("state_dtype", state_dtype.view(),
               {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat8E4M3});
    if (!std::in_range<int>(chunk_tokens))
        throw Error("explain: chunk_size must fit 32 bits, got " + std::to_string(chunk_tokens));
    problem.chunk_tokens = static_cast<int>(chunk_tokens);
    problem.draft_tokens = problem.tree ? problem.tokens : 0;

    std::string text;
    for (const Explanation& row : explain(problem)) {
        const char* verdict = row.chosen ? "chosen" : row.support ? "yes" : "no";
        text += std::string(row.target) + "\t" + verdict + "\t" + row.support.reason() + "\t" +
                (row.microseconds ? std::to_string(*row.microseconds) : "") + "\t";
        if (row.saving)
            text += std::to_string(row.saving->chunk_tokens) + " " + std::to_string(row.saving->words) + " " +
                    std::to_string(row.saving->most_chunks);
        text += "\n";
    }
    stack[0] = torch::stable::detail::from(text);
}

}  // namespace

CULA_LIBRARY_FRAGMENT(library) { library.def(kExplainSchema); }
CULA_LIBRARY_IMPL(CompositeExplicitAutograd, library) { library.impl("explain", explain_boxed); }

}  // namespace cula::torch_binding
