// SPDX-License-Identifier: Apache-2.0
#include "views.h"

#include <algorithm>
#include <span>

#include "core/check.h"
#include "runtime.h"

namespace cula::torch_binding {
namespace {

std::string name(const Place& place) {
    if (place.type == aoti_torch_device_type_cpu()) return "cpu";
    if (place.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(place.index);
    return "another kind of device";
}

// torch's codes of the library's dtypes.
struct DtypeCode {
    std::int32_t code;
    Dtype dtype;
};

std::span<const DtypeCode> dtype_codes() {
    static const DtypeCode rows[] = {
        {aoti_torch_dtype_bfloat16(), Dtype::kBFloat16},
        {aoti_torch_dtype_float32(), Dtype::kFloat32},
        {aoti_torch_dtype_int32(), Dtype::kInt32},
        {aoti_torch_dtype_float16(), Dtype::kFloat16},
        {aoti_torch_dtype_int64(), Dtype::kInt64},
        {aoti_torch_dtype_bool(), Dtype::kBool},
        {aoti_torch_dtype_float64(), Dtype::kFloat64},
        {aoti_torch_dtype_float8_e4m3fn(), Dtype::kFloat8E4M3},
    };
    return rows;
}

std::optional<Dtype> find_dtype(std::int32_t code) {
    for (const DtypeCode& row : dtype_codes())
        if (row.code == code) return row.dtype;
    return std::nullopt;
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

}  // namespace

[[noreturn]] void fail(Operator op, std::string_view argument, std::string_view expected,
                       std::string_view given) {
    throw Error(std::string(op.name) + ": " + std::string(argument) + " must " + std::string(expected) +
                ", got " + std::string(given));
}

Place place_of(const TensorHandle& tensor) {
    Place place;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &place.type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &place.index));
    return place;
}

Device device_at(Operator op, const Place& place) {
    if (place.type == aoti_torch_device_type_cpu()) return {.kind = DeviceKind::kCpu};
    if (place.type == aoti_torch_device_type_cuda()) return cuda_device(place.index);
    fail(op, op.first, "be on the CPU or on a CUDA device", name(place));
}

std::int32_t dtype_code(Dtype dtype) {
    return std::ranges::find(dtype_codes(), dtype, &DtypeCode::dtype)->code;
}

void check_place(Operator op, std::string_view argument, const TensorHandle& tensor, const Place& place) {
    if (const Place own = place_of(tensor); own != place)
        fail(op, argument, "be on " + std::string(op.first) + "'s device, " + name(place), name(own));
}

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

}  // namespace cula::torch_binding
