// SPDX-License-Identifier: Apache-2.0
// torch.ops.cula: one operator per pass, and explain. The caller allocates the outputs; an operator returns nothing and
// writes into the arguments that its schema marks. Fakes for tracing are in Python (a C++ one would see plain integers
// for symbolic sizes).
#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "cula/cula.h"
#include "handles.h"
#include "runtime.h"

namespace cula::torch_binding {
namespace {

// A tensor of a call: its name and type in the schema, and the field of Args that it fills.
struct Parameter {
    std::string_view name;
    std::string_view type;
    TensorRef Args::* field;

    bool optional() const { return type.back() == '?'; }
};

constexpr Parameter kInputs[] = {
    {"q", "Tensor", &Args::q},
    {"k", "Tensor", &Args::k},
    {"v", "Tensor", &Args::v},
    {"g", "Tensor?", &Args::g},
    {"decay", "Tensor?", &Args::gamma},
    {"beta", "Tensor?", &Args::beta},
    {"A_log", "Tensor?", &Args::A_log},
    {"dt_bias", "Tensor?", &Args::dt_bias},
    {"cu_seqlens", "Tensor?", &Args::cu_seqlens},
};

constexpr Parameter kStates[] = {
    {"initial_state", "Tensor?", &Args::initial_state},
    {"initial_state_indices", "Tensor?", &Args::initial_state_indices},
    {"final_state_indices", "Tensor?", &Args::final_state_indices},
    {"has_initial_state", "Tensor?", &Args::has_initial_state},
    {"o", "Tensor(a!)", &Args::o},
    {"final_state", "Tensor(b!)?", &Args::final_state},
};

constexpr Parameter kPrefill[] = {
    {"checkpoints", "Tensor(c!)?", &Args::checkpoints},
    {"checkpoint_plan", "Tensor?", &Args::checkpoint_plan},
    {"chunk_states", "Tensor(d!)?", &Args::chunk_states},
};

constexpr Parameter kVerify[] = {
    {"state_indices", "Tensor?", &Args::state_indices},
    {"num_accepted", "Tensor?", &Args::num_accepted},
    {"snapshots", "Tensor(c!)?", &Args::snapshots},
    {"snapshot_indices", "Tensor?", &Args::snapshot_indices},
    {"parents", "Tensor?", &Args::parents},
};

constexpr Parameter kSegment[] = {
    {"m", "Tensor(a!)", &Args::segment_m},
    {"b", "Tensor(b!)", &Args::segment_b},
};

constexpr std::size_t kMaxTensors =
    std::size(kInputs) + std::size(kStates) + std::max(std::size(kPrefill), std::size(kVerify));

constexpr bool has_states(Pass pass) { return pass != Pass::kSegment; }

constexpr std::span<const Parameter> own_parameters(Pass pass) {
    switch (pass) {
        case Pass::kPrefill: return kPrefill;
        case Pass::kVerify: return kVerify;
        case Pass::kSegment: return kSegment;
        case Pass::kDecode: break;
    }
    return {};
}

// visit(parameter) for every tensor of the pass, in the order of its schema.
template <class Visit>
void for_each_tensor(Pass pass, const Visit& visit) {
    std::ranges::for_each(kInputs, visit);
    if (has_states(pass)) std::ranges::for_each(kStates, visit);
    std::ranges::for_each(own_parameters(pass), visit);
}

std::string schema(Pass pass) {
    std::string text = std::string(name(pass)) + "(";
    const auto declare = [&](const Parameter& parameter) {
        text += std::string(parameter.type) + " " + std::string(parameter.name) + ", ";
    };
    std::ranges::for_each(kInputs, declare);
    if (has_states(pass)) {
        std::ranges::for_each(kStates, declare);
        text += "bool in_place, ";
    }
    std::ranges::for_each(own_parameters(pass), declare);
    text +=
        "*, str algorithm, float scale, str gate, float lower_bound, bool qk_l2norm, bool beta_is_logit, bool "
        "allow_neg_eigval, "
        "int null_index, bool batch_invariant, str backend";
    if (pass == Pass::kPrefill) text += ", int chunk_tokens";
    return text + ") -> ()";
}

// The arguments of a call as they lie on its stack.
struct Call {
    std::array<TensorHandle, kMaxTensors> tensors;
    bool in_place = false;
    String algorithm;
    double scale;
    String gate;
    double lower_bound;
    bool qk_l2norm, beta_is_logit, allow_neg_eigval;
    std::int64_t null_index;
    bool batch_invariant;
    String backend;
    std::int64_t chunk_tokens = kChunkTokens;

    Call(Pass pass, const StableIValue* stack) {
        Arguments arguments(stack);
        std::size_t count = 0;
        const auto take = [&](const Parameter& parameter) {
            tensors[count++] = parameter.optional() ? arguments.optional_tensor() : arguments.tensor();
        };
        std::ranges::for_each(kInputs, take);
        if (has_states(pass)) {
            std::ranges::for_each(kStates, take);
            in_place = arguments.value<bool>();
        }
        std::ranges::for_each(own_parameters(pass), take);
        algorithm = arguments.string();
        scale = arguments.value<double>();
        gate = arguments.string();
        lower_bound = arguments.value<double>();
        qk_l2norm = arguments.value<bool>();
        beta_is_logit = arguments.value<bool>();
        allow_neg_eigval = arguments.value<bool>();
        null_index = arguments.value<std::int64_t>();
        batch_invariant = arguments.value<bool>();
        backend = arguments.string();
        if (pass == Pass::kPrefill) chunk_tokens = arguments.value<std::int64_t>();
    }
};

[[noreturn]] void fail(Pass pass, std::string_view argument, std::string_view expected, std::string_view given) {
    throw Error(std::string(name(pass)) + ": " + std::string(argument) + " must " + std::string(expected) + ", got " +
                std::string(given));
}

struct Place {
    std::int32_t type = 0, index = 0;

    bool operator==(const Place&) const = default;
};

Place place_of(const TensorHandle& tensor) {
    Place place;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &place.type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &place.index));
    return place;
}

std::string name(const Place& place) {
    if (place.type == aoti_torch_device_type_cpu()) return "cpu";
    if (place.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(place.index);
    return "another kind of device";
}

Device device_at(Pass pass, const Place& place) {
    if (place.type == aoti_torch_device_type_cpu()) return {.kind = DeviceKind::kCpu};
    if (place.type == aoti_torch_device_type_cuda()) return cuda_device(place.index);
    fail(pass, "q", "be on the CPU or on a CUDA device", name(place));
}

// torch's code of a dtype as the library's.
std::optional<Dtype> find_dtype(std::int32_t code) {
    struct Row {
        std::int32_t code;
        Dtype dtype;
    };
    static const Row rows[] = {
        {aoti_torch_dtype_bfloat16(), Dtype::kBFloat16}, {aoti_torch_dtype_float32(), Dtype::kFloat32},
        {aoti_torch_dtype_int32(), Dtype::kInt32},       {aoti_torch_dtype_float16(), Dtype::kFloat16},
        {aoti_torch_dtype_int64(), Dtype::kInt64},       {aoti_torch_dtype_bool(), Dtype::kBool},
        {aoti_torch_dtype_float64(), Dtype::kFloat64},
    };
    for (const Row& row : rows)
        if (row.code == code) return row.dtype;
    return std::nullopt;
}

std::string dtype_name(std::int32_t code) {
    return torch::headeronly::toString(
        torch::stable::detail::to<torch::headeronly::ScalarType>(torch::stable::detail::from(code)));
}

// The view that the library works on; `place` is q's.
TensorRef view(Pass pass, std::string_view argument, const TensorHandle& tensor, const Place& place) {
    if (const Place own = place_of(tensor); own != place)
        fail(pass, argument, "be on q's device, " + name(place), name(own));

    std::int32_t code = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    const std::optional<Dtype> dtype = find_dtype(code);
    if (!dtype) fail(pass, argument, "be a tensor of floats, int32, int64 or bool", dtype_name(code));

    std::int64_t ndim = 0, *sizes = nullptr, *strides = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &ndim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    if (ndim < 1 || ndim > kMaxDims)
        fail(pass, argument, "have from 1 to " + std::to_string(kMaxDims) + " dimensions", std::to_string(ndim));

    TensorRef ref{.data = data_of(tensor), .dtype = *dtype, .ndim = static_cast<int>(ndim), .size = {}, .stride = {}};
    std::copy_n(sizes, ndim, ref.size.begin());
    std::copy_n(strides, ndim, ref.stride.begin());
    return ref;
}

Algorithm parse_algorithm(Pass pass, std::string_view text) {
    if (const std::optional<Algorithm> algorithm = find_algorithm(text)) return *algorithm;
    std::string names;
    for (const NamedAlgorithm& row : kAlgorithms) names += (names.empty() ? "" : ", ") + std::string(row.name);
    fail(pass, "algorithm", "be one of " + names, "\"" + std::string(text) + "\"");
}

Gate parse_gate(Pass pass, std::string_view text) {
    if (text == "log_decay") return Gate::kLogDecay;
    if (text == "softplus") return Gate::kSoftplus;
    if (text == "bounded") return Gate::kBounded;
    fail(pass, "gate", "be one of log_decay, softplus, bounded", "\"" + std::string(text) + "\"");
}

template <class Int>
Int narrow(Pass pass, std::string_view argument, std::int64_t value) {
    if (!std::in_range<Int>(value)) fail(pass, argument, "fit 32 bits", std::to_string(value));
    return static_cast<Int>(value);
}

Args make_args(Pass pass, const Call& call, const Place& place) {
    Args args;
    std::size_t index = 0;
    for_each_tensor(pass, [&](const Parameter& parameter) {
        const TensorHandle& tensor = call.tensors[index++];
        if (tensor) args.*parameter.field = view(pass, parameter.name, tensor, place);
    });
    if (call.in_place) {
        if (args.initial_state) fail(pass, "initial_state", "be left out in place: it is final_state", "a tensor");
        if (!args.final_state) fail(pass, "final_state", "be given in place", "none");
        args.initial_state = args.final_state;
    }
    args.algorithm = parse_algorithm(pass, call.algorithm.view());
    args.gate = parse_gate(pass, call.gate.view());
    args.scale = call.scale;
    args.lower_bound = call.lower_bound;
    args.qk_l2norm = call.qk_l2norm;
    args.beta_is_logit = call.beta_is_logit;
    args.allow_neg_eigval = call.allow_neg_eigval;
    args.null_index = narrow<std::int32_t>(pass, "null_index", call.null_index);
    args.batch_invariant = call.batch_invariant;
    args.chunk_tokens = narrow<int>(pass, "chunk_size", call.chunk_tokens);
    return args;
}

template <Pass pass>
void run_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const Call call(pass, stack);
    const Place place = place_of(call.tensors.front());
    const Args args = make_args(pass, call, place);
    Context context;
    context.device = device_at(pass, place);
    const CurrentStream stream(context.device);
    context.stream = stream.get();
    context.parallel_for = torch_threads();

    const Plan planned = plan(pass, args, context, call.backend.view());
    TensorHandle workspace;
    if (planned.workspace_bytes > 0) {
        workspace = allocate_bytes(planned.workspace_bytes, context.device);
        context.workspace = data_of(workspace);
        context.workspace_bytes = planned.workspace_bytes;
    }
    run(planned, args, context);
}

constexpr char kExplainSchema[] =
    "explain(str pass_name, str algorithm, str device, *, int batch, int tokens, int sequences, int heads, int "
    "value_heads, "
    "int key_dim, int value_dim, str dtype, str state_dtype, str gate, float lower_bound, bool varlen, bool "
    "beta_per_value, "
    "bool checkpoints, bool chunk_states, bool tree, int chunk_tokens, bool batch_invariant) -> str";

template <class T>
T one_of(std::string_view argument, std::string_view text, std::initializer_list<T> values) {
    std::string names;
    for (T value : values) {
        if (text == cula::name(value)) return value;
        names += (names.empty() ? "" : ", ") + std::string(cula::name(value));
    }
    throw Error("explain: " + std::string(argument) + " must be one of " + names + ", got \"" + std::string(text) +
                "\"");
}

// Rows of the registry, one a line: target, "chosen", "yes" or "no", the reason; separated by tabs.
void explain_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const String pass_name = arguments.string(), algorithm = arguments.string(), device = arguments.string();
    Problem problem;
    for (std::int64_t* number : {&problem.batch, &problem.tokens, &problem.sequences, &problem.heads,
                                 &problem.value_heads, &problem.key_dim, &problem.value_dim})
        *number = arguments.value<std::int64_t>();
    const String dtype = arguments.string(), state_dtype = arguments.string(), gate = arguments.string();
    problem.lower_bound = arguments.value<double>();
    for (bool* flag :
         {&problem.varlen, &problem.beta_per_value, &problem.checkpoints, &problem.chunk_states, &problem.tree})
        *flag = arguments.value<bool>();
    const auto chunk_tokens = arguments.value<std::int64_t>();
    problem.batch_invariant = arguments.value<bool>();

    problem.pass =
        one_of("pass_name", pass_name.view(), {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment});
    problem.algorithm = parse_algorithm(problem.pass, algorithm.view());
    problem.gate = parse_gate(problem.pass, gate.view());
    problem.device.kind = device.view() == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu;
    const auto floats = {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32, Dtype::kFloat64};
    problem.dtype = one_of("dtype", dtype.view(), floats);
    problem.state_dtype = one_of("state_dtype", state_dtype.view(), floats);
    problem.chunk_tokens = narrow<int>(problem.pass, "chunk_size", chunk_tokens);

    std::string text;
    for (const Explanation& row : explain(problem)) {
        const char* verdict = row.chosen ? "chosen" : row.support ? "yes" : "no";
        text += std::string(row.target) + "\t" + verdict + "\t" + row.support.reason() + "\n";
    }
    stack[0] = torch::stable::detail::from(text);
}

constexpr Pass kPasses[] = {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment};

template <class Library>
void implement(Library& library) {
    library.impl("prefill", run_boxed<Pass::kPrefill>);
    library.impl("decode", run_boxed<Pass::kDecode>);
    library.impl("verify", run_boxed<Pass::kVerify>);
    library.impl("segment", run_boxed<Pass::kSegment>);
}

}  // namespace

STABLE_TORCH_LIBRARY(cula, library) {
    for (const Pass pass : kPasses) library.def(schema(pass).c_str());
    library.def(kExplainSchema);
}

STABLE_TORCH_LIBRARY_IMPL(cula, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(cula, CUDA, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(cula, CompositeExplicitAutograd, library) { library.impl("explain", explain_boxed); }

}  // namespace cula::torch_binding
