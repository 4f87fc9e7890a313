// SPDX-License-Identifier: Apache-2.0
// Cuts a workspace into aligned arrays. One description serves twice: Carver{nullptr} counts the bytes,
// Carver{base} hands out the pointers. (Always inline, since code compiled per instruction set uses it: see
// cpu/simd.h.)
#pragma once

#include <cstddef>
#include <cstdint>

namespace cula {

class Carver {
public:
    [[gnu::always_inline]] explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

    template <class T>
    [[gnu::always_inline]] T* take(std::int64_t count) {
        T* taken = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
        bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        return taken;
    }
    [[gnu::always_inline]] std::size_t bytes() const { return bytes_; }

private:
    static constexpr std::size_t kAlignment = 64;

    std::byte* base_;
    std::size_t bytes_ = 0;
};

}  // namespace cula
