// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace cula::torch_binding {
namespace {

using GetCurrentStream = AOTITorchError (*)(std::int32_t device, void** stream);

// libtorch_cuda is absent under CPU-only PyTorch, and one binary serves both: the symbol is looked up when
// first needed.
GetCurrentStream find_get_current_stream() {
    constexpr const char* kSymbol = "aoti_torch_get_current_cuda_stream";
    void* found = dlsym(RTLD_DEFAULT, kSymbol);
    if (!found)
        if (void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
            found = dlsym(library, kSymbol);
    return reinterpret_cast<GetCurrentStream>(found);
}

std::string elements(std::span<const std::int64_t> sizes) {
    std::int64_t count = 1;
    for (const std::int64_t size : sizes) count *= std::max<std::int64_t>(size, 1);
    return std::to_string(count);
}

void parallel_for(void*, int count, void (*worker)(void* arg, int index), void* arg) {
    if (count == 1) return worker(arg, 0);
    struct Work {
        void (*worker)(void*, int);
        void* arg;
    } work{worker, arg};
    const auto run = [](std::int64_t begin, std::int64_t end, void* context) {
        const auto& [one, with] = *static_cast<Work*>(context);
        for (std::int64_t i = begin; i < end; ++i) one(with, static_cast<int>(i));
    };
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, 1, run, &work));
}

}  // namespace

ParallelFor torch_threads() {
    std::uint32_t threads = 1;
    TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    return {parallel_for, nullptr, static_cast<int>(threads)};
}

TensorHandle allocate(std::span<const std::int64_t> sizes, std::int32_t dtype, const Device& device) {
    std::array<std::int64_t, kMaxDims> strides{};
    std::int64_t step = 1;
    for (std::size_t dim = sizes.size(); dim-- > 0; step *= std::max<std::int64_t>(sizes[dim], 1))
        strides[dim] = step;
    return allocate_strided(sizes, std::span(strides).first(sizes.size()), dtype, device);
}

TensorHandle allocate_strided(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
                              std::int32_t dtype, const Device& device) {
    const std::int32_t type =
        device.kind == DeviceKind::kCuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                 type, device.index, &handle) != AOTI_TORCH_SUCCESS)
        throw std::runtime_error("cula: PyTorch gives no tensor of " + elements(sizes) + " elements in " +
                                 (device.kind == DeviceKind::kCuda ? "GPU" : "host") +
                                 " memory: it is out of memory, or the device has failed before");
    return TensorHandle(handle);
}

void* data_of(const TensorHandle& tensor) {
    void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    return data;
}

TensorHandle dense_copy(TensorHandle tensor, std::int32_t dtype) {
    namespace stable = torch::stable::detail;
    const bool non_blocking = false, copy = true;
    std::array stack{stable::from(tensor.release()), stable::from(dtype), stable::from(non_blocking),
                     stable::from(copy),
                     stable::from(std::optional(torch::headeronly::MemoryFormat::Contiguous))};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::to", "dtype", stack.data(), TORCH_ABI_VERSION));
    return TensorHandle(stable::to<AtenTensorHandle>(stack.front()));
}

TensorHandle copy_to_host(const TensorHandle& tensor) {
    std::int64_t ndim = 0, *sizes = nullptr;
    std::int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &ndim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    TensorHandle copy = allocate({sizes, static_cast<std::size_t>(ndim)}, dtype, {.kind = DeviceKind::kCpu});
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), tensor.get(), 0));
    return copy;
}

Stream current_stream(const Device& device) {
    static const GetCurrentStream get_current_stream = find_get_current_stream();
    if (!get_current_stream) throw Error("this build of PyTorch has no CUDA");
    Stream stream = nullptr;
    TORCH_ERROR_CODE_CHECK(get_current_stream(device.index, &stream));
    return stream;
}

}  // namespace cula::torch_binding
