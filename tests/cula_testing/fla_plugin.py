# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that points the operator tests of flash-linear-attention at this library.

In FLA's source tree:

    python -m pytest -p cula_testing.fla_plugin --fla-record record.json tests/ops/test_kda.py ...

While a case runs, the names that it is about stand for our drop-ins in its module: the recurrent ones in a
test of those, else the chunked ones, so that where FLA compares one with the other, FLA's own is the judge;
and so do functions that are a case's parameters.
With `--fla-through registry` nothing is replaced: `cula.integrations.fla` is registered, and FLA's dispatch
brings every call here that this library takes, also those inside FLA's functions. A case that names none of
our functions is skipped, and one that names some and never reaches this library fails. Comparisons and
limits, of outputs, states and gradients, are FLA's.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from unittest import mock

import pytest
from torch import Tensor

import cula
import cula.delta_rule
import cula.gated_delta_product
import cula.gdn
import cula.gdn2
import cula.generalized_delta_rule
import cula.gla
import cula.kda
import cula.lightning
import cula.linear_attn
import cula.retention
import cula.rwkv7
import cula.simple_gla
from cula.integrations import fla as registry

GRADIENT = re.compile(r"\s*d\w+(@.*)?")

# On the name of a case: why it says nothing about this library although it calls a function that it has.
SKIPPED = {r"test_flash_kda|test_flash_qla|test_triton_ascend": "about another back end behind FLA's name"}
# The same where a refused call has nobody to fall back on.
SKIPPED_OF_DROP_INS = {
    r"-D(320|512)-": "K is at most 256 here; such a call is refused",
}


def paged_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor,
    scale: float,
    output_final_state: bool,
    inplace_final_state: bool,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """vLLM's decode, for which FLA has no public name: a row a token, states `[H, K, V]` in a pool."""
    assert inplace_final_state
    assert not output_final_state
    assert num_accepted_tokens is None
    assert len(cu_seqlens) == q.shape[1] + 1
    gate = {"A_log": A_log, "dt_bias": None if dt_bias is None else dt_bias.view(q.shape[2], -1)}
    o, pool = cula.cula_decode(
        q, k, v, initial_state.mT, mode="kda", state_indices=ssm_state_indices, g=g, beta=beta, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        **{name: value for name, value in {**gate, "lower_bound": lower_bound}.items() if value is not None},
    )  # fmt: skip
    return o, pool.mT


DROP_INS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        cula.kda.chunk_kda,
        cula.kda.fused_recurrent_kda,
        cula.gdn.chunk_gated_delta_rule,
        cula.gdn.fused_recurrent_gated_delta_rule,
        cula.gdn2.chunk_gdn2,
        cula.gdn2.fused_recurrent_gdn2,
        cula.gated_delta_product.chunk_gated_delta_product,
        cula.rwkv7.chunk_rwkv7,
        cula.rwkv7.fused_recurrent_rwkv7,
        cula.rwkv7.fused_mul_recurrent_rwkv7,
        cula.generalized_delta_rule.chunk_dplr_delta_rule,
        cula.generalized_delta_rule.fused_recurrent_dplr_delta_rule,
        cula.gla.chunk_gla,
        cula.gla.fused_recurrent_gla,
        cula.simple_gla.chunk_simple_gla,
        cula.simple_gla.fused_chunk_simple_gla,
        cula.simple_gla.fused_recurrent_simple_gla,
        cula.lightning.chunk_lightning_attn,
        cula.lightning.fused_recurrent_lightning_attn,
        cula.linear_attn.chunk_linear_attn,
        cula.linear_attn.fused_chunk_linear_attn,
        cula.linear_attn.fused_recurrent_linear_attn,
        cula.retention.chunk_retention,
        cula.retention.fused_chunk_retention,
        cula.retention.fused_recurrent_retention,
        cula.delta_rule.chunk_delta_rule,
        cula.delta_rule.fused_recurrent_delta_rule,
    )
} | {"fused_recurrent_kda_fwd": paged_kda}


@dataclass
class Seen:
    """What one case did."""

    calls: Counter = field(default_factory=Counter)
    declined: Counter = field(default_factory=Counter)  # left to FLA: the function, and why
    compared: list[str] = field(default_factory=list)  # what is no gradient
    gradients: list[str] = field(default_factory=list)


seen = Seen()


def counted(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs):
        seen.calls[name] += 1
        return function(*args, **kwargs)

    return call


def judged(assert_close: Callable) -> Callable:
    """FLA's comparison, which is counted."""

    @functools.wraps(assert_close)
    def compare(prefix: str, *args, **kwargs):
        (seen.gradients if GRADIENT.fullmatch(prefix) else seen.compared).append(prefix.strip())
        assert_close(prefix, *args, **kwargs)

    return compare


def names(code: CodeType) -> Iterator[str]:
    """Every global name of a function, of the functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def subjects(test: str) -> dict[str, Callable]:
    """The drop-ins that a test is about."""
    return {
        name: function
        for name, function in DROP_INS.items()
        if ("recurrent" in name) == ("recurrent" in test)
    }


def reaches(
    function: Callable, module: ModuleType, wanted: set[str], visited: frozenset = frozenset()
) -> bool:
    """Whether the function uses a name that is wanted, itself or through the module's helpers."""
    for name in set(names(function.__code__)) - visited:
        if name in wanted:
            return True
        helper = getattr(module, name, None)
        own = getattr(helper, "__module__", None) == module.__name__ and hasattr(helper, "__code__")
        if own and reaches(helper, module, wanted, visited | {name}):
            return True
    return False


def handed(item: pytest.Item) -> dict[str, str]:
    """The parameters of a case that are functions which have a drop-in, by their names."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    named = {key: getattr(value, "__name__", "") for key, value in parameters.items()}
    return {key: name for key, name in named.items() if name in DROP_INS}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fla-record", type=Path, required=True, help="JSON file: what every case did")
    parser.addoption("--fla-known", type=Path, help="JSON file: a list of cases that need not run")
    parser.addoption(
        "--fla-through",
        choices=("drop-ins", "registry"),
        default="drop-ins",
        help="what brings calls here: names replaced in the tests, or FLA's own dispatch",
    )


def registered(config: pytest.Config) -> bool:
    return config.getoption("--fla-through") == "registry"


def pytest_configure(config: pytest.Config) -> None:
    if registered(config):
        registry.register()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--fla-record")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns = SKIPPED if registered(config) else SKIPPED | SKIPPED_OF_DROP_INS
    if path := config.getoption("--fla-known"):
        known = set(json.loads(path.read_text()))
        items[:] = [item for item in items if item.nodeid not in known]
    for item in items:
        wanted = registry.register() if registered(config) else subjects(item.originalname)
        if not handed(item) and not reaches(item.function, item.module, set(wanted)):
            item.add_marker(pytest.mark.skip(reason="calls no operator that this library stands in for"))
        for pattern, reason in patterns.items():
            if re.search(pattern, item.name):
                item.add_marker(pytest.mark.skip(reason=reason))


def through_registry() -> None:
    """Adds what the adapter counted since it was last asked to what the case did."""
    for (name, ran), count in registry.calls.items():
        if ran == "cula":
            seen.calls[name] += count
        else:
            seen.declined[f"{name}: {ran}"] += count
    registry.calls.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    global seen
    seen, module, ours = Seen(), item.module, {}
    registry.calls.clear()
    if not registered(item.config):
        named = subjects(item.originalname)
        ours = {name: counted(name, function) for name, function in named.items() if hasattr(module, name)}
        item.funcargs.update({key: counted(name, DROP_INS[name]) for key, name in handed(item).items()})
    try:
        with mock.patch.multiple(module, assert_close=judged(module.assert_close), **ours):
            yield
        through_registry()
        if not seen.calls and not seen.declined:
            pytest.fail("the case never reached this library")
    finally:
        through_registry()
        item.user_properties.append(("cula", json.dumps(vars(seen))))


class Recorder:
    """Collects what the workers report and writes it at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[str, dict] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        case = {"outcome": report.outcome, "reason": "", **vars(Seen())}
        case.update(json.loads(dict(report.user_properties).get("cula", "{}")))
        if report.skipped:
            case["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E  ")]
            case["reason"] = lines[0][1:].strip() if lines else report.when
        self.cases.setdefault(report.nodeid, case)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"cases": self.cases}, indent=1) + "\n")
