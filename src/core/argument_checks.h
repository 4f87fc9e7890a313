// SPDX-License-Identifier: Apache-2.0
// Checks of single arguments, in the words of their errors: what the checks of a whole call
// (core/validate.cc) are made of.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "core/check.h"
#include "cula/problem.h"
#include "cula/status.h"

namespace cula {

struct Dim {
    std::string_view name;
    std::int64_t size;  // kAny: not fixed
};
inline constexpr std::int64_t kAny = -1;

constexpr bool is_float(Dtype dtype) {
    return dtype == Dtype::kFloat64 || dtype == Dtype::kFloat32 || dtype == Dtype::kBFloat16 ||
           dtype == Dtype::kFloat16;
}

// The call that is checked, and its sizes as far as they are known.
class ArgumentChecks {
public:
    ArgumentChecks(Pass pass, const Args& args, bool host_readable)
        : pass_(pass), args_(args), host_readable_(host_readable) {}

protected:
    [[noreturn]] void fail(std::string_view argument, std::string_view expected,
                           const std::string& given) const {
        throw Error(std::string(name(pass_)) + ": " + std::string(argument) + " must " +
                    std::string(expected) + ", got " + given);
    }

    // "[B, T, H, K] = [1, 64, 2, 128]", or without the numbers where none is fixed.
    static std::string words(std::initializer_list<Dim> dims) {
        std::string names, sizes;
        for (const Dim& dim : dims) {
            const std::string separator = names.empty() ? "" : ", ";
            names += separator + std::string(dim.name);
            sizes += separator + (dim.size == kAny ? std::string(dim.name) : std::to_string(dim.size));
        }
        return "[" + names + "]" + (names == sizes ? "" : " = [" + sizes + "]");
    }

    void given(std::string_view argument, const TensorRef& ref, std::string_view why) const {
        CULA_REQUIRE(static_cast<bool>(ref), argument, "be given " + std::string(why), "none");
    }

    void given_for_algorithm(std::string_view argument, const TensorRef& ref) const {
        CULA_REQUIRE(static_cast<bool>(ref), argument, "be given for " + algorithm(), "none");
    }

    std::string algorithm() const { return std::string(name(args_.algorithm)); }

    void shape(std::string_view argument, const TensorRef& ref, std::initializer_list<Dim> dims) const {
        bool good = ref.ndim == static_cast<int>(dims.size());
        std::size_t i = 0;
        for (const Dim& dim : dims) {
            good = good && (dim.size == kAny || ref.size[i] == dim.size);
            ++i;
        }
        CULA_REQUIRE(good, argument, "have shape " + words(dims), shape_of(ref));
        CULA_REQUIRE_MEMORY(argument, ref);
    }

    void dtype(std::string_view argument, const TensorRef& ref, std::initializer_list<Dtype> allowed) const {
        if (std::find(allowed.begin(), allowed.end(), ref.dtype) != allowed.end()) return;
        std::string names;
        for (Dtype one : allowed) names += (names.empty() ? "" : " or ") + std::string(name(one));
        fail(argument, "have dtype " + names, std::string(name(ref.dtype)));
    }

    void dtype_or_float32(std::string_view argument, const TensorRef& ref, Dtype other) const {
        if (other == Dtype::kFloat32)
            dtype(argument, ref, {Dtype::kFloat32});
        else
            dtype(argument, ref, {other, Dtype::kFloat32});
    }

    void floating(std::string_view argument, const TensorRef& ref) const {
        CULA_REQUIRE(is_float(ref.dtype), argument, "have a floating-point dtype",
                     std::string(name(ref.dtype)));
    }

    // Gate parameters and maps are float32; float64 is allowed too if q is float64 (the reference).
    void parameter(std::string_view argument, const TensorRef& ref) const {
        if (args_.q.dtype == Dtype::kFloat64)
            dtype(argument, ref, {Dtype::kFloat32, Dtype::kFloat64});
        else
            dtype(argument, ref, {Dtype::kFloat32});
    }

    // Options are double in Args, but kernels read them as float32.
    void finite(std::string_view argument, double value) const {
        CULA_REQUIRE(std::abs(value) <= std::numeric_limits<float>::max(), argument,
                     "be a finite float32 number", std::to_string(value));
    }

    void last_contiguous(std::string_view argument, const TensorRef& ref) const {
        const auto last = static_cast<std::size_t>(ref.ndim - 1);
        CULA_REQUIRE(ref.stride[last] == 1 || ref.size[last] <= 1, argument,
                     "be contiguous in its last dimension", "stride " + std::to_string(ref.stride[last]));
    }

    // No two elements of an output may share memory.
    void writable(std::string_view argument, const TensorRef& ref) const {
        CULA_REQUIRE(!overlaps_itself(ref), argument, "not overlap itself in memory",
                     "strides that make elements share an address");
    }

    void state(std::string_view argument, const TensorRef& ref, Dim first, bool scaled = false) const {
        shape(argument, ref, {first, {"HV", value_heads_}, {"V", value_dim_}, {"K", key_dim_}});
        CULA_REQUIRE(ref.size[0] < kMostSlots, argument, "have less than 2^31 slots",
                     std::to_string(ref.size[0]));
        state_memory(argument, ref, scaled);
    }

    // scaled: may be of float8, which comes with scales.
    void state_memory(std::string_view argument, const TensorRef& ref, bool scaled = false) const {
        if (scaled && args_.q.dtype == Dtype::kFloat64)
            dtype(argument, ref,
                  {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat8E4M3});
        else if (scaled)
            dtype(argument, ref, {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat8E4M3});
        else if (args_.q.dtype == Dtype::kFloat64)
            floating(argument, ref);
        else
            dtype(argument, ref, {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16});
        row_or_column_contiguous(argument, ref);
    }

    // Of a state or a map, [.., V, K] or [.., K, K].
    void row_or_column_contiguous(std::string_view argument, const TensorRef& ref) const {
        const auto k = static_cast<std::size_t>(ref.ndim - 1), v = k - 1;
        CULA_REQUIRE(ref.stride[k] == 1 || ref.stride[v] == 1 || ref.size[k] <= 1 || ref.size[v] <= 1,
                     argument, "be contiguous along K or along V",
                     "strides " + std::to_string(ref.stride[v]) + ", " + std::to_string(ref.stride[k]));
    }

    // The rows of k, which are those of v and beta.
    void check_writes() {
        writes_ = {"T", tokens_};
        if (!takes_several_writes(args_.algorithm.update)) return;
        shape("k", args_.k, {{"B", batch_}, {"T n", kAny}, {"H", heads_}, {"K", key_dim_}});
        const std::int64_t rows = args_.k.size[1];
        const bool whole = tokens_ == 0 ? rows == 0 : rows % tokens_ == 0;
        CULA_REQUIRE(
            whole && (tokens_ == 0 || (rows > 0 && rows / tokens_ <= kMostWrites)), "k",
            "have n rows for each of the " + std::to_string(tokens_) + " tokens of q, n from 1 to 2^24",
            std::to_string(rows) + " rows");
        writes_ = {"T n", rows};
    }

    // The scales of states of float8. Callers know both arguments by one name.
    void check_scales() const {
        constexpr std::string_view kName = "state_scales";
        const TensorRef &of_initial = args_.initial_scales, &of_final = args_.final_scales;
        const auto check = [&](const TensorRef& states, const TensorRef& scales) {
            if (!states || states.dtype != Dtype::kFloat8E4M3) {
                CULA_REQUIRE(!scales, kName, "be left out without a state of float8_e4m3fn",
                             states ? "a tensor, and a state of " + std::string(name(states.dtype))
                                    : std::string("a tensor"));
                return;
            }
            given(kName, scales, "with a state of float8_e4m3fn");
            shape(kName, scales, {{"slots", states.size[0]}, {"HV", value_heads_}, {"V", value_dim_}});
            dtype(kName, scales, {Dtype::kFloat32});
        };
        check(args_.initial_state, of_initial);
        check(args_.final_state, of_final);
        if (of_final) writable(kName, of_final);
        if (of_initial && of_final) {
            CULA_REQUIRE(same_places(of_initial, of_final) || apart(of_initial, of_final), kName,
                         "have each scale that is read where it is written, or lie elsewhere",
                         "memory that overlaps in other places");
            CULA_REQUIRE(
                same_places(of_initial, of_final) == same_places(args_.initial_state, args_.final_state),
                kName, "be the same memory where the states are, and other memory where not",
                "one of the two");
        }
        for (const TensorRef* scales : {&of_initial, &of_final})
            for (const TensorRef* states : {&args_.initial_state, &args_.final_state})
                CULA_REQUIRE(!*scales || !*states || apart(*scales, *states), kName,
                             "share no memory with the states", "memory that overlaps them");
    }

    void share_nothing(std::string_view argument, const TensorRef& ref, std::string_view other,
                       const TensorRef& of_other) const {
        CULA_REQUIRE(!ref || !of_other || apart(ref, of_other), argument,
                     "share no memory with " + std::string(other), "memory that overlaps it");
    }

    // What is written while inputs are read, by threads that do not wait for each other. Snapshots and
    // checkpoints may be slots of a pool: which of them is read or written is not the host's to know.
    void check_outputs_apart() const {
        const std::pair<std::string_view, const TensorRef*> inputs[] = {{"q", &args_.q},
                                                                        {"k", &args_.k},
                                                                        {"v", &args_.v},
                                                                        {"g", &args_.g},
                                                                        {"beta", &args_.beta},
                                                                        {"erase", &args_.erase},
                                                                        {"a_key", &args_.a_key},
                                                                        {"b_key", &args_.b_key},
                                                                        {"decay", &args_.gamma},
                                                                        {"A_log", &args_.A_log},
                                                                        {"dt_bias", &args_.dt_bias},
                                                                        {"cu_seqlens", &args_.cu_seqlens}};
        const std::pair<std::string_view, const TensorRef*> states[] = {
            {"initial_state", &args_.initial_state},
            {"final_state", &args_.final_state},
            {"snapshots", &args_.snapshots},
            {"checkpoints", &args_.checkpoints}};
        const auto apart_from = [&](std::string_view name, const TensorRef& ref, const auto& others) {
            if (!ref) return;
            for (const auto& [other, of_other] : others) share_nothing(name, ref, other, *of_other);
        };
        apart_from("o", args_.o, inputs), apart_from("o", args_.o, states);
        apart_from("chunk_states", args_.chunk_states, inputs);
        apart_from("chunk_states", args_.chunk_states, states);
        share_nothing("chunk_states", args_.chunk_states, "o", args_.o);
        apart_from("snapshots", args_.snapshots, inputs);
        apart_from("checkpoints", args_.checkpoints, inputs);
    }

    Pass pass_;
    const Args& args_;
    bool host_readable_;
    std::int64_t batch_ = 0, tokens_ = 0, heads_ = 0, value_heads_ = 0, key_dim_ = 0, value_dim_ = 0,
                 sequences_ = 0;
    Dim writes_{"T", 0};  // the rows of k, v and beta
};

}  // namespace cula
