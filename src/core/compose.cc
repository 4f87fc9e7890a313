// SPDX-License-Identifier: Apache-2.0
// compose() of cula.h: the checks of its arguments, and its implementation on a CPU.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cula/cula.h"
#if defined(CULA_WITH_CUDA)
#include "cuda/chunked/entry.h"
#endif

namespace cula {
namespace {

constexpr std::int64_t kMostOnGpu = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMostPitch = 1 << 23;  // distances within a map are 32-bit numbers on a GPU

[[noreturn]] void fail(std::string_view argument, std::string_view expected, const std::string& given) {
    throw Error("compose: " + std::string(argument) + " must " + std::string(expected) + ", got " + given);
}

void check_floats(const TensorRef& ref, std::string_view argument, const TensorRef& like, bool on_cpu) {
    CULA_REQUIRE(ref.dtype == Dtype::kFloat32 || (on_cpu && ref.dtype == Dtype::kFloat64), argument,
                 on_cpu ? "have dtype float32 or float64" : "have dtype float32",
                 std::string(name(ref.dtype)));
    CULA_REQUIRE(ref.dtype == like.dtype, argument, "have state's dtype, " + std::string(name(like.dtype)),
                 std::string(name(ref.dtype)));
}

void check_maps(const TensorRef& ref, std::string_view argument, const TensorRef& state, bool on_cpu) {
    check_floats(ref, argument, state, on_cpu);
    CULA_REQUIRE(ref.stride[4] == 1, argument, "have a contiguous last dimension",
                 "a stride of " + std::to_string(ref.stride[4]));
    if (on_cpu) return;
    CULA_REQUIRE(std::abs(ref.stride[3]) < kMostPitch, argument, "have rows less than 2^23 numbers apart",
                 "a stride of " + std::to_string(ref.stride[3]));
    CULA_REQUIRE((ref.stride[0] | ref.stride[1] | ref.stride[2] | ref.stride[3]) % 4 == 0 &&
                     reinterpret_cast<std::uintptr_t>(ref.data) % 16 == 0,
                 argument, "have rows that start at multiples of 16 bytes", "others");
}

void check(const Composition& c, const Context& context) {
    const TensorRef &m = c.m, &b = c.b, &state = c.state, &joins = c.joins;
    const bool on_cpu = context.device.kind == DeviceKind::kCpu;
    CULA_REQUIRE(state.ndim == 4 && state.size[3] <= kLargestDim, "state",
                 "have shape [N, HV, V, K], K up to 256", shape_of(state));
    CULA_REQUIRE_MEMORY("state", state);
    check_floats(state, "state", state, on_cpu);
    CULA_REQUIRE(!overlaps_itself(state), "state", "not overlap itself in memory",
                 "strides that make elements share an address");
    const auto maps = [&](const TensorRef& ref) {
        return ref.ndim == 5 && ref.size[1] == state.size[0] && ref.size[2] == state.size[1] &&
               ref.size[4] == state.size[3];
    };
    CULA_REQUIRE(maps(m) && (m.size[3] == m.size[4] || m.size[3] == 1), "m",
                 "have shape [P, N, HV, K, K] or [P, N, HV, 1, K] of state's N, HV and K", shape_of(m));
    CULA_REQUIRE(maps(b) && b.size[0] == m.size[0] && b.size[3] == state.size[2], "b",
                 "have shape [P, N, HV, V, K] of m's P and state's N, HV, V and K", shape_of(b));
    CULA_REQUIRE_MEMORY("m", m);
    CULA_REQUIRE_MEMORY("b", b);
    check_maps(m, "m", state, on_cpu);
    check_maps(b, "b", state, on_cpu);
    if (!on_cpu)
        for (const TensorRef* ref : {&m, &state})
            CULA_REQUIRE(
                std::ranges::all_of(std::span(ref->size).first(4), [](auto n) { return n <= kMostOnGpu; }),
                ref == &m ? "m" : "state", "have sizes below 2^31 on a GPU", shape_of(*ref));
    if (!joins) return;
    CULA_REQUIRE(joins.ndim == 1 && joins.size[0] == m.size[0], "joins",
                 "have shape [P] = [" + std::to_string(m.size[0]) + "]", shape_of(joins));
    CULA_REQUIRE(joins.dtype == Dtype::kBool, "joins", "have dtype bool", std::string(name(joins.dtype)));
    CULA_REQUIRE(joins.stride[0] == 1 || joins.size[0] < 2, "joins", "be contiguous",
                 "a stride of " + std::to_string(joins.stride[0]));
    CULA_REQUIRE_MEMORY("joins", joins);
}

// Whether map p applies to what the maps before it gave. (A byte may hold more than a bool does.)
bool joins_at(const Composition& c, std::int64_t p) {
    return !c.joins || *c.joins.at<const unsigned char>(p) != 0;
}

// Composes the state of one sequence and value head in float64. `now` and `next` are scratch of one state
// each.
template <class Float>
void compose_head(const Composition& c, std::int64_t n, std::int64_t head, double* now, double* next) {
    const TensorRef& state = c.state;
    const std::int64_t rows = state.size[2], columns = state.size[3];
    std::fill_n(now, rows * columns, 0.0);
    std::int64_t first = c.m.size[0];  // the first map that counts
    while (first > 0 && joins_at(c, first - 1)) --first;
    for (std::int64_t p = first; p < c.m.size[0]; ++p) {
        for (std::int64_t r = 0; r < rows; ++r) {
            double* to = next + r * columns;
            const double* from = now + r * columns;
            const auto* b = c.b.at<Float>(p, n, head, r);
            for (std::int64_t k = 0; k < columns; ++k) to[k] = b[k];
            if (p == first) continue;
            if (c.m.size[3] == 1) {
                const auto* m = c.m.at<Float>(p, n, head);
                for (std::int64_t k = 0; k < columns; ++k) to[k] += m[k] * from[k];
                continue;
            }
            for (std::int64_t i = 0; i < columns; ++i) {
                const auto* m = c.m.at<Float>(p, n, head, i);
                for (std::int64_t k = 0; k < columns; ++k) to[k] += from[i] * m[k];
            }
        }
        std::swap(now, next);
    }
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t k = 0; k < columns; ++k)
            *state.at<Float>(n, head, r, k) = static_cast<Float>(now[r * columns + k]);
}

// The work of compose_some(): value heads of all sequences, taken in turn by the workers, each with scratch
// for two states.
struct Heads {
    const Composition& composition;
    std::int64_t workers;
    std::vector<double> states;
};

void compose_some(void* arg, int worker) {
    auto& [c, workers, states] = *static_cast<Heads*>(arg);
    const std::int64_t heads = c.state.size[1], of_state = c.state.size[2] * c.state.size[3];
    double *now = states.data() + 2 * worker * of_state, *next = now + of_state;
    for (std::int64_t i = worker; i < c.state.size[0] * heads; i += workers) {
        if (c.state.dtype == Dtype::kFloat64)
            compose_head<double>(c, i / heads, i % heads, now, next);
        else
            compose_head<float>(c, i / heads, i % heads, now, next);
    }
}

}  // namespace

void compose(const Composition& c, const Context& context) {
    check(c, context);
#if defined(CULA_WITH_CUDA)
    if (context.device.kind == DeviceKind::kCuda) return cuda::chunked::compose(c, context);
#endif
    if (!c.state.size[2] || !c.state.size[3]) return;
    const std::int64_t heads = c.state.size[0] * c.state.size[1],
                       threads = context.parallel_for.run ? context.parallel_for.threads : 1;
    Heads all{c, std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(heads, 1)), {}};
    all.states.resize(static_cast<std::size_t>(2 * all.workers * c.state.size[2] * c.state.size[3]));
    if (all.workers > 1)
        context.parallel_for.run(context.parallel_for.context, static_cast<int>(all.workers), compose_some,
                                 &all);
    else
        compose_some(&all, 0);
}

}  // namespace cula
