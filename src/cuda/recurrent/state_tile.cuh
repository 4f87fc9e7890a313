// SPDX-License-Identifier: Apache-2.0
// How `decode` moves packed rows of states between global memory and lanes: through shared memory.
// A lane computes with four neighbouring channels of every 32 (lanes.cuh), whatever their type: 16 bytes of
// float32, but 8 of the 16-bit types and 4 of float8. Rows come and go in pieces of 16 bytes, of which the
// eight lanes of a row take 128 consecutive bytes at a time. So a piece of less than 32 bits a channel holds
// fours of other lanes of the row: lanes find theirs where those have put them.
//
//     bytes of a 16-bit row      0        8        16       24     ..    56       64
//     piece of lane              0                 1              ..              4       global memory
//     four of lane               0        1        2        3      ..    7        0       registers
//
// Banks: eight lanes access kUnit bytes of their row's fours at a time, the same bytes of each of a warp's
// four rows. Rows that begin at the same bank would meet there, so each swaps its units of kUnit bytes by its
// number (the exclusive or in at()).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/ptx/memory.cuh"
#include "cuda/recurrent/lanes.cuh"

namespace cula::cuda::recurrent {

template <class State, int kKey, int kRows>
struct alignas(16) StateTile {
    static constexpr unsigned kRowBytes = kKey * sizeof(State), kUnit = kLanesPerRow * 4 * sizeof(State),
                              kPieceBytes = std::min(16u, kRowBytes / kLanesPerRow),
                              kPieces = kRowBytes / kLanesPerRow / kPieceBytes;  // of a lane, in each row
    static constexpr bool kPiecesAreFours = sizeof(State) == 4;

    unsigned char rows[kRows][kRowsPerPass][kRowBytes];
};

// One thread's part of a tile: pieces and fours of kRows rows.
template <class Tile>
struct TileLane {
    Tile& tile;
    unsigned row, lane;  // within a pass; within the row

    __device__ __forceinline__ TileLane(Tile& tile, unsigned thread)
        : tile(tile), row(thread / kLanesPerRow), lane(thread % kLanesPerRow) {}

    // Bytes of a row before the lane's piece p.
    __device__ __forceinline__ unsigned piece_offset(unsigned p) const {
        return (p * kLanesPerRow + lane) * Tile::kPieceBytes;
    }
    // The lane's piece p of its row r, and its four of channels 32 p to 32 p + 31.
    __device__ __forceinline__ std::uint32_t* piece(int r, unsigned p) const {
        return at(r, piece_offset(p));
    }
    __device__ __forceinline__ std::uint32_t* four(int r, unsigned p) const {
        return at(r, p * Tile::kUnit + lane * (Tile::kUnit / kLanesPerRow));
    }

    // Issues a cp.async of the lane's piece p of row r, whose first byte is at `from`; of zeros if not `in`.
    __device__ __forceinline__ void copy_async_if(int r, unsigned p, const char* from, bool in) const {
        const std::uint32_t to = shared_address(piece(r, p));
        if constexpr (Tile::kPieceBytes == 16)
            copy_async(to, from + piece_offset(p), in ? 16 : 0);
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to),
                         "l"(from + piece_offset(p)), "r"(in ? 8 : 0));
    }
    // Where pieces are no fours: from shared memory to the row whose first byte is at `to`.
    __device__ __forceinline__ void store_piece(int r, unsigned p, char* to) const {
        to += piece_offset(p);
        if constexpr (Tile::kPieceBytes == 16)
            __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(piece(r, p)));
        else
            __stcs(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(piece(r, p)));
    }

private:
    __device__ __forceinline__ std::uint32_t* at(int r, unsigned offset) const {
        constexpr unsigned kLine = 128, kRowsOfLine = std::max(1u, kLine / Tile::kRowBytes),
                           kUnits = std::min(kLine, Tile::kRowBytes) / Tile::kUnit;
        const unsigned swizzle = row / kRowsOfLine % kUnits * Tile::kUnit;
        return reinterpret_cast<std::uint32_t*>(tile.rows[r][row] + (offset ^ swizzle));
    }
};

}  // namespace cula::cuda::recurrent
