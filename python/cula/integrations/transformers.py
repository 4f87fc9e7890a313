# SPDX-License-Identifier: Apache-2.0
"""cula in front of the linear attention of transformers: prefill, decode and training, on CPUs and GPUs.

    from cula.integrations import transformers as cula_transformers
    cula_transformers.register()  # before or after models are made; or CULA_TRANSFORMERS=1 in the environment
    print(cula_transformers.calls)  # what ran, and why the rest did not
    cula_transformers.unregister()

The model files of transformers (5.23) call module functions: `torch_chunk_gated_delta_rule` and
`torch_recurrent_gated_delta_rule` (Qwen3-Next, Qwen3.5, OLMo-hybrid, ...), `chunk_kimi_delta_attention` and
`recurrent_kimi_delta_attention` (Kimi-Linear, GLM5-next, Bailing-hybrid); MiniMax's Lightning attention is a
class. `register` puts a function in front of each, which runs cula or, where it declines, what was there; and
in the same files in front of `causal_conv1d_fn`, `causal_conv1d_update` and the norms, on CPUs.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import CodeType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _kernel_layers, api, gdn, kda, simple_gla
from .._explain import explain
from . import _transformers_layers
from ._calls import Calls

__all__ = ["calls", "kernel_mapping", "register", "unregister"]

_log = logging.getLogger(__name__)


def _say(function: str, ran: str) -> None:
    if ran != "cula":
        _log.info("%s runs transformers' own code: %s", function, ran)


calls = Calls(_say)
"""How often each function was called, by its name in FLA and what became of the call: `"cula"`, or the reason
why transformers' own code ran. Compiled code counts when it is traced. Prints as a table; `calls.clear()`
starts anew."""

EXPORT = "torch.export keeps transformers' own code, so that the program runs without cula"
PACKED = (
    "packed sequences are taken behind a convolution of this library or with seq_idx only: the one that runs "
    "before this call mixes neighbouring sequences"
)

# What a call of cula raises, before anything is written, when it refuses an argument.
_REFUSALS = (NotImplementedError, TypeError, ValueError)


class _Role(NamedTuple):
    """What a function of a model file computes: its name in FLA, the algorithm, the pass of the registry."""

    name: str
    algorithm: str
    pass_name: str


_ROLES = {
    "torch_chunk_gated_delta_rule": _Role("chunk_gated_delta_rule", "gdn", "prefill"),
    "torch_recurrent_gated_delta_rule": _Role("fused_recurrent_gated_delta_rule", "gdn", "decode"),
    "chunk_kimi_delta_attention": _Role("chunk_kda", "kda", "prefill"),
    "recurrent_kimi_delta_attention": _Role("fused_recurrent_kda", "kda", "decode"),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": gdn.chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": gdn.fused_recurrent_gated_delta_rule,
    "chunk_kda": kda.chunk_kda,
    "fused_recurrent_kda": kda.fused_recurrent_kda,
}
# What is around them in the same files: functions, and the classes of gated norms.
_CONVOLUTION = "causal_conv1d_fn"
_AROUND: dict[str, Callable[..., Tensor]] = {
    _CONVOLUTION: _transformers_layers.causal_conv1d_fn,
    "causal_conv1d_update": _transformers_layers.causal_conv1d_update,
}
_NORM = re.compile(r"\w+RMSNorm(Gated)?")
_LIGHTNING_CLASS = "MiniMaxLightningAttention"

# Files of transformers, and those that come with a checkpoint.
_MODEL_FILE = re.compile(r"transformers(_modules)?\.(\w+\.)*modeling_\w+")

# (where, attribute): (what was there, what is there now)
_replaced: dict[tuple[ModuleType | type, str], tuple[object, object]] = {}


def register() -> tuple[str, ...]:
    """Puts cula in front of the functions of every model file that is imported, and of those to come.

    Models need not be made anew: they look their functions up when they run. Files that come with a
    checkpoint (`trust_remote_code=True`) are found once they are imported, so call this after the model is
    made. Calling it again is harmless.

    Returns the names of what is replaced so far. Raises ImportError where transformers is not installed.

    The names are those that transformers gives to kernels from elsewhere
    (`transformers.integrations.hub_kernels`).
    """
    if "transformers" not in sys.modules and importlib.util.find_spec("transformers") is None:
        raise ImportError("cula.integrations.transformers: transformers is not installed")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name, module in list(sys.modules.items()):
        if _MODEL_FILE.fullmatch(name) and isinstance(module, ModuleType):
            _replace_in(module)
    return tuple(sorted(f"{_name_of(place)}.{attribute}" for place, attribute in _replaced))


def unregister() -> None:
    """Puts back every function, the same object as before, and leaves later imports alone.

    What another library has replaced since then stays as that library left it. Without `register` it does
    nothing. `calls` is kept.
    """
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for (place, attribute), (before, ours) in _replaced.items():
        if vars(place).get(attribute) is ours:
            setattr(place, attribute, before)
    _replaced.clear()


class _Installed(NamedTuple):
    """A layer of this package, as `kernels` asks for one (its RepositoryProtocol)."""

    layer: type[torch.nn.Module]

    def load(self) -> type[torch.nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"the installed cula ({self.layer.__name__})"


def kernel_mapping(devices: Sequence[str] = ("cpu", "cuda")) -> dict[str, dict[str, _Installed]]:
    """The same kernels by the public API of the package `kernels`, in the place of `register`:

        with kernels.use_kernel_mapping(cula_transformers.kernel_mapping()):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING)

    Four layers, from this installation and without the Hub: chunk_gated_delta_rule, chunk_kda and their
    fused_recurrent relatives, for prompts and single tokens, in every mode. `kernels` replaces functions
    that all models of a class share, counts nothing in `calls`, and a call that a layer does not take is an
    error. Convolutions and norms stay transformers', so packed sequences are refused without `seq_idx`. A
    token makes a new state.

    devices: of "cpu" and "cuda".

    transformers 5.23 makes its functions visible to `kernels` from 0.18.2 on.
    """
    if unknown := [device for device in devices if device not in ("cpu", "cuda")]:
        raise ValueError(f"devices must be of cpu and cuda, got {unknown[0]!r}")
    layers = {
        "chunk_gated_delta_rule": _kernel_layers.chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": _kernel_layers.recurrent_gated_delta_rule,
        "chunk_kda": _kernel_layers.chunk_kimi_delta_attention,
        "fused_recurrent_kda": _kernel_layers.recurrent_kimi_delta_attention,
    }
    return {name: dict.fromkeys(devices, _Installed(layer)) for name, layer in layers.items()}


def _name_of(place: ModuleType | type) -> str:
    return place.__name__ if isinstance(place, ModuleType) else f"{place.__module__}.{place.__qualname__}"


def _replace_in(module: ModuleType) -> None:
    known = vars(module)
    if not known.keys().isdisjoint((*_ROLES, _LIGHTNING_CLASS)):
        for attribute, ours in _AROUND.items():
            if (function := known.get(attribute)) is not None:
                _replace(module, attribute, function, functools.partial(_else, attribute, ours))
        for name, place in list(known.items()):
            if isinstance(place, type) and _NORM.fullmatch(name) and place.__module__ == module.__name__:
                _replace_norm(place)
    for attribute, role in _ROLES.items():
        if (function := known.get(attribute)) is not None:
            _replace(
                module, attribute, function, functools.partial(_in_front_of, role, _CONVOLUTION in known)
            )
    lightning = vars(module).get(_LIGHTNING_CLASS)
    if isinstance(lightning, type) and lightning.__module__ == module.__name__:
        _replace(lightning, "forward", vars(lightning)["forward"], _lightning)


def _replace_norm(place: type[torch.nn.Module]) -> None:
    forward = vars(place).get("forward")
    if forward is None or _replaced.get((place, "forward"), (None, None))[1] is forward:
        return
    if (ours := _transformers_layers.norm_like(place)) is not None:
        name = "rms_norm_gated" if place.__name__.endswith("Gated") else "rms_norm"
        _replace(place, "forward", forward, functools.partial(_else, name, ours))


def _replace(
    place: ModuleType | type,
    attribute: str,
    function: Callable[..., Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    if _replaced.get((place, attribute), (None, None))[1] is not function:
        ours = wrap(function)
        setattr(place, attribute, ours)
        _replaced[place, attribute] = function, ours


class _ModelFiles(MetaPathFinder):
    """Finds what the finders behind it find, and replaces functions once a model file has run."""

    def __init__(self) -> None:
        self._searched: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._searched or not _MODEL_FILE.fullmatch(fullname):
            return None
        self._searched.add(fullname)  # a finder behind this one may ask all of them
        try:
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _ModelFileLoader(spec.loader)
                    return spec
            return None
        finally:
            self._searched.discard(fullname)


class _ModelFileLoader(Loader):
    """Stands for a loader until the module runs, which then has its own loader back."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _finder in sys.meta_path:
            _replace_in(module)

    def get_code(self, fullname: str) -> CodeType | None:  # for runpy, which asks before the module runs
        return self._loader.get_code(fullname)  # type: ignore[attr-defined]


_finder = _ModelFiles()


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Of a function, or of a module: the package `kernels` makes modules of transformers' functions."""
    return tuple(inspect.signature(getattr(function, "forward", function)).parameters)


def _else(name: str, ours: Callable[..., Tensor], original: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, or `original` where that declines."""

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> object:
        reason = EXPORT
        if not torch.compiler.is_exporting():
            try:
                result = ours(*args, **kwargs)
            except _REFUSALS as error:
                reason = str(error)
            else:
                _count(name, "cula")
                return result
        if name == _CONVOLUTION and _lengths(kwargs) is not None:
            _warn_packed()
        _count(name, reason)
        return original(*args, **kwargs)

    return call


def _in_front_of(role: _Role, apart: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function for a model file that runs cula, or `original` where cula declines.

    apart: the convolution of the file is cula's too, which keeps packed sequences apart.
    """
    names = _parameters(original)[3:]

    @functools.wraps(original, updated=())
    def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> object:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        reason = _declined(role, apart, query, key, value, given)
        if reason is None:
            try:
                result = _run(role, query, key, value, given)
            except _REFUSALS as error:
                reason = str(error)
            else:
                _count(role.name, "cula")
                return result
        _count(role.name, reason)
        return original(query, key, value, *args, **kwargs)

    return call


def _run(
    role: _Role, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """What is not named here says nothing to this call: model files hand on whatever they were given."""
    g, beta, state = given["g"], given["beta"], given.get("initial_state")
    l2norm = bool(given.get("use_qk_l2norm_in_kernel", False))
    output_final_state = bool(given.get("output_final_state", False))
    cu_seqlens = _lengths(given)
    if state is not None and role.pass_name == "decode" and output_final_state and cu_seqlens is None:
        in_place = q.shape[1] == 1 and state.dtype == torch.float32 and state.shape[0] == q.shape[0]
        if in_place and not _is_differentiated(q, k, v, g, beta, state):
            # The cache's own tensor, which the layer then copies to itself.
            return api.cula_decode(
                q, k, v, state, mode=role.algorithm, g=g, beta=beta, use_qk_l2norm_in_kernel=l2norm,
                state_v_first=False,
            )  # fmt: skip
    return _FUNCTIONS[role.name](
        q, k, v, g=g, beta=beta, initial_state=None if state is None else state.float(),
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=l2norm, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _lengths(given: Mapping[str, Any]) -> Tensor | None:
    """Where sequences of a packed batch begin: most layers rename it, KDA's hand the model's name on."""
    lengths: Tensor | None = given.get("cu_seqlens")
    return given.get("cu_seq_lens_q") if lengths is None else lengths


def _is_differentiated(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def _declined(
    role: _Role, apart: bool, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]
) -> str | None:
    """Why cula does not take the call, as far as it can be said before, or None."""
    if torch.compiler.is_exporting():
        return EXPORT
    # A convolution that keeps sequences apart needs seq_idx, and that of transformers raises when it gets it.
    if not apart and _lengths(given) is not None and given.get("seq_idx") is None:
        _warn_packed()
        return PACKED
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    gradients = _is_differentiated(q, k, v, given["g"], given["beta"], given.get("initial_state"))
    return _declined_by_registry(role, q, k.shape[-1], q.shape[2], v.shape[2], v.shape[-1], gradients)


def _declined_by_registry(
    role: _Role, x: Tensor, key_dim: int, heads: int, value_heads: int, value_dim: int, gradients: bool
) -> str | None:
    reason = None
    for pass_name in (role.pass_name, "backward") if gradients else (role.pass_name,):
        reason = reason or _sentence(
            role.algorithm, pass_name, x.device.type, x.device.index, x.dtype, heads, value_heads, key_dim,
            value_dim,
        )  # fmt: skip
    return reason


@functools.cache
def _registry_sentence(
    algorithm: str,
    pass_name: str,
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> str | None:
    """The registry's, on why no kernel takes a problem; None if one does."""
    if device_type not in ("cpu", "cuda"):
        return f"runs on CPU and CUDA tensors, these are on {device_type}"
    try:
        rows = explain(
            algorithm, pass_name, tokens=64, heads=heads, value_heads=value_heads, key_dim=key_dim,
            value_dim=value_dim, dtype=dtype,
            device=device_type if device_index is None else f"{device_type}:{device_index}",
        )  # fmt: skip
    except _REFUSALS as error:
        return str(error)
    # The oracle, which is made to be exact, is no kernel to run a model on.
    if rows.chosen is not None and not rows.chosen.startswith("reference"):
        return None
    families = "cpu" if device_type == "cpu" else "sm"
    # The last target of a device asks for least.
    reason = [row.reason for row in rows if row.target.startswith(families)][-1]
    return f"{reason} ({rows.note})" if rows.note else reason


def _count(name: str, outcome: str) -> None:
    if torch.compiler.is_compiling():
        _count_trace(name, outcome)
    else:
        _count_now(name, outcome)


def _count_now(name: str, outcome: str) -> bool:
    calls.add(name, outcome)
    return True


def _warn_now() -> bool:
    """The code that runs instead raises in some models, and mixes sequences silently in others."""
    warnings.warn(f"cula declines a call: {PACKED}", UserWarning, stacklevel=2)
    return True


# Dynamo calls these while it traces, and takes what they return for constants.
_constant: Callable[[Any], Any] = torch.compiler.assume_constant_result
_count_trace = _constant(_count_now)
_warn_packed = _constant(_warn_now)


@_constant
def _sentence(*problem: Any) -> str | None:
    return _registry_sentence(*problem)


_LIGHTNING = _Role("lightning_attn", "lightning", "prefill")
# What the layer's `forward` may be given, by name. The cache was past_key_values before transformers 5.24.
_CACHES = ("cache", "past_key_values")
_LIGHTNING_ARGUMENTS = ("position_embeddings", "attention_mask", *_CACHES, "kwargs")


class _LightningLayer(Protocol):
    """What `MiniMaxLightningAttention` has."""

    layer_idx: int
    num_attention_heads: int
    head_dim: int
    slope_rate: Tensor
    act_fn: Callable[[Tensor], Tensor]
    qkv_proj: torch.nn.Linear
    norm: torch.nn.Module
    output_gate: torch.nn.Linear
    out_proj: torch.nn.Linear


def _lightning(original: Callable[..., Any]) -> Callable[..., Any]:
    """MiniMax's layer, whose recurrence is part of its `forward`: the state after token t is that before it,
    shrunk by exp(-slope), plus k_t v_t; q reads it without a scale."""
    names = _parameters(original)[2:]

    @functools.wraps(original, updated=())
    def forward(layer: _LightningLayer, hidden_states: Tensor, *args: Any, **kwargs: Any) -> object:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        reason = _declined_lightning(layer, hidden_states, names, given)
        if reason is None:
            try:
                result = _run_lightning(layer, hidden_states, given)
            except _REFUSALS as error:
                reason = str(error)
            else:
                _count(_LIGHTNING.name, "cula")
                return result
        _count(_LIGHTNING.name, reason)
        return original(layer, hidden_states, *args, **kwargs)

    return forward


def _declined_lightning(
    layer: _LightningLayer, hidden_states: Tensor, names: Sequence[str], given: Mapping[str, Any]
) -> str | None:
    if torch.compiler.is_exporting():
        return EXPORT
    for name in names:
        if name not in _LIGHTNING_ARGUMENTS and given.get(name) is not None:
            return f"an argument {name} of this layer is not known here"
    if _lengths(given) is not None:
        return "MiniMax's layers do not read cu_seq_lens_q: a packed batch is one sequence for them"
    heads, dim = layer.num_attention_heads, layer.head_dim
    gradients = _is_differentiated(hidden_states, layer.qkv_proj.weight)
    return _declined_by_registry(_LIGHTNING, hidden_states, dim, heads, heads, dim, gradients)


def _run_lightning(
    layer: _LightningLayer, hidden_states: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    projected = layer.act_fn(layer.qkv_proj(hidden_states))
    if (mask := given.get("attention_mask")) is not None:
        projected = projected * mask.unsqueeze(-1).to(projected.dtype)  # padding writes nothing
    # Not unflatten(), which torch.compile does not follow where a default device is set.
    shape = (*projected.shape[:-1], layer.num_attention_heads, 3, layer.head_dim)
    q, k, v = projected.reshape(shape).unbind(-2)
    cache = next((given[name] for name in _CACHES if given.get(name) is not None), None)
    state = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    one_token = q.shape[1] == 1 and state is not None
    function = simple_gla.fused_recurrent_simple_gla if one_token else simple_gla.chunk_simple_gla
    o, state = function(
        q, k, v, g_gamma=-layer.slope_rate.flatten().float(), scale=1.0,
        initial_state=None if state is None else state.float(), output_final_state=True,
    )  # fmt: skip
    assert state is not None  # it was asked for
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, state)
    gated = torch.sigmoid(layer.output_gate(hidden_states)) * layer.norm(o.flatten(-2))
    return layer.out_proj(gated), state
