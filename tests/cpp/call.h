// SPDX-License-Identifier: Apache-2.0
// A small valid call that owns its memory, for tests that vary or spoil it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <random>
#include <vector>

#include "core/float16.h"
#include "core/float8.h"
#include "cula/cula.h"

namespace cula::test {

struct Shape {
    std::int64_t batch = 1, tokens = 4, heads = 1, value_heads = 2, key_dim = 4, value_dim = 3;
    Dtype dtype = Dtype::kFloat32;
    std::int64_t writes = 2;  // of a token, where the rule takes several
};

inline double read(const TensorRef& ref, std::int64_t i) {
    switch (ref.dtype) {
        case Dtype::kFloat64: return static_cast<const double*>(ref.data)[i];
        case Dtype::kFloat32: return static_cast<const float*>(ref.data)[i];
        case Dtype::kBFloat16: return static_cast<const BFloat16*>(ref.data)[i];
        case Dtype::kFloat16: return static_cast<const Float16*>(ref.data)[i];
        case Dtype::kFloat8E4M3: return static_cast<const Float8E4M3*>(ref.data)[i];
        case Dtype::kInt64: return static_cast<double>(static_cast<const std::int64_t*>(ref.data)[i]);
        case Dtype::kInt32: return static_cast<const std::int32_t*>(ref.data)[i];
        case Dtype::kBool: return static_cast<const bool*>(ref.data)[i];
    }
    return 0;
}

inline void write(const TensorRef& ref, std::int64_t i, double value) {
    switch (ref.dtype) {
        case Dtype::kFloat64: static_cast<double*>(ref.data)[i] = value; break;
        case Dtype::kFloat32: static_cast<float*>(ref.data)[i] = static_cast<float>(value); break;
        case Dtype::kBFloat16:
            static_cast<BFloat16*>(ref.data)[i] = BFloat16(static_cast<float>(value));
            break;
        case Dtype::kFloat16: static_cast<Float16*>(ref.data)[i] = Float16(static_cast<float>(value)); break;
        case Dtype::kFloat8E4M3:
            static_cast<Float8E4M3*>(ref.data)[i] = Float8E4M3(static_cast<float>(value));
            break;
        case Dtype::kInt64: static_cast<std::int64_t*>(ref.data)[i] = static_cast<std::int64_t>(value); break;
        case Dtype::kInt32: static_cast<std::int32_t*>(ref.data)[i] = static_cast<std::int32_t>(value); break;
        case Dtype::kBool: static_cast<bool*>(ref.data)[i] = value != 0; break;
    }
}

inline std::int64_t numel(const TensorRef& ref) {
    std::int64_t count = 1;
    for (int i = 0; i < ref.ndim; ++i) count *= ref.size[static_cast<std::size_t>(i)];
    return count;
}

// The elements of a dense tensor.
inline std::vector<double> values(const TensorRef& ref) {
    std::vector<double> out;
    for (std::int64_t i = 0; i < numel(ref); ++i) out.push_back(read(ref, i));
    return out;
}

// What a pass may write, of which a call has some.
inline constexpr TensorRef Args::* kOutputs[] = {&Args::o,
                                                 &Args::final_state,
                                                 &Args::final_scales,
                                                 &Args::checkpoints,
                                                 &Args::chunk_states,
                                                 &Args::snapshots,
                                                 &Args::segment_m,
                                                 &Args::segment_b,
                                                 &Args::d_q,
                                                 &Args::d_k,
                                                 &Args::d_v,
                                                 &Args::d_g,
                                                 &Args::d_beta,
                                                 &Args::d_A_log,
                                                 &Args::d_dt_bias,
                                                 &Args::d_initial_state,
                                                 &Args::d_erase,
                                                 &Args::d_a_key,
                                                 &Args::d_b_key};

inline std::vector<TensorRef> outputs(const Args& args) {
    std::vector<TensorRef> found;
    for (auto output : kOutputs)
        if (args.*output) found.push_back(args.*output);
    return found;
}

class Call {
public:
    // Inputs of ordinary size for every argument that the algorithm and the pass require; decay is mild and
    // beta lies in (0, 1).
    Call(Pass of, Algorithm algorithm, const Shape& sizes = {}) : pass(of), shape(sizes) {
        const auto& [batch, tokens, heads, value_heads, key_dim, value_dim, dtype, writes] = shape;
        const std::int64_t rows = takes_several_writes(algorithm.update) ? tokens * writes : tokens;
        args.algorithm = algorithm;
        args.scale = 0.5;
        args.q = random(dtype, {batch, tokens, heads, key_dim}, -1, 1);
        args.k = random(dtype, {batch, rows, heads, key_dim}, -1, 1);
        args.v = random(dtype, {batch, rows, value_heads, value_dim}, -1, 1);
        args.qk_l2norm = true;
        if (algorithm.decay == Decay::kPerChannel)
            args.g = random(Dtype::kFloat32, {batch, tokens, value_heads, key_dim}, -0.1, 0);
        if (algorithm.decay == Decay::kPerToken)
            args.g = random(Dtype::kFloat32, {batch, tokens, value_heads}, -0.1, 0);
        if (algorithm.decay == Decay::kPerHead) args.gamma = random(Dtype::kFloat32, {value_heads}, -0.1, 0);
        if (takes_beta(algorithm.update))
            args.beta = random(Dtype::kFloat32, {batch, rows, value_heads}, 0, 1);
        if (takes_erase(algorithm.update))
            args.erase = random(Dtype::kFloat32, {batch, rows, value_heads, key_dim}, 0, 1);
        if (takes_low_rank(algorithm.update)) {
            const double most = 1 / std::sqrt(static_cast<double>(key_dim));
            args.a_key = random(Dtype::kFloat32, {batch, rows, value_heads, key_dim}, -most, 0);
            args.b_key = random(Dtype::kFloat32, {batch, rows, value_heads, key_dim}, 0, most);
        }
        if (pass == Pass::kSegment) {
            args.segment_m = has_diagonal_map(algorithm.update)
                                 ? zeros(Dtype::kFloat32, {batch, value_heads, key_dim})
                                 : zeros(Dtype::kFloat32, {batch, value_heads, key_dim, key_dim});
            args.segment_b = states(batch);
            return;
        }
        args.initial_state = random(Dtype::kFloat32, {batch, value_heads, value_dim, key_dim}, -1, 1);
        if (pass == Pass::kBackward) {
            args.d_o = random(dtype, {batch, tokens, value_heads, value_dim}, -1, 1);
            args.d_final_state = random(Dtype::kFloat32, {batch, value_heads, value_dim, key_dim}, -1, 1);
            args.d_q = zeros(dtype, {batch, tokens, heads, key_dim});
            args.d_k = like(args.k);
            args.d_v = like(args.v);
            args.d_initial_state = states(batch);
            if (args.g) args.d_g = like(args.g);
            if (args.beta) args.d_beta = like(args.beta);
            if (args.erase) args.d_erase = like(args.erase);
            if (args.a_key) args.d_a_key = like(args.a_key), args.d_b_key = like(args.b_key);
            return;
        }
        args.o = zeros(dtype, {batch, tokens, value_heads, value_dim});
        args.final_state = states(batch);
    }

    TensorRef zeros(Dtype dtype, std::initializer_list<std::int64_t> sizes) {
        TensorRef ref = TensorRef::contiguous(nullptr, dtype, sizes);
        // At least one byte, so that an empty tensor has an address too.
        memory_.emplace_back(static_cast<std::size_t>(numel(ref)) * size_bytes(dtype) + 1);
        ref.data = memory_.back().data();
        return ref;
    }

    // Zeros of the shape and dtype of a dense tensor.
    TensorRef like(const TensorRef& other) {
        TensorRef ref = other;
        ref.data = zeros(other.dtype, {numel(other)}).data;
        return ref;
    }

    TensorRef states(std::int64_t slots) {
        return zeros(Dtype::kFloat32, {slots, shape.value_heads, shape.value_dim, shape.key_dim});
    }

    TensorRef random(Dtype dtype, std::initializer_list<std::int64_t> sizes, double low, double high) {
        TensorRef ref = zeros(dtype, sizes);
        std::uniform_real_distribution<double> uniform(low, high);
        for (std::int64_t i = 0; i < numel(ref); ++i) write(ref, i, uniform(generator_));
        return ref;
    }

    // A vector of indices, lengths or flags.
    TensorRef list(Dtype dtype, std::initializer_list<std::int64_t> elements) {
        TensorRef ref = zeros(dtype, {static_cast<std::int64_t>(elements.size())});
        std::int64_t i = 0;
        for (std::int64_t element : elements) write(ref, i++, static_cast<double>(element));
        return ref;
    }

    TensorRef ints(std::initializer_list<std::int64_t> elements) { return list(Dtype::kInt32, elements); }

    TensorRef table(std::initializer_list<std::initializer_list<std::int64_t>> rows) {
        TensorRef ref = zeros(Dtype::kInt32, {static_cast<std::int64_t>(rows.size()),
                                              static_cast<std::int64_t>(rows.begin()->size())});
        std::int64_t i = 0;
        for (const auto& row : rows)
            for (std::int64_t element : row) write(ref, i++, static_cast<double>(element));
        return ref;
    }

    void run(const Context& context = {}, std::string_view backend = {}) const {
        switch (pass) {
            case Pass::kPrefill: return prefill(args, context, backend);
            case Pass::kDecode: return decode(args, context, backend);
            case Pass::kVerify: return verify(args, context, backend);
            case Pass::kSegment: return segment(args, context, backend);
            case Pass::kBackward: return backward(args, context, backend);
        }
    }

    Pass pass;
    Shape shape;
    Args args;

private:
    std::deque<std::vector<std::byte>> memory_;
    std::mt19937 generator_{7};
};

// The message of the Error that the action throws; empty where it throws none.
template <class Action>
std::string error_of(const Action& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

}  // namespace cula::test
