# SPDX-License-Identifier: Apache-2.0
"""Modules of other projects, and functions of engines, under their own names."""
