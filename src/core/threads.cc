// SPDX-License-Identifier: Apache-2.0
// ParallelFor on std::thread.
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "cula/cula.h"

namespace cula {

ParallelFor std_threads(int threads) {
    if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
    if (threads <= 0) threads = 1;
    const auto run = [](void*, int count, void (*worker)(void* arg, int index), void* arg) {
        std::vector<std::jthread> others;
        const auto starts = [&](int index) {
            try {
                others.emplace_back(worker, arg, index);
                return true;
            } catch (const std::system_error&) {
                return false;
            } catch (const std::bad_alloc&) {
                return false;
            }
        };
        int next = 1;
        while (next < count && starts(next)) ++next;
        if (count > 0) worker(arg, 0);
        for (; next < count; ++next) worker(arg, next);  // indices for which no thread could be started
    };
    return {run, nullptr, threads};
}

}  // namespace cula
