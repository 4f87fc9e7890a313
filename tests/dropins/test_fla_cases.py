# SPDX-License-Identifier: Apache-2.0
"""FLA's own cases (its tests/ops) at sizes for a CPU, with FLA's measure and FLA's limits."""

from __future__ import annotations

import pytest
import torch

from cula_testing import oracle, passes
from cula_testing.cases import Case, make
from cula_testing.compare import errors

FLA_CASES = [
    (Case("kda", (63,), heads=1, value_heads=1, dtype=torch.float16, scale=1.0), 0.005),
    (Case("kda", (500, 500), heads=3, value_heads=3, key_dim=60, value_dim=60, dtype=torch.float16,
          scale=1.0), 0.005),
    (Case("kda", (300, 300), heads=4, value_heads=4, key_dim=100, value_dim=100, dtype=torch.float16), 0.005),
    (Case("kda", (512, 512), value_heads=8, dtype=torch.float16, scale=0.1, gate="softplus",
          dt_bias=False), 0.005),
    (Case("kda", (160, 160), value_heads=4, scale=0.1, gate="bounded", qk_l2norm=True), 0.005),
    (Case("kda", (31, 65, 64), packed=True, key_dim=60, value_dim=60, gate="softplus",
          dtype=torch.float16), 0.005),
    (Case("kda", (100, 200, 700), packed=True, key_dim=128, value_dim=128, dtype=torch.float16), 0.005),
    (Case("gdn", (75, 75), heads=4, value_heads=4, dtype=torch.float16, scale=1.0, decay="strong"), 0.005),
    (Case("gdn", (512, 512), value_heads=8, dtype=torch.float16, scale=1.0, qk_l2norm=True), 0.005),
    (Case("gdn", (15, 85, 200), packed=True, dtype=torch.float16, gate="softplus"), 0.005),
    (Case("gdn", (700,), value_heads=4, key_dim=128, value_dim=128, beta_is_logit=True, allow_neg_eigval=True,
          dtype=torch.float16), 0.005),
    (Case("gdn2", (63,), heads=1, value_heads=1, dtype=torch.float16, scale=1.0, beta_per_value=True), 0.005),
    (Case("gdn2", (500, 500), heads=3, value_heads=3, key_dim=60, value_dim=60, dtype=torch.float16,
          scale=1.0, beta_per_value=True), 0.005),
    (Case("gdn2", (300, 300), value_heads=4, scale=0.1, gate="softplus", qk_l2norm=True, beta_per_value=True,
          dtype=torch.float16), 0.005),
    (Case("gdn2", (100, 200, 700), packed=True, key_dim=128, value_dim=128, dtype=torch.float16,
          beta_per_value=True), 0.005),
    (Case("delta_product", (63,), heads=1, value_heads=1, dtype=torch.float16, scale=0.1,
          householders=1), 0.005),
    (Case("delta_product", (500, 500), heads=4, value_heads=4, dtype=torch.float16, scale=0.1), 0.005),
    (Case("gdp", (300, 300), heads=6, value_heads=6, key_dim=100, value_dim=100, dtype=torch.float16,
          scale=1.0), 0.005),
    (Case("gdp", (300,), heads=4, value_heads=4, key_dim=128, value_dim=128, dtype=torch.float16, scale=0.1,
          householders=3, qk_l2norm=True), 0.005),
    (Case("gdp", (15, 85, 200), packed=True, dtype=torch.float16, householders=3), 0.005),
    (Case("rwkv7", (63,), heads=1, value_heads=1, dtype=torch.float16, scale=1.0), 0.005),
    (Case("rwkv7", (500, 500), heads=4, value_heads=4, key_dim=60, value_dim=60, dtype=torch.float16,
          scale=1.0, decay="slow"), 0.005),
    (Case("rwkv7", (300,), heads=4, value_heads=4, key_dim=128, value_dim=128, scale=0.1), 0.005),
    (Case("rwkv7", (15, 85, 200), packed=True, dtype=torch.float16, scale=1.0), 0.005),
    (Case("gla", (63,), heads=1, value_heads=1, dtype=torch.float16), 0.004),
    (Case("gla", (1024,), heads=4, value_heads=4, key_dim=60, value_dim=60, dtype=torch.float16,
          decay="slow"), 0.004),
    (Case("gla", (0, 0, 16), packed=True, dtype=torch.float16), 0.004),
    (Case("gla", (128,), heads=4, value_heads=4, key_dim=256, value_dim=256), 0.004),
    (Case("simple_gla", (500, 500), heads=3, value_heads=3, key_dim=60, value_dim=60,
          dtype=torch.float16), 0.004),
    (Case("lightning", (500, 500), heads=3, value_heads=3, key_dim=128, value_dim=256,
          dtype=torch.float16), 0.005),
    (Case("delta", (1000,), heads=3, value_heads=3, key_dim=128, value_dim=128, dtype=torch.float16), 0.006),
    (Case("delta", (111, 389), packed=True, heads=3, value_heads=3, key_dim=60, value_dim=60,
          dtype=torch.float16), 0.005),
]  # fmt: skip


@pytest.mark.parametrize(("case", "limit"), FLA_CASES)
def test_fla_cases(case, limit):
    inputs = make(case)
    o, sequences = oracle.run(inputs)
    for call in (passes.prefill, passes.decode):
        found = call(inputs)
        assert errors(found.o, o).rms < limit
        assert errors(found.final_state, torch.stack([s.states[-1] for s in sequences])).rms < limit
