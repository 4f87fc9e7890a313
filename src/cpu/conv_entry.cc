// SPDX-License-Identifier: Apache-2.0
// The host side of the short convolution: it checks a call, divides it into pieces of a sequence and blocks
// of channels, and adds up what they found for d_weight and d_bias, always in the same order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/float16.h"
#include "core/rows.h"
#include "cpu/host.h"
#include "cpu/layers.h"
#include "cula/layers.h"

namespace cula {
namespace {

using cpu::ConvStepTask;
using cpu::ConvTask;
using cpu::kConvChannels;
using cpu::kConvTokens;
using cpu::LayerIsa;
using cpu::Matrix;

constexpr std::string_view kForward = "causal_conv1d", kBackward = "causal_conv1d_backward",
                           kStep = "causal_conv1d_update";

// With fewer elements, waking other threads costs more than they save.
constexpr std::int64_t kWorthSharing = 1 << 15;

// A tensor and the argument that it is.
using Named = std::pair<std::string_view, const TensorRef*>;

struct Checker {
    std::string_view op;

    [[noreturn]] void fail(std::string_view argument, std::string_view expected,
                           const std::string& given) const {
        throw Error(std::string(op) + ": " + std::string(argument) + " must " + std::string(expected) +
                    ", got " + given);
    }

    void floats(std::string_view argument, const TensorRef& ref) const {
        const bool good =
            ref.dtype == Dtype::kFloat32 || ref.dtype == Dtype::kBFloat16 || ref.dtype == Dtype::kFloat16;
        CULA_REQUIRE(good, argument, "have dtype float32, bfloat16 or float16", std::string(name(ref.dtype)));
        CULA_REQUIRE_MEMORY(argument, ref);
    }

    void shape(std::string_view argument, const TensorRef& ref, std::string_view letters,
               std::initializer_list<std::int64_t> sizes) const {
        const bool good = ref.ndim == static_cast<int>(sizes.size()) &&
                          std::equal(sizes.begin(), sizes.end(), ref.size.begin());
        if (good) return;
        std::string wanted;
        for (const std::int64_t size : sizes) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
        fail(argument, "have shape " + std::string(letters) + " = [" + wanted + "]", shape_of(ref));
    }

    void output(std::string_view argument, const TensorRef& ref) const {
        CULA_REQUIRE(!overlaps_itself(ref), argument, "not overlap itself in memory",
                     "strides that make elements share an address");
    }

    // What is written shares no memory with what is read, nor with what else is written.
    void disjoint(std::initializer_list<Named> written, std::initializer_list<Named> read) const {
        const auto check = [&](const Named& one, const Named& other) {
            const bool both = *one.second && *other.second;
            CULA_REQUIRE(!both || apart(*one.second, *other.second), one.first,
                         "share no memory with " + std::string(other.first), "memory of both");
        };
        for (const Named* each = written.begin(); each != written.end(); ++each) {
            for (const Named& other : read) check(*each, other);
            for (const Named* before = written.begin(); before != each; ++before) check(*each, *before);
        }
    }

    void integers(std::string_view argument, const TensorRef& ref) const {
        CULA_REQUIRE(ref.dtype == Dtype::kInt32 || ref.dtype == Dtype::kInt64, argument,
                     "have dtype int32 or int64", std::string(name(ref.dtype)));
        CULA_REQUIRE_MEMORY(argument, ref);
    }

    void device(const Context& context) const {
        CULA_REQUIRE(context.device.kind == DeviceKind::kCpu, "x", "be on the CPU", "another device");
    }

    void inputs(const TensorRef& x, const TensorRef& weight, const TensorRef& bias) const {
        CULA_REQUIRE(x.ndim == 3, "x", "have shape [B, T, D]", shape_of(x));
        floats("x", x);
        CULA_REQUIRE(weight.ndim == 2 && weight.size[0] == x.size[2] && weight.size[1] >= 1 &&
                         weight.size[1] <= kMostWidth,
                     "weight",
                     "have shape [D, W] of x's D = " + std::to_string(x.size[2]) + ", W from 1 to " +
                         std::to_string(kMostWidth),
                     shape_of(weight));
        floats("weight", weight);
        if (!bias) return;
        shape("bias", bias, "[D]", {x.size[2]});
        floats("bias", bias);
    }

    void lengths(const TensorRef& cu, const TensorRef& x) const {
        CULA_REQUIRE(cu.ndim == 1 && cu.size[0] >= 1, "cu_seqlens", "have shape [N + 1]", shape_of(cu));
        integers("cu_seqlens", cu);
        CULA_REQUIRE(x.size[0] == 1, "x", "have B = 1 with cu_seqlens", "B = " + std::to_string(x.size[0]));
        std::int64_t before = 0;
        for (std::int64_t n = 0; n < cu.size[0]; ++n) {
            const std::int64_t value = read_index(cu, n);
            CULA_REQUIRE(n > 0 || value == 0, "cu_seqlens", "begin with 0", std::to_string(value));
            CULA_REQUIRE(value >= before, "cu_seqlens", "not fall",
                         std::to_string(value) + " behind " + std::to_string(before));
            before = value;
        }
        CULA_REQUIRE(before <= x.size[1], "cu_seqlens",
                     "end within x's " + std::to_string(x.size[1]) + " tokens", std::to_string(before));
    }

    void state(std::string_view argument, const TensorRef& ref, std::int64_t sequences, std::int64_t channels,
               std::int64_t least) const {
        CULA_REQUIRE(
            ref.ndim == 3 && ref.size[0] == sequences && ref.size[1] == channels && ref.size[2] >= least,
            argument,
            "have shape [N, D, S] = [" + std::to_string(sequences) + ", " + std::to_string(channels) +
                ", S], S at least " + std::to_string(least),
            shape_of(ref));
        floats(argument, ref);
    }
};

void check(const Convolution& c, const Checker& checker, const Context& context, bool backward) {
    const auto fail = [&](std::string_view argument, std::string_view expected, const std::string& given) {
        checker.fail(argument, expected, given);
    };
    checker.device(context);
    checker.inputs(c.x, c.weight, c.bias);
    const TensorRef& x = c.x;
    CULA_REQUIRE(!c.cu_seqlens || !c.seq_idx, "seq_idx", "be left out with cu_seqlens", "both");
    if (c.cu_seqlens) checker.lengths(c.cu_seqlens, x);
    if (c.seq_idx) {
        checker.shape("seq_idx", c.seq_idx, "[B, T]", {x.size[0], x.size[1]});
        checker.integers("seq_idx", c.seq_idx);
        const bool states = c.initial_state || c.final_state || c.d_final_state || c.d_initial_state;
        CULA_REQUIRE(!states, "seq_idx", "be left out with states: give cu_seqlens", "both");
    }
    const std::int64_t sequences = c.cu_seqlens ? c.cu_seqlens.size[0] - 1 : x.size[0], channels = x.size[2];
    if (c.initial_state)
        checker.state("initial_state", c.initial_state, sequences, channels, c.weight.size[1] - 1);
    const auto like = [&](std::string_view argument, const TensorRef& ref, const TensorRef& of,
                          bool written) {
        if (!ref) return;
        checker.floats(argument, ref);
        bool same = ref.ndim == of.ndim;
        for (int i = 0; i < of.ndim; ++i) same = same && ref.size[i] == of.size[i];
        CULA_REQUIRE(same, argument, "have shape " + shape_of(of), shape_of(ref));
        if (written) checker.output(argument, ref);
    };
    if (!backward) {
        CULA_REQUIRE(static_cast<bool>(c.y), "y", "be given", "none");
        like("y", c.y, x, true);
        if (c.final_state) {
            checker.state("final_state", c.final_state, sequences, channels, 0);
            checker.output("final_state", c.final_state);
        }
        checker.disjoint({{"y", &c.y}, {"final_state", &c.final_state}}, {{"x", &x},
                                                                          {"weight", &c.weight},
                                                                          {"bias", &c.bias},
                                                                          {"initial_state", &c.initial_state},
                                                                          {"cu_seqlens", &c.cu_seqlens},
                                                                          {"seq_idx", &c.seq_idx}});
        return;
    }
    like("d_y", c.d_y, x, false);
    if (c.d_final_state) checker.state("d_final_state", c.d_final_state, sequences, channels, 0);
    like("d_x", c.d_x, x, true);
    like("d_weight", c.d_weight, c.weight, true);
    CULA_REQUIRE(!c.d_bias || c.bias, "d_bias", "be left out without bias", "a tensor");
    like("d_bias", c.d_bias, c.bias, true);
    CULA_REQUIRE(!c.d_initial_state || c.initial_state, "d_initial_state",
                 "be left out without initial_state", "a tensor");
    like("d_initial_state", c.d_initial_state, c.initial_state, true);
    checker.disjoint({{"d_x", &c.d_x},
                      {"d_weight", &c.d_weight},
                      {"d_bias", &c.d_bias},
                      {"d_initial_state", &c.d_initial_state}},
                     {{"d_y", &c.d_y},
                      {"d_final_state", &c.d_final_state},
                      {"x", &x},
                      {"weight", &c.weight},
                      {"bias", &c.bias},
                      {"initial_state", &c.initial_state},
                      {"cu_seqlens", &c.cu_seqlens},
                      {"seq_idx", &c.seq_idx}});
}

// Tokens [begin, end) of row `batch` are sequence `number`, of which a piece has some.
struct Sequence {
    std::int64_t batch, begin, length, number;
};

struct Piece {
    std::size_t sequence;
    std::int64_t begin, end;  // within the sequence
};

struct Pieces {
    std::vector<Sequence> sequences;
    std::vector<Sequence> padding;  // tokens of no sequence
    std::vector<Piece> pieces;
};

Pieces divide(const Convolution& c) {
    Pieces all;
    const std::int64_t rows = c.x.size[0], tokens = c.x.size[1];
    if (c.cu_seqlens) {
        std::int64_t end = 0;
        for (std::int64_t n = 0; n + 1 < c.cu_seqlens.size[0]; ++n) {
            const std::int64_t begin = read_index(c.cu_seqlens, n);
            end = read_index(c.cu_seqlens, n + 1);
            all.sequences.push_back({0, begin, end - begin, n});
        }
        if (end < tokens) all.padding.push_back({0, end, tokens - end, 0});
    } else if (c.seq_idx) {
        for (std::int64_t b = 0; b < rows; ++b)
            for (std::int64_t t = 0; t < tokens;) {
                const std::int64_t value = read_index(c.seq_idx, b, t), begin = t;
                while (t < tokens && read_index(c.seq_idx, b, t) == value) ++t;
                (value < 0 ? all.padding : all.sequences).push_back({b, begin, t - begin, 0});
            }
    } else {
        for (std::int64_t b = 0; b < rows; ++b) all.sequences.push_back({b, 0, tokens, b});
    }
    for (std::size_t s = 0; s < all.sequences.size(); ++s) {
        const std::int64_t length = all.sequences[s].length;
        std::int64_t begin = 0;
        do {
            all.pieces.push_back({s, begin, std::min(begin + kConvTokens, length)});
            begin += kConvTokens;
        } while (begin < length);
    }
    return all;
}

// Channels from c on of row `row` of [row, rows, channels], or of its columns.
Matrix tokens_of(const TensorRef& ref, std::int64_t batch, std::int64_t token, std::int64_t c) {
    if (!ref) return {};
    return {ref.ptr(batch, token, c), ref.dtype, ref.stride[1], ref.stride[2]};
}

Matrix columns_of(const TensorRef& ref, std::int64_t c, std::int64_t slot = -1) {
    if (!ref) return {};
    if (ref.ndim == 1) return {ref.ptr(c), ref.dtype, 0, ref.stride[0]};
    if (ref.ndim == 2) return {ref.ptr(c, 0), ref.dtype, ref.stride[1], ref.stride[0]};
    return {ref.ptr(slot, c, 0), ref.dtype, ref.stride[2], ref.stride[1]};
}

ConvTask make_task(const Convolution& call, const Sequence& sequence, const Piece& piece, std::int64_t c) {
    ConvTask task{};
    task.x = tokens_of(call.x, sequence.batch, sequence.begin, c);
    task.y = tokens_of(call.y, sequence.batch, sequence.begin, c);
    task.weight = columns_of(call.weight, c);
    task.bias = columns_of(call.bias, c);
    task.initial = columns_of(call.initial_state, c, sequence.number);
    task.final = columns_of(call.final_state, c, sequence.number);
    task.begin = piece.begin, task.end = piece.end, task.length = sequence.length;
    task.initial_rows = call.initial_state ? call.initial_state.size[2] : 0;
    task.width = static_cast<int>(call.weight.size[1]);
    task.channels = static_cast<int>(std::min<std::int64_t>(kConvChannels, call.x.size[2] - c));
    task.silu = call.silu;
    task.final_rows = call.final_state ? call.final_state.size[2] : 0;
    if (call.d_final_state) task.final_rows = call.d_final_state.size[2];
    task.d_y = tokens_of(call.d_y, sequence.batch, sequence.begin, c);
    task.d_x = tokens_of(call.d_x, sequence.batch, sequence.begin, c);
    task.d_final = columns_of(call.d_final_state, c, sequence.number);
    task.d_initial = columns_of(call.d_initial_state, c, sequence.number);
    return task;
}

void store_any(void* p, Dtype dtype, double value) {
    switch (dtype) {
        case Dtype::kBFloat16: *static_cast<BFloat16*>(p) = BFloat16(static_cast<float>(value)); break;
        case Dtype::kFloat16: *static_cast<Float16*>(p) = Float16(static_cast<float>(value)); break;
        default: *static_cast<float*>(p) = static_cast<float>(value); break;
    }
}

void zero_padding(const TensorRef& ref, const std::vector<Sequence>& padding) {
    if (!ref) return;
    for (const Sequence& part : padding)
        for (std::int64_t t = part.begin; t < part.begin + part.length; ++t)
            for (std::int64_t c = 0; c < ref.size[2]; ++c)
                store_any(ref.ptr(part.batch, t, c), ref.dtype, 0.0);
}

int workers_for(const Context& context, std::int64_t tasks, std::int64_t elements) {
    return elements < kWorthSharing ? 1 : cpu::num_workers(context, tasks);
}

// Scratch of each worker.
class Scratch {
public:
    Scratch(std::size_t bytes, int workers)
        : floats_(bytes / sizeof(float)), memory_(floats_ * static_cast<std::size_t>(workers)) {}
    std::byte* of(int worker) {
        return reinterpret_cast<std::byte*>(memory_.data() + floats_ * static_cast<std::size_t>(worker));
    }

private:
    std::size_t floats_;
    std::vector<float> memory_;
};

std::int64_t blocks_of(const Convolution& call) {
    return (call.x.size[2] + kConvChannels - 1) / kConvChannels;
}

std::int64_t elements_of(const TensorRef& x) { return x.size[0] * x.size[1] * x.size[2]; }

}  // namespace

void convolve(const Convolution& call, const Context& context, std::string_view backend) {
    check(call, {kForward}, context, false);
    const LayerIsa& isa = cpu::layer_isa(kForward, backend);
    const Pieces all = divide(call);
    zero_padding(call.y, all.padding);
    const std::int64_t blocks = blocks_of(call),
                       tasks = static_cast<std::int64_t>(all.pieces.size()) * blocks;
    const int workers = workers_for(context, tasks, elements_of(call.x));
    Scratch scratch(isa.conv_scratch_bytes(static_cast<int>(call.weight.size[1])), workers);
    cpu::for_each_task(context, workers, tasks, false, [&](int worker, std::int64_t index) {
        const Piece& piece = all.pieces[static_cast<std::size_t>(index / blocks)];
        isa.conv(make_task(call, all.sequences[piece.sequence], piece, index % blocks * kConvChannels),
                 scratch.of(worker));
    });
}

void convolve_backward(const Convolution& call, const Context& context, std::string_view backend) {
    check(call, {kBackward}, context, true);
    const LayerIsa& isa = cpu::layer_isa(kBackward, backend);
    const Pieces all = divide(call);
    zero_padding(call.d_x, all.padding);
    const std::int64_t blocks = blocks_of(call), channels = call.x.size[2], width = call.weight.size[1];
    const auto pieces = static_cast<std::int64_t>(all.pieces.size()), tasks = pieces * blocks;
    const int workers = workers_for(context, tasks, elements_of(call.x));
    Scratch scratch(isa.conv_scratch_bytes(static_cast<int>(width)), workers);
    const bool sums = call.d_weight || call.d_bias;
    // [piece, block, W + 1, channels of the block]
    constexpr std::int64_t kFull = kConvChannels;
    const std::int64_t of_block = (width + 1) * kFull;
    std::vector<float> found(sums ? static_cast<std::size_t>(tasks * of_block) : 0);
    cpu::for_each_task(context, workers, tasks, false, [&](int worker, std::int64_t index) {
        const Piece& piece = all.pieces[static_cast<std::size_t>(index / blocks)];
        ConvTask task = make_task(call, all.sequences[piece.sequence], piece, index % blocks * kConvChannels);
        task.sums = sums ? found.data() + index * of_block : nullptr;
        isa.conv_backward(task, scratch.of(worker));
    });
    if (!sums) return;
    for (std::int64_t c = 0; c < channels; ++c) {
        const std::int64_t block = c / kFull, count = std::min(kFull, channels - block * kFull);
        for (std::int64_t j = 0; j <= width; ++j) {
            double sum = 0.0;
            for (std::int64_t p = 0; p < pieces; ++p)
                sum += static_cast<double>(
                    found[static_cast<std::size_t>((p * blocks + block) * of_block + j * count + c % kFull)]);
            if (j < width && call.d_weight) store_any(call.d_weight.ptr(c, j), call.d_weight.dtype, sum);
            if (j == width && call.d_bias) store_any(call.d_bias.ptr(c), call.d_bias.dtype, sum);
        }
    }
}

namespace {

std::int64_t sequences_of(const ConvolutionStep& c) {
    return c.cu_seqlens ? c.cu_seqlens.size[0] - 1 : c.x.size[0];
}

struct StepTokens {
    std::int64_t batch, begin, length;
};

StepTokens tokens_of(const ConvolutionStep& c, std::int64_t n) {
    if (!c.cu_seqlens) return {n, 0, c.x.size[1]};
    const std::int64_t begin = read_index(c.cu_seqlens, n);
    return {0, begin, read_index(c.cu_seqlens, n + 1) - begin};
}

std::int64_t slot_of(const ConvolutionStep& c, std::int64_t n) {
    const std::int64_t slot = c.state_indices ? read_index(c.state_indices, n) : n;
    return slot == c.null_index || slot < 0 ? -1 : slot;
}

void check(const ConvolutionStep& c, const Context& context) {
    const Checker checker{kStep};
    const auto fail = [&](std::string_view argument, std::string_view expected, const std::string& given) {
        checker.fail(argument, expected, given);
    };
    checker.device(context);
    checker.inputs(c.x, c.weight, c.bias);
    if (c.cu_seqlens) checker.lengths(c.cu_seqlens, c.x);
    const std::int64_t sequences = sequences_of(c), channels = c.x.size[2], width = c.weight.size[1];
    CULA_REQUIRE(c.state.ndim == 3, "conv_state", "have shape [slots, D, S]", shape_of(c.state));
    const std::int64_t slots = c.state.size[0], rows = c.state.size[2];
    checker.state("conv_state", c.state, slots, channels, std::max<std::int64_t>(width - 1, 1));
    checker.output("conv_state", c.state);
    CULA_REQUIRE(static_cast<bool>(c.y), "y", "be given", "none");
    checker.shape("y", c.y, "[B, T, D]", {c.x.size[0], c.x.size[1], channels});
    checker.floats("y", c.y);
    checker.output("y", c.y);
    const auto per_sequence = [&](std::string_view argument, const TensorRef& ref) {
        if (!ref) return;
        checker.shape(argument, ref, "[N]", {sequences});
        checker.integers(argument, ref);
    };
    per_sequence("conv_state_indices", c.state_indices);
    per_sequence("cache_seqlens", c.tokens_before);
    per_sequence("num_accepted_tokens", c.num_accepted);
    checker.disjoint({{"conv_state", &c.state}}, {{"x", &c.x}});
    // A task reads all tokens of its sequence and channels before it writes their y, so y may be x itself.
    CULA_REQUIRE(same_places(c.y, c.x) || apart(c.y, c.x), "y",
                 "have each element where x has it, or lie elsewhere",
                 "memory that overlaps x in other places");
    checker.disjoint({{"conv_state", &c.state}, {"y", &c.y}}, {{"weight", &c.weight},
                                                               {"bias", &c.bias},
                                                               {"conv_state_indices", &c.state_indices},
                                                               {"cu_seqlens", &c.cu_seqlens},
                                                               {"cache_seqlens", &c.tokens_before},
                                                               {"num_accepted_tokens", &c.num_accepted}});
    CULA_REQUIRE(!c.tokens_before || !c.num_accepted, "num_accepted_tokens", "be left out with cache_seqlens",
                 "both");
    CULA_REQUIRE(c.state_indices || slots >= sequences, "conv_state",
                 "have a slot for each of " + std::to_string(sequences) + " sequences",
                 std::to_string(slots));
    std::vector<std::int64_t> used;
    for (std::int64_t n = 0; n < sequences; ++n) {
        const std::int64_t slot = slot_of(c, n), tokens = tokens_of(c, n).length;
        if (slot < 0) continue;
        CULA_REQUIRE(slot < slots, "conv_state_indices",
                     "name slots below " + std::to_string(slots) + ", or null", std::to_string(slot));
        used.push_back(slot);
        if (c.tokens_before)
            CULA_REQUIRE(read_index(c.tokens_before, n) >= 0, "cache_seqlens", "not be negative",
                         std::to_string(read_index(c.tokens_before, n)));
        if (!c.num_accepted) continue;
        const std::int64_t accepted = read_index(c.num_accepted, n),
                           kept = std::max<std::int64_t>(width - 2, 0);
        CULA_REQUIRE(accepted >= 1 && accepted <= rows - width + 2, "num_accepted_tokens",
                     "be from 1 to " + std::to_string(rows - width + 2), std::to_string(accepted));
        CULA_REQUIRE(kept + tokens <= rows, "conv_state",
                     "have W - 2 + T = " + std::to_string(kept + tokens) +
                         " columns at least with num_accepted_tokens",
                     std::to_string(rows));
    }
    std::ranges::sort(used);
    const auto twice = std::ranges::adjacent_find(used);
    if (twice != used.end())
        fail("conv_state_indices", "name each slot once", "slot " + std::to_string(*twice) + " twice");
}

ConvStepTask make_task(const ConvolutionStep& call, std::int64_t n, std::int64_t slot, std::int64_t c) {
    const StepTokens tokens = tokens_of(call, n);
    ConvStepTask task{};
    task.x = tokens_of(call.x, tokens.batch, tokens.begin, c);
    task.y = tokens_of(call.y, tokens.batch, tokens.begin, c);
    task.weight = columns_of(call.weight, c);
    task.bias = columns_of(call.bias, c);
    task.state = columns_of(call.state, c, slot);
    task.tokens = tokens.length;
    task.width = static_cast<int>(call.weight.size[1]);
    task.channels = static_cast<int>(std::min<std::int64_t>(kConvChannels, call.x.size[2] - c));
    task.silu = call.silu;
    const std::int64_t rows = task.state_rows = call.state.size[2], before = task.width - 1;
    const auto in_ring = [&](std::int64_t row) { return (row % rows + rows) % rows; };
    if (call.tokens_before) {
        const std::int64_t position = read_index(call.tokens_before, n);
        task.window = in_ring(position - before);
        task.new_from = in_ring(position);
    } else if (call.num_accepted) {
        task.window = read_index(call.num_accepted, n) - 1;
        task.kept_from = task.window + 1;
        task.kept = task.new_from = std::max<std::int64_t>(before - 1, 0);
    } else {
        task.window = rows - before;
        task.kept_from = task.tokens;
        task.kept = std::max<std::int64_t>(rows - task.tokens, 0);
        task.new_from = in_ring(rows - task.tokens);
    }
    return task;
}

}  // namespace

void convolve_step(const ConvolutionStep& call, const Context& context, std::string_view backend) {
    check(call, context);
    const LayerIsa& isa = cpu::layer_isa(kStep, backend);
    const std::int64_t sequences = sequences_of(call), channels = call.x.size[2],
                       blocks = (channels + kConvChannels - 1) / kConvChannels, tasks = sequences * blocks;
    std::int64_t longest = 0, end = 0;
    for (std::int64_t n = 0; n < sequences; ++n) {
        const StepTokens tokens = tokens_of(call, n);
        longest = std::max(longest, tokens.length);
        end = tokens.begin + tokens.length;
        if (slot_of(call, n) < 0) zero_padding(call.y, {{tokens.batch, tokens.begin, tokens.length, 0}});
    }
    if (call.cu_seqlens) zero_padding(call.y, {{0, end, call.x.size[1] - end, 0}});
    const int workers = workers_for(context, tasks, elements_of(call.x) * call.weight.size[1]);
    Scratch scratch(isa.conv_step_scratch_bytes(static_cast<int>(call.weight.size[1]), longest), workers);
    cpu::for_each_task(context, workers, tasks, true, [&](int worker, std::int64_t index) {
        const std::int64_t n = index / blocks, slot = slot_of(call, n);
        if (slot < 0 || tokens_of(call, n).length == 0) return;
        isa.conv_step(make_task(call, n, slot, index % blocks * kConvChannels), scratch.of(worker));
    });
}

}  // namespace cula
