# SPDX-License-Identifier: Apache-2.0
"""The benchmark for one's own machine: `python -m cula.bench`. docs/guide/bench.md says how to read it.

The modules beside are what it shares with the repository's own benchmark, which keeps the records.
"""
