// SPDX-License-Identifier: Apache-2.0
// gradient_token on Hopper: q and k of an item, on their way to shared memory; and the left operands of
// products, rows of dO, dV or U, on their way to registers.
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
template <bool kSeveral, class T, bool kShares, class From>
__device__ __forceinline__ void load_rows(const OfCall<T, kShares, From>& call, int n, int thread) {
    using Memory = Shared<T, kShares, From>;
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

// The left operands of a warp's products with the slices of a value head, [16 tokens x 16 value channels].
// of: the role.
template <class T, bool kShares, class From>
struct LeftOperands {  // in slices
    using Slice = typename Shared<T, kShares, From>::Slice;

    int at;  // the lane's row in a place

    __device__ __forceinline__ LeftOperands(const OfCall<T, kShares, From>&, int, int warp, int of, int)
        : at(static_cast<int>(of == kReads      ? offsetof(Slice, d_outputs)
                              : of == kRemovals ? offsetof(Slice, d_values)
                                                : offsetof(Slice, writes)) +
             warp * kSavedBlock + SavedLane::rows(lane_again())) {}

    // place: of slice i.
    __device__ __forceinline__ void load(std::uint32_t (&x)[4], std::uint32_t place, int) const {
        load_matrices_transposed(x, place + at);
    }
};
template <class T, bool kShares>
struct LeftOperands<T, kShares, backward::FromRows> {  // in tiles, those of writes in slices
    using Memory = Shared<T, kShares, backward::FromRows>;
    using OfTiles = chunked::Tile<kRows, kTmaChannels>;

    Memory& s;
    int slices, tiles_done;  // of a value head; of those before
    int at;
    bool in_tiles;
    std::uint32_t exist[2];  // tokens behind the chunk may be the next sequence's

    // count: tokens of the chunk.
    __device__ __forceinline__ LeftOperands(const OfCall<T, kShares, backward::FromRows>& call, int count,
                                            int warp, int of, int heads_done)
        : s(call.s),
          slices(call.saved.count),
          tiles_done(heads_done * ((slices - 1) / Tiles::kSlices + 1)),
          in_tiles(of != kWrites) {
        const int lane = lane_again(), first = warp * kBlock, left = count - first - lane / 4;
        const auto tensor =
            static_cast<int>(of == kReads ? offsetof(Tiles, d_outputs) : offsetof(Tiles, d_values));
        at = in_tiles ? tensor + OfTiles::unit(first + lane % 16, lane / 16) * 16
                      : static_cast<int>(offsetof(typename Memory::Slice, writes)) + warp * kSavedBlock +
                            SavedLane::rows(lane);
        exist[0] = left > 0 ? ~0u : 0u, exist[1] = left > 8 ? ~0u : 0u;
    }

    __device__ __forceinline__ void load(std::uint32_t (&x)[4], std::uint32_t place, int i) {
        if (!in_tiles) return load_matrices_transposed(x, place + at);
        const int slice = i % Tiles::kSlices, tile = tiles_done % Memory::kTilePlaces;
        if (slice == 0) s.of_tiles.ready[tile].wait(tiles_done / Memory::kTilePlaces % 2);
        load_matrices(x, (shared_address(&s.tiles[tile]) + at) ^ slice * 32);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] &= exist[e % 2];
        if (slice + 1 < Tiles::kSlices && i + 1 < slices) return;
        __syncwarp();
        if (threadIdx.x % 32 == 0) s.of_tiles.free[tile].arrive();
        ++tiles_done;
    }
};

}  // namespace cula::cuda::sm90::gradients
