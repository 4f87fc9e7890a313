# SPDX-License-Identifier: Apache-2.0
"""What the tests, the fuzzer and the benchmark share: cases, ways to call the library, and the rule that
judges it."""
