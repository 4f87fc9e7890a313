# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that draw cases from the whole contract."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from cula_testing import device
from cula_testing.cases import DECAYS, DELTA, FAMILY, PRODUCT, Case

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = (1, 2, 7, 16, 31, 32, 60, 64, 96, 100, 128)
WRITES = (1, 2, 2, 3, 4, 7, 16)  # of a token
LENGTHS = st.one_of(st.integers(0, 17), st.sampled_from([31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129]))


@st.composite
def cases(draw, algorithm: str, packed: bool | None = None, max_sequences: int = 3, **fixed) -> Case:
    """A small problem of the algorithm; `fixed` pins fields."""
    decay, _ = FAMILY[algorithm]
    flag = st.booleans()
    packed = draw(flag) if packed is None else packed
    if packed:
        lengths = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=max_sequences)))
    else:
        lengths = (draw(LENGTHS.filter(bool)),) * draw(st.integers(1, 2))
    ratio, key_dim, value_dim = (
        draw(st.sampled_from([1, 1, 2, 4])),
        draw(st.sampled_from(DIMS)),
        draw(st.sampled_from(DIMS)),
    )
    # The error rule compares statistics: a state of a few numbers needs more heads to have any.
    heads = max(draw(st.integers(1, 3)), 64 // (ratio * key_dim * value_dim))
    gate = (
        draw(st.sampled_from(["log_decay", "softplus", "bounded"]))
        if decay in ("channel", "token")
        else "log_decay"
    )
    logit = algorithm in DELTA and draw(flag)
    keys = draw(st.sampled_from(["random", "random", "collinear"]))
    dtype = fixed.get("dtype") or draw(st.sampled_from(DTYPES))
    drawn = {
        "algorithm": algorithm,
        "lengths": lengths,
        "packed": packed,
        "tail": draw(st.sampled_from([0, 0, 3])) if packed else 0,
        "heads": heads,
        "value_heads": heads * ratio,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "dtype": dtype,
        "cu_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "gate": gate,
        "decay": draw(st.sampled_from(DECAYS)),
        "lower_bound": draw(st.sampled_from([-5.0, -1.0, -0.1])),
        "A_log": draw(flag),
        "dt_bias": draw(flag),
        "head_decay": draw(flag),
        "gate_dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "keys": keys,
        "beta_is_logit": logit,
        "beta_per_value": draw(flag),
        # Not with collinear keys: beta near 2 then reflects along one direction at every token, and no form
        # of the recurrence ever forgets a rounding.
        "allow_neg_eigval": logit and keys == "random" and draw(flag),
        "qk_l2norm": draw(flag),
        "scale": draw(st.sampled_from([None, 1.0, 0.1])),
        "state": draw(flag),
        "pool": draw(flag),
        "state_dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        "k_first": draw(flag),
        "fused": draw(flag),
    }
    per_value, key_dim = (fixed.get(name, drawn[name]) for name in ("beta_per_value", "key_dim"))
    drawn["backend"] = draw(
        st.sampled_from(["", *device.able(dtype, beta_per_value=per_value, key_dim=key_dim)])
    )
    drawn["seed"] = draw(st.integers(0, 2**16))
    if algorithm in PRODUCT:
        backend = drawn["backend"]
        able = {n: device.able(DTYPES[0], algorithm=algorithm, writes=n) for n in WRITES}
        taken = [n for n in WRITES if not backend or backend in able[n]]
        drawn["householders"] = draw(st.sampled_from(taken))
    return Case(**{**drawn, **fixed})
