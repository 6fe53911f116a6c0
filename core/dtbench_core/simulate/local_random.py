"""A state of every random generator per simulated rank.

The process has one generator where each rank of a real world has its own. Here every rank has a state,
and the generator takes a rank's state while the rank draws. Between draws it holds the first rank's.
A generator whose state somebody else has changed meanwhile, say by `manual_seed`, was changed on every
rank: the program is run once, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

State = torch.Tensor
States = dict[torch.Generator, State]


def default_generators() -> list[torch.Generator]:
    """Those that ops without `generator=` may draw from."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def set_states(states: States) -> None:
    for generator, state in states.items():
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)


class RankStates:
    """The states of all generators on `ranks`, which start from what the generators hold when first met."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = tuple(sorted(ranks))
        # Only of generators that ranks hold in different states: else the generator's own is everybody's.
        self._states: dict[torch.Generator, dict[int, State]] = {}

    def reset(self, generator: torch.Generator) -> None:
        """Every rank takes the generator's present state."""
        self._states.pop(generator, None)

    def reset_all(self) -> None:
        for generator in default_generators():
            self.reset(generator)

    def of(self, generator: torch.Generator) -> dict[int, State]:
        states, now = self._states.get(generator), generator.get_state()
        if states is not None and torch.equal(now, states[self._ranks[0]]):
            return dict(states)
        self._states.pop(generator, None)
        return dict.fromkeys(self._ranks, now)

    def set(self, generator: torch.Generator, states: Mapping[int, State]) -> None:
        self.finish({generator: {**self.of(generator), **states}})

    def finish(self, states: dict[torch.Generator, dict[int, State]]) -> None:
        """Keeps the states in which the ranks ended."""
        for generator, of_rank in states.items():
            first = of_rank[self._ranks[0]]
            if all(state is first or torch.equal(state, first) for state in of_rank.values()):
                self._states.pop(generator, None)
            else:
                self._states[generator] = of_rank
            set_states({generator: first})

    def start(self, generators: Iterable[torch.Generator]) -> dict[torch.Generator, dict[int, State]]:
        """generator -> rank -> the state from which the rank draws."""
        return {g: self.of(g) for g in generators}

    @contextmanager
    def as_rank(self, rank: int, states: dict[torch.Generator, dict[int, State]]) -> Iterator[None]:
        """The generators draw as `rank`'s; their states at the end go into `states`."""
        set_states({generator: of_rank[rank] for generator, of_rank in states.items()})
        try:
            yield
        finally:
            for generator, of_rank in states.items():
                of_rank[rank] = generator.get_state()
