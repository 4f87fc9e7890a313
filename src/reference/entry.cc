// SPDX-License-Identifier: Apache-2.0
#include "reference/entry.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/rows.h"
#include "reference/backward.h"
#include "reference/recurrence.h"
#include "reference/tasks.h"

namespace cula::reference {
namespace {

// One call in one precision. A task is a value head of a sequence; each worker has scratch for the states of
// one task.
template <class Scalar, class Sum>
class Call {
public:
    Call(const Args& args, const Context& context) : args_(args), context_(context) {}

    std::size_t workspace_bytes() const {
        return static_cast<std::size_t>(num_workers(context_, tasks()) * bytes_per_worker());
    }

    // Prefill and decode: o, the final state, and the states asked for on the way.
    void run_through() const {
        for_each_task([this](std::int64_t n, std::int64_t hv, Scalar* scratch) {
            const StateRows rows = states_of(args_, n);
            const Tokens tokens = tokens_of(args_, n);
            if (rows.skipped) return zero_output(tokens, hv);
            const State<Scalar> S = state(scratch);
            load(rows.initial, hv, S);
            for (std::int64_t t = 0; t < tokens.length; ++t) {
                store_passing(n, tokens, t, hv, S);
                step(tokens, t, hv, S);
            }
            store_passing(n, tokens, tokens.length, hv, S);
            store(rows.final, hv, S);
        });
        zero_tail();
    }

    // Verify: a state per draft token, each the child of the token before it or of its parent in the tree.
    void run_drafts() const {
        for_each_task([this](std::int64_t n, std::int64_t hv, Scalar* scratch) {
            const StateRows rows = states_of(args_, n);
            const Tokens tokens = tokens_of(args_, n);
            if (rows.skipped) return zero_output(tokens, hv);
            // states[0] is the base, states[t + 1] the state after token t; a chain reuses states[0].
            const State<Scalar> base = state(scratch);
            load(rows.initial, hv, base);
            for (std::int64_t t = 0; t < tokens.length; ++t) {
                State<Scalar> S = base;
                if (args_.parents) {
                    const std::int64_t parent = std::max<std::int64_t>(-1, read_index(args_.parents, n, t));
                    S = state(base.data + (t + 1) * base.size());
                    std::copy_n(base.data + (parent + 1) * base.size(), base.size(), S.data);
                }
                step(tokens, t, hv, S);
                store_draft(n, t, hv, S);
            }
            store(rows.final, hv, base);
        });
        zero_tail();
    }

    // Segment: B is the state that the sequence leaves from zero; the columns of M are the states that it
    // leaves from the unit vectors when it writes no values.
    void run_map() const {
        for_each_task([this](std::int64_t n, std::int64_t hv, Scalar* scratch) {
            const Tokens tokens = tokens_of(args_, n);
            const std::int64_t key_dim = args_.q.size[3];
            const bool diagonal = has_diagonal_map(args_.algorithm.update);
            const State<Scalar> B = state(scratch), M{scratch + B.size(), key_dim, diagonal ? 1 : key_dim};
            std::fill_n(B.data, B.size(), Scalar{});
            for (std::int64_t i = 0; i < M.size(); ++i) {
                const bool one = diagonal || i / key_dim == i % key_dim;
                M.data[i] = static_cast<Scalar>(one ? 1.0f : 0.0f);
            }
            for (std::int64_t t = 0; t < tokens.length; ++t) {
                const std::int64_t at = tokens.begin + t;
                const Token<Scalar, Sum> token(args_, tokens.batch, at, hv);
                pass_token(args_, token, tokens.batch, at, hv, B);
                if (diagonal)
                    decay(token, M);
                else
                    pass_token(args_, token, tokens.batch, at, hv, M, false);
            }
            store_state(matrix_at(args_.segment_b, n, hv), B);
            if (!args_.segment_m) return;
            for (std::int64_t i = 0; i < M.key_dim; ++i)
                for (std::int64_t j = 0; j < M.value_dim; ++j) {
                    if (diagonal)
                        write(args_.segment_m, M.row(i)[j], n, hv, i);
                    else
                        write(args_.segment_m, M.row(i)[j], n, hv, i, j);
                }
        });
    }

private:
    State<Scalar> state(Scalar* data) const { return {data, args_.q.size[3], args_.v.size[3]}; }

    std::int64_t tasks() const { return num_sequences(args_) * args_.v.size[2]; }

    std::int64_t bytes_per_worker() const {
        const std::int64_t key_dim = args_.q.size[3], value_dim = args_.v.size[3];
        const std::int64_t states = args_.parents ? longest_row(args_) + 1 : 1;
        const std::int64_t scalars = states * key_dim * value_dim + (args_.segment_b ? key_dim * key_dim : 0);
        return whole_lines(scalars * static_cast<std::int64_t>(sizeof(Scalar)));
    }

    // body(n, hv, scratch) for every sequence and value head, shared out among the workers.
    template <class Body>
    void for_each_task(const Body& body) const {
        const std::int64_t heads = args_.v.size[2];
        reference::for_each_task(context_, tasks(), bytes_per_worker(),
                                 [&](std::int64_t task, std::byte* scratch) {
                                     body(task / heads, task % heads, reinterpret_cast<Scalar*>(scratch));
                                 });
    }

    void step(const Tokens& tokens, std::int64_t t, std::int64_t hv, State<Scalar> S) const {
        const std::int64_t at = tokens.begin + t;
        const Token<Scalar, Sum> token(args_, tokens.batch, at, hv);
        pass_token(args_, token, tokens.batch, at, hv, S);
        output(args_, token, S, tokens.batch, at, hv);
    }

    static void load(const StateRow& row, std::int64_t hv, State<Scalar> S) {
        if (!row) return static_cast<void>(std::fill_n(S.data, S.size(), Scalar{}));
        load_state<Sum>(matrix_at(row.states, row.slot, hv), S, scales_at(row.scales, row.slot, hv));
    }

    static void store(const StateRow& row, std::int64_t hv, State<Scalar> S) {
        if (row)
            store_state<Sum>(matrix_at(row.states, row.slot, hv), S, scales_at(row.scales, row.slot, hv));
    }

    // The dense state and the checkpoints that lie `done` tokens into sequence n.
    void store_passing(std::int64_t n, const Tokens& tokens, std::int64_t done, std::int64_t hv,
                       State<Scalar> S) const {
        if (args_.chunk_states && done % args_.chunk_tokens == 0 && done < tokens.length)
            store_state(matrix_at(args_.chunk_states, tokens.batch,
                                  chunks_before(args_, n) + done / args_.chunk_tokens, hv),
                        S);
        if (!args_.checkpoints || (done % kChunkTokens != 0 && done != tokens.length)) return;
        const TensorRef& plan = args_.checkpoint_plan;
        for (std::int64_t m = 0; m < plan.size[0]; ++m) {
            const std::int64_t slot = read_index(plan, m, 2);
            if (slot >= 0 && read_index(plan, m, 0) == n && read_index(plan, m, 1) == done)
                store_state(matrix_at(args_.checkpoints, slot, hv), S);
        }
    }

    void store_draft(std::int64_t n, std::int64_t t, std::int64_t hv, State<Scalar> S) const {
        if (args_.state_indices && args_.final_state) {
            const std::int64_t slot = read_index(args_.state_indices, n, t);
            if (!is_null(args_, slot)) store({args_.final_state, slot, args_.final_scales}, hv, S);
        }
        if (args_.snapshots) {
            const std::int64_t slot = args_.snapshot_indices ? read_index(args_.snapshot_indices, n) : n;
            if (!args_.snapshot_indices || !is_null(args_, slot))
                store_state(matrix_at(args_.snapshots, slot, t, hv), S);
        }
    }

    void zero_output(const Tokens& tokens, std::int64_t hv) const {
        for (std::int64_t t = 0; t < tokens.length; ++t)
            for (std::int64_t v = 0; v < args_.v.size[3]; ++v)
                write(args_.o, 0.0f, tokens.batch, tokens.begin + t, hv, v);
    }

    // Tokens that belong to no sequence.
    void zero_tail() const {
        if (!args_.cu_seqlens) return;
        const std::int64_t end = read_index(args_.cu_seqlens, num_sequences(args_));
        const Tokens tail{.batch = 0, .begin = end, .length = args_.q.size[1] - end};
        for (std::int64_t hv = 0; hv < args_.v.size[2]; ++hv) zero_output(tail, hv);
    }

    const Args& args_;
    const Context& context_;
};

using Oracle = Call<double, double>;

// visit(call) with the call, a Call or a Backward, in the precision of q.
template <template <class, class> class Kind = Call, class Visit>
auto in_own_precision(const Args& args, const Context& context, const Visit& visit) {
    switch (args.q.dtype) {
        case Dtype::kBFloat16: return visit(Kind<BFloat16, float>(args, context));
        case Dtype::kFloat16: return visit(Kind<Float16, float>(args, context));
        case Dtype::kFloat32: return visit(Kind<float, float>(args, context));
        default: return visit(Kind<double, double>(args, context));
    }
}

}  // namespace

Support supports(const Problem& problem) {
    if (problem.pass == Pass::kSegment && problem.beta_per_value && !takes_erase(problem.algorithm.update))
        return Support::no("a write strength per value channel gives each value channel a map of its own");
    if (problem.pass == Pass::kBackward && problem.value_dim > kLargestDim)
        return Support::no("takes V up to 256, got " + std::to_string(problem.value_dim));
    return Support::yes();
}

std::size_t workspace_bytes(Pass pass, const Args& args, const Context& context) {
    if (pass == Pass::kBackward) return Backward<double, double>(args, context).workspace_bytes();
    return Oracle(args, context).workspace_bytes();
}
void prefill(const Args& args, const Context& context) { Oracle(args, context).run_through(); }
void decode(const Args& args, const Context& context) { Oracle(args, context).run_through(); }
void verify(const Args& args, const Context& context) { Oracle(args, context).run_drafts(); }
void segment(const Args& args, const Context& context) { Oracle(args, context).run_map(); }
void backward(const Args& args, const Context& context) { Backward<double, double>(args, context).run(); }

namespace naive {

Support supports(const Problem& problem) { return reference::supports(problem); }

std::size_t workspace_bytes(Pass pass, const Args& args, const Context& context) {
    const auto bytes = [](const auto& call) { return call.workspace_bytes(); };
    return pass == Pass::kBackward ? in_own_precision<Backward>(args, context, bytes)
                                   : in_own_precision(args, context, bytes);
}

void prefill(const Args& args, const Context& context) {
    in_own_precision(args, context, [](const auto& call) { call.run_through(); });
}

void decode(const Args& args, const Context& context) { naive::prefill(args, context); }

void verify(const Args& args, const Context& context) {
    in_own_precision(args, context, [](const auto& call) { call.run_drafts(); });
}

void segment(const Args& args, const Context& context) {
    in_own_precision(args, context, [](const auto& call) { call.run_map(); });
}

void backward(const Args& args, const Context& context) {
    in_own_precision<Backward>(args, context, [](const auto& call) { call.run(); });
}

}  // namespace naive
}  // namespace cula::reference
