// SPDX-License-Identifier: Apache-2.0
// The family of linear attentions as a value: how the state decays, and how it is written.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace cula {

// S' = diag(exp(g_t)) S_{t-1}
enum class Decay : std::uint8_t {
    kNone,        // g = 0
    kPerHead,     // g[hv], constant over the sequence
    kPerToken,    // g[b, t, hv]
    kPerChannel,  // g[b, t, hv, k]
};

// S_t = S' + k_t u_t^T
enum class Update : std::uint8_t {
    kAdditive,  // u_t = v_t
    kDelta,     // u_t = beta_t (v_t - S'^T k_t)
};

struct Algorithm {
    Decay decay = Decay::kNone;
    Update update = Update::kAdditive;

    friend constexpr bool operator==(Algorithm, Algorithm) = default;
};

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

// Every cell of Decay x Update, under the name the field uses for it.
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

constexpr std::string_view name(Algorithm algorithm) {
    for (const NamedAlgorithm& row : kAlgorithms)
        if (row.algorithm == algorithm) return row.name;
    return "unknown";
}

constexpr std::optional<Algorithm> find_algorithm(std::string_view name) {
    for (const NamedAlgorithm& row : kAlgorithms)
        if (row.name == name) return row.algorithm;
    return std::nullopt;
}

}  // namespace cula
