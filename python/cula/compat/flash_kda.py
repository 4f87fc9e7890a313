# SPDX-License-Identifier: Apache-2.0
"""FlashKDA's two functions: `from cula.compat import flash_kda` in place of `import flash_kda`.

`fwd` writes into its arguments, and so is not differentiable.
"""

from __future__ import annotations

from torch import Tensor

from .. import _fla, _ops, _passes

__all__ = ["fwd", "get_workspace_size"]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """KDA prefill; writes `out` and `final_state`.

    q, k, g `[B, T, H, K]`, v and out `[B, T, H, V]`; g raw, beta `[B, T, H]` logits: the l2 norm, the bounded
    gate `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))` and the sigmoid are applied inside. A_log `[H]`,
    dt_bias `[H, K]`, lower_bound below 0; states `[N, H, V, K]`, of one dtype where both are given; with
    cu_seqlens, int64 or int32, B is 1.
    """
    try:
        if initial_state is not None and final_state is not None and initial_state.dtype != final_state.dtype:
            raise ValueError(
                f"initial_state and final_state must have one dtype, "
                f"got {initial_state.dtype} and {final_state.dtype}"
            )
        _passes.check_inputs(_ops.prefill, q, k, v)
        _passes.require_tensor("out", out)  # the operator would make what is left out
        options = _passes.pack("kda", "bounded", True, True, False, scale, lower_bound, -1, None)
        _ops.prefill.write(
            q, k, v, options, o=out, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            final_state=final_state, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        )  # fmt: skip
    except Exception as error:
        _fla.refuse_types(fwd, locals(), error)
        raise


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of workspace that a caller has to provide: none, it comes from PyTorch's allocator inside the
    call."""
    _fla.check_sizes("get_workspace_size", T_total=T_total, H=H, N=N)
    return 0
