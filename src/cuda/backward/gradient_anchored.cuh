// SPDX-License-Identifier: Apache-2.0
// gradient_anchored: d_q, d_k, d_g, d_beta or d_erase of chunks whose decays are in range
// (anchored_config.cuh), with one decay per channel and a head of q and k for each value head. It does what
// gradient_channel does, whose letters these are, with all pairs of tokens on tensor cores.
//
// With f_t the decay from the anchor of a block, the border between its eighth and ninth token, to token t,
// the operands of a block are QA = scale f q, RA = f k and KA = k / f. All pairs of two blocks i >= j, a
// block with itself included, are products of them and of the decays between anchors:
//
//   rows of block i       acc = dO S^T; for j = 0 .. i:     acc = acc decayed to anchor j + dA_ij KA_j
//                         and the same with -dV S^T and dL;  dq = scale f acc, and f acc of the other for dk
//   columns of block j    acc = U Z^T;  for i = last .. j:   acc = acc decayed to anchor i
//                                                                  + dA_ij^T QA_i + dL_ij^T RA_i
//                         acc / f for dk
//
// dg is summed from the chunk's start. The first token's is what reads S, sum_i (QA_i o dO S^T - RA_i o dV
// S^T) with its decays, and what passes from S to Z, Gamma_C rowsum(S o Z); and from token to token
//
//   dg_{t+1} = dg_t - (QA o rows of q + RA o rows of k - KA o columns)_t
//
// A pair is in the rows of one token and in the columns of another, as the product of the same three rounded
// numbers, and cancels there to the rounding of float32.
//
// Grid: a CTA per multiprocessor, which goes through pairs of a chunk and a head. Patches are those of
// gradient_channel, among warps as AnchoredPatch has them. In this order for each, | is a barrier of the CTA:
//   operands  a lane has a column: decays, their range, norms (with those who share the block), operands |
//   slices    tensor cores: dO S^T, dV S^T, U Z^T in accumulators, the squares dA and dL', rowsum(S o Z) |
//             copies of the next pair's slices start here, and arrive during what follows. By rows all
//             products of slices but rowsum(S o Z) run beside operands (kOverlaps)
//   blocks    tensor cores: the sums over blocks above
//   columns   accumulators turn to columns: the gradients of q and k, dg; then gate and norms
//
// dV S^T, dL' = dV U^T and -RA stand for their negatives, so that no operand needs its sign changed.
//
// What is not in range is marked in GradientScratch::left, and left to gradient_left. NaNs are.
//
// Precision: as gradient_channel, but for pairs within a block, whose operands are one word of T here.
//
// With erase keys e (Reader::kErase) RA = f e, and f acc of -dV S^T is de: derase = k o de, and dk has
// erase o de in its place. d_beta is value_gradients'.
//
// By rows (FromRows) dV and dO come from the tensors of the call, by TMA tiles, and the slices have no part
// of them.
//
// Budgets: 113.4 KiB of shared memory (K = 128) and 14 KiB for every 16 value channels: 225.4 KiB for V =
// 128. By rows 112 KiB for any V: 226 KiB. At most 128 registers.
//
// PDL: every CTA triggers, then waits for the kernels before it.
#pragma once

#include "cuda/backward/anchored_sums.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/scan.cuh"

namespace cula::cuda::backward {

// Named barriers: of the warps that share a block of tokens, and of those that share a group of channels.
enum class AnchoredBarrier : std::uint8_t { kBlock = 1, kGroup = 5 };

// The phases for one chunk and head. All threads are in each.
template <class T, int kKey, bool kSolves, Reader kReader, class From>
struct AnchoredGradient : AnchoredSums<T, kKey, kSolves, kReader, From> {
    using Base = AnchoredSums<T, kKey, kSolves, kReader, From>;
    using Base::a, Base::d, Base::s, Base::parity, Base::kErases;
    using typename Base::Given;
    using P = Patches<kKey>;
    static constexpr int kSharers = 32 * P::kGroups;  // threads of a named barrier

    const GradientScratch& scratch;

    __device__ __forceinline__ AnchoredGradient(const Base& base, const GradientScratch& of)
        : Base(base), scratch(of) {}

    // Decays and operands of the lane's column; whether any decay is out of range goes to shared memory.
    // meanwhile(0) to meanwhile(7) start what runs beside.
    template <class Meanwhile>
    __device__ __forceinline__ void operands(Given& given, const Meanwhile& meanwhile) const {
        const ChannelPlace place = s.place[parity].again();
        const AnchoredPatch<kKey> patch;
        const Extent extent(place, patch, a.key_dim);
        const int thread = thread_again();
        const bool has_beta = kSolves && !kErases && thread < place.count;
        float beta = 0.0f;
        if (has_beta)
            beta = load_float(a.beta.data, a.beta.dtype,
                              a.beta.offset(place.batch, place.begin + thread, place.head));
        if constexpr (kErases) this->load_parameters(given, place.head, patch);
        std::uint32_t q[kHalf], k[kHalf];
        __syncwarp();  // products are asked for by whole warps
        meanwhile(0);
        this->wait_for_rows();
        this->given_keys(q, k, patch);
        if (has_beta) s.betas[thread] = beta;
        Column x;
        this->load_gates(x, given.bias, patch, extent);
        __syncwarp();
        meanwhile(1);
        norms(q, k, patch);
        meanwhile(2);
        const HeadGate gate(place.head, a.gate, given.A_log, a.lower_bound, 0.0f);
        switch (gate.kind) {
            case Gate::kSoftplus: log2_decays<Gate::kSoftplus>(x, gate); break;
            case Gate::kBounded: log2_decays<Gate::kBounded>(x, gate); break;
            case Gate::kLogDecay: log2_decays<Gate::kLogDecay>(x, gate); break;
        }
        meanwhile(3);
        extent.mask(x);
        float of_half[2];
        anchored(x, of_half, patch);
        float most = max_or_nan(fabsf(of_half[0]), fabsf(of_half[1]));
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) most = max_or_nan(most, fabsf(x[i]));
        if (!(most <= kAnchoredRange)) s.is_out_of_range[parity] = 1;
        *reinterpret_cast<float2*>(&s.of_halves[2 * patch.block + patch.half][patch.channel]) = {
            exp2_fast(of_half[0]), exp2_fast(of_half[1])};

        auto& to = s.own[patch.warp];
        __syncwarp();
        const ColumnWords<T> of_queries(to.queries, patch.lane), of_readers(to.readers, patch.lane),
            of_keys(to.keys, patch.lane);
#pragma unroll
        for (int four = 0; four < 2; ++four) {
            std::uint32_t queries[4], readers[4], keys[4];
            float of_q[4], of_k[4];
            load4(of_q, &s.norms[patch.warp][0][patch.half * kHalf + 4 * four]);
            load4(of_k, &s.norms[patch.warp][1][patch.half * kHalf + 4 * four]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = 4 * four + i;
                if (i % 2 == 0) meanwhile(4 + t / 2);
                const float f[2] = {exp2_fast(x[2 * t]), exp2_fast(x[2 * t + 1])};
                const float back[2] = {reciprocal_fast(f[0]), reciprocal_fast(f[1])};
                s.columns[patch.warp].decays[t][patch.lane] = {f[0], f[1]};
                const float2 query = unpack2<T>(q[t]), key = unpack2<T>(k[t]);
                const float scaled = of_q[i] * a.scale;
                const float k0 = key.x * of_k[i], k1 = key.y * of_k[i];
                queries[i] = pack2<T>(query.x * scaled * f[0], query.y * scaled * f[1]);
                float2 reader = {k0, k1};
                if constexpr (kErases) reader = unpack2<T>(given.readers[t]);
                readers[i] = pack2<T>(-reader.x * f[0], -reader.y * f[1]);
                keys[i] = pack2<T>(k0 * back[0], k1 * back[1]);
            }
            of_queries.store(four, queries);
            if (kSolves) of_readers.store(four, readers);
            of_keys.store(four, keys);
        }
    }

    // d_beta, a token per thread.
    __device__ __forceinline__ void strengths() const {
        const int t = thread_again();
        if (t >= P::kRows) return;
        const ChannelPlace place = s.place[parity].again();
        if (t >= place.count) return;
        const float given = s.betas[t], over_beta = 1.0f / solved_beta_of(a, given);
        store_gradient(d.d_beta.data, d.d_beta.dtype,
                       d.d_beta.offset(place.batch, place.begin + t, place.head),
                       beta_gradient(a, given, s.strengths[t] * over_beta * over_beta));
    }

    // From the accumulators the gradients of q (without scale and norm), of k (without norm) and of the
    // log decays what prefix_sums takes.
    __device__ __forceinline__ void columns(const Ends& ends, Column& d_q, Column& d_k, Column& d_a) const {
        const AnchoredPatch<kKey> patch;
        const auto& of = s.own[patch.warp];
        std::uint32_t queries[kHalf], readers[kHalf], keys[kHalf];
        ColumnWords<T>(of.queries, patch.lane).load(queries);
        if (kSolves) ColumnWords<T>(of.readers, patch.lane).load(readers);
        ColumnWords<T>(of.keys, patch.lane).load(keys);
        sync_group(patch);  // gates and patches take the place of the operands
        this->copy_gates_again();
        turn(d_q, ends.q, patch);
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) d_a[i] = half_of(queries, i) * d_q[i];
        if constexpr (kSolves) {
            turn(d_k, ends.k, patch);
#pragma unroll
            for (int i = 0; i < 2 * kHalf; ++i) d_a[i] = fmaf(half_of(readers, i), d_k[i], d_a[i]);
        }
        Column f, z;
        turn(z, ends.columns, patch);
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) d_a[i] = fmaf(-half_of(keys, i), z[i], d_a[i]);
        load_decays(f, patch);
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) {
            const float back = reciprocal_fast(f[i]);
            d_q[i] *= f[i];
            d_k[i] = kSolves ? -f[i] * d_k[i] : 0.0f;
            if constexpr (kErases)
                z[i] *= back;
            else
                d_k[i] = fmaf(back, z[i], d_k[i]);
        }
        if constexpr (kErases) erase(d_k, z, patch);
    }

    // x: gradients of erase keys. Stores those of erase strengths, and leaves those of k, of which d_k has
    // the rest.
    __device__ __forceinline__ void erase(Column& x, const Column& d_k, const Patch<kKey>& patch) const {
        const Extent extent(s.place[parity].again(), patch, a.key_dim);
        Column given;
        this->load_strengths(given, patch, extent);
        if (!d.d_erase.data) {
#pragma unroll
            for (int i = 0; i < 2 * kHalf; ++i) x[i] = fmaf(beta_of(a, given[i]), x[i], d_k[i]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) {
            const float strength = beta_of(a, given[i]), of_key = x[i];
            x[i] = fmaf(strength, of_key, d_k[i]);
            given[i] = of_key * (a.beta_is_logit ? strength * sigmoid(-given[i]) : 1.0f);
        }
        const auto& norm = s.norms[patch.warp][1];
        std::uint32_t k[kHalf];
        this->load_key_words(k, patch);
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i)
            given[i] *=
                half_of(k, i) * __uint_as_float(load_word(shared_address(&norm[patch.half * kHalf + i / 2])));
        const AnchoredPatch<kKey> again;
        this->store(given, AnchoredRows::kDErase, d.d_erase,
                    Extent(s.place[parity].again(), again, a.key_dim), again, s.own[again.warp].staged);
    }

    // d_g, and what the patch gives to d_A_log and d_dt_bias. d_a: what prefix_sums leaves.
    __device__ __forceinline__ void gate(Column& d_a, float2 bias) const {
        const ChannelPlace place = s.place[parity].again();
        const AnchoredPatch<kKey> patch;
        const Extent extent(place, patch, a.key_dim);
        extent.mask(d_a);
        float rate = 0.0f;
        if (a.gate != Gate::kLogDecay) {
            Column x;
            this->wait_for_rows();
            this->load_gates(x, bias, patch, extent);
            const GateDerivative derivative(a, place.head);
            if (a.gate == Gate::kSoftplus) {
                if (scratch.parameters) {
                    Column decays;
#pragma unroll
                    for (int i = 0; i < 2 * kHalf; ++i) decays[i] = x[i];
                    log2_decays<Gate::kSoftplus>(decays, HeadGate(a, place.head));
#pragma unroll
                    for (int i = 0; i < 2 * kHalf; ++i) rate = fmaf(d_a[i], decays[i], rate);
                }
#pragma unroll
                for (int i = 0; i < 2 * kHalf; ++i) d_a[i] *= derivative.factor * sigmoid(x[i]);
            } else {
                // s (1 - s) = u / (1 + u)^2 with u = exp(-|slope x|) loses no digits.
                const float slope = -kLog2E * derivative.slope;
#pragma unroll
                for (int i = 0; i < 2 * kHalf; ++i) {
                    const float u = exp2_fast(slope * fabsf(x[i])), r = reciprocal_fast(1.0f + u);
                    const float part = d_a[i] * (u * r * r);
                    rate = fmaf(part, x[i], rate);
                    d_a[i] = derivative.factor * part;
                }
            }
        }
        this->copy_keys_again();
        if (d.d_g.data)
            this->store(d_a, AnchoredRows::kDg, d.d_g, extent, patch, s.columns[patch.warp].staged);
        if (!scratch.parameters) return;
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) sums[i % 2] += d_a[i];
#pragma unroll
        for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (patch.half == 0)
            *reinterpret_cast<float2*>(&s.bias_sums[patch.block][patch.channel]) = {sums[0], sums[1]};
        rate = sum_over_warp(rate);
        if (patch.lane == 0) s.rate_sums[patch.warp] = rate;
    }

    // d_q and d_k, through the norms and scale.
    __device__ __forceinline__ void keys(Column& d_q, Column& d_k, Given& given, bool goes_on) const {
        const AnchoredPatch<kKey> patch;
        const Extent extent(s.place[parity].again(), patch, a.key_dim);
        auto& staged = s.columns[patch.warp].staged;
        const bool has_norms = d.keys() && a.qk_l2norm;
        given = {};  // or what is not loaded again would take registers in all phases
        if (!has_norms && goes_on) {
            __syncwarp();
            this->load(given, parity ^ 1);
        }
        if (has_norms) {
            std::uint32_t q[kHalf], k[kHalf];
            this->wait_for_rows();
            this->given_keys(q, k, patch);
            extent.mask(d_q), extent.mask(d_k);
            float dots[2 * kHalf];  // of q, of k
#pragma unroll
            for (int t = 0; t < kHalf; ++t) {
                const float2 query = unpack2<T>(q[t]), key = unpack2<T>(k[t]);
                dots[t] = fmaf(d_q[2 * t], query.x, d_q[2 * t + 1] * query.y);
                dots[kHalf + t] = fmaf(d_k[2 * t], key.x, d_k[2 * t + 1] * key.y);
            }
            sum_over_block(s.dots, dots, patch);
            if (goes_on) this->load(given, parity ^ 1);
            const int which = patch.lane / kBlock, t = patch.lane % kBlock;
            const float norm = s.norms[patch.warp][which][t];
            s.along[patch.warp][which][t] = block_sum(s.dots, patch) * norm * norm;
            __syncwarp();
            through_norm(d_q, q, 0, a.scale, patch);
            through_norm(d_k, k, 1, 1.0f, patch);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * kHalf; ++i) d_q[i] *= a.scale;
        }
        if (d.d_q.data) this->store(d_q, AnchoredRows::kDq, d.d_q, extent, patch, staged);
        if (d.d_k.data) this->store(d_k, AnchoredRows::kDk, d.d_k, extent, patch, staged);
    }

    // x[t] <- the sum of what crosses the chunk's start, less that of x up to the token before t.
    __device__ __forceinline__ void prefix_sums(Column& x) const {
        const AnchoredPatch<kKey> patch;
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) sums[i % 2] += x[i];
        const float other[2] = {__shfl_xor_sync(0xffffffffu, sums[0], 16),
                                __shfl_xor_sync(0xffffffffu, sums[1], 16)};
        const int c = patch.channel;
        if (patch.half == 0)
            *reinterpret_cast<float2*>(&s.crossing[patch.block][c]) = {sums[0] + other[0],
                                                                       sums[1] + other[1]};
        sync_group(patch);
        const auto pair = [c](const float* row) { return *reinterpret_cast<const float2*>(row + c); };
        float2 before = {1.0f, 1.0f}, passing = {0.0f, 0.0f};
        float sum[2] = {};
#pragma unroll
        for (int b = 0; b < P::kBlocks; ++b) {
            const float2 step = pair(s.between[b]), enters = pair(s.entering[b]), part = pair(s.passing[b]);
            before.x *= step.x, before.y *= step.y;
            sum[0] = fmaf(enters.x, before.x, sum[0]), sum[1] = fmaf(enters.y, before.y, sum[1]);
            passing.x += part.x, passing.y += part.y;
            if (b >= patch.block) continue;
            const float2 earlier = pair(s.crossing[b]);
            sum[0] -= earlier.x, sum[1] -= earlier.y;
        }
        const float2 last = pair(s.between[P::kBlocks]);
        sum[0] = fmaf(passing.x, before.x * last.x, sum[0]);
        sum[1] = fmaf(passing.y, before.y * last.y, sum[1]);
        if (patch.half) sum[0] -= other[0], sum[1] -= other[1];
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) {
            const float own = x[i];
            x[i] = sum[i % 2];
            sum[i % 2] -= own;
        }
    }

    // The summands of d_A_log and d_dt_bias of a chunk and head before this one.
    __device__ __forceinline__ void parameters(int item) const {
        const int thread = thread_again(), slot = a.by_value_heads.divide(item),
                  head = item - slot * a.value_heads;
        float* sums = sums_of(slot, head);
        for (int c = thread; c < a.key_dim; c += P::kThreads) {
            float sum = 0.0f;
#pragma unroll
            for (int b = 0; b < P::kBlocks; ++b) sum += s.bias_sums[b][c];
            sums[1 + c] = sum;
        }
        if (thread != P::kThreads - 1) return;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < P::kWarps; ++w) sum += s.rate_sums[w];
        const float factor = GateDerivative(a, head).rate_factor;
        sums[0] = factor == 0.0f ? 0.0f : sum * (a.gate == Gate::kSoftplus ? 1.0f / kLog2E : factor);
    }
    __device__ __forceinline__ void no_parameters() const {
        const ChannelPlace place = s.place[parity].again();
        float* sums = sums_of(place.slot, place.head);
        for (int i = thread_again(); i <= a.key_dim; i += P::kThreads) sums[i] = 0.0f;
    }

private:
    __device__ __forceinline__ float* sums_of(int slot, int head) const {
        return scratch.parameters + (std::int64_t{slot} * a.value_heads + head) * (1 + a.key_dim);
    }
    __device__ __forceinline__ void sync_block(const Patch<kKey>& patch) const {
        named_barrier_sync<kSharers>(nth(AnchoredBarrier::kBlock, patch.block));
    }
    __device__ __forceinline__ void sync_group(const Patch<kKey>& patch) const {
        named_barrier_sync<kSharers>(nth(AnchoredBarrier::kGroup, patch.group));
    }

    // Channel i % 2 of token i / 2.
    static __device__ __forceinline__ float half_of(const std::uint32_t (&words)[kHalf], int i) {
        const float2 pair = unpack2<T>(words[i / 2]);
        return i % 2 ? pair.y : pair.x;
    }

    // sums[warp][which][token] <- the sum over the patch's channels of x[kHalf which + token of the half].
    __device__ __forceinline__ void sum_over_block(float (&sums)[P::kWarps][2][kBlock],
                                                   const float (&x)[2 * kHalf],
                                                   const Patch<kKey>& patch) const {
        constexpr int kPitch = LaneSums::kPitch;
        const int lane = patch.lane % 16;
        auto& of_half = s.own[patch.warp].sums.of_half[patch.half];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2 * kHalf; i += 4)
            *reinterpret_cast<float4*>(of_half + lane * kPitch + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
        __syncwarp();
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i) sum[i % 4] += of_half[i * kPitch + lane];
        sums[patch.warp][lane / kHalf][patch.half * kHalf + lane % kHalf] =
            (sum[0] + sum[1]) + (sum[2] + sum[3]);
        sync_block(patch);
    }
    // Over all channels, of q (lanes up to 15) or k and of token lane % 16.
    __device__ __forceinline__ float block_sum(const float (&sums)[P::kWarps][2][kBlock],
                                               const Patch<kKey>& patch) const {
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < P::kGroups; ++g)
            sum += sums[patch.block * P::kGroups + g][patch.lane / kBlock][patch.lane % kBlock];
        return sum;
    }

    __device__ __forceinline__ void norms(const std::uint32_t (&q)[kHalf], const std::uint32_t (&k)[kHalf],
                                          const Patch<kKey>& patch) const {
        float norm = 1.0f;
        if (a.qk_l2norm) {
            float x[2 * kHalf];
#pragma unroll
            for (int t = 0; t < kHalf; ++t) {
                const float2 query = unpack2<T>(q[t]), key = unpack2<T>(k[t]);
                x[t] = fmaf(query.x, query.x, query.y * query.y);
                x[kHalf + t] = fmaf(key.x, key.x, key.y * key.y);
            }
            sum_over_block(s.squares, x, patch);
            norm = rsqrtf(block_sum(s.squares, patch) + 1e-6f);
        }
        s.norms[patch.warp][patch.lane / kBlock][patch.lane % kBlock] = norm;
        __syncwarp();
    }

    // Factors of operands need no more than 14 bits: rows, columns and dg have the same of a token.
    template <Gate kGate>
    static __device__ __forceinline__ void log2_decays(Column& x, const HeadGate& gate) {
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i)
            x[i] = gate.out * gate_shape<kGate, GateBits::k14>(gate.in * x[i]);
    }

    __device__ __forceinline__ void load_decays(Column& f, const Patch<kKey>& patch) const {
#pragma unroll
        for (int t = 0; t < kHalf; ++t) {
            const float2 pair = load_pair(shared_address(&s.columns[patch.warp].decays[t][patch.lane]));
            f[2 * t] = pair.x, f[2 * t + 1] = pair.y;
        }
    }

    // x: log decays, then those from the anchor of the block. of_half: of all tokens of the half.
    static __device__ __forceinline__ void anchored(Column& x, float (&of_half)[2],
                                                    const Patch<kKey>& patch) {
#pragma unroll
        for (int i = 2; i < 2 * kHalf; ++i) x[i] += x[i - 2];
        of_half[0] = x[2 * kHalf - 2], of_half[1] = x[2 * kHalf - 1];
        const float back[2] = {patch.half ? 0.0f : of_half[0], patch.half ? 0.0f : of_half[1]};
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i) x[i] -= back[i % 2];
    }

    // From accumulators to columns, through the warp's patch of shared memory.
    __device__ __forceinline__ void turn(Column& to, const float (&x)[4][4], const Patch<kKey>& patch) const {
        turn_patch(to, x, s.own[patch.warp].turned, patch);
    }

    // d_x <- scale (d_x - x (d_x . x) / |x|^2) / |x|.
    __device__ __forceinline__ void through_norm(Column& d_x, const std::uint32_t (&x)[kHalf], int which,
                                                 float scale, const Patch<kKey>& patch) const {
        float norms[kHalf], along[kHalf];
#pragma unroll
        for (int t = 0; t < kHalf; t += 4) {
            load4(norms + t, &s.norms[patch.warp][which][patch.half * kHalf + t]);
            load4(along + t, &s.along[patch.warp][which][patch.half * kHalf + t]);
        }
#pragma unroll
        for (int i = 0; i < 2 * kHalf; ++i)
            d_x[i] = scale * norms[i / 2] * fmaf(-along[i / 2], half_of(x, i), d_x[i]);
    }
};

template <class T, int kKey, Update kUpdate, Reader kReader, class From>
__global__ void __launch_bounds__(Patches<kKey>::kThreads, 1)
    gradient_anchored(const __grid_constant__ DeviceArgs a, const chunked::Schedule schedule,
                      const __grid_constant__ Gradients d, const Saved<T, kKey> saved,
                      const GradientScratch scratch, const __grid_constant__ From from) {
    using P = Patches<kKey>;
    constexpr bool kSolves = GradientRule<kUpdate>::kSolves, kErases = erases(kReader);
    using Gradient = AnchoredGradient<T, kKey, kSolves, kReader, From>;
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& s = *reinterpret_cast<AnchoredSmem<T, kKey>*>(memory);

    pdl_trigger_and_wait();
    const int items = (schedule.slab_end - schedule.slab_begin) * a.heads, step = static_cast<int>(gridDim.x);
    Gradient of({{a, d, s}, saved, from}, scratch);
    const auto slot_of = [&](int item) { return static_cast<int>(a.by_value_heads.divide(item)); };
    const auto put_place = [&](int parity, int item) {  // by a whole warp
        const int slot = slot_of(item);
        const chunked::ChunkPlace chunk = chunked::place_of<P::kRows>(a, schedule, slot);
        const ChannelPlace place{chunk.batch, chunk.count, slot, item - slot * a.heads, chunk.begin};
        const auto put_rows = [&](AnchoredRows::Name name, const TokenRows& rows) {
            if (static_cast<int>(threadIdx.x) % 32 == name)
                s.rows[parity][name] = rows.offset(place.batch, place.begin, place.head);
        };
        put_rows(AnchoredRows::kQ, a.q), put_rows(AnchoredRows::kK, a.k), put_rows(AnchoredRows::kG, a.g);
        put_rows(AnchoredRows::kDq, d.d_q), put_rows(AnchoredRows::kDk, d.d_k);
        put_rows(AnchoredRows::kDg, d.d_g);
        if constexpr (kErases) {
            put_rows(AnchoredRows::kErase, a.erase), put_rows(AnchoredRows::kEraseKeys, a.erase_keys);
            put_rows(AnchoredRows::kDErase, d.d_erase);
        }
        if (threadIdx.x % 32 == 0) s.place[parity] = place;
    };
    int item = static_cast<int>(blockIdx.x);
    bool sums_wait = false;  // the summands of parameters of the item before are in shared memory
    if (threadIdx.x == 0) s.is_out_of_range[0] = s.is_out_of_range[1] = 0;
    if (threadIdx.x < 32) put_place(0, item);
    of.init_copies();
    of.clear_rest();
    __syncthreads();
    of.copy_slices(s.place[0]);
    typename Gradient::Given given;
    of.load(given, 0);
    // Between two barriers: turns to the next item.
    const auto turn = [&](bool left) {
        if (threadIdx.x / 32 == P::kBlocks) {  // a warp that has no square
            if (item + step < items) put_place(of.parity ^ 1, item + step);
            if (threadIdx.x % 32 == 0) {
                s.is_out_of_range[of.parity ^ 1] = 0;
                scratch.left[item] = left;
            }
        }
        __syncthreads();
        if (item + step >= items) return;
        const ChannelPlace next = s.place[of.parity ^ 1].again();
        of.copy_slices(next);
        of.prefetch_rows(next);
    };
#pragma unroll 1
    for (; item < items; item += step, of.parity ^= 1) {
        Ends ends;
        typename Gradient::SliceSquares squares;
        if constexpr (Gradient::kOverlaps) {
            of.wait_for_slices();
            of.drop_other_rows();
            const auto products = of.start_products(ends, squares);
            of.operands(given, [&](int i) { of.ask_product(ends, squares, products, i); });
            of.wait_for_products(ends, squares);
        } else {
            of.operands(given, [](int) {});
            of.wait_for_slices();
        }
        __syncthreads();
        if (sums_wait) of.parameters(item - step);
        sums_wait = false;
        const bool goes_on = item + step < items;
        const bool exists = s.place[of.parity].again().count > 0;
        if (!exists || s.is_out_of_range[of.parity]) {
            turn(exists);
            if (goes_on) of.load(given, of.parity ^ 1);
            if (!exists && scratch.parameters) of.no_parameters();
            continue;
        }
        of.join_decays();
        of.sum_passing();
        if constexpr (!Gradient::kOverlaps) {
            of.drop_other_rows();
            __syncwarp();
            of.multiply_slices(ends, squares);
        }
        of.put_squares(squares);
        turn(false);
        if (kSolves && !kErases && d.d_beta.data) of.strengths();
        of.blocks(ends);
        Column d_q, d_k, d_a;
        of.columns(ends, d_q, d_k, d_a);
        if (d.decay()) {
            const float2 bias = of.load_bias_again();
            of.prefix_sums(d_a);
            of.gate(d_a, bias);
        } else {
            of.copy_keys_again();
        }
        of.keys(d_q, d_k, given, goes_on);
        sums_wait = d.decay() && scratch.parameters;
    }
    __syncthreads();
    if (sums_wait) of.parameters(item - step);
}

}  // namespace cula::cuda::backward
