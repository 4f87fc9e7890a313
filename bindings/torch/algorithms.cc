// SPDX-License-Identifier: Apache-2.0
// torch.ops.cula.algorithms: the list of algorithms (kAlgorithms), from which Python makes its own.
#include <cstdint>
#include <string>

#include "cula/algorithm.h"
#include "handles.h"
#include "library.h"

namespace cula::torch_binding {
namespace {

// Rows in the order of kAlgorithms, whose numbers the packed options hold: name, mode, decay, update, and
// what Python has to know of the update (takes_beta, takes_erase, takes_low_rank, takes_several_writes,
// has_diagonal_map).
// Separated by tabs, one a line.
void algorithms_boxed(StableIValue* stack, std::uint64_t, std::uint64_t) {
    const auto word = [](bool yes) { return yes ? "yes" : "no"; };
    std::string text;
    for (const auto& [name, algorithm, mode] : kAlgorithms) {
        const auto [decay, update] = algorithm;
        text += std::string(name) + "\t" + std::string(mode) + "\t" + std::string(cula::name(decay)) + "\t" +
                std::string(cula::name(update)) + "\t" + word(takes_beta(update)) + "\t" +
                word(takes_erase(update)) + "\t" + word(takes_low_rank(update)) + "\t" +
                word(takes_several_writes(update)) + "\t" + word(has_diagonal_map(update)) + "\n";
    }
    stack[0] = torch::stable::detail::from(text);
}

}  // namespace

CULA_LIBRARY_FRAGMENT(library) { library.def("algorithms() -> str"); }
CULA_LIBRARY_IMPL(CompositeExplicitAutograd, library) { library.impl("algorithms", algorithms_boxed); }

}  // namespace cula::torch_binding
