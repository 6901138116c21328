"""What a shard must have: the states that its records lead to, and which of them somebody was told of."""

import hashlib
from contextlib import contextmanager
from typing import NamedTuple

import torch

from psservice.feed.feed_shard import FeedShard
from psservice.state.v1 import journal_pb2 as rec
from psservice.wagma.replicas import GroupedShard


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


class State(NamedTuple):
    """A shard's model: version, parameters, the open round's sum and contributors, and all models of WAGMA.

    Of a feed, ``staged`` is the next version, the words that it will have, and its push; version 0: there is none.
    """

    version: int
    values: bytes
    total: bytes = b""
    contributors: frozenset = frozenset()
    groups: bytes = b""
    staged: tuple[int, bytes, str] = (0, b"", "")

    @classmethod
    def of(cls, model):
        if isinstance(model, GroupedShard):
            kept = model.export()
            digest = hashlib.blake2b()
            for name, tensor in sorted(kept.tensors.items()):
                digest.update(name.encode() + bits(tensor))
            return cls(model.version, bits(model.current()), groups=digest.digest())
        if isinstance(model, FeedShard):
            words, staged = bits(model.current()), model.staged
            next_words = assigned(words, staged.words) if staged.version else b""
            return cls(model.version, words, staged=(staged.version, next_words, staged.name))
        kept = model.export()
        names = kept.plain.get("round", {}).get("contributors", [])
        total = bits(kept.tensors["round.sum"]) if names else b""
        return cls(model.version, bits(model.current()), total, frozenset(names))

    def pushed(self, entries):
        """The state after an asynchronous push."""
        return State(self.version + 1, bits(added(self.values, entries, -1)))

    def staging(self, record, entries):
        """The state after a publication of a feed is staged."""
        name = f"{record.step}:{record.worker.incarnation}"
        return self._replace(staged=(record.base_version + 1, assigned(self.values, entries), name))

    def published(self):
        """The state after the staged version is published."""
        return State(*self.staged[:2])

    def contributed(self, name, entries):
        """The state after a contribution to the open round."""
        total = added(self.total or bytes(len(self.values)), entries, 1)
        return self._replace(total=bits(total), contributors=self.contributors | {name})

    def closed(self):
        """The state after the open round's close."""
        mean = floats(self.total) / len(self.contributors)
        return State(self.version + 1, bits(floats(self.values) - mean))


class Witness:
    """One shard's states as its records make them, and what must be left of them after a crash.

    ``publishes`` is called with each version of a feed that is written down as published, and the name of its push.

    Attributes:
        states: of the present history, oldest first; an index each.
        told: index of the newest state that somebody was told of.
        values: the parameters of each version of each history, by generation and version.
        restoring: versions to which an operator wants the shard to go back.
        lost_of: generation of the history of which the shard has lost something told at its last start; 0 for none.
    """

    def __init__(self, entries_of, *, in_rounds, publishes=lambda version, name: None):
        self._entries_of, self._in_rounds, self._publishes = entries_of, in_rounds, publishes
        self.states, self.told, self.generation, self.values = [], 0, 0, {}
        self.restoring, self.lost_of = set(), 0
        self._applied = {}  # index of the first state that has a push, by identity and step
        self._left = None  # states, told and applied of the history that was left last: a standby may have more of it
        self._perhaps = set()  # pushes of which a crash with a rollback has left nobody sure
        self._is_unseen = False  # whether a record was written whose state, one of WAGMA, nobody has seen yet

    # While the shard serves

    @contextmanager
    def writing(self, shard, record):
        """A record is written: all before it are applied, and this one leads to the state that it must."""
        self.look(shard)
        size, key = len(self.states), None
        if isinstance(record, rec.Pushed):
            key = (record.worker.worker_id, record.worker.incarnation, record.step)
            require(key not in self._applied, f"{key} is applied twice")
            self._applied[key] = size
            self._perhaps.discard(key)
        if self.states and self.states[-1].groups:
            self._is_unseen = True
        elif key is not None:
            entries, state = self._entries_of(key), self.states[-1]
            if isinstance(shard.model, FeedShard):
                self._add(state.staging(record, entries))
            else:
                self._add(state.contributed(key[0], entries) if self._in_rounds else state.pushed(entries))
        elif isinstance(record, rec.Published):
            version, _, name = self.states[-1].staged
            require(record.version == version, f"version {record.version} is published, and {version} is staged")
            self._publishes(version, name)
            self._add(self.states[-1].published())
        elif isinstance(record, rec.RoundClosed):
            self._add(self.states[-1].closed())
        try:
            yield
        except Exception:  # refused: there is no room; a crash may have written the record
            del self.states[size:]
            self._applied.pop(key, None)
            raise

    def look(self, shard):
        """See what the shard has: nothing changes it but records."""
        if shard.model is None:
            require(not self.states, "the model is gone")
            return
        found = State.of(shard.model)
        if shard.model.generation != self.generation:
            if self.states:
                self._require_former(found)
            self._turn(found, shard.model.generation)
        elif found != self.states[-1]:
            last = self.states[-1].version
            require(bool(found.groups), f"a state from nowhere: version {found.version} behind {last}")
            self._add(found)
        self._is_unseen = False

    def told_of_push(self, shard, key):
        """A push is answered."""
        self.look(shard)
        require(key in self._applied or key in self._perhaps, f"{key} is answered, and was never written")
        self.told = max(self.told, min(self._applied.get(key, 0), len(self.states) - 1))

    def told_of_version(self, shard, version):
        """A version is told of; with WAGMA it is that of a worker's own model."""
        self.look(shard)
        if self.states[-1].groups:
            return
        known = [i for i, state in enumerate(self.states) if state.version == version]
        require(bool(known), f"version {version} was never made")
        self.told = max(self.told, known[0])

    # After a crash

    def recovered(self, shard, *, may_lose):
        """Check what a shard begins with; ``may_lose``: what was told of may be lost, under another generation."""
        self.lost_of = 0
        if shard.model is None:
            require(len(self.states) <= 1, "the model is gone")
            self._turn(None, 0)
            return
        found, generation = State.of(shard.model), shard.model.generation
        if self._left is not None and found.groups:  # of WAGMA not every state was seen
            self._perhaps |= self._left[2].keys()
        if not self.states or (self._is_unseen and found.groups and found not in self.states):
            unsure = {key for key, at in self._applied.items() if at >= len(self.states)}
            self._applied = {key: at for key, at in self._applied.items() if key not in unsure}
            self._perhaps |= unsure
            self._turn(found, generation)  # nobody was told
            return
        if generation == self.generation:
            self._cut(self._index_from_told(found))
            return
        if self._left is not None and not found.groups and found not in self.states:
            self._recovered_what_was_lost(found, generation)
            return
        self._require_former(found)
        gone_back = found.version in self.restoring
        same = [(state == found, i) for i, state in enumerate(self.states) if state.values == found.values]
        index = max(same)[1] if same else self.told  # of WAGMA not every state was seen
        lost = f"version {found.version}, told was {self.states[self.told].version}"
        require(gone_back or may_lose or index >= self.told, lost)
        self._left = self.states, self.told, self._applied
        self.lost_of = self.generation if index < self.told and not gone_back else 0
        unsure = {key for key, at in self._applied.items() if at > index}
        self._applied = {key: at for key, at in self._applied.items() if at <= index}
        self._perhaps |= unsure if gone_back or not same else set()
        self._turn(found, generation)

    def _recovered_what_was_lost(self, found, generation):
        """A standby serves in the place of a shard that had lost something: all that was told before is here."""
        states, told, applied = self._left
        same = [i for i, state in enumerate(states) if state == found]
        require(bool(same), f"version {found.version} never was")
        require(same[-1] >= told, f"version {found.version} of the standby, told was {states[told].version}")
        self._applied = {key: at for key, at in applied.items() if at <= same[-1]}
        self._left = None
        self._turn(found, generation)

    def _index_from_told(self, found):
        """Find a recovered state; the death of the worker that a round waits for may have closed the round."""
        for index in reversed(range(self.told, len(self.states))):
            state = self.states[index]
            if state == found:
                return index
            if state.contributors and state.closed() == found:
                del self.states[index + 1 :]
                self._add(found)
                return index + 1
        raise BrokenPromiseError(f"version {found.version}, told was {self.states[self.told].version}")

    def _require_former(self, found):
        was = any(s.values == found.values and s.version == found.version for s in self.states) or bool(found.groups)
        require(was, f"version {found.version} under a new generation never was")

    def _cut(self, index):
        del self.states[index + 1 :]
        self._applied = {key: at for key, at in self._applied.items() if at <= index}

    def _turn(self, found, generation):
        """Begin another history; what is known of pushes stays."""
        self.states, self.told, self.generation, self._is_unseen = [], 0, generation, False
        self._applied = dict.fromkeys(self._applied, 0)
        if found is not None:
            self._add(found)

    def _add(self, state):
        self.states.append(state)
        self.values[self.generation, state.version] = state.values


def require(holds, what):
    if not holds:
        raise BrokenPromiseError(what)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def floats(data):
    return torch.frombuffer(bytearray(data), dtype=torch.float32).clone()


def added(data, entries, sign):
    values = floats(data)
    if entries is not None:
        offsets = slice(None) if entries.offsets is None else entries.offsets
        values[offsets] += sign * entries.values
    return values


def assigned(data, entries):
    words = torch.frombuffer(bytearray(data), dtype=torch.int16).clone()
    if entries is not None:
        words[slice(None) if entries.offsets is None else entries.offsets] = entries.values
    return bits(words)
