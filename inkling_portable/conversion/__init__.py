"""Conversion of checkpoints between number formats, for `inkling-portable convert`.

source   what a checkpoint holds, read from its headers
plan     what will be written where, a pure function of that
blocks   the numbers of one expert
output   files filled in place, the journal of finished blocks, and the move at the end
"""
