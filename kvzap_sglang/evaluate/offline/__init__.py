"""Policies that the server does not offer, on a plain transformers model: one dense pass of a context serves them all.

Rule: kvpress' pipeline with `decoding=False`. A question and its answer see of the context what a policy kept and the last
`window` tokens, and all of each other.
"""
