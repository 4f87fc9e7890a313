// SPDX-License-Identifier: Apache-2.0
// The README's example: one token of a KDA layer, its state updated in place by all cores.
#include <cula/cula.h>

#include <cstdio>
#include <vector>

int main() {
    using cula::Dtype, cula::TensorRef;
    constexpr int H = 32, D = 128;
    std::vector<float> q(H * D, 1), k(H * D, 1), v(H * D, 3), g(H * D, -0.1f), beta(H, 0.5f), o(H * D),
        state(H * D * D);

    cula::Args args{.algorithm = cula::kKda};
    args.q = TensorRef::contiguous(q.data(), Dtype::kFloat32, {1, 1, H, D});
    args.k = TensorRef::contiguous(k.data(), Dtype::kFloat32, {1, 1, H, D});
    args.v = TensorRef::contiguous(v.data(), Dtype::kFloat32, {1, 1, H, D});
    args.g = TensorRef::contiguous(g.data(), Dtype::kFloat32, {1, 1, H, D});
    args.beta = TensorRef::contiguous(beta.data(), Dtype::kFloat32, {1, 1, H});
    args.o = TensorRef::contiguous(o.data(), Dtype::kFloat32, {1, 1, H, D});
    args.initial_state = args.final_state =
        TensorRef::contiguous(state.data(), Dtype::kFloat32, {1, H, D, D});
    args.qk_l2norm = true;
    cula::decode(args, {.parallel_for = cula::std_threads()});

    std::printf("o = %.3f\n", static_cast<double>(o[0]));  // beta * v: the state was empty, q = k
    return o[0] > 1.49f && o[0] < 1.51f ? 0 : 1;
}
