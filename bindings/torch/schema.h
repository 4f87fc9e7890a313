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

#include "core/gradients.h"
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

// A pass has two overloads.
//   default  makes what it returns, and writes into none of its arguments
//   out      writes into tensors of the caller: states, checkpoints, the maps of a segment, and o. An o that
//            is left out, and a final state that `options` asks for, it makes and returns, in half the time
//            that Python takes; a segment returns what it keeps, whose size only its plan knows. What is not
//            made is returned as no tensor, None in Python. Inductor cannot lower an operator that writes
//            into none of what it may write into and returns a tensor: a call that gives it nothing to write
//            is one of the default overload.
// PyTorch spends as much on a number, and on a None, as on a tensor, and nearly as much on what is left out,
// whose name it looks for among the keywords. So all that is no tensor and seldom changes lies in one
// integer, `options` (kOptions), and what is optional follows, the usual first. A_log, dt_bias and decay may
// have any shape, strides and dtype, q, k, v and g any strides (a copy is made where the last one is not 1),
// and scale is K ** -0.5 by default. Every pass has a null_index. In a segment and a backward nothing can
// reach it: they take no indices of slots.
enum class Form : std::uint8_t { kDefault, kOut };

inline constexpr std::array kPasses{Pass::kPrefill, Pass::kDecode, Pass::kVerify, Pass::kSegment,
                                    Pass::kBackward};
inline constexpr std::array kForms{Form::kDefault, Form::kOut};

constexpr std::string_view overload(Form form) { return form == Form::kOut ? ".out" : ""; }

// "prefill", "prefill.out".
std::string qualified(Pass pass, Form form);

// Whether a pass has o, and states that it starts from and ends in.
constexpr bool has_outputs(Pass pass) {
    switch (pass) {
        case Pass::kPrefill:
        case Pass::kDecode:
        case Pass::kVerify: return true;
        case Pass::kSegment:
        case Pass::kBackward: break;
    }
    return false;
}

// What `options` holds. A flag is 0 or 1.
struct Options {
    std::int64_t algorithm = 0;  // a row of kAlgorithms
    std::int64_t gate = 0;       // a Gate
    std::int64_t qk_l2norm = 0, beta_is_logit = 0, allow_neg_eigval = 0, batch_invariant = 0;
    std::int64_t in_place = 0;          // final_state is the initial state, too
    std::int64_t k_first = 0;           // states that the call makes are [.., K, V]
    std::int64_t make_final_state = 0;  // one for each sequence
    std::int64_t make_m = 0, make_b = 0;
    std::int64_t keep = 0;  // make what a prefill of the same tokens takes as `kept`
    // Where a prefill has derivatives, keep for them what they would compute again. Derivatives are Python's
    // (python/cula/_autograd.py): the call itself is the same.
    std::int64_t save = 0;
    std::int64_t chunk_tokens = kChunkTokens;
    std::int64_t gradients = 0;  // which ones a backward makes: bit i is row i of kGradients
    std::int64_t version = 0;    // options_version(), or the call is refused
};

struct Option {
    std::string_view name;
    std::int64_t Options::* field;
    int shift, width;

    constexpr std::int64_t mask() const { return (std::int64_t{1} << width) - 1; }
};

// The one place that says where in `options` an option lies. Python reads it from option_bits().
inline constexpr std::array kOptions{
    Option{"algorithm", &Options::algorithm, 0, 8},
    Option{"gate", &Options::gate, 8, 2},
    Option{"qk_l2norm", &Options::qk_l2norm, 10, 1},
    Option{"beta_is_logit", &Options::beta_is_logit, 11, 1},
    Option{"allow_neg_eigval", &Options::allow_neg_eigval, 12, 1},
    Option{"batch_invariant", &Options::batch_invariant, 13, 1},
    Option{"in_place", &Options::in_place, 14, 1},
    Option{"k_first", &Options::k_first, 15, 1},
    Option{"make_final_state", &Options::make_final_state, 16, 1},
    Option{"make_m", &Options::make_m, 17, 1},
    Option{"make_b", &Options::make_b, 18, 1},
    Option{"keep", &Options::keep, 19, 1},
    Option{"chunk_tokens", &Options::chunk_tokens, 20, 12},
    Option{"gradients", &Options::gradients, 32, 11},
    Option{"save", &Options::save, 43, 1},
    Option{"version", &Options::version, 44, 16},
};

// In the order of the enumerators.
inline constexpr std::array<std::string_view, 3> kGates{"log_decay", "softplus", "bounded"};

Options unpack(std::int64_t options);

// The bits of the options that an overload has a use for.
std::int64_t known_bits(Pass pass, Form form);

// A checksum, never zero, of the passes' schemas, of kOptions and of the names of their values. A call says
// with it which tables it was made from. A compiled graph outlives the library in a cache on disk: Inductor
// finds it by the names of what a call writes into, and runs it by position. With the version among the
// arguments a graph that was made from other tables is not found, and an exported one is refused.
std::int64_t options_version();

// The rows of kOptions, one a line: name, shift, and the names of its values, or "=" and its default where
// it is a number, or "!" and its one value; separated by tabs.
std::string option_bits();

inline constexpr std::size_t kMaxTensors = 28;

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
