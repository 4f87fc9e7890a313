// SPDX-License-Identifier: Apache-2.0
// How the library reports what it cannot do: Error is thrown, Support is returned.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace cula {

// A bad argument, or a call that no kernel takes. The message names the argument, what was expected and what
// was given. When it is thrown, nothing has been written.
// Derived from std::invalid_argument, so that bindings translate it to their own value error.
class Error : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

// Whether a kernel takes a problem: yes, or one sentence why not.
class Support {
public:
    static Support yes() { return Support{}; }
    static Support no(std::string reason) { return Support{std::move(reason)}; }

    explicit operator bool() const { return reason_.empty(); }
    const std::string& reason() const { return reason_; }

private:
    Support() = default;
    explicit Support(std::string reason) : reason_(std::move(reason)) {}

    std::string reason_;
};

}  // namespace cula
