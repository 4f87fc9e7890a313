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
    kErase,     // u_t = beta_t o v_t - S'^T e_t, with the erase key e_t = erase_t o k_t
    kProduct,   // the delta rule n times: u_tj = beta_tj (v_tj - S'^T k_tj), S' <- S' + k_tj u_tj^T
    kDplr,      // diagonal plus low rank: S_t = S' + b_t (S_{t-1}^T a_t)^T + k_t v_t^T
};

// All of them. What is compiled once per rule runs over these lists.
inline constexpr std::array kDecays{Decay::kNone, Decay::kPerHead, Decay::kPerToken, Decay::kPerChannel};
inline constexpr std::array kUpdates{Update::kAdditive, Update::kDelta, Update::kErase, Update::kProduct,
                                     Update::kDplr};

// What every kernel has to know of a rule. Each is a switch without a default, which names the enumerator
// that it does not know (-Werror=switch). What only one kernel asks stands beside that kernel.

constexpr std::string_view name(Decay decay) {
    switch (decay) {
        case Decay::kNone: return "none";
        case Decay::kPerHead: return "head";
        case Decay::kPerToken: return "token";
        case Decay::kPerChannel: return "channel";
    }
    return "unknown";
}

// Whether g has one number per token and value head.
constexpr bool varies_by_token(Decay decay) {
    switch (decay) {
        case Decay::kPerToken: return true;
        case Decay::kNone:
        case Decay::kPerHead:
        case Decay::kPerChannel: return false;
    }
    return false;
}

// Whether g has one number per token, value head and key channel.
constexpr bool varies_by_channel(Decay decay) {
    switch (decay) {
        case Decay::kPerChannel: return true;
        case Decay::kNone:
        case Decay::kPerHead:
        case Decay::kPerToken: return false;
    }
    return false;
}

constexpr std::string_view name(Update update) {
    switch (update) {
        case Update::kAdditive: return "additive";
        case Update::kDelta: return "delta";
        case Update::kErase: return "erase";
        case Update::kProduct: return "product";
        case Update::kDplr: return "dplr";
    }
    return "unknown";
}

// Whether tokens have a write strength, beta.
constexpr bool takes_beta(Update update) {
    switch (update) {
        case Update::kAdditive:
        case Update::kDplr: return false;
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct: return true;
    }
    return false;
}

// Whether a token may write several times, one write after another. k, v and beta then have as many rows for
// each row of q (writes_per_token in problem.h). The state decays before the first write and is read after
// the last.
constexpr bool takes_several_writes(Update update) {
    switch (update) {
        case Update::kAdditive:
        case Update::kDelta:
        case Update::kErase:
        case Update::kDplr: return false;
        case Update::kProduct: return true;
    }
    return false;
}

// Whether tokens have an erase strength per key channel, erase, beside beta. The key that a token reads the
// state with is then the erase key, and beta alone says how much of v is written: I - k_t e_t^T does not
// depend on it, so that one beta per value channel leaves the chunk form and the map of a segment as they
// are. Otherwise beta is both strengths.
constexpr bool takes_erase(Update update) {
    switch (update) {
        case Update::kAdditive:
        case Update::kDelta:
        case Update::kProduct:
        case Update::kDplr: return false;
        case Update::kErase: return true;
    }
    return false;
}

// Whether tokens have two more keys, a_key and b_key, besides k: what a_key reads of the state before it
// decays is written along b_key, and k writes v as it is.
constexpr bool takes_low_rank(Update update) {
    switch (update) {
        case Update::kAdditive:
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct: return false;
        case Update::kDplr: return true;
    }
    return false;
}

// Whether M of a segment's map S -> M S + B is a diagonal [K]; otherwise it is a matrix [K, K].
constexpr bool has_diagonal_map(Update update) {
    switch (update) {
        case Update::kAdditive: return true;
        case Update::kDelta:
        case Update::kErase:
        case Update::kProduct:
        case Update::kDplr: return false;
    }
    return false;
}

// A member of the family.
struct Algorithm {
    Decay decay = Decay::kNone;
    Update update = Update::kAdditive;

    friend constexpr bool operator==(Algorithm, Algorithm) = default;
};

// Sources: linear attention, Katharopoulos et al. 2020; Lightning attention, Qin et al. 2024 (RetNet, Sun et
// al. 2023, is the same recurrence); simple GLA is the form of Mamba-2, Dao and Gu 2024; GLA, Yang et al.
// 2023; DeltaNet, Yang et al. 2024; GDN, Yang, Kautz and Hatamizadeh 2024; KDA, Kimi Team 2025; GDN-2, Gated
// DeltaNet 2 of FLA 0.6; DeltaProduct and gated DeltaProduct, Siems et al. 2025; RWKV-7, Peng et al. 2025.
inline constexpr Algorithm kLinearAttention{Decay::kNone, Update::kAdditive};
inline constexpr Algorithm kLightning{Decay::kPerHead, Update::kAdditive};
inline constexpr Algorithm kSimpleGla{Decay::kPerToken, Update::kAdditive};
inline constexpr Algorithm kGla{Decay::kPerChannel, Update::kAdditive};
inline constexpr Algorithm kDelta{Decay::kNone, Update::kDelta};
inline constexpr Algorithm kDeltaPerHead{Decay::kPerHead, Update::kDelta};
inline constexpr Algorithm kGdn{Decay::kPerToken, Update::kDelta};
inline constexpr Algorithm kKda{Decay::kPerChannel, Update::kDelta};
inline constexpr Algorithm kGdn2{Decay::kPerChannel, Update::kErase};
inline constexpr Algorithm kDeltaProduct{Decay::kNone, Update::kProduct};
inline constexpr Algorithm kGatedDeltaProduct{Decay::kPerToken, Update::kProduct};
inline constexpr Algorithm kRwkv7{Decay::kPerChannel, Update::kDplr};

struct NamedAlgorithm {
    std::string_view name;
    Algorithm algorithm;
    std::string_view mode;  // the Python function that takes it, cula_<mode>, and the mode of the others
};

// The one list of algorithms. Python's names, the tests, the benchmark and the tables of the documents are
// made from it (cula.algorithms()). Of two names for one pair, the first is what name() returns.
inline constexpr std::array kAlgorithms = std::to_array<NamedAlgorithm>({
    {"kda", kKda, "kda"},
    {"gdn", kGdn, "gdn"},
    {"gla", kGla, "gla"},
    {"simple_gla", kSimpleGla, "simple_gla"},
    {"lightning", kLightning, "lightning"},
    {"linear", kLinearAttention, "simple_gla"},
    {"delta", kDelta, "delta"},
    {"delta_per_head", kDeltaPerHead, "delta"},
    {"gdn2", kGdn2, "gdn2"},
    {"gdp", kGatedDeltaProduct, "gdp"},
    {"delta_product", kDeltaProduct, "gdp"},
    {"rwkv7", kRwkv7, "rwkv7"},
});

// The name in kAlgorithms; "unknown" for a pair that has none.
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
