// SPDX-License-Identifier: Apache-2.0
// What reads the state in a row of a chunk: a template parameter of prepare_channel and of the
// gradient kernels of one decay per channel.
#pragma once

#include <cstdint>

namespace cula::cuda::chunked {

enum class Reader : std::uint8_t {
    kKey,       // k, of the decayed state
    kErase,     // the erase key e = erase o k, of the decayed state (erase_operands.cuh)
    kUndecayed  // a low-rank key. A token is two rows (low_rank_rows.cuh): the first reads the state before
                // it decays it, and has no query; the second neither reads nor decays.
};

// Whether the rows of L and k_decayed are those of other keys than k, and beta is in the values.
constexpr bool erases(Reader reader) { return reader != Reader::kKey; }

}  // namespace cula::cuda::chunked
