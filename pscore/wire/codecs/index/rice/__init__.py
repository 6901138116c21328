"""Gaps in Golomb-Rice codes, with a parameter per block and an escape: near the entropy of a random support.

A gap ``g`` in a block with parameter ``b`` is the quotient ``g >> b`` in unary and the ``b`` low bits. Quotients, low
bits and long gaps stand in sections of their own, so that numpy can read and write them without a loop:

    uint32          U, the bytes of the quotients, little-endian
    uint8 [blocks]  b of each block of 512 entries, 0 to 27
    U bytes         quotients: as many 0 bits as the quotient says, then a 1 bit; 16 zeros mean that the gap is escaped
    R bytes         the b low bits of each gap that is not escaped, lowest bit first
    4·E bytes       the escaped gaps (those with a quotient of 16 or more), uint32, little-endian

Bits fill bytes from the lowest; a section ends with the byte of its last bit, the rest of which is zero. There is one
way to write given gaps with given parameters. An entry costs at most 49 bits, and reading it a constant number of
steps.
"""

from pscore.wire.codecs.index.rice.format import RICE

__all__ = ["RICE"]
