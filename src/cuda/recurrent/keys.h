// SPDX-License-Identifier: Apache-2.0
// What keys a token has: a template parameter of the token-by-token kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cula/algorithm.h"

namespace cula::cuda::recurrent {

enum class Keys : std::uint8_t {
    kOne,      // q and k alone: where anything reads the state, k does
    kErase,    // and the erase key e = erase o k, which reads in the place of k
    kLowRank,  // and a, which reads the state before it decays, and b, along which that is written
    kSeveral,  // q and several k, one for each write of the token, of which the first decays the state
};

// Of a token that writes once; a gradient takes each write for a token.
constexpr Keys keys_of(Update update) {
    return takes_low_rank(update) ? Keys::kLowRank : takes_erase(update) ? Keys::kErase : Keys::kOne;
}

template <Keys kKeys>
using KeysConstant = std::integral_constant<Keys, kKeys>;

// Calls body(KeysConstant<keys>{}) for what keys_of() returns.
template <class Body>
auto with_keys(Keys keys, const Body& body) {
    switch (keys) {
        case Keys::kErase: return body(KeysConstant<Keys::kErase>{});
        case Keys::kLowRank: return body(KeysConstant<Keys::kLowRank>{});
        case Keys::kSeveral:
        case Keys::kOne: break;
    }
    return body(KeysConstant<Keys::kOne>{});
}

}  // namespace cula::cuda::recurrent
