# SPDX-License-Identifier: Apache-2.0
"""A seeded differential fuzzer of the contract (docs/fuzzing.md): `python -m fuzz --help`."""
