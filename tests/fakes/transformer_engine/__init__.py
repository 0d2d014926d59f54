"""A stand-in for TransformerEngine that runs on a CPU.

It keeps what matters to a compiler: which forwards are shielded from Dynamo and which are not, where
the FP8 state lives, when it changes, and what the autocast refuses. FP8 itself is a round trip through
``torch.float8_e4m3fn`` and ``torch.float8_e5m2`` with real scales, so a missed or doubled update of the
amax history changes the numbers of all later steps.
"""

__version__ = "2.20.2+fake"
