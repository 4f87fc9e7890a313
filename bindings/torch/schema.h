// SPDX-License-Identifier: Apache-2.0
// What the operators are called with: the overloads of a pass, their tensors and their schemas.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cula/cula.h"

namespace cula::torch_binding {

// A tensor of a call: its name and type in the schema, and the field of Args that it fills.
struct Parameter {
    std::string_view name;
    std::string_view type;
    TensorRef Args::* field;

    constexpr bool optional() const { return type.back() == '?'; }
    std::string declaration() const { return std::string(type) + " " + std::string(name); }
};

// A pass has several overloads. The one without a name spells its options out and has no `kept`. The others
// are for callers that count microseconds (the package itself). PyTorch spends as much on a number, and on a
// None, as on a tensor, and next to nothing on what is left out. So their `options` holds chunk_tokens << 16
// and, from the lowest bit, 8 bits for the row of kAlgorithms, 2 for the Gate, then the flags in the order in
// which the unnamed overload has them, in_place, and whether a state that `dense` makes is K-first; all that
// is optional follows, the usual first: lower_bound after dt_bias, scale after cu_seqlens, null_index and
// backend last. A_log, dt_bias and decay may have any shape, strides and dtype, q, k, v and g any strides (a
// copy is made where the last one is not 1), and scale is K ** -0.5 by default.
//   packed  does the same as the unnamed one, and takes `kept`
//   fresh   allocates and returns o: from here that takes half as long as from Python
//   dense   allocates and returns o and the final state, one for each sequence
//   into    allocates and returns the final state like `dense`; o is the caller's
//   alone   allocates and returns o, and writes nothing else
//   keep    a segment: returns what a prefill of the same tokens takes as `kept`, empty where that would be
//   nothing
enum class Form : std::uint8_t { kNamed, kPacked, kFresh, kDense, kInto, kAlone, kKeep };

inline constexpr std::array kPasses{Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment};
inline constexpr std::array kForms{Form::kNamed, Form::kPacked, Form::kFresh, Form::kDense,
                                   Form::kInto,  Form::kAlone,  Form::kKeep};

constexpr std::string_view overload(Form form) {
    switch (form) {
        case Form::kNamed: break;
        case Form::kPacked: return ".packed";
        case Form::kFresh: return ".fresh";
        case Form::kDense: return ".dense";
        case Form::kInto: return ".into";
        case Form::kAlone: return ".alone";
        case Form::kKeep: return ".keep";
    }
    return "";
}

constexpr bool makes_o(Form form) {
    return form == Form::kFresh || form == Form::kDense || form == Form::kAlone;
}

constexpr bool makes_final_state(Form form) { return form == Form::kDense || form == Form::kInto; }

constexpr bool has_states(Pass pass) { return pass != Pass::kSegment; }

constexpr bool has_overload(Pass pass, Form form) {
    switch (form) {
        case Form::kNamed:
        case Form::kPacked: break;
        case Form::kFresh: return has_states(pass);
        case Form::kDense:
        case Form::kInto:
        case Form::kAlone: return pass == Pass::kPrefill || pass == Pass::kDecode;
        case Form::kKeep: return pass == Pass::kSegment;
    }
    return true;
}

inline constexpr std::size_t kMaxTensors = 20;

// The tensors of an overload, in the order of its schema.
struct Parameters {
    std::array<Parameter, kMaxTensors> rows{};
    std::size_t count = 0;

    constexpr auto begin() const { return rows.begin(); }
    constexpr auto end() const { return rows.begin() + count; }
};

const Parameters& parameters(Pass pass, Form form);

std::string schema(Pass pass, Form form);

constexpr bool contains(std::span<TensorRef Args::* const> fields, TensorRef Args::* field) {
    return std::ranges::find(fields, field) != fields.end();
}

}  // namespace cula::torch_binding
