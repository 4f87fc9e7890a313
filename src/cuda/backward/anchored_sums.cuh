// SPDX-License-Identifier: Apache-2.0
// gradient_anchored, what a warp makes on tensor cores: the ends of its patch and squares from the slices,
// and the sums over blocks.
#pragma once

#include "cuda/backward/anchored_tensors.cuh"
#include "cuda/backward/channel_slices.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace cula::cuda::backward {

template <class T, int kKey, bool kSolves, Reader kReader, class From>
struct AnchoredSums : AnchoredTensors<T, kKey, kReader> {
    using Base = AnchoredTensors<T, kKey, kReader>;
    using Base::a, Base::d, Base::s, Base::parity;
    using P = Patches<kKey>;
    using Carried = CarrySlice<T, kKey>;
    using Returned = ReturnSlice<T, kKey>;
    using Slices = AnchoredSlices<T, kKey, From>;
    static constexpr bool kByRows = Slices::kByRows;
    // By rows products may run beside operands(). With erase keys there are no registers for that.
    static constexpr bool kOverlaps = kByRows && !erases(kReader);
    static constexpr int kTileBytes = P::kRows * kTmaChannels * static_cast<int>(sizeof(T)),
                         kToDValues = Slices::kTiles * kTileBytes / 16;  // as descriptors count
    static_assert(P::kGroups == P::kBlocks && P::kBlocks == 4, "SquareAt");

    // What a warp sums up over slices beside the ends of its patch: of squares its block of tokens and two
    // others, by tiles of eight columns. Of each square the lower triangle counts.
    struct SliceSquares {
        float tiles[4][4] = {};
    };
    // Which ones: dA and dL' with the block that has the number of the warp's group; or, where products
    // overlap, dA in the first two groups, dL' in the others, with the first two blocks or the others, since
    // one product of 32 columns reads its left operand once.
    struct SquareAt {
        bool of_d_overlaps;
        int column;

        __device__ __forceinline__ SquareAt(const Patch<kKey>& patch, int which)
            : of_d_overlaps(kOverlaps ? patch.group >= 2 : which > 0),
              column(kOverlaps ? patch.group % 2 * 2 + which : patch.group) {}
    };

    const Saved<T, kKey>& saved;
    const From& from;

    __device__ __forceinline__ AnchoredSums(const Base& base, const Saved<T, kKey>& of, const From& rows)
        : Base(base), saved(of), from(rows) {}

    // Copies of all slices of a chunk and head, one chunk after the other: bulk copies, which one thread
    // starts and an mbarrier counts, or, before sm_90, pieces of 16 bytes by all threads.
#if __CUDA_ARCH__ >= 900
    __device__ __forceinline__ void init_copies() const {
        if (threadIdx.x > 0) return;
        s.slices_ready.init(1);
        publish_barriers();
    }
    __device__ __forceinline__ void copy_slices(const ChannelPlace& of) const {
        if (threadIdx.x > 0) return;
        constexpr int kSlice = static_cast<int>(sizeof(Returned)),
                      kSkipped = static_cast<int>(kByRows   ? offsetof(Returned, d_state)
                                                  : kSolves ? 0
                                                            : offsetof(Returned, d_outputs)),
                      kTensors = kSolves ? 2 : 1;
        const Slices slices_of{saved.count};
        const std::int64_t first = saved.index(of.slot, of.head, 0);
        const int carried = saved.count * Slices::kCarried;
        const std::uint32_t to = shared_address(slices()), ready = s.slices_ready.address(),
                            returned_to = to + slices_of.returned() + (kByRows ? 0 : kSkipped);
        if (of.count <= 0) return s.slices_ready.arrive_expecting(0);  // nobody has written slices
        const int rows = kByRows ? kTensors * slices_of.tiles() * kTileBytes : 0;
        s.slices_ready.arrive_expecting(carried + saved.count * (kSlice - kSkipped) + rows);
        copy_bulk(to, saved.carried + first, carried, ready);
        const auto* returned = reinterpret_cast<const unsigned char*>(saved.returned + first);
        const int copies = kSkipped == 0 ? 1 : saved.count,
                  bytes = kSkipped == 0 ? saved.count * kSlice : kSlice - kSkipped;
#pragma unroll 1
        for (int i = 0; i < copies; ++i)
            copy_bulk(returned_to + i * Slices::kReturned, returned + i * kSlice + kSkipped, bytes, ready);
        if constexpr (kByRows) {
            auto& tiles = this->tiles();
#pragma unroll 1
            for (int i = 0; i < slices_of.tiles(); ++i) {
                const TileCoordinates at{i * kTmaChannels, of.head, static_cast<int>(of.begin), of.batch};
                tma_load(shared_address(&tiles.d_outputs[i]), from.d_o, at, ready);
                if (kSolves) tma_load(shared_address(&tiles.d_values[i]), from.d_v, at, ready);
            }
        }
    }
    __device__ __forceinline__ void wait_for_slices() const { s.slices_ready.wait(parity); }
#else
    __device__ __forceinline__ void init_copies() const {}
    __device__ __forceinline__ void copy_slices(const ChannelPlace& of) const {
        const std::int64_t first = saved.index(of.slot, of.head, 0);
        const int at = static_cast<int>(threadIdx.x) * 16;
        const auto copy = [&](const auto* slices, int to, int skipped) {
            const auto* from = reinterpret_cast<const unsigned char*>(slices + first);
            const int bytes = saved.count * static_cast<int>(sizeof(*slices));
            for (int i = at; i < bytes; i += P::kThreads * 16)
                if (i % static_cast<int>(sizeof(*slices)) >= skipped)
                    copy_async(shared_address(this->slices()) + to + i, from + i);
        };
        copy(saved.carried, 0, 0);
        copy(saved.returned, saved.count * static_cast<int>(sizeof(Carried)),
             kSolves ? 0 : static_cast<int>(offsetof(Returned, d_outputs)));
        commit_copies();
    }
    __device__ __forceinline__ void wait_for_slices() const { wait_copies<0>(); }
#endif

    // By rows, zeros where there are no slices; nothing else is ever written there. By all threads, before
    // the first copies.
    __device__ __forceinline__ void clear_rest() const {
        if constexpr (kByRows) {
            const auto clear = [](void* begin, void* end) {
                auto* const pieces = static_cast<uint4*>(begin);
                for (auto i = static_cast<std::ptrdiff_t>(threadIdx.x); pieces + i < end; i += P::kThreads)
                    pieces[i] = {};
            };
            const Slices of{saved.count};
            unsigned char *const carried = slices(), *const returned = carried + of.returned();
            clear(carried + of.count * Slices::kCarried, returned);
            clear(returned + of.count * Slices::kReturned, returned + of.room() * Slices::kReturned);
            for (auto* const tensor : {tiles().d_outputs, tiles().d_values})
                clear(tensor + of.tiles(), tensor + Slices::kTiles);
            fence_async_proxy();
        }
    }
    // By rows, a partial last chunk of a packed sequence: its tiles have brought the next sequence's tokens.
    __device__ __forceinline__ void drop_other_rows() const {
        if constexpr (kByRows) {
            const int count = s.place[parity].again().count, rows = P::kRows - count;
            if (!a.cu_seqlens || rows <= 0 || count <= 0) return;
            constexpr int kPieces = kTmaChannels * int{sizeof(T)} / 16;
            const int pieces = Slices{saved.count}.tiles() * rows * kPieces;
            const auto drop = [&](TmaTile<P::kRows>* tensor) {
                for (int i = thread_again(); i < pieces; i += P::kThreads) {
                    const int row = i / kPieces, tile = row >= rows, token = count + row - tile * rows;
                    reinterpret_cast<uint4*>(tensor[tile].bytes)[token * kPieces + i % kPieces] = {};
                }
            };
            drop(tiles().d_outputs);
            if (kSolves) drop(tiles().d_values);
            fence_async_proxy();
            __syncthreads();
        }
    }

    // Decays between anchors, from those of half blocks.
    __device__ __forceinline__ void join_decays() const {
        constexpr int kJoined = P::kBlocks - 1;
        for (int i = thread_again(); i < (kJoined + 2) * kKey; i += P::kThreads) {
            const int border = i / kKey, c = i % kKey;
            const float before = border > 0 ? s.of_halves[2 * border - 1][c] : 1.0f;
            s.between[border][c] = border <= kJoined ? before * s.of_halves[2 * border][c] : before;
        }
    }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    // By rows both operands of products come from shared memory, and products run beside what else is done.
    // Between start_products() and wait_for_products() those of all Slices::kMost slices are asked for, one
    // slice after the other: tensor cores take a few at a time, and a warp that asks for more waits.
    // Operands of the first slice. Left ones, all tokens: writes (U), d_outputs, and square_rows, which are
    // dO or dV. Right ones: columns of U in square_columns, and channels, the warpgroup's channels as if a
    // state began where the slices do; kState and kDState lead from there to S and Z.
    struct Products {
        wgmma::Operand writes, d_outputs, square_rows, channels, square_columns;
    };
    __device__ __forceinline__ Products start_products(Ends& ends, SliceSquares& squares) const {
        const AnchoredPatch<kKey> patch;
        const int group = static_cast<int>(wgmma::uniform(patch.group));
        const wgmma::Operand writes = wgmma::operand_in_blocks(wgmma::uniform(shared_address(slices())),
                                                               kSavedMatrix, 2 * kSavedMatrix),
                             d_outputs = wgmma::operand<kTmaChannels>(
                                 wgmma::uniform(shared_address(&tiles().d_outputs)));
        hold(ends, squares);
        constexpr int kTwoBlocks = 2 * kSavedBlock / 16;
        return {.writes = writes,
                .d_outputs = d_outputs,
                .square_rows = d_outputs + (kSolves ? group / 2 * kToDValues : 0),
                .channels = writes + group * kTwoBlocks,
                .square_columns = writes + group % 2 * kTwoBlocks};
    }
    __device__ __forceinline__ void ask_product(Ends& ends, SliceSquares& squares, const Products& of,
                                                int i) const {
        constexpr int kOfTile = kTmaChannels / kSliceValues, kCarried = Slices::kCarried / 16,
                      kState = offsetof(Carried, state) / 16,
                      kDState = (Slices{Slices::kMost}.returned() + Slices::kDState) / 16;
        static_assert(offsetof(Carried, writes) == 0);
        const int in_tiles = i % kOfTile * 2 + i / kOfTile * (kTileBytes / 16);
        const wgmma::Operand d_outputs = of.d_outputs + in_tiles,
                             state = of.channels + (kState + i * kCarried);
        wgmma::fence();
        wgmma::multiply_shared<T, 4, false, true>(ends.q, d_outputs, state, 1);
        if constexpr (kSolves)
            wgmma::multiply_shared<T, 4, false, true>(ends.k, d_outputs + kToDValues, state, 1);
        wgmma::multiply_shared<T, 4, true>(ends.columns, of.writes + i * kCarried,
                                           of.channels + (kDState + i * (Slices::kReturned / 16)), 1);
        wgmma::multiply_shared<T, 4, false, true>(squares.tiles, of.square_rows + in_tiles,
                                                  of.square_columns + i * kCarried, 1);
        wgmma::commit();
    }
    __device__ __forceinline__ void wait_for_products(Ends& ends, SliceSquares& squares) const {
        wgmma::wait<0>();
        hold(ends, squares);
    }
    static __device__ __forceinline__ void hold(Ends& ends, SliceSquares& squares) {
        wgmma::hold(ends.q), wgmma::hold(ends.k), wgmma::hold(ends.columns);
        wgmma::hold(squares.tiles);
    }
#endif

    // Squares and strengths to shared memory.
    __device__ __forceinline__ void put_squares(SliceSquares& squares) const {
        const AnchoredPatch<kKey> patch;
        const int row = patch.lane / 4;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const SquareAt at(patch, which);
            if (at.column > patch.block || (!kSolves && at.of_d_overlaps)) continue;
            float(*const tiles)[4] = squares.tiles + 2 * which;
            const bool diagonal = at.column == patch.block;
            if (at.of_d_overlaps && diagonal && patch.lane % 4 == row / 2) {
                s.strengths[patch.first + row] = row % 2 ? tiles[0][1] : tiles[0][0];
                s.strengths[patch.first + row + 8] = row % 2 ? tiles[1][3] : tiles[1][2];
            }
            auto& to = at.of_d_overlaps ? s.d_overlaps : s.d_scores;
            put_square(to[square_index(patch.block, at.column)], tiles, diagonal, at.of_d_overlaps);
        }
    }

    // The sums over blocks.
    __device__ __forceinline__ void blocks(Ends& ends) const {
        const AnchoredPatch<kKey> patch;
        entering(ends, patch);
#pragma unroll 1
        for (int j = 0; j <= patch.block; ++j) {
            const auto& of = s.own[j * P::kGroups + patch.group];
            std::uint32_t square[4];
            const int index = square_index(patch.block, j);
            if constexpr (kSolves)
                decay<2>({ends.q, ends.k}, j, patch);
            else
                decay<1>({ends.q}, j, patch);
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                std::uint32_t keys[4];
                load_operand(keys, of.keys, x, patch.lane);
                load_matrices(square, shared_address(&s.d_scores[index][0][patch.lane * 4]));
                multiply(ends.q, square, keys, x);
                if constexpr (kSolves) {
                    load_matrices(square, shared_address(&s.d_overlaps[index][0][patch.lane * 4]));
                    multiply(ends.k, square, keys, x);
                }
            }
        }
#pragma unroll 1
        for (int i = P::kBlocks - 1; i >= patch.block; --i) {
            const auto& of = s.own[i * P::kGroups + patch.group];
            decay<1>({ends.columns}, i + 1, patch);
            std::uint32_t square[4], operand[4];
            const int index = square_index(i, patch.block);
            const int lane = patch.lane;
            // The transpose: the second and the third matrix change places.
            const int matrix = (lane / 8 % 2 * 2 + lane / 16) * 32 + lane % 8 * 4;
            load_matrices_transposed(square, shared_address(&s.d_scores[index][0][matrix]));
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                load_operand(operand, of.queries, x, lane);
                multiply(ends.columns, square, operand, x);
            }
            if constexpr (!kSolves) continue;
            load_matrices_transposed(square, shared_address(&s.d_overlaps[index][0][matrix]));
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                load_operand(operand, of.readers, x, lane);
                multiply(ends.columns, square, operand, x);
            }
        }
    }

    // passing <- the diagonal of S^T Z for the warp's channels, over every slice of four that is the warp's
    // block's.
    __device__ __forceinline__ void sum_passing() const {
        const AnchoredPatch<kKey> patch;
        const std::uint32_t of_group = shared_address(slices()) + 2 * patch.group * kSavedBlock,
                            all_carried = Slices{saved.count}.returned();
        float sums[4][4] = {};  // of eight channels: 16 rows, of which eight count
#pragma unroll 1
        for (int i = patch.block; i < saved.count; i += P::kBlocks) {
            const std::uint32_t carried = of_group + i * static_cast<int>(sizeof(Carried)),
                                returned = of_group + all_carried + i * Slices::kReturned;
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                std::uint32_t state[4], d_state[4];
                load_matrices_transposed(state, carried + offsetof(Carried, state) + x * kSavedBlock +
                                                    SavedLane::rows(patch.lane));
                load_matrices_transposed(
                    d_state, returned + Slices::kDState + x * kSavedBlock + SavedLane::columns(patch.lane));
                mma_16x8x16<T>(sums[2 * x], state, d_state[0], d_state[1]);
                mma_16x8x16<T>(sums[2 * x + 1], state, d_state[2], d_state[3]);
            }
        }
        const int row = patch.lane / 4;
        if (patch.lane % 4 != row / 2) return;
        float* const to = &s.passing[patch.block][patch.group * kGroup + row];
#pragma unroll
        for (int i = 0; i < 4; ++i) to[8 * i] = row % 2 ? sums[i][i % 2 * 2 + 1] : sums[i][i % 2 * 2];
    }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    // By warpgroups: rows of tokens come from registers, columns from shared memory.
    __device__ __forceinline__ void multiply_slices(Ends& ends, SliceSquares& squares) const {
        const AnchoredPatch<kKey> patch;
        ends = {}, squares = {};
        static_assert(P::kBlocks == kWarpgroupWarps);
        const std::uint32_t slices = shared_address(this->slices()),
                            all_returned = slices + Slices{saved.count}.returned();
        const auto operand_at = [](std::uint32_t address) {
            return wgmma::operand_in_blocks(wgmma::uniform(address), kSavedMatrix, 2 * kSavedMatrix);
        };
        const int of_block = patch.group * kSavedBlock;
        wgmma::Operand state = operand_at(slices + offsetof(Carried, state) + 2 * of_block),
                       block = operand_at(slices + offsetof(Carried, writes) + of_block),
                       d_state = operand_at(all_returned + Slices::kDState + 2 * of_block);
        // Of the warp's block of tokens, the rows of the products.
        const int rows = patch.block * kSavedBlock + SavedLane::rows(patch.lane);
        std::uint32_t carried = slices + rows, returned = all_returned + rows;
        std::uint32_t in_tile = shared_address(&s) + Slices::kRowsAt + row_in_tile(patch);
        constexpr int kSliceBytes = kSliceValues * int{sizeof(T)};  // of a row of a tile
        struct {
            std::uint32_t d_outputs[4], d_values[4], writes[4];
        } rows_of[2];
        const auto load_rows = [&](auto& to, int ahead) {
            const std::uint32_t of_carried = carried + ahead * static_cast<int>(sizeof(Carried));
            if constexpr (kByRows) {
                const std::uint32_t at = in_tile ^ ahead % 2 * kSliceBytes;
                load_matrices(to.d_outputs, at);
                if (kSolves) load_matrices(to.d_values, at + 2 * kTileBytes);
            } else {
                const std::uint32_t of_returned = returned + ahead * Slices::kReturned;
                load_matrices_transposed(to.d_outputs, of_returned + offsetof(Returned, d_outputs));
                if (kSolves)
                    load_matrices_transposed(to.d_values, of_returned + offsetof(Returned, d_values));
            }
            load_matrices_transposed(to.writes, of_carried + offsetof(Carried, writes));
        };
        // Multiplies a slice, and loads the rows of the next one meanwhile.
        const auto multiply_slice = [&](const auto& of, auto& next, int ahead, bool goes_on) {
            wgmma::fence();
            wgmma::multiply<T, 4, true>(ends.q, of.d_outputs, state, 1);
            wgmma::multiply<T, 2, true>(squares.tiles, of.d_outputs, block, 1);
            if constexpr (kSolves) {
                wgmma::multiply<T, 4, true>(ends.k, of.d_values, state, 1);
                wgmma::multiply<T, 2, true>(squares.tiles + 2, of.d_values, block, 1);
            }
            wgmma::multiply<T, 4, true>(ends.columns, of.writes, d_state, 1);
            wgmma::commit();
            state = state + sizeof(Carried) / 16, block = block + sizeof(Carried) / 16;
            d_state = d_state + Slices::kReturned / 16;
            if (goes_on) load_rows(next, ahead);
            wgmma::wait<0>();
        };
        load_rows(rows_of[0], 0);
#pragma unroll 1
        for (int i = 0; i < saved.count; i += 2) {
            multiply_slice(rows_of[0], rows_of[1], 1, i + 1 < saved.count);
            // To the rows of the next two slices: a tile has four.
            in_tile = (in_tile ^ 2 * kSliceBytes) + i % 4 / 2 * kTileBytes;
            if (i + 1 < saved.count) multiply_slice(rows_of[1], rows_of[0], 2, i + 2 < saved.count);
            carried += 2 * sizeof(Carried), returned += 2 * Slices::kReturned;
        }
        hold(ends, squares);
    }
#else
    __device__ __forceinline__ void multiply_slices(Ends& ends, SliceSquares& squares) const {
        const AnchoredPatch<kKey> patch;
        ends = {}, squares = {};
        const int j = patch.group;
        const bool has_square = j <= patch.block;
        // Of the first slice the lane's block of tokens as rows, and from there to columns: its group's
        // channels, and block j.
        const int own = patch.block * kSavedBlock + SavedLane::rows(patch.lane),
                  to_columns = SavedLane::columns(patch.lane) - own,
                  to_group = to_columns + 2 * patch.group * kSavedBlock,
                  to_square = to_columns + (has_square ? j : 0) * kSavedBlock;
        std::uint32_t carried = shared_address(slices()) + own;
        std::uint32_t returned = carried + saved.count * static_cast<int>(sizeof(Carried));
#pragma unroll 1
        for (int i = 0; i < saved.count; ++i, carried += sizeof(Carried), returned += sizeof(Returned)) {
            std::uint32_t writes[4], d_values[4], d_outputs[4], columns[4], state[2][4], d_state[2][4];
            load_matrices_transposed(d_outputs, returned + offsetof(Returned, d_outputs));
#pragma unroll
            for (int step = 0; step < 2; ++step)
                load_matrices_transposed(state[step],
                                         carried + offsetof(Carried, state) + to_group + step * kSavedBlock);
            if (kSolves) load_matrices_transposed(d_values, returned + offsetof(Returned, d_values));
            load_matrices_transposed(writes, carried + offsetof(Carried, writes));
#pragma unroll
            for (int step = 0; step < 2; ++step)
                load_matrices_transposed(
                    d_state[step], returned + offsetof(Returned, d_state) + to_group + step * kSavedBlock);
            load_matrices_transposed(columns, carried + offsetof(Carried, writes) + to_square);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const std::uint32_t(&of)[4] = state[n / 2];
                mma_16x8x16<T>(ends.q[n], d_outputs, of[n % 2 * 2], of[n % 2 * 2 + 1]);
                if (kSolves) mma_16x8x16<T>(ends.k[n], d_values, of[n % 2 * 2], of[n % 2 * 2 + 1]);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n)
                mma_16x8x16<T>(ends.columns[n], writes, d_state[n / 2][n % 2 * 2],
                               d_state[n / 2][n % 2 * 2 + 1]);
            if (has_square) {
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    mma_16x8x16<T>(squares.tiles[x], d_outputs, columns[2 * x], columns[2 * x + 1]);
                    if (kSolves)
                        mma_16x8x16<T>(squares.tiles[2 + x], d_values, columns[2 * x], columns[2 * x + 1]);
                }
            }
        }
    }
#endif

private:
    __device__ __forceinline__ unsigned char* slices() const {
        return reinterpret_cast<unsigned char*>(&s) + Slices::kBegin;
    }
    __device__ __forceinline__ auto& tiles() const {
        return reinterpret_cast<typename Slices::Memory*>(&s)->rows;
    }

    // Of a tile by rows, in bytes: where the row of an A operand begins of which the lane gives the address
    // for value channels up to 15. Its unit is permuted by the token as in every Tile.
    static __device__ __forceinline__ int row_in_tile(const Patch<kKey>& patch) {
        const int token = patch.first + patch.lane / 8 % 2 * 8 + patch.lane % 8;
        return token * (kTmaChannels * int{sizeof(T)}) + (patch.lane / 16 ^ patch.lane % 8) * 16;
    }

    // kind 0: the lower triangle with its diagonal; 1: without.
    static __device__ __forceinline__ void put_square(Square& to, float (*square)[4], bool diagonal,
                                                      int kind) {
        const int lane = thread_again() % 32, row = lane / 4, column = lane % 4 * 2;
        if (diagonal) {
#pragma unroll
            for (int x = 0; x < 2; ++x)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (8 * x + column + i % 2 + kind > row + i / 2 * 8) square[x][i] = 0.0f;
        }
        to[0][lane] = pack2<T>(square[0][0], square[0][1]);
        to[1][lane] = pack2<T>(square[0][2], square[0][3]);
        to[2][lane] = pack2<T>(square[1][0], square[1][1]);
        to[3][lane] = pack2<T>(square[1][2], square[1][3]);
    }

    // B operands of 16 tokens and of channels 16 x to 16 x + 15.
    static __device__ __forceinline__ void load_operand(std::uint32_t (&words)[4],
                                                        const PatchOperand<T>& operand, int x, int lane) {
        const int t = lane / 8 % 2 * kHalf + lane % 8;
        load_matrices_transposed(words, shared_address(operand + operand_unit(t, 2 * x + lane / 16)));
    }
    static __device__ __forceinline__ void multiply(float (&sums)[4][4], const std::uint32_t (&square)[4],
                                                    const std::uint32_t (&operand)[4], int x) {
        mma_16x8x16<T>(sums[2 * x], square, operand[0], operand[1]);
        mma_16x8x16<T>(sums[2 * x + 1], square, operand[2], operand[3]);
    }

    // x <- x decayed over border `border` (AnchoredSmem::between).
    template <int kCount>
    __device__ __forceinline__ void decay(float (*const (&x)[kCount])[4], int border,
                                          const Patch<kKey>& patch) const {
        const float* from = &s.between[border][patch.group * kGroup + patch.lane % 4 * 2];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 by = *reinterpret_cast<const float2*>(from + 8 * n);
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                x[i][n][0] *= by.x, x[i][n][1] *= by.y, x[i][n][2] *= by.x, x[i][n][3] *= by.y;
        }
    }
    // entering <- colsum(QA o dO S^T - RA o dV S^T), not yet decayed from the chunk's start.
    __device__ __forceinline__ void entering(const Ends& ends, const Patch<kKey>& patch) const {
        if (!d.decay()) return;
        const auto& of = s.own[patch.warp];
        float sums[8] = {};
        add_products(sums, of.queries, ends.q, patch);
        if (kSolves) add_products(sums, of.readers, ends.k, patch);
        scatter_sums<4, 4>(sums);
        const int mine = patch.lane / 4;  // 2 n + e
        s.entering[patch.block][patch.group * kGroup + mine / 2 * 8 + patch.lane % 4 * 2 + mine % 2] =
            sums[0];
    }
    // sums[2 n + e] += the lane's part of the sum over tokens of operand o x, at channel 8 n + 2 (l % 4) + e.
    static __device__ __forceinline__ void add_products(float (&sums)[8], const PatchOperand<T>& operand,
                                                        const float (&x)[4][4], const Patch<kKey>& patch) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const T* const at =
                    operand + operand_unit(patch.lane / 4 + half * kHalf, n) + patch.lane % 4 * 2;
                const float2 pair = unpack2<T>(*reinterpret_cast<const std::uint32_t*>(at));
                sums[2 * n] = fmaf(pair.x, x[n][2 * half], sums[2 * n]);
                sums[2 * n + 1] = fmaf(pair.y, x[n][2 * half + 1], sums[2 * n + 1]);
            }
    }
};

}  // namespace cula::cuda::backward
