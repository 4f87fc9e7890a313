// SPDX-License-Identifier: Apache-2.0
// torch.ops.cula: one operator per pass, and explain. The caller allocates the outputs and an operator
// returns nothing, but for the overloads that are there to save time; it writes into the arguments that its
// schema marks. Fakes for tracing are in Python (a C++ one would see plain integers for symbolic sizes).
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/kernel.h"
#include "core/rows.h"
#include "cula/cula.h"
#include "handles.h"
#include "runtime.h"
#include "schema.h"

namespace cula::torch_binding {
namespace {

// What a caller of the compact forms may hold in any shape, strides and dtype, and what with any strides.
constexpr TensorRef Args::* kOfHeads[] = {&Args::A_log, &Args::dt_bias, &Args::gamma};
constexpr TensorRef Args::* kOfTokens[] = {&Args::q, &Args::k, &Args::v, &Args::g};

// The arguments of a call as they lie on its stack.
struct Call {
    const Parameters& parameters;
    std::array<TensorHandle, kMaxTensors> tensors;  // in the order of the parameters
    bool in_place = false, k_first = false;
    std::optional<double> scale;
    double lower_bound = 0.0;
    bool qk_l2norm, beta_is_logit, allow_neg_eigval, batch_invariant;
    std::int64_t null_index = -1;
    std::int64_t chunk_tokens = kChunkTokens;
    String backend;
    String algorithm, gate;    // kNamed
    std::int64_t options = 0;  // the compact forms

    Call(Pass pass, Form form, const StableIValue* stack)
        : parameters(torch_binding::parameters(pass, form)) {
        Arguments arguments(stack);
        if (form == Form::kNamed)
            take_named(pass, arguments);
        else
            take_compact(arguments);
    }

private:
    void take_named(Pass pass, Arguments& arguments) {
        std::size_t index = 0;
        for (const Parameter& parameter : parameters) {
            take(index++, parameter, arguments);
            if (parameter.field == &Args::final_state) in_place = arguments.value<bool>();
        }
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

    void take_compact(Arguments& arguments) {
        bool before_options = true;
        std::size_t index = 0;
        for (const Parameter& parameter : parameters) {
            if (before_options && parameter.optional()) {
                options = arguments.value<std::int64_t>();
                before_options = false;
            }
            take(index++, parameter, arguments);
            if (parameter.field == &Args::dt_bias)
                lower_bound = arguments.value<std::optional<double>>().value_or(lower_bound);
            if (parameter.field == &Args::cu_seqlens) scale = arguments.value<std::optional<double>>();
        }
        null_index = arguments.value<std::optional<std::int64_t>>().value_or(null_index);
        backend = arguments.optional_string();
        int bit = 10;
        for (bool* flag :
             {&qk_l2norm, &beta_is_logit, &allow_neg_eigval, &batch_invariant, &in_place, &k_first})
            *flag = options >> bit++ & 1;
        chunk_tokens = options >> 16;
    }

    void take(std::size_t index, const Parameter& parameter, Arguments& arguments) {
        tensors[index] = parameter.optional() ? arguments.optional_tensor() : arguments.tensor();
    }
};

// An operator as messages name it, and its first tensor.
struct Operator {
    std::string_view name, first = "q";

    Operator(Pass pass) : name(cula::name(pass)) {}
    Operator(std::string_view other, std::string_view other_first) : name(other), first(other_first) {}
};

[[noreturn]] void fail(Operator op, std::string_view argument, std::string_view expected,
                       std::string_view given) {
    throw Error(std::string(op.name) + ": " + std::string(argument) + " must " + std::string(expected) +
                ", got " + std::string(given));
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

Device device_at(Operator op, const Place& place) {
    if (place.type == aoti_torch_device_type_cpu()) return {.kind = DeviceKind::kCpu};
    if (place.type == aoti_torch_device_type_cuda()) return cuda_device(place.index);
    fail(op, op.first, "be on the CPU or on a CUDA device", name(place));
}

// torch's codes of the library's dtypes.
struct DtypeCode {
    std::int32_t code;
    Dtype dtype;
};

std::span<const DtypeCode> dtype_codes() {
    static const DtypeCode rows[] = {
        {aoti_torch_dtype_bfloat16(), Dtype::kBFloat16}, {aoti_torch_dtype_float32(), Dtype::kFloat32},
        {aoti_torch_dtype_int32(), Dtype::kInt32},       {aoti_torch_dtype_float16(), Dtype::kFloat16},
        {aoti_torch_dtype_int64(), Dtype::kInt64},       {aoti_torch_dtype_bool(), Dtype::kBool},
        {aoti_torch_dtype_float64(), Dtype::kFloat64},
    };
    return rows;
}

std::optional<Dtype> find_dtype(std::int32_t code) {
    for (const DtypeCode& row : dtype_codes())
        if (row.code == code) return row.dtype;
    return std::nullopt;
}

std::int32_t dtype_code(Dtype dtype) {
    return std::ranges::find(dtype_codes(), dtype, &DtypeCode::dtype)->code;
}

std::string dtype_name(std::int32_t code) {
    return torch::headeronly::toString(
        torch::stable::detail::to<torch::headeronly::ScalarType>(torch::stable::detail::from(code)));
}

Dtype dtype_of(Operator op, std::string_view argument, const TensorHandle& tensor) {
    std::int32_t code = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    const std::optional<Dtype> dtype = find_dtype(code);
    if (!dtype) fail(op, argument, "be a tensor of floats, int32, int64 or bool", dtype_name(code));
    return *dtype;
}

void check_place(Operator op, std::string_view argument, const TensorHandle& tensor, const Place& place) {
    if (const Place own = place_of(tensor); own != place)
        fail(op, argument, "be on " + std::string(op.first) + "'s device, " + name(place), name(own));
}

// The view that the library works on; `place` is the first tensor's.
TensorRef view(Operator op, std::string_view argument, const TensorHandle& tensor, const Place& place) {
    check_place(op, argument, tensor, place);
    const Dtype dtype = dtype_of(op, argument, tensor);
    std::int64_t ndim = 0, *sizes = nullptr, *strides = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &ndim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    if (ndim < 1 || ndim > kMaxDims)
        fail(op, argument, "have from 1 to " + std::to_string(kMaxDims) + " dimensions",
             std::to_string(ndim));

    TensorRef ref{
        .data = data_of(tensor), .dtype = dtype, .ndim = static_cast<int>(ndim), .size = {}, .stride = {}};
    std::copy_n(sizes, ndim, ref.size.begin());
    std::copy_n(strides, ndim, ref.stride.begin());
    return ref;
}

// A parameter of the gate in one dimension: float32, or float64 beside inputs of float64. `tensor` becomes a
// copy where its memory is not that.
TensorRef flat_view(Pass pass, std::string_view argument, TensorHandle& tensor, const Place& place,
                    Dtype inputs) {
    check_place(pass, argument, tensor, place);
    bool contiguous = false;
    std::int32_t code = 0;
    std::int64_t count = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor.get(), &contiguous));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor.get(), &count));
    const bool exact = inputs == Dtype::kFloat64 && code == aoti_torch_dtype_float64();
    const Dtype dtype = exact ? Dtype::kFloat64 : Dtype::kFloat32;
    if (!contiguous || code != dtype_code(dtype)) tensor = dense_copy(std::move(tensor), dtype_code(dtype));
    return TensorRef::contiguous(data_of(tensor), dtype, {count});
}

Algorithm parse_algorithm(Pass pass, std::string_view text) {
    if (const std::optional<Algorithm> algorithm = find_algorithm(text)) return *algorithm;
    std::string names;
    for (const NamedAlgorithm& row : kAlgorithms)
        names += (names.empty() ? "" : ", ") + std::string(row.name);
    fail(pass, "algorithm", "be one of " + names, "\"" + std::string(text) + "\"");
}

Gate parse_gate(Pass pass, std::string_view text) {
    if (text == "log_decay") return Gate::kLogDecay;
    if (text == "softplus") return Gate::kSoftplus;
    if (text == "bounded") return Gate::kBounded;
    fail(pass, "gate", "be one of log_decay, softplus, bounded", "\"" + std::string(text) + "\"");
}

Algorithm unpack_algorithm(Pass pass, std::int64_t options) {
    const auto row = static_cast<std::size_t>(options & 0xff);
    if (row < kAlgorithms.size()) return kAlgorithms[row].algorithm;
    fail(pass, "options", "name a known algorithm", std::to_string(row));
}

Gate unpack_gate(Pass pass, std::int64_t options) {
    const std::int64_t gate = options >> 8 & 3;
    if (gate <= static_cast<std::int64_t>(Gate::kBounded)) return static_cast<Gate>(gate);
    fail(pass, "options", "name a known gate", std::to_string(gate));
}

template <class Int>
Int narrow(Pass pass, std::string_view argument, std::int64_t value) {
    if (!std::in_range<Int>(value)) fail(pass, argument, "fit 32 bits", std::to_string(value));
    return static_cast<Int>(value);
}

// A bias per channel may come flat, as checkpoints keep it.
void shape_bias(Args& args) {
    TensorRef& bias = args.dt_bias;
    if (!varies_by_channel(args.algorithm.decay) || bias.ndim != 1 || args.q.ndim != 4) return;
    const std::int64_t key_dim = args.q.size[3];
    if (key_dim == 0 || bias.size[0] % key_dim != 0) return;
    bias = {.data = bias.data,
            .dtype = bias.dtype,
            .ndim = 2,
            .size = {bias.size[0] / key_dim, key_dim},
            .stride = {key_dim * bias.stride[0], bias.stride[0]}};
}

Args make_args(Pass pass, Form form, Call& call, const Place& place) {
    Args args;
    std::size_t index = 0;
    for (const Parameter& parameter : call.parameters) {
        TensorHandle& tensor = call.tensors[index++];
        if (!tensor) continue;
        TensorRef& ref = args.*parameter.field;
        if (form != Form::kNamed && contains(kOfHeads, parameter.field))
            ref = flat_view(pass, parameter.name, tensor, place, args.q.dtype);
        else
            ref = view(pass, parameter.name, tensor, place);
    }
    if (call.in_place) {
        if (args.initial_state)
            fail(pass, "initial_state", "be left out in place: it is final_state", "a tensor");
        if (!args.final_state) fail(pass, "final_state", "be given in place", "none");
        args.initial_state = args.final_state;
    }
    if (form == Form::kNamed) {
        args.algorithm = parse_algorithm(pass, call.algorithm.view());
        args.gate = parse_gate(pass, call.gate.view());
    } else {
        args.algorithm = unpack_algorithm(pass, call.options);
        args.gate = unpack_gate(pass, call.options);
    }
    shape_bias(args);
    if (call.scale)
        args.scale = *call.scale;
    else if (args.q.ndim == 4)
        args.scale = std::pow(static_cast<double>(args.q.size[3]), -0.5);
    args.lower_bound = call.lower_bound;
    args.qk_l2norm = call.qk_l2norm;
    args.beta_is_logit = call.beta_is_logit;
    args.allow_neg_eigval = call.allow_neg_eigval;
    args.null_index = narrow<std::int32_t>(pass, "null_index", call.null_index);
    args.batch_invariant = call.batch_invariant;
    args.chunk_tokens = narrow<int>(pass, "chunk_size", call.chunk_tokens);
    args.keep = form == Form::kKeep;
    return args;
}

// What an overload returns, also as arguments of the call. Inputs that validate() will refuse get none: what
// it would take by their shapes may be more than there is.
struct Outputs {
    TensorHandle o, final_state;

    Outputs(Pass pass, Form form, const Call& call, const Place& place, const Device& device, Args& args) {
        const TensorRef &q = args.q, &v = args.v, &cu = args.cu_seqlens;
        if (q.ndim != 4 || v.ndim != 4 || v.size[0] != q.size[0] || v.size[1] != q.size[1]) return;
        if (makes_o(form)) {
            o = allocate(std::span(v.size).first(4), dtype_code(v.dtype), device);
            args.o = view(pass, "o", o, place);
        }
        const bool listed = cu.ndim == 1 && cu.size[0] > 0 && (cu.stride[0] == 1 || cu.size[0] == 1);
        if (!makes_final_state(form) || (cu && !listed) || q.size[3] > kLargestDim) return;
        const std::int64_t rows = v.size[3], columns = q.size[3];
        const std::array shape{num_sequences(args), v.size[2], call.k_first ? columns : rows,
                               call.k_first ? rows : columns};
        const Dtype exact = q.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
        final_state = allocate(shape, dtype_code(exact), device);
        TensorRef& state = args.final_state = view(pass, "final_state", final_state, place);
        if (!call.k_first) return;
        std::swap(state.size[2], state.size[3]);
        std::swap(state.stride[2], state.stride[3]);
    }
};

// CULA_DEBUG_CHECKS=1 checks on a GPU too what is otherwise checked on a CPU alone, and waits for the GPU to
// do so.
bool debug_checks() {
    static const bool on = [] {
        const char* value = std::getenv("CULA_DEBUG_CHECKS");
        return value && std::string_view(value) == "1";
    }();
    return on;
}

// The values of the indices, which the core reads from copies on the host.
void check_indices(Pass pass, const Call& call, Args args) {
    constexpr TensorRef Args::* kIndices[] = {
        &Args::cu_seqlens,          &Args::initial_state_indices,
        &Args::final_state_indices, &Args::checkpoint_plan,
        &Args::state_indices,       &Args::num_accepted,
        &Args::snapshot_indices,    &Args::parents,
        &Args::has_initial_state,
    };
    std::vector<TensorHandle> copies;
    std::size_t index = 0;
    for (const Parameter& parameter : call.parameters) {
        const TensorHandle& tensor = call.tensors[index++];
        if (!tensor || !contains(kIndices, parameter.field)) continue;
        const TensorHandle& copy = copies.emplace_back(copy_to_host(tensor));
        args.*parameter.field = view(pass, parameter.name, copy, place_of(copy));
    }
    validate(pass, args, Indices::kOnHost);
}

// Of whole words, as `kept` is.
TensorHandle allocate_workspace(std::size_t bytes, const Device& device) {
    const auto words = static_cast<std::int64_t>(bytes / sizeof(std::int32_t));
    return allocate(std::span(&words, 1), aoti_torch_dtype_int32(), device);
}

// The workspace, for as long as somebody may need it.
TensorHandle run_planned(Pass pass, const Args& args, Context& context, std::string_view backend) {
    const Plan planned = plan(pass, args, context, backend);
    TensorHandle workspace;
    if (planned.workspace_bytes > 0) {
        workspace = allocate_workspace(planned.workspace_bytes + 3, context.device);
        context.workspace = data_of(workspace);
        context.workspace_bytes = planned.workspace_bytes;
    }
    run(planned, args, context);
    return args.keep && planned.kept_bytes == 0 ? allocate_workspace(0, context.device)
                                                : std::move(workspace);
}

// The kernels read whole rows of channels: inputs whose rows are not contiguous, as behind a convolution that
// keeps channels first, become dense copies. Nothing is copied for a call that would be refused.
void copy_rows(Pass pass, Call& call, Args& args, const Context& context, const Place& place) {
    const auto strided = [](const TensorRef& ref) {
        return ref.ndim == 4 && ref.stride[3] != 1 && ref.size[3] > 1;
    };
    if (std::ranges::none_of(kOfTokens, [&](TensorRef Args::* field) { return strided(args.*field); }))
        return;
    Args copied = args;
    for (TensorRef Args::* field : kOfTokens)
        if (strided(args.*field)) (copied.*field).stride[3] = 1;
    validate(pass, copied, context.device.kind == DeviceKind::kCpu ? Indices::kOnHost : Indices::kOnDevice);
    std::size_t index = 0;
    for (const Parameter& parameter : call.parameters) {
        TensorHandle& tensor = call.tensors[index++];
        TensorRef& ref = args.*parameter.field;
        if (!contains(kOfTokens, parameter.field) || !strided(ref)) continue;
        tensor = dense_copy(std::move(tensor), dtype_code(ref.dtype));
        ref = view(pass, parameter.name, tensor, place);
    }
}

template <Pass pass, Form form>
void run_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Call call(pass, form, stack);
    const Place place = place_of(call.tensors.front());
    Args args = make_args(pass, form, call, place);
    Context context;
    context.device = device_at(pass, place);
    Outputs outputs(pass, form, call, place, context.device, args);
    if (context.device.kind == DeviceKind::kCpu) {
        context.parallel_for = torch_threads();
    } else {
        context.stream = current_stream(context.device);
        if (debug_checks()) check_indices(pass, call, args);
    }
    if (form != Form::kNamed) copy_rows(pass, call, args, context, place);
    TensorHandle workspace = run_planned(pass, args, context, call.backend.view());
    TensorHandle* const made[] = {&outputs.o, &outputs.final_state,
                                  form == Form::kKeep ? &workspace : nullptr};
    for (TensorHandle* one : made)
        if (one && *one) *stack++ = torch::stable::detail::from(one->release());
}

constexpr char kComposeSchema[] = "compose(Tensor m, Tensor b, Tensor(a!) state, Tensor? joins=None) -> ()";

void compose_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const TensorHandle m = arguments.tensor(), b = arguments.tensor(), state = arguments.tensor(),
                       joins = arguments.optional_tensor();
    const Operator op("compose", "m");
    const Place place = place_of(m);
    Composition composition{.m = view(op, "m", m, place),
                            .b = view(op, "b", b, place),
                            .joins = {},
                            .state = view(op, "state", state, place)};
    if (joins) composition.joins = view(op, "joins", joins, place);
    Context context;
    context.device = device_at(op, place);
    if (context.device.kind == DeviceKind::kCpu)
        context.parallel_for = torch_threads();
    else
        context.stream = current_stream(context.device);
    compose(composition, context);
}

constexpr char kExplainSchema[] =
    "explain(str pass_name, str algorithm, str device, *, int batch, int tokens, int sequences, int heads, "
    "int "
    "value_heads, "
    "int key_dim, int value_dim, str dtype, str state_dtype, str gate, float lower_bound, bool varlen, bool "
    "beta_per_value, "
    "bool checkpoints, bool chunk_states, bool tree, int chunk_tokens, bool batch_invariant, str costs) -> "
    "str";

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

// Numbers separated by commas.
std::vector<double> parse_costs(std::string_view text) {
    std::vector<double> costs;
    const char *at = text.data(), *const end = text.data() + text.size();
    while (at != end) {
        double cost = 0.0;
        const auto [next, error] = std::from_chars(at, end, cost);
        if (error != std::errc() || (next != end && *next != ','))
            throw Error("explain: costs must be numbers separated by commas, got \"" + std::string(text) +
                        "\"");
        costs.push_back(cost);
        at = next == end ? end : next + 1;
    }
    return costs;
}

// Rows of the registry, one a line: target, "chosen", "yes" or "no", the reason, and the microseconds that it
// is predicted to take, or nothing; separated by tabs.
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

    problem.pass =
        one_of("pass_name", pass_name.view(), {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment});
    problem.algorithm = parse_algorithm(problem.pass, algorithm.view());
    problem.gate = parse_gate(problem.pass, gate.view());
    problem.device = explained_device(device.view());
    const auto floats = {Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat32, Dtype::kFloat64};
    problem.dtype = one_of("dtype", dtype.view(), floats);
    problem.state_dtype = one_of("state_dtype", state_dtype.view(), floats);
    problem.chunk_tokens = narrow<int>(problem.pass, "chunk_size", chunk_tokens);

    std::string text;
    for (const Explanation& row : explain(problem)) {
        const char* verdict = row.chosen ? "chosen" : row.support ? "yes" : "no";
        text += std::string(row.target) + "\t" + verdict + "\t" + row.support.reason() + "\t" +
                (row.microseconds ? std::to_string(*row.microseconds) : "") + "\n";
    }
    stack[0] = torch::stable::detail::from(text);
}

template <Pass pass, Form form, class Library>
void implement(Library& library) {
    if constexpr (has_overload(pass, form))
        library.impl((std::string(name(pass)) + std::string(overload(form))).c_str(), run_boxed<pass, form>);
}

template <class Library>
void implement_all(Library& library) {
    const auto implement_pass = [&]<Pass pass>(std::integral_constant<Pass, pass>) {
        implement<pass, Form::kNamed>(library);
        implement<pass, Form::kPacked>(library);
        implement<pass, Form::kFresh>(library);
        implement<pass, Form::kDense>(library);
        implement<pass, Form::kInto>(library);
        implement<pass, Form::kAlone>(library);
        implement<pass, Form::kKeep>(library);
    };
    implement_pass(std::integral_constant<Pass, Pass::kPrefill>{});
    implement_pass(std::integral_constant<Pass, Pass::kDecode>{});
    implement_pass(std::integral_constant<Pass, Pass::kVerify>{});
    implement_pass(std::integral_constant<Pass, Pass::kSegment>{});
}

template <class Library>
void define_all(Library& library) {
    for (const Pass pass : kPasses)
        for (const Form form : kForms)
            if (has_overload(pass, form)) library.def(schema(pass, form).c_str());
}

}  // namespace

STABLE_TORCH_LIBRARY(cula, library) {
    define_all(library);
    library.def(kComposeSchema);
    library.def(kExplainSchema);
}

STABLE_TORCH_LIBRARY_IMPL(cula, CPU, library) {
    implement_all(library);
    library.impl("compose", compose_boxed);
}
STABLE_TORCH_LIBRARY_IMPL(cula, CUDA, library) {
    implement_all(library);
    library.impl("compose", compose_boxed);
}
STABLE_TORCH_LIBRARY_IMPL(cula, CompositeExplicitAutograd, library) {
    library.impl("explain", explain_boxed);
}

// The same once more for the package, which does itself in Python, in less time, what it puts before the
// others: it looks for derivatives and counts writes.
STABLE_TORCH_LIBRARY(cula_unchecked, library) { define_all(library); }
STABLE_TORCH_LIBRARY_IMPL(cula_unchecked, CPU, library) { implement_all(library); }
STABLE_TORCH_LIBRARY_IMPL(cula_unchecked, CUDA, library) { implement_all(library); }

}  // namespace cula::torch_binding
