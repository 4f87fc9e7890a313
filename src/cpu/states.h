// SPDX-License-Identifier: Apache-2.0
// States of any layout and dtype in memory, to and from S in float: [K, columns] of chunks, [columns, K] of
// tokens one after another.
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

struct StateRowMemory {
    float* transposed;  // [channels, columns]: scratch
    int key_dim, channels, columns;
    int v_begin, v_count;  // the value rows of the task

    // The state of `view`, or zeros where it is absent.
    void read(float* state, const StateView& view) const {
        zero(state);
        if (!view.data) return;
        if (rows_by_value(view)) {
            for (int j = 0; j < v_count; ++j)
                load_row(state + j * channels, state_at(view, v_begin + j, 0), view.dtype, key_dim, channels);
        } else {
            zero(transposed);
            for (int c = 0; c < key_dim; ++c)
                load_row(transposed + c * columns, state_at(view, v_begin, c), view.dtype, v_count, columns);
            transpose(state, channels, transposed, columns, channels, columns);
        }
        if (view.scales) scale_rows(state, channels, scales_from(view, v_begin), view.scale_stride, v_count);
    }

    void write(const StateView& view, const float* state) const {
        if (rows_by_value(view)) {
            if (view.scales) {
                float* scaled = transposed;  // as large
                for (int x = 0; x < v_count * channels; x += kLanes) store(scaled + x, load(state + x));
                choose_row_scales(scaled, channels, scales_from(view, v_begin), view.scale_stride, v_count);
                state = scaled;
            }
            for (int j = 0; j < v_count; ++j)
                store_row(state_at(view, v_begin + j, 0), view.dtype, state + j * channels, key_dim);
        } else {
            transpose(transposed, columns, state, channels, columns, channels);
            if (view.scales)
                choose_column_scales(transposed, key_dim, columns, scales_from(view, v_begin),
                                     view.scale_stride, v_count);
            for (int c = 0; c < key_dim; ++c)
                store_row(state_at(view, v_begin, c), view.dtype, transposed + c * columns, v_count);
        }
    }

private:
    bool rows_by_value(const StateView& view) const { return view.stride_k == 1 || key_dim == 1; }
    void zero(float* matrix) const {
        for (int x = 0; x < channels * columns; x += kLanes) store(matrix + x, Vec{});
    }
};

}  // namespace cula::cpu::CULA_CPU_TARGET
