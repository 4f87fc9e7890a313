// SPDX-License-Identifier: Apache-2.0
// Divides a workspace into arrays aligned to 64 bytes. One function that takes a Carver serves twice: with
// Carver{nullptr} it counts the bytes, with Carver{base} it gets the pointers.
// Always inline, because code that is compiled once per instruction set uses it (cpu/simd.h).
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
