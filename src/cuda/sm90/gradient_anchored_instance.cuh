// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/backward/launch_anchored.cuh"
#include "cuda/sm90/gradients/launch.h"
#include "cuda/sm90/gradients/rows.h"

namespace cula::cuda::sm90::gradients {

inline constexpr int kAnchoredKey = 128;

template <class T>
bool find_anchored_rows(backward::FromRows& rows, const Call& call, const DeviceArgs& a,
                        const backward::Gradients& d, const backward::GradientScratch& scratch, int count,
                        bool solves) {
    return backward::takes_anchored<T, kAnchoredKey, backward::FromRows>(call, a, d, scratch, count) &&
           encode_rows<T>(rows, a, d, solves);
}

template <class T>
void launch_anchored(const Call& call, const DeviceArgs& a, const chunked::Schedule& schedule,
                     const backward::Gradients& d, const backward::Saved<T, kAnchoredKey>& saved,
                     const backward::GradientScratch& scratch, const backward::FromRows& rows,
                     chunked::EarlyStarts& early, Update update, bool erases) {
    using backward::launch_anchored_from, backward::Reader;
    with_update(update, [&]<Update kUpdate>(UpdateConstant<kUpdate>) {
        if constexpr (kUpdate == kKernelsOf<Update::kErase>)
            if (erases)
                return launch_anchored_from<T, kAnchoredKey, kUpdate, Reader::kErase>(
                    call, a, schedule, d, saved, scratch, early, rows);
        launch_anchored_from<T, kAnchoredKey, kUpdate, Reader::kKey>(call, a, schedule, d, saved, scratch,
                                                                     early, rows);
    });
}

}  // namespace cula::cuda::sm90::gradients

#define CULA_INSTANTIATE(type, key)                                                                       \
    static_assert(key == cula::cuda::sm90::gradients::kAnchoredKey);                                      \
    template bool cula::cuda::sm90::gradients::find_anchored_rows<type>(                                  \
        cula::cuda::backward::FromRows&, const cula::cuda::Call&, const cula::cuda::DeviceArgs&,          \
        const cula::cuda::backward::Gradients&, const cula::cuda::backward::GradientScratch&, int, bool); \
    template void cula::cuda::sm90::gradients::launch_anchored<type>(                                     \
        const cula::cuda::Call&, const cula::cuda::DeviceArgs&, const cula::cuda::chunked::Schedule&,     \
        const cula::cuda::backward::Gradients&, const cula::cuda::backward::Saved<type, key>&,            \
        const cula::cuda::backward::GradientScratch&, const cula::cuda::backward::FromRows&,              \
        cula::cuda::chunked::EarlyStarts&, cula::Update, bool);
