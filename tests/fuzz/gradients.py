# SPDX-License-Identifier: Apache-2.0
"""What a backward pass has to give: the recurrence of `oracle.py` walked from its end to its beginning, in
float64. Nothing here comes from the library or from PyTorch's autograd."""

from __future__ import annotations

import numpy as np

from fuzz.oracle import LARGEST_FP16, Tokens, sigmoid, softplus, start, wide
from fuzz.values import Values


class Gradients:
    """d_q, d_k, d_v, d_g, d_beta, d_erase, d_a_key, d_b_key, d_A_log, d_dt_bias and d_initial_state, of what
    the call has; and `beside`, for a parameter the root of the sum of the squares of its terms."""

    def __init__(self, values: Values) -> None:
        self.case, self.values = values.case, values
        self.largest, self.size = 0.0, 1.0
        self.beside: dict[str, np.ndarray] = {}
        self.names: list[str] = []
        with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
            self._walk(Tokens(values))

    def _note(self, *numbers: np.ndarray) -> None:
        """What chunks keep on the way, in the dtype of q."""
        if self.case.dtype == "float16":
            self.largest = max(self.largest, *(np.abs(x).max(initial=0) for x in numbers))

    def _walk(self, tokens: Tokens) -> None:
        case, values = self.case, self.values
        N, L, n, _, V = tokens.v.shape
        states = [start(values)]
        for t in range(L):
            if case.dtype == "float16":
                self.largest = max(self.largest, tokens.largest_write(t, states[-1]))
            states.append(tokens.step(t, states[-1]))
            self._note(states[-1])
        d_o = np.zeros_like(tokens.v[:, :, 0])
        if "d_o" in values.tensors:
            d_o = Tokens.rows(case, wide(values.tensors["d_o"]))
        d_state = np.zeros_like(states[0]) if values.d_final is None else wide(values.d_final).copy()
        ends = [tokens.v, states[0], d_o, d_state, tokens.q * tokens.scale, tokens.k]
        most = [max(1.0, np.abs(x).max(initial=0)) for x in ends]
        self.size = max(most[:2]) * max(most[2:4]) * max(most[4:])
        self._note(d_o, d_state)
        names = ("q", "k", "v", "a", "beta", "erase", "a_key", "b_key")
        made: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for t in reversed(range(L)):
            alpha, q = tokens.alpha[:, t, :, None, :], tokens.q[:, t]
            d_out = tokens.scale * d_o[:, t]
            made["q"].append((states[t + 1] * d_out[..., None]).sum(-2))
            d_state = d_state + d_out[..., None] * q[..., None, :]
            found_by = [states[t] * alpha]  # each write of the token
            for j in range(n - 1):
                found_by.append(tokens.write(t, j, found_by[j], tokens.v[:, t, j]))
            for j in reversed(range(n)):
                d_state = self._write_back(tokens, t, j, found_by[j], d_state, made)
            d_a = (d_state * found_by[0]).sum(-2)
            made["a"].append(d_a if alpha.shape[-1] == d_a.shape[-1] else d_a.sum(-1, keepdims=True))
            before, d_state = d_state, d_state * alpha
            if tokens.low_rank is not None:
                a_key, b_key = (each[:, t] for each in tokens.low_rank)
                d_found = (before @ b_key[..., None])[..., 0]
                made["a_key"].append((states[t] * d_found[..., None]).sum(-2))
                made["b_key"].append((before * tokens.found(t, states[t])[..., None]).sum(-2))
                d_state = d_state + d_found[..., None] * a_key[..., None, :]
                self._note(d_found)
            self._note(d_state)
        widths = {"q": case.key_dim, "k": case.key_dim, "v": V, "a": tokens.alpha.shape[-1]}
        widths |= {"beta": V if case.beta_per_value else 1, "erase": case.key_dim}
        widths |= {"a_key": case.key_dim, "b_key": case.key_dim}
        found = {name: self._tokens(name, each, widths[name]) for name, each in made.items() if each or not L}
        self._of_keys(found)
        self._of_gates(found["a"])
        self._keep("v", found["v"])
        for name in ("a_key", "b_key") if case.low_rank else ():
            self._keep(name, found[name])
        if case.delta:
            self._of_strengths("beta", found["beta"], case.allow_neg_eigval and not case.erases)
        if case.erases:
            self._of_strengths("erase", found["erase"], case.allow_neg_eigval)
        if case.state != "none":
            masked = [n for n in range(N) if case.has_initial is not None and not case.has_initial[n]]
            d_state[masked] = 0
            self._keep("initial_state", d_state)

    def _write_back(
        self,
        tokens: Tokens,
        t: int,
        j: int,
        found: np.ndarray,
        d_state: np.ndarray,
        made: dict[str, list[np.ndarray]],
    ) -> np.ndarray:
        """The gradient of the state `found` by write j of token t, of that of the state after it."""
        k, v, per_value = tokens.k[:, t, j], tokens.v[:, t, j], self.case.beta_per_value
        d_u, u = (d_state @ k[..., None])[..., 0], v
        d_v, d_found, d_k = d_u, d_state, 0.0
        if tokens.erase is not None:
            beta, erase = tokens.beta[:, t, j], tokens.erase[:, t, j]
            e = erase * k
            u, d_v = beta * v - (found @ e[..., None])[..., 0], beta * d_u
            d_beta, d_e = v * d_u, -(found * d_u[..., None]).sum(-2)
            made["beta"].append(d_beta if per_value else d_beta.sum(-1, keepdims=True))
            made["erase"].append(d_e * k)
            d_found, d_k = d_state - d_u[..., None] * e[..., None, :], d_e * erase
        elif tokens.beta is not None:
            beta, error = tokens.beta[:, t, j], v - (found @ k[..., None])[..., 0]
            u, d_v = beta * error, beta * d_u
            d_beta = d_u * error
            made["beta"].append(d_beta if per_value else d_beta.sum(-1, keepdims=True))
            d_found = d_state - d_v[..., None] * k[..., None, :]
            d_k = -(found * d_v[..., None]).sum(-2)
        made["k"].append((d_state * u[..., None]).sum(-2) + d_k)
        made["v"].append(d_v)
        stretch = np.maximum(1, tokens.stretch[:, t, j, :, None])
        self._note(d_found, d_u * stretch, d_v * stretch)
        return d_found

    def _tokens(self, name: str, backwards: list[np.ndarray], width: int) -> np.ndarray:
        """[B, rows, HV, width], zero where a token is of no sequence."""
        case, rows = self.case, self.case.rows(name, 0, self.case.tokens).stop
        made = np.zeros((case.batch, rows, case.value_heads, width))
        for n, (b, begin, end) in enumerate(case.spans()):
            span = case.rows(name, begin, end)
            for row in range(span.stop - span.start):
                made[b, span.start + row] = backwards[len(backwards) - 1 - row][n]
        return made

    def _keep(self, name: str, gradient: np.ndarray) -> None:
        self.names.append(name)
        setattr(self, f"d_{name}", np.array(gradient))
        if self.case.gradient_dtype(name) == "float16":
            self.largest = max(self.largest, np.abs(gradient).max(initial=0))

    def _of_keys(self, found: dict[str, np.ndarray]) -> None:
        case = self.case
        for name in ("q", "k"):
            x, d = wide(self.values.tensors[name]), found[name]
            d = d.reshape(*d.shape[:2], case.heads, case.ratio, case.key_dim).sum(3)
            if case.qk_l2norm:
                norm = np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
                d = d / norm - x * ((x * d).sum(-1, keepdims=True) / norm**3)
            self._keep(name, d)

    def _of_gates(self, d_a: np.ndarray) -> None:
        case, tensors = self.case, self.values.tensors
        if "g" not in tensors:
            return
        x = wide(tensors["g"])
        x = x if x.ndim == 4 else x[..., None]
        d_a = np.broadcast_to(d_a, x.shape)
        if case.gate == "log_decay":
            self._keep("g", d_a.reshape(tensors["g"].shape))
            return
        if "dt_bias" in tensors:
            x = x + wide(tensors["dt_bias"]).reshape(case.value_heads, -1)
        rate = np.exp(wide(tensors["A_log"]))[:, None] if "A_log" in tensors else np.ones((1, 1))
        if case.gate == "softplus":
            d_x, of_rate = -rate * sigmoid(x) * d_a, -rate * softplus(x) * d_a
        else:
            s = sigmoid(rate * x)
            d_x = rate * case.lower_bound * s * sigmoid(-rate * x) * d_a
            of_rate = x * d_x
        self.size *= max(1.0, rate.max(initial=0) * (1.0 if case.gate == "softplus" else -case.lower_bound))
        self._keep("g", d_x.reshape(tensors["g"].shape))
        for name, terms, axes in (("A_log", of_rate, (0, 1, 3)), ("dt_bias", d_x, (0, 1))):
            if name in tensors:
                shape = tensors[name].shape
                self._keep(name, terms.sum(axes).reshape(shape))
                self.beside[name] = np.sqrt((terms * terms).sum(axes)).reshape(shape)

    def _of_strengths(self, name: str, gradient: np.ndarray, doubled: bool) -> None:
        given = self.values.tensors[name]
        if self.case.beta_is_logit:
            x = wide(given).reshape(gradient.shape)
            gradient = gradient * sigmoid(x) * sigmoid(-x) * (2 if doubled else 1)
        self._keep(name, gradient.reshape(given.shape))

    def in_range(self) -> bool:
        """Whether all of it fits the dtypes that store it."""
        finite = all(np.isfinite(getattr(self, f"d_{name}")).all() for name in self.names)
        return finite and self.largest <= LARGEST_FP16
