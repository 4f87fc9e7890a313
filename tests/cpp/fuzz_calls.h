// SPDX-License-Identifier: Apache-2.0
// Random calls that are right: every pass, algorithm, dtype and layout, with pools, plans, drafts and trees.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "fuzz_memory.h"

namespace cula::test {

class RandomCall {
protected:
    explicit RandomCall(std::uint64_t seed) : random_(seed) {}

    TensorRef tensor(Dtype dtype, std::initializer_list<std::int64_t> sizes, double low, double high,
                     bool output = false) {
        TensorRef ref = some_layout(random_, dtype, sizes, 1, output);
        memory_.place(ref);
        memory_.fill(ref, random_, low, high);
        return ref;
    }

    TensorRef integers(Dtype dtype, std::initializer_list<std::int64_t> sizes,
                       const std::vector<std::int64_t>& values, bool dense = false) {
        TensorRef ref = dense ? TensorRef::contiguous(nullptr, dtype, sizes)
                              : some_layout(random_, dtype, sizes, 0, true);
        memory_.place(ref);
        std::size_t i = 0;
        each_element(ref, [&](std::int64_t place) {
            write(element_at(ref, place), 0, static_cast<double>(values[i++]));
        });
        return ref;
    }

    // Stored with K or V last.
    TensorRef states(std::int64_t slots, std::optional<std::int64_t> columns = {}) {
        const std::int64_t heads = args_.v.size[2], rows = args_.v.size[3], keys = args_.q.size[3];
        const bool k_first = random_.one_in(3);
        const std::int64_t outer = k_first ? keys : rows, inner = k_first ? rows : keys;
        TensorRef ref = columns ? tensor(state_dtype_, {slots, *columns, heads, outer, inner}, -1, 1, true)
                                : tensor(state_dtype_, {slots, heads, outer, inner}, -1, 1, true);
        const auto last = static_cast<std::size_t>(ref.ndim - 1);
        if (k_first)
            std::swap(ref.size[last], ref.size[last - 1]), std::swap(ref.stride[last], ref.stride[last - 1]);
        return ref;
    }

    std::vector<std::int64_t> distinct(std::int64_t count, std::int64_t below) {
        std::vector<std::int64_t> all(static_cast<std::size_t>(below));
        std::iota(all.begin(), all.end(), 0);
        random_.shuffle(all);
        all.resize(static_cast<std::size_t>(count));
        for (std::int64_t& one : all)
            if (random_.one_in(10)) one = random_.of<std::int64_t>({-1, -7, args_.null_index});
        return all;
    }

    std::int64_t some_dim() {
        return random_.of<std::int64_t>(
            {1, 2, 3, 4, 8, 15, 16, 17, 24, 31, 32, 33, 40, 64, 65, 100, 128, 200, 256});
    }

    void make_call() {
        pass_ = random_.of(
            {Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment, Pass::kBackward, Pass::kBackward});
        const auto row = random_.between(0, static_cast<std::int64_t>(kAlgorithms.size()) - 1);
        args_.algorithm = kAlgorithms[static_cast<std::size_t>(row)].algorithm;
        const bool chunked = pass_ != Pass::kDecode && pass_ != Pass::kVerify;
        const bool packed = random_.one_in(3);
        std::int64_t rows = random_.between(0, 4), tokens = random_.between(0, chunked ? 80 : 4);
        const std::int64_t heads = random_.between(1, 2), group = random_.between(1, 2),
                           value_heads = heads * group;
        std::int64_t keys = some_dim(),
                     values = random_.one_in(40) && pass_ != Pass::kBackward ? 300 : some_dim();
        const std::int64_t writes =
            takes_several_writes(args_.algorithm.update) ? random_.of<std::int64_t>({1, 2, 2, 3, 4, 70}) : 1;
        while (std::max<std::int64_t>(rows * value_heads, 1) * (tokens + 2) * writes * keys * values >
               kMostWork)
            (random_.one_in(2) ? keys : values) = random_.between(1, 40),
                                        tokens = std::max<std::int64_t>(tokens / 2, 1);
        std::vector<std::int64_t> ends{0};
        if (packed) {
            for (std::int64_t n = 0; n < rows; ++n) ends.push_back(ends.back() + random_.between(0, tokens));
            tokens = ends.back() + (random_.one_in(2) ? random_.between(0, 3) : 0);
        }
        lengths_.clear();
        for (std::size_t n = 0; n < static_cast<std::size_t>(rows); ++n)
            lengths_.push_back(packed ? ends[n + 1] - ends[n] : tokens);

        const Dtype dtype = random_.one_in(20)
                                ? Dtype::kFloat64
                                : random_.of({Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16});
        const Dtype parameter =
            dtype == Dtype::kFloat64 && random_.one_in(2) ? Dtype::kFloat64 : Dtype::kFloat32;
        const auto gate_dtype = [&] {
            return random_.of({Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, dtype});
        };
        state_dtype_ = random_.of({Dtype::kFloat32, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16});
        const std::int64_t B = packed ? 1 : rows;
        const double key = 1 / std::sqrt(static_cast<double>(keys));
        args_.q = tensor(dtype, {B, tokens, heads, keys}, -1, 1);
        args_.k = tensor(dtype, {B, tokens * writes, heads, keys}, -key, key);
        args_.v = tensor(dtype, {B, tokens * writes, value_heads, values}, -1, 1);
        if (packed)
            args_.cu_seqlens = integers(random_.of({Dtype::kInt32, Dtype::kInt64}), {rows + 1}, ends, true);
        args_.qk_l2norm = random_.one_in(2);
        args_.scale = random_.real(-1, 1);
        args_.batch_invariant = random_.one_in(4);
        args_.null_index = random_.of({-1, 0, 3, std::numeric_limits<std::int32_t>::max()});
        args_.chunk_tokens = random_.of({16, 32, 64});

        const Decay decay = args_.algorithm.decay;
        if (decay == Decay::kPerChannel)
            args_.g = tensor(gate_dtype(), {B, tokens, value_heads, keys}, -1, 0);
        if (decay == Decay::kPerToken) args_.g = tensor(gate_dtype(), {B, tokens, value_heads}, -1, 0);
        if (decay == Decay::kPerHead || (decay == Decay::kPerToken && random_.one_in(4)))
            args_.gamma = tensor(parameter, {value_heads}, -1, 0);
        if (args_.g && random_.one_in(2)) {
            args_.gate = random_.of({Gate::kSoftplus, Gate::kBounded});
            args_.lower_bound = random_.of({-5.0, -1.0, -80.0});
            if (random_.one_in(2)) args_.A_log = tensor(parameter, {value_heads}, -1, 1);
            if (random_.one_in(2))
                args_.dt_bias = decay == Decay::kPerChannel ? tensor(parameter, {value_heads, keys}, -1, 1)
                                                            : tensor(parameter, {value_heads}, -1, 1);
        }
        const Update update = args_.algorithm.update;
        if (takes_beta(update)) {
            args_.beta_is_logit = random_.one_in(3);
            args_.allow_neg_eigval = args_.beta_is_logit && random_.one_in(2);
            // Of few channels the inverse of a chunk may be much larger than what comes of it.
            finite_ = finite_ && !(args_.allow_neg_eigval && keys < 8);
            const bool by_value = (pass_ != Pass::kSegment || takes_erase(update)) &&
                                  random_.one_in(takes_erase(update) ? 2 : 5);
            args_.beta = by_value ? tensor(gate_dtype(), {B, tokens * writes, value_heads, values}, 0, 1)
                                  : tensor(gate_dtype(), {B, tokens * writes, value_heads}, 0, 1);
        }
        if (takes_erase(update)) args_.erase = tensor(gate_dtype(), {B, tokens, value_heads, keys}, 0, 1);
        if (takes_low_rank(update)) {
            const double most = 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(keys, 1)));
            args_.a_key = tensor(gate_dtype(), {B, tokens, value_heads, keys}, -most, 0);
            args_.b_key = tensor(gate_dtype(), {B, tokens, value_heads, keys}, 0, most);
        }
        if (pass_ == Pass::kSegment) return make_segment(parameter);
        if (pass_ == Pass::kBackward) return make_backward(rows, parameter);
        args_.o = tensor(random_.one_in(4) ? Dtype::kFloat32 : dtype, {B, tokens, value_heads, values}, -1, 1,
                         true);
        make_states(rows);
        if (pass_ == Pass::kPrefill) make_prefill(rows);
        if (pass_ == Pass::kVerify) make_verify(rows);
    }

    void make_segment(Dtype parameter) {
        const std::int64_t N = static_cast<std::int64_t>(lengths_.size()), heads = args_.v.size[2],
                           keys = args_.q.size[3];
        state_dtype_ = parameter;
        args_.segment_b = states(N);
        if (random_.one_in(4)) return;
        args_.segment_m = has_diagonal_map(args_.algorithm.update)
                              ? tensor(parameter, {N, heads, keys}, -1, 1, true)
                              : tensor(parameter, {N, heads, keys, keys}, -1, 1, true);
    }

    void make_backward(std::int64_t rows, Dtype parameter) {
        // In the dtype of the input, or in float32; now and then it is not wanted.
        const auto like = [&](const TensorRef& of) -> TensorRef {
            if (!of || random_.one_in(4)) return {};
            const Dtype dtype = random_.one_in(4) ? Dtype::kFloat32 : of.dtype;
            const auto [a, b, c, d, e] = of.size;
            if (of.ndim == 1) return tensor(dtype, {a}, -1, 1, true);
            if (of.ndim == 2) return tensor(dtype, {a, b}, -1, 1, true);
            return of.ndim == 3 ? tensor(dtype, {a, b, c}, -1, 1, true)
                                : tensor(dtype, {a, b, c, d}, -1, 1, true);
        };
        const std::int64_t B = args_.q.size[0], T = args_.q.size[1], heads = args_.v.size[2],
                           values = args_.v.size[3];
        // Of few channels a norm leaves nothing of a gradient but the rounding.
        finite_ = finite_ && !(args_.qk_l2norm && args_.q.size[3] < 8);
        if (!random_.one_in(4)) {
            args_.initial_state = states(rows);
            if (random_.one_in(2)) args_.d_initial_state = states(rows);
            if (random_.one_in(3)) {
                std::vector<std::int64_t> flags(lengths_.size());
                for (std::int64_t& flag : flags) flag = random_.between(0, 1);
                args_.has_initial_state = integers(Dtype::kBool, {rows}, flags, true);
            }
        }
        if (!random_.one_in(4))
            args_.d_o =
                tensor(random_.one_in(4) ? Dtype::kFloat32 : args_.q.dtype, {B, T, heads, values}, -1, 1);
        if (random_.one_in(2)) args_.d_final_state = states(rows);
        args_.d_q = like(args_.q), args_.d_k = like(args_.k), args_.d_v = like(args_.v);
        args_.d_g = like(args_.g), args_.d_beta = like(args_.beta), args_.d_erase = like(args_.erase);
        args_.d_a_key = like(args_.a_key), args_.d_b_key = like(args_.b_key);
        args_.d_A_log = like(args_.A_log), args_.d_dt_bias = like(args_.dt_bias);
        if (parameter != Dtype::kFloat32) state_dtype_ = parameter;
    }

    void make_states(std::int64_t rows) {
        if (random_.one_in(4)) return;
        const std::int64_t slots = rows + random_.between(0, 3);
        const bool pool = random_.one_in(2);
        if (!random_.one_in(4)) args_.initial_state = states(pool ? slots : rows);
        if (!args_.initial_state || random_.one_in(2)) args_.final_state = states(pool ? slots : rows);
        if (args_.initial_state && random_.one_in(3)) args_.final_state = args_.initial_state;
        if (pool) {
            args_.initial_state_indices = integers(Dtype::kInt32, {rows}, distinct(rows, slots));
            if (args_.final_state && random_.one_in(3) &&
                !same_places(args_.initial_state, args_.final_state))
                args_.final_state_indices = integers(Dtype::kInt32, {rows}, distinct(rows, slots));
        }
        if (args_.initial_state && random_.one_in(3)) {
            std::vector<std::int64_t> flags(lengths_.size());
            for (std::int64_t& flag : flags) flag = random_.between(0, 1);
            args_.has_initial_state = integers(Dtype::kBool, {rows}, flags, true);
        }
    }

    void make_prefill(std::int64_t rows) {
        if (random_.one_in(3)) {
            std::vector<std::int64_t> plan;
            const std::int64_t count = random_.between(0, 4);
            const std::vector<std::int64_t> slots = distinct(count, count + 2);
            for (std::int64_t m = 0; m < count && rows > 0; ++m) {
                const std::int64_t n = random_.between(0, rows - 1),
                                   length = lengths_[static_cast<std::size_t>(n)];
                const std::int64_t offset = random_.one_in(2) ? length : random_.between(0, length / 64) * 64;
                plan.insert(plan.end(), {n, offset, slots[static_cast<std::size_t>(m)]});
            }
            args_.checkpoints = states(count + 2);
            // -1 alone is null in a plan, and slot 0 may be null_index in `slots`: names are distinct all the
            // same.
            std::vector<std::int64_t> seen;
            for (std::size_t at = 2; at < plan.size(); at += 3) {
                if (plan[at] >= count + 2 || std::find(seen.begin(), seen.end(), plan[at]) != seen.end())
                    plan[at] = -1;
                seen.push_back(plan[at]);
            }
            args_.checkpoint_plan =
                integers(Dtype::kInt32, {static_cast<std::int64_t>(plan.size()) / 3, 3}, plan);
        }
        if (random_.one_in(3)) {
            std::int64_t chunks = 0;
            for (const std::int64_t length : lengths_) {
                const std::int64_t own = (length + args_.chunk_tokens - 1) / args_.chunk_tokens;
                chunks = args_.cu_seqlens ? chunks + own : own;
            }
            if (!args_.cu_seqlens) chunks = (args_.q.size[1] + args_.chunk_tokens - 1) / args_.chunk_tokens;
            const std::int64_t heads = args_.v.size[2];
            args_.chunk_states = tensor(
                state_dtype_,
                {args_.q.size[0], chunks + random_.between(0, 1), heads, args_.v.size[3], args_.q.size[3]},
                -1, 1, true);
        }
    }

    void make_verify(std::int64_t rows) {
        std::int64_t longest = args_.cu_seqlens ? 0 : args_.q.size[1];
        for (const std::int64_t length : lengths_) longest = std::max(longest, length);
        const std::int64_t columns = std::max<std::int64_t>(longest, 1) + random_.between(0, 1);
        if ((args_.initial_state || args_.final_state) && random_.one_in(2)) {
            const std::int64_t slots = rows * columns + 2;
            args_.initial_state_indices = args_.final_state_indices = {};
            const bool in_place = same_places(args_.initial_state, args_.final_state);
            if (args_.initial_state) args_.initial_state = states(slots);
            if (args_.final_state) args_.final_state = in_place ? args_.initial_state : states(slots);
            args_.state_indices = integers(Dtype::kInt32, {rows, columns}, distinct(rows * columns, slots));
            if (random_.one_in(2)) {
                std::vector<std::int64_t> counts(lengths_.size());
                for (std::int64_t& count : counts) count = random_.between(1, columns);
                args_.num_accepted = integers(Dtype::kInt32, {rows}, counts);
            }
        }
        if (random_.one_in(3)) {
            args_.snapshots = states(rows + 1, columns);
            if (random_.one_in(2))
                args_.snapshot_indices = integers(Dtype::kInt32, {rows}, distinct(rows, rows + 1));
        }
        if (random_.one_in(3)) {
            std::vector<std::int64_t> parents;
            for (std::int64_t n = 0; n < rows; ++n)
                for (std::int64_t t = 0; t < columns; ++t) parents.push_back(random_.between(-1, t - 1));
            args_.parents = integers(Dtype::kInt32, {rows, columns}, parents);
            if (!args_.state_indices) args_.final_state = {}, args_.final_state_indices = {};
            if (!args_.state_indices && !args_.initial_state)
                args_.initial_state_indices = {}, args_.has_initial_state = {};
        }
    }

    static constexpr std::int64_t kMostWork = 400'000;

    Random random_;
    Memory memory_;
    Pass pass_ = Pass::kPrefill;
    Args args_;
    Dtype state_dtype_ = Dtype::kFloat32;
    std::vector<std::int64_t> lengths_;
    bool finite_ = true;  // and accurate enough to compare
};

}  // namespace cula::test
