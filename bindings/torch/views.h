// SPDX-License-Identifier: Apache-2.0
// Tensors of a boxed call as the library sees them, and errors in the words of an operator.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cula/cula.h"
#include "handles.h"

namespace cula::torch_binding {

// An operator as messages name it, and its first tensor.
struct Operator {
    std::string_view name, first = "q";

    Operator(Pass pass) : name(cula::name(pass)) {}
    Operator(std::string_view other, std::string_view other_first) : name(other), first(other_first) {}
};

[[noreturn]] void fail(Operator op, std::string_view argument, std::string_view expected,
                       std::string_view given);

struct Place {
    std::int32_t type = 0, index = 0;

    bool operator==(const Place&) const = default;
};

Place place_of(const TensorHandle& tensor);
Device device_at(Operator op, const Place& place);

// torch's code of one of the library's dtypes.
std::int32_t dtype_code(Dtype dtype);

// Throws Error unless the tensor is at `place`.
void check_place(Operator op, std::string_view argument, const TensorHandle& tensor, const Place& place);

// The view that the library works on; `place` is the first tensor's.
TensorRef view(Operator op, std::string_view argument, const TensorHandle& tensor, const Place& place);

// Puts what a call returns on its stack.
class Results {
public:
    explicit Results(StableIValue* stack) : next_(stack) {}

    void put(TensorHandle& tensor) {
        AtenTensorHandle handle = tensor.release();
        if (!handle) TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
        *next_++ = torch::stable::detail::from(handle);
    }
    void put_optional(TensorHandle& tensor) {
        std::optional<AtenTensorHandle> handle;
        if (tensor) handle = tensor.release();
        *next_++ = torch::stable::detail::from(handle);
    }

private:
    StableIValue* next_;
};

}  // namespace cula::torch_binding
