// SPDX-License-Identifier: Apache-2.0
// What a call borrows from PyTorch: its thread pool, its allocator, its current stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cula/cula.h"
#include "handles.h"

namespace cula::torch_binding {

// torch's own pool: it obeys torch.set_num_threads, and a second pool beside it would fight it for the cores.
ParallelFor torch_threads();

// A dense tensor of whatever the memory holds; dtype is torch's code.
TensorHandle allocate(std::span<const std::int64_t> sizes, std::int32_t dtype, const Device& device);
TensorHandle allocate_strided(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
                              std::int32_t dtype, const Device& device);
void* data_of(const TensorHandle& tensor);

// Row-major; dtype is torch's code.
TensorHandle dense_copy(TensorHandle tensor, std::int32_t dtype);

// Waits for the stream that the tensor's values come from.
TensorHandle copy_to_host(const TensorHandle& tensor);

// The stream that the caller works on, on a CUDA device. The device need not be current: kernels and
// allocations see to that themselves.
Stream current_stream(const Device& device);

}  // namespace cula::torch_binding
