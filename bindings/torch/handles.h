// SPDX-License-Identifier: Apache-2.0
// Owners of what libtorch's C interface hands out. The kernels of this library are boxed by hand on that
// interface: its functions are the stable ABI itself, and reading them directly costs neither a shared_ptr
// per tensor nor a copy per string.
#pragma once

#include <torch/csrc/stable/library.h>

#include <memory>
#include <optional>
#include <string_view>

static_assert(TORCH_TARGET_VERSION == (((0ULL + 2) << 56) | ((0ULL + 10) << 48)),
              "the minor version is a hexadecimal byte");
static_assert(TORCH_ABI_VERSION >= TORCH_TARGET_VERSION,
              "these headers of PyTorch are older than the target");

namespace cula::torch_binding {

struct DeleteTensor {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using TensorHandle = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

struct DeleteString {
    void operator()(StringHandle handle) const { torch_delete_string(handle); }
};

class String {
public:
    String() = default;
    explicit String(StringHandle handle) : handle_(handle) {}

    std::string_view view() const {
        if (!handle_) return {};
        const char* data = nullptr;
        std::size_t length = 0;
        TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle_.get(), &data));
        TORCH_ERROR_CODE_CHECK(torch_string_length(handle_.get(), &length));
        return {data, length};
    }

private:
    std::unique_ptr<std::remove_pointer_t<StringHandle>, DeleteString> handle_;
};

// The arguments of a boxed call, taken from its stack one after the other. Nothing here throws: a caller
// takes all of them before it looks at any, or what is left on the stack would leak.
class Arguments {
public:
    explicit Arguments(const StableIValue* stack) : next_(stack) {}

    template <class T>
    T value() {
        return torch::stable::detail::to<T>(*next_++);
    }

    TensorHandle tensor() { return TensorHandle(value<AtenTensorHandle>()); }
    TensorHandle optional_tensor() {
        return TensorHandle(value<std::optional<AtenTensorHandle>>().value_or(nullptr));
    }
    String string() { return String(value<StringHandle>()); }
    String optional_string() { return String(value<std::optional<StringHandle>>().value_or(nullptr)); }

private:
    const StableIValue* next_;
};

}  // namespace cula::torch_binding
