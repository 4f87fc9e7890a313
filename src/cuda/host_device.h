// SPDX-License-Identifier: Apache-2.0
// CULA_HOST_DEVICE marks functions that kernels and the host both call.
#pragma once

#if defined(__CUDACC__)
#define CULA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CULA_HOST_DEVICE inline
#endif
