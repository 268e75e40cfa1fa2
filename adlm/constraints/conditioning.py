"""Independent beliefs about the tokens of a hole, conditioned on a constraint: exact, by dynamic programming.

The tokens x of a hole have the distribution p(x) = prod_i b_i(x_i) / Z over the sequences that the automaton accepts.
A forward pass adds up the beliefs in what comes before a place, a backward pass in what comes after it, by automaton
state. Beliefs are first added up over classes of tokens, so a pass costs the transitions between states for each place.

Beliefs stay on their device; what is known of classes is on the host. All of it is in log space and double precision:
a text that is accepted is never lost to underflow.

Where only the first places of a hole are looked at, as a model does that writes block by block, p(x) is of these places
alone: the sequences that some continuation completes.

Shapes: P places looked at, M of them masked, n of these to draw, V symbols, C classes of tokens, S states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from adlm.constraints.automaton import Ints
from adlm.constraints.holes import Floats, HoleAutomaton

Categorical = Callable[[Tensor, Tensor], Tensor]
"""(weights (n, V), uniform numbers (n,)) -> the index of each drawn symbol."""


def draw_class(weights: Floats, uniform: float) -> tuple[int, float]:
    """The index that a uniform number draws from weights, and a uniform number for what is drawn next."""
    ends = weights.cumsum()
    index = min(int(np.searchsorted(ends, uniform * ends[-1], side="right")), int(weights.nonzero()[0][-1]))
    left = (uniform * ends[-1] - (ends[index] - weights[index])) / weights[index]
    return index, min(max(left, 0.0), 1 - 2**-53)


@dataclass(frozen=True, eq=False)
class Conditioned:
    """The distribution of the tokens at the masks of a hole."""

    automaton: HoleAutomaton
    log_beliefs: Tensor
    """(M, V), at the masks; not necessarily normalised."""
    masked: Ints
    """(M,), their places."""
    class_beliefs: Floats
    """(P - f, C), the log of the beliefs in each class, from the first mask on, which has place f; of a visible token,
    0 for its class alone."""
    state: int
    """Before the first mask."""

    @property
    def _first(self) -> int:
        return int(self.masked[0])

    @property
    def log_mass(self) -> float:
        """log Z, the log probability that independent draws from the beliefs satisfy the constraint."""
        return float(self._backward[0][self.state])

    @property
    def log_marginals(self) -> Tensor:
        """(M, V), log p(x_i) at each mask, normalised; -inf at symbols that it cannot have."""
        found = self._by_symbol(self._log_surroundings - self.log_mass)
        if (end_id := self.automaton.end_id) is not None:
            found[:, end_id] = torch.logaddexp(found[:, end_id], self._log_ended.to(found))
        return found

    @property
    def log_marginals_of_text(self) -> Tensor:
        """(M, V), the same given that the text has not ended before the mask; there it is the end token."""
        found = self._by_symbol(self._log_surroundings)
        if (end_id := self.automaton.end_id) is not None:
            found[:, end_id] = torch.where(self._log_ended.to(found) >= -1e-12, 0.0, found[:, end_id])
        return found - found.logsumexp(dim=1, keepdim=True)

    def _by_symbol(self, log_weights: Floats) -> Tensor:
        """(M, V), beliefs times weights (M, C) of classes."""
        classes = self._classes
        weights = torch.from_numpy(log_weights).to(self.log_beliefs.device)[:, classes.clamp(min=0)]
        return (self.log_beliefs.double() + weights).masked_fill(classes < 0, -torch.inf)

    @property
    def _log_ended(self) -> Tensor:
        """(M,), the log probability that the text has ended before each mask."""
        ended = self._log_surroundings[:, self.automaton.end_class + 1] - self.log_mass
        return torch.from_numpy(ended)

    @cached_property
    def _log_surroundings(self) -> Floats:
        """(M, C), the log mass of all that surrounds a token of each class at each mask."""
        state, found, masks = self._start, [], {*self.masked.tolist()}
        for place in range(self._first, int(self.masked[-1]) + 1):
            if place in masks:
                found.append(self._class_weights(place, state))
            state = self._after(place, state)
        return np.stack(found)

    def draw(self, drawn: Tensor, uniforms: Tensor, categorical: Categorical) -> tuple[Tensor, Tensor]:
        """Tokens at the masks where `drawn` (M,) is True, drawn jointly, one from each uniform number, in order, and
        the probability of each given those before it: their product is that of all.

        The others are summed over, so this is the same as a draw of the whole hole of which some tokens are kept. The
        automaton only sees classes, so these are drawn first, and a token in each class then, all at once.
        """
        state, place, numbers, left, chances = self._start, self._first, list[int](), list[float](), list[float]()
        for where, uniform in zip(self.masked[drawn.numpy()].tolist(), uniforms.tolist(), strict=True):
            for between in range(place, where):
                state = self._after(between, state)
            log_weights = self.class_beliefs[where - self._first] + self._class_weights(where, state)
            weights = np.exp(log_weights - log_weights.max())
            number, rest = draw_class(weights, uniform)
            state = self._after(where, state, number)
            state, place = state - state.max(), where + 1
            numbers.append(number)
            left.append(rest)
            chances.append(float(weights[number] / weights.sum()))
        log_beliefs = self._within(numbers, drawn)
        weights_in_class = (log_beliefs - log_beliefs.amax(dim=1, keepdim=True)).exp()
        tokens = categorical(weights_in_class, torch.tensor(left, dtype=torch.float64, device=log_beliefs.device))
        shares = weights_in_class.gather(1, tokens[:, None])[:, 0] / weights_in_class.sum(dim=1)
        return tokens, torch.tensor(chances, dtype=torch.float64, device=tokens.device) * shares

    def _within(self, numbers: list[int], where: Tensor) -> Tensor:
        """(n, V), the log beliefs at some masks in the symbols of one class each, -inf in others.

        What follows an end token is one more end token.
        """
        chosen, log_beliefs = torch.tensor(numbers), self.log_beliefs[where.to(self.log_beliefs.device)].double()
        after_end = chosen > self.automaton.end_class if self.automaton.end_id is not None else chosen < 0
        chosen = torch.where(after_end, self.automaton.end_class, chosen).to(log_beliefs.device)
        log_beliefs = torch.where(after_end.to(log_beliefs.device)[:, None], 0.0, log_beliefs)
        return log_beliefs.masked_fill(self._classes != chosen[:, None], -torch.inf)

    @cached_property
    def likeliest(self) -> Tensor:
        """(M,), the sequence with the greatest p(x), by Viterbi's algorithm."""
        maxima = self.class_beliefs.copy()
        maxima[self.masked - self._first] = class_sums(self.automaton, self.log_beliefs)[1]
        edges = [self.automaton.edges(self._first + number) for number in range(len(maxima))]
        best = [self._last]
        for each, values in zip(reversed(edges), reversed(maxima), strict=True):
            best.append(each.by_source.max(values[each.number] + best[-1][each.target]))
        best.reverse()
        state, numbers = self.state, list[int]()
        for each, values, after in zip(edges, maxima, best[1:], strict=True):
            here = (each.source == state).nonzero()[0]
            edge = here[(values[each.number[here]] + after[each.target[here]]).argmax()]
            state = int(each.target[edge])
            numbers.append(int(each.number[edge]))
        at_masks = [numbers[place - self._first] for place in self.masked.tolist()]
        return self._within(at_masks, torch.ones(len(self.masked), dtype=torch.bool)).argmax(dim=1)

    @cached_property
    def _classes(self) -> Tensor:
        """(V,), the class of every symbol, or -1."""
        return symbol_classes(self.automaton, self.log_beliefs)

    @property
    def _start(self) -> Floats:
        """(S,), log weights of the states before the first mask."""
        start = np.full(self.automaton.alive.shape[1], -np.inf)
        start[self.state] = 0.0
        return start

    @property
    def _last(self) -> Floats:
        """(S,), log weights of the states after the last place looked at: all that some continuation completes."""
        return np.where(self.automaton.alive[self._first + len(self.class_beliefs)], 0.0, -np.inf)

    @cached_property
    def _backward(self) -> list[Floats]:
        """(S,) before each place from the first mask on, and after the last one: the log mass of what follows."""
        found = [self._last]
        for number in range(len(self.class_beliefs) - 1, -1, -1):
            edges, beliefs = self.automaton.edges(self._first + number), self.class_beliefs[number]
            found.append(edges.by_source.logsumexp(beliefs[edges.number] + found[-1][edges.target]))
        return found[::-1]

    def _class_weights(self, place: int, state: Floats) -> Floats:
        """(C,), the log mass of all that surrounds a token of each class, given log weights (S,) of the states."""
        edges = self.automaton.edges(place)
        after = self._backward[place + 1 - self._first]
        return edges.by_number.logsumexp(state[edges.source] + after[edges.target])

    def _after(self, place: int, state: Floats, number: int | None = None) -> Floats:
        """(S,), the log weights of the states after a place, whose token is of a class if that is known."""
        edges, beliefs = self.automaton.edges(place), self.class_beliefs[place - self._first]
        if number is not None:
            beliefs = np.where(np.arange(len(beliefs)) == number, 0.0, -np.inf)
        return edges.by_target.logsumexp(state[edges.source] + beliefs[edges.number])


def condition(log_beliefs: Tensor, automaton: HoleAutomaton, ids: Tensor, mask_id: int) -> Conditioned:
    """The tokens at the masks of a hole, from beliefs (M, V) there, given that the hole satisfies its constraint.

    `ids` (P,), on the host, are those of its first places, with a mask at least. Visible tokens stay as they are.
    """
    masked, tokens = (ids == mask_id).nonzero()[:, 0].numpy(), ids.tolist()
    first = int(masked[0])
    found = np.full((len(tokens) - first, automaton.num_classes), -np.inf)
    for place, index in enumerate(tokens[first:]):
        if index == automaton.end_id:
            found[place, automaton.end_class :] = 0.0
        elif index != mask_id:
            found[place, automaton.tokens.class_of_symbol(index)] = 0.0
    found[masked - first] = class_sums(automaton, log_beliefs)[0]
    if automaton.end_id is not None:
        found[masked - first, automaton.end_class + 1] = 0.0
    return Conditioned(automaton, log_beliefs, masked, found, automaton.walk(tokens[:first]))


def class_sums(automaton: HoleAutomaton, log_beliefs: Tensor) -> tuple[Floats, Floats]:
    """(M, C), the log of the sum of the beliefs (M, V) in each class, and of the greatest of them; on the host.

    On a CPU, columns are sorted by class and reduced in runs: several times faster than scattered sums.
    """
    if log_beliefs.device.type != "cpu":
        return scattered_class_sums(automaton, log_beliefs)
    columns, runs = automaton.columns
    values = log_beliefs[:, columns].numpy()
    peaks = np.maximum.reduceat(values, runs.starts, axis=1)
    finite = np.where(np.isneginf(peaks), 0, peaks)
    counts = np.diff(runs.starts, append=values.shape[1])
    sums = np.add.reduceat(np.exp(values - finite.repeat(counts, axis=1)), runs.starts, axis=1, dtype=np.float64)
    found = np.full((2, len(values), automaton.num_classes), -np.inf)
    with np.errstate(divide="ignore"):
        found[0][:, runs.index] = np.log(sums) + finite
    found[1][:, runs.index] = peaks
    return found[0], found[1]


def scattered_class_sums(automaton: HoleAutomaton, log_beliefs: Tensor) -> tuple[Floats, Floats]:
    """The same where beliefs are on another device."""
    classes = symbol_classes(automaton, log_beliefs)
    index = torch.where(classes < 0, automaton.num_classes, classes).expand(len(log_beliefs), -1)
    empty = log_beliefs.new_full((len(log_beliefs), automaton.num_classes + 1), -torch.inf, dtype=torch.float64)
    peaks = empty.scatter_reduce(1, index, log_beliefs.double(), "amax")
    finite = torch.where(peaks == -torch.inf, 0.0, peaks)
    shares = (log_beliefs.double() - finite.gather(1, index)).exp()
    sums = torch.zeros_like(peaks).scatter_add(1, index, shares).log() + finite
    return sums[:, :-1].cpu().numpy(), peaks[:, :-1].cpu().numpy()


def symbol_classes(automaton: HoleAutomaton, like: Tensor) -> Tensor:
    """(V,), the class of every symbol, or -1, on the device of beliefs (M, V)."""
    return torch.from_numpy(automaton.classes(like.shape[1])).to(like.device)
