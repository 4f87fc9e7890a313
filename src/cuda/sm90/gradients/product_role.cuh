// SPDX-License-Identifier: Apache-2.0
// gradient_token on Hopper: the warpgroups that multiply. Each has all tokens and channels of one product of
// the slices, so that every operand is read once.
//
//              ends [64 x 128]   square [64 x 64]   gives
//   reads      dO S^T            dA = dO U^T        dq
//   removals   dV S^T            dL = dV U^T        a part of dk
//   writes     U Z^T                                dk
//
// All run the same instructions, with numbers that depend on the role: a scheduler has one warp of each, and
// three programs of some thousand instructions that are run once per value head would wait for instructions
// half of the time.
#pragma once

#include "cuda/backward/rows.cuh"
#include "cuda/sm90/gradients/load_rows.cuh"
#include "cuda/tile/gate.cuh"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::sm90::gradients {

template <class T, bool kShares, bool kSeveral, class From>
struct ProductRole : OfCall<T, kShares, From> {
    using Base = OfCall<T, kShares, From>;
    using Base::a, Base::d, Base::s, Base::saved;
    using Memory = Shared<T, kShares, From>;
    using Slice = typename Memory::Slice;
    using Rows = typename Memory::Rows;
    using Place = OperandTile<kKey, false>;
    static constexpr int kUnit = 16;

    const int number, warp;  // of the warpgroup, and in it
    Position<Memory::kPlaces> slice;
    int items_done = 0, heads_done = 0;  // of those whose chunks exist

    __device__ __forceinline__ ProductRole(const Base& call, int number)
        : Base(call),
          number(number),
          warp(static_cast<int>(wgmma::uniform(threadIdx.x / 32 % kWarpgroupWarps))) {}

    // Which of the three the warpgroup is, found anew at every call: comparisons that are kept over loops end
    // up in local memory.
    __device__ __forceinline__ int role() const {
        int x = number;
        asm volatile("" : "+r"(x));
        return x;
    }
    __device__ __forceinline__ bool has_square() const { return role() != kWrites; }
    // Of the products in gradients.
    __device__ __forceinline__ float weight() const {
        const int x = role();
        return x == kReads ? a.scale : x == kRemovals ? -1.0f : 1.0f;
    }

    // A lane's thread in the warpgroup, and its first row. lane_again() wherever a lane is asked for: nothing
    // that follows from it is to be kept over loops, whose accumulators need the registers.
    __device__ __forceinline__ int thread_of(int lane) const { return warp * 32 + lane; }
    __device__ __forceinline__ int row_of(int lane) const { return warp * kBlock + lane / 4; }

    // The parity of barriers that have a phase for each item.
    __device__ __forceinline__ int phase() const { return items_done % 2; }
    // Until all three warpgroups have come to it.
    __device__ __forceinline__ void wait_for_all() const {
        s.item_read.arrive();
        s.item_read.wait(phase());
    }
    __device__ __forceinline__ int buffer() const { return items_done % Memory::kBuffers; }
    __device__ __forceinline__ const Item& item() const { return s.items[items_done % 2]; }
    // The rows that the role's own rows are of, q or k, and their 1 / norms.
    __device__ __forceinline__ T* own_rows() const {
        Rows& rows = s.rows[buffer()];
        return role() == kReads ? rows.q : rows.k;
    }
    __device__ __forceinline__ const float* own_norms() const { return s.norms[buffer()][role() != kReads]; }
    __device__ __forceinline__ const float* key_norms() const { return s.norms[buffer()][1]; }

    // Accumulators start from zero, so that products always add.
    template <int kTiles>
    static __device__ __forceinline__ void clear(float (&x)[kTiles][4]) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[tile][e] = 0.0f;
    }

    // Multiplies the slices of a value head, whose left operands pass through registers. The square of
    // writes, U U^T, is not used; without it the accumulators of the others would not stay where they are.
    __device__ __forceinline__ void multiply_slices(Ends& ends, Squares& square) {
        constexpr int kWritten = offsetof(Slice, writes) / kUnit, kState = offsetof(Slice, state) / kUnit,
                      kDState = offsetof(Slice, d_state) / kUnit;
        const int right = role() == kWrites ? kDState : kState;
        LeftOperands<T, kShares, From> left(*this, item().place.count, warp, role(), heads_done);
        clear(ends), clear(square);
#pragma unroll 1
        for (int i = 0; i < saved.count; ++i) {
            s.slices.ready[slice.at].wait(slice.parity);
            const std::uint32_t place = wgmma::uniform(shared_address(&s.places[slice.at]));
            std::uint32_t x[4];
            left.load(x, place, i);
            const wgmma::Operand at = wgmma::operand_in_blocks(place, kSavedMatrix, 2 * kSavedMatrix);
            wgmma::fence();
            wgmma::multiply<T, kKey / 8, true>(ends, x, at + right, 1);
            wgmma::multiply<T, kRows / 8, true>(square, x, at + kWritten, 1);
            wgmma::commit();
            wgmma::wait<0>();
            __syncwarp();
            if (threadIdx.x % 32 == 0) s.slices.free[slice.at].arrive();
            slice.next();
        }
        wgmma::hold(ends);
        wgmma::hold(square);
    }

    // The warp's rows of q or k, as load_matrices() leaves them: words [i][2 j + half] are of tile 2 i + j.
    using KeyWords = std::uint32_t[kKey / 16][4];
    // Where the lane's row of four of those matrices lies; of i it is matrices(at, i).
    __device__ __forceinline__ std::uint32_t matrices_of(const T* tile) const {
        const int lane = lane_again();
        return shared_address(tile) + Place::unit(warp * kBlock + lane % 16, lane / 16) * kUnit;
    }
    static __device__ __forceinline__ std::uint32_t matrices(std::uint32_t at, int i) {
        return (at ^ i % 4 * 2 * kUnit) + i / 4 * (Place::kPanelUnits * kUnit);
    }
    __device__ __forceinline__ void load_words(KeyWords& words, const T* tile) const {
        const std::uint32_t at = matrices_of(tile);
#pragma unroll
        for (int i = 0; i < kKey / 16; ++i) load_matrices(words[i], matrices(at, i));
    }
    // Dot products of the lane's two rows.
    static __device__ __forceinline__ void multiply_rows(float (&dots)[2], const Ends& x,
                                                         const KeyWords& words) {
        float sums[2][2] = {};
#pragma unroll
        for (int tile = 0; tile < kKey / 8; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 y = unpack2<T>(words[tile / 2][tile % 2 * 2 + half]);
                float& sum = sums[half][tile % 2];
                sum = fmaf(x[tile][2 * half], y.x, fmaf(x[tile][2 * half + 1], y.y, sum));
            }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            dots[half] = backward::sum_over_channels(sums[half][0] + sums[half][1]);
    }

    // x, which is the same in all lanes, in a form that the compiler does not know to be so: a uniform
    // predicate has to be moved before every instruction that takes it.
    static __device__ __forceinline__ bool of_lane(bool x) {
        int word = x;
        asm volatile("" : "+r"(word));
        return word != 0;
    }

    // Ends times factors of their rows, in place or, over value heads that share q and k, to a sum.
    __device__ __forceinline__ void weigh(Ends& x, const float (&factor)[2], bool first) const {
        if constexpr (!kShares) {
#pragma unroll
            for (int tile = 0; tile < kKey / 8; ++tile)
                x[tile][0] *= factor[0], x[tile][1] *= factor[0], x[tile][2] *= factor[1],
                    x[tile][3] *= factor[1];
        } else if (d.keys()) {
            // Removals and writes add to d_k in turn.
            const int of = role();
            if (of == kRemovals && !first) s.written.wait((heads_done - 1) % 2);
            if (of == kWrites) s.removed.wait(heads_done % 2);
            auto& sums = of == kReads ? s.over_heads.d_q : s.d_k;
            const bool adds = of_lane(!first || of == kWrites);
            const int thread = thread_of(lane_again());
#pragma unroll
            for (int tile = 0; tile < kKey / 8; ++tile) {
                float4 sum = {};
                if (adds) sum = sums[tile][thread];
                sums[tile][thread] = {fmaf(x[tile][0], factor[0], sum.x), fmaf(x[tile][1], factor[0], sum.y),
                                      fmaf(x[tile][2], factor[1], sum.z), fmaf(x[tile][3], factor[1], sum.w)};
            }
            if (of == kRemovals) s.removed.arrive();
            if (of == kWrites) s.written.arrive();
        }
    }

    // What dA and dL meet in dg, by writes, which have no square to finish: pairs_ij = scale (q_i . k_j) of
    // dA, and - k_i . k_j of dL, of normalised rows.
    __device__ __forceinline__ void make_pairs(Squares& x) const {
        const Rows& rows = s.rows[buffer()];
#pragma unroll 1
        for (int of = 0; of < 2; ++of) {
            const wgmma::Operand left = wgmma::operand<64>(
                                     wgmma::uniform(shared_address(of == kReads ? rows.q : rows.k))),
                                 right = wgmma::operand<64>(wgmma::uniform(shared_address(rows.k)));
            wgmma::fence();
#pragma unroll
            for (int step = 0; step < kKey / 16; ++step) {
                const int at = step / 4 * Place::kPanelUnits + step % 4 * 2;
                wgmma::multiply_shared<T, kRows / 8>(x, left + at, right + at, step);
            }
            wgmma::commit();
            wgmma::wait<0>();
            wgmma::hold(x);
            store_pairs(x, of);
        }
        s.pairs.arrive();
    }
    __device__ __forceinline__ void store_pairs(const Squares& x, int of) const {
        const int lane = lane_again(), row = row_of(lane);
        const float* const norms = s.norms[buffer()][of];
        const float factor = of == kReads ? a.scale : -1.0f,
                    of_rows[2] = {factor * norms[row], factor * norms[row + 8]};
#pragma unroll
        for (int block = 0; block < kRows / kBlock; ++block) {
            if (block > warp) break;
#pragma unroll
            for (int tile = 2 * block; tile < 2 * block + 2; ++tile) {
                const float2 of_columns =
                    *reinterpret_cast<const float2*>(key_norms() + 8 * tile + lane % 4 * 2);
                float pair[4];
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    pair[e] = x[tile][e] * (of_rows[e / 2] * (e % 2 ? of_columns.y : of_columns.x));
                if (block == warp) drop_diagonal(pair, tile, lane / 4 - lane % 4 * 2);
                s.squares[of].pairs.at(warp, tile, lane) = {pair[0], pair[1], pair[2], pair[3]};
            }
        }
    }
    // Element e of a lane in a tile on the diagonal lies below it where the lane's row in eight less its
    // column exceeds this, and on it where they are equal.
    static __device__ __forceinline__ constexpr int first_below(int tile, int e) {
        return 8 * (tile % 2) + e % 2 - 8 * (e / 2);
    }
    // Zeros in the place of what lies above `below` = 0.
    static __device__ __forceinline__ void drop_diagonal(float (&x)[4], int tile, int below) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (below < first_below(tile, e)) x[e] = 0.0f;
    }

    // From products to decayed squares with the sum over the value heads before, and their paths across each
    // token. decays: log2, running sums. What lies above the diagonal of x becomes zero, of removals the
    // diagonal, too.
    //
    // Of numbers c_ij token t is crossed by the sum over i >= t > j. With the accumulators of a tile as an A
    // operand, whose columns may have any order, a product with a triangle of ones sums over its columns j <
    // t, and one with ones over the whole tile, for those after it. TF32 has more bits than the operands that
    // c is made of.
    __device__ __forceinline__ void finish_square(Squares& x, Paths& paths, const float* decays, bool first,
                                                  bool last) const {
        const bool wants_decay = this->wants_decay(), adds = of_lane(!first), keeps = of_lane(!last);
        const int of = role(), lane = lane_again(), row = row_of(lane), below = lane / 4 - lane % 4 * 2,
                  kept = of == kReads ? below : below - 1;
        const std::uint32_t one = __float_as_uint(1.0f),
                            within[2] = {below > 0 ? one : 0, below > 1 ? one : 0};
        const float own_decay[2] = {decays[row], decays[row + 8]};
        float tiles_passed[4] = {}, crossing[8];  // [2 (tile % 4) + e]
#pragma unroll
        for (int block = 0; block < kRows / kBlock; ++block) {
            float(&own)[2][4] = reinterpret_cast<float(&)[2][4]>(x[2 * block]);
            float* const across_block = crossing + block % 2 * 4;
            if (block > warp) {
#pragma unroll
                for (int i = 0; i < 2; ++i) own[i][0] = own[i][1] = own[i][2] = own[i][3] = 0.0f;
                if (block % 2) across_block[0] = across_block[1] = across_block[2] = across_block[3] = 0.0f;
            } else {
                const bool is_diagonal = block == warp;
                if (is_diagonal && of == kRemovals) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            if (below == first_below(i, e)) paths.strengths[row + e / 2 * 8] = own[i][e];
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 decay =
                        *reinterpret_cast<const float2*>(decays + 8 * (2 * block + i) + lane % 4 * 2);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        own[i][e] *= exp2_fast(own_decay[e / 2] - (e % 2 ? decay.y : decay.x));
                }
                // Above the diagonal the factor may be infinite.
                if (is_diagonal) drop_diagonal(own[0], 0, kept), drop_diagonal(own[1], 1, kept);
                if (wants_decay) {
                    float across[2][4];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float4 pair = s.squares[of].pairs.at(warp, 2 * block + i, lane);
                        const std::uint32_t c[4] = {
                            wgmma::rounded_tf32(own[i][0] * pair.x), wgmma::rounded_tf32(own[i][2] * pair.z),
                            wgmma::rounded_tf32(own[i][1] * pair.y), wgmma::rounded_tf32(own[i][3] * pair.w)};
#pragma unroll
                        for (int e = 0; e < 4; ++e) across[i][e] = tiles_passed[e];
                        mma_16x8x8_tf32(across[i], c, within[0], within[1]);
                        mma_16x8x8_tf32(tiles_passed, c, one, one);
                    }
                    // Rows i >= t.
                    if (is_diagonal) drop_diagonal(across[0], 0, below), drop_diagonal(across[1], 1, below);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        across_block[2 * i] = across[i][0] + across[i][2],
                                         across_block[2 * i + 1] = across[i][1] + across[i][3];
                }
                if constexpr (kShares) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float4& sum = s.over_heads.squares[of].at(warp, 2 * block + i, lane);
                        if (adds) {
                            const float4 so_far = sum;
                            own[i][0] += so_far.x, own[i][1] += so_far.y, own[i][2] += so_far.z,
                                own[i][3] += so_far.w;
                        }
                        if (keeps) sum = {own[i][0], own[i][1], own[i][2], own[i][3]};
                    }
                }
            }
            if (block % 2 == 0 || !wants_decay || block - 1 > warp) continue;
            scatter_sums<4, 4>(crossing);
            const int mine = lane / 4, token = 8 * (2 * (block - 1) + mine / 2) + lane % 4 * 2 + mine % 2;
            if (TriangleTiles::has(warp, token / 8))
                paths.across[of][TriangleTiles::begin(warp) * 8 + token] = crossing[0];
        }
    }

    // The square as an A operand, its columns times the norms of keys.
    __device__ __forceinline__ void pack_square(Packed (&packed)[kRows / 16], const Squares& x) const {
        const int lane = lane_again();
        const float weight = this->weight();
#pragma unroll
        for (int tile = 0; tile < kRows / 8; ++tile) {
            float2 norm = *reinterpret_cast<const float2*>(key_norms() + 8 * tile + lane % 4 * 2);
            norm.x *= weight, norm.y *= weight;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                packed[tile / 2][tile % 2 * 2 + half] =
                    pack2<T>(x[tile][2 * half] * norm.x, x[tile][2 * half + 1] * norm.y);
        }
    }
    // Its rows times their norms, to shared memory, where `writes` multiplies its transpose.
    __device__ __forceinline__ void store_square(const Squares& x) const {
        using Tile = chunked::Tile<kRows, kRows>;
        const int lane = lane_again(), row = row_of(lane);
        const float weight = this->weight(),
                    factor[2] = {weight * own_norms()[row], weight * own_norms()[row + 8]};
        auto* const to = reinterpret_cast<std::uint32_t*>(s.squares[role()].tile) + lane % 4;
#pragma unroll
        for (int tile = 0; tile < kRows / 8; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                to[Tile::unit(row + 8 * half, tile) * 4] =
                    pack2<T>(x[tile][2 * half] * factor[half], x[tile][2 * half + 1] * factor[half]);
    }

    // After the last value head. Of reads: dq; of removals: what they add to dk.
    __device__ __forceinline__ void multiply_square(Ends& ends, const Squares& square) const {
        // All warps have read the pairs that the square replaces.
        Mbarrier& pairs_read = s.pairs_read[role()];
        pairs_read.arrive();
        pairs_read.wait(phase());
        store_square(square);
        fence_async_proxy();
        s.before_products.arrive();
        Packed packed[kRows / 16];
        pack_square(packed, square);
        const wgmma::Operand k = keys();
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < kRows / 16; ++step)
            wgmma::multiply<T, kKey / 8, true>(ends, packed[step], k + Place::unit(16 * step, 0), 1);
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(ends);
    }
    // Of writes: dk, as far as it comes from the transposes.
    __device__ __forceinline__ void multiply_transposes(Ends& ends) const {
        s.before_products.arrive();
        s.before_products.wait(phase());
        const wgmma::Operand q = wgmma::operand<64>(wgmma::uniform(shared_address(s.rows[buffer()].q)),
                                                    Place::kPanelUnits * kUnit),
                             k = keys();
        wgmma::fence();
#pragma unroll
        for (int of = 0; of < 2; ++of) {
            const wgmma::Operand square =
                wgmma::operand<64>(wgmma::uniform(shared_address(s.squares[of].tile)));
#pragma unroll
            for (int step = 0; step < kRows / 16; ++step) {
                const int at = Place::unit(16 * step, 0);
                wgmma::multiply_shared<T, kKey / 8, true>(ends, square + at, (of == kReads ? q : k) + at, 1);
            }
        }
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::hold(ends);
    }
    __device__ __forceinline__ wgmma::Operand keys() const {
        return wgmma::operand<64>(wgmma::uniform(shared_address(s.rows[buffer()].k)),
                                  Place::kPanelUnits * kUnit);
    }
    __device__ __forceinline__ void load_sums(Ends& ends) const {
        if constexpr (kShares) {
            const int of = role();
            if (of == kRemovals) return clear(ends);
            const auto& sums = of == kReads ? s.over_heads.d_q : s.d_k;
            const int thread = thread_of(lane_again());
#pragma unroll
            for (int tile = 0; tile < kKey / 8; ++tile) {
                const float4 sum = sums[tile][thread];
                ends[tile][0] = sum.x, ends[tile][1] = sum.y, ends[tile][2] = sum.z, ends[tile][3] = sum.w;
            }
        }
    }
    // Adds what removals have to dk, and stores dq and dk.
    __device__ __forceinline__ void finish_keys(Ends& ends) const {
        const int thread = thread_of(lane_again());
        if (role() == kRemovals) {
            s.before_products.wait(phase());  // writes have read what was there
#pragma unroll
            for (int tile = 0; tile < kKey / 8; ++tile)
                s.d_k[tile][thread] = {ends[tile][0], ends[tile][1], ends[tile][2], ends[tile][3]};
        }
        wait_for_all();
        if (role() == kRemovals) return;
        if (role() == kWrites) {
#pragma unroll
            for (int tile = 0; tile < kKey / 8; ++tile) {
                const float4 removed = s.d_k[tile][thread];
                ends[tile][0] += removed.x, ends[tile][1] += removed.y, ends[tile][2] += removed.z,
                    ends[tile][3] += removed.w;
            }
        }
        store_keys(ends);
    }

    // Stores the gradient of q or k: `x` is that of the normalised rows. Nobody else reads the
    // role's rows any more.
    __device__ __forceinline__ void store_keys(Ends& x) const {
        const TokenRows& to = role() == kReads ? d.d_q : d.d_k;
        if (!to.data) return;
        T* const tile = own_rows();
        if (a.qk_l2norm) {
            // The derivative of a norm, dx = r (dy - (dy . y) y) with y = r x.
            KeyWords words;
            load_words(words, tile);
            float along[2];
            multiply_rows(along, x, words);
            const int row = row_of(lane_again());
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float r = own_norms()[row + 8 * half], back = along[half] * r * r;
#pragma unroll
                for (int i = 0; i < kKey / 8; ++i) {
                    const float2 y = unpack2<T>(words[i / 2][i % 2 * 2 + half]);
                    x[i][2 * half] = r * fmaf(-back, y.x, x[i][2 * half]);
                    x[i][2 * half + 1] = r * fmaf(-back, y.y, x[i][2 * half + 1]);
                }
            }
        }
        const ChunkPlace& place = item().place;
        const TokensOfRows<kSeveral> tokens(role() == kReads ? a.writes : 1, place.begin);
        const std::int64_t first = to.offset(place.batch, tokens.first_token, item().key_head);
        if (to.dtype != kDtype<T> || !to.pieces) {
            auto& panels = reinterpret_cast<backward::RowTiles<8>(&)[2]>(x);
#pragma unroll
            for (int panel = 0; panel < 2; ++panel)
                backward::store_rows<T, kKey, 8>(to, first, place.count, a.key_dim,
                                                 backward::LaneRows<T, kKey>(warp, 64 * panel), tile,
                                                 panels[panel], tokens);
            return;
        }
        __syncwarp();
        const std::uint32_t at = matrices_of(tile);
#pragma unroll
        for (int i = 0; i < kKey / 16; ++i) {
            std::uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const pair = x[2 * i + j / 2] + j % 2 * 2;
                words[j] = pack2<T>(pair[0], pair[1]);
            }
            store_matrices(matrices(at, i), words);
        }
        __syncwarp();
        const int lane = lane_again(), unit = lane % 16, half = lane / 16;
        if (unit * 8 >= a.key_dim) return;
        T* const base = static_cast<T*>(to.data) + first + unit * 8;
#pragma unroll 4
        for (int i = 0; i < kBlock; i += 2) {
            const int row = warp * kBlock + i + half;
            if (row < place.count && tokens.is_last(row))
                *reinterpret_cast<uint4*>(base + tokens.token(row) * to.token) =
                    reinterpret_cast<const uint4*>(tile)[Place::unit(row, unit)];
        }
    }

    // q, k and norms of the next item, by removals, which have nothing to store.
    __device__ __forceinline__ void prepare_rows(int n) const {
        if (!this->wait_for_item(n)) return;
        if constexpr (kShares) load_rows<kSeveral>(*this, n, thread_of(lane_again()));
        const int next = n % Memory::kBuffers;
        s.copied[next].wait(n / Memory::kBuffers % 2);
        store_norms(s.rows[next].q, s.rows[next].k, s.norms[next], a.qk_l2norm, warp, lane_again());
        s.of_rows.ready[next].arrive();
    }
    __device__ __forceinline__ void wait_for_rows() const {
        s.of_rows.ready[buffer()].wait(items_done / Memory::kBuffers % 2);
    }
    __device__ __forceinline__ void end_head(int head) const {
        s.of_paths.ready[head].arrive();
        s.of_decays.free[head].arrive();
    }

    __device__ __forceinline__ void run() {
        if (role() == kRemovals) prepare_rows(0);
        for (; wgmma::uniform(this->wait_for_item(items_done)); ++items_done) {
            // Where value heads share q and k, these arrive late (one buffer), and products come first.
            if constexpr (!kShares) {
                wait_for_rows();
                Squares x;
                if (role() == kWrites && this->wants_decay()) make_pairs(x);
            }
            int of = 0;
#pragma unroll 1
            do {
                // Not outside of the loop, where they would be alive from one value head to the next.
                Ends ends;
                Squares square;
                const bool first = of == 0, last = !kShares || of + 1 == a.group;
                multiply_slices(ends, square);
                if (kShares && first) {
                    wait_for_rows();
                    if (role() == kWrites && this->wants_decay()) make_pairs(square);
                }
                const int head = heads_done % 2, head_phase = heads_done / 2 % 2;
                s.of_decays.ready[head].wait(head_phase);
                s.of_paths.free[head].wait(head_phase ^ 1);
                const float* const decays = s.decays[head];
                Paths& paths = s.paths[head];
                const int row = row_of(lane_again());
                const float end = has_square() ? 0.0f : decays[kRows - 1], sign = has_square() ? 1.0f : -1.0f,
                            weight = this->weight(),
                            factor[2] = {weight * exp2_fast(end + sign * decays[row]),
                                         weight * exp2_fast(end + sign * decays[row + 8])};
                if (this->wants_decay()) {
                    KeyWords words;
                    load_words(words, own_rows());
                    float dots[2];
                    multiply_rows(dots, ends, words);
                    if (threadIdx.x % 4 == 0) {
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            paths.ends[role()][row + 8 * half] =
                                factor[half] * dots[half] * own_norms()[row + 8 * half];
                    }
                }
                weigh(ends, factor, first);
                const bool ends_item = last && d.keys();
                if (has_square()) {
                    if (first && this->wants_decay()) s.pairs.wait(phase());
                    finish_square(square, paths, decays, first || !d.keys(), last || !d.keys());
                    end_head(head);
                    if (ends_item) load_sums(ends), multiply_square(ends, square);
                } else {
                    end_head(head);
                    if (ends_item) load_sums(ends), multiply_transposes(ends);
                }
                ++heads_done;
                if (ends_item) finish_keys(ends);
            } while (kShares && ++of < a.group);
            if (!d.keys()) wait_for_all();
            s.of_items.free[items_done % 2].arrive();
            if (!kShares || role() != kRemovals) s.of_rows.free[buffer()].arrive();
            if (role() == kRemovals) prepare_rows(items_done + 1);
        }
    }
};

}  // namespace cula::cuda::sm90::gradients
