// SPDX-License-Identifier: Apache-2.0
// Random numbers, and tensors of random layout in memory of exactly their extent, which remembers what it
// held.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "call.h"
#include "core/check.h"
#include "cula/cula.h"

namespace cula::test {

class Random {
public:
    explicit Random(std::uint64_t seed) : generator_(seed) {}

    std::int64_t between(std::int64_t low, std::int64_t high) {
        return std::uniform_int_distribution<std::int64_t>(low, high)(generator_);
    }
    bool one_in(std::int64_t n) { return between(1, n) == 1; }
    double real(double low, double high) {
        return std::uniform_real_distribution<double>(low, high)(generator_);
    }
    template <class T>
    T of(std::initializer_list<T> choices) {
        return choices.begin()[between(0, static_cast<std::int64_t>(choices.size()) - 1)];
    }
    template <class T>
    void shuffle(std::vector<T>& values) {
        std::shuffle(values.begin(), values.end(), generator_);
    }

private:
    std::mt19937_64 generator_;
};

// Calls body(element's place in bytes, from the tensor's data) for every element.
template <class Body>
void each_element(const TensorRef& ref, Body body) {
    const auto bytes = static_cast<std::int64_t>(size_bytes(ref.dtype));
    std::array<std::int64_t, kMaxDims> at{};
    for (int i = 0; i < ref.ndim; ++i)
        if (ref.size[static_cast<std::size_t>(i)] <= 0) return;
    while (true) {
        std::int64_t place = 0;
        for (std::size_t i = 0; i < static_cast<std::size_t>(ref.ndim); ++i)
            place += at[i] * ref.stride[i] * bytes;
        body(place);
        int dim = ref.ndim - 1;
        for (; dim >= 0; --dim) {
            const auto i = static_cast<std::size_t>(dim);
            if (++at[i] < ref.size[i]) break;
            at[i] = 0;
        }
        if (dim < 0) return;
    }
}

inline TensorRef element_at(const TensorRef& ref, std::int64_t place) {
    TensorRef one = ref;
    one.data = static_cast<std::byte*>(ref.data) + place;
    return one;
}

// The memory of a call's tensors: on the heap, so that a sanitizer sees the byte before and the byte behind;
// what is too large for that is mapped and not looked at again.
class Memory {
public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() {
        for (const Block& block : blocks_) std::free(block.base);
        for (const auto& [base, bytes] : maps_) munmap(base, bytes);
    }

    // Points the tensor to memory of its extent, or nowhere where there can be none.
    void place(TensorRef& ref) {
        constexpr std::int64_t kMostOnHeap = 1 << 22, kMostMapped = std::int64_t{1} << 36;
        ref.data = nullptr;
        if (ref.ndim < 1 || size_bytes(ref.dtype) == 0 || !fits(ref)) return;
        const Extent extent = extent_of(ref);
        const std::int64_t bytes = extent.end - extent.first;
        if (bytes <= kMostOnHeap) {
            void* base = std::malloc(static_cast<std::size_t>(bytes));
            std::memset(base, 0, static_cast<std::size_t>(bytes));
            blocks_.push_back({base, static_cast<std::size_t>(bytes), {}, {}});
            ref.data = static_cast<std::byte*>(base) - extent.first;
        } else if (bytes <= kMostMapped) {
            const auto size = static_cast<std::size_t>(bytes);
            void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (base == MAP_FAILED) return;
            maps_.emplace_back(base, size);
            ref.data = static_cast<std::byte*>(base) - extent.first;
        }
    }

    void fill(const TensorRef& ref, Random& random, double low, double high) {
        if (!ref.data || !on_heap(ref)) return;
        each_element(ref,
                     [&](std::int64_t place) { write(element_at(ref, place), 0, random.real(low, high)); });
    }

    bool on_heap(const TensorRef& ref) const { return block_of(ref) != nullptr; }

    void remember() {
        for (Block& block : blocks_) {
            const auto* bytes = static_cast<const std::byte*>(block.base);
            block.before.assign(bytes, bytes + block.bytes);
            block.written.assign(block.bytes, false);
        }
    }
    void restore() {
        for (const Block& block : blocks_)
            if (block.bytes > 0) std::memcpy(block.base, block.before.data(), block.bytes);
    }
    // The elements of this tensor may change.
    void expect_writes(const TensorRef& ref) {
        Block* block = const_cast<Block*>(block_of(ref));
        if (!block) return;
        const auto start =
            static_cast<const std::byte*>(ref.data) - static_cast<const std::byte*>(block->base);
        each_element(ref, [&](std::int64_t place) {
            for (std::size_t i = 0; i < size_bytes(ref.dtype); ++i)
                block->written[static_cast<std::size_t>(start + place) + i] = true;
        });
    }
    // Whether nothing else has.
    bool kept() const {
        return std::all_of(blocks_.begin(), blocks_.end(), [](const Block& block) {
            for (std::size_t i = 0; i < block.bytes; ++i)
                if (!block.written[i] && static_cast<const std::byte*>(block.base)[i] != block.before[i])
                    return false;
            return true;
        });
    }

private:
    struct Block {
        void* base;
        std::size_t bytes;
        std::vector<std::byte> before;
        std::vector<bool> written;
    };

    const Block* block_of(const TensorRef& ref) const {
        if (!ref.data || ref.ndim < 1 || !fits(ref) || empty(ref)) return nullptr;
        const Extent extent = extent_of(ref);
        const auto* first = static_cast<const std::byte*>(ref.data) + extent.first;
        for (const Block& block : blocks_) {
            const auto* base = static_cast<const std::byte*>(block.base);
            if (first >= base && first < base + block.bytes) return &block;
        }
        return nullptr;
    }

    std::vector<Block> blocks_;
    std::vector<std::pair<void*, std::size_t>> maps_;
};

// A layout for these sizes: dense in some order of the dimensions, with gaps and steps backwards; of an input
// that may be so, some dimension has a single element.
inline TensorRef some_layout(Random& random, Dtype dtype, std::initializer_list<std::int64_t> sizes,
                             int fixed_last, bool output) {
    TensorRef ref{nullptr, dtype, static_cast<int>(sizes.size()), {}, {}};
    std::copy(sizes.begin(), sizes.end(), ref.size.begin());
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < sizes.size(); ++i) order.push_back(i);
    if (random.one_in(4))
        std::shuffle(order.begin(), order.end() - fixed_last,
                     std::mt19937(static_cast<unsigned>(random.between(0, 1000))));
    std::int64_t step = 1;
    const bool gaps = random.one_in(3), backwards = random.one_in(6), shared = !output && random.one_in(8);
    for (std::size_t i = order.size(); i-- > 0;) {
        const std::size_t dim = order[i];
        const bool fixed = dim + static_cast<std::size_t>(fixed_last) >= sizes.size();
        ref.stride[dim] = step;
        step *= std::max<std::int64_t>(ref.size[dim], 1);
        if (gaps) step += random.between(0, 5);
        if (fixed) continue;
        if (backwards && random.one_in(2)) ref.stride[dim] = -ref.stride[dim];
        if (shared && random.one_in(2)) ref.stride[dim] = 0;
    }
    return ref;
}

}  // namespace cula::test
