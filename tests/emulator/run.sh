#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the emulator as for sm_80 and as for sm_90a, and runs a short set of random calls of each: run.sh
# [build folder] [seed].
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/../../build/emulator}
seed=${2:-1}
# Both builds have the same host code: ccache keeps it once.
export CCACHE_NOHASHDIR=1

# configure_and_build <folder> <instances> [option..]
configure_and_build() {
    local folder=$1 instances=$2 generator=()
    command -v ninja > /dev/null && generator=(-G Ninja)
    cmake -S "$here" -B "$folder" "${generator[@]}" -D "CULA_INSTANCES=$instances" "${@:3}" \
        > "$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
    cmake --build "$folder" --parallel "$(nproc)"
}
# check <title> <option..>: random calls of what was built last
check() {
    echo "$1"
    "$built/emulate" "${@:2}" --seed "$seed" --host_threads "$(nproc)"
}

# of_carries <folder> <K>: carries, walks and gradients, of bfloat16 and both kinds of decay
of_carries() {
    for gate in channel token; do
        for pass in "$1/prefill" "$1/backward" backward/gradient; do
            printf '%s;' "${pass}_$gate/__nv_bfloat16/$2"
        done
    done
}

# --- the portable targets, as for sm_80 ---

instances=$(of_carries sm80 64)
instances+="sm80/reversed_walk/__nv_bfloat16/64;chunked/prepare_erase/__nv_bfloat16/64;"
instances+="backward/erase/__nv_bfloat16/64;chunked/prepare_low_rank/__nv_bfloat16/64;"
instances+="backward/low_rank/__nv_bfloat16/64;recurrent/step_any/any/64;"
instances+="backward/gradient_several/__nv_bfloat16/64;recurrent/step_several/any/64;"
instances+="recurrent/step_low_rank/any/64;recurrent/backward_low_rank/any/64;"
instances+="recurrent/backward/any/64;recurrent/backward_erase/any/64"
for type in float __nv_bfloat16 __half Float8E4M3; do
    instances+=";recurrent/step/$type/64;recurrent/step_erase/$type/64"
    [ "$type" = Float8E4M3 ] ||
        instances+=";recurrent/step_packed_low_rank/$type/64;recurrent/step_packed_several/$type/64"
done
built=$build
configure_and_build "$built" "$instances"
"$built/selftest"

for pass in prefill segment backward; do
    for target in sm80 sm80:step; do
        check "$pass $target" --pass "$pass" --target "$target" --count 24
    done
done
for pass in prefill segment verify backward; do
    check "$pass sm80:step of several writes a token" \
        --pass "$pass" --target sm80:step --algorithm gdp --count 10
done
for pass in prefill segment verify backward; do
    check "$pass sm80:step of low-rank keys" --pass "$pass" --target sm80:step --algorithm rwkv7 --count 10
done
# By CTAs of many rows, which ask for slots before inputs.
for type in float32 bfloat16; do
    check "prefill sm80:step of low-rank keys, one token each, $type" --pass prefill --target sm80:step \
        --algorithm rwkv7 --T 1 --packed 0 --K 64 --V 128 --B 10 --H 4 --multiprocessors 1 \
        --initial_state 1 --final_state 1 --state_dtype "$type" --count 8
done
for pass in prefill segment backward; do
    check "$pass sm80 of low-rank keys" --pass "$pass" --target sm80 --algorithm rwkv7 --count 10
    check "$pass sm80 of several writes a token" --pass "$pass" --target sm80 --algorithm gdp --count 10
done
check "prefill sm80:segments of several writes a token" \
    --pass prefill --target sm80:segments --algorithm gdp --count 5
check "verify sm80" --pass verify --count 72
for type in bfloat16 float16; do
    check "verify sm80 by two tiles of $type" --pass verify --multiprocessors 4 --K 64 --V 100 --B 3 --H 2 \
        --group 3 --T 4 --state_dtype "$type" --dtype bfloat16 --count 12
done
for algorithm in gdn gdp; do
    check "backward sm80 of $algorithm, compiled for sm_80 and run on a later GPU" --pass backward \
        --target sm80 --algorithm "$algorithm" --capability 90 --shared_kib 227 --count 12
done
check "backward sm80:three_walks" --pass backward --target sm80:three_walks --count 60
check "backward sm80:three_walks in segments" --pass backward --target sm80:three_walks \
    --multiprocessors 132 --T 2100 --T0 2100 --H 1 --count 20
check "backward sm80 in segments, of states that do not decay" \
    --pass backward --target sm80 --algorithm delta --segments 4 --count 12
for target in sm80 sm80:step; do
    check "prefill $target of float8 states" --pass prefill --target "$target" --state_dtype float8_e4m3fn \
        --initial_state 1 --final_state 1 --count 24
done
check "prefill sm80:step of float8 states, one token each" --pass prefill --target sm80:step \
    --state_dtype float8_e4m3fn --K 64 --T 1 --packed 0 --count 16
check "prefill sm80:segments" --pass prefill --target sm80:segments --count 20

# --- the targets of sm90 ---

instances=$(of_carries sm90 128)
instances+="chunked/prepare_erase/__nv_bfloat16/128;backward/erase/__nv_bfloat16/128;"
instances+="backward/gradient_several/__nv_bfloat16/128;sm90/gradient_token/__nv_bfloat16/128;"
instances+="sm90/gradient_anchored/__nv_bfloat16/128"
built=$build-sm90a
configure_and_build "$built" "$instances" -D CULA_SM90A=ON

for pass in prefill segment backward; do
    check "$pass sm90" --pass "$pass" --target sm90 --count 24
    check "$pass sm90 of several writes a token" --pass "$pass" --target sm90 --algorithm gdp --count 12
done
for algorithm in kda gla gdn2 gdn delta; do
    check "backward sm90 of $algorithm, d_v and d_o read by rows" --pass backward --target sm90 \
        --algorithm "$algorithm" --dtype bfloat16 --layouts 0 --output_layouts 0 --V 72 --count 6
done
for gate in bounded softplus; do
    fused=(--pass prefill --algorithm kda --dtype bfloat16 --norm 1 --layouts 0 --output_layouts 0
        --o_float32 0 --gate "$gate" --steep 100 --g_dtype bfloat16 --beta_is_logit 1)
    check "prefill sm90:fused, $gate gates" "${fused[@]}" --target sm90:fused --K 128 --V 64 --count 12
    check "prefill sm90:fused, $gate gates, K = 112, V = 200" "${fused[@]}" --target sm90:fused \
        --K 112 --V 200 --count 8
    check "prefill sm90:joined, $gate gates" "${fused[@]}" --target sm90:joined --checkpoints 0 \
        --chunk_states 0 --batch_invariant 0 --K 128 --V 64 --H 1 --group 1 --B 1 --count 6
done
check "prefill sm90:segments" --pass prefill --target sm90:segments --batch_invariant 0 --packed 0 \
    --H 1 --group 1 --B 1 --V 64 --count 6
