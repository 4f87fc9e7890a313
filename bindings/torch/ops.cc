// SPDX-License-Identifier: Apache-2.0
// torch.ops.cula: an operator per pass, in two overloads (schema.h), compose and option_bits. They
// write into the arguments that their schemas mark. Fakes for tracing are in Python (a C++ one would see
// plain integers for symbolic sizes).
#include <algorithm>
#include <array>
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
#include "library.h"
#include "runtime.h"
#include "schema.h"
#include "views.h"

namespace cula::torch_binding {
namespace {

// What a caller may hold in any shape, strides and dtype, and what with any strides.
constexpr TensorRef Args::* kOfHeads[] = {&Args::A_log, &Args::dt_bias, &Args::gamma};
constexpr TensorRef Args::* kOfTokens[] = {&Args::q,     &Args::k,     &Args::v,     &Args::g,
                                           &Args::erase, &Args::a_key, &Args::b_key, &Args::d_o};

// The arguments of a call as they lie on its stack.
struct Call {
    const Parameters& parameters;
    std::array<TensorHandle, kMaxTensors> tensors;  // in the order of the parameters
    std::int64_t packed = 0;
    Options options;  // unpacked
    std::optional<double> scale;
    double lower_bound = 0.0;
    std::int64_t null_index = -1;
    String backend;

    Call(Pass pass, Form form, const StableIValue* stack)
        : parameters(torch_binding::parameters(pass, form)) {
        Arguments arguments(stack);
        bool before_options = true;
        std::size_t index = 0;
        for (const Parameter& parameter : parameters) {
            if (before_options && parameter.optional()) {
                packed = arguments.value<std::int64_t>();
                before_options = false;
            }
            tensors[index++] = parameter.optional() ? arguments.optional_tensor() : arguments.tensor();
            if (parameter.field == &Args::dt_bias)
                lower_bound = arguments.value<std::optional<double>>().value_or(lower_bound);
            if (parameter.field == &Args::cu_seqlens) scale = arguments.value<std::optional<double>>();
        }
        null_index = arguments.value<std::optional<std::int64_t>>().value_or(null_index);
        backend = arguments.optional_string();
        options = unpack(packed);
    }
};

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
    if (code == aoti_torch_dtype_complex64() || code == aoti_torch_dtype_complex128() ||
        code == aoti_torch_dtype_complex32())
        fail(pass, argument, "have a dtype of real numbers", "a complex one");
    const bool exact = inputs == Dtype::kFloat64 && code == aoti_torch_dtype_float64();
    const Dtype dtype = exact ? Dtype::kFloat64 : Dtype::kFloat32;
    if (!contiguous || code != dtype_code(dtype)) tensor = dense_copy(std::move(tensor), dtype_code(dtype));
    return TensorRef::contiguous(data_of(tensor), dtype, {count});
}

// A bit that means nothing to the overload would be ignored.
[[noreturn]] void refuse_options(Pass pass, Form form, const Call& call) {
    const auto refuse = [&](std::string_view option, std::int64_t value) {
        fail(pass, "options", "name a known " + std::string(option), std::to_string(value));
    };
    if (call.options.version != options_version())
        fail(pass, "options",
             "come from this version's `cula.operator_options` (compile, or export, the model again)",
             std::to_string(call.packed));
    if (call.options.algorithm >= std::ssize(kAlgorithms)) refuse("algorithm", call.options.algorithm);
    if (call.options.gate >= std::ssize(kGates)) refuse("gate", call.options.gate);
    fail(pass, "options", "have only bits that " + qualified(pass, form) + " takes",
         std::to_string(call.packed));
}

template <class Int>
Int narrow(Pass pass, std::string_view argument, std::int64_t value) {
    if (!std::in_range<Int>(value)) fail(pass, argument, "fit 32 bits", std::to_string(value));
    return static_cast<Int>(value);
}

// A bias per channel may come flat, as checkpoints keep it, and its gradient too.
void shape_biases(Args& args) {
    if (!varies_by_channel(args.algorithm.decay) || args.q.ndim != 4 || args.q.size[3] == 0) return;
    const std::int64_t key_dim = args.q.size[3];
    for (TensorRef* bias : {&args.dt_bias, &args.d_dt_bias})
        if (bias->ndim == 1 && bias->size[0] % key_dim == 0)
            *bias = {.data = bias->data,
                     .dtype = bias->dtype,
                     .ndim = 2,
                     .size = {bias->size[0] / key_dim, key_dim},
                     .stride = {key_dim * bias->stride[0], bias->stride[0]}};
}

Args make_args(Pass pass, Call& call, const Place& place) {
    Args args;
    std::size_t index = 0;
    for (const Parameter& parameter : call.parameters) {
        TensorHandle& tensor = call.tensors[index++];
        if (!tensor) continue;
        TensorRef& ref = args.*parameter.field;
        if (contains(kOfHeads, parameter.field))
            ref = flat_view(pass, parameter.name, tensor, place, args.q.dtype);
        else
            ref = view(pass, parameter.name, tensor, place);
    }
    const Options& options = call.options;
    if (options.in_place) {
        if (args.initial_state)
            fail(pass, "initial_state", "be left out in place: it is final_state", "a tensor");
        if (!args.final_state) fail(pass, "final_state", "be given in place", "none");
        args.initial_state = args.final_state;
        if (args.initial_scales)
            fail(pass, "initial_scales", "be left out in place: they are final_scales", "a tensor");
        args.initial_scales = args.final_scales;
    }
    args.algorithm = kAlgorithms[static_cast<std::size_t>(options.algorithm)].algorithm;
    args.gate = static_cast<Gate>(options.gate);
    shape_biases(args);
    if (call.scale)
        args.scale = *call.scale;
    else if (args.q.ndim == 4)
        args.scale = std::pow(static_cast<double>(args.q.size[3]), -0.5);
    args.lower_bound = call.lower_bound;
    args.qk_l2norm = options.qk_l2norm;
    args.beta_is_logit = options.beta_is_logit;
    args.allow_neg_eigval = options.allow_neg_eigval;
    args.null_index = narrow<std::int32_t>(pass, "null_index", call.null_index);
    args.batch_invariant = options.batch_invariant;
    args.chunk_tokens = static_cast<int>(options.chunk_tokens);
    args.keep = options.keep;
    return args;
}

// Whether v may have so many rows for the tokens of q.
bool has_rows(const Args& args, std::int64_t rows) {
    const std::int64_t tokens = args.q.size[1];
    if (!takes_several_writes(args.algorithm.update) || tokens == 0) return rows == tokens;
    return rows > 0 && rows % tokens == 0;
}

// What a call makes besides what it keeps, also as arguments of the call. Inputs that validate() will refuse
// get none: what it would take by their shapes may be more than there is.
struct Outputs {
    TensorHandle o, final_state, m, b;
    std::array<TensorHandle, kGradients.size()> gradients;

    Outputs(Pass pass, const Options& options, const Place& place, const Device& device, Args& args) {
        const TensorRef &q = args.q, &v = args.v, &cu = args.cu_seqlens;
        if (q.ndim != 4 || v.ndim != 4 || v.size[0] != q.size[0] || !has_rows(args, v.size[1])) return;
        if (has_outputs(pass) && !args.o) {
            const std::array shape{q.size[0], q.size[1], v.size[2], v.size[3]};
            o = allocate(shape, dtype_code(v.dtype), device);
            args.o = TensorRef::contiguous(data_of(o), v.dtype, {shape[0], shape[1], shape[2], shape[3]});
        }
        const bool listed = cu.ndim == 1 && cu.size[0] > 0 && (cu.stride[0] == 1 || cu.size[0] == 1);
        if ((cu && !listed) || q.size[3] > kLargestDim) return;
        const std::int64_t rows = v.size[3], columns = q.size[3], sequences = num_sequences(args);
        const std::int32_t exact = dtype_code(q.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32);
        const auto make_states = [&](std::string_view name, TensorHandle& made, TensorRef& state) {
            const std::array shape{sequences, v.size[2], options.k_first ? columns : rows,
                                   options.k_first ? rows : columns};
            made = allocate(shape, exact, device);
            state = view(pass, name, made, place);
            if (!options.k_first) return;
            std::swap(state.size[2], state.size[3]);
            std::swap(state.stride[2], state.stride[3]);
        };
        if (options.make_final_state && !args.final_state)
            make_states("final_state", final_state, args.final_state);
        if (options.make_b) make_states("b", b, args.segment_b);
        if (options.make_m) {
            const std::array shape{sequences, v.size[2], columns, columns};
            const std::size_t ndim = has_diagonal_map(args.algorithm.update) ? 3 : 4;
            m = allocate(std::span(shape).first(ndim), exact, device);
            args.segment_m = view(pass, "m", m, place);
        }
        for (std::size_t i = 0; i < kGradients.size(); ++i) {
            if (!(options.gradients >> i & 1)) continue;
            const TensorRef& of = args.*kGradients[i].of;
            if (!of)
                fail(pass, "options", "ask for no gradient of what is not given",
                     std::string(kGradients[i].name));
            TensorRef& gradient = args.*kGradients[i].field;
            if (kGradients[i].field == &Args::d_initial_state) {
                make_states(kGradients[i].name, gradients[i], gradient);
            } else {
                const std::span shape = std::span(of.size).first(static_cast<std::size_t>(of.ndim));
                gradients[i] = allocate(shape, dtype_code(of.dtype), device);
                gradient = view(pass, kGradients[i].name, gradients[i], place);
            }
        }
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
// keeps channels first, become dense copies; so does a gradient of states that is contiguous neither along K
// nor along V, as autograd may make it. Nothing is copied for arguments that validate() refuses.
void copy_rows(Pass pass, Call& call, Args& args, const Context& context, const Place& place) {
    const auto strided = [&](TensorRef Args::* field) {
        const TensorRef& ref = args.*field;
        const bool rows = ref.ndim == 4 && ref.stride[3] != 1 && ref.size[3] > 1;
        if (field == &Args::d_final_state) return rows && ref.stride[2] != 1 && ref.size[2] > 1;
        return rows && contains(kOfTokens, field);
    };
    if (std::ranges::none_of(call.parameters, strided, &Parameter::field)) return;
    Args copied = args;
    for (const Parameter& parameter : call.parameters)
        if (strided(parameter.field)) (copied.*parameter.field).stride[3] = 1;
    validate(pass, copied, context.device.kind == DeviceKind::kCpu ? Indices::kOnHost : Indices::kOnDevice);
    std::size_t index = 0;
    for (const Parameter& parameter : call.parameters) {
        TensorHandle& tensor = call.tensors[index++];
        TensorRef& ref = args.*parameter.field;
        if (!strided(parameter.field)) continue;
        tensor = dense_copy(std::move(tensor), dtype_code(ref.dtype));
        ref = view(pass, parameter.name, tensor, place);
    }
}

template <Pass pass, Form form>
void run_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Call call(pass, form, stack);
    static const std::int64_t known = known_bits(pass, form), version = options_version();
    if ((call.packed & ~known) != 0 || call.options.version != version ||
        call.options.algorithm >= std::ssize(kAlgorithms) || call.options.gate >= std::ssize(kGates))
        refuse_options(pass, form, call);
    const Place place = place_of(call.tensors.front());
    Args args = make_args(pass, call, place);
    Context context;
    context.device = device_at(pass, place);
    Outputs made(pass, call.options, place, context.device, args);
    if (context.device.kind == DeviceKind::kCpu)
        context.parallel_for = torch_threads();
    else
        context.stream = current_stream(context.device);
    copy_rows(pass, call, args, context, place);
    if (context.device.kind != DeviceKind::kCpu && debug_checks()) check_indices(pass, call, args);
    TensorHandle kept = run_planned(pass, args, context, call.backend.view());
    if (!args.keep) kept.reset();
    Results results(stack);
    if constexpr (pass == Pass::kBackward) {
        if (form == Form::kDefault)
            for (TensorHandle& gradient : made.gradients) results.put_optional(gradient);
    } else if constexpr (pass != Pass::kSegment) {
        results.put(made.o);
        if constexpr (pass != Pass::kVerify) {
            if (form == Form::kDefault)
                results.put_optional(made.final_state);
            else
                results.put(made.final_state);
        }
    } else if constexpr (form == Form::kOut) {
        results.put(kept);
    } else {
        results.put_optional(made.m);
        results.put_optional(made.b);
        results.put_optional(kept);
    }
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

void option_bits_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    stack[0] = torch::stable::detail::from(option_bits());
}

template <class Library>
void implement_all(Library& library) {
    const auto implement = [&]<Pass pass>(std::integral_constant<Pass, pass>) {
        library.impl(qualified(pass, Form::kDefault).c_str(), run_boxed<pass, Form::kDefault>);
        library.impl(qualified(pass, Form::kOut).c_str(), run_boxed<pass, Form::kOut>);
    };
    implement(std::integral_constant<Pass, Pass::kPrefill>{});
    implement(std::integral_constant<Pass, Pass::kDecode>{});
    implement(std::integral_constant<Pass, Pass::kVerify>{});
    implement(std::integral_constant<Pass, Pass::kSegment>{});
    implement(std::integral_constant<Pass, Pass::kBackward>{});
}

template <class Library>
void define_all(Library& library) {
    for (const Pass pass : kPasses)
        for (const Form form : kForms) library.def(schema(pass, form).c_str());
}

}  // namespace

CULA_LIBRARY(library) {
    define_all(library);
    library.def(kComposeSchema);
    library.def("option_bits() -> str");
}

CULA_LIBRARY_IMPL(CPU, library) {
    implement_all(library);
    library.impl("compose", compose_boxed);
}
CULA_LIBRARY_IMPL(CUDA, library) {
    implement_all(library);
    library.impl("compose", compose_boxed);
}
CULA_LIBRARY_IMPL(CompositeExplicitAutograd, library) { library.impl("option_bits", option_bits_boxed); }

// The same once more for the package, which does itself in Python, in less time, what it puts before the
// others: it looks for derivatives and counts writes.
CULA_UNCHECKED_LIBRARY(library) { define_all(library); }
CULA_UNCHECKED_LIBRARY_IMPL(CPU, library) { implement_all(library); }
CULA_UNCHECKED_LIBRARY_IMPL(CUDA, library) { implement_all(library); }

}  // namespace cula::torch_binding
