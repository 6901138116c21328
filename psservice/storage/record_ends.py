"""Where the last whole record of a segment ends, of bytes that come in pieces which end anywhere."""

from psservice.storage.journal_format import FRAME, HEAD_BYTES


class RecordEnds:
    """Follows the records of a segment by their lengths; checks nothing.

    Args:
        whole: the end of a record up to which the bytes are there already; 0 if the segment begins.

    Attributes:
        whole: the end of the last record that is there from its first byte to its last; 0 inside the segment's head.
    """

    def __init__(self, whole: int = 0) -> None:
        self.whole = whole
        self._frame = b""
        self._end = 0 if whole else HEAD_BYTES  # of what begins at ``whole``; 0 until its frame has come

    def take(self, offset: int, data: bytes) -> None:
        """Take the bytes at an offset, behind all that were taken before."""
        reached = offset + len(data)
        while True:
            if not self._end:
                start = self.whole + len(self._frame) - offset
                self._frame += data[start : start + FRAME.size - len(self._frame)]
                if len(self._frame) < FRAME.size:
                    return
                _, length, _, _ = FRAME.unpack(self._frame)
                self._end, self._frame = self.whole + FRAME.size + length, b""
            if self._end > reached:
                return
            self.whole, self._end = self._end, 0
