// SPDX-License-Identifier: Apache-2.0
#include "schema.h"

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
    {"A_log", "Tensor?", &Args::A_log},
    {"dt_bias", "Tensor?", &Args::dt_bias},
    {"cu_seqlens", "Tensor?", &Args::cu_seqlens},
};

constexpr Parameter kStates[] = {
    {"initial_state", "Tensor?", &Args::initial_state},
    {"initial_state_indices", "Tensor?", &Args::initial_state_indices},
    {"final_state_indices", "Tensor?", &Args::final_state_indices},
    {"has_initial_state", "Tensor?", &Args::has_initial_state},
    {"o", "Tensor(a!)", &Args::o},
    {"final_state", "Tensor(b!)?", &Args::final_state},
};

constexpr Parameter kPrefill[] = {
    {"checkpoints", "Tensor(c!)?", &Args::checkpoints},
    {"checkpoint_plan", "Tensor?", &Args::checkpoint_plan},
    {"chunk_states", "Tensor(d!)?", &Args::chunk_states},
    {"kept", "Tensor?", &Args::kept},
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

static_assert(std::size(kInputs) + std::size(kStates) + std::max(std::size(kPrefill), std::size(kVerify)) ==
              kMaxTensors);

constexpr std::span<const Parameter> own_parameters(Pass pass) {
    switch (pass) {
        case Pass::kPrefill: return kPrefill;
        case Pass::kVerify: return kVerify;
        case Pass::kSegment: return kSegment;
        case Pass::kDecode: break;
    }
    return {};
}

constexpr std::string_view returns(Form form) {
    switch (form) {
        case Form::kNamed:
        case Form::kPacked: break;
        case Form::kFresh:
        case Form::kAlone: return "Tensor o";
        case Form::kDense: return "Tensor o, Tensor final_state";
        case Form::kInto: return "Tensor final_state";
        case Form::kKeep: return "Tensor kept";
    }
    return "";
}

// The tensors of the compact overloads, the usual first.
constexpr TensorRef Args::* kUsualFirst[] = {
    &Args::q,
    &Args::k,
    &Args::v,
    &Args::o,
    &Args::segment_b,
    &Args::segment_m,
    &Args::g,
    &Args::beta,
    &Args::A_log,
    &Args::dt_bias,
    &Args::final_state,
    &Args::initial_state_indices,
    &Args::initial_state,
    &Args::cu_seqlens,
    &Args::gamma,
    &Args::has_initial_state,
    &Args::final_state_indices,
    &Args::checkpoints,
    &Args::checkpoint_plan,
    &Args::chunk_states,
    &Args::kept,
    &Args::state_indices,
    &Args::num_accepted,
    &Args::snapshots,
    &Args::snapshot_indices,
    &Args::parents,
};

constexpr bool takes(Form form, TensorRef Args::* field) {
    constexpr TensorRef Args::* kNotDense[] = {
        &Args::final_state, &Args::initial_state_indices, &Args::final_state_indices,
        &Args::checkpoints, &Args::checkpoint_plan,       &Args::chunk_states,
        &Args::kept};
    if (form == Form::kNamed) return field != &Args::kept;  // a matter between two calls of the package
    if (makes_o(form) && field == &Args::o) return false;
    return !(makes_final_state(form) || form == Form::kAlone) || !contains(kNotDense, field);
}

constexpr Parameters make_parameters(Pass pass, Form form) {
    Parameters all;
    const auto add = [&](const Parameter& parameter) {
        if (takes(form, parameter.field)) all.rows[all.count++] = parameter;
    };
    std::ranges::for_each(kInputs, add);
    if (has_states(pass)) std::ranges::for_each(kStates, add);
    std::ranges::for_each(own_parameters(pass), add);
    const auto rank = [](const Parameter& parameter) {
        return std::ranges::find(kUsualFirst, parameter.field);
    };
    if (form != Form::kNamed) std::ranges::sort(all.rows.begin(), all.rows.begin() + all.count, {}, rank);
    return all;
}

std::string named_schema(Pass pass) {
    std::string text = std::string(name(pass)) + "(";
    for (const Parameter& parameter : parameters(pass, Form::kNamed)) {
        text += parameter.declaration() + ", ";
        if (parameter.field == &Args::final_state) text += "bool in_place, ";
    }
    text +=
        "*, str algorithm, float scale, str gate, float lower_bound, bool qk_l2norm, bool beta_is_logit, "
        "bool allow_neg_eigval, int null_index, bool batch_invariant, str backend";
    if (pass == Pass::kPrefill) text += ", int chunk_tokens";
    return text + ") -> ()";
}

std::string compact_schema(Pass pass, Form form) {
    std::string text = std::string(name(pass)) + std::string(overload(form)) + "(", optional;
    for (const Parameter& parameter : parameters(pass, form)) {
        if (parameter.optional())
            optional += ", " + parameter.declaration() + "=None";
        else
            text += parameter.declaration() + ", ";
        if (parameter.field == &Args::dt_bias) optional += ", float? lower_bound=None";
        if (parameter.field == &Args::cu_seqlens) optional += ", float? scale=None";
    }
    text += "int options" + optional + ", int? null_index=None, str? backend=None) -> (";
    return text + std::string(returns(form)) + ")";
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

std::string schema(Pass pass, Form form) {
    return form == Form::kNamed ? named_schema(pass) : compact_schema(pass, form);
}

}  // namespace cula::torch_binding
