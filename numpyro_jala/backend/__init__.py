"""The machine: devices, precision, memory and compiled programs.

Functions and arrays come in; the same ones go out, placed on devices, rounded as they may
be, cut into blocks that fit a cache, or compiled ahead. Nothing here knows what they mean.
"""
