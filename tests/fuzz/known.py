"""Defects that are known: a finding that is one of them fails no test. Empty it as they are fixed."""

KNOWN: dict[str, str] = {}
"""The beginning of a signature -> what is the matter.

A signature does not depend on the seed: it is the kind of the finding, with the error and the
innermost function of the library that it left (crashed), how the process ended and which check of XLA
failed (ended), where it stood (hung), or the policy (over, wrong, untrue).
"""
