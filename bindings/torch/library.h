// SPDX-License-Identifier: Apache-2.0
// PyTorch's registration macros for torch.ops.<CULA_NAMESPACE>, and for torch.ops.<CULA_NAMESPACE>_unchecked.
// The build names the namespace (cmake/CulaTorch.cmake), so that builds with different ones can be loaded
// into one process.
#pragma once

#include <torch/csrc/stable/library.h>

#if !defined(CULA_NAMESPACE)
#error "CULA_NAMESPACE must be the namespace of the operators"
#endif

// PyTorch's macros paste their arguments, which leaves a macro among them as it is. One more call expands it.
#define CULA_EXPAND(macro, ...) macro(__VA_ARGS__)
#define CULA_PASTE(a, b) a##b
#define CULA_APPEND(a, b) CULA_PASTE(a, b)
#define CULA_UNCHECKED CULA_APPEND(CULA_NAMESPACE, _unchecked)

#define CULA_LIBRARY(library) CULA_EXPAND(STABLE_TORCH_LIBRARY, CULA_NAMESPACE, library)
#define CULA_LIBRARY_FRAGMENT(library) CULA_EXPAND(STABLE_TORCH_LIBRARY_FRAGMENT, CULA_NAMESPACE, library)
#define CULA_LIBRARY_IMPL(key, library) CULA_EXPAND(STABLE_TORCH_LIBRARY_IMPL, CULA_NAMESPACE, key, library)
#define CULA_UNCHECKED_LIBRARY(library) CULA_EXPAND(STABLE_TORCH_LIBRARY, CULA_UNCHECKED, library)
#define CULA_UNCHECKED_LIBRARY_FRAGMENT(library) \
    CULA_EXPAND(STABLE_TORCH_LIBRARY_FRAGMENT, CULA_UNCHECKED, library)
#define CULA_UNCHECKED_LIBRARY_IMPL(key, library) \
    CULA_EXPAND(STABLE_TORCH_LIBRARY_IMPL, CULA_UNCHECKED, key, library)
