"""Samples into prefix trees: every shared token is computed once, and the cost is counted beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from atma_eval.tasks.base import Sample


@dataclass(eq=False)
class Node:
    """An edge of the tree and what lies below: tokens ``[start, start + len(tokens))`` of every sample that passes."""

    start: int
    tokens: np.ndarray
    ends: list[Sample] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(eq=False)
class PrefixTree:
    """The samples of one group merged by their common prefixes. The root has no tokens."""

    root: Node = field(default_factory=lambda: Node(0, np.empty(0, dtype=np.int32)))

    @classmethod
    def merge(cls, samples: Iterable[Sample]) -> PrefixTree:
        tree = cls()
        for sample in samples:
            tree._insert(sample)
        tree._prepare()
        return tree

    def _insert(self, sample: Sample) -> None:
        node, position, tokens = self.root, 0, sample.tokens
        while position < len(tokens):
            child = next((c for c in node.children if c.tokens[0] == tokens[position]), None)
            if child is None:
                child = Node(position, tokens[position:])
                node.children.append(child)
            else:
                overlap = min(len(child.tokens), len(tokens) - position)
                differs = child.tokens[:overlap] != tokens[position : position + overlap]
                common = int(differs.argmax()) if differs.any() else overlap
                if common < len(child.tokens):
                    self._split(child, common)
            position, node = child.stop, child
        node.ends.append(sample)

    @staticmethod
    def _split(node: Node, at: int) -> None:
        below = Node(node.start + at, node.tokens[at:], node.ends, node.children)
        node.tokens, node.ends, node.children = node.tokens[:at], [], [below]

    def _prepare(self) -> None:
        """Order children so that the longest branch comes last: it can take its parent's state over without a fork."""
        self._nodes = [self.root]
        for node in self._nodes:
            self._nodes.extend(node.children)
        self._height = {id(node): node.stop for node in self._nodes}
        self._spans: dict[int, list[tuple[int, int]]] = {id(node): [s.span for s in node.ends] for node in self._nodes}
        for node in reversed(self._nodes):
            for child in node.children:
                self._height[id(node)] = max(self._height[id(node)], self._height[id(child)])
                self._spans[id(node)] += [s for s in self._spans[id(child)] if s[0] < node.stop]
            node.children.sort(key=lambda child: self._height[id(child)])

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self._height[id(self.root)]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute: each edge once."""
        return sum(len(node.tokens) for node in self._nodes)

    def wanted(self, node: Node) -> np.ndarray:
        """Which tokens of an edge are targets of a sample that crosses it, boolean ``[len(tokens)]``."""
        mask = np.zeros(len(node.tokens), dtype=bool)
        for start, stop in self._spans[id(node)]:
            mask[max(start - node.start, 0) : max(stop - node.start, 0)] = True
        return mask

    def samples(self, node: Node) -> Iterator[Sample]:
        """All samples that end in a node or below it."""
        pending = [node]
        while pending:
            at = pending.pop()
            yield from at.ends
            pending.extend(reversed(at.children))


@dataclass
class LengthAccount:
    """Samples of one length: of the task itself, of its controls, and the tokens of their sequences."""

    num_samples: int = 0
    num_controls: int = 0
    shortest: int = 0
    longest: int = 0


@dataclass
class Account:
    """Tokens of a plan against a sweep in which every sample is its own full sequence."""

    num_samples: int = 0
    computed_tokens: int = 0
    naive_tokens: int = 0
    longest: int = 0
    by_length: dict[int, LengthAccount] = field(default_factory=dict)

    def add(self, samples: list[Sample]) -> None:
        tree = PrefixTree.merge(samples)
        self.num_samples += len(samples)
        self.computed_tokens += tree.num_tokens
        self.naive_tokens += sum(len(sample.tokens) for sample in samples)
        self.longest = max(self.longest, tree.longest)
        for sample in samples:
            count = len(sample.tokens)
            at = self.by_length.setdefault(sample.length, LengthAccount(shortest=count))
            at.num_samples += sample.control == "none"
            at.num_controls += sample.control != "none"
            at.shortest, at.longest = min(at.shortest, count), max(at.longest, count)
