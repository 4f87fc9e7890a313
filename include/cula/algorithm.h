// SPDX-License-Identifier: Apache-2.0
// The family of linear-attention algorithms as a value: how the state S decays, and how it is written.
// Equations and sources: ALGORITHM.md. Per value head, S is [K, V] here and is stored as [V, K]; q and k are
// [K], v and u are [V].
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace cula {

// S' = diag(exp(g_t)) S_{t-1}; g is a natural logarithm, at most 0.
enum class Decay : std::uint8_t {
    kNone,        // g = 0
    kPerHead,     // g[hv], constant over the sequence
    kPerToken,    // g[b, t, hv]
    kPerChannel,  // g[b, t, hv, k]
};

// S_t = S' + k_t u_t^T; the output is o_t = scale * S_t^T q_t.
enum class Update : std::uint8_t {
    kAdditive,  // u_t = v_t
    kDelta,     // u_t = beta_t (v_t - S'^T k_t)
};

// A member of the family. Every combination of Decay and Update is supported.
struct Algorithm {
    Decay decay = Decay::kNone;
    Update update = Update::kAdditive;

    friend constexpr bool operator==(Algorithm, Algorithm) = default;
};

// Sources: linear attention, Katharopoulos et al. 2020; Lightning attention, Qin et al. 2024 (RetNet, Sun et
// al. 2023, is the same recurrence); simple GLA is the form of Mamba-2, Dao and Gu 2024; GLA, Yang et al.
// 2023; DeltaNet, Yang et al. 2024; GDN, Yang, Kautz and Hatamizadeh 2024; KDA, Kimi Team 2025.
inline constexpr Algorithm kLinearAttention{Decay::kNone, Update::kAdditive};
inline constexpr Algorithm kLightning{Decay::kPerHead, Update::kAdditive};
inline constexpr Algorithm kSimpleGla{Decay::kPerToken, Update::kAdditive};
inline constexpr Algorithm kGla{Decay::kPerChannel, Update::kAdditive};
inline constexpr Algorithm kDelta{Decay::kNone, Update::kDelta};
inline constexpr Algorithm kDeltaPerHead{Decay::kPerHead, Update::kDelta};
inline constexpr Algorithm kGdn{Decay::kPerToken, Update::kDelta};
inline constexpr Algorithm kKda{Decay::kPerChannel, Update::kDelta};

struct NamedAlgorithm {
    std::string_view name;
    Algorithm algorithm;
};

// Every combination of Decay and Update, under the name that the field uses for it.
inline constexpr std::array<NamedAlgorithm, 8> kAlgorithms{{
    {"kda", kKda},
    {"gdn", kGdn},
    {"gla", kGla},
    {"simple_gla", kSimpleGla},
    {"lightning", kLightning},
    {"linear", kLinearAttention},
    {"delta", kDelta},
    {"delta_per_head", kDeltaPerHead},
}};

// The name in kAlgorithms; "unknown" for values outside the enums.
constexpr std::string_view name(Algorithm algorithm) {
    for (const NamedAlgorithm& row : kAlgorithms)
        if (row.algorithm == algorithm) return row.name;
    return "unknown";
}

// The algorithm of this name, or nullopt.
constexpr std::optional<Algorithm> find_algorithm(std::string_view name) {
    for (const NamedAlgorithm& row : kAlgorithms)
        if (row.name == name) return row.algorithm;
    return std::nullopt;
}

}  // namespace cula
