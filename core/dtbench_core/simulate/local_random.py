"""The state of every random generator on each simulated rank.

In a real world each rank has its own generator; this process has one for all of them. Every rank therefore has a
saved state, which the generator takes while that rank draws. Between draws it holds the state of the first rank.

If other code changes the generator's state meanwhile, for example with `manual_seed`, every rank takes that state:
the program runs once, for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

State = torch.Tensor
States = dict[torch.Generator, State]


def default_generators() -> list[torch.Generator]:
    """Returns the generators that ops without `generator=` may draw from."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def set_generator_states(states: States) -> None:
    for generator, state in states.items():
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)


class RankStates:
    """The states of all generators on `ranks`. Every rank starts from the generator's own state."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = tuple(sorted(ranks))
        # Only for generators whose state differs between ranks; otherwise all ranks share the generator's own state.
        self._states: dict[torch.Generator, dict[int, State]] = {}

    def reset(self, generator: torch.Generator) -> None:
        """Gives every rank the generator's present state."""
        self._states.pop(generator, None)

    def reset_all(self) -> None:
        for generator in default_generators():
            self.reset(generator)

    def states_of(self, generator: torch.Generator) -> dict[int, State]:
        """Returns rank -> state of `generator`."""
        states, present = self._states.get(generator), generator.get_state()
        if states is not None and torch.equal(present, states[self._ranks[0]]):
            return dict(states)
        self._states.pop(generator, None)
        return dict.fromkeys(self._ranks, present)

    def set(self, generator: torch.Generator, states: Mapping[int, State]) -> None:
        self.finish({generator: {**self.states_of(generator), **states}})

    def finish(self, states: dict[torch.Generator, dict[int, State]]) -> None:
        """Saves the states in which the ranks ended.

        Args:
            states: generator -> rank -> state.
        """
        for generator, rank_states in states.items():
            first = rank_states[self._ranks[0]]
            if all(state is first or torch.equal(state, first) for state in rank_states.values()):
                self._states.pop(generator, None)
            else:
                self._states[generator] = rank_states
            set_generator_states({generator: first})

    def start(self, generators: Iterable[torch.Generator]) -> dict[torch.Generator, dict[int, State]]:
        """Returns generator -> rank -> the state from which the rank draws."""
        return {g: self.states_of(g) for g in generators}

    @contextmanager
    def as_rank(self, rank: int, states: dict[torch.Generator, dict[int, State]]) -> Iterator[None]:
        """Context in which the generators draw as `rank`; their final states are stored in `states`."""
        set_generator_states({generator: rank_states[rank] for generator, rank_states in states.items()})
        try:
            yield
        finally:
            for generator, rank_states in states.items():
                rank_states[rank] = generator.get_state()
