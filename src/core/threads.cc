// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <vector>

#include "cula/cula.h"

namespace cula {

ParallelFor std_threads(int threads) {
    if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
    if (threads <= 0) threads = 1;
    const auto run = [](void*, int count, void (*worker)(void* arg, int index), void* arg) {
        std::vector<std::jthread> others;
        for (int index = 1; index < count; ++index) others.emplace_back(worker, arg, index);
        if (count > 0) worker(arg, 0);
    };
    return {run, nullptr, threads};
}

}  // namespace cula
