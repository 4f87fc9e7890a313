// SPDX-License-Identifier: Apache-2.0
// One token of DeltaNet: S = beta k v^T from a zero state, o = scale S^T q.
#include <cula/cula.h>

#include <cmath>

int main() {
    using cula::TensorRef, cula::Dtype;
    float q[] = {1, 2}, k[] = {3, -1}, v[] = {5, 7, 11}, beta[] = {0.5f}, o[3], state[6];
    cula::Args args{.algorithm = cula::kDelta};
    args.q = TensorRef::contiguous(q, Dtype::kFloat32, {1, 1, 1, 2});
    args.k = TensorRef::contiguous(k, Dtype::kFloat32, {1, 1, 1, 2});
    args.v = TensorRef::contiguous(v, Dtype::kFloat32, {1, 1, 1, 3});
    args.beta = TensorRef::contiguous(beta, Dtype::kFloat32, {1, 1, 1});
    args.o = TensorRef::contiguous(o, Dtype::kFloat32, {1, 1, 1, 3});
    args.final_state = TensorRef::contiguous(state, Dtype::kFloat32, {1, 1, 3, 2});
    args.scale = 2;
    cula::decode(args);
    // q.k = 1, so o = 2 * 0.5 * 1 * v; the state is [V, K].
    return std::abs(o[2] - 11.0f) < 1e-5f && std::abs(state[5] + 5.5f) < 1e-5f ? 0 : 1;
}
