// SPDX-License-Identifier: Apache-2.0
#include "cuda/float8/entry.h"

#include "core/carve.h"
#include "core/rows.h"
#include "cuda/float8/launch.h"
#include "cuda/limits.h"
#include "cuda/pipe/launch.h"

namespace cula::cuda::float8 {
namespace {

bool is_float8(const TensorRef& ref) { return ref && ref.dtype == Dtype::kFloat8E4M3; }

void carve(Carver& carver, const Args& args, DenseStates& dense) {
    const std::int64_t sequences = num_sequences(args);
    dense.states = carver.take<float>(sequences * args.v.size[2] * args.v.size[3] * args.q.size[3]);
    dense.starts = carver.take<std::int32_t>(sequences);
    dense.ends = carver.take<std::int32_t>(sequences);
}

}  // namespace

bool has_states(const Args& args) { return is_float8(args.initial_state) || is_float8(args.final_state); }

std::size_t DenseStates::bytes(const Args& args) {
    Carver carver(nullptr);
    DenseStates none(args, nullptr);
    carve(carver, args, none);
    return carver.bytes();
}

DenseStates::DenseStates(const Args& args, void* memory) {
    Carver carver(memory);
    carve(carver, args, *this);
}

Args DenseStates::apply(const Args& args) const {
    Args of = args;
    const std::int64_t sequences = num_sequences(args);
    const TensorRef dense = TensorRef::contiguous(
        states, Dtype::kFloat32, {sequences, args.v.size[2], args.v.size[3], args.q.size[3]});
    if (is_float8(args.initial_state)) of.initial_state = dense;
    if (is_float8(args.final_state)) of.final_state = dense;
    of.initial_scales = of.final_scales = {};
    of.initial_state_indices = TensorRef::contiguous(starts, Dtype::kInt32, {sequences});
    if (args.final_state) of.final_state_indices = TensorRef::contiguous(ends, Dtype::kInt32, {sequences});
    of.null_index = -1;  // what starts and ends name are rows
    return of;
}

void load(const Args& args, const DenseStates& dense, const Context& context) {
    const DeviceGuard guard(context.device.index);
    launch_load_states<kAnyKey>(device_args(args), dense.states, dense.starts, dense.ends, context.stream);
}

void store(const Args& args, const DenseStates& dense, const Context& context) {
    if (!is_float8(args.final_state)) return;
    const DeviceGuard guard(context.device.index);
    launch_store_states<kAnyKey>(device_args(args), dense.states, context.stream);
}

}  // namespace cula::cuda::float8
