# SPDX-License-Identifier: Apache-2.0
"""`cula.integrations.fla` on a stand-in of FLA's registries: what it puts where, and takes out again.

FLA itself runs in fla_layers.py.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

import cula
from cula.integrations import _on_import, fla
from cula.integrations._calls import MOST_REASONS, OTHERS, Calls
from cula.integrations._functions import Substitute
from cula_testing import fla_stand_in
from cula_testing.process import run_python

pytestmark = pytest.mark.cpu_only("the adapter asks FLA, and no kernel")


@pytest.fixture(params=["0.5", "0.6"])
def stand_in(request, monkeypatch):
    """Puts the stand-in there, and takes out of it what a test registered."""

    def install(**options: bool) -> ModuleType:
        fla_stand_in.install(monkeypatch, request.param, **options)
        return sys.modules["fla"]

    monkeypatch.delenv("FLA_CULA", raising=False)
    fla.calls.clear()
    yield install
    fla.unregister()
    fla.calls.clear()


def everything() -> dict[tuple[str, str], object]:
    """Every attribute of every module of the stand-in, and what its registries hold."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "fla"}
    found = {(name, key): value for name, module in modules.items() for key, value in vars(module).items()}
    for key, value in list(found.items()):
        if key[1] in ("_operation_registries", "_function_registries"):
            registries = value
        elif key[1] == "BackendRegistry":
            registries = value._registries
        else:
            continue
        found[(*key, "keys")] = list(registries)
        for name, registry in registries.items():
            found[(*key, str(name))] = (registry, dict(registry._backends), set(registry._logged))
    return found


def logged() -> set[str]:
    return {
        each
        for value in everything().values()
        if isinstance(value, tuple)
        for part in value[2:]
        for each in part
    }


def kda(**options: object) -> dict[str, object]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    return {"q": q, "k": k, "v": v, "g": -torch.rand(1, 9, 2, 16), "beta": torch.rand(1, 9, 2), **options}


def declined() -> dict[str, object]:
    """A call that these kernels do not take."""
    return kda() | {"k": torch.randn(1, 9, 2, 16, dtype=torch.float64)}


def operator(name: str):
    return next(
        getattr(sys.modules[f"fla.ops.{operation}"], name)
        for operation, names in fla_stand_in.OPERATORS.items()
        if name in names
    )


def test_every_function_gets_here(stand_in):
    stand_in()
    how = fla.register()
    names = {name for names in fla_stand_in.OPERATORS.values() for name in names}
    dispatched = {"chunk_kda", "chunk_gated_delta_rule"}
    assert {name: how[name] for name in names} == {
        name: "dispatched" if name in dispatched else "wrapped" for name in names
    }
    x = kda()
    g, no_beta = x["g"][..., 0], {name: x[name] for name in "qkv"}
    no_rule = {"k": x["k"], "v": x["v"], "a": torch.rand(1, 9, 2, 16), "b": -torch.rand(1, 9, 2, 16)}
    given = {
        "gated_delta_rule": {**x, "g": g},
        "kda": x,
        "gdn2": {**no_beta, "g": x["g"], "b": torch.rand(1, 9, 2, 16), "w": torch.rand(1, 9, 2, 16)},
        "gated_delta_product": {**x, "q": x["q"][:, :3], "g": g[:, :3], "num_householder": 3},
        "rwkv7": {**no_rule, "r": x["q"], "w": x["g"]},
        "fused_mul_recurrent_rwkv7": {
            **{name: no_rule[name] for name in "kva"},
            "r": x["q"],
            "w": x["g"],
            "kk": x["k"],
        },
        "generalized_delta_rule.dplr": {**no_rule, "q": x["q"], "gk": x["g"]},
        "chunk_gla": {**no_beta, "g": x["g"]},
        "fused_recurrent_gla": {**no_beta, "gk": x["g"]},
        "simple_gla": {**no_beta, "g": g},
        "delta_rule": {**no_beta, "beta": x["beta"]},
        "lightning_attn": {**no_beta, "layer_idx": 1, "num_layers": 3},
        "linear_attn": no_beta,
        "retention": no_beta,
    }
    for operation, functions in fla_stand_in.OPERATORS.items():
        for name in functions:
            kwargs = given[name] if name in given else given[operation]
            package = getattr(cula, fla_stand_in.OURS.get(operation, operation))
            o, _ = operator(name)(**kwargs)
            assert torch.equal(o, getattr(package, name)(**kwargs)[0]), name
            assert fla.calls[name, "cula"] == 1, name


def test_a_version_without_an_operator(stand_in, monkeypatch):
    stand_in()
    monkeypatch.delitem(sys.modules, "fla.ops.gdn2")
    how = fla.register()
    assert "chunk_kda" in how
    assert "chunk_gdn2" not in how


def test_names_that_other_modules_imported(stand_in, monkeypatch):
    stand_in()
    user = ModuleType("user_of_fla")
    user.delta = operator("chunk_delta_rule")
    monkeypatch.setitem(sys.modules, "user_of_fla", user)
    before = user.delta
    fla.register()
    assert user.delta is not before
    assert user.delta is sys.modules["fla.layers"].chunk_delta_rule is operator("chunk_delta_rule")
    later = ModuleType("later_user_of_fla")
    later.delta = operator("chunk_delta_rule")
    monkeypatch.setitem(sys.modules, "later_user_of_fla", later)
    fla.unregister()
    assert user.delta is later.delta is before


@pytest.mark.parametrize("dead", [False, True])
def test_unregister_leaves_fla_as_it_was(stand_in, dead):
    stand_in(dead=dead)
    before = everything()
    for _ in range(2):
        how = fla.register()
        among = everything()
        assert among != before
        assert fla.register() == how
        assert everything() == among, "a second register() changes nothing"
        assert not logged(), "FLA has logged no call that nobody made"
        assert not isinstance(operator("chunk_kda")(**kda()), str)
        assert isinstance(operator("chunk_kda")(**declined()), str)
        assert len(logged()) == (0 if dead else 2)
        fla.unregister()
        after = everything()
        assert after.keys() == before.keys()
        assert all(after[key] == before[key] for key in before)
        assert isinstance(operator("chunk_kda")(**kda()), str)
        fla.unregister()


def test_where_dispatch_does_not_work(stand_in):
    """PyTorch before 2.11 unwraps FLA's dispatch; the functions are wrapped here then."""
    stand_in(dead=True)
    assert set(fla.register().values()) <= {"wrapped", "plain PyTorch"}
    x = kda()
    assert torch.equal(operator("chunk_kda")(**x)[0], cula.kda.chunk_kda(**x)[0])


def test_dispatch_that_is_disabled(stand_in):
    stand_in(disabled=True)
    before = everything()
    with pytest.warns(UserWarning, match="FLA_DISABLE_BACKEND_DISPATCH=1 was set"):
        assert fla.register() == {}
    assert everything() == before


@pytest.mark.parametrize(
    ("name", "refused"), [("chunk_kda", {"k": torch.float16}), ("fused_recurrent_kda", {"k": torch.int32})]
)
def test_what_is_declined(stand_in, name, refused):
    """FLA's own code runs, and the record has the sentence of the drop-in itself."""
    stand_in()
    fla.register()
    of_dtype = kda() | {key: kda()[key].to(dtype) for key, dtype in refused.items()}
    for given in (of_dtype, kda(misspelt=True), kda(head_first=True), kda() | {"k": torch.ones(3)}):
        fla.calls.clear()
        with pytest.raises((ValueError, TypeError, AssertionError, Warning)) as refusal:
            getattr(cula.kda, name)(**given)
        assert operator(name)(**given) == f"FLA's own {name}"
        assert dict(fla.calls) == {(name, str(refusal.value)): 1}
    assert str(refusal.value) in repr(fla.calls)


def test_gradients_that_are_not_there(stand_in):
    stand_in()
    fla.register()
    x = kda()
    given = {name: x[name] for name in "qkv"} | {"g_gamma": torch.zeros(2, requires_grad=True)}
    assert operator("chunk_simple_gla")(**given) == "FLA's own chunk_simple_gla"
    ((_, sentence),) = fla.calls
    assert "g_gamma" in sentence


def test_options_of_reversed_recurrences(stand_in):
    stand_in()
    fla.register()
    given = {name: value for name, value in kda().items() if name in "qkv"}
    assert operator("fused_recurrent_gla")(**given, reverse=True) == "FLA's own fused_recurrent_gla"
    assert fla.calls["fused_recurrent_gla", "reverse=True is not built: flip the tensors along T"] == 1


def test_switch(stand_in, monkeypatch):
    """FLA_CULA is read at every call, of functions that FLA dispatches and of those that it does not."""
    stand_in()
    monkeypatch.setenv("FLA_CULA", "0")
    assert fla.register()["chunk_kda"] == "dispatched"
    x = kda()
    for name in ("chunk_kda", "fused_recurrent_kda"):
        assert operator(name)(**x) == f"FLA's own {name}"
    assert not fla.calls
    monkeypatch.setenv("FLA_CULA", "1")
    for name in ("chunk_kda", "fused_recurrent_kda"):
        assert not isinstance(operator(name)(**x), str)
    assert dict(fla.calls) == {("chunk_kda", "cula"): 1, ("fused_recurrent_kda", "cula"): 1}


def test_switch_where_dispatch_does_not_work(stand_in, monkeypatch):
    stand_in(dead=True)
    fla.register()
    monkeypatch.setenv("FLA_CULA", "0")
    assert operator("chunk_kda")(**kda()) == "FLA's own chunk_kda"


def test_gradients(stand_in):
    stand_in()
    fla.register()
    found = []
    for function in (operator("chunk_kda"), cula.kda.chunk_kda):
        x = {name: value.clone().requires_grad_() for name, value in kda().items()}
        o, state = function(*x.values(), output_final_state=True)
        (o.square().sum() + state.square().sum()).backward()
        found.append([each.grad for each in x.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert dict(fla.calls) == {("chunk_kda", "cula"): 1}


def test_tokens_of_several_ranks(stand_in, monkeypatch):
    """`cp_context` reaches the drop-in, which takes it or says what is missing."""
    stand_in()
    context = SimpleNamespace(cu_seqlens=torch.tensor([0, 9]))
    seen = []

    def along(name: str, _mode: str, cp_context: object, *_: object) -> tuple[str, None]:
        seen.append((name, cp_context))
        return "of this rank", None

    fla.register()
    assert operator("chunk_kda")(**kda(cp_context=SimpleNamespace(cu_seqlens=None))) == "FLA's own chunk_kda"
    assert fla.calls["chunk_kda", "cu_seqlens is required for CP: cp_context must have it"] == 1
    monkeypatch.setattr("cula._fla.along", along)
    x = kda(cp_context=context)
    assert operator("chunk_kda")(**x) == ("of this rank", None)
    assert operator("chunk_gated_delta_rule")(**{**x, "g": x["g"][..., 0]}) == ("of this rank", None)
    assert seen == [("chunk_kda", context), ("chunk_gated_delta_rule", context)]


def test_other_backends_of_fla(stand_in):
    """One of a better priority comes first, one of a worse one never, and one that had this name comes
    back."""
    stand_in()
    backends = sys.modules.get("fla.backends") or sys.modules["fla.ops.backends"]
    if hasattr(backends, "_function_registries"):
        (registry,) = backends._function_registries.values()
    else:
        registry = backends.BackendRegistry._registries["kda"]
    others = {
        name: type(name, (fla_stand_in.BaseBackend,), {"backend_type": kind, "priority": priority})()
        for name, kind, priority in (("first", "first", 0), ("later", "later", 3), ("namesake", "cula", 5))
    }
    for name, backend in others.items():
        backend.chunk_kda = lambda *_, name=name, **__: name
        if name != "first":
            registry.register(backend)
    fla.register()
    assert not isinstance(operator("chunk_kda")(**kda()), str)
    assert operator("chunk_kda")(**declined()) == "later"
    registry.register(others["first"])
    assert operator("chunk_kda")(**kda()) == "first"
    fla.unregister()
    assert registry._backends == {each.backend_type: each for each in others.values()}


def test_import_that_registers(stand_in, monkeypatch):
    """With CULA_FLA=1 a call of register() that imports FLA has been overtaken when that returns."""
    stand_in()
    before = everything()
    import_module = importlib.import_module

    how = []

    def importing(name: str) -> ModuleType:
        if name == "fla" and not how:
            how.append({})
            how[0] = fla.register()
        return import_module(name)

    monkeypatch.setattr(fla.importlib, "import_module", importing)
    assert fla.register() == how[0]
    assert fla._registered["chunk_gla"] == "wrapped"
    fla.unregister()
    assert everything() == before


def test_register_without_fla(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match=r"needs flash-linear-attention 0\.5 or later, and Triton"):
        fla.register()
    fla.unregister()


def test_plain_parts(stand_in, monkeypatch):
    """They are put in only where PyTorch finds no accelerator."""
    stand_in()
    fla.register()
    assert fla._registered.get("l2norm") == (None if torch.accelerator.is_available() else "plain PyTorch")
    fla.unregister()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert "l2norm" not in fla.register()
    fla.unregister()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    fla.register()
    l2norm = sys.modules["fla.modules.l2norm"].l2norm
    assert torch.allclose(l2norm(torch.full((1, 4), 3.0)), torch.full((1, 4), 0.5))
    assert l2norm(torch.ones(1, 4, device="meta")) == "FLA's own l2norm"
    assert set(fla.calls) == {
        ("l2norm", "PyTorch"),
        ("l2norm", "plain PyTorch stands in for FLA's Triton on CPU tensors alone, this one is on meta"),
    }


@pytest.mark.parametrize("mode", ["kda", "gdn2"])
@pytest.mark.parametrize("gate", ["log_decay", "softplus", "bounded"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_paged_states(gate, drafts, mode):
    """FLA's paged decode: each row starts from the slot of its last accepted token, and leaves a state per
    token."""
    torch.manual_seed(1)
    rows, heads, dim, slots = 4, 2, 16, 20
    q, k, v = (torch.randn(rows, drafts, heads, dim) for _ in range(3))
    g, beta = -torch.rand(rows, drafts, heads, dim), torch.rand(rows, drafts, heads)
    strengths = (beta,) if mode == "kda" else tuple(torch.rand(2, rows, drafts, heads, dim))
    pool = torch.randn(slots, heads, dim, dim)
    table = torch.randperm(slots, dtype=torch.int32)[: rows * drafts].view(rows, drafts)
    accepted = torch.randint(1, drafts + 1, (rows,), dtype=torch.int32)
    options = {"use_qk_l2norm_in_kernel": True}
    if gate != "log_decay":
        options |= {"use_gate_in_kernel": True}
        options |= {"use_beta_sigmoid_in_kernel": True} if mode == "kda" else {}
    if gate == "bounded":
        options |= {"lower_bound": -5.0, "A_log": torch.randn(heads), "dt_bias": torch.randn(heads * dim)}
    start = pool[table[torch.arange(rows), accepted - 1].long()]
    states, outputs = [], []
    for t in range(drafts):
        one = cula.kda.fused_recurrent_kda if mode == "kda" else cula.gdn2.fused_recurrent_gdn2
        o, start = one(
            *(x[:, t : t + 1] for x in (q, k, v, g, *strengths)),
            initial_state=start,
            output_final_state=True,
            **options,
        )
        states.append(start)
        outputs.append(o)
    indices = table[:, 0] if drafts == 1 else table
    number = {} if drafts == 1 else {"num_accepted_tokens": accepted}
    paged = {"kda": fla._paged_kda, "gdn2": fla._paged_gdn2}[mode]
    o, final = paged(
        q, k, v, g, *strengths, initial_state=pool, ssm_state_indices=indices, inplace_final_state=True,
        **number, **options,
    )  # fmt: skip
    assert final is pool
    torch.testing.assert_close(o, torch.cat(outputs, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool[table.long()], torch.stack(states, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left_out", ["ssm_state_indices", "initial_state", "inplace_final_state"])
def test_dense_states_of_the_paged_function(left_out):
    given = {
        "ssm_state_indices": torch.zeros(1, dtype=torch.int32),
        "initial_state": torch.zeros(1, 2, 16, 16),
    }
    given[left_out] = False if left_out == "inplace_final_state" else None
    with pytest.raises(NotImplementedError, match="runs here where a pool is updated in place"):
        fla._paged_kda(**kda(), **given)


class TestSubstitute:
    @staticmethod
    def theirs(x, scale=2.0, new=None, *, other=1):
        raise AssertionError(f"not called here, with {x}, {scale}, {new}, {other}")

    @staticmethod
    def ours(x, scale=1.0, *, other=1):
        if x == "wrong":
            raise ValueError("x must be right")
        if x == "no memory":
            raise MemoryError("none left")
        return x, scale, other

    @pytest.fixture
    def substitute(self):
        return Substitute("function", self.theirs, self.ours, Calls())

    @pytest.mark.parametrize(
        ("args", "kwargs", "made"),
        [
            ((5,), {}, (5, 2.0, 1)),  # their default, where ours differs
            ((5, 3.0), {}, (5, 3.0, 1)),
            ((5, 3.0, None), {"other": 4}, (5, 3.0, 4)),  # what is new there may say nothing
            ((), {"x": 5, "new": None}, (5, 2.0, 1)),
        ],
    )
    def test_names(self, substitute, args, kwargs, made):
        assert substitute.accepts(args, kwargs) == (True, None)
        assert substitute.run(args, kwargs) == made
        assert dict(substitute.calls) == {("function", "cula"): 1}

    @pytest.mark.parametrize(
        ("args", "kwargs", "sentence"),
        [
            (("wrong",), {}, "x must be right"),
            ((5,), {"new": 1}, "unexpected keyword argument 'new'"),
            ((5,), {"x": 5}, "multiple values for argument 'x'"),
            ((5, 1.0, None, 1), {}, "takes 3 positional arguments but 4 were given"),
        ],
    )
    def test_refusals(self, substitute, args, kwargs, sentence):
        accepted, reason = substitute.accepts(args, kwargs)
        assert not accepted
        assert sentence in reason
        assert dict(substitute.calls) == {("function", reason): 1}

    def test_errors_that_are_no_refusals(self, substitute):
        assert substitute.accepts(("no memory",), {}) == (True, None)
        with pytest.raises(MemoryError, match="none left"):
            substitute.run(("no memory",), {})

    def test_what_was_made_is_of_that_call(self, substitute):
        substitute.accepts((5,), {"other": 6})
        assert substitute.run((7,), {"other": 6}) == (7, 2.0, 6)
        substitute.accepts((5,), {"other": 6})
        assert substitute.run((5,), {"other": 7}) == (5, 2.0, 7)
        assert substitute.run((8,), {}) == (8, 2.0, 1)

    def test_threads(self, substitute):
        """Each has what it asked for, and no call is lost from the record."""
        wrong = []

        def work(number: int) -> None:
            for other in range(200):
                x = (number, other)
                assert substitute.accepts((x,), {})[0]
                if substitute.run((x,), {}) != (x, 2.0, 1):
                    wrong.append(x)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert substitute.calls["function", "cula"] == 1600


def test_record_of_many_reasons():
    calls = Calls()
    for number in range(MOST_REASONS + 5):
        calls.add("function", f"reason {number}")
    assert len(calls) == MOST_REASONS + 1
    assert calls["function", OTHERS] == 5
    assert calls.get(("function", "never"), 0) == 0


def test_register_when_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    seen = []
    before = list(sys.meta_path)
    try:
        _on_import.when_imported("imported_later", lambda: seen.append(sys.modules["imported_later"].value))
        assert importlib.util.find_spec("json") is not None
        found = importlib.util.find_spec("imported_later")  # as transformers looks whether FLA is there
        assert found.loader.get_source("imported_later") == "value = 1\n"
        assert not seen
        module = importlib.import_module("imported_later")
        assert seen == [1]
        assert sys.meta_path == before
        assert (
            type(module.__loader__)
            is type(module.__spec__.loader)
            is type(inspect.getmodule(run_python).__loader__)
        )
        _on_import.when_imported("imported_later", lambda: seen.append(2))
        assert seen == [1, 2]

        def fails() -> None:
            raise ImportError("no Triton here")

        with pytest.warns(UserWarning, match="cula is not registered: no Triton here"):
            _on_import.when_imported("imported_later", fails)
        _on_import.when_imported("not_there_yet", lambda: seen.append(3))
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("not_there_yet")
        (tmp_path / "not_there_yet.py").write_text("")
        importlib.invalidate_caches()
        importlib.import_module("not_there_yet")
        assert seen == [1, 2, 3]
        (tmp_path / "broken_at_first.py").write_text("raise ValueError('at first')")
        forget = _on_import.when_imported("broken_at_first", lambda: seen.append(5))
        _on_import.when_imported("broken_at_first", lambda: seen.append(4))
        with pytest.raises(ValueError, match="at first"):
            importlib.import_module("broken_at_first")
        forget()
        (tmp_path / "broken_at_first.py").write_text("")
        importlib.import_module("broken_at_first")
        assert seen == [1, 2, 3, 4]
        assert sys.meta_path == before
    finally:
        sys.meta_path[:] = before
        for name in ("imported_later", "not_there_yet", "broken_at_first"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(("value", "waits"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_environment_variable(value, waits):
    """CULA_FLA=1 waits for `import fla`; without it `import cula` imports no adapter."""
    program = (
        "import sys, cula; print(any(type(each).__module__ == 'cula.integrations._on_import' "
        "for each in sys.meta_path), 'cula.integrations' in sys.modules, 'fla' in sys.modules)"
    )
    environment = {} if value is None else {"CULA_FLA": value}
    assert run_python("-c", program, **environment).split() == [str(waits), str(waits), "False"]


def test_lazy_names():
    program = "import cula; print(cula.integrations.fla.register.__name__, 'integrations' in dir(cula))"
    assert run_python("-c", program).split() == ["register", "True"]
