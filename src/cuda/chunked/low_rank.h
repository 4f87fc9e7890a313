// SPDX-License-Identifier: Apache-2.0
// Calls with low-rank keys, as the kernels of chunks read them: calls of a delta rule with erase keys and two
// rows for a token (low_rank_rows.cuh). And the interface to the instances of what they launch besides what
// the delta rule launches (instances.txt).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/carve.h"
#include "cuda/call.h"
#include "cuda/chunked/chunk.cuh"
#include "cuda/chunked/prepare_erase.h"
#include "cuda/chunked/timeline.h"
#include "cuda/tile/convert.cuh"

namespace cula::cuda::chunked {

template <int kKey>
inline constexpr bool kHasLowRank = kKey <= kMostLowRankChannels;

// Whether kernels read low-rank keys as they came: in whole pieces of the inputs' type.
inline bool reads_as_it_came(const TensorRef& key, Dtype dtype) {
    return key.dtype == dtype && token_rows(key).pieces;
}

// How the tensors that a call makes differ from those that it gets.
struct LowRankForm {
    bool converts_keys = false;  // a_key and b_key are rounded or laid out anew
    // Rows of float32 instead of T, because they come so or are asked for so.
    bool wide_o = false, wide_d_o = false, wide_d_v = false;
    bool has_o = false, has_d_o = false, has_d_v = false;

    LowRankForm() = default;
    explicit LowRankForm(const Args& args) {
        const auto differs = [&](const TensorRef& ref) { return ref && ref.dtype != args.q.dtype; };
        converts_keys =
            !reads_as_it_came(args.a_key, args.q.dtype) || !reads_as_it_came(args.b_key, args.q.dtype);
        has_o = static_cast<bool>(args.o), wide_o = differs(args.o);
        has_d_o = static_cast<bool>(args.d_o), wide_d_o = differs(args.d_o);
        has_d_v = static_cast<bool>(args.d_v), wide_d_v = differs(args.d_v);
    }
    bool operator==(const LowRankForm&) const = default;
};

// What is made of a call's tensors, and what its kernels write in their place. All are contiguous, of a
// multiple of eight channels. What a call has not has no data.
struct LowRankTensors {
    TokenRows a_key, b_key;    // [B, T, HV, K], where kernels cannot read them as they came
    TokenRows v, o, d_o, d_v;  // rows, [B, 2 T, HV, V]
};

// They lie in one piece of a workspace. shape: of the rows.
template <class T>
struct LowRankWorkspace {
    LowRankTensors made;
    Timeline timeline;
    std::size_t bytes = 0;

    LowRankWorkspace(const PrefillShape& shape, const LowRankForm& form, void* base) {
        Carver carver(base);
        timeline.carve_ends(carver, shape), timeline.carve_plan(carver, shape);
        const std::int64_t batches = shape.packed ? 1 : shape.sequences;
        const auto take = [&](TokenRows& to, std::int64_t rows, bool is_there, bool is_wide, int channels) {
            if (!is_there) return;
            const std::int64_t head = width_of_rows(channels), token = head * shape.value_heads,
                               all = rows * token;
            to.dtype = is_wide ? Dtype::kFloat32 : kDtype<T>;
            to.batch = batches > 0 ? rows / batches * token : 0;
            to.token = token, to.head = head, to.pieces = channels % 8 == 0;
            to.data = is_wide ? static_cast<void*>(carver.take<float>(all)) : carver.take<T>(all);
        };
        for (TokenRows* const key : {&made.a_key, &made.b_key}) {
            take(*key, shape.tokens / 2, form.converts_keys, false, shape.key_dim);
            key->pieces = true;  // channels up to width_of_rows() are zeros
        }
        take(made.v, shape.tokens, true, false, shape.value_dim);
        take(made.o, shape.tokens, form.has_o, form.wide_o, shape.value_dim);
        take(made.d_o, shape.tokens, form.has_d_o, form.wide_d_o, shape.value_dim);
        take(made.d_v, shape.tokens, form.has_d_v, form.wide_d_v, shape.value_dim);
        bytes = carver.bytes();
    }

    // The arguments of the call, with rows of v and o. Kernels read keys and gates as they came, but for the
    // keys that are made.
    void replace(DeviceArgs& a) const {
        a.writes = 2;
        timeline.replace(a);
        a.writes = 1;
        a.algorithm.update = Update::kDelta;
        a.v = made.v;
        if (a.o.data) a.o = made.o;
        if (made.a_key.data) a.a_key = made.a_key, a.b_key = made.b_key;
    }
};

// Makes keys, v and d_o, and the timeline. call, d_o: as they came.
template <class T, int kKey>
void launch_low_rank_rows(const Call& call, const TokenRows& d_o, const LowRankWorkspace<T>& to);

// to, o or the gradient of v, from its rows.
template <class T, int kKey>
void launch_low_rank_outputs(const Call& call, const TokenRows& to, const TokenRows& rows);

template <class T, int kKey>
void launch_prepare_low_rank(const Call& call, const DeviceArgs& a, const Schedule& schedule,
                             ChannelChunk<T, kKey>* operands, std::int32_t* is_compensated,
                             EarlyStarts& early);

}  // namespace cula::cuda::chunked
