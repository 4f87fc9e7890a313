// SPDX-License-Identifier: Apache-2.0
// Random calls for the emulator: what is drawn has a name, and can be given instead.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "../cpp/fuzz_memory.h"

namespace cula::test {

// Named choices. Each depends on the seed, the number of the call and its name only, so that a choice that is
// given leaves the others as they are.
class Draw {
public:
    using Given = std::map<std::string, std::string, std::less<>>;

    Draw(std::uint64_t seed, std::uint64_t number, const Given& given)
        : seed_(seed * 0x9e3779b97f4a7c15u + number), given_(given) {}

    std::uint64_t seed(std::string_view name) const {
        std::uint64_t hash = seed_ ^ 0xcbf29ce484222325u;
        for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
        hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9u;
        return hash ^ hash >> 31;
    }
    std::string name(std::string_view of, const std::vector<std::string>& choices) {
        const auto found = given_.find(of);
        std::string choice = found != given_.end() ? found->second : choices[seed(of) % choices.size()];
        if (!std::exchange(seen_[std::string(of)], true)) text_ += " --" + std::string(of) + " " + choice;
        return choice;
    }
    std::int64_t number(std::string_view of, const std::vector<std::int64_t>& choices) {
        std::vector<std::string> names;
        for (const std::int64_t choice : choices) names.push_back(std::to_string(choice));
        return std::stoll(name(of, names));
    }
    bool is(std::string_view of, int one_in = 2) {
        std::vector<std::int64_t> choices(static_cast<std::size_t>(one_in), 0);
        choices[0] = 1;
        return number(of, choices) != 0;
    }
    // What has been drawn, as options.
    const std::string& text() const { return text_; }

private:
    std::uint64_t seed_;
    const Given& given_;
    std::map<std::string, bool> seen_;
    std::string text_;
};

// Memory before a page that must not be touched, with bytes around its contents that must stay as they are.
class Guarded {
public:
    explicit Guarded(std::size_t bytes, std::size_t alignment = 16) {
        constexpr std::size_t kPage = 4096;
        const std::size_t inner = (bytes + alignment - 1) / alignment * alignment;
        size_ = (inner + kPage - 1) / kPage * kPage + 2 * kPage;
        base_ = static_cast<std::byte*>(
            mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        mprotect(base_, kPage, PROT_NONE);
        mprotect(base_ + size_ - kPage, kPage, PROT_NONE);
        first_ = base_ + kPage, end_ = base_ + size_ - kPage;
        data_ = end_ - inner;
        std::memset(first_, 0xff, static_cast<std::size_t>(end_ - first_));
    }
    Guarded(Guarded&& other) noexcept
        : base_(std::exchange(other.base_, nullptr)),
          first_(other.first_),
          end_(other.end_),
          data_(other.data_),
          size_(other.size_),
          before_(std::move(other.before_)) {}
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    ~Guarded() {
        if (base_) munmap(base_, size_);
    }
    std::byte* data() const { return data_; }

    void remember() { before_.assign(first_, end_); }
    // Whether nothing has changed but the elements of `written`.
    bool kept(const TensorRef* written) const {
        std::vector<std::byte> now(first_, end_);
        if (written)
            each_element(*written, [&](std::int64_t place) {
                const auto at =
                    static_cast<std::size_t>(static_cast<std::byte*>(written->data) + place - first_);
                std::copy_n(before_.begin() + static_cast<std::ptrdiff_t>(at), size_bytes(written->dtype),
                            now.begin() + static_cast<std::ptrdiff_t>(at));
            });
        return now == before_;
    }

private:
    std::byte *base_ = nullptr, *first_ = nullptr, *end_ = nullptr, *data_ = nullptr;
    std::size_t size_ = 0;
    std::vector<std::byte> before_;
};

inline std::vector<double> elements(const TensorRef& ref) {
    std::vector<double> values;
    each_element(ref, [&](std::int64_t place) { values.push_back(read(element_at(ref, place), 0)); });
    return values;
}

// The numbers that states of float8 stand for, or of any other tensor its elements.
inline std::vector<double> scaled(const TensorRef& ref, const TensorRef& scales) {
    std::vector<double> values = elements(ref);
    if (ref.dtype != Dtype::kFloat8E4M3) return values;
    const std::vector<double> rows = elements(scales);
    const auto key_dim = static_cast<std::size_t>(ref.size[3]);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] *= rows[i / key_dim];
    return values;
}

// A field of Args, by its name.
struct Field {
    const char* name;
    TensorRef Args::* ref;
};

// One random call: its inputs, and what outputs it has.
class Case {
public:
    struct Output {
        Field field;
        Dtype dtype;
        std::vector<std::int64_t> sizes;
        bool state = false;
    };
    // What the instances that are linked take: pairs of a dtype and K.
    struct Instance {
        std::string folder, pass, type;
        std::int64_t key;
    };

    Case(Draw& draw, const std::vector<Instance>& instances) : draw_(draw) { make(instances); }

    Args args;
    Pass pass = Pass::kPrefill;
    std::string target;
    bool in_segments = false;  // the target cuts sequences
    std::vector<Output> outputs;

    struct Memory {
        std::map<std::string, Guarded> blocks;
    };

    // The arguments with fresh outputs, which hold NaN. as_float64: all numbers in float64, dense.
    Args with_outputs(Memory& memory, bool plain, bool as_float64) const {
        Args of = args;
        if (as_float64)
            for (const Field& field : kInputs)
                if (TensorRef& ref = of.*field.ref; ref)
                    widen(memory, field.name, ref,
                          field.ref == &Args::initial_state ? args.initial_scales : TensorRef{});
        if (as_float64) of.initial_scales = {};
        for (const Output& output : outputs) {
            if (as_float64 && output.field.ref == &Args::final_scales) continue;
            TensorRef ref = layout(output.field.name, as_float64 ? Dtype::kFloat64 : output.dtype,
                                   output.sizes, output.state, true, plain);
            place(memory, output.field.name, ref, !plain && is_odd(output.field.name));
            of.*output.field.ref = ref;
        }
        return of;
    }
    // Whether nothing but outputs has been written; otherwise the name of what has been.
    std::string touched(const Args& of, const Memory& memory) const {
        for (const auto& [name, block] : memory.blocks) {
            const TensorRef* written = nullptr;
            for (const Output& output : outputs)
                if (output.field.name == name) written = &(of.*output.field.ref);
            if (!block.kept(written)) return name;
        }
        for (const auto& [name, block] : inputs_.blocks)
            if (!block.kept(nullptr)) return name;
        return {};
    }
    void remember() {
        for (auto& [name, block] : inputs_.blocks) block.remember();
    }

private:
    static constexpr Field kInputs[] = {
        {"q", &Args::q},
        {"k", &Args::k},
        {"v", &Args::v},
        {"g", &Args::g},
        {"gamma", &Args::gamma},
        {"beta", &Args::beta},
        {"erase", &Args::erase},
        {"a_key", &Args::a_key},
        {"b_key", &Args::b_key},
        {"A_log", &Args::A_log},
        {"dt_bias", &Args::dt_bias},
        {"initial_state", &Args::initial_state},
        {"d_o", &Args::d_o},
        {"d_final_state", &Args::d_final_state},
    };

    // odd: at any address that suits the dtype, as the last bytes before the guard page. Otherwise at a
    // multiple of 16 bytes.
    void place(Memory& memory, const std::string& name, TensorRef& ref, bool odd = false) const {
        const Extent extent = extent_of(ref);
        const auto [at, is_new] = memory.blocks.emplace(
            name,
            Guarded(static_cast<std::size_t>(extent.end - extent.first), odd ? size_bytes(ref.dtype) : 16));
        ref.data = at->second.data() - extent.first;
        at->second.remember();
    }

    bool is_odd(const char* name) const { return draw_.seed(std::string("address of ") + name) % 3 == 0; }

    TensorRef layout(const char* name, Dtype dtype, const std::vector<std::int64_t>& sizes, bool state,
                     bool output, bool plain) const {
        Random random(draw_.seed(std::string("layout of ") + name));
        std::vector<std::int64_t> order = sizes;
        const bool v_last = state && !plain && random.one_in(3);
        if (v_last) std::swap(order[2], order[3]);
        TensorRef ref =
            plain ? dense(dtype, order) : with_sizes(order, [&](std::initializer_list<std::int64_t> list) {
                return some_layout(random, dtype, list, 1, output);
            });
        if (v_last) std::swap(ref.size[2], ref.size[3]), std::swap(ref.stride[2], ref.stride[3]);
        return ref;
    }
    static TensorRef dense(Dtype dtype, const std::vector<std::int64_t>& sizes) {
        return with_sizes(sizes, [&](std::initializer_list<std::int64_t> list) {
            return TensorRef::contiguous(nullptr, dtype, list);
        });
    }
    template <class Make>
    static TensorRef with_sizes(const std::vector<std::int64_t>& s, Make make) {
        switch (s.size()) {
            case 1: return make({s[0]});
            case 2: return make({s[0], s[1]});
            case 3: return make({s[0], s[1], s[2]});
            case 4: return make({s[0], s[1], s[2], s[3]});
            default: return make({s[0], s[1], s[2], s[3], s[4]});
        }
    }

    void widen(Memory& memory, const std::string& name, TensorRef& ref, const TensorRef& scales) const {
        const std::vector<double> values = scaled(ref, scales);
        ref = dense(Dtype::kFloat64, {ref.size.begin(), ref.size.begin() + ref.ndim});
        place(memory, name, ref);
        std::copy(values.begin(), values.end(), static_cast<double*>(ref.data));
        memory.blocks.at(name).remember();
    }

    template <class Next>
    TensorRef input(const char* name, Dtype dtype, const std::vector<std::int64_t>& sizes, Next next,
                    bool state = false) {
        TensorRef ref = layout(name, dtype, sizes, state, false, !layouts_);
        place(inputs_, name, ref, layouts_ && is_odd(name));
        std::mt19937_64 generator(draw_.seed(std::string("values of ") + name));
        each_element(ref, [&](std::int64_t at) { write(element_at(ref, at), 0, next(generator)); });
        return ref;
    }
    // [N, S], int32 or int64.
    template <class At>
    TensorRef indices(const char* name, std::int64_t N, std::int64_t S, At at) {
        TensorRef ref = dense(draw_.is(std::string("long_") + name) ? Dtype::kInt64 : Dtype::kInt32, {N, S});
        place(inputs_, name, ref);
        for (std::int64_t n = 0; n < N; ++n)
            for (std::int64_t t = 0; t < S; ++t) write(ref, n * S + t, static_cast<double>(at(n, t)));
        return ref;
    }
    static auto normal(double size) {
        return [size](auto& generator) { return std::normal_distribution<double>(0, size)(generator); };
    }
    static auto uniform(double low, double high) {
        return [=](auto& generator) { return std::uniform_real_distribution<double>(low, high)(generator); };
    }

    void make(const std::vector<Instance>& instances);
    void make_states_on_the_way(const std::vector<std::int64_t>& lengths,
                                const std::array<std::int64_t, 3>& state);
    void make_gates(std::int64_t B, std::int64_t T, std::int64_t writes, std::int64_t heads, std::int64_t K);

    Draw& draw_;
    bool layouts_ = false;
    Memory inputs_;
};

inline Dtype dtype_of(std::string_view name) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat8E4M3})
        if (cula::name(dtype) == name) return dtype;
    throw std::runtime_error("there is no dtype " + std::string(name));
}

inline void Case::make(const std::vector<Instance>& instances) {
    const std::string pass_name = draw_.name("pass", {"prefill", "backward"});
    for (const Pass one : {Pass::kPrefill, Pass::kVerify, Pass::kSegment, Pass::kBackward})
        if (cula::name(one) == pass_name) pass = one;
    const bool verify = pass == Pass::kVerify;
    target = draw_.name("target", pass == Pass::kPrefill
                                      ? std::vector<std::string>{"sm80", "sm80", "sm80:segments"}
                                      : std::vector<std::string>{verify ? "sm80:step" : "sm80"});
    const std::string family = target.substr(0, target.find(':')),
                      strategy = target.substr(std::min(family.size() + 1, target.size()));
    in_segments = strategy == "segments" || strategy == "halves" || strategy == "joined";
    // walks: of K and V either may be the channels of keys, and what it leaves to others is not drawn.
    const bool step = strategy == "step", walks = strategy == "three_walks";
    std::vector<std::string> algorithms, dtypes;
    for (const auto& row : kAlgorithms) algorithms.emplace_back(row.name);
    // The algorithms and dtypes of the instances at hand.
    const auto fits = [&](const Instance& of, Algorithm algorithm) {
        if (takes_low_rank(algorithm.update))
            return of.pass == (step ? pass == Pass::kBackward ? "backward_low_rank" : "step_low_rank"
                               : pass == Pass::kBackward ? "low_rank"
                                                         : "prepare_low_rank");
        if (takes_erase(algorithm.update) && !step)
            return of.pass == (pass == Pass::kBackward ? "erase" : "prepare_erase");
        // All but the gradients and `step` are the kernels of gdn, whose instances are needed, too.
        if (takes_several_writes(algorithm.update)) {
            if (pass == Pass::kBackward) return of.pass == (step ? "backward" : "gradient_several");
            return step ? of.pass == "step_several" : of.pass == "prefill_token" && of.folder == family;
        }
        if (step) return of.pass == (pass == Pass::kBackward ? "backward" : "step_any");
        if (walks)
            return of.pass == "reversed_walk" && has_diagonal_map(algorithm.update) &&
                   !varies_by_channel(algorithm.decay) && !varies_by_token(algorithm.decay);
        const std::string way = pass == Pass::kBackward ? "backward" : "prefill";
        return of.folder == family &&
               of.pass == way + (varies_by_channel(algorithm.decay) ? "_channel" : "_token");
    };
    std::erase_if(algorithms, [&](const std::string& one) {
        return std::ranges::none_of(instances,
                                    [&](const Instance& of) { return fits(of, *find_algorithm(one)); });
    });
    if (algorithms.empty()) throw std::runtime_error("no instance is linked for " + target);
    args.algorithm = *find_algorithm(draw_.name("algorithm", algorithms));
    if (step) dtypes = {"bfloat16", "float16", "float32"};
    for (const Instance& of : instances)
        if (!step && fits(of, args.algorithm))
            dtypes.emplace_back(of.type == "__nv_bfloat16" ? "bfloat16"
                                : of.type == "__half"      ? "float16"
                                                           : "float32");
    const Dtype dtype = dtype_of(draw_.name("dtype", dtypes));
    std::vector<std::int64_t> keys;
    for (const Instance& of : instances) {
        if (!fits(of, args.algorithm) || (!step && (of.type == "__half") != (dtype == Dtype::kFloat16)))
            continue;
        const std::int64_t key = of.key;
        for (const std::int64_t dim :
             {key, key, key, key / 2 + 16, key - 16, key - 5, key == 64 ? 16 : key / 2 + 1})
            keys.push_back(dim);
    }
    if (keys.empty()) throw std::runtime_error("no instance is linked for this dtype");
    layouts_ = draw_.is("layouts", 3);
    // Of each sequence: tokens.
    std::vector<std::int64_t> lengths_of;
    std::vector<std::int64_t> values{16, 32, 64, 64, 128, 17, 40, 100, 1, 256, 200}, groups{1, 1, 2, 3};
    if (walks) {
        const std::int64_t most = *std::ranges::max_element(keys);
        std::erase_if(values, [&](std::int64_t dim) { return dim < 16 || dim > most; });
        groups = {1};
    }
    const std::int64_t K = draw_.number("K", keys), V = draw_.number("V", values),
                       H = draw_.number("H", {1, 1, 2}), heads = H * draw_.number("group", groups);
    const bool packed = draw_.is("packed", 3);
    std::int64_t T = draw_.number("T", in_segments  // which only long sequences are cut into
                                           ? std::vector<std::int64_t>{1600, 2100, 3000}
                                           : verify  ? std::vector<std::int64_t>{1, 2, 3, 4, 4, 5, 8, 11}
                                             : walks ? std::vector<std::int64_t>{1, 20, 63, 64, 65, 128, 150,
                                                                                 260, 1600, 2100}
                                                     : std::vector<std::int64_t>{1, 20, 63, 64, 65, 100, 128,
                                                                                 150, 192, 200, 260}),
                 B = 1, N, longest = T;
    if (packed) {
        N = draw_.number("N", {1, 2, 3, 5});
        const std::vector<std::int64_t> lengths =
            verify ? std::vector<std::int64_t>{0, 1, 3, T}
                   : std::vector<std::int64_t>{0, 1, 7, 31, 64, 65, 90, 130, T};
        std::vector<std::int64_t> ends{0};
        longest = 0;
        for (std::int64_t n = 0; n < N; ++n) {
            const std::int64_t length = draw_.number("T" + std::to_string(n), lengths);
            longest = std::max(longest, length);
            lengths_of.push_back(length);
            ends.push_back(ends.back() + length);
        }
        T = ends.back() + draw_.number("tail", {0, 0, 1, 70});
        args.cu_seqlens = dense(draw_.is("long_ends") ? Dtype::kInt64 : Dtype::kInt32, {N + 1});
        place(inputs_, "cu_seqlens", args.cu_seqlens);
        for (std::int64_t n = 0; n <= N; ++n)
            write(args.cu_seqlens, n, static_cast<double>(ends[static_cast<std::size_t>(n)]));
    } else {
        N = B = draw_.number("B", {1, 1, 2, 3});
        lengths_of.assign(static_cast<std::size_t>(N), T);
    }
    args.qk_l2norm = !walks && draw_.is("norm");
    args.scale = 1 / std::sqrt(static_cast<double>(K));
    args.batch_invariant = draw_.is("batch_invariant", 4);
    const double key_size = args.qk_l2norm ? 1 : 1 / std::sqrt(static_cast<double>(K));
    args.q = input("q", dtype, {B, T, H, K}, normal(1));
    const std::int64_t writes =
        takes_several_writes(args.algorithm.update) ? draw_.number("writes", {1, 2, 2, 3, 4, 9}) : 1;
    args.k = input("k", dtype, {B, T * writes, H, K}, normal(key_size));
    args.v = input("v", dtype, {B, T * writes, heads, V}, normal(1));
    make_gates(B, T, writes, heads, K);
    std::vector<std::string> state_dtypes{"float32", "float32", "bfloat16", "float16"};
    const bool pool = verify && draw_.is("pool"), snapshots = verify && draw_.is("snapshots"),
               tree = verify && draw_.is("tree", 3);
    if (pass == Pass::kPrefill || (verify && !snapshots)) state_dtypes.emplace_back("float8_e4m3fn");
    const Dtype state_dtype = dtype_of(draw_.name("state_dtype", state_dtypes));
    const bool float8 = state_dtype == Dtype::kFloat8E4M3;
    // Of a pool every slot is that of one token.
    const std::int64_t S = std::max<std::int64_t>(longest, 1), slots = pool ? N * S : N;
    const std::vector<std::int64_t> states{slots, heads, V, K};
    if (draw_.is("initial_state")) {
        if (float8) {
            args.initial_state = input("initial_state", state_dtype, states, uniform(-448, 448), true);
            args.initial_scales =
                input("initial_scales", Dtype::kFloat32, {slots, heads, V}, uniform(0.0005, 0.003));
        } else {
            args.initial_state = input("initial_state", state_dtype, states, normal(0.5), true);
        }
        if (draw_.is("has_initial_state", 4)) {
            args.has_initial_state = dense(Dtype::kBool, {N});
            place(inputs_, "has_initial_state", args.has_initial_state);
            for (std::int64_t n = 0; n < N; ++n)
                write(args.has_initial_state, n, static_cast<double>(draw_.is("has" + std::to_string(n))));
        }
    }
    if (pass == Pass::kPrefill || verify) {
        outputs.push_back(
            {{"o", &Args::o}, draw_.is("o_float32", 4) ? Dtype::kFloat32 : dtype, {B, T, heads, V}});
        if (pool ? !args.initial_state || draw_.is("final_state") : !tree && draw_.is("final_state")) {
            outputs.push_back({{"final_state", &Args::final_state}, state_dtype, states, true});
            if (float8)
                outputs.push_back(
                    {{"final_scales", &Args::final_scales}, Dtype::kFloat32, {slots, heads, V}});
        }
    }
    if (pass == Pass::kPrefill) make_states_on_the_way(lengths_of, {heads, V, K});
    if (pool) {
        const std::int64_t first = draw_.number("first_slot", {0, 1, 3});
        args.state_indices = indices("state_indices", N, S, [&](std::int64_t n, std::int64_t t) {
            return (first + n * S + t) % slots;
        });
        if (draw_.is("num_accepted")) {
            args.num_accepted = dense(Dtype::kInt32, {N});
            place(inputs_, "num_accepted", args.num_accepted);
            for (std::int64_t n = 0; n < N; ++n)
                write(args.num_accepted, n,
                      static_cast<double>(1 + draw_.seed("accepted" + std::to_string(n)) %
                                                  static_cast<std::uint64_t>(S)));
        }
    }
    if (tree)
        args.parents = indices("parents", N, S, [&](std::int64_t n, std::int64_t t) {
            const std::string token = "parent" + std::to_string(n) + "_" + std::to_string(t);
            return static_cast<std::int64_t>(draw_.seed(token) % static_cast<std::uint64_t>(t + 1)) - 1;
        });
    if (snapshots) outputs.push_back({{"snapshots", &Args::snapshots}, state_dtype, {N, S, heads, V, K}});
    if (pass == Pass::kSegment) {
        args.initial_state = args.has_initial_state = {};
        outputs.push_back({{"segment_b", &Args::segment_b}, Dtype::kFloat32, states, false});
        if (draw_.is("segment_m"))
            outputs.push_back({{"segment_m", &Args::segment_m},
                               Dtype::kFloat32,
                               has_diagonal_map(args.algorithm.update)
                                   ? std::vector<std::int64_t>{N, heads, K}
                                   : std::vector<std::int64_t>{N, heads, K, K}});
    }
    if (pass == Pass::kBackward) {
        const bool has_d_o = !draw_.is("no_d_o", 8);
        if (has_d_o)
            args.d_o = input("d_o", !walks && draw_.is("d_o_float32", 4) ? Dtype::kFloat32 : dtype,
                             {B, T, heads, V}, normal(1));
        if (draw_.is("d_final_state") || !has_d_o)
            args.d_final_state = input("d_final_state", state_dtype, states, normal(0.25), true);
        const bool all = !draw_.is("some_gradients", 4);
        const auto want = [&](const char* name, TensorRef Args::* field, const TensorRef& of) {
            if (!of || (!all && draw_.is(std::string("no_") + name))) return;
            const bool state = of.ndim == 4 && &of == &args.initial_state;
            const Dtype own = draw_.is(std::string(name) + "_float32", 4) ? Dtype::kFloat32 : of.dtype;
            outputs.push_back({{name, field}, own, {of.size.begin(), of.size.begin() + of.ndim}, state});
        };
        want("d_q", &Args::d_q, args.q), want("d_k", &Args::d_k, args.k), want("d_v", &Args::d_v, args.v);
        want("d_g", &Args::d_g, args.g), want("d_beta", &Args::d_beta, args.beta);
        want("d_erase", &Args::d_erase, args.erase);
        want("d_a_key", &Args::d_a_key, args.a_key), want("d_b_key", &Args::d_b_key, args.b_key);
        want("d_A_log", &Args::d_A_log, args.A_log), want("d_dt_bias", &Args::d_dt_bias, args.dt_bias);
        want("d_initial_state", &Args::d_initial_state, args.initial_state);
    }
}

// lengths: tokens of each sequence. state: HV, V, K.
inline void Case::make_states_on_the_way(const std::vector<std::int64_t>& lengths,
                                         const std::array<std::int64_t, 3>& state) {
    const auto dtype = [&](const char* name) { return dtype_of(draw_.name(name, {"float32", "bfloat16"})); };
    const auto N = static_cast<std::int64_t>(lengths.size());
    if (N > 0 && draw_.is("checkpoints", 4)) {
        // The last one of each sequence, and one before it.
        args.checkpoint_plan = indices("checkpoint_plan", 2 * N, 3, [&](std::int64_t m, std::int64_t column) {
            const std::int64_t length = lengths[static_cast<std::size_t>(m / 2)];
            const std::int64_t tokens = m % 2 ? length : (length + 63) / 128 * 64;
            return column == 0 ? m / 2 : column == 1 ? tokens : 2 * N - 1 - m;
        });
        outputs.push_back({{"checkpoints", &Args::checkpoints},
                           dtype("checkpoint_dtype"),
                           {2 * N, state[0], state[1], state[2]},
                           true});
    }
    std::int64_t chunks = 0;
    for (const std::int64_t length : lengths) chunks += (length + kChunkTokens - 1) / kChunkTokens;
    if (chunks > 0 && draw_.is("chunk_states", 4))
        outputs.push_back({{"chunk_states", &Args::chunk_states},
                           dtype("chunk_state_dtype"),
                           {args.q.size[0], chunks / args.q.size[0], state[0], state[1], state[2]}});
}

inline void Case::make_gates(std::int64_t B, std::int64_t T, std::int64_t writes, std::int64_t heads,
                             std::int64_t K) {
    const auto gate_dtype = [&](const char* name) {
        return dtype_of(
            draw_.name(name, {std::string(cula::name(args.q.dtype)), "float32", "bfloat16", "float16"}));
    };
    const Decay decay = args.algorithm.decay;
    const bool by_channel = varies_by_channel(decay);
    if (decay == Decay::kPerHead || (varies_by_token(decay) && draw_.is("gamma", 4))) {
        // The strongest log decay of a token, in hundredths: with 0 nothing decays.
        const auto strongest = static_cast<double>(draw_.number("gamma_steep", {20, 20, 0, 1, 300, 20000}));
        args.gamma = input("gamma", Dtype::kFloat32, {heads}, uniform(-strongest / 100, 0));
    }
    if (by_channel || varies_by_token(decay)) {
        const std::string gate = draw_.name("gate", {"log_decay", "log_decay", "softplus", "bounded"});
        args.gate = gate == "softplus"  ? Gate::kSoftplus
                    : gate == "bounded" ? Gate::kBounded
                                        : Gate::kLogDecay;
        // The steepest log decay of a token is this number of hundredths.
        const double steep = static_cast<double>(draw_.number("steep", {1, 10, 30, 100, 800, 6000})) / 100;
        const std::vector<std::int64_t> sizes =
            by_channel ? std::vector{B, T, heads, K} : std::vector{B, T, heads};
        const Dtype dtype = gate_dtype("g_dtype");
        if (args.gate == Gate::kLogDecay) {
            args.g = input("g", dtype, sizes, uniform(-steep, 0));
        } else {
            args.g = input("g", dtype, sizes, normal(1));
            args.lower_bound = args.gate == Gate::kBounded ? -steep : 0;
            if (draw_.is("A_log")) args.A_log = input("A_log", Dtype::kFloat32, {heads}, normal(0.5));
            if (draw_.is("dt_bias"))
                args.dt_bias =
                    input("dt_bias", Dtype::kFloat32, by_channel ? std::vector{heads, K} : std::vector{heads},
                          uniform(-2, 0.5));
        }
    }
    if (takes_low_rank(args.algorithm.update)) {
        const double size = 0.7 / std::sqrt(static_cast<double>(K));
        args.a_key = input("a_key", gate_dtype("a_key_dtype"), {B, T, heads, K}, normal(size));
        args.b_key = input("b_key", gate_dtype("b_key_dtype"), {B, T, heads, K}, normal(size));
    }
    if (!takes_beta(args.algorithm.update)) return;
    args.beta_is_logit = draw_.is("beta_is_logit");
    args.allow_neg_eigval = args.beta_is_logit && draw_.is("allow_neg_eigval", 4);
    const Dtype dtype = gate_dtype("beta_dtype");
    std::vector<std::int64_t> sizes{B, T * writes, heads};
    // One write strength per value channel: token by token only, unless erase strengths erase.
    const bool erases = takes_erase(args.algorithm.update);
    if ((erases || (target.ends_with(":step") && pass != Pass::kSegment)) &&
        draw_.is("beta_per_value", erases ? 2 : 4))
        sizes.push_back(args.v.size[3]);
    // A third of the tokens writes nothing, or next to nothing; logits that are this low still count
    // (kLeastBeta in src/cuda/backward/saved.cuh).
    const bool small = draw_.is("small_betas", 3);
    const double lowest = args.q.dtype == Dtype::kFloat16 ? -8 : -25;
    const auto strength = [&](auto& generator) {
        const bool none = small && uniform(0, 3)(generator) < 1;
        if (args.beta_is_logit) return none ? uniform(lowest, -4)(generator) : normal(1.5)(generator);
        return none ? 0.0 : uniform(0, 1)(generator);
    };
    args.beta = input("beta", dtype, sizes, strength);
    if (erases) args.erase = input("erase", dtype, {B, T, heads, K}, strength);
}

}  // namespace cula::test
