// SPDX-License-Identifier: Apache-2.0
#include "schema.h"

#include <algorithm>

#include "core/kernel.h"

namespace cula::torch_binding {
namespace {

constexpr Parameter kInputs[] = {
    {"q", "Tensor", &Args::q},
    {"k", "Tensor", &Args::k},
    {"v", "Tensor", &Args::v},
    {"g", "Tensor?", &Args::g},
    {"decay", "Tensor?", &Args::gamma},
    {"beta", "Tensor?", &Args::beta},
    {"erase", "Tensor?", &Args::erase},
    {"a_key", "Tensor?", &Args::a_key},
    {"b_key", "Tensor?", &Args::b_key},
    {"A_log", "Tensor?", &Args::A_log},
    {"dt_bias", "Tensor?", &Args::dt_bias},
    {"cu_seqlens", "Tensor?", &Args::cu_seqlens},
};

constexpr Parameter kStates[] = {
    {"initial_state", "Tensor?", &Args::initial_state},
    {"initial_state_indices", "Tensor?", &Args::initial_state_indices},
    {"final_state_indices", "Tensor?", &Args::final_state_indices},
    {"has_initial_state", "Tensor?", &Args::has_initial_state},
    {"o", "Tensor(a!)?", &Args::o},
    {"final_state", "Tensor(b!)?", &Args::final_state},
    {"initial_scales", "Tensor?", &Args::initial_scales},
    {"final_scales", "Tensor(e!)?", &Args::final_scales},
};

constexpr Parameter kPrefill[] = {
    {"checkpoints", "Tensor(c!)?", &Args::checkpoints},
    {"checkpoint_plan", "Tensor?", &Args::checkpoint_plan},
    {"chunk_states", "Tensor(d!)?", &Args::chunk_states},
    {"kept", "Tensor?", &Args::kept},
    {"saved", "Tensor(f!)?", &Args::saved},
};

constexpr Parameter kVerify[] = {
    {"state_indices", "Tensor?", &Args::state_indices},
    {"num_accepted", "Tensor?", &Args::num_accepted},
    {"snapshots", "Tensor(c!)?", &Args::snapshots},
    {"snapshot_indices", "Tensor?", &Args::snapshot_indices},
    {"parents", "Tensor?", &Args::parents},
};

constexpr Parameter kSegment[] = {
    {"m", "Tensor(a!)?", &Args::segment_m},
    {"b", "Tensor(b!)?", &Args::segment_b},
};

constexpr Parameter kBackward[] = {
    {"initial_state", "Tensor?", &Args::initial_state},
    {"has_initial_state", "Tensor?", &Args::has_initial_state},
    {"d_o", "Tensor?", &Args::d_o},
    {"d_final_state", "Tensor?", &Args::d_final_state},
    {"saved", "Tensor?", &Args::saved},
    {"d_q", "Tensor(a!)?", &Args::d_q},
    {"d_k", "Tensor(b!)?", &Args::d_k},
    {"d_v", "Tensor(c!)?", &Args::d_v},
    {"d_g", "Tensor(d!)?", &Args::d_g},
    {"d_beta", "Tensor(e!)?", &Args::d_beta},
    {"d_A_log", "Tensor(f!)?", &Args::d_A_log},
    {"d_dt_bias", "Tensor(g!)?", &Args::d_dt_bias},
    {"d_initial_state", "Tensor(h!)?", &Args::d_initial_state},
    {"d_erase", "Tensor(i!)?", &Args::d_erase},
    {"d_a_key", "Tensor(j!)?", &Args::d_a_key},
    {"d_b_key", "Tensor(k!)?", &Args::d_b_key},
};

static_assert(std::size(kInputs) +
                  std::max(std::size(kStates) + std::max(std::size(kPrefill), std::size(kVerify)),
                           std::size(kBackward)) ==
              kMaxTensors);

constexpr std::span<const Parameter> own_parameters(Pass pass) {
    switch (pass) {
        case Pass::kPrefill: return kPrefill;
        case Pass::kVerify: return kVerify;
        case Pass::kSegment: return kSegment;
        case Pass::kBackward: return kBackward;
        case Pass::kDecode: break;
    }
    return {};
}

constexpr std::string_view returns(Pass pass, Form form) {
    const bool out = form == Form::kOut;
    switch (pass) {
        case Pass::kVerify: return "Tensor o";
        case Pass::kSegment: return out ? "Tensor kept" : "Tensor? m, Tensor? b, Tensor? kept";
        case Pass::kBackward:
            return out ? ""
                       : "Tensor? d_q, Tensor? d_k, Tensor? d_v, Tensor? d_g, Tensor? d_beta, "
                         "Tensor? d_A_log, Tensor? d_dt_bias, Tensor? d_initial_state, Tensor? d_erase, "
                         "Tensor? d_a_key, Tensor? d_b_key";
        case Pass::kPrefill:
        case Pass::kDecode: break;
    }
    return out ? "Tensor o, Tensor final_state" : "Tensor o, Tensor? final_state";
}

// The tensors of an overload, the usual first.
constexpr TensorRef Args::* kUsualFirst[] = {
    &Args::q,
    &Args::k,
    &Args::v,
    &Args::d_o,
    &Args::segment_b,
    &Args::segment_m,
    &Args::o,
    &Args::g,
    &Args::beta,
    &Args::gamma,
    &Args::A_log,
    &Args::dt_bias,
    &Args::final_state,
    &Args::initial_state_indices,
    &Args::initial_state,
    &Args::cu_seqlens,
    &Args::has_initial_state,
    &Args::final_state_indices,
    &Args::erase,
    &Args::a_key,
    &Args::b_key,
    &Args::checkpoints,
    &Args::checkpoint_plan,
    &Args::chunk_states,
    &Args::kept,
    &Args::state_indices,
    &Args::num_accepted,
    &Args::snapshots,
    &Args::snapshot_indices,
    &Args::parents,
    &Args::initial_scales,
    &Args::final_scales,
    &Args::d_final_state,
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
    &Args::d_b_key,
    &Args::saved,
};

// What the default overload does not take: what is written, what says where, and what was kept.
constexpr TensorRef Args::* kOfOut[] = {
    &Args::o,
    &Args::final_state,
    &Args::final_scales,
    &Args::final_state_indices,
    &Args::checkpoints,
    &Args::checkpoint_plan,
    &Args::chunk_states,
    &Args::snapshots,
    &Args::snapshot_indices,
    &Args::segment_m,
    &Args::segment_b,
    &Args::kept,
};

constexpr bool takes(Pass pass, Form form, TensorRef Args::* field) {
    if (form == Form::kOut) return true;
    if (field == &Args::saved) return pass == Pass::kBackward;
    if (std::ranges::any_of(kGradients, [&](const Gradient& row) { return row.field == field; }))
        return false;
    // A state that the call makes has no slots: what gathers its states writes them to slots, too.
    const bool gathers = field == &Args::initial_state_indices && pass != Pass::kVerify;
    return !gathers && !contains(kOfOut, field);
}

constexpr Parameters make_parameters(Pass pass, Form form) {
    Parameters all;
    const auto add = [&](const Parameter& parameter) {
        if (takes(pass, form, parameter.field)) all.rows[all.count++] = parameter;
    };
    std::ranges::for_each(kInputs, add);
    if (has_outputs(pass)) std::ranges::for_each(kStates, add);
    std::ranges::for_each(own_parameters(pass), add);
    const auto rank = [](const Parameter& parameter) {
        return std::ranges::find(kUsualFirst, parameter.field);
    };
    std::ranges::sort(all.rows.begin(), all.rows.begin() + all.count, {}, rank);
    return all;
}

constexpr bool takes(Pass pass, Form form, const Option& option) {
    const bool makes = form == Form::kDefault, makes_state = pass == Pass::kPrefill || pass == Pass::kDecode;
    if (option.name == "in_place") return !makes && has_outputs(pass);
    if (option.name == "make_final_state") return makes_state;
    if (option.name == "k_first") return makes_state || (makes && !has_outputs(pass));
    if (option.name == "save") return makes && pass == Pass::kPrefill;
    if (option.name == "gradients") return makes && pass == Pass::kBackward;
    if (option.name == "make_m" || option.name == "make_b") return makes && pass == Pass::kSegment;
    return option.name != "keep" || pass == Pass::kSegment;
}

// All rows of kOptions but the version.
std::string option_rows() {
    std::string text;
    for (const Option& option : kOptions) {
        if (option.field == &Options::version) continue;
        text += std::string(option.name) + "\t" + std::to_string(option.shift) + "\t";
        if (option.field == &Options::algorithm)
            for (const NamedAlgorithm& row : kAlgorithms) text += std::string(row.name) + " ";
        if (option.field == &Options::gate)
            for (std::string_view gate : kGates) text += std::string(gate) + " ";
        if (option.field == &Options::chunk_tokens || option.field == &Options::gradients)
            text += "=" + std::to_string(Options{}.*option.field);
        text += "\n";
    }
    return text;
}

// FNV-1a of 64 bits.
std::uint64_t checksum(std::string_view text) {
    std::uint64_t sum = 0xcbf29ce484222325;
    for (const char byte : text) sum = (sum ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
    return sum;
}

}  // namespace

const Parameters& parameters(Pass pass, Form form) {
    static constexpr auto kAll = [] {
        std::array<std::array<Parameters, kForms.size()>, kPasses.size()> all{};
        for (Pass one : kPasses)
            for (Form other : kForms)
                all[static_cast<std::size_t>(one)][static_cast<std::size_t>(other)] =
                    make_parameters(one, other);
        return all;
    }();
    return kAll[static_cast<std::size_t>(pass)][static_cast<std::size_t>(form)];
}

std::string qualified(Pass pass, Form form) { return std::string(name(pass)) + std::string(overload(form)); }

std::string schema(Pass pass, Form form) {
    std::string text = qualified(pass, form) + "(", optional;
    for (const Parameter& parameter : parameters(pass, form)) {
        if (parameter.optional())
            optional += ", " + parameter.declaration() + "=None";
        else
            text += parameter.declaration() + ", ";
        if (parameter.field == &Args::dt_bias) optional += ", float? lower_bound=None";
        if (parameter.field == &Args::cu_seqlens) optional += ", float? scale=None";
    }
    text += "int options" + optional + ", int? null_index=None, str? backend=None) -> (";
    return text + std::string(returns(pass, form)) + ")";
}

Options unpack(std::int64_t options) {
    Options all;
    for (const Option& option : kOptions) all.*option.field = options >> option.shift & option.mask();
    return all;
}

std::int64_t known_bits(Pass pass, Form form) {
    std::int64_t bits = 0;
    for (const Option& option : kOptions)
        if (takes(pass, form, option)) bits |= option.mask() << option.shift;
    return bits;
}

std::int64_t options_version() {
    static const std::int64_t version = [] {
        std::string text = option_rows();
        for (const Pass pass : kPasses)
            for (const Form form : kForms) text += schema(pass, form) + "\n";
        const std::uint64_t sum = checksum(text);
        constexpr Option kVersion = kOptions.back();
        static_assert(kVersion.field == &Options::version && kVersion.width == 16);
        const auto folded = static_cast<std::int64_t>(sum ^ sum >> 16 ^ sum >> 32 ^ sum >> 48);
        // Options from before there was a version have zero.
        return std::max<std::int64_t>(folded & kVersion.mask(), 1);
    }();
    return version;
}

std::string option_bits() {
    const Option& version = kOptions.back();
    return option_rows() + std::string(version.name) + "\t" + std::to_string(version.shift) + "\t!" +
           std::to_string(options_version()) + "\n";
}

}  // namespace cula::torch_binding
