# SPDX-License-Identifier: Apache-2.0
"""One integer seed makes one `Case`: everything about a call except its numbers, which `values.py` draws from
it."""

from __future__ import annotations

import math
from random import Random

from fuzz.case import FAMILY, FLOAT8, PASSES, Case
from fuzz.classes import DEFAULT, FEWEST_NUMBERS, without

GATES = ("mild", "slow", "zero", "tiny", "strong", "extreme", "mixed", "one_slow", "bursts")
BETAS = ("random", "zero", "one", "near_one", "mixed", "steep")
RANK_ONE = ("removing", "removing", "removing", "apart", "reflecting")
DIMS = (
    1,
    2,
    3,
    5,
    7,
    8,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    40,
    48,
    60,
    63,
    64,
    65,
    72,
    80,
    96,
    100,
    112,
    127,
    128,
    129,
)
LARGE_DIMS = (160, 192, 200, 224, 250, 255, 256)
BEYOND_DIMS = (257, 288, 300)  # of V alone
EDGES = (15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 95, 96, 100, 127, 128, 129, 130, 191, 192, 193, 200, 257)
OFTEN = {
    "kda": 4,
    "gdn": 3,
    "gdn2": 3,
    "linear": 1,
    "delta_per_head": 1,
}  # how often an algorithm is drawn; else 2
HOUSEHOLDERS = (1, 2, 2, 2, 3, 3, 4, 4, 5, 8, 16, 70)  # of a token
LAYOUTS = ("contiguous", "padded", "odd", "by_head", "by_token", "fused")


def draw(seed: int, classes: frozenset[str] = DEFAULT, **fixed) -> Case:
    """The case of a seed; `fixed` pins pass_name, algorithm or dtype."""
    random = Random(seed)
    if "one_kernel" in classes:
        fixed = {"pass_name": "prefill", "algorithm": "kda", "dtype": "bfloat16"}
    fields = {"seed": seed}
    fields["pass_name"] = fixed.get("pass_name") or random.choices(PASSES, (40, 20, 20, 12, 8, 25))[0]
    fields["algorithm"] = (
        fixed.get("algorithm") or random.choices(tuple(FAMILY), [OFTEN.get(name, 2) for name in FAMILY])[0]
    )
    dtypes = ("bfloat16", "float16", "float32", "float64")
    fields["dtype"] = fixed.get("dtype") or random.choices(dtypes, (48, 24, 26, 2))[0]
    if FAMILY[fields["algorithm"]][1] == "product":
        fields["householders"] = random.choice(HOUSEHOLDERS)
    fields |= _shape(random, fields, classes)
    if fields["pass_name"] == "backward":
        fields["through"] = random.choice(("out", "out", "default", "autograd"))
        if fields["value_dim"] > 256:
            fields["through"] = "autograd"
        if fields["through"] == "autograd" and fields["algorithm"] == "kda" and random.random() < 0.5:
            fields["through"] = "kept"
    fields |= _gate(random, fields)
    fields |= _numbers(random, fields, classes)
    fields |= _memory(random, fields)
    if "one_kernel" in classes:
        fields |= _one_kernel(random, classes)
    case = Case(**fields)
    return without(_states(random, case, classes), classes)


def _within_fused_limits(random: Random, gate: str) -> dict:
    """Gates and sizes inside the limits of docs/design/fused-sm90.md: no channel that a softplus gate
    shortens by more than e^-20 a token, and no numbers near the ends of bfloat16's range."""
    decay, bias = random.choice(("mild", "slow", "zero", "tiny", "one_slow")), random.choice((None, 0.1, 1.0))
    most = (20 if decay == "one_slow" else 5) + 5 * (bias or 0)  # of a raw gate: normal numbers are below 5
    high = math.log(20 / most) if gate == "softplus" else 4.0
    return {
        "decay": decay,
        "dt_bias": bias,
        "A_log": (-3.0, random.uniform(-3, high)),
        "edge": False,
        "mixed_sizes": False,
        "value_size": 10 ** random.uniform(-1, 2),
        "state_size": 10 ** random.uniform(-1, 2),
    }


def _one_kernel(random: Random, classes: frozenset[str]) -> dict:
    """What makes a KDA prefill one that sm90:fused takes: gates of its own making, norms, and rows in pieces
    of 16 bytes."""
    low, gate = random.uniform(-3, 3), random.choice(("softplus", "bounded"))
    within = {} if "fused_limits" in classes else _within_fused_limits(random, gate)
    return {
        "key_dim": random.choice((72, 80, 96, 104, 120, 128, 128, 128)),
        "value_dim": random.choice((8, 24, 64, 72, 128, 128, 136, 256)),
        "gate": gate,
        "lower_bound": random.choice((-5.0, -1.0, -0.1)),
        "A_log": (low, random.uniform(low, 4)),
        "gate_dtype": "bfloat16",
        "gate_per_head": False,
        "beta_dtype": random.choice(("float32", "bfloat16", "float16")),
        "beta_per_value": False,
        "qk_l2norm": True,
        "scale": random.choice((None, 1.0, 0.1)),
        "layouts": random.choice(((), (("q", "padded"), ("v", "padded")))),
        "expanded": (),
        "out": "",
    } | within


def _chance(random: Random, probability: float) -> bool:
    return random.random() < probability


def _lengths(random: Random, pass_name: str) -> tuple[tuple[int, ...], bool]:
    """Tokens of each sequence, and whether they are packed."""
    if pass_name == "decode":
        if _chance(random, 0.9):
            return (1,) * random.randint(1, 9), False
        return (random.randint(0, 1),) * random.randint(1, 3), False
    if pass_name == "verify":
        if _chance(random, 0.6):
            return (random.choice((1, 2, 3, 4, 4, 6, 8)),) * random.randint(1, 4), False
        return tuple(random.choice((0, 1, 2, 4, 5, 8)) for _ in range(random.randint(0, 5))), True

    def length() -> int:
        return random.randint(0, 20) if _chance(random, 0.5) else random.choice(EDGES)

    if pass_name == "split" or _chance(random, 0.4):
        tokens = max(length(), 1 if pass_name == "split" else 0)
        return (tokens,) * random.randint(1, 3), False
    count = random.choice((1, 1, 2, 2, 3, 4, 5, 9))
    if _chance(random, 0.02):
        count = 0
    return tuple(length() if count < 9 else random.randint(0, 9) for _ in range(count)), True


def _shape(random: Random, drawn: dict, classes: frozenset[str]) -> dict:
    lengths, packed = _lengths(random, drawn["pass_name"])

    def dim(more: tuple[int, ...] = ()) -> int:
        kind = random.random()
        if kind < 0.25:
            return random.choice((64, 128))
        return random.choice(DIMS) if kind < 0.85 else random.choice((*LARGE_DIMS, *more))

    key_dim, value_dim = dim(), dim(BEYOND_DIMS)
    heads, ratio = random.choice((1, 1, 2, 2, 3, 4)), random.choice((1, 1, 1, 2, 3, 4, 8))
    fewest = FEWEST_NUMBERS
    if "few_numbers" in classes and _chance(random, 0.3):
        fewest = 1
    budget = 10 ** random.uniform(4.5, 6.4)

    def cost() -> float:
        per_token = (
            heads * ratio * key_dim * (value_dim + (key_dim if drawn["pass_name"] == "segment" else 0))
        )
        return per_token * (sum(lengths) + 4 * len(lengths) + 4) * drawn.get("householders", 1)

    def enough() -> None:
        # The error rule compares statistics: every token needs some numbers.
        nonlocal heads
        heads = max(heads, -(-fewest // (ratio * value_dim)))

    enough()
    for _ in range(60):
        if cost() <= budget:
            break
        options = []
        if sum(lengths) > 4 * len(lengths) and drawn["pass_name"] not in ("decode", "verify"):
            options.append("lengths")
        if len(lengths) > 1:
            options.append("count")
        if ratio * heads > 1 and ratio * heads * value_dim > fewest:
            options.append("heads")
        if key_dim > 16 or (key_dim > 1 and not options):
            options.append("key_dim")
        if value_dim > 16:
            options.append("value_dim")
        if not options:
            break
        which = random.choice(options)
        if which == "lengths":
            shorter = random.choice((2, 3))
            lengths = tuple(-(-length // shorter) for length in lengths)
        elif which == "count":
            lengths = lengths[: -(-len(lengths) // 2)]
        elif which == "heads":
            heads, ratio = (heads // 2, ratio) if heads > 1 else (heads, -(-ratio // 2))
        elif which == "key_dim":
            key_dim = random.choice([size for size in (*DIMS, *LARGE_DIMS) if size < key_dim])
        else:
            value_dim = random.choice([size for size in (*DIMS, *LARGE_DIMS) if size < value_dim])
        enough()
    return {
        "lengths": lengths,
        "packed": packed,
        "slack": random.choice((0, 0, 1, 3, 17)) if packed else 0,
        "heads": heads,
        "ratio": ratio,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }


def _gate(random: Random, drawn: dict) -> dict:
    decay, update = FAMILY[drawn["algorithm"]]
    floats = ("float32", "float32", "bfloat16", "float16", "float64")
    fields = {
        "decay": random.choice(GATES),
        "gate_dtype": random.choice(floats),
        "beta": random.choice(BETAS),
        "beta_dtype": random.choice(floats),
    }
    # The functions of gla and simple_gla take no raw gate; decode, verify and segment do.
    by_function = drawn["pass_name"] in ("prefill", "split") or drawn.get("through") in ("autograd", "kept")
    additive_prefill = update == "additive" and by_function
    if decay in ("channel", "token") and not additive_prefill:
        fields["gate"] = random.choice(("log_decay", "softplus", "bounded"))
    gate = fields.get("gate", "log_decay")
    if drawn["algorithm"] == "kda" and _chance(random, 0.1):
        fields["gate_per_head"] = True
    if gate != "log_decay":
        if gate == "softplus" or _chance(random, 0.7):
            low = random.uniform(-3, 5)
            fields["A_log"] = (low, random.uniform(low, 5))
        if _chance(random, 0.6):
            fields["dt_bias"] = random.choice((0.1, 1.0, 1.0, 4.0))
            fields["flat_bias"] = _chance(random, 0.5)
    if gate == "bounded":
        fields["lower_bound"] = random.choice((-5.0, -1.0, -0.1, -80.0, -(10 ** random.uniform(-1, 1.9))))
    if drawn["algorithm"] == "simple_gla":
        fields["head_decay"] = _chance(random, 0.3)
    if update not in ("additive", "dplr"):
        fields["beta_is_logit"] = _chance(random, 0.5)
        fields["allow_neg_eigval"] = fields["beta_is_logit"] and _chance(random, 0.4)
        fields["beta_per_value"] = drawn["pass_name"] != "segment" and _chance(random, 0.15)
    if update == "erase":
        fields["erase"] = random.choice(BETAS)
        fields["beta_per_value"] = _chance(random, 0.7)
    if update == "dplr":
        fields |= {"erase": random.choice(BETAS), "rank_one": random.choice(RANK_ONE)}
    return fields


def _numbers(random: Random, drawn: dict, classes: frozenset[str]) -> dict:
    delta = FAMILY[drawn["algorithm"]][1] not in ("additive", "dplr")

    def size(low: float = -3, high: float = 3) -> float:
        return 1.0 if _chance(random, 0.5) else 10 ** random.uniform(low, high)

    l2norm = _chance(random, 0.5)
    return {
        "keys": random.choice(("random", "random", "collinear", "sparse")),
        # Without a norm the delta rule contracts only for keys up to 1.
        "key_size": size() if l2norm or not delta else min(1.0, size(-2, 0)),
        "query_size": size(),
        "value_size": size(),
        "state_size": size(),
        "mixed_sizes": _chance(random, 0.2),
        "edge": _chance(random, 0.08),
        "cancelling": "cancelling" in classes and delta and _chance(random, 0.2),
        "qk_l2norm": l2norm,
        "scale": random.choice((None, None, None, 1.0, 0.1, 10 ** random.uniform(-3, 3), -0.5, 0.0)),
    }


def _memory(random: Random, drawn: dict) -> dict:
    more = {"erase": ("erase",), "dplr": ("a_key", "b_key")}.get(FAMILY[drawn["algorithm"]][1], ())
    shared = ("q", "k", "v", "g", "beta", *more)
    names = (*shared, "out")
    if drawn["pass_name"] == "backward":
        names = (*shared, "d_o", *(f"d_{name}" for name in shared))
        shared = (*shared, "d_o", "d_o")
    plain = _chance(random, 0.3)
    layouts = [(name, random.choice(LAYOUTS)) for name in names if not plain and _chance(random, 0.6)]
    expanded = []
    if _chance(random, 0.12):
        expanded = [(random.choice(shared), random.choice((0, 1, 2)))]
    return {
        "layouts": tuple(
            (name, "padded" if (name, how) == ("out", "fused") else how) for name, how in layouts
        ),
        "expanded": tuple(expanded),
        "cu_dtype": random.choice(("int32", "int64")),
        "deterministic": random.choice((None, None, None, True, "batch_invariant")),
        "out": random.choice(("", drawn["dtype"], drawn["dtype"], "float32"))
        if drawn["dtype"] != "float64"
        else "",
        "repeat": _chance(random, 0.3 if drawn["pass_name"] == "backward" else 0.1),
        "automatic": _chance(random, 0.25),
        "threads": 1 if _chance(random, 0.95) else 2,
        "rows_along_tokens": drawn["pass_name"] == "decode"
        and drawn["lengths"][:1] == (1,)
        and _chance(random, 0.4),
    }


def _states(random: Random, case: Case, classes: frozenset[str]) -> Case:
    wide = case.dtype == "float64"

    def state_dtype() -> str:
        return "float64" if wide else random.choice(("float32", "float32", "bfloat16", "float16"))

    common = {
        "state_dtype": state_dtype(),
        "v_first": _chance(random, 0.6),
        "transposed": _chance(random, 0.25),
        "slot_pad": random.choice((0, 0, 1, 8, 192)),
        "head_pad": random.choice((0, 0, 0, 3, 16)),
        "null_index": random.choice((-1, -1, -1, 0, 2)),
        "index_dtype": random.choice(("int32", "int32", "int64", "mixed"))
        if "int64_indices" in classes
        else "int32",
        "index_strided": _chance(random, 0.25),
    }
    case = case.but(**common)
    match case.pass_name:
        case "segment":
            # The functions of gla and simple_gla, which would take what is kept, have no raw gate.
            keep = (case.mixes or case.gate == "log_decay") and case.value_dim <= 256 and _chance(random, 0.3)
            return case.but(segment_out=random.choice(("", "both", "b")), keep=keep)
        case "split":
            state = random.choice(("none", "dense"))
            return case.but(state=state, slots=case.sequences, cut=random.randint(0, case.tokens))
        case "backward":
            return _backward(random, case.but(state=random.choice(("none", "dense", "dense")), out=""))
        case "verify":
            return _eight_bits(random, _verify(random, case.but(snapshot_dtype=state_dtype()), classes))
        case "decode":
            case = case.but(state="pool")
        case _:
            case = case.but(state=random.choice(("none", "dense", "pool", "pool", "readonly")))
            case = case.but(output_final=_chance(random, 0.8))
    case = _slots(random, case, classes)
    if case.pass_name == "prefill":
        if _chance(random, 0.25):
            case = _plan(random, case.but(checkpoint_dtype=state_dtype()))
        if _chance(random, 0.25):
            case = case.but(chunk_size=random.choice((16, 32, 64)))
    return _eight_bits(random, case)


def _eight_bits(random: Random, case: Case) -> Case:
    """Every eighth state of a call that may have one is of float8, with a scale for each row."""
    able = case.state != "none" and case.dtype != "float64" and not case.plan_in_pool
    return case.but(state_dtype=FLOAT8) if _chance(random, 0.125) and able else case


def _backward(random: Random, case: Case) -> Case:
    """Which gradients of which, and how they are asked for."""
    double, operator = case.dtype == "float64", case.through not in ("autograd", "kept")
    if case.state == "dense":
        case = case.but(slots=case.sequences)
        if _chance(random, 0.25):
            case = case.but(has_initial=tuple(_chance(random, 0.6) for _ in range(case.sequences)))
    d_o, d_final = case.dtype, "float64" if double else "float32"
    if operator and not double:
        d_o = random.choice((case.dtype, case.dtype, "float32"))
        d_final = random.choice(("float32", "float32", "bfloat16", "float16"))
    if _chance(random, 0.4):
        d_final = ""
    if _chance(random, 0.1) and (operator or d_final):
        d_o = ""
    wanted = case.differentiable()
    if _chance(random, 0.4):
        least = 0 if operator else 1
        some = random.sample(wanted, random.randint(least, len(wanted)))
        wanted = tuple(name for name in wanted if name in some)
    return case.but(
        d_o=d_o,
        d_final=d_final,
        wanted=wanted,
        outer_size=1.0 if _chance(random, 0.6) else 10 ** random.uniform(-3, 3),
        wide_gradients=case.through == "out" and not double and _chance(random, 0.2),
    )


def _slots(random: Random, case: Case, classes: frozenset[str]) -> Case:
    """The slots that sequences start from and end in."""
    N = case.sequences
    if case.state == "none":
        return case
    if _chance(random, 0.25):
        case = case.but(has_initial=tuple(_chance(random, 0.6) for _ in range(N)))
    if case.state == "dense":
        return case.but(slots=N)
    slots = 2 * N + random.randint(1, 3)
    free = [slot for slot in range(slots) if slot != case.null_index]
    random.shuffle(free)
    if case.state == "readonly":
        initial = [random.choice(free) for _ in range(N)]
        return case.but(slots=slots, initial=_nulls(random, case, initial))
    kind = random.choice(("none", "same", "same", "apart", "apart", "shared", "final_only"))
    if "forks" in classes and N > 1 and _chance(random, 0.15):
        kind = random.choice(("fork", "fork", "fork", "shift", "rotate"))
    if kind == "none":
        return case.but(slots=N + (random.randint(0, 2) if case.pass_name == "decode" else 0))
    if kind == "final_only":  # the rows start from slots 0 to N - 1, which a pool of that size is
        order = list(range(N))
        if "forks" in classes and _chance(random, 0.3):
            random.shuffle(order)
        return case.but(slots=N, final=tuple(order), null_index=-1)
    first, last = free[:N], None
    if len(free) >= 2 * N and kind in ("apart", "shared"):
        last = free[N : 2 * N]
    if kind == "shared" and last is not None:
        first = [random.choice(first) for _ in range(N)]
    if kind == "fork":  # several rows go on from one slot, and often one of them in place
        first, last = [random.choice(first[:2]) for _ in range(N)], free[N : 2 * N]
        for slot in {*first}:
            if _chance(random, 0.8):
                last[random.choice([n for n in range(N) if first[n] == slot])] = slot
    if kind == "shift":
        last = [*first[1:], free[N]]
    if kind == "rotate":
        last = [*first[1:], first[0]]
    initial = _nulls(random, case, first)
    final = None if last is None else _nulls(random, case, last)
    return case.but(slots=slots, initial=initial, final=final)


def _nulls(random: Random, case: Case, slots: list[int]) -> tuple[int, ...]:
    if not _chance(random, 0.35):
        return tuple(slots)
    null = (-1, case.null_index, -7)
    return tuple(random.choice(null) if _chance(random, 0.3) else slot for slot in slots)


def _plan(random: Random, case: Case) -> Case:
    """Checkpoints: states of their own, or free slots of the pool."""
    places = [(n, t) for n, length in enumerate(case.lengths) for t in {*range(0, length + 1, 64), length}]
    random.shuffle(places)
    places = places[: random.randint(0, 6)]
    slots, in_pool = len(places) + random.randint(0, 2), False
    free = list(range(slots))
    if case.state == "pool" and _chance(random, 0.3):
        named = {case.base(n) for n in range(case.sequences)} | {case.end(n) for n in range(case.sequences)}
        free = [slot for slot in range(case.slots) if slot not in named]
        places, in_pool, slots = places[: len(free)], True, case.slots
    random.shuffle(free)
    rows = [(n, t, slot) for (n, t), slot in zip(places, free, strict=False)]
    if _chance(random, 0.2):
        rows.insert(random.randint(0, len(rows)), (0, 0, -1))
    return case.but(plan=tuple(rows), plan_in_pool=in_pool, checkpoint_slots=slots)


def _verify(random: Random, case: Case, classes: frozenset[str]) -> Case:
    N, longest = case.sequences, case.longest
    columns = longest + random.choice((0, 0, 1, 2))
    if columns == 0 and "empty_tables" not in classes:
        columns = 1
    kind = random.choice(
        ("none", "dense", "readonly", "table", "table", "table", "table_and_initial", "table_read")
    )
    if kind in ("none", "dense", "readonly"):
        case = case.but(state=kind)
        if kind == "dense":
            case = case.but(slots=N + random.randint(0, 2))
        if kind == "readonly":
            slots = N + 3
            initial = [
                random.choice([slot for slot in range(slots) if slot != case.null_index]) for _ in range(N)
            ]
            case = case.but(slots=slots, initial=_nulls(random, case, initial))
    else:
        slots = N * columns + N + 3
        free = [slot for slot in range(slots) if slot != case.null_index]
        random.shuffle(free)
        table = [free[n * columns : (n + 1) * columns] for n in range(N)]
        table = [_nulls(random, case, row) for row in table] if _chance(random, 0.3) else table
        case = case.but(state="pool", slots=slots, table=tuple(map(tuple, table)))
        case = case.but(disable_update=kind == "table_read")
        if columns and _chance(random, 0.7):
            case = case.but(accepted=tuple(random.randint(1, columns) for _ in range(N)))
        if kind == "table_and_initial":
            bases = free[N * columns : N * columns + N]
            if columns and _chance(random, 0.4):  # the base is a slot of a token of the same row
                bases = [random.choice(row) for row in table]
            if "forks" in classes and columns and N > 1 and _chance(random, 0.3):
                bases = [random.choice(table[random.randrange(N)]) for _ in range(N)]
                if _chance(random, 0.6):
                    bases = [bases[0]] * N
            case = case.but(initial=_nulls(random, case, list(bases)))
    if case.state != "none" and _chance(random, 0.25):
        case = case.but(has_initial=tuple(_chance(random, 0.6) for _ in range(N)))
    if _chance(random, 0.5):
        width = longest + random.choice((0, 0, 1))
        rows = [
            [random.choice((-1, -5, random.randint(-1, t - 1), t - 1)) for t in range(width)]
            for _ in range(N)
        ]
        # What lies beyond a row's tokens is not read.
        parents = [
            row[:length] + [99] * (width - length) for row, length in zip(rows, case.lengths, strict=True)
        ]
        case = case.but(parents=tuple(map(tuple, parents)))
    if case.state == "none" or case.table is None or _chance(random, 0.4):
        slots, room = N + random.randint(0, 2), longest + random.choice((0, 0, 1))
        case = case.but(snapshot_slots=(slots, room))
        if _chance(random, 0.5):
            free = [slot for slot in range(slots + 1) if slot != case.null_index]
            random.shuffle(free)
            indices = _nulls(random, case, free[:N])
            case = case.but(snapshot_slots=(slots + 1, room), snapshot_indices=indices)
    return case
