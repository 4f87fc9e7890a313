#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the emulator and runs a short set of random calls: run.sh [build folder] [seed].
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/../../build/emulator}
seed=${2:-1}

instances=
for gate in channel token; do
    for pass in sm80/prefill sm80/backward backward/gradient; do
        instances+="${pass}_$gate/__nv_bfloat16/64;"
    done
done
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
generator=()
command -v ninja > /dev/null && generator=(-G Ninja)
cmake -S "$here" -B "$build" "${generator[@]}" -D "CULA_INSTANCES=$instances" > "$build.log" 2>&1 ||
    { cat "$build.log"; exit 1; }
cmake --build "$build" --parallel "$(nproc)"

"$build/selftest"
for pass in prefill segment backward; do
    for target in sm80 sm80:step; do
        echo "$pass $target"
        "$build/emulate" --pass "$pass" --target "$target" --count 40 --seed "$seed" --host_threads "$(nproc)"
    done
done
for pass in prefill segment verify backward; do
    echo "$pass sm80:step of several writes a token"
    "$build/emulate" --pass "$pass" --target sm80:step --algorithm gdp --count 16 --seed "$seed" \
        --host_threads "$(nproc)"
done
for pass in prefill segment verify backward; do
    echo "$pass sm80:step of low-rank keys"
    "$build/emulate" --pass "$pass" --target sm80:step --algorithm rwkv7 --count 10 --seed "$seed" \
        --host_threads "$(nproc)"
done
for pass in prefill segment backward; do
    echo "$pass sm80 of low-rank keys"
    "$build/emulate" --pass "$pass" --target sm80 --algorithm rwkv7 --count 16 --seed "$seed" \
        --host_threads "$(nproc)"
done
for pass in prefill segment backward; do
    echo "$pass sm80 of several writes a token"
    "$build/emulate" --pass "$pass" --target sm80 --algorithm gdp --count 16 --seed "$seed" \
        --host_threads "$(nproc)"
done
echo "prefill sm80:segments of several writes a token"
"$build/emulate" --pass prefill --target sm80:segments --algorithm gdp --count 5 --seed "$seed" \
    --host_threads "$(nproc)"
echo "verify sm80"
"$build/emulate" --pass verify --count 120 --seed "$seed" --host_threads "$(nproc)"
for type in bfloat16 float16; do
    echo "verify sm80 by two tiles of $type"
    "$build/emulate" --pass verify --multiprocessors 4 --K 64 --V 100 --B 3 --H 2 --group 3 --T 4 \
        --state_dtype "$type" --dtype bfloat16 --count 12 --seed "$seed" --host_threads "$(nproc)"
done
for algorithm in gdn gdp; do
    echo "backward sm80 of $algorithm, compiled for sm_80 and run on a later GPU"
    "$build/emulate" --pass backward --target sm80 --algorithm "$algorithm" --capability 90 --shared_kib 227 \
        --count 12 --seed "$seed" --host_threads "$(nproc)"
done
echo "backward sm80:three_walks"
"$build/emulate" --pass backward --target sm80:three_walks --count 100 --seed "$seed" \
    --host_threads "$(nproc)"
echo "backward sm80:three_walks in segments"
"$build/emulate" --pass backward --target sm80:three_walks --multiprocessors 132 --T 2100 --T0 2100 --H 1 \
    --count 20 --seed "$seed" --host_threads "$(nproc)"
echo "backward sm80 in segments, of states that do not decay"
"$build/emulate" --pass backward --target sm80 --algorithm delta --segments 4 --count 12 --seed "$seed" \
    --host_threads "$(nproc)"
for target in sm80 sm80:step; do
    echo "prefill $target of float8 states"
    "$build/emulate" --pass prefill --target "$target" --state_dtype float8_e4m3fn --initial_state 1 \
        --final_state 1 --count 40 --seed "$seed" --host_threads "$(nproc)"
done
echo "prefill sm80:step of float8 states, one token each"
"$build/emulate" --pass prefill --target sm80:step --state_dtype float8_e4m3fn --K 64 --T 1 --packed 0 \
    --count 30 --seed "$seed" --host_threads "$(nproc)"
echo "prefill sm80:segments"
"$build/emulate" --pass prefill --target sm80:segments --count 20 --seed "$seed" --host_threads "$(nproc)"
