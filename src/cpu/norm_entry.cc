// SPDX-License-Identifier: Apache-2.0
// The host side of the gated RMSNorm: it checks a call, merges the leading dimensions, divides the rows, and
// adds up what they found for d_weight and d_bias, always in the same order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/float16.h"
#include "cpu/host.h"
#include "cpu/layers.h"
#include "cula/layers.h"

namespace cula {
namespace {

using cpu::kNormRows;
using cpu::LayerIsa;
using cpu::NormCall;
using cpu::NormRows;

constexpr std::string_view kForward = "rms_norm_gated", kBackward = "rms_norm_gated_backward";

// With fewer elements, waking other threads costs more than they save.
constexpr std::int64_t kWorthSharing = 1 << 15;

void check(const GatedNorm& c, std::string_view op, const Context& context, bool backward) {
    const auto fail = [&](std::string_view argument, std::string_view expected, const std::string& given) {
        throw Error(std::string(op) + ": " + std::string(argument) + " must " + std::string(expected) +
                    ", got " + given);
    };
    const auto floats = [&](std::string_view argument, const TensorRef& ref) {
        const bool good =
            ref.dtype == Dtype::kFloat32 || ref.dtype == Dtype::kBFloat16 || ref.dtype == Dtype::kFloat16;
        CULA_REQUIRE(good, argument, "have dtype float32, bfloat16 or float16", std::string(name(ref.dtype)));
        CULA_REQUIRE_MEMORY(argument, ref);
    };
    CULA_REQUIRE(context.device.kind == DeviceKind::kCpu, "x", "be on the CPU", "another device");
    const TensorRef& x = c.x;
    CULA_REQUIRE(x.ndim >= 1 && x.ndim <= kMaxDims, "x", "have from 1 to 5 dimensions", shape_of(x));
    const auto last = static_cast<std::size_t>(x.ndim - 1);
    const std::int64_t channels = x.size[last];
    CULA_REQUIRE(channels >= 1 && channels < std::numeric_limits<std::int32_t>::max(), "x",
                 "have from 1 to 2^31 - 2 channels", shape_of(x));
    const auto output = [&](std::string_view argument, const TensorRef& ref) {
        CULA_REQUIRE(!overlaps_itself(ref), argument, "not overlap itself in memory",
                     "strides that make elements share an address");
    };
    const auto like = [&](std::string_view argument, const TensorRef& ref, bool written) {
        if (!ref) return;
        bool same = ref.ndim == x.ndim;
        for (int i = 0; i < x.ndim; ++i) same = same && ref.size[i] == x.size[i];
        CULA_REQUIRE(same, argument, "have x's shape " + shape_of(x), shape_of(ref));
        floats(argument, ref);
        CULA_REQUIRE(ref.stride[last] == 1 || channels == 1, argument, "have contiguous channels",
                     "a stride of " + std::to_string(ref.stride[last]));
        if (written) output(argument, ref);
    };
    const auto parameter = [&](std::string_view argument, const TensorRef& ref, bool written) {
        if (!ref) return;
        CULA_REQUIRE(ref.ndim == 1 && ref.size[0] == channels, argument,
                     "have shape [N] = [" + std::to_string(channels) + "]", shape_of(ref));
        floats(argument, ref);
        if (written) output(argument, ref);
    };
    like("x", x, false);
    like("gate", c.gate, false);
    parameter("weight", c.weight, false);
    parameter("bias", c.bias, false);
    CULA_REQUIRE(c.group >= 0 && (c.group == 0 || channels % c.group == 0), "group_size",
                 "divide the " + std::to_string(channels) + " channels", std::to_string(c.group));
    CULA_REQUIRE(c.eps >= 0.0, "eps", "not be negative", std::to_string(c.eps));
    if (!backward) {
        CULA_REQUIRE(static_cast<bool>(c.y), "y", "be given", "none");
        like("y", c.y, true);
        return;
    }
    CULA_REQUIRE(static_cast<bool>(c.d_y), "d_y", "be given", "none");
    like("d_y", c.d_y, false);
    like("d_x", c.d_x, true);
    CULA_REQUIRE(!c.d_gate || c.gate, "d_gate", "be left out without gate", "a tensor");
    like("d_gate", c.d_gate, true);
    CULA_REQUIRE(!c.d_weight || c.weight, "d_weight", "be left out without weight", "a tensor");
    parameter("d_weight", c.d_weight, true);
    CULA_REQUIRE(!c.d_bias || c.bias, "d_bias", "be left out without bias", "a tensor");
    parameter("d_bias", c.d_bias, true);
}

// The call with as few leading dimensions as the strides of its tensors allow.
NormCall flatten(const GatedNorm& c) {
    NormCall call{};
    const std::pair<const TensorRef*, NormRows*> tensors[] = {
        {&c.x, &call.x},     {&c.gate, &call.gate}, {&c.y, &call.y},
        {&c.d_y, &call.d_y}, {&c.d_x, &call.d_x},   {&c.d_gate, &call.d_gate},
    };
    for (const auto& [ref, rows] : tensors)
        if (*ref) rows->data = ref->data, rows->dtype = ref->dtype;
    const int leading = c.x.ndim - 1;
    for (int d = 0; d < leading; ++d) {
        const std::int64_t size = c.x.size[d];
        if (size == 1) continue;
        const bool merges = call.dims > 0 && std::ranges::all_of(tensors, [&](const auto& each) {
                                const auto& [ref, rows] = each;
                                return !*ref || rows->stride[call.dims - 1] == ref->stride[d] * size;
                            });
        const int at = merges ? call.dims - 1 : call.dims++;
        call.size[at] = merges ? call.size[at] * size : size;
        for (const auto& [ref, rows] : tensors)
            if (*ref) rows->stride[at] = ref->stride[d];
    }
    call.channels = static_cast<int>(c.x.size[leading]);
    call.group = c.group ? static_cast<int>(c.group) : call.channels;
    if (c.weight)
        call.weight = c.weight.data, call.weight_dtype = c.weight.dtype,
        call.weight_stride = c.weight.stride[0];
    if (c.bias) call.bias = c.bias.data, call.bias_dtype = c.bias.dtype, call.bias_stride = c.bias.stride[0];
    call.eps = static_cast<float>(c.eps);
    call.sigmoid = c.activation == GateActivation::kSigmoid;
    call.norm_before_gate = c.norm_before_gate;
    call.zero_centered = c.zero_centered;
    return call;
}

std::int64_t rows_of(const NormCall& call) {
    std::int64_t rows = 1;
    for (int d = 0; d < call.dims; ++d) rows *= call.size[d];
    return rows;
}

bool has_rows(const TensorRef& x) {
    for (int d = 0; d + 1 < x.ndim; ++d)
        if (x.size[d] == 0) return false;
    return true;
}

template <class Body>
void for_rows(const LayerIsa& isa, const NormCall& call, const Context& context, std::int64_t rows,
              Body body) {
    const std::int64_t tasks = (rows + kNormRows - 1) / kNormRows;
    const int workers = rows * call.channels < kWorthSharing ? 1 : cpu::num_workers(context, tasks);
    const std::size_t floats = isa.norm_scratch_bytes(call.channels, call.group) / sizeof(float);
    std::vector<float> scratch(floats * static_cast<std::size_t>(workers));
    cpu::for_each_task(context, workers, tasks, false, [&](int worker, std::int64_t task) {
        body(task, task * kNormRows, std::min<std::int64_t>((task + 1) * kNormRows, rows),
             reinterpret_cast<std::byte*>(scratch.data() + floats * static_cast<std::size_t>(worker)));
    });
}

void store_sum(const TensorRef& ref, std::int64_t c, double value) {
    void* p = ref.ptr(c);
    switch (ref.dtype) {
        case Dtype::kBFloat16: *static_cast<BFloat16*>(p) = BFloat16(static_cast<float>(value)); break;
        case Dtype::kFloat16: *static_cast<Float16*>(p) = Float16(static_cast<float>(value)); break;
        default: *static_cast<float*>(p) = static_cast<float>(value); break;
    }
}

}  // namespace

void gated_norm(const GatedNorm& given, const Context& context, std::string_view backend) {
    check(given, kForward, context, false);
    const LayerIsa& isa = cpu::layer_isa(kForward, backend);
    if (!has_rows(given.x)) return;
    const NormCall call = flatten(given);
    for_rows(isa, call, context, rows_of(call),
             [&](std::int64_t, std::int64_t begin, std::int64_t end, std::byte* scratch) {
                 isa.norm(call, begin, end, scratch);
             });
}

void gated_norm_backward(const GatedNorm& given, const Context& context, std::string_view backend) {
    check(given, kBackward, context, true);
    const LayerIsa& isa = cpu::layer_isa(kBackward, backend);
    const NormCall call = flatten(given);
    const std::int64_t rows = has_rows(given.x) ? rows_of(call) : 0, channels = call.channels,
                       tasks = (rows + kNormRows - 1) / kNormRows;
    const bool sums = given.d_weight || given.d_bias;
    std::vector<float> found(sums ? static_cast<std::size_t>(tasks * 2 * channels) : 0);
    for_rows(isa, call, context, rows,
             [&](std::int64_t task, std::int64_t begin, std::int64_t end, std::byte* scratch) {
                 isa.norm_backward(call, begin, end, sums ? found.data() + task * 2 * channels : nullptr,
                                   scratch);
             });
    for (std::int64_t c = 0; sums && c < channels; ++c) {
        double weight = 0.0, bias = 0.0;
        for (std::int64_t task = 0; task < tasks; ++task) {
            weight += static_cast<double>(found[static_cast<std::size_t>(task * 2 * channels + c)]);
            bias += static_cast<double>(found[static_cast<std::size_t>((task * 2 + 1) * channels + c)]);
        }
        if (given.d_weight) store_sum(given.d_weight, c, weight);
        if (given.d_bias) store_sum(given.d_bias, c, bias);
    }
}

}  // namespace cula
