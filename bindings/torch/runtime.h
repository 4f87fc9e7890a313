// SPDX-License-Identifier: Apache-2.0
// What a call borrows from PyTorch: its thread pool, its allocator, its current stream.
#pragma once

#include <cstddef>
#include <optional>

#include "cula/cula.h"
#include "handles.h"

namespace cula::torch_binding {

// torch's own pool: it obeys torch.set_num_threads, and a second pool beside it would fight it for the cores.
ParallelFor torch_threads();

TensorHandle allocate_bytes(std::size_t bytes, const Device& device);
void* data_of(const TensorHandle& tensor);

// Waits for the stream that the tensor's values come from.
TensorHandle copy_to_host(const TensorHandle& tensor);

// Makes the device current for the time of the call, and names the stream that the caller works on.
class CurrentStream {
public:
    explicit CurrentStream(const Device& device);
    Stream get() const { return stream_; }

private:
    struct DeleteGuard {
        void operator()(DeviceGuardHandle handle) const { aoti_torch_delete_device_guard(handle); }
    };
    std::unique_ptr<DeviceGuardOpaque, DeleteGuard> guard_;
    Stream stream_ = nullptr;
};

}  // namespace cula::torch_binding
