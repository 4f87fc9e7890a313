// SPDX-License-Identifier: Apache-2.0
// Checks of the arguments of a call (validate() in kernel.h). Each message names the argument, what it must
// be, and what was given.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/argument_checks.h"
#include "core/check.h"
#include "core/forks.h"
#include "core/gradients.h"
#include "core/kernel.h"
#include "core/rows.h"

namespace cula {
namespace {

constexpr std::int64_t kMostSequences = std::numeric_limits<std::int32_t>::max();

class Validator : ArgumentChecks {
public:
    Validator(Pass pass, const Args& args, Indices indices)
        : ArgumentChecks(pass, args, indices == Indices::kOnHost) {}

    void check() {
        check_algorithm();
        check_inputs();
        check_gate();
        check_sequences();
        check_state();
        if (pass_ == Pass::kPrefill) check_prefill_outputs();
        if (pass_ == Pass::kVerify) check_verify();
        if (pass_ == Pass::kSegment) check_segment();
        if (pass_ == Pass::kBackward) check_backward();
        if (args_.saved) check_saved();
        refuse_foreign();
        check_outputs_apart();
        if (host_readable_ && may_fork(args_)) check_forks();
    }

private:
    void check_algorithm() const {
        const auto [decay, update] = args_.algorithm;
        CULA_REQUIRE(name(args_.algorithm) != "unknown", "algorithm", "be one of kAlgorithms",
                     "decay " + std::to_string(static_cast<int>(decay)) + ", update " +
                         std::to_string(static_cast<int>(update)));
        CULA_REQUIRE(args_.gate <= Gate::kBounded, "gate", "be one that Gate names",
                     std::to_string(static_cast<int>(args_.gate)));
    }

    void check_inputs() {
        const TensorRef &q = args_.q, &k = args_.k, &v = args_.v;
        given("q", q, "always");
        given("k", k, "always");
        given("v", v, "always");
        shape("q", q, {{"B", kAny}, {"T", kAny}, {"H", kAny}, {"K", kAny}});
        batch_ = q.size[0], tokens_ = q.size[1], heads_ = q.size[2], key_dim_ = q.size[3];
        check_writes();
        shape("k", k, {{"B", batch_}, writes_, {"H", heads_}, {"K", key_dim_}});
        shape("v", v, {{"B", batch_}, writes_, {"HV", kAny}, {"V", kAny}});
        value_heads_ = v.size[2], value_dim_ = v.size[3];
        CULA_REQUIRE(heads_ > 0, "q", "have at least one head", shape_of(q));
        CULA_REQUIRE(value_heads_ > 0 && value_heads_ % heads_ == 0, "v",
                     "have a number of heads that is a multiple of q's " + std::to_string(heads_),
                     std::to_string(value_heads_));
        CULA_REQUIRE(key_dim_ >= 1 && key_dim_ <= 256, "q", "have a key dimension K from 1 to 256",
                     std::to_string(key_dim_));
        CULA_REQUIRE(value_dim_ >= 1, "v", "have a value dimension V of at least 1", "0");
        CULA_REQUIRE(value_dim_ <= kLargestDim || !args_.keep, "keep", "be false with V beyond 256",
                     "true with V = " + std::to_string(value_dim_));
        CULA_REQUIRE(value_dim_ <= kLargestDim || !args_.kept, "kept", "be left out with V beyond 256",
                     "a tensor with V = " + std::to_string(value_dim_));
        floating("q", q);
        dtype("k", k, {q.dtype});
        dtype("v", v, {q.dtype});
        last_contiguous("q", q);
        last_contiguous("k", k);
        last_contiguous("v", v);
        if (pass_ != Pass::kSegment && pass_ != Pass::kBackward) {
            given("o", args_.o, "as the output");
            shape("o", args_.o, {{"B", batch_}, {"T", tokens_}, {"HV", value_heads_}, {"V", value_dim_}});
            if (args_.o.dtype != Dtype::kFloat32) dtype("o", args_.o, {q.dtype});
            last_contiguous("o", args_.o);
            writable("o", args_.o);
        }
        finite("scale", args_.scale);
        const int chunk = args_.chunk_tokens;
        CULA_REQUIRE(chunk == 16 || chunk == 32 || chunk == 64, "chunk_size", "be 16, 32 or 64",
                     std::to_string(chunk));
    }

    void check_gate() const {
        const TensorRef &g = args_.g, &gamma = args_.gamma, &beta = args_.beta;
        const Decay decay = args_.algorithm.decay;
        const Dim B{"B", batch_}, T{"T", tokens_}, HV{"HV", value_heads_};

        if (varies_by_channel(decay)) {
            given_for_algorithm("g", g);
            shape("g", g, {B, T, HV, {"K", key_dim_}});
            last_contiguous("g", g);
        } else if (varies_by_token(decay)) {
            given_for_algorithm("g", g);
            shape("g", g, {B, T, HV});
        } else {
            CULA_REQUIRE(!g, "g", "be left out for " + algorithm() + ", which has no decay per token",
                         shape_of(g));
        }
        if (g) floating("g", g);

        switch (decay) {
            case Decay::kPerHead: given_for_algorithm("decay", gamma); break;
            case Decay::kPerToken: break;
            case Decay::kNone:
            case Decay::kPerChannel:
                CULA_REQUIRE(!gamma, "decay", "be left out for " + algorithm(), shape_of(gamma));
        }
        if (gamma) {
            shape("decay", gamma, {HV});
            parameter("decay", gamma);
        }

        if (args_.gate == Gate::kLogDecay) {
            CULA_REQUIRE(!args_.A_log, "A_log", "be left out when g is the log decay", shape_of(args_.A_log));
            CULA_REQUIRE(!args_.dt_bias, "dt_bias", "be left out when g is the log decay",
                         shape_of(args_.dt_bias));
        } else {
            CULA_REQUIRE(static_cast<bool>(g), "use_gate_in_kernel", "be left out for " + algorithm(),
                         "true");
            if (args_.A_log) {
                shape("A_log", args_.A_log, {HV});
                parameter("A_log", args_.A_log);
            }
            if (args_.dt_bias) {
                if (varies_by_channel(decay))
                    shape("dt_bias", args_.dt_bias, {HV, {"K", key_dim_}});
                else
                    shape("dt_bias", args_.dt_bias, {HV});
                parameter("dt_bias", args_.dt_bias);
            }
        }
        if (args_.gate == Gate::kBounded) {
            CULA_REQUIRE(args_.lower_bound < 0, "lower_bound", "be negative",
                         std::to_string(args_.lower_bound));
            CULA_REQUIRE(args_.lower_bound >= -kMostGateSlope, "lower_bound", "be at least -1e30",
                         std::to_string(args_.lower_bound));
        }

        if (takes_beta(args_.algorithm.update)) {
            given_for_algorithm("beta", beta);
            if (beta.ndim == 4)
                shape("beta", beta, {B, writes_, HV, {"V", value_dim_}});
            else
                shape("beta", beta, {B, writes_, HV});
            floating("beta", beta);
        } else {
            CULA_REQUIRE(!beta, "beta", "be left out for " + algorithm(), shape_of(beta));
            CULA_REQUIRE(!args_.beta_is_logit, "use_beta_sigmoid_in_kernel", "be left out for " + algorithm(),
                         "true");
        }
        const bool low_rank = takes_low_rank(args_.algorithm.update);
        const std::tuple<std::string_view, const TensorRef*, bool> keys[] = {
            {"erase", &args_.erase, takes_erase(args_.algorithm.update)},
            {"a_key", &args_.a_key, low_rank},
            {"b_key", &args_.b_key, low_rank}};
        for (const auto& [argument, ref, taken] : keys) {
            CULA_REQUIRE(taken || !*ref, argument, "be left out for " + algorithm(), shape_of(*ref));
            if (!taken) continue;
            given_for_algorithm(argument, *ref);
            shape(argument, *ref, {B, T, HV, {"K", key_dim_}});
            floating(argument, *ref);
            last_contiguous(argument, *ref);
        }
        CULA_REQUIRE(!args_.allow_neg_eigval || args_.beta_is_logit, "allow_neg_eigval",
                     "come with use_beta_sigmoid_in_kernel: it doubles the sigmoid", "true without it");
    }

    void check_sequences() {
        const TensorRef& cu = args_.cu_seqlens;
        sequences_ = batch_;
        CULA_REQUIRE(sequences_ <= kMostSequences, "q", "have a batch size below 2^31",
                     std::to_string(sequences_));
        if (!cu) return;
        shape("cu_seqlens", cu, {{"N + 1", kAny}});
        dtype("cu_seqlens", cu, {Dtype::kInt32, Dtype::kInt64});
        last_contiguous("cu_seqlens", cu);
        CULA_REQUIRE(batch_ == 1, "q", "have batch size 1 with cu_seqlens (pack the sequences along T)",
                     std::to_string(batch_));
        CULA_REQUIRE(cu.size[0] >= 1, "cu_seqlens", "have N + 1 >= 1 elements", "0");
        sequences_ = cu.size[0] - 1;
        CULA_REQUIRE(sequences_ <= kMostSequences, "cu_seqlens", "name fewer than 2^31 sequences",
                     std::to_string(sequences_));
        if (!host_readable_) return;
        std::int64_t previous = 0;
        for (std::int64_t i = 0; i <= sequences_; ++i) {
            const std::int64_t at = read_index(cu, i);
            const auto where = [&] {
                return "cu_seqlens[" + std::to_string(i) + "] = " + std::to_string(at);
            };
            CULA_REQUIRE(i != 0 || at == 0, "cu_seqlens", "start at 0", where());
            CULA_REQUIRE(at >= previous, "cu_seqlens", "not decrease",
                         where() + " after " + std::to_string(previous));
            CULA_REQUIRE(at <= tokens_, "cu_seqlens",
                         "end within the " + std::to_string(tokens_) + " tokens of q", where());
            previous = at;
        }
    }

    // An index tensor [N] of slots of `states`. Entries beyond the pool are refused if the host can read
    // them.
    void indices(std::string_view argument, const TensorRef& ref, const TensorRef& states,
                 bool written) const {
        if (!ref) return;
        shape(argument, ref, {{"N", sequences_}});
        dtype(argument, ref, {Dtype::kInt32, Dtype::kInt64});
        if (host_readable_) slots(argument, ref, states, written);
    }

    // Every element of an index tensor must be negative, null, or a slot of `states`. Slots that are written
    // must be distinct.
    void slots(std::string_view argument, const TensorRef& ref, const TensorRef& states, bool written) const {
        const std::int64_t columns = ref.ndim > 1 ? ref.size[1] : 1;
        std::vector<std::pair<std::int64_t, std::int64_t>> used;  // slot, position
        for (std::int64_t n = 0; n < ref.size[0]; ++n) {
            for (std::int64_t s = 0; s < columns; ++s) {
                const std::int64_t slot = ref.ndim > 1 ? read_index(ref, n, s) : read_index(ref, n);
                if (is_null(args_, slot)) continue;
                CULA_REQUIRE(slot < states.size[0], argument,
                             "stay below the " + std::to_string(states.size[0]) + " slots of the pool",
                             std::to_string(slot) + " for sequence " + std::to_string(n));
                if (written) used.emplace_back(slot, n);
            }
        }
        std::sort(used.begin(), used.end());
        for (std::size_t i = 1; i < used.size(); ++i)
            CULA_REQUIRE(used[i].first != used[i - 1].first, argument, "name each slot that is written once",
                         "slot " + std::to_string(used[i].first) + " for sequences " +
                             std::to_string(used[i - 1].second) + " and " + std::to_string(used[i].second));
    }

    void check_state() const {
        const TensorRef &initial = args_.initial_state, &final = args_.final_state;
        const TensorRef &read = args_.initial_state_indices, &write = args_.final_state_indices;
        const bool verify = pass_ == Pass::kVerify;
        const bool pool_by_token = verify && args_.state_indices;
        const Dim slots_or_n{"N", sequences_}, slots{"slots", kAny};
        const bool scaled = pass_ != Pass::kSegment && pass_ != Pass::kBackward;
        if (initial) state("initial_state", initial, read || pool_by_token ? slots : slots_or_n, scaled);
        if (final) {
            state("final_state", final, read || write || pool_by_token ? slots : slots_or_n, scaled);
            writable("final_state", final);
        }
        if (initial && final)
            CULA_REQUIRE(same_places(initial, final) || apart(initial, final), "final_state",
                         "have each element where initial_state has it, or lie elsewhere",
                         "memory that overlaps initial_state in other places");
        check_scales();
        CULA_REQUIRE(!read || initial || final, "initial_state_indices", "come with a state",
                     "indices alone");
        CULA_REQUIRE(!write || final, "final_state_indices", "come with a state to write", "indices alone");
        CULA_REQUIRE(!write || read || !args_.snapshot_indices, "initial_state_indices",
                     "be given with final_state_indices and snapshot_indices", "none");
        const bool writes_at_read = final && !write && !pool_by_token;
        if (read && initial) indices("initial_state_indices", read, initial, writes_at_read);
        if (read && !initial) indices("initial_state_indices", read, final, writes_at_read);
        if (writes_at_read && read && initial && host_readable_)
            this->slots("initial_state_indices", read, final, true);
        indices("final_state_indices", write, final, true);
        if (args_.has_initial_state) {
            shape("has_initial_state", args_.has_initial_state, {{"N", sequences_}});
            dtype("has_initial_state", args_.has_initial_state, {Dtype::kBool});
            last_contiguous("has_initial_state", args_.has_initial_state);
            CULA_REQUIRE(static_cast<bool>(initial), "has_initial_state", "come with an initial state",
                         "the mask alone");
        }
    }

    void check_prefill_outputs() const {
        if (args_.kept) {
            shape("kept", args_.kept, {Dim{"bytes / 4", kAny}});
            dtype("kept", args_.kept, {Dtype::kInt32});
            CULA_REQUIRE(args_.kept.stride[0] == 1, "kept", "be contiguous",
                         "a stride of " + std::to_string(args_.kept.stride[0]));
            const auto beyond = reinterpret_cast<std::uintptr_t>(args_.kept.data) % 64;
            CULA_REQUIRE(beyond == 0, "kept", "start at a multiple of 64 bytes",
                         std::to_string(beyond) + " bytes beyond one");
        }
        const TensorRef &states = args_.checkpoints, &plan = args_.checkpoint_plan;
        CULA_REQUIRE(static_cast<bool>(states) == static_cast<bool>(plan), "checkpoints",
                     "be given as states and plan together", "one of them");
        if (states) {
            state("checkpoints.states", states, {"slots", kAny});
            writable("checkpoints.states", states);
            shape("checkpoints.plan", plan, {{"M", kAny}, {"3", 3}});
            dtype("checkpoints.plan", plan, {Dtype::kInt32, Dtype::kInt64});
            if (host_readable_) check_plan();
        }
        const TensorRef& dense = args_.chunk_states;
        if (!dense) return;
        std::int64_t chunks = (tokens_ + args_.chunk_tokens - 1) / args_.chunk_tokens;
        if (args_.cu_seqlens && host_readable_) chunks = chunks_before(args_, sequences_);
        shape("chunk_states", dense,
              {{"B", batch_}, {"NT", kAny}, {"HV", value_heads_}, {"V", value_dim_}, {"K", key_dim_}});
        CULA_REQUIRE(dense.size[1] >= chunks || (args_.cu_seqlens && !host_readable_), "chunk_states",
                     "have room for " + std::to_string(chunks) + " chunks", std::to_string(dense.size[1]));
        state_memory("chunk_states", dense);
        writable("chunk_states", dense);
    }

    // Its shape is the kernel's to check.
    void check_saved() const {
        const TensorRef& saved = args_.saved;
        shape("saved", saved, {{"chunks", kAny}, {"HV", value_heads_}, {"words", kAny}});
        dtype("saved", saved, {Dtype::kInt32});
        CULA_REQUIRE(saved.stride[2] == 1 && saved.stride[1] == saved.size[2] &&
                         saved.stride[0] == saved.size[1] * saved.size[2],
                     "saved", "be contiguous",
                     "strides of " + std::to_string(saved.stride[0]) + ", " +
                         std::to_string(saved.stride[1]) + " and " + std::to_string(saved.stride[2]));
        const auto beyond = reinterpret_cast<std::uintptr_t>(saved.data) % 128;
        CULA_REQUIRE(beyond == 0, "saved", "start at a multiple of 128 bytes",
                     std::to_string(beyond) + " bytes beyond one");
        CULA_REQUIRE(!args_.kept, "saved", "be left out with kept", "both");
    }

    void check_plan() const {
        const TensorRef& plan = args_.checkpoint_plan;
        std::vector<std::int64_t> used;
        for (std::int64_t m = 0; m < plan.size[0]; ++m) {
            const std::int64_t n = read_index(plan, m, 0), offset = read_index(plan, m, 1),
                               slot = read_index(plan, m, 2);
            if (slot < 0) continue;
            const auto where = [&] { return " in row " + std::to_string(m); };
            CULA_REQUIRE(n >= 0 && n < sequences_, "checkpoints.plan",
                         "name a sequence below " + std::to_string(sequences_), std::to_string(n) + where());
            const std::int64_t length = tokens_of(args_, n).length;
            CULA_REQUIRE(
                offset >= 0 && offset <= length && (offset % kChunkTokens == 0 || offset == length),
                "checkpoints.plan",
                "name a multiple of 64 tokens within the sequence, or its length " + std::to_string(length),
                std::to_string(offset) + where());
            CULA_REQUIRE(slot < args_.checkpoints.size[0], "checkpoints.plan",
                         "name a slot below " + std::to_string(args_.checkpoints.size[0]),
                         std::to_string(slot) + where());
            used.push_back(slot);
        }
        std::sort(used.begin(), used.end());
        const auto twice = std::adjacent_find(used.begin(), used.end());
        if (twice != used.end())
            fail("checkpoints.plan", "name each slot once", "slot " + std::to_string(*twice) + " twice");
    }

    void check_verify() const {
        const TensorRef &per_token = args_.state_indices, &accepted = args_.num_accepted,
                        &snapshots = args_.snapshots;
        std::int64_t longest = args_.cu_seqlens ? 0 : tokens_;
        if (args_.cu_seqlens && host_readable_)
            for (std::int64_t n = 0; n < sequences_; ++n)
                longest = std::max(longest, tokens_of(args_, n).length);
        const auto holds_row = [&](std::string_view argument, const TensorRef& ref, std::size_t dim) {
            CULA_REQUIRE(ref.size[dim] >= longest, argument,
                         "have room for the longest row's " + std::to_string(longest) + " tokens",
                         std::to_string(ref.size[dim]));
        };
        if (per_token) {
            shape("state_indices", per_token, {{"N", sequences_}, {"S", kAny}});
            dtype("state_indices", per_token, {Dtype::kInt32, Dtype::kInt64});
            CULA_REQUIRE(args_.initial_state || args_.final_state, "state_indices", "come with a state pool",
                         "indices alone");
            CULA_REQUIRE(!args_.final_state_indices, "final_state_indices", "be left out with state_indices",
                         "both");
            CULA_REQUIRE(per_token.size[1] > 0 || sequences_ == 0, "state_indices",
                         "have a slot that each sequence starts from", shape_of(per_token));
            holds_row("state_indices", per_token, 1);
            if (host_readable_)
                slots("state_indices", per_token, args_.final_state ? args_.final_state : args_.initial_state,
                      static_cast<bool>(args_.final_state));
        }
        const bool starts_by_token = per_token && args_.initial_state && !args_.initial_state_indices;
        if (accepted) {
            given("state_indices", per_token, "with num_accepted");
            shape("num_accepted", accepted, {{"N", sequences_}});
            dtype("num_accepted", accepted, {Dtype::kInt32, Dtype::kInt64});
            if (host_readable_)
                for (std::int64_t n = 0; n < sequences_; ++n) {
                    const std::int64_t count = read_index(accepted, n);
                    CULA_REQUIRE(count >= 1 && count <= per_token.size[1], "num_accepted",
                                 "lie in 1.." + std::to_string(per_token.size[1]),
                                 std::to_string(count) + " for sequence " + std::to_string(n));
                }
        }
        for (std::int64_t n = 0; starts_by_token && host_readable_ && n < sequences_; ++n) {
            const std::int64_t from = read_index(per_token, n, accepted ? read_index(accepted, n) - 1 : 0);
            CULA_REQUIRE(is_null(args_, from) || from < args_.initial_state.size[0], "state_indices",
                         "name a slot of initial_state's " + std::to_string(args_.initial_state.size[0]) +
                             " where a sequence starts",
                         std::to_string(from) + " for sequence " + std::to_string(n));
        }
        if (snapshots) {
            shape("snapshots", snapshots,
                  {{"slots", kAny}, {"S", kAny}, {"HV", value_heads_}, {"V", value_dim_}, {"K", key_dim_}});
            state_memory("snapshots", snapshots);
            writable("snapshots", snapshots);
            holds_row("snapshots", snapshots, 1);
            if (args_.snapshot_indices)
                indices("snapshot_indices", args_.snapshot_indices, snapshots, true);
            else
                CULA_REQUIRE(snapshots.size[0] >= sequences_, "snapshots",
                             "have a slot for each of " + std::to_string(sequences_) + " rows",
                             std::to_string(snapshots.size[0]));
        }
        CULA_REQUIRE(!args_.snapshot_indices || snapshots, "snapshot_indices", "come with snapshots",
                     "indices alone");
        if (!args_.parents) return;
        shape("parents", args_.parents, {{"N", sequences_}, {"S", kAny}});
        dtype("parents", args_.parents, {Dtype::kInt32, Dtype::kInt64});
        holds_row("parents", args_.parents, 1);
        CULA_REQUIRE(
            !args_.final_state || per_token, "final_state",
            "be left out with parents (a tree has no last state), or be indexed per token by state_indices",
            "a state");
        if (host_readable_)
            for (std::int64_t n = 0; n < sequences_; ++n)
                for (std::int64_t t = 0; t < tokens_of(args_, n).length; ++t) {
                    const std::int64_t parent = read_index(args_.parents, n, t);
                    CULA_REQUIRE(parent < t, "parents", "name an earlier token of the row",
                                 std::to_string(parent) + " for token " + std::to_string(t) + " of row " +
                                     std::to_string(n));
                }
    }

    void check_segment() const {
        const TensorRef &m = args_.segment_m, &b = args_.segment_b;
        const Dim N{"N", sequences_}, HV{"HV", value_heads_}, K{"K", key_dim_}, V{"V", value_dim_};
        if (m || !args_.keep) given("b", b, "as the output");
        if (m && has_diagonal_map(args_.algorithm.update)) shape("m", m, {N, HV, K});
        if (m && !has_diagonal_map(args_.algorithm.update)) shape("m", m, {N, HV, K, K});
        if (b) shape("b", b, {N, HV, V, K});
        for (const auto& [argument, ref] : {std::pair{"m", &m}, std::pair{"b", &b}}) {
            if (!*ref) continue;
            parameter(argument, *ref);
            writable(argument, *ref);
            if (ref->ndim == 4)
                row_or_column_contiguous(argument, *ref);
            else
                last_contiguous(argument, *ref);
        }
        CULA_REQUIRE(!m || !b || apart(m, b), "m", "share no memory with b", "memory that overlaps it");
        const std::pair<std::string_view, const TensorRef*> states[] = {
            {"initial_state", &args_.initial_state}, {"final_state", &args_.final_state}};
        for (const auto& [argument, ref] : states)
            CULA_REQUIRE(!*ref, argument, "be left out: a segment's map does not depend on it", "a state");
    }

    // The gradient of an input: its shape, in its dtype or float32.
    void gradient(std::string_view argument, const TensorRef& ref, std::string_view of,
                  const TensorRef& input) const {
        CULA_REQUIRE(static_cast<bool>(input), argument, "be left out without " + std::string(of),
                     "a tensor");
        bool same = ref.ndim == input.ndim;
        for (std::size_t i = 0; same && i < static_cast<std::size_t>(ref.ndim); ++i)
            same = ref.size[i] == input.size[i];
        CULA_REQUIRE(same, argument, "have the shape of " + std::string(of) + ", " + shape_of(input),
                     shape_of(ref));
        CULA_REQUIRE_MEMORY(argument, ref);
        dtype_or_float32(argument, ref, input.dtype);
        writable(argument, ref);
    }

    void check_backward() const {
        const TensorRef &d_o = args_.d_o, &d_state = args_.d_final_state;
        if (d_o) {
            shape("d_o", d_o, {{"B", batch_}, {"T", tokens_}, {"HV", value_heads_}, {"V", value_dim_}});
            dtype_or_float32("d_o", d_o, args_.q.dtype);
            last_contiguous("d_o", d_o);
        }
        if (d_state) state("d_final_state", d_state, {"N", sequences_});
        for (const auto& [argument, field, of_name, of] : kGradients) {
            const TensorRef& ref = args_.*field;
            if (!ref) continue;
            if (field == &Args::d_initial_state) {
                given("initial_state", args_.initial_state, "with d_initial_state");
                state(argument, ref, {"N", sequences_});
                writable(argument, ref);
            } else {
                gradient(argument, ref, of_name, args_.*of);
                if (ref.ndim == 4) last_contiguous(argument, ref);
            }
        }
        const std::pair<std::string_view, const TensorRef*> forward[] = {
            {"o", &args_.o},
            {"final_state", &args_.final_state},
            {"initial_state_indices", &args_.initial_state_indices},
            {"final_state_indices", &args_.final_state_indices}};
        for (const auto& [argument, ref] : forward)
            CULA_REQUIRE(!*ref, argument, "be left out: backward takes dense states and computes no outputs",
                         "a tensor");
        check_apart();
    }

    // What backward writes shares no memory with what it reads, nor with what else it writes.
    void check_apart() const {
        const std::pair<std::string_view, const TensorRef*> read[] = {
            {"decay", &args_.gamma},
            {"cu_seqlens", &args_.cu_seqlens},
            {"has_initial_state", &args_.has_initial_state},
            {"saved", &args_.saved},
            {"d_o", &args_.d_o},
            {"d_final_state", &args_.d_final_state}};
        for (std::size_t i = 0; i < kGradients.size(); ++i) {
            const TensorRef& ref = args_.*kGradients[i].field;
            if (!ref) continue;
            for (const Gradient& other : kGradients)
                share_nothing(kGradients[i].name, ref, other.of_name, args_.*other.of);
            for (const auto& [other, of_other] : read)
                share_nothing(kGradients[i].name, ref, other, *of_other);
            for (const Gradient& other : std::span(kGradients).first(i))
                share_nothing(kGradients[i].name, ref, other.name, args_.*other.field);
        }
    }

    void check_forks() const {
        const std::optional<Chain> chain = find_chain(args_);
        if (!chain) return;
        const std::string sequence = "sequence " + std::to_string(chain->sequence),
                          expected =
                              "not let " + sequence + " start from a slot that another sequence writes";
        if (chain->slot < 0)
            fail("initial_state_indices", expected + " where it writes none itself", "such a slot");
        fail("initial_state_indices", expected + " and write one itself that a third starts from",
             "slot " + std::to_string(chain->slot) + ", from which sequence " + std::to_string(chain->other) +
                 " starts");
    }

    // Refuses arguments that belong to another pass.
    void refuse_foreign() const {
        const auto only = [&](Pass pass,
                              std::initializer_list<std::pair<std::string_view, const TensorRef*>> refs) {
            if (pass_ == pass) return;
            for (const auto& [argument, ref] : refs)
                CULA_REQUIRE(!*ref, argument, "be left out: it belongs to " + std::string(name(pass)),
                             "a tensor");
        };
        only(Pass::kPrefill, {{"checkpoints", &args_.checkpoints},
                              {"checkpoints.plan", &args_.checkpoint_plan},
                              {"chunk_states", &args_.chunk_states},
                              {"kept", &args_.kept}});
        CULA_REQUIRE(!args_.saved || pass_ == Pass::kPrefill || pass_ == Pass::kBackward, "saved",
                     "be left out: it belongs to prefill and backward", "a tensor");
        only(Pass::kVerify, {{"state_indices", &args_.state_indices},
                             {"num_accepted", &args_.num_accepted},
                             {"snapshots", &args_.snapshots},
                             {"snapshot_indices", &args_.snapshot_indices},
                             {"parents", &args_.parents}});
        only(Pass::kSegment, {{"m", &args_.segment_m}, {"b", &args_.segment_b}});
        only(Pass::kBackward, {{"d_o", &args_.d_o}, {"d_final_state", &args_.d_final_state}});
        for (const Gradient& row : kGradients) only(Pass::kBackward, {{row.name, &(args_.*row.field)}});
        CULA_REQUIRE(!args_.o || pass_ != Pass::kSegment, "o", "be left out: a segment has a map, no outputs",
                     "a tensor");
        CULA_REQUIRE(!args_.keep || pass_ == Pass::kSegment, "keep", "be false: it belongs to segment",
                     "true");
    }
};

}  // namespace

void validate(Pass pass, const Args& args, Indices indices) { Validator(pass, args, indices).check(); }

}  // namespace cula
