// SPDX-License-Identifier: Apache-2.0
// Which token a row of a chunk is of. Where tokens write several times, chunks are rows of a timeline of
// writes, wherever tokens begin and end (docs/design/several-writes-cuda.md). k, v and beta have a row for
// each of them; q, g and o have one for each token. A token decays the state before its first row, and reads
// it after its last one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/limits.h"
#include "cuda/rule.h"

namespace cula::cuda {

// Whether kernels may get tokens that write several times. Rules with such tokens run the kernels of the
// delta rule with one decay per token or head, or none.
template <bool kPerChannel, Update kUpdate>
inline constexpr bool kMayWriteSeveral = !kPerChannel && kUpdate == kKernelsOf<Update::kProduct>;

// Each row is a token.
struct RowsAreTokens {
    std::int64_t first_token = 0;  // that of row 0

    RowsAreTokens() = default;
    __device__ __forceinline__ RowsAreTokens(std::int32_t, std::int64_t first_row) : first_token(first_row) {}
    // The token of a row, counted from first_token.
    __device__ __forceinline__ int token(int row) const { return row; }
    __device__ __forceinline__ bool is_first(int) const { return true; }
    __device__ __forceinline__ bool is_last(int) const { return true; }
};

// The rows are the writes of tokens, up to kMostChunkWrites each; row 0 is row `first_row` of the tensors. A
// row is divided by their number as a multiplication by 2^31 / writes, rounded up, which is exact where
// (behind + row) writes < 2^31: rows of a chunk are.
struct TokensOfWrites {
    static_assert((kMostChunkWrites + 64) * kMostChunkWrites < std::int64_t{1} << 31);
    std::uint32_t writes, reciprocal;
    std::uint32_t behind;  // rows of the first token before row 0
    std::int64_t first_token;

    __device__ __forceinline__ TokensOfWrites(std::int32_t of_token, std::int64_t first_row)
        : writes(static_cast<std::uint32_t>(of_token)), reciprocal(0x7fffffffu / writes + 1) {
        const auto row = static_cast<std::uint32_t>(first_row), token = row / writes;  // counts_fit()
        behind = row - token * writes;
        first_token = token;
    }
    __device__ __forceinline__ int token(int row) const {
        return static_cast<int>(__umulhi(2 * (behind + static_cast<std::uint32_t>(row)), reciprocal));
    }
    __device__ __forceinline__ bool is_first(int row) const {
        return static_cast<std::uint32_t>(token(row)) * writes == behind + static_cast<std::uint32_t>(row);
    }
    __device__ __forceinline__ bool is_last(int row) const { return is_first(row + 1); }
};

// Tokens are two rows each (chunked/low_rank_rows.cuh), and row 0 is the first of one. Rows that a token has
// once are its second.
struct RowsOfPairs {
    static __device__ __forceinline__ int token(int row) { return row / 2; }
    static __device__ __forceinline__ bool is_first(int row) { return row % 2 == 0; }
    static __device__ __forceinline__ bool is_last(int row) { return row % 2 != 0; }
};
// Of what both rows have.
struct BothRowsOfPairs : RowsOfPairs {
    static __device__ __forceinline__ bool is_last(int) { return true; }
};

template <bool kSeveral>
using TokensOfRows = std::conditional_t<kSeveral, TokensOfWrites, RowsAreTokens>;

}  // namespace cula::cuda
