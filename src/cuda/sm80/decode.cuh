// SPDX-License-Identifier: Apache-2.0
// decode: o, states <- q, k, v, gate, beta, state; one token a sequence      ALGORITHM.md, "The family"
//
// grid (row blocks * value heads * sequences)   128 threads, 8 lanes a row of the state, kRows rows a lane and pass
//
// The state's way in and out is all that should take time. A CTA goes over its rows in passes and asks for the next
// pass before it works on the one that has arrived. The token is asked for first, and every warp readies it for itself:
// none waits for another. Sums run as in step.cuh.
#pragma once

#include "cuda/sm80/step.cuh"

namespace cula::cuda::sm80 {

// What a CTA has asked for of one pass.
template <class State, int kKey, int kRows>
struct DecodeRows {
    using Rows = StateRows<State, kKey, kRows, true>;

    RawFloat value[kRows], beta[kRows];
    Four<State> state[kRows][Rows::kFours];

    __device__ __forceinline__ void fetch(const DeviceArgs& a, const State* base, std::int64_t n, int value_head,
                                          int row0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int p = 0; p < Rows::kFours; ++p) {
                const int row = row0 + r * kRowsPerPass;
                state[r][p] = {};
                if (base && row < a.value_dim) state[r][p].load(base + row * a.initial.v + Rows::channel(p * 4));
            }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + r * kRowsPerPass;
            const bool in = row < a.value_dim;
            value[r].load(a.v.data, a.v.dtype, a.v.offset(n, 0, value_head) + row, in);
            beta[r].load(a.beta.data, a.beta.dtype, a.beta.offset(n, 0, value_head) + row * a.beta.last,
                         in && a.beta_per_value);
        }
    }
};

template <class State, int kKey, int kRows>
__global__ void __launch_bounds__(kStepThreads, kKey > 128 ? 3 : 4)
    decode(const __grid_constant__ DeviceArgs a, int passes, int blocks) {
    using Rows = StateRows<State, kKey, kRows, true>;
    __shared__ StepInputs<kKey> s;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int value_head = static_cast<int>(blockIdx.x) / blocks % a.value_heads;
    const std::int64_t n = static_cast<int>(blockIdx.x) / blocks / a.value_heads;
    int row0 = static_cast<int>(blockIdx.x) % blocks * passes * kRows * kRowsPerPass +
               static_cast<int>(threadIdx.x) / kLanesPerRow;

    TokenInputs<kKey> inputs;
    inputs.fetch(a, n, 0, value_head / a.group, value_head);
    const StateSlots slots = states_of(a, n);
    const State* from = slots.initial >= 0
                            ? static_cast<const State*>(a.initial.data) + a.initial.offset(slots.initial, value_head)
                            : nullptr;
    State* to =
        slots.final >= 0 ? static_cast<State*>(a.final.data) + a.final.offset(slots.final, value_head) : nullptr;
    DecodeRows<State, kKey, kRows> rows, next;
    rows.fetch(a, from, n, value_head, row0);
    inputs.ready(a, HeadGate(a, value_head), s, warp);
    __syncwarp();

    const bool delta = a.algorithm.update == Update::kDelta, puts = threadIdx.x % kLanesPerRow == 0;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass, row0 += kRows * kRowsPerPass) {
        if (pass + 1 < passes) next.fetch(a, from, n, value_head, row0 + kRows * kRowsPerPass);
        float x[kRows][kKey / kLanesPerRow], read[kRows] = {}, out[kRows] = {};
#pragma unroll
        for (int p = 0; p < Rows::kFours; ++p) {
            const int c = Rows::channel(p * 4);
            float decay[4], k[4], q[4];
            load4(decay, s.decay[warp] + c), load4(k, s.k[warp] + c), load4(q, s.q[warp] + c);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    x[r][4 * p + e] = rows.state[r][p].get(e) * decay[e];
                    read[r] += x[r][4 * p + e] * k[e];
                    out[r] += x[r][4 * p + e] * q[e];
                }
        }
        float write[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = row0 + r * kRowsPerPass;
            out[r] = Rows::row_sum(out[r]);
            write[r] = rows.value[r].value(a.v.dtype);
            if (delta) {
                const float beta = a.beta_per_value ? beta_of(a, rows.beta[r].value(a.beta.dtype)) : s.beta[warp];
                write[r] = beta * (write[r] - Rows::row_sum(read[r]));
            }
            if (puts && row < a.value_dim)
                store_float(a.o.data, a.o.dtype, a.o.offset(n, 0, value_head) + row,
                            slots.skipped ? 0.0f : out[r] + write[r] * s.key_query[warp]);
        }
        if (to) {
#pragma unroll
            for (int p = 0; p < Rows::kFours; ++p) {
                const int c = Rows::channel(p * 4);
                float k[4];
                load4(k, s.k[warp] + c);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const int row = row0 + r * kRowsPerPass;
                    Four<State> four;
#pragma unroll
                    for (int e = 0; e < 4; ++e) four.set(e, x[r][4 * p + e] + k[e] * write[r]);
                    if (row < a.value_dim) four.store(to + row * a.final.v + c);
                }
            }
        }
        rows = next;
    }
}

}  // namespace cula::cuda::sm80
