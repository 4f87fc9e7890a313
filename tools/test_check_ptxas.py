# SPDX-License-Identifier: Apache-2.0
"""The gate on registers, stack and spills of the CUDA kernels, and the compiler launcher that feeds it."""

import subprocess
from pathlib import Path

import pytest

from check_ptxas import Function, judge, parse_limits, parse_log, short_name

LAUNCHER = Path(__file__).parents[1] / "cmake" / "nvcc_log.sh"

WARNING = 'x.cu(3): warning #177-D: variable "x" was declared but never referenced'
# As nvcc writes it: a kernel for two architectures, a serialised wgmma, and a function that was not inlined.
LOG = f"""\
{WARNING}
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4stepf' for 'sm_80'
ptxas info    : Function properties for _Z4stepf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 119 registers, used 1 barriers, 4128 bytes smem, 1312 bytes cmem[0]
ptxas info    : Compile time = 129.098 ms
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4stepf' for 'sm_90a'
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
in function '_Z4stepf'
ptxas info    : Function properties for _Z4stepf
    24 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4128 bytes smem
ptxas info    : Function properties for _Z5helperv
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"""


def test_a_log_is_read_whole():
    functions, complaints = parse_log(LOG)
    assert functions == [
        Function("_Z4stepf", "sm_80", registers=119),
        Function("_Z4stepf", "sm_90a", registers=255, stack=24, spilled=32),
        Function("_Z5helperv", "sm_90a", stack=8),
    ]
    assert len(complaints) == 2
    assert complaints[0] == WARNING
    assert "C7512" in complaints[1]


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("void cula::cuda::sm80::step<float, 64, true>(cula::cuda::DeviceArgs)", "sm80::step<float,64,true>"),
        (
            "void cula::cuda::sm90::(anonymous namespace)::carry<(cula::Decay)1>(A, void (*)(B))",
            "sm90::carry<(cula::Decay)1>",
        ),
        ("plain", "plain"),
    ],
)
def test_names_are_short(signature, name):
    assert short_name(signature) == name


FINE = Function("sm80::step<float>", "sm_80", registers=128)


@pytest.mark.parametrize(
    ("function", "limits", "problem"),
    [
        (FINE, "sm80::step<* * 128", None),
        (FINE, "sm80::step<* sm_80 128", None),
        (FINE, "sm80::step<* sm_90 255\nsm80::step<* * 127", "128 registers, limit 127"),
        (FINE, "sm80::step<* sm_80 96\nsm80::* sm_90 255", "128 registers, limit 96"),
        (FINE, "", "no limit stands for it"),
        (FINE, "sm80::step<* * 128\nsm80::gone * 64", "a limit for no kernel"),
        (Function(FINE.name, "sm_80", 128, stack=8), "sm80::step<* * 128", "8 bytes of stack"),
        (Function(FINE.name, "sm_80", 128, spilled=4), "sm80::step<* * 128", "4 bytes spilled"),
        (Function(FINE.name, "sm_80", 128, 8, 4), "sm80::step<* * 128 8 4 the tree walk is rare", None),
        (
            Function(FINE.name, "sm_80", 128, 8, 8),
            "sm80::step<* * 128 8 4 the tree walk is rare",
            "8 bytes spilled",
        ),
        (Function("helper", "sm_80", stack=8), "", "8 bytes of stack"),
    ],
)
def test_judgement(function, limits, problem):
    problems = judge([function], parse_limits(limits))
    assert len(problems) == (problem is not None)
    if problem:
        assert problem in problems[0]


def test_limits_of_architectures_that_were_not_built_may_stand():
    assert judge([FINE], parse_limits("sm80::step<* * 128\nsm90::prefill* sm_90a 168")) == []


@pytest.mark.parametrize(
    "line", ["step *", "step * many", "step * 128 8 4", "step * 128 because it is slow otherwise"]
)
def test_a_malformed_limit_is_refused(line):
    with pytest.raises(ValueError, match="line 2"):
        parse_limits(f"# comment\n{line}")


def launch(tmp_path, script):
    return subprocess.run(
        [LAUNCHER, "bash", "-c", script, "compiler", "-o", "x.o"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def test_the_launcher_keeps_the_log_and_shows_what_is_not_the_report(tmp_path):
    (tmp_path / "said").write_text(LOG)
    done = launch(tmp_path, "cat said >&2; touch x.o")
    assert done.returncode == 0
    assert "Potential Performance Loss" not in done.stderr
    assert done.stderr == WARNING + "\n"
    assert (tmp_path / "x.o.log").read_text() == LOG + "\n"


def test_the_launcher_passes_failure_on(tmp_path):
    (tmp_path / "x.o.log").write_text("of the build before")
    done = launch(tmp_path, "echo 'x.cu(3): error: no' >&2; exit 3")
    assert done.returncode == 3
    assert "error: no" in done.stderr
    assert not (tmp_path / "x.o.log").exists()
