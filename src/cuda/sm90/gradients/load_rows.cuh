// SPDX-License-Identifier: Apache-2.0
// gradient_token on Hopper: q and k of an item, on their way to shared memory.
#pragma once

#include "cuda/sm90/gradients/config.cuh"
#include "cuda/tile/tokens_of_rows.cuh"

namespace cula::cuda::sm90::gradients {

// Copies the rows of a chunk from `offset` on to a tile, with zeros for others, by kLoaders threads.
template <int kLoaders, class T, class Tokens>
__device__ __forceinline__ void copy_rows(T* tile, const TokenRows& rows, std::int64_t offset, int count,
                                          int key_dim, int thread, const Tokens& tokens) {
    if (!rows.pieces) {
        chunked::copy_tokens<T, kRows, kKey>(tile, 0, rows, offset, count, key_dim, false, thread, kLoaders,
                                             tokens);
        return;
    }
    // A thread keeps its unit of 16 bytes. The swizzle repeats after eight rows.
    using Place = OperandTile<kKey, false>;
    constexpr int kUnits = kKey / 8, kStep = kLoaders / kUnits, kSwizzles = 8 / kStep;
    static_assert(kStep * kSwizzles == 8);
    const int unit = thread % kUnits, first = thread / kUnits, end = unit * 8 < key_dim ? count : 0;
    const T* const from = static_cast<const T*>(rows.data) + offset + unit * 8;
    std::uint32_t at[kSwizzles];
#pragma unroll
    for (int i = 0; i < kSwizzles; ++i)
        at[i] = shared_address(tile) + Place::unit(first + i * kStep, unit) * 16;
#pragma unroll 2
    for (int eight = 0; eight < kRows; eight += 8) {
#pragma unroll
        for (int i = 0; i < kSwizzles; ++i) {
            const int row = eight + first + i * kStep;
            const bool in = row < end && tokens.is_last(row);
            copy_async(at[i] + eight * (Place::kUnits * 16), from + (in ? tokens.token(row) * rows.token : 0),
                       in ? 16 : 0);
        }
    }
}

// q and k of item number n of the CTA, if there is one, by those who load them (kRowLoaders threads).
template <bool kSeveral, class T, bool kShares>
__device__ __forceinline__ void load_rows(const OfCall<T, kShares>& call, int n, int thread) {
    using Memory = Shared<T, kShares>;
    constexpr int kLoaders = Memory::kRowLoaders;
    auto& s = call.s;
    const DeviceArgs& a = call.a;
    if (!call.wait_for_item(n)) return;
    const int buffer = n % Memory::kBuffers;
    s.of_rows.free[buffer].wait(n / Memory::kBuffers % 2 ^ 1);
    const Item& item = s.items[n % 2];
    const ChunkPlace& place = item.place;
    const TokensOfRows<kSeveral> tokens(kSeveral ? a.writes : 1, place.begin);
    copy_rows<kLoaders>(s.rows[buffer].q, a.q, a.q.offset(place.batch, tokens.first_token, item.key_head),
                        place.count, a.key_dim, thread, tokens);
    copy_rows<kLoaders>(s.rows[buffer].k, a.k, a.k.offset(place.batch, place.begin, item.key_head),
                        place.count, a.key_dim, thread, RowsAreTokens());
    commit_copies();
    wait_copies<0>();
    fence_async_proxy();
    s.copied[buffer].arrive();
}

// 1 / norms of the warp's 16 rows of q, and of as many of k: the diagonals of their products with themselves.
template <class T>
__device__ __forceinline__ void store_norms(const T* q, const T* k, float (&norms)[2][kRows], bool normalises,
                                            int warp, int lane) {
    using Place = OperandTile<kKey, false>;
    const std::uint32_t row = Place::unit(warp * kBlock + lane % 16, lane / 16) * 16,
                        at[2] = {shared_address(q) + row, shared_address(k) + row};
    float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
    for (int step = 0; step < kKey / 16; ++step)
#pragma unroll
        for (int of = 0; of < 2; ++of) {
            std::uint32_t words[4];
            load_matrices(words, (at[of] ^ step % 4 * 32) + step / 4 * (Place::kPanelUnits * 16));
            mma_16x8x16<T>(upper[of], words, words[0], words[2]);
            mma_16x8x16<T>(lower[of], words, words[1], words[3]);
        }
    // Not behind the branch, where lanes differ.
    wgmma::hold(upper);
    wgmma::hold(lower);
    const int column = lane / 4 - lane % 4 * 2;  // of the lane's two that is the row's, if any
    if (column != 0 && column != 1) return;
#pragma unroll
    for (int of = 0; of < 2; ++of) {
        const float squares[2] = {column ? upper[of][1] : upper[of][0], column ? lower[of][3] : lower[of][2]};
#pragma unroll
        for (int half = 0; half < 2; ++half)
            norms[of][warp * kBlock + lane / 4 + 8 * half] =
                normalises ? rsqrtf(squares[half] + 1e-6f) : 1.0f;
    }
}

}  // namespace cula::cuda::sm90::gradients
