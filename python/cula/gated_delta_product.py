# SPDX-License-Identifier: Apache-2.0
"""DeltaProduct, with gates or without, under the name and conventions of FLA (`fla.ops.gated_delta_product`).
The function is differentiable as `cula.api` says."""

from __future__ import annotations

from torch import Tensor

from . import _decays, _fla, _ops, _passes
from ._passes import Outputs, dense

__all__ = ["chunk_gated_delta_product"]


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.gated_delta_product.chunk_gated_delta_product`: a whole prompt of tokens that write
    `num_householder` times each (arXiv:2502.10297).

    q `[B, T, H, K]`, k `[B, T n, H, K]`, v `[B, T n, HV, V]` and beta `[B, T n, HV]` with n of
    `num_householder`, write j of token t in row t n + j; g `[B, T, HV]`, the log decay, None for none. Heads
    may be grouped, and q, k, v may be float32, which FLA's may not. States are `[N, HV, K, V]`, the final one
    float32; `cu_seqlens` counts tokens of q. Tokens of no sequence give zeros. `cu_seqlens_cpu` changes
    nothing here. With `cp_context`, FLA's `FLACPContext`, the tokens are the rank's, as in
    `cula.dist.cula_gdp_cp`; g may be None there too, which FLA refuses. Errors are FLA's: AssertionError,
    which is a ValueError too, for a shape.
    """
    try:
        _fla.check_sizes("chunk_gated_delta_product", num_householder=num_householder)
        rows = (q.shape[0], q.shape[1] * num_householder)
        of_k, of_v = (*rows, *q.shape[2:]), (*rows, *v.shape[2:])
        _fla.require(num_householder > 0, "num_householder must be at least 1, got {}", num_householder)
        _fla.require(k.shape == of_k, "k must have shape {}, got {}", of_k, tuple(k.shape))
        _fla.require(v.shape == of_v, "v must have shape {}, got {}", of_v, tuple(v.shape))
        _fla.require(beta.shape == of_v[:3], "beta must have shape {}, got {}", of_v[:3], tuple(beta.shape))
        _fla.require(
            g is None or g.shape == (*q.shape[:2], v.shape[2]),
            "g must have shape {}, got {}",
            (*q.shape[:2], v.shape[2]),
            None if g is None else tuple(g.shape),
        )
        if cp_context is not None:
            cu_seqlens = _fla.cu_seqlens_of(cp_context, initial_state, output_final_state)
        _fla.sequences(q, cu_seqlens, initial_state)
        if cp_context is not None:
            return _fla.along(
                "chunk_gated_delta_product", "gdp", cp_context, q, k, v, g, beta, _passes.LOG_DECAY, scale,
                use_qk_l2norm_in_kernel, False, False,
            )  # fmt: skip
        o, final_state, _ = _passes.forward(
            _ops.prefill, _decays.algorithm_of("gdp", g, None), q, k, v, g, beta, scale=scale,
            qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, states=dense(initial_state, False),
            outputs=Outputs(None, output_final_state),
        )  # fmt: skip
        return o, final_state
    except Exception as error:
        _fla.refuse_types(chunk_gated_delta_product, locals(), error)
        raise
