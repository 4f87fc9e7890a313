// SPDX-License-Identifier: Apache-2.0
// What a library without CUDA kernels says to a call on a GPU.
#include <gtest/gtest.h>

#include <string>

#include "cula/cula.h"

namespace cula {
namespace {

TEST(WithoutCuda, ACallOnAGpuIsToldWhyThereAreNoKernelsAndHowToGetThem) {
    try {
        static_cast<void>(cuda_device(0));
        FAIL() << "a device without kernels for it";
    } catch (const Error& error) {
        const std::string text = error.what();
        for (const char* words : {"no CUDA kernels", "a test wants none", "CULA_CUDA=ON", "make cuda"})
            EXPECT_NE(text.find(words), std::string::npos) << text;
    }
}

}  // namespace
}  // namespace cula
