"""Independent beliefs about the tokens of a hole, conditioned on a constraint: exact, by dynamic programming.

The tokens x of a hole have the distribution p(x) = prod_i b_i(x_i) / Z over the sequences that the automaton accepts.
A backward pass adds up the beliefs in what comes after a place, by automaton state. Under p(x) the states are a Markov
chain, whose transition probabilities follow from these masses; a forward pass follows it from the first mask on.
Beliefs are first added up over classes of tokens, so both passes cost the transitions between states for each place.

Beliefs stay on their device; what is known of classes is on the host, in double precision. No text that is accepted is
lost to underflow: where the range of doubles does not suffice for the masses, they are added up as logarithms.

Where only the first places of a hole are looked at, as a model does that writes block by block, p(x) is of these places
alone: the sequences that some continuation completes.

Shapes: P places looked at, M of them masked, n of these to draw, V symbols, C classes of tokens, S states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from adlm.constraints.automaton import Ints
from adlm.constraints.holes import Edges, Floats, HoleAutomaton

Categorical = Callable[[Tensor, Tensor], Tensor]
"""(weights (n, V), uniform numbers (n,)) -> the index of each drawn symbol."""
LOWEST = -600.0
"""Log of the least product that is added up as it is; the least normal double is e^-708."""
FAR = 1e-30
"""Of the greatest belief: what floats as small add up to may have lost digits."""


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
        found = self._by_symbol()
        if (end_id := self.automaton.end_id) is not None:
            found[:, end_id] = torch.logaddexp(found[:, end_id], self._log_ended.to(found))
        return found

    @property
    def log_marginals_of_text(self) -> Tensor:
        """(M, V), the same given that the text has not ended before the mask; there it is the end token."""
        found = self._by_symbol()
        if (end_id := self.automaton.end_id) is not None:
            found[:, end_id] = torch.where(self._log_ended.to(found) >= -1e-12, 0.0, found[:, end_id])
        return found - found.logsumexp(dim=1, keepdim=True)

    def _by_symbol(self) -> Tensor:
        """(M, V), log p(x_i) of symbols before the end and of the end token."""
        classes, of_class = self._classes, self.class_beliefs[self.masked - self._first]
        ratio = self._log_class_marginals - np.where(np.isneginf(of_class), 0.0, of_class)
        weights = torch.from_numpy(ratio).to(self.log_beliefs.device)[:, classes.clamp(min=0)]
        return (self.log_beliefs.double() + weights).masked_fill(classes < 0, -torch.inf)

    @property
    def _log_ended(self) -> Tensor:
        """(M,), the log probability that the text has ended before each mask."""
        return torch.from_numpy(self._log_class_marginals[:, self.automaton.end_class + 1])

    @cached_property
    def _log_class_marginals(self) -> Floats:
        """(M, C), the log probability that the token at each mask is of each class."""
        state, found, masks = self._start, [], {*self.masked.tolist()}
        for place in range(self._first, int(self.masked[-1]) + 1):
            edges, chances = self._chances(place, state)
            if place in masks:
                found.append(summed(edges.number, chances, self.automaton.num_classes))
            state = summed(edges.target, chances, edges.num_states)
        with np.errstate(divide="ignore"):
            return np.log(np.stack(found))

    def draw(self, drawn: Tensor, uniforms: Tensor, categorical: Categorical) -> tuple[Tensor, Tensor]:
        """Tokens at the masks where `drawn` (M,) is True, drawn jointly, one from each uniform number, in order, and
        the probability of each given those before it: their product is that of all.

        The others are summed over, so this is the same as a draw of the whole hole of which some tokens are kept. The
        automaton only sees classes, so these are drawn first, and a token in each class then, all at once.
        """
        state, numbers, left, of_classes = self._start, list[int](), list[float](), list[float]()
        places = self.masked[drawn.numpy()].tolist()
        uniform_at = dict(zip(places, uniforms.tolist(), strict=True))
        for place in range(self._first, max(places, default=-1) + 1):
            edges, chances = self._chances(place, state)
            if place in uniform_at:
                weights = summed(edges.number, chances, self.automaton.num_classes)
                number, rest = draw_class(weights, uniform_at[place])
                chances = np.where(edges.number == number, chances, 0.0) / weights[number]
                numbers.append(number)
                left.append(rest)
                of_classes.append(float(weights[number] / weights.sum()))
            state = summed(edges.target, chances, edges.num_states)
        log_beliefs = self._within(numbers, drawn)
        weights_in_class = (log_beliefs - log_beliefs.amax(dim=1, keepdim=True)).exp()
        tokens = categorical(weights_in_class, torch.tensor(left, dtype=torch.float64, device=log_beliefs.device))
        shares = weights_in_class.gather(1, tokens[:, None])[:, 0] / weights_in_class.sum(dim=1)
        return tokens, torch.tensor(of_classes, dtype=torch.float64, device=tokens.device) * shares

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
        maxima[self.masked - self._first] = class_peaks(self.automaton, self.log_beliefs)
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
        """(S,), the chances of the states before the first mask."""
        start = np.zeros(self.automaton.alive.shape[1])
        start[self.state] = 1.0
        return start

    @property
    def _last(self) -> Floats:
        """(S,), log masses of the states after the last place looked at: all that some continuation completes."""
        return np.where(self.automaton.alive[self._first + len(self.class_beliefs)], 0.0, -np.inf)

    @cached_property
    def _backward(self) -> Floats:
        """(P - f + 1, S), of each state before each place, and after the last, the log mass of what follows."""
        edges = [self.automaton.edges(self._first + number) for number in range(len(self.class_beliefs))]
        found = log_masses(edges, self.class_beliefs, self._last)
        return plain_log_masses(edges, self.class_beliefs, self._last) if found is None else found

    def _chances(self, place: int, state: Floats) -> tuple[Edges, Floats]:
        """The transitions of a place, and the probability of each given those (S,) of the states before it."""
        edges, number = self.automaton.edges(place), place - self._first
        before, after = self._backward[number], self._backward[number + 1]
        before = np.where(np.isneginf(before), 0.0, before)  # nothing follows: the chance is 0
        log_chances = self.class_beliefs[number][edges.number] + after[edges.target] - before[edges.source]
        return edges, state[edges.source] * np.exp(log_chances)


def summed(groups: Ints, values: Floats, size: int) -> Floats:
    """(size,), the sum of the values in each group."""
    return np.bincount(groups, values, size).astype(np.float64, copy=False)


def log_masses(edges: Sequence[Edges], class_beliefs: Floats, last: Floats) -> Floats | None:
    """`plain_log_masses` by sums of products, scaled place by place; None where a double may be too small for them."""
    peaks = class_beliefs.max(axis=1)
    with np.errstate(invalid="ignore"):  # a place without any chance
        log_chances = class_beliefs - peaks[:, None]
    lowest = np.where(np.isneginf(log_chances), 0.0, log_chances).min(axis=1)
    if not (lowest > LOWEST).all():
        return None
    chances, scale, mass = np.exp(log_chances), 0.0, np.exp(last)
    masses, scales = [mass], [scale]
    for each, row, peak, low in zip(reversed(edges), chances[::-1], peaks[::-1], lowest[::-1], strict=True):
        if low + np.log(mass[mass > 0].min()) < LOWEST:
            return None
        mass = summed(each.source, row[each.number] * mass[each.target], each.num_states)
        if not (most := mass.max()) > 0:
            return None
        mass /= most
        scale += np.log(most) + peak
        masses.append(mass)
        scales.append(scale)
    with np.errstate(divide="ignore"):
        found: Floats = np.log(np.stack(masses[::-1])) + np.array(scales[::-1])[:, None]
    return found


def plain_log_masses(edges: Sequence[Edges], class_beliefs: Floats, last: Floats) -> Floats:
    """(n + 1, S), the log of the summed beliefs (n, C) in what follows each state before each of n places, and after
    the last one, where `last` (S,) is given."""
    found = [last]
    for each, beliefs in zip(reversed(edges), class_beliefs[::-1], strict=True):
        found.append(each.by_source.logsumexp(beliefs[each.number] + found[-1][each.target]))
    return np.stack(found[::-1])


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
    found[masked - first] = class_sums(automaton, log_beliefs)
    if automaton.end_id is not None:
        found[masked - first, automaton.end_class + 1] = 0.0
    return Conditioned(automaton, log_beliefs, masked, found, automaton.walk(tokens[:first]))


def class_sums(automaton: HoleAutomaton, log_beliefs: Tensor) -> Floats:
    """(M, C), the log of the sum of the beliefs (M, V) in each class, on the host.

    On a CPU, columns are sorted by class and added up in runs: several times faster than scattered sums. Beliefs are
    compared with the greatest of their row; rows where a class is far below it are added up again.
    """
    if log_beliefs.device.type != "cpu":
        return scattered_class_sums(automaton, log_beliefs)
    columns, runs = automaton.columns
    found = np.full((len(log_beliefs), automaton.num_classes), -np.inf)
    peaks = log_beliefs.amax(dim=1, keepdim=True)
    chances = (log_beliefs - peaks).exp_().index_select(1, columns)
    sums = np.add.reduceat(chances.numpy(), runs.starts, axis=1, dtype=np.float64)
    far = sums.min(axis=1) < FAR
    found[:, runs.index] = np.log(np.where(far[:, None], 1.0, sums)) + peaks.numpy()
    if far.any():
        found[far] = scattered_class_sums(automaton, log_beliefs[torch.from_numpy(far)])
    return found


def class_peaks(automaton: HoleAutomaton, log_beliefs: Tensor) -> Floats:
    """(M, C), the greatest of the log beliefs (M, V) in each class, on the host."""
    index, empty = _scattering(automaton, log_beliefs)
    return empty.scatter_reduce(1, index, log_beliefs.double(), "amax")[:, :-1].cpu().numpy()


def scattered_class_sums(automaton: HoleAutomaton, log_beliefs: Tensor) -> Floats:
    """`class_sums` where beliefs are on another device, or far from each other."""
    index, empty = _scattering(automaton, log_beliefs)
    peaks = empty.scatter_reduce(1, index, log_beliefs.double(), "amax")
    finite = torch.where(peaks == -torch.inf, 0.0, peaks)
    shares = (log_beliefs.double() - finite.gather(1, index)).exp()
    sums = torch.zeros_like(peaks).scatter_add(1, index, shares).log() + finite
    return sums[:, :-1].cpu().numpy()


def _scattering(automaton: HoleAutomaton, log_beliefs: Tensor) -> tuple[Tensor, Tensor]:
    """(M, V), the class of each symbol, C for those that are never accepted; and (M, C + 1), log sums of nothing."""
    classes = symbol_classes(automaton, log_beliefs)
    index = torch.where(classes < 0, automaton.num_classes, classes).expand(len(log_beliefs), -1)
    return index, log_beliefs.new_full((len(log_beliefs), automaton.num_classes + 1), -torch.inf, dtype=torch.float64)


def symbol_classes(automaton: HoleAutomaton, like: Tensor) -> Tensor:
    """(V,), the class of every symbol, or -1, on the device of beliefs (M, V)."""
    return torch.from_numpy(automaton.classes(like.shape[1])).to(like.device)
