// SPDX-License-Identifier: Apache-2.0
// Seams: the places where update rules differ, each a question with a name that one kernel asks. A seam
// answers rule by rule and does not compile for a rule that it does not know (docs/design/adding.md):
//
//     template <Update kUpdate>
//     struct CarryRule {
//         static_assert(kIsKnown<kUpdate>, "carry: what does a chunk write under this update rule?");
//     };
//     template <>
//     struct CarryRule<Update::kDelta> { .. };
//
// On the host a seam may be a switch without a default instead (-Werror=switch).
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "cula/algorithm.h"

namespace cula {

// False for every rule, but not before a template has one.
template <Update>
inline constexpr bool kIsKnown = false;

template <Update kUpdate>
using UpdateConstant = std::integral_constant<Update, kUpdate>;

// The rule whose kernels run a rule: its own, or another's, which get other operands and no more (an erase
// key in the place of the key that reads). No kernel is compiled for a rule that has none of its own. Those
// of kProduct also need rows of writes: see `kMayWriteSeveral` (tile/tokens_of_rows.cuh). Those of kDplr also
// need its keys, which the token-by-token kernels have alone; for its chunks see below.
template <Update kUpdate>
inline constexpr Update kKernelsOf = kUpdate;
template <>
inline constexpr Update kKernelsOf<Update::kErase> = Update::kDelta;
template <>
inline constexpr Update kKernelsOf<Update::kProduct> = Update::kDelta;
template <>
inline constexpr Update kKernelsOf<Update::kDplr> = Update::kAdditive;
// The same of its chunks: low-rank keys are erase keys of rows of their own (chunked/low_rank_rows.cuh).
template <Update kUpdate>
inline constexpr Update kChunksOf = kKernelsOf<kUpdate>;
template <>
inline constexpr Update kChunksOf<Update::kDplr> = Update::kDelta;

constexpr Update kernels_of(Update update) {
    Update found = update;
    [&]<std::size_t... i>(std::index_sequence<i...>) {
        ((found = update == kUpdates[i] ? kKernelsOf<kUpdates[i]> : found), ...);
    }(std::make_index_sequence<kUpdates.size()>{});
    return found;
}

constexpr Update chunks_of(Update update) {
    return takes_low_rank(update) ? kChunksOf<Update::kDplr> : kernels_of(update);
}

// Calls body(constant) for the rule whose kernels run `update`. It is compiled for all of those.
template <class Body>
constexpr void with_update(Update update, const Body& body) {
    const auto call_if = [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        if (update == kUpdate) body(UpdateConstant<kKernelsOf<kUpdate>>{});
    };
    [&]<std::size_t... i>(std::index_sequence<i...>) {
        (call_if(UpdateConstant<kUpdates[i]>{}), ...);
    }(std::make_index_sequence<kUpdates.size()>{});
}

// Whether a rule has kernels of its own for which Ask says yes.
template <class Ask, Update kUpdate>
constexpr bool says_yes() {
    if constexpr (kKernelsOf<kUpdate> != kUpdate)
        return false;
    else
        return Ask{}(UpdateConstant<kUpdate>{});
}

// Whether `update` is one of those rules.
template <class Ask, std::size_t... i>
constexpr bool is_one_that(Update update, std::index_sequence<i...>) {
    return ((says_yes<Ask, kUpdates[i]>() && update == UpdateConstant<kUpdates[i]>::value) || ...);
}

// What a question answers for a rule with kernels of its own that is known at run time: ask(constant) is its
// answer for one rule. It is compiled for all of them, and becomes a comparison with those for which the
// answer is yes: a switch in its place costs some kernels instructions.
template <class Ask>
constexpr bool answer_for(Update update, Ask) {
    return is_one_that<Ask>(update, std::make_index_sequence<kUpdates.size()>{});
}

// The one decay for which `is` says yes, for kernels that compare with it. With two such decays this does not
// compile.
consteval Decay only_decay(bool (*is)(Decay)) {
    std::size_t found = kDecays.size();
    for (std::size_t i = 0; i < kDecays.size(); ++i)
        if (is(kDecays[i])) found = found == kDecays.size() ? i : throw "there are two such decays";
    return kDecays.at(found);
}

}  // namespace cula
