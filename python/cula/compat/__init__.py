# SPDX-License-Identifier: Apache-2.0
"""Whole modules of other projects under their own names."""
