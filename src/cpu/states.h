// SPDX-License-Identifier: Apache-2.0
// States of any layout and dtype in memory, to and from S [K, columns] in float.
#pragma once

#include "cpu/inputs.h"
#include "cpu/scales.h"

namespace cula::cpu::CULA_CPU_TARGET {

struct StateMemory {
    float* transposed;  // [columns, channels]: scratch
    int key_dim, channels, columns;
    int v_begin, v_count;  // the value columns of the task

    // The state of `view`, or zeros where it is absent.
    void read(float* state, const StateView& view) const {
        zero(state);
        if (view.data && rows_by_value(view)) {
            zero(transposed);
            for (int j = 0; j < v_count; ++j)
                load_row(transposed + j * channels, state_at(view, v_begin + j, 0), view.dtype, key_dim,
                         channels);
            transpose(state, columns, transposed, channels, columns, channels);
        } else if (view.data) {
            for (int c = 0; c < key_dim; ++c)
                load_row(state + c * columns, state_at(view, v_begin, c), view.dtype, v_count, columns);
        }
        if (view.scales)
            scale_columns(state, key_dim, columns, scales_from(view, v_begin), view.scale_stride, v_count);
    }

    void write(const StateView& view, const float* state) const {
        if (rows_by_value(view)) {
            transpose(transposed, channels, state, columns, channels, columns);
            if (view.scales)
                choose_row_scales(transposed, channels, scales_from(view, v_begin), view.scale_stride,
                                  v_count);
            for (int j = 0; j < v_count; ++j)
                store_row(state_at(view, v_begin + j, 0), view.dtype, transposed + j * channels, key_dim);
        } else {
            if (view.scales) {
                float* scaled = transposed;  // as large
                for (int x = 0; x < channels * columns; x += kLanes) store(scaled + x, load(state + x));
                choose_column_scales(scaled, key_dim, columns, scales_from(view, v_begin), view.scale_stride,
                                     v_count);
                state = scaled;
            }
            for (int c = 0; c < key_dim; ++c)
                store_row(state_at(view, v_begin, c), view.dtype, state + c * columns, v_count);
        }
    }

private:
    bool rows_by_value(const StateView& view) const { return view.stride_k == 1 || key_dim == 1; }
    void zero(float* matrix) const {
        for (int x = 0; x < channels * columns; x += kLanes) store(matrix + x, Vec{});
    }
};

}  // namespace cula::cpu::CULA_CPU_TARGET
