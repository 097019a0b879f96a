"""Versions of what must be equal on both sides of a wire. Imports nothing, not even torch."""

NOISE_VERSION = 1
"""Raised with every change of a single bit of any noise. Both ends say theirs in the Hello; a
target warns of a model drafter that has another one, whose sampled drafts would guess badly."""
