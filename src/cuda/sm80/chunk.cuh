// SPDX-License-Identifier: Apache-2.0
// What prepare hands to carry: one image per chunk and value head, laid out as it stands in shared memory, so that both sides
// move it in whole 16-byte pieces.
#pragma once

#include <cstdint>

#include "cuda/device_args.h"

namespace cula::cuda::sm80 {

// A [rows x columns] tile of 16-bit elements. Units of 16 bytes are permuted inside each 128 bytes by the row, so that eight rows
// of one column lie in eight different bank groups.
template <int kColumns>
struct Tile {
    static constexpr int kUnits = kColumns / 8;
    static constexpr CULA_HOST_DEVICE int unit(int row, int unit) {
        if constexpr (kUnits >= 8)
            return row * kUnits + (unit ^ (row & 7));
        else
            return row * kUnits + (unit ^ ((row >> 1) & 3));
    }
    // In elements.
    static constexpr CULA_HOST_DEVICE int offset(int row, int column) { return unit(row, column / 8) * 8 + column % 8; }
};

// Tokens of a chunk: fewer where a state row takes all the registers.
template <int kKey>
inline constexpr int kRows = kKey <= 128 ? 64 : 32;

template <class T, int kKey>
struct alignas(128) ChunkImage {
    T k_decayed[kRows<kKey> * kKey];
    T q_decayed[kRows<kKey> * kKey];
    T k_remaining[kRows<kKey> * kKey];
    T inverse[kRows<kKey> * kRows<kKey>];
    T scores[kRows<kKey> * kRows<kKey>];
    float decay[kKey];  // of the whole chunk
};

// Chunks of a call: sequence after sequence. Without cu_seqlens the place of a chunk follows from its number, with it
// schedule.cuh has written first_chunk [N + 1] and order [N], longest sequence first.
struct Schedule {
    const std::int32_t* first_chunk = nullptr;
    const std::int32_t* order = nullptr;
    std::int32_t max_chunks = 0;  // no more than this many chunks, whatever cu_seqlens holds
    std::int32_t chunk_rows = 64;
};

struct ChunkPlace {
    std::int64_t sequence, batch, begin;  // first token
    int count;                            // tokens; 0: no such chunk
};

CULA_HOST_DEVICE ChunkPlace place_of(const DeviceArgs& a, const Schedule& s, int chunk) {
    std::int64_t n, index;
    if (!s.first_chunk) {
        const std::int64_t per_sequence = (a.tokens + s.chunk_rows - 1) / s.chunk_rows;
        n = chunk / per_sequence, index = chunk % per_sequence;
    } else {
        if (chunk >= s.first_chunk[a.sequences]) return {0, 0, 0, 0};
        std::int32_t low = 0, high = a.sequences;  // the last sequence that starts at or before the chunk, and is not empty
        while (high - low > 1) {
            const std::int32_t middle = (low + high) / 2;
            if (s.first_chunk[middle] <= chunk)
                low = middle;
            else
                high = middle;
        }
        n = low, index = chunk - s.first_chunk[n];
    }
    const TokenRange tokens = tokens_of(a, n);
    const std::int64_t left = tokens.length - index * s.chunk_rows;
    return {n, tokens.batch, tokens.begin + index * s.chunk_rows, static_cast<int>(left < s.chunk_rows ? left : s.chunk_rows)};
}

}  // namespace cula::cuda::sm80
