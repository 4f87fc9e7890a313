// SPDX-License-Identifier: Apache-2.0
// torch.ops.cula: the short convolution and the gated RMSNorm, on CPUs (include/cula/layers.h has what they
// compute). x of a convolution is [B, T, D]; what a call makes lies as x does, channels or tokens first.
// Fakes and derivatives are in Python.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "cula/layers.h"
#include "handles.h"
#include "library.h"
#include "runtime.h"
#include "views.h"

namespace cula::torch_binding {
namespace {

constexpr char kConvSchema[] =
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
    "Tensor? cu_seqlens=None, Tensor? seq_idx=None, bool silu=False, int final_state_len=0, "
    "str? backend=None) -> (Tensor y, Tensor? final_state)";
// gradients: bit i asks for the i-th of what is returned.
constexpr char kConvBackwardSchema[] =
    "causal_conv1d_backward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? seq_idx, bool silu, Tensor? d_y, Tensor? d_final_state, int gradients, "
    "str? backend=None) -> (Tensor? d_x, Tensor? d_weight, Tensor? d_bias, Tensor? d_initial_state)";
constexpr char kConvUpdateSchema[] =
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, "
    "bool silu=False, Tensor? conv_state_indices=None, Tensor? cu_seqlens=None, Tensor? cache_seqlens=None, "
    "Tensor? num_accepted_tokens=None, int null_index=-1, str? backend=None) -> Tensor y";
constexpr char kNormSchema[] =
    "rms_norm_gated(Tensor x, Tensor? gate=None, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, "
    "bool sigmoid=False, bool norm_before_gate=True, int group_size=0, bool zero_centered=False, "
    "str? backend=None) -> Tensor y";
constexpr char kNormBackwardSchema[] =
    "rms_norm_gated_backward(Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, float eps, bool sigmoid, "
    "bool norm_before_gate, int group_size, bool zero_centered, Tensor d_y, int gradients, str? "
    "backend=None) -> "
    "(Tensor? d_x, Tensor? d_gate, Tensor? d_weight, Tensor? d_bias)";

TensorRef optional_view(Operator op, std::string_view argument, const TensorHandle& tensor,
                        const Place& place) {
    return tensor ? view(op, argument, tensor, place) : TensorRef{};
}

Context context_at(Operator op, const Place& place) {
    Context context;
    context.device = device_at(op, place);
    context.parallel_for = torch_threads();
    return context;
}

// A new tensor and its view.
struct Made {
    TensorHandle tensor;
    TensorRef ref;

    void dense(const TensorRef& like, std::initializer_list<std::int64_t> sizes) {
        tensor = allocate(sizes, dtype_code(like.dtype), {.kind = DeviceKind::kCpu});
        ref = TensorRef::contiguous(data_of(tensor), like.dtype, sizes);
    }

    void dense(const TensorRef& like) {
        ref = like;
        std::int64_t step = 1;
        for (std::size_t d = static_cast<std::size_t>(like.ndim); d-- > 0;) {
            ref.stride[d] = step;
            step *= std::max<std::int64_t>(like.size[d], 1);
        }
        tensor = allocate(std::span(like.size).first(static_cast<std::size_t>(like.ndim)),
                          dtype_code(like.dtype), {.kind = DeviceKind::kCpu});
        ref.data = data_of(tensor);
    }

    // [B, T, D], dense, with tokens contiguous where x's are and its channels are not.
    void tokens(const TensorRef& x) {
        if (x.stride[2] == 1 || x.stride[1] != 1) return dense(x);
        ref = x;
        ref.stride = {std::max<std::int64_t>(x.size[1], 1) * std::max<std::int64_t>(x.size[2], 1), 1,
                      std::max<std::int64_t>(x.size[1], 1)};
        tensor = allocate_strided(std::span(x.size).first(3), std::span(ref.stride).first(3),
                                  dtype_code(x.dtype), {.kind = DeviceKind::kCpu});
        ref.data = data_of(tensor);
    }
};

// Makes the gradient of `of` where bit `row` of `wanted` asks for it.
TensorRef gradient(Operator op, std::int64_t wanted, int row, const TensorRef& of, Made& made,
                   bool tokens = false) {
    if (!(wanted >> row & 1)) return {};
    if (!of) fail(op, "gradients", "ask for none of what is not given", "bit " + std::to_string(row));
    if (tokens)
        made.tokens(of);
    else
        made.dense(of);
    return made.ref;
}

void need_tokens(Operator op, const TensorRef& x) {
    if (x.ndim != 3) fail(op, "x", "have shape [B, T, D]", std::to_string(x.ndim) + " dimensions");
}

// What a convolution and its backward pass have in common.
struct ConvolutionArguments {
    TensorHandle x, weight, bias, initial, lengths, numbers;
    bool silu;

    explicit ConvolutionArguments(Arguments& arguments)
        : x(arguments.tensor()),
          weight(arguments.tensor()),
          bias(arguments.optional_tensor()),
          initial(arguments.optional_tensor()),
          lengths(arguments.optional_tensor()),
          numbers(arguments.optional_tensor()),
          silu(arguments.value<bool>()) {}

    Convolution call(Operator op, const Place& place) const {
        Convolution call;
        call.x = view(op, "x", x, place);
        need_tokens(op, call.x);
        call.weight = view(op, "weight", weight, place);
        call.bias = optional_view(op, "bias", bias, place);
        call.initial_state = optional_view(op, "initial_state", initial, place);
        call.cu_seqlens = optional_view(op, "cu_seqlens", lengths, place);
        call.seq_idx = optional_view(op, "seq_idx", numbers, place);
        call.silu = silu;
        return call;
    }
};

void conv_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const ConvolutionArguments given(arguments);
    const auto columns = arguments.value<std::int64_t>();
    const String backend = arguments.optional_string();
    const Operator op("causal_conv1d", "x");
    const Place place = place_of(given.x);
    Convolution call = given.call(op, place);
    if (columns < 0) fail(op, "final_state_len", "not be negative", std::to_string(columns));
    Made y, final_state;
    y.tokens(call.x);
    call.y = y.ref;
    if (columns > 0) {
        const std::int64_t sequences =
            call.cu_seqlens ? std::max<std::int64_t>(call.cu_seqlens.size[0] - 1, 0) : call.x.size[0];
        final_state.dense(call.x, {sequences, call.x.size[2], columns});
        call.final_state = final_state.ref;
    }
    convolve(call, context_at(op, place), backend.view());
    Results results(stack);
    results.put(y.tensor);
    results.put_optional(final_state.tensor);
}

void conv_backward_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const ConvolutionArguments given(arguments);
    const TensorHandle d_y = arguments.optional_tensor(), d_final = arguments.optional_tensor();
    const auto wanted = arguments.value<std::int64_t>();
    const String backend = arguments.optional_string();
    const Operator op("causal_conv1d_backward", "x");
    const Place place = place_of(given.x);
    Convolution call = given.call(op, place);
    call.d_y = optional_view(op, "d_y", d_y, place);
    call.d_final_state = optional_view(op, "d_final_state", d_final, place);
    std::array<Made, 4> made;
    call.d_x = gradient(op, wanted, 0, call.x, made[0], true);
    call.d_weight = gradient(op, wanted, 1, call.weight, made[1]);
    call.d_bias = gradient(op, wanted, 2, call.bias, made[2]);
    call.d_initial_state = gradient(op, wanted, 3, call.initial_state, made[3]);
    convolve_backward(call, context_at(op, place), backend.view());
    Results results(stack);
    for (Made& each : made) results.put_optional(each.tensor);
}

void conv_update_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    const TensorHandle x = arguments.tensor(), state = arguments.tensor(), weight = arguments.tensor(),
                       bias = arguments.optional_tensor();
    const bool silu = arguments.value<bool>();
    const TensorHandle slots = arguments.optional_tensor(), lengths = arguments.optional_tensor(),
                       before = arguments.optional_tensor(), accepted = arguments.optional_tensor();
    const auto null_index = arguments.value<std::int64_t>();
    const String backend = arguments.optional_string();
    const Operator op("causal_conv1d_update", "x");
    const Place place = place_of(x);
    ConvolutionStep call;
    call.x = view(op, "x", x, place);
    call.state = view(op, "conv_state", state, place);
    call.weight = view(op, "weight", weight, place);
    call.bias = optional_view(op, "bias", bias, place);
    call.silu = silu;
    call.state_indices = optional_view(op, "conv_state_indices", slots, place);
    call.cu_seqlens = optional_view(op, "cu_seqlens", lengths, place);
    call.tokens_before = optional_view(op, "cache_seqlens", before, place);
    call.num_accepted = optional_view(op, "num_accepted_tokens", accepted, place);
    call.null_index = null_index;
    need_tokens(op, call.x);
    Made y;
    y.tokens(call.x);
    call.y = y.ref;
    convolve_step(call, context_at(op, place), backend.view());
    Results(stack).put(y.tensor);
}

// Rows whose channels are not contiguous become dense copies.
TensorRef rows_view(Operator op, std::string_view argument, TensorHandle& tensor, const Place& place) {
    if (!tensor) return {};
    TensorRef ref = view(op, argument, tensor, place);
    if (ref.ndim == 0) return ref;
    const auto last = static_cast<std::size_t>(ref.ndim - 1);
    if (ref.stride[last] == 1 || ref.size[last] < 2) return ref;
    tensor = dense_copy(std::move(tensor), dtype_code(ref.dtype));
    return view(op, argument, tensor, place);
}

struct NormArguments {
    TensorHandle x, gate, weight, bias;
    double eps;
    bool sigmoid, norm_before_gate;
    std::int64_t group;
    bool zero_centered;

    explicit NormArguments(Arguments& arguments)
        : x(arguments.tensor()),
          gate(arguments.optional_tensor()),
          weight(arguments.optional_tensor()),
          bias(arguments.optional_tensor()),
          eps(arguments.value<double>()),
          sigmoid(arguments.value<bool>()),
          norm_before_gate(arguments.value<bool>()),
          group(arguments.value<std::int64_t>()),
          zero_centered(arguments.value<bool>()) {}

    GatedNorm call(Operator op, const Place& place) {
        GatedNorm call;
        call.x = rows_view(op, "x", x, place);
        call.gate = rows_view(op, "gate", gate, place);
        call.weight = optional_view(op, "weight", weight, place);
        call.bias = optional_view(op, "bias", bias, place);
        call.eps = eps;
        call.activation = sigmoid ? GateActivation::kSigmoid : GateActivation::kSilu;
        call.norm_before_gate = norm_before_gate;
        call.group = group;
        call.zero_centered = zero_centered;
        return call;
    }
};

void norm_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    NormArguments given(arguments);
    const String backend = arguments.optional_string();
    const Operator op("rms_norm_gated", "x");
    const Place place = place_of(given.x);
    GatedNorm call = given.call(op, place);
    Made y;
    y.dense(call.x);
    call.y = y.ref;
    gated_norm(call, context_at(op, place), backend.view());
    Results(stack).put(y.tensor);
}

void norm_backward_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    Arguments arguments(stack);
    NormArguments given(arguments);
    TensorHandle d_y = arguments.tensor();
    const auto wanted = arguments.value<std::int64_t>();
    const String backend = arguments.optional_string();
    const Operator op("rms_norm_gated_backward", "x");
    const Place place = place_of(given.x);
    GatedNorm call = given.call(op, place);
    call.d_y = rows_view(op, "d_y", d_y, place);
    std::array<Made, 4> made;
    call.d_x = gradient(op, wanted, 0, call.x, made[0]);
    call.d_gate = gradient(op, wanted, 1, call.gate, made[1]);
    call.d_weight = gradient(op, wanted, 2, call.weight, made[2]);
    call.d_bias = gradient(op, wanted, 3, call.bias, made[3]);
    gated_norm_backward(call, context_at(op, place), backend.view());
    Results results(stack);
    for (Made& each : made) results.put_optional(each.tensor);
}

constexpr const char* kSchemas[] = {kConvSchema, kConvBackwardSchema, kConvUpdateSchema, kNormSchema,
                                    kNormBackwardSchema};

template <class Library>
void implement_layers(Library& library) {
    library.impl("causal_conv1d", conv_boxed);
    library.impl("causal_conv1d_backward", conv_backward_boxed);
    library.impl("causal_conv1d_update", conv_update_boxed);
    library.impl("rms_norm_gated", norm_boxed);
    library.impl("rms_norm_gated_backward", norm_backward_boxed);
}

}  // namespace

CULA_LIBRARY_FRAGMENT(library) {
    for (const char* schema : kSchemas) library.def(schema);
}
CULA_UNCHECKED_LIBRARY_FRAGMENT(library) {
    for (const char* schema : kSchemas) library.def(schema);
}
CULA_LIBRARY_IMPL(CPU, library) { implement_layers(library); }
CULA_UNCHECKED_LIBRARY_IMPL(CPU, library) { implement_layers(library); }

}  // namespace cula::torch_binding
